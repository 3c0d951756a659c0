"""Devices: the protocol, the CPU reference, and CUDA, which is imported only when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.devices.base import Device
from kvstore.devices.cpu import CpuDevice

if TYPE_CHECKING:
    from kvstore._uring.base import GateWords
    from kvstore.config import DeviceTierConfig


def create_device(config: DeviceTierConfig, gate_words: GateWords | None) -> Device:
    """Return the device a configuration names; it is running when this returns.

    Raises: UnsupportedError: no driver, no such GPU, or torch is missing where it is needed.
    """
    if config.device == "cpu":
        return CpuDevice(gate_words)
    from kvstore.devices.cuda import open_cuda_device

    return open_cuda_device(config.device, gate_words)
