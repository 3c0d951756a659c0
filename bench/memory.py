"""Buffers of a benchmark: the engine's own arena on huge pages, or plain 4 KiB pages.

Comparisons must not mix the two: the page size alone is worth half of the bandwidth on some disks.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore._uring.native import Arena

HUGE_PAGE_BYTES = 2 << 20


class Memory(Protocol):
    """One region: its address, length, and whether huge pages carry it."""

    address: int
    length: int
    huge_pages: bool

    def view(self) -> npt.NDArray[np.uint8]:
        """Return the bytes."""
        ...

    def close(self) -> None:
        """Give the region back; nothing may be in flight."""
        ...


class HugeMemory:
    """An arena as the store uses it (INV-138)."""

    def __init__(self, length: int) -> None:
        self._arena = Arena(-(-length // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        self.address = self._arena.address
        self.length = self._arena.length
        self.huge_pages = bool(self._arena.huge_pages)

    def view(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the arena."""
        return np.frombuffer(self._arena.view(0, self.length), dtype=np.uint8)

    def close(self) -> None:
        """Unmap."""
        self._arena.close()


class SmallMemory:
    """Anonymous memory that the kernel is told to keep on 4 KiB pages."""

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, -(-length // 4096) * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_NOHUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):
                self._map.madvise(getattr(mmap, advice))
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._bytes[::4096] = 0  # touched here, not inside the measured window
        self.address = int(self._bytes.ctypes.data)
        self.length = len(self._bytes)
        self.huge_pages = False

    def view(self) -> npt.NDArray[np.uint8]:
        """Return the bytes."""
        return self._bytes

    def close(self) -> None:
        """Forget the region; it is unmapped with its last view."""
        self._bytes = np.empty(0, np.uint8)


def open_memory(length: int, kind: str) -> Memory:
    """Return memory of ``kind`` (auto, huge, small) filled with random bytes.

    Random, because a disk that compresses or drops zeros would otherwise measure nothing.
    """
    memory: Memory = SmallMemory(length) if kind == "small" else HugeMemory(length)
    pattern = np.random.default_rng(0x6B76).integers(0, 256, 1 << 20, dtype=np.uint8)
    view = memory.view()
    for start in range(0, len(view), len(pattern)):
        part = view[start : start + len(pattern)]
        part[:] = pattern[: len(part)]
        # neighbours must differ, or a disk that merges equal blocks would have an easy life
        words = part[: len(part) // 4096 * 4096].reshape(-1, 4096)
        words[:, :8] = (np.arange(len(words), dtype="<u8") + start).view(np.uint8).reshape(-1, 8)
    return memory
