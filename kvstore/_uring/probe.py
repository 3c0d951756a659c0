"""What the system offers, found by trying: io_uring, registered memory, O_DIRECT, allocation.

A flag that is accepted at set-up may fail at the first use, so nothing here believes an open or
a set-up call alone: files are probed by a real aligned write and read (INV-130), rings by a round
trip of a no-op, memory by registering some.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kvstore._uring._ffi import lib
from kvstore._uring.native import Arena
from kvstore._uring.ring import RingEngine
from kvstore.config import ALIGNMENT_BYTES, MIB, IoConfig, check_choice, check_int
from kvstore.errors import CapacityError, UnsupportedError

#: What a full file system answers.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


@final
@dataclass(slots=True)
class SlotFile:
    """A slot file, open twice: for direct I/O if the file system really does it, and buffered.

    ``mode`` is ``direct`` or ``buffered``, ``reason`` says why it is not direct (empty otherwise).
    ``direct_fd`` is -1 in buffered mode. Ownership: `close` closes both descriptors.
    """

    direct_fd: int
    buffered_fd: int
    mode: str
    reason: str

    def close(self) -> None:
        """Close both descriptors; a second call does nothing."""
        for fd in (self.direct_fd, self.buffered_fd):
            if fd >= 0:
                os.close(fd)
        self.direct_fd = self.buffered_fd = -1


def open_slot_file(
    path: str | Path,
    size_bytes: int = 0,
    *,
    direct: str = "auto",
    create: bool = True,
    anonymous: bool = False,
) -> SlotFile:
    """Open a slot file, of at least ``size_bytes`` allocated bytes, mode 0600, never a symlink.

    ``anonymous`` leaves no name behind (INV-918); ``path`` then says the directory only.
    ``direct``: ``auto`` decides by a real aligned write and read (INV-130), ``on`` raises when
    that fails, ``off`` does not try. The probe keeps the contents: it writes back what it reads,
    and cuts a file that was empty back to nothing. Blocks; call it off the loop.

    Raises: UnsupportedError: direct I/O was demanded and does not work; CapacityError: no space,
    and nothing new is left behind; OSError.
    """
    check_choice("direct", direct, ("auto", "on", "off"))
    check_int("size_bytes", size_bytes, 0)
    path = Path(path)
    existed = anonymous or path.exists()
    fd = _open_plain(path, create=create, anonymous=anonymous)
    file = SlotFile(-1, fd, "buffered", "direct I/O is switched off")
    try:
        have = os.fstat(fd).st_size
        if size_bytes > have:
            allocate(fd, have, size_bytes - have)
        if direct != "off":
            file.direct_fd, file.reason = _open_direct(fd)
            file.mode = "direct" if file.direct_fd >= 0 else "buffered"
            if direct == "on" and file.direct_fd < 0:
                raise UnsupportedError(f"direct: {path}: {file.reason}", errno=errno.EOPNOTSUPP)
    except BaseException:
        file.close()
        if not existed:
            path.unlink(missing_ok=True)
        raise
    return file


def _open_plain(path: Path, *, create: bool, anonymous: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if not anonymous:
        return os.open(path, flags | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    try:
        return os.open(path.parent, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in {*REFUSED, errno.EISDIR, errno.ENOENT}:
            raise
    name = path.with_name(f".{path.name}.{os.getpid()}")  # no O_TMPFILE here
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    name.unlink()
    return fd


def _open_direct(fd: int) -> tuple[int, str]:
    """Return a descriptor that passed the probe and "", or -1 and why."""
    try:
        direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        return -1, f"O_DIRECT is refused at open: {os.strerror(error.errno or 0)}"
    reason = _try_direct(direct_fd)
    if reason:
        os.close(direct_fd)
        return -1, reason
    return direct_fd, ""


def _try_direct(fd: int) -> str:
    """Read, write and read one aligned block; "" if all of it works."""
    size = os.fstat(fd).st_size
    step = "read"
    with mmap.mmap(-1, 2 * ALIGNMENT_BYTES) as memory:  # page-aligned
        whole = memoryview(memory)
        block, again = whole[:ALIGNMENT_BYTES], whole[ALIGNMENT_BYTES:]
        try:
            if size >= ALIGNMENT_BYTES:
                os.preadv(fd, [block], 0)
            step = "write"
            written = os.pwritev(fd, [block], 0)
            step = "read"
            got = os.preadv(fd, [again], 0)
            if written != ALIGNMENT_BYTES or got != ALIGNMENT_BYTES or block != again:
                return f"O_DIRECT moved {written} and {got} of {ALIGNMENT_BYTES} bytes"
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            return f"O_DIRECT is refused at the first {step}: {os.strerror(error.errno or 0)}"
        finally:
            if size < ALIGNMENT_BYTES:
                os.ftruncate(fd, size)
            block.release()
            again.release()
            whole.release()
    return ""


def allocate(fd: int, offset: int, length: int) -> bool:
    """Give a range of a file its blocks, so that no later write can meet ENOSPC or extend.

    Returns False if the file system has no fallocate and zeros were written instead. Blocks.
    Raises: CapacityError: no space; the file has its old size again.
    """
    size = os.fstat(fd).st_size
    result = lib.kvs_allocate(fd, offset, length)
    if result >= 0:
        return bool(result == 0)
    os.ftruncate(fd, size)
    if -result not in NO_SPACE:
        raise OSError(-result, os.strerror(-result))
    room = os.fstatvfs(fd)
    free = room.f_bavail * room.f_frsize
    raise CapacityError(
        f"disk_cache_size: {length} bytes needed, {free} free: {os.strerror(-result)}",
        needed=length,
        available=free,
        errno=-result,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SystemProbe:
    """What an engine would find here; every field was tried, not read from a version number."""

    io_uring: bool
    io_uring_reason: str = ""  # why not
    ring_flags: tuple[str, ...] = ()
    registered_buffers: bool = False
    registered_buffers_reason: str = ""
    memlock_bytes: int | None = None  # None: unlimited
    huge_pages: bool = False
    huge_pages_setting: str = ""
    kernel: str = ""

    @property
    def engine(self) -> str:
        """The engine that ``auto`` takes."""
        return "io_uring" if self.io_uring else "threads"


def probe_system(*, register_bytes: int = 64 * MIB) -> SystemProbe:
    """Try a ring, a registration of ``register_bytes`` and huge pages. Costs milliseconds."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = None if limit == resource.RLIM_INFINITY else limit
    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    arena = Arena(register_bytes)
    try:
        arena.prefault()
        ring = _try_ring(arena.address, arena.length)
        return SystemProbe(
            **ring,
            memlock_bytes=memlock,
            huge_pages=arena.huge_pages,
            huge_pages_setting=setting.partition("[")[2].partition("]")[0],
            kernel=os.uname().release,
        )
    finally:
        arena.close()


def _try_ring(address: int, length: int) -> dict[str, Any]:
    try:
        engine = RingEngine(IoConfig(ring_entries=8))
    except UnsupportedError as error:
        return {
            "io_uring": False,
            "io_uring_reason": str(error),
            "registered_buffers_reason": "no ring",
        }
    try:
        registered = engine.register_memory(address, length)
        stats = engine.stats()
    finally:
        engine.close()
    return {
        "io_uring": True,
        "ring_flags": stats.ring_flags,
        "registered_buffers": registered,
        "registered_buffers_reason": "; ".join(stats.warnings),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
