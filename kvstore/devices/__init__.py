"""Devices: the CPU reference and CUDA behind one protocol."""
