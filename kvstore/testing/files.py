"""File contents of a simulation: sparse blocks in memory, or a real descriptor behind it."""

from __future__ import annotations

import os
from typing import final

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 4096
Bytes = npt.NDArray[np.uint8]


@final
class SimFile:
    """A sparse file. With ``fd`` >= 0 the bytes live in that file, so that everybody who opens
    it, a second store after a simulated crash too, sees what the engine wrote.

    Ownership: borrows the descriptor.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        self._blocks: dict[int, Bytes] = {}

    def read(self, offset: int, length: int) -> Bytes:
        """Return (length,) uint8; what was never written reads as zeros."""
        target = np.zeros(length, np.uint8)
        if self.fd >= 0:
            data = os.pread(self.fd, length, offset)
            target[: len(data)] = np.frombuffer(data, np.uint8)
            return target
        for block, start, size, at in _spans(offset, length):
            held = self._blocks.get(block)
            if held is not None:
                target[at : at + size] = held[start : start + size]
        return target

    def write(self, offset: int, data: Bytes) -> None:
        """Store ``data`` at ``offset``."""
        if self.fd >= 0:
            written = os.pwrite(self.fd, data.tobytes(), offset)
            assert written == data.size
            return
        for block, start, size, at in _spans(offset, data.size):
            held = self._blocks.get(block)
            if held is None:
                held = self._blocks[block] = np.zeros(BLOCK_BYTES, np.uint8)
            held[start : start + size] = data[at : at + size]


def _spans(offset: int, length: int) -> list[tuple[int, int, int, int]]:
    """Cut a range at block borders: (block, start in block, size, position in the range)."""
    spans, at = [], 0
    while at < length:
        block, start = divmod(offset + at, BLOCK_BYTES)
        size = min(BLOCK_BYTES - start, length - at)
        spans.append((block, start, size, at))
        at += size
    return spans
