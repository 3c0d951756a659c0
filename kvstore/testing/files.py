"""File contents of a simulation: sparse blocks in memory, and a file system made of them."""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from kvstore.errors import BusyError, CapacityError

BLOCK_BYTES = 4096
#: Descriptors of simulated files begin here, far from those of the process.
FD_FIRST = 1 << 24
Bytes = npt.NDArray[np.uint8]


@final
class SimFile:
    """A sparse file. With ``fd`` >= 0 the bytes live in that real file.

    Ownership: borrows the descriptor.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        self.size = 0
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
        self.size = max(self.size, offset + data.size)
        for block, start, size, at in _spans(offset, data.size):
            held = self._blocks.get(block)
            if held is None:
                held = self._blocks[block] = np.zeros(BLOCK_BYTES, np.uint8)
            held[start : start + size] = data[at : at + size]

    def truncate(self, size: int) -> None:
        """Set the size; what lies beyond is gone."""
        assert size % BLOCK_BYTES == 0, "simulated files are cut at blocks"
        self.size = size
        for block in [block for block in self._blocks if block * BLOCK_BYTES >= size]:
            del self._blocks[block]

    def copy(self) -> SimFile:
        """Return an independent file with the same contents."""
        twin = SimFile()
        twin.size = self.size
        twin._blocks = {block: data.copy() for block, data in self._blocks.items()}
        return twin


def _spans(offset: int, length: int) -> list[tuple[int, int, int, int]]:
    """Cut a range at block borders: (block, start in block, size, position in the range)."""
    spans, at = [], 0
    while at < length:
        block, start = divmod(offset + at, BLOCK_BYTES)
        size = min(BLOCK_BYTES - start, length - at)
        spans.append((block, start, size, at))
        at += size
    return spans


@final
@dataclass(frozen=True, slots=True)
class SimOpenFile:
    """An open file of a `SimDisk`; the descriptor means something to its engines only."""

    buffered_fd: int
    direct_fd: int = -1
    mode: str = "buffered"
    reason: str = "simulated"


@final
class SimDisk:
    """A file system in memory: what a disk tier asks of it, and what survives a crash.

    It implements ``SlotFiles`` of the disk tier. ``capacity_bytes`` bounds the sum of all files.
    `copy` is the state that a second store would find after the power went off.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.files: dict[tuple[str, str], SimFile] = {}
        self._open: dict[int, SimFile] = {}
        self._locks: set[str] = set()
        self._fd_next = itertools.count(FD_FIRST)
        self.sync_count = 0

    @property
    def open_count(self) -> int:
        """Descriptors not closed."""
        return len(self._open)

    @property
    def lock_count(self) -> int:
        """Directories still locked."""
        return len(self._locks)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, anonymous open ones included."""
        files = {id(file): file for file in (*self.files.values(), *self._open.values())}
        return sum(file.size for file in files.values())

    def find(self, fd: int) -> SimFile | None:
        """Return the file behind a descriptor of this disk."""
        return self._open.get(fd)

    def lock(self, directory: str) -> str:
        """Lock a directory. Raises: BusyError: another store has it."""
        if directory in self._locks:
            raise BusyError(f"disk_cache_path: {directory} is in use by another store")
        self._locks.add(directory)
        return directory

    def unlock(self, lock: str) -> None:
        """Give the lock up."""
        self._locks.remove(lock)

    def open(
        self,
        directory: str,
        name: str | None,
        size: int,
        direct: str,  # noqa: ARG002 - no page cache here
    ) -> SimOpenFile:
        """Open or create a file of at least ``size`` bytes; without a name it ends at close."""
        key = (directory, name or "")
        is_new = name is None or key not in self.files
        file = SimFile() if is_new else self.files[key]
        fd = next(self._fd_next)
        self._open[fd] = file
        opened = SimOpenFile(fd)
        try:
            if file.size < size:
                self.resize(opened, size)
        except CapacityError:
            del self._open[fd]
            raise
        if is_new and name is not None:
            self.files[key] = file
        return opened

    def resize(self, file: SimOpenFile, size: int) -> None:
        """Extend or cut. Raises: CapacityError: no space, the size is unchanged."""
        target = self._open[file.buffered_fd]
        self.check_room(file, size - target.size)
        target.truncate(size)

    def file_system(self, file: SimOpenFile) -> int:
        """Return a number: all files lie on this disk."""
        del file
        return 0

    def check_room(self, file: SimOpenFile, needed: int) -> None:
        """Raise CapacityError unless so many bytes are free."""
        del file
        free = None if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes
        if free is not None and needed > free:
            raise CapacityError(
                f"disk_cache_size: {needed} bytes needed, {free} free",
                needed=needed,
                available=free,
                errno=errno.ENOSPC,
            )

    def read(self, file: SimOpenFile, offset: int, length: int) -> bytes:
        """Read metadata; fewer bytes at the end of the file."""
        target = self._open[file.buffered_fd]
        return target.read(offset, max(0, min(length, target.size - offset))).tobytes()

    def write(self, file: SimOpenFile, offset: int, data: bytes) -> None:
        """Write metadata and sync it."""
        self._open[file.buffered_fd].write(offset, np.frombuffer(data, np.uint8))
        self.sync_count += 1

    def sync(self, file: SimOpenFile) -> None:
        """Count a sync: nothing is volatile here but what an engine has in flight."""
        assert file.buffered_fd in self._open
        self.sync_count += 1

    def close(self, file: SimOpenFile) -> None:
        """Close the descriptor."""
        del self._open[file.buffered_fd]

    def copy(self) -> SimDisk:
        """Return what is left after a crash at this moment: the named files, no locks."""
        twin = SimDisk(self.capacity_bytes)
        twin.files = {key: file.copy() for key, file in self.files.items()}
        return twin
