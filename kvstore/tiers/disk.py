"""The disk tier: slot files, their submissions, and what a restart finds in them.

One file per pool group and path, preallocated, changed in size only by a resize. Slots are striped
over the paths, so any slot count spreads evenly: slot ``s`` lies in file ``s % paths`` at local
index ``s // paths``. The tier remembers generation and sequence of each slot it wrote, because the
header expected at a read must name exactly that write; key, parent and block index come with the
page.

File calls that block (`SlotFiles`, `DiskTier.open_file`, `scan`) are plain functions that the store
runs off the loop. Everything else is called on the loop and does not block.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from kvstore import config as cfg
from kvstore._uring import probe
from kvstore._uring.base import (
    SUBMISSION_DTYPE,
    Completions,
    Engine,
    Opcode,
    Submissions,
    SubmitFlag,
    Ticket,
)
from kvstore.config import IoClass
from kvstore.errors import BusyError, CapacityError, ConfigError, FormatError
from kvstore.tiers import disk_format as fmt

logger = logging.getLogger(__name__)

ALLOCATE_PART_BYTES = 1 << 30
SCAN_SLOTS = 256


class OpenFile(Protocol):
    """A slot file that is open: two descriptors of one file, -1 for a mode that does not exist."""

    @property
    def direct_fd(self) -> int:
        """O_DIRECT, or -1."""
        ...

    @property
    def buffered_fd(self) -> int:
        """Through the page cache, or -1."""
        ...

    @property
    def mode(self) -> str:
        """``direct`` or ``buffered``: the effective one, found by a real write and read."""
        ...

    @property
    def reason(self) -> str:
        """Why the file is not direct; empty otherwise."""
        ...


class SlotFiles(Protocol):
    """The file system as the tier needs it; every call blocks and runs off the loop."""

    def lock(self, directory: str) -> Any:
        """Create the directory if missing, check it, lock it. Raises: BusyError, ConfigError."""
        ...

    def unlock(self, lock: Any) -> None:
        """Give the lock up."""
        ...

    def open(self, directory: str, name: str | None, size: int, direct: str) -> OpenFile:
        """Open or create a file of at least ``size`` bytes; ``name=None`` has no name (INV-918).

        Raises: CapacityError: no space; nothing is left behind.
        """
        ...

    def resize(self, file: OpenFile, size: int) -> None:
        """Extend by real allocation, or cut. Raises: CapacityError: no space, size unchanged."""
        ...

    def file_system(self, file: OpenFile) -> int:
        """Return a number that files on one file system share."""
        ...

    def check_room(self, file: OpenFile, needed: int) -> None:
        """Raise CapacityError unless ``needed`` bytes are free where the file lies."""
        ...

    def read(self, file: OpenFile, offset: int, length: int) -> bytes:
        """Read metadata through the page cache; may return less at the end of the file."""
        ...

    def write(self, file: OpenFile, offset: int, data: bytes) -> None:
        """Write metadata and sync it."""
        ...

    def sync(self, file: OpenFile) -> None:
        """Wait until the data of the file is on stable storage."""
        ...

    def close(self, file: OpenFile) -> None:
        """Close both descriptors."""
        ...


def check_directory(path: Path) -> None:
    """Refuse a directory whose content somebody else could exchange (design section 7).

    A symlink, a foreign owner, and a directory or parent writable by everybody are refused; a
    sticky parent such as /tmp is fine, because nobody else can rename what is ours there.
    """
    for place, sticky_is_fine in ((path, False), (path.absolute().parent, True)):
        status = place.lstat()
        if stat.S_ISLNK(status.st_mode) and place == path:
            raise _bad_path(path, "is a symlink")
        if place == path and not stat.S_ISDIR(status.st_mode):
            raise _bad_path(path, "is not a directory")
        if place == path and status.st_uid != os.geteuid():
            raise _bad_path(path, f"belongs to user {status.st_uid}")
        writable = bool(place.stat().st_mode & stat.S_IWOTH)
        sticky = bool(place.stat().st_mode & stat.S_ISVTX)
        if writable and not (sticky and sticky_is_fine):
            raise _bad_path(place, "is writable by everybody")


def _bad_path(path: Path, why: str) -> ConfigError:
    return ConfigError(f"disk_cache_path: {path} {why}", field="disk_cache_path")


@final
class OsSlotFiles:
    """The real file system; a real write and read decide about direct I/O (INV-130)."""

    __slots__ = ()

    def lock(self, directory: str) -> int:
        """Lock the directory itself, so that no lock file is left behind (INV-923)."""
        path = Path(directory)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _bad_path(path, f"cannot be created: {error.strerror}") from error
        check_directory(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_mode & 0o077:
                os.fchmod(fd, 0o700)
        except BlockingIOError:
            os.close(fd)
            raise BusyError(
                f"disk_cache_path: {path} is in use by another store", path=directory
            ) from None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlock(self, lock: int) -> None:
        """End the lock by name: a process forked meanwhile has a copy of the descriptor, and
        closing ours alone would leave the directory locked as long as that lives (INV-923).
        """
        try:
            fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)

    def open(self, directory: str, name: str | None, size: int, direct: str) -> OpenFile:
        """Open through the probe; a file that cannot have its size is removed again."""
        path = Path(directory) / (name or "anonymous.slots")
        is_new = name is None or not path.exists()
        if name is not None and path.is_symlink():
            raise _bad_path(path, "is a symlink")
        file = probe.open_slot_file(path, direct=direct, anonymous=name is None)
        try:
            _check_file(file, path)
            if os.fstat(_any_fd(file)).st_size < size:
                self.resize(file, size)
        except BaseException:
            self.close(file)
            if is_new and name is not None:
                path.unlink(missing_ok=True)
            raise
        return file

    def resize(self, file: OpenFile, size: int) -> None:
        """Allocate in parts, so that a write can never meet ENOSPC; or cut.

        What cannot fit is refused before a byte is allocated: a full disk hurts its other users.
        """
        fd = _any_fd(file)
        start = os.fstat(fd).st_size
        if size <= start:
            os.ftruncate(fd, size)
            return
        _check_room(fd, size - start)
        try:
            for offset in range(start, size, ALLOCATE_PART_BYTES):
                probe.allocate(fd, offset, min(ALLOCATE_PART_BYTES, size - offset))
        except CapacityError:
            os.ftruncate(fd, start)
            _check_room(fd, size - start)
            raise

    def file_system(self, file: OpenFile) -> int:
        """Return the device number."""
        return os.fstat(_any_fd(file)).st_dev

    def check_room(self, file: OpenFile, needed: int) -> None:
        """Ask the file system."""
        _check_room(_any_fd(file), needed)

    def read(self, file: OpenFile, offset: int, length: int) -> bytes:
        """Read through whichever descriptor there is; direct needs an aligned buffer."""
        if file.buffered_fd >= 0:
            return os.pread(file.buffered_fd, length, offset)
        return _direct_read(file.direct_fd, offset, length)

    def write(self, file: OpenFile, offset: int, data: bytes) -> None:
        """Write all of it, then sync."""
        fd = file.buffered_fd
        if fd < 0:
            _direct_write(file.direct_fd, offset, data)
            fd = file.direct_fd
        else:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)
        os.fsync(fd)

    def sync(self, file: OpenFile) -> None:
        """Sync the data; the size never changes outside a resize."""
        os.fdatasync(_any_fd(file))

    def close(self, file: OpenFile) -> None:
        """Close what is open."""
        for fd in {file.direct_fd, file.buffered_fd}:
            if fd >= 0:
                os.close(fd)


def _any_fd(file: OpenFile) -> int:
    return file.buffered_fd if file.buffered_fd >= 0 else file.direct_fd


def _check_room(fd: int, needed: int) -> None:
    room = os.fstatvfs(fd)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        raise CapacityError(
            f"disk_cache_size: {needed} bytes needed, {free} free",
            needed=needed,
            available=free,
            errno=errno.ENOSPC,
        )


def _check_file(file: OpenFile, path: Path) -> None:
    status = os.fstat(_any_fd(file))
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise _bad_path(path, "is not a regular file of ours")
    if stat.S_IMODE(status.st_mode) != 0o600:
        os.fchmod(_any_fd(file), 0o600)


def _aligned(length: int) -> memoryview:
    """Return an aligned writable buffer of at least ``length`` bytes."""
    import mmap

    return memoryview(mmap.mmap(-1, -(-length // 4096) * 4096))


def _direct_read(fd: int, offset: int, length: int) -> bytes:
    start = offset // 4096 * 4096
    buffer = _aligned(offset + length - start)
    count = os.preadv(fd, [buffer], start)
    return bytes(buffer[offset - start : min(count, offset - start + length)])


def _direct_write(fd: int, offset: int, data: bytes) -> None:
    assert offset % 4096 == 0
    assert len(data) % 4096 == 0
    buffer = _aligned(len(data))
    buffer[: len(data)] = data
    if os.pwritev(fd, [buffer], offset) != len(buffer):
        raise OSError(errno.EIO, "a metadata write was cut short")


@final
@dataclass(slots=True)
class Transfer:
    """One page's bytes on the way to or from disk, from submit to its last completion."""

    group: int
    slot_id: int
    generation: int
    address: int
    opcode: Opcode
    io_class: IoClass
    key: bytes
    parent_key: bytes
    block_index: int
    callback: Callable[[int, int, int], Any]
    deadline_ns: int = 0  # 0: the engine's default
    ticket: Ticket | None = None
    handle: int = 0
    token: int = 0
    is_submitted: bool = False


class FoundSlot(NamedTuple):
    """What recovery found in a slot: a header that it believes, or why the slot is free."""

    slot_id: int
    header: fmt.SlotHeader | None
    reason: str = ""


@final
class DiskGroup:
    """The files of one pool group and what the tier remembers about its slots."""

    __slots__ = (
        "ends",
        "file_ids",
        "files",
        "generations",
        "index",
        "name",
        "page_bytes",
        "sequences",
        "slot_bytes",
        "superblocks",
        "template",
        "touched",
    )

    def __init__(self, index: int, name: str, page_bytes: int) -> None:
        self.index = index
        self.name = name
        self.page_bytes = page_bytes
        self.slot_bytes = cfg.slot_bytes(page_bytes)
        self.files: list[OpenFile] = []
        self.file_ids: list[int] = []
        self.superblocks: list[fmt.Superblock] = []
        self.ends: list[int] = []  # slots that each file really holds
        self.generations = array.array("Q")
        self.sequences = array.array("Q")
        self.touched = bytearray()  # written since the store was opened: recovery keeps off
        self.template: fmt.IdentityTemplate | None = None

    @property
    def slot_count(self) -> int:
        """Slots over all paths."""
        return len(self.touched)

    def set_slot_count(self, slot_count: int) -> None:
        """Grow or cut what is remembered per slot."""
        more = slot_count - len(self.touched)
        if more > 0:
            self.generations.extend([0] * more)
            self.sequences.extend([0] * more)
            self.touched.extend(bytes(more))
        else:
            del self.generations[slot_count:], self.sequences[slot_count:]
            del self.touched[slot_count:]


def local_count(slot_count: int, path_index: int, path_count: int) -> int:
    """Return how many of a group's slots lie on one path."""
    return (slot_count - path_index + path_count - 1) // path_count


@final
class DiskTier:
    """The last level: places slots in files and turns transfers into submission records."""

    def __init__(
        self,
        files: SlotFiles,
        engine: Engine,
        config: cfg.DiskTierConfig,
        groups: Sequence[cfg.PoolGroupConfig],
        *,
        fingerprint: str | None,
        direct: str,
    ) -> None:
        self._files = files
        self._engine = engine
        self._config = config
        self._direct = direct
        self._fingerprint = fmt.fingerprint_digest(fingerprint)
        self._is_named = fingerprint is not None
        self._locks: list[Any] = []
        checksum = SubmitFlag(0) if config.checksum else SubmitFlag.NO_CHECKSUM
        self._write_flags = int(SubmitFlag.SEAL | checksum)
        self._read_flags = int(SubmitFlag.VERIFY | checksum)
        self._gated_flags = int(SubmitFlag.VERIFY | SubmitFlag.POISON | checksum)
        self.groups = [DiskGroup(i, g.name, g.page_bytes) for i, g in enumerate(groups)]
        self.epoch = 1
        self.sequence = 0
        self.recovered_files: set[tuple[int, int]] = set()

    @property
    def path_count(self) -> int:
        """Paths the slots are striped over."""
        return len(self._config.paths)

    @property
    def can_recover(self) -> bool:
        """Named files that may be taken in again (INV-918, INV-919)."""
        return self._is_named and self._config.persist_mode != "disabled"

    # Opening and closing; all of it blocks and runs off the loop.

    def open(self, slot_counts: Sequence[int]) -> None:
        """Lock the directories, open and preallocate every file, settle the epoch.

        Raises: ConfigError, BusyError, CapacityError; nothing is left open or behind then.
        """
        try:
            real = [Path(path).resolve() for path in self._config.paths]
            if len(set(real)) != len(real):
                raise ConfigError(
                    f"disk_cache_path: {', '.join(self._config.paths)} name a directory twice",
                    field="disk_cache_path",
                )
            for path in self._config.paths:
                self._locks.append(self._files.lock(path))
            for group, slot_count in zip(self.groups, slot_counts, strict=True):
                for path_index in range(self.path_count):
                    self._open_file(group, path_index, slot_count)
            self._settle_epoch()
        except BaseException:
            self._remove_new()
            self.close_files()
            raise
        for group, slot_count in zip(self.groups, slot_counts, strict=True):
            group.set_slot_count(slot_count)
            self._make_template(group)

    def _file_name(self, group: DiskGroup, path_index: int) -> str | None:
        return f"{group.name}.{path_index}.slots" if self._is_named else None

    def _open_file(self, group: DiskGroup, path_index: int, slot_count: int) -> None:
        count = local_count(slot_count, path_index, self.path_count)
        wanted = fmt.Superblock(
            fingerprint=self._fingerprint,
            slot_bytes=group.slot_bytes,
            slot_count=count,
            page_bytes=group.page_bytes,
            epoch=self.epoch,
            pool_group=group.index,
            path_index=path_index,
            path_count=self.path_count,
        )
        file = self._files.open(
            self._config.paths[path_index],
            self._file_name(group, path_index),
            fmt.file_bytes(count, group.slot_bytes),
            self._direct,
        )
        group.files.append(file)
        group.superblocks.append(wanted)
        group.ends.append(count)
        found = self._read_superblock(file)
        if found is not None:
            self.epoch = max(self.epoch, found.epoch)
            if self.can_recover and found.has_geometry_of(wanted):
                self.recovered_files.add((group.index, path_index))
        self._files.resize(file, fmt.file_bytes(count, group.slot_bytes))
        group.file_ids.append(self._engine.register_file(file.direct_fd, file.buffered_fd))

    def _read_superblock(self, file: OpenFile) -> fmt.Superblock | None:
        if not self._is_named:
            return None
        raw = self._files.read(file, 0, fmt.SUPERBLOCK_BYTES)
        try:
            return fmt.Superblock.decode(raw)
        except FormatError:
            # An epoch that nobody can read any more: start above whatever it was.
            if any(raw):
                self.epoch = max(self.epoch, int.from_bytes(os.urandom(6), "little"))
            return None

    def _settle_epoch(self) -> None:
        """Give all files one epoch: the highest found, a step above it if any file is foreign.

        A file that is laid out anew may still hold headers of an earlier life whose epoch matches;
        with the step none of them can come back at a later restart (INV-925).
        """
        if len(self.recovered_files) < len(self.groups) * self.path_count:
            self.epoch += 1
            self.recovered_files.clear()
        self.write_superblocks()

    def write_superblocks(self) -> None:
        """Write and sync block 0 of every named file (INV-925)."""
        for group in self.groups:
            for path_index, file in enumerate(group.files):
                block = group.superblocks[path_index] = self._superblock_of(group, path_index)
                if self._is_named:
                    self._files.write(file, 0, block.encode())

    def _superblock_of(self, group: DiskGroup, path_index: int) -> fmt.Superblock:
        old = group.superblocks[path_index]
        return fmt.Superblock(
            fingerprint=old.fingerprint,
            slot_bytes=old.slot_bytes,
            slot_count=group.ends[path_index],
            page_bytes=old.page_bytes,
            epoch=self.epoch,
            pool_group=old.pool_group,
            path_index=old.path_index,
            path_count=old.path_count,
        )

    def _make_template(self, group: DiskGroup) -> None:
        group.template = fmt.IdentityTemplate(
            fingerprint=self._fingerprint,
            epoch=self.epoch,
            pool_group=group.index,
            payload_bytes=group.page_bytes,
            checksum=self._config.checksum,
        )

    def raise_epoch(self) -> None:
        """Make every slot written so far a foreign one; loop side of `bump_epoch` (INV-925)."""
        self.epoch += 1
        for group in self.groups:
            self._make_template(group)

    def close_files(self, *, leak: bool = False) -> list[BaseException]:
        """Close every file and give the locks up; one failure does not spare the others (C28).

        ``leak``: transfers never came back, so files and locks stay with the process (INV-139).
        """
        errors: list[BaseException] = []
        if leak:
            logger.error("leaving the slot files open: transfers never came back")
            return errors
        for group in self.groups:
            for file_id in group.file_ids:
                _collect(errors, self._engine.unregister_file, file_id)
            for file in group.files:
                _collect(errors, self._files.close, file)
            group.file_ids, group.files = [], []
        for lock in self._locks:
            _collect(errors, self._files.unlock, lock)
        self._locks = []
        return errors

    def _remove_new(self) -> None:
        """After a failed open: named files that were not there before leave nothing behind."""
        if not self._is_named:
            return
        for group in self.groups:
            for path_index in range(len(group.files)):
                if (group.index, path_index) not in self.recovered_files:
                    name = self._file_name(group, path_index)
                    assert name is not None
                    with contextlib.suppress(OSError):
                        (Path(self._config.paths[path_index]) / name).unlink()

    # Growth and shrink.

    def check_room(self, missing: Sequence[int]) -> None:
        """Raise CapacityError unless so many more slots per group could fit; blocking.

        Paths on one file system share its free bytes.
        """
        needed: dict[int, int] = {}
        example: dict[int, OpenFile] = {}
        for group, count in zip(self.groups, missing, strict=True):
            for path_index, file in enumerate(group.files):
                part = local_count(group.slot_count + count, path_index, self.path_count)
                byte_count = (part - group.ends[path_index]) * group.slot_bytes
                place = self._files.file_system(file)
                example[place] = file
                needed[place] = needed.get(place, 0) + max(0, byte_count)
        for place, byte_count in needed.items():
            self._files.check_room(example[place], byte_count)

    def resize_files(self, group: DiskGroup, slot_count: int) -> None:
        """Extend or cut the files of a group; blocking. Callers drained what is cut (INV-904)."""
        before = list(group.ends)
        try:
            for path_index, file in enumerate(group.files):
                count = local_count(slot_count, path_index, self.path_count)
                self._files.resize(file, fmt.file_bytes(count, group.slot_bytes))
                group.ends[path_index] = count
        except CapacityError:
            for path_index, count in enumerate(before):
                if group.ends[path_index] > count:
                    self._files.resize(
                        group.files[path_index], fmt.file_bytes(count, group.slot_bytes)
                    )
            group.ends = before
            raise
        for path_index, file in enumerate(group.files):
            block = group.superblocks[path_index] = self._superblock_of(group, path_index)
            if self._is_named:
                self._files.write(file, 0, block.encode())

    # Submissions; on the loop.

    def place(self, group: int, slot_id: int) -> tuple[int, int]:
        """Return (file id, offset of the header) of a slot."""
        owner = self.groups[group]
        local, path_index = divmod(slot_id, self.path_count)
        return owner.file_ids[path_index], fmt.slot_offset(local, owner.slot_bytes)

    def submit(self, queue: Completions, transfers: Sequence[Transfer]) -> None:
        """Hand a batch to the engine with one call and note the handles.

        Ownership: each transfer's memory is borrowed until its END completion.
        Cost: O(transfers), one native call.
        """
        if not transfers:
            return
        records = np.zeros(len(transfers), SUBMISSION_DTYPE)
        records["header_bytes"] = cfg.HEADER_BYTES
        groups = {transfer.group for transfer in transfers}
        for group in groups:
            rows: Any = slice(None)
            part = transfers
            if len(groups) > 1:
                rows = [i for i, transfer in enumerate(transfers) if transfer.group == group]
                part = [transfers[i] for i in rows]
            self._fill_numbers(queue, self.groups[group], part, records, rows)
            self._fill_identities(self.groups[group], part, records, rows)
        try:
            self._engine.submit(queue, records)
        except BaseException:
            for transfer in transfers:
                queue.discard(transfer.token)
            raise
        for transfer, handle in zip(transfers, records["handle"].tolist(), strict=True):
            transfer.handle = handle
            transfer.is_submitted = True

    def promote(self, transfer: Transfer) -> None:
        """Raise a submitted background write to required (INV-108)."""
        self._engine.promote(transfer.handle)

    def cancel(self, transfer: Transfer) -> None:
        """Withdraw what is queued of a transfer; its END completion still comes (INV-118)."""
        self._engine.cancel(transfer.handle)

    def extend_deadline(self, transfer: Transfer, deadline_ns: int) -> None:
        """Let a submitted transfer take longer: a later waiter has the time (INV-336)."""
        self._engine.extend_deadline(transfer.handle, deadline_ns)

    def _fill_numbers(
        self,
        queue: Completions,
        owner: DiskGroup,
        transfers: Sequence[Transfer],
        records: Submissions,
        rows: Any,
    ) -> None:
        """Fill in where the bytes lie, how urgent they are and who hears of them, by columns."""
        for transfer in transfers:
            transfer.token = queue.token(transfer.callback)
        local, path = np.divmod(
            np.array([transfer.slot_id for transfer in transfers], np.int64), self.path_count
        )
        columns: dict[str, Any] = {
            "token": [transfer.token for transfer in transfers],
            "address": [transfer.address for transfer in transfers],
            "offset": fmt.SUPERBLOCK_BYTES + local * owner.slot_bytes,
            "payload_bytes": owner.page_bytes,
            "deadline_ns": [transfer.deadline_ns for transfer in transfers],
            "file_id": np.array(owner.file_ids, np.uint32)[path],
            "io_class": [transfer.io_class for transfer in transfers],
            "opcode": [transfer.opcode for transfer in transfers],
            "flags": [self._flags(transfer) for transfer in transfers],
        }
        tickets = [transfer.ticket for transfer in transfers]
        columns["gate_word"] = [-1 if ticket is None else ticket.word for ticket in tickets]
        columns["gate_generation"] = [
            0 if ticket is None else ticket.generation for ticket in tickets
        ]
        for name, column in columns.items():
            records[name][rows] = column

    def _flags(self, transfer: Transfer) -> int:
        if transfer.opcode is Opcode.WRITE:
            return self._write_flags
        return self._read_flags if transfer.ticket is None else self._gated_flags

    def _fill_identities(
        self, owner: DiskGroup, transfers: Sequence[Transfer], records: Submissions, rows: Any
    ) -> None:
        assert owner.template is not None
        numbers = []
        for transfer in transfers:
            slot_id = transfer.slot_id
            if transfer.opcode is Opcode.WRITE:
                self.sequence += 1
                owner.generations[slot_id] = transfer.generation
                owner.sequences[slot_id] = self.sequence
                owner.touched[slot_id] = 1
            numbers.append(
                (transfer.block_index, owner.generations[slot_id], owner.sequences[slot_id])
            )
        identities = np.empty((len(transfers), fmt.IDENTITY_BYTES), np.uint8)
        owner.template.fill(
            identities,
            [transfer.key for transfer in transfers],
            [transfer.parent_key for transfer in transfers],
            numbers,
        )
        records["identity"][rows] = identities

    # Recovery.

    def scan(self, group: DiskGroup, start: int, stop: int) -> Iterator[FoundSlot]:
        """Read the headers of slots start..stop. Blocking.

        Only what the header proves is proved: the payload is verified at its first read (INV-919).
        """
        for slot_id in range(start, stop):
            local, path_index = divmod(slot_id, self.path_count)
            offset = fmt.slot_offset(local, group.slot_bytes)
            raw = self._files.read(group.files[path_index], offset, fmt.HEADER_USED_BYTES)
            if not any(raw):
                yield FoundSlot(slot_id, None, "empty")
                continue
            try:
                header = fmt.decode_header(raw)
            except FormatError:
                yield FoundSlot(slot_id, None, "damaged")
                continue
            if fmt.fits_slot(header, group.superblocks[path_index], group.page_bytes):
                yield FoundSlot(slot_id, header)
            else:
                yield FoundSlot(slot_id, None, "partial" if header.is_partial else "foreign")

    def adopt(self, group: int, found: FoundSlot) -> None:
        """Remember the write that recovery found, so that reads expect exactly it."""
        assert found.header is not None
        owner = self.groups[group]
        owner.generations[found.slot_id] = found.header.identity.generation
        owner.sequences[found.slot_id] = found.header.identity.sequence
        self.sequence = max(self.sequence, found.header.identity.sequence)

    def is_touched(self, group: int, slot_id: int) -> bool:
        """Return whether the slot was written since the store was opened."""
        return bool(self.groups[group].touched[slot_id])

    def sync(self) -> None:
        """Sync the data of every file; blocking (``persist_mode="strict"``)."""
        for group in self.groups:
            for file in group.files:
                self._files.sync(file)

    def modes(self) -> dict[str, str]:
        """Return the effective mode per file, for statistics (INV-130)."""
        return {
            f"{group.name}.{index}": file.mode + (f" ({file.reason})" if file.reason else "")
            for group in self.groups
            for index, file in enumerate(group.files)
        }


def _collect(errors: list[BaseException], call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001  gathered, raised together at the end of closing
        errors.append(error)
