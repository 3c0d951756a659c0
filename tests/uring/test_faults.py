"""Transfers that go wrong: short, empty, interrupted, refused, failed, corrupted."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

from kvstore._uring.base import END_OF_FILE, MISMATCH, OK, Opcode, SubmitFlag
from kvstore.config import HEADER_BYTES, KIB, MIB, IoClass, IoConfig

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


# -- writes that report success and are wrong ------------------------------------------------------

SLOT_BYTES = HEADER_BYTES + 128 * KIB
#: What a device may do to a write that it calls good: the action and its argument.
SILENT = {
    "flip": ("flip", 8 * 40_000 + 3),
    "torn": ("torn", 64 * KIB),
    "torn-header": ("torn", 4 * KIB),
    "sectors": ("sectors", 0x0F0F_F0F5),
    "no-header": ("sectors", 0xFFFF_FFFE),
    "lost": ("lost", 0),
    "misdirected": ("misdirected", SLOT_BYTES),
    "misdirected-back": ("misdirected", -SLOT_BYTES),
    "misdirected-inside": ("misdirected", 4 * KIB),
    "before-the-file": ("misdirected", -(1 << 30)),
}


def versioned(rig: Any, opcode: Opcode, slot: int, version: int, **options: Any) -> Any:
    """A submission whose identity carries a sequence number, as those of a store do."""
    record = rig.record(opcode, slot, **options)
    record["identity"][0, 144] = version
    return record


def expected_slots(rig: Any, before: np.ndarray, memory: np.ndarray, name: str) -> np.ndarray:
    """What the file holds after the damaged write of slot 1."""
    action, argument = SILENT[name]
    after, low = before.copy(), rig.slot_bytes
    if action == "torn":
        after[low : low + argument] = memory[:argument]
    elif action == "sectors":
        for at in range(0, rig.slot_bytes, 4096):
            if argument >> at // 4096 % 32 & 1:
                after[low + at : low + at + 4096] = memory[at : at + 4096]
    elif action == "misdirected" and low + argument >= 0:
        after[low + argument : low + argument + rig.slot_bytes] = memory
    elif action == "flip":
        after[low : low + rig.slot_bytes] = memory
    return after


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("name", SILENT)
async def test_a_write_that_is_wrong_and_called_good_is_found_at_its_read(
    open_rig: Any, kind: str, name: str, direct: str
) -> None:
    """INV-910, INV-914, INV-927: a bit flipped on the way, a torn, lost or misdirected write: the
    write says ok, memory is unharmed, the disk holds what the fault says, and neither the slot nor
    the one that was hit in its place is ever called good.
    """
    action, argument = SILENT[name]
    async with open_rig(kind, payload_bytes=128 * KIB, slots=4, direct=direct) as rig:
        for slot in range(4):
            rig.fill(slot)
            write = rig.submit([versioned(rig, Opcode.WRITE, slot, 1)])[0]
            assert await write.end() == OK
        before = rig.memory[: 4 * rig.slot_bytes].copy()
        data = rig.fill(1)
        hold = rig.inject(action, argument, opcode=Opcode.WRITE)
        write = rig.submit([versioned(rig, Opcode.WRITE, 1, 2)])[0]
        assert await write.end() == OK
        assert hold.release() == 1
        assert np.array_equal(data, rig.payload(1))
        reads = [
            versioned(rig, Opcode.READ, slot, 1 + (slot == 1), memory=4 + slot) for slot in range(4)
        ]
        statuses = [await read.end() for read in rig.submit(reads)]
        expected = expected_slots(rig, before, rig.slot(1), name)
        found = rig.memory[4 * rig.slot_bytes : 8 * rig.slot_bytes]
        if action == "flip":
            assert 1 == int(np.unpackbits(found ^ expected).sum())
        else:
            assert np.array_equal(found, expected)
        harmed = (expected != before).reshape(4, -1).any(axis=1)
        harmed[1] = True
        assert [MISMATCH if bad else OK for bad in harmed] == statuses
        mended = rig.submit([versioned(rig, Opcode.WRITE, slot, 3) for slot in range(4)])
        assert [OK] * 4 == [await transfer.end() for transfer in mended]
        reads = [versioned(rig, Opcode.READ, slot, 3, memory=4 + slot) for slot in range(4)]
        assert [OK] * 4 == [await read.end() for read in rig.submit(reads)]


@pytest.mark.parametrize("name", ["flip", "torn", "sectors", "lost", "misdirected-inside"])
async def test_any_piece_of_a_write_may_be_wrong(open_rig: Any, kind: str, name: str) -> None:
    """INV-113, INV-115, INV-927: whichever piece is damaged, its page is found out, no other."""
    action, argument = SILENT[name]
    argument = {"flip": 8 * 100, "torn": 4 * KIB, "sectors": 0b1011}.get(name, argument)
    config = IoConfig(write_piece_bytes=32 * KIB)
    pieces = 1 if kind == "serial" else 5
    async with open_rig(kind, config, payload_bytes=128 * KIB, slots=3) as rig:
        for version, nth in enumerate(range(pieces), 1):
            for slot in range(3):
                rig.fill(slot)
            hold = rig.inject(action, argument, skip=nth, opcode=Opcode.WRITE, **within(rig, 1))
            writes = rig.submit([versioned(rig, Opcode.WRITE, slot, version) for slot in range(3)])
            assert [OK] * 3 == [await transfer.end() for transfer in writes]
            if hold.release() == 0:
                assert nth >= 4, "the header does not make a piece of its own here"
                continue
            reads = [versioned(rig, Opcode.READ, at, version, memory=3 + at) for at in range(3)]
            statuses = [await read.end() for read in rig.submit(reads)]
            assert statuses[1] == MISMATCH
            assert statuses[0] == OK
            assert statuses[2] == OK or name == "misdirected-inside"
        assert rig.engine.stats().classes[IoClass.REQUIRED].inflight_bytes == 0


def within(rig: Any, slot: int) -> dict[str, Any]:
    """The selector of the pieces of one slot, as either kind of rule spells it."""
    low, high = slot * rig.slot_bytes, (slot + 1) * rig.slot_bytes
    if rig.kind == "simulated":
        return {"offset_min": low, "offset_max": high}
    return {"offset": (low, high)}


async def test_faults_of_writes_let_reads_pass(open_rig: Any, kind: str) -> None:
    """A torn, lost or sectorwise rule without an opcode is kept for the next write."""
    async with open_rig(kind) as rig:
        data = await written(rig, 0)
        holds = [rig.inject(action, 4 * KIB) for action in ("torn", "sectors", "lost")]
        assert await rig.read(0).end() == OK
        assert np.array_equal(data, rig.payload(rig.slot_count))
        assert [0, 0, 0] == [hold.release() for hold in holds]


async def test_without_checksums_only_the_header_is_proved(open_rig: Any, kind: str) -> None:
    """INV-915: the identity still finds a lost and a misdirected write; a payload that is flipped
    or torn behind its header passes: that is what switching checksums off gives up.
    """
    seal, verify = (flag | SubmitFlag.NO_CHECKSUM for flag in (SubmitFlag.SEAL, SubmitFlag.VERIFY))
    outcomes = {}
    async with open_rig(kind, payload_bytes=128 * KIB, slots=4) as rig:
        for version, name in enumerate(SILENT, 1):
            if name == "flip" and kind == "simulated":
                continue  # which bit is drawn there: it may be one of the header
            for slot in range(4):
                rig.fill(slot)
                write = rig.submit([versioned(rig, Opcode.WRITE, slot, 2 * version, flags=seal)])[0]
                assert await write.end() == OK
            action, argument = SILENT[name]
            rig.fill(1)
            hold = rig.inject(action, argument, opcode=Opcode.WRITE)
            write = rig.submit([versioned(rig, Opcode.WRITE, 1, 2 * version + 1, flags=seal)])[0]
            assert await write.end() == OK
            assert hold.release() == 1
            read = rig.submit(
                [versioned(rig, Opcode.READ, 1, 2 * version + 1, memory=5, flags=verify)]
            )[0]
            outcomes[name] = await read.end()
            if outcomes[name] == OK:
                assert not np.array_equal(rig.payload(1), rig.payload(5))
    passing = {"flip", "torn", "torn-header", "sectors"} & outcomes.keys()
    assert passing == {name for name, status in outcomes.items() if status == OK}
    assert {OK, MISMATCH} == set(outcomes.values())
