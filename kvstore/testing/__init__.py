"""The public test kit: virtual time, a simulated engine and device, a reference model."""
