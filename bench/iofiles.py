"""The files of a run: inside the given directory and nowhere else, laid out before they are read.

A preallocated file that was never written answers reads without touching the disk, so a file is
read only when all of its extents hold data.
"""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

from kvstore.config import ALIGNMENT_BYTES

from .jobs import JobError, JobSpec

_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP_FLAG_SYNC = 0x1  # buffered data that is on its way counts
_FIEMAP_EXTENT_UNWRITTEN = 0x800
_FIEMAP_EXTENT_LAST = 0x1
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_BATCH = 256


def check_directory(directory: str) -> Path:
    """Return the directory, resolved.

    Raises: JobError: it is not a directory.
    """
    path = Path(directory)
    if not path.is_dir():
        raise JobError("--directory", f"is not a directory: {directory}")
    return path.resolve()


def clone_path(job: JobSpec, clone: int) -> Path:
    """Return the file of one clone: the shared one, or fio's ``name.clone.0``.

    Raises: JobError: it would lie outside the directory.
    """
    directory = check_directory(job.directory)
    field = "--filename" if job.filename is not None else "--name"
    name = job.filename if job.filename is not None else f"{job.name}.{clone}.0"
    if not name or "\0" in name:
        raise JobError(field, f"is not a file name: {name!r}")
    path = (directory / name).resolve()
    if path == directory or directory not in path.parents:
        raise JobError(field, f"lies outside the directory: {name}")
    if not path.parent.is_dir():
        raise JobError(field, f"its directory does not exist: {name}")
    if path.exists() and not path.is_file():
        raise JobError(field, f"is not a regular file: {name}")
    return path


def region_bytes(job: JobSpec, path: Path) -> int:
    """Return the bytes a clone works on: ``size``, or the file's own size.

    Raises: JobError: neither is known, or the file holds no block.
    """
    size = job.size or (path.stat().st_size if path.exists() else 0)
    if not size:
        raise JobError("--size", f"needed: {path.name} does not exist")
    if size < job.block_bytes_max:
        raise JobError("--size", f"must hold one block of {job.block_bytes_max} bytes")
    return size


def round_up(count: int, unit: int = ALIGNMENT_BYTES) -> int:
    """Return ``count`` rounded up to a multiple of ``unit``."""
    return -(-count // unit) * unit


def is_written(fd: int, length: int) -> bool:
    """Return whether the first ``length`` bytes are data: no hole, no unwritten extent.

    True where the file system cannot tell.
    """
    position = 0
    while position < length:
        buffer = bytearray(_HEADER.size + _BATCH * _EXTENT.size)
        _HEADER.pack_into(buffer, 0, position, length - position, _FIEMAP_FLAG_SYNC, 0, _BATCH, 0)
        try:
            fcntl.ioctl(fd, _FS_IOC_FIEMAP, buffer)
        except OSError:
            return True
        count = _HEADER.unpack_from(buffer, 0)[3]
        if not count:
            return False
        for i in range(count):
            logical, _, extent_length, _, _, flags, *_ = _EXTENT.unpack_from(
                buffer, _HEADER.size + i * _EXTENT.size
            )
            if logical > position or flags & _FIEMAP_EXTENT_UNWRITTEN:
                return False
            position = logical + extent_length
            if flags & _FIEMAP_EXTENT_LAST:
                return bool(position >= length)
    return True
