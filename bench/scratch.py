"""Directories for slot files: a temporary one that is removed, or one that the caller names.

A temporary directory lies under the current directory, and its descriptor is locked while the
process lives. A killed process cannot remove its directory; the next start finds it unlocked and
removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".kvstore-bench-"


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a directory, None if somebody else has it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def remove_stale(parent: Path) -> int:
    """Remove the temporary directories of processes that are gone; returns how many."""
    removed = 0
    for path in parent.glob(f"{PREFIX}*"):
        fd = _lock(path)
        if fd is None:
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)
        removed += 1
    return removed


@contextlib.contextmanager
def scratch_directory(given: Path | None) -> Iterator[Path]:
    """Yield a directory inside ``given``, or inside the current one, and remove it afterwards.

    Raises: OSError: it cannot be made.
    """
    parent = given or Path.cwd()
    remove_stale(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    fd = _lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if fd is not None:
            os.close(fd)
