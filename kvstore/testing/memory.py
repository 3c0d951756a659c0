"""Views of memory by address, as native code sees it."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def memory_view(address: int, length: int) -> Bytes:
    """Return (length,) uint8 over the memory at ``address``; the caller keeps it mapped."""
    if length == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class SimMemory:
    """Page-aligned anonymous memory for tests: an arena without huge pages or threads."""

    def __init__(self, length: int, *, alignment: int = 4096) -> None:
        self._buffer = np.zeros(length + alignment, np.uint8)
        start = -self._buffer.ctypes.data % alignment
        self.array: Bytes = self._buffer[start : start + length]
        self.address = int(self.array.ctypes.data)
        self.length = length

    def view(self, offset: int, length: int) -> Bytes:
        """Return (length,) uint8 at ``offset``."""
        assert offset >= 0
        assert offset + length <= self.length
        return self.array[offset : offset + length]
