"""Faults that the kernel itself makes: ends of files, size limits, signals, a full file system."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore._uring.base import END_OF_FILE, Opcode, SubmitFlag
from kvstore.config import KIB, MIB


async def test_a_read_beyond_the_end_of_the_file(open_rig: Any, native_kind: str) -> None:
    """INV-116: the kernel's short read is continued, and its zero is an unexpected end."""
    async with open_rig(native_kind, payload_bytes=MIB, slots=4) as rig:
        data = [rig.fill(slot) for slot in range(4)]
        for transfer in [rig.write(slot) for slot in range(4)]:
            assert await transfer.end() == 0
        os.ftruncate(rig.slot_file.buffered_fd, 3 * rig.slot_bytes + 64 * KIB)
        reads = [rig.read(slot) for slot in range(4)]
        assert [0, 0, 0, END_OF_FILE] == [await read.end() for read in reads]
        for slot in range(3):
            assert np.array_equal(data[slot], rig.payload(4 + slot))
        assert rig.engine.stats().short_transfers == 1


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Writes end at 2.5 MiB: a short result first, then EFBIG, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("file_size_limit")
async def test_a_short_write_and_then_no_room(open_rig: Any, native_kind: str) -> None:
    """INV-116, INV-419: never success for a short write; the page fails, its neighbours do not."""
    async with open_rig(native_kind, payload_bytes=MIB, slots=4) as rig:
        for slot in range(4):
            rig.fill(slot)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB + 512 * KIB, hard))
        writes = [rig.write(slot) for slot in range(4)]
        statuses = [await write.end() for write in writes]
        assert [0, 0, -errno.EFBIG, -errno.EFBIG] == statuses
        assert [0, 0] == [await rig.read(slot).end() for slot in range(2)]


async def test_a_storm_of_signals(open_rig: Any, native_kind: str) -> None:
    """INV-117: interrupted system calls lose nothing; native threads take no signals."""
    hits = []
    handler = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        async with open_rig(native_kind) as rig:
            data = [rig.fill(slot) for slot in range(16)]
            for _ in range(5):
                for transfer in [rig.write(slot) for slot in range(16)]:
                    assert await transfer.end() == 0
                for transfer in [rig.read(slot) for slot in range(16)]:
                    assert await transfer.end() == 0
            for slot in range(16):
                assert np.array_equal(data[slot], rig.payload(16 + slot))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert hits


async def test_a_closed_descriptor_is_an_error_of_its_transfer(
    open_rig: Any, native_kind: str
) -> None:
    """INV-113: whatever errno the kernel gives, the transfer fails and the engine goes on."""
    async with open_rig(native_kind) as rig:
        fd = os.open(rig.slot_file_path, os.O_RDONLY)  # not writable
        file_id = rig.engine.register_file(-1, fd)
        assert await rig.write(0, file_id=file_id).end() == -errno.EBADF
        assert await rig.write(1).end() == 0
        rig.engine.unregister_file(file_id)
        os.close(fd)


async def test_memory_that_is_not_there(open_rig: Any, native_kind: str) -> None:
    """INV-113: an address the kernel cannot use is EFAULT, not a crash."""
    async with open_rig(native_kind) as rig:
        record = rig.record(Opcode.READ, 1, flags=SubmitFlag(0))
        record["address"] = 4096
        assert await rig.submit([record])[0].end() == -errno.EFAULT
