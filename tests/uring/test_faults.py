"""Transfers that go wrong: short, empty, interrupted, refused, failed, corrupted."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

from kvstore._uring.base import END_OF_FILE, MISMATCH, Opcode, SubmitFlag
from kvstore.config import KIB, MIB, IoClass

POISON = SubmitFlag.VERIFY | SubmitFlag.POISON


async def written(rig: Any, slot: int) -> np.ndarray[Any, Any]:
    data = rig.fill(slot)
    assert await rig.write(slot).end() == 0
    return data


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("short", [4 * KIB, 12 * KIB + 100, 60 * KIB])
async def test_a_short_piece_goes_on_where_it_stopped(
    open_rig: Any, kind: str, opcode: Opcode, short: int
) -> None:
    """INV-116: continued at the byte reached, rounded down to the alignment; every byte arrives."""
    async with open_rig(kind, payload_bytes=2 * MIB, slots=2) as rig:
        data = await written(rig, 0)
        rig.payload(0)[:] = data
        hold = rig.inject("short", short, opcode=opcode, count=3)
        if opcode is Opcode.WRITE:
            rig.payload(0)[:] ^= 0xFF
            data = rig.payload(0).copy()
            assert await rig.write(0).end() == 0
        assert await rig.read(0).end() == 0
        assert hold.release() == 3
        assert np.array_equal(data, rig.payload(2))
        assert rig.engine.stats().short_transfers >= 3


async def test_a_result_below_the_alignment_is_a_retry(open_rig: Any, native_kind: str) -> None:
    """INV-116, INV-117: 100 bytes of a direct piece are no progress; nine of them are a failure."""
    async with open_rig(native_kind) as rig:
        if not rig.is_direct:
            pytest.skip("the file is not direct")
        await written(rig, 0)
        rig.inject("short", 100, count=8)
        assert await rig.read(0).end() == 0
        rig.inject("short", 100, count=9)
        assert await rig.read(0).end() == -errno.EIO


@pytest.mark.parametrize("opcode", list(Opcode))
async def test_zero_bytes_are_an_unexpected_end(open_rig: Any, kind: str, opcode: Opcode) -> None:
    """INV-116: a result of zero is a failure, never retried."""
    async with open_rig(kind) as rig:
        await written(rig, 0)
        hold = rig.inject("zero", opcode=opcode, count=None)
        transfer = rig.read(0) if opcode is Opcode.READ else rig.write(0)
        assert await transfer.end() == END_OF_FILE
        assert hold.release() == 1


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize(("count", "expected"), [(8, 0), (9, None)])
async def test_interrupted_pieces_are_retried_eight_times(
    open_rig: Any, kind: str, code: int, count: int, expected: int | None
) -> None:
    """INV-117: EINTR and EAGAIN are retried, at most 8 times without progress."""
    async with open_rig(kind) as rig:
        data = await written(rig, 0)
        hold = rig.inject("errno", code, count=count)
        status = await rig.read(0).end()
        assert status == (-code if expected is None else expected)
        assert hold.release() == count
        if expected == 0:
            assert np.array_equal(data, rig.payload(rig.slot_count))
        assert rig.engine.stats().retries >= 8


async def test_progress_starts_the_count_of_retries_anew(open_rig: Any, native_kind: str) -> None:
    """INV-117: eight retries, a short piece, eight retries: still good."""
    async with open_rig(native_kind) as rig:
        await written(rig, 0)
        rig.inject("errno", errno.EAGAIN, count=8)
        rig.inject("short", 8 * KIB, count=1)
        rig.inject("errno", errno.EAGAIN, count=8)
        assert await rig.read(0).end() == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EFBIG])
@pytest.mark.parametrize("io_class", list(IoClass))
async def test_the_first_failing_piece_fails_its_transfer_only(
    open_rig: Any, kind: str, code: int, io_class: IoClass
) -> None:
    """INV-113, INV-115, INV-810: one failure, one verdict; neighbours are unharmed; counted by
    class and errno.
    """
    async with open_rig(kind, payload_bytes=8 * MIB, slots=3) as rig:
        for slot in range(3):
            await written(rig, slot)
        low = rig.slot_bytes + 4 * MIB
        where = {"offset": (low, low + 1)} if kind != "simulated" else {"offset_min": low}
        if kind == "simulated":
            where["offset_max"] = low + 1
        hold = rig.inject("errno", code, io_class=io_class, count=None, **where)
        if io_class is IoClass.READ:
            transfers = [rig.read(slot) for slot in range(3)]
        else:
            transfers = [rig.write(slot, io_class=io_class) for slot in range(3)]
        assert [0, -code, 0] == [await transfer.end() for transfer in transfers]
        assert hold.release() == 1
        stats = rig.engine.stats()
        assert stats.classes[io_class].errors == {code: 1}
        assert stats.background_bytes == 0


async def test_einval_on_direct_io_ends_direct_io_for_the_file(
    open_rig: Any, native_kind: str
) -> None:
    """INV-130: the piece is redone buffered, the file stays buffered, and it is counted."""
    async with open_rig(native_kind, payload_bytes=2 * MIB, slots=2) as rig:
        if not rig.is_direct:
            pytest.skip("the file is not direct")
        data = await written(rig, 0)
        rig.inject("errno", errno.EINVAL, direct=True, count=None)
        assert await rig.read(0).end() == 0
        assert np.array_equal(data, rig.payload(2))
        stats = rig.engine.stats()
        assert stats.direct_fallbacks >= 1
        assert (0, 1) == (stats.direct_files, stats.buffered_files)
        assert not rig.engine.is_direct(rig.file_id)
        assert await rig.write(1).end() == 0


async def test_einval_on_a_buffered_piece_is_a_failure(open_rig: Any, native_kind: str) -> None:
    """INV-130: there is nothing left to fall back to."""
    async with open_rig(native_kind, direct="off") as rig:
        rig.inject("errno", errno.EINVAL)
        assert await rig.write(0).end() == -errno.EINVAL


async def test_a_flipped_bit_is_a_mismatch(open_rig: Any, kind: str) -> None:
    """INV-914: a disk that returns wrong bytes with success is caught."""
    async with open_rig(kind) as rig:
        await written(rig, 0)
        rig.inject("flip", 8 * 5000 + 3, opcode=Opcode.READ)
        assert await rig.read(0).end() == MISMATCH
        assert await rig.read(0).end() == 0


@pytest.mark.parametrize("payload_bytes", [64 * KIB, MIB])
@pytest.mark.parametrize("action", ["errno", "zero", "flip"])
async def test_a_failed_read_is_poisoned_if_asked(
    open_rig: Any, kind: str, action: str, payload_bytes: int
) -> None:
    """INV-219: every byte of the destination is all ones before the failure is told."""
    async with open_rig(kind, payload_bytes=payload_bytes, slots=2) as rig:
        await written(rig, 1)
        rig.inject(action, 5 if action == "errno" else 8 * 4200, opcode=Opcode.READ)
        assert await rig.read(1, flags=POISON).end() < 0
        assert (rig.slot(3) == 0xFF).all()


async def test_a_good_read_is_not_poisoned(open_rig: Any, kind: str) -> None:
    """INV-219: the flag acts on failure only."""
    async with open_rig(kind) as rig:
        data = await written(rig, 1)
        assert await rig.read(1, flags=POISON).end() == 0
        assert np.array_equal(data, rig.payload(rig.slot_count + 1))


async def test_every_piece_may_fail_in_turn(open_rig: Any, kind: str) -> None:
    """INV-113: whichever piece fails, the transfer ends once and the budgets are back."""
    async with open_rig(kind, payload_bytes=9 * MIB, slots=2) as rig:
        for nth in range(3 if kind == "serial" else 9):
            hold = rig.inject("errno", errno.EIO, io_class=IoClass.BACKGROUND, skip=nth, count=None)
            assert await rig.write(0, io_class=IoClass.BACKGROUND).end() == -errno.EIO
            assert hold.release() >= 1
            assert rig.engine.stats().background_bytes == 0
        assert await rig.write(0).end() == 0


async def test_a_torn_write_is_a_mismatch_at_its_next_read(open_rig: Any, native_kind: str) -> None:
    """INV-910, INV-927: header and payload are not atomic together; the checksum proves a page."""
    async with open_rig(native_kind, payload_bytes=6 * MIB, slots=2) as rig:
        await written(rig, 0)
        rig.payload(0)[:] ^= 1
        rig.inject("errno", errno.EIO, opcode=Opcode.WRITE, skip=1)
        assert await rig.write(0).end() == -errno.EIO
        assert await rig.read(0).end() == MISMATCH
