"""Transfers that go well: bytes, headers, checksums, files, batches."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore._uring.base import MISMATCH, SUBMISSION_DTYPE, Opcode, SubmitFlag
from kvstore.config import KIB, MIB, IoClass, IoConfig
from kvstore.errors import EngineError, LogicError, StoreClosed

SIZES = [100, 64 * KIB, MIB + 4 * KIB, 5 * MIB - 4 * KIB]


@pytest.mark.parametrize("payload_bytes", SIZES)
async def test_a_page_comes_back_as_it_was_written(
    open_rig: Any, kind: str, payload_bytes: int
) -> None:
    """INV-102, INV-114, INV-914: every byte of every page size survives, with verdict ok."""
    async with open_rig(kind, payload_bytes=payload_bytes, slots=4) as rig:
        data = [rig.fill(slot) for slot in range(4)]
        for transfer in [rig.write(slot) for slot in range(4)]:
            assert await transfer.end() == 0
        for transfer in [rig.read(slot) for slot in range(4)]:
            assert await transfer.end() == 0
            assert transfer.events[0][2] == rig.slot_bytes
        for slot in range(4):
            assert np.array_equal(data[slot], rig.payload(4 + slot))


async def test_the_header_has_the_layout_of_the_format(open_rig: Any, kind: str) -> None:
    """SEAL lays down identity, payload checksum at 192, header checksum at 200, then zeros."""
    async with open_rig(kind, payload_bytes=5000) as rig:
        data = rig.fill(3)
        rig.slot(3)[4096 + 5000 :] = 0xAA
        assert await rig.write(3).end() == 0
        header = rig.slot(3)[:4096]
        assert np.array_equal(header[:192], rig.record(Opcode.WRITE, 3)["identity"][0])
        assert header[192:200].tobytes() == xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
        checksum = xxhash.xxh3_64_intdigest(header[:200].tobytes())
        assert header[200:208].tobytes() == checksum.to_bytes(8, "little")
        assert not header[208:].any()
        assert not rig.slot(3)[4096 + 5000 :].any(), "no stale memory is stored"


@pytest.mark.parametrize("payload_bytes", [64 * KIB, MIB])
@pytest.mark.parametrize("at", [0, 60, 195, 203, 4096 + 77])
async def test_a_changed_slot_is_a_mismatch(
    open_rig: Any, kind: str, payload_bytes: int, at: int
) -> None:
    """INV-914: identity, payload checksum, header checksum or payload: a difference is MISMATCH."""
    async with open_rig(kind, payload_bytes=payload_bytes, slots=4) as rig:
        rig.fill(1)
        assert await rig.write(1).end() == 0
        rig.slot(1)[at] ^= 1
        assert await rig.write(1, flags=SubmitFlag(0)).end() == 0
        assert await rig.read(1).end() == MISMATCH
        assert rig.engine.stats().mismatches == 1


async def test_another_page_in_the_slot_is_a_mismatch(open_rig: Any, kind: str) -> None:
    """INV-914: a stale or misdirected slot, whole in itself, is not what was asked for."""
    async with open_rig(kind) as rig:
        rig.fill(2)
        record = rig.record(Opcode.WRITE, 2)
        record["identity"][0][50] ^= 255
        assert await rig.submit([record])[0].end() == 0
        assert await rig.read(2).end() == MISMATCH


async def test_checksums_can_be_left_out(open_rig: Any, kind: str) -> None:
    """INV-915: with NO_CHECKSUM only the identity is compared."""
    async with open_rig(kind) as rig:
        rig.fill(0)
        assert await rig.write(0, flags=SubmitFlag.SEAL | SubmitFlag.NO_CHECKSUM).end() == 0
        rig.slot(0)[9000] ^= 1
        assert await rig.write(0, flags=SubmitFlag(0)).end() == 0
        flags = SubmitFlag.VERIFY | SubmitFlag.NO_CHECKSUM
        assert await rig.read(0, flags=flags).end() == 0


@pytest.mark.parametrize("direct", ["off", "auto"])
async def test_both_modes_of_a_file_work(open_rig: Any, native_kind: str, direct: str) -> None:
    """INV-130: direct and buffered files give the same bytes, and the mode is reported."""
    async with open_rig(native_kind, direct=direct, payload_bytes=MIB) as rig:
        data = rig.fill(5)
        assert await rig.write(5).end() == 0
        assert await rig.read(5).end() == 0
        assert np.array_equal(data, rig.payload(rig.slot_count + 5))
        stats = rig.engine.stats()
        assert (1, 0) == (stats.direct_files, stats.buffered_files) or not rig.is_direct
        assert rig.engine.is_direct(rig.file_id) == rig.is_direct


async def test_a_batch_of_all_classes_completes(open_rig: Any, kind: str) -> None:
    """INV-101, INV-808: one call hands over all classes, and the bytes balance at the end."""
    async with open_rig(kind) as rig:
        for slot in range(16):
            rig.fill(slot)
        for transfer in [rig.write(slot) for slot in range(16)]:
            assert await transfer.end() == 0
        records = []
        for slot in range(16):
            if slot % 2:
                records.append(rig.record(Opcode.READ, slot, memory=16 + slot))
            else:
                io_class = IoClass.BACKGROUND if slot % 4 else IoClass.REQUIRED
                records.append(rig.record(Opcode.WRITE, slot, io_class=io_class))
        for transfer in rig.submit(records):
            assert await transfer.end() == 0
        stats = rig.engine.stats()
        assert stats.background_bytes == 0
        for counts in stats.classes:
            assert counts.issued_bytes == counts.done_bytes
            assert counts.queued_bytes == counts.inflight_bytes == 0
        assert stats.classes[IoClass.READ].service.total > 0


async def test_many_transfers_wake_the_loop_rarely(open_rig: Any, kind: str) -> None:
    """INV-128, INV-129: a flood beyond every queue loses nothing and is delivered in batches."""
    config = IoConfig(ring_entries=4)
    async with open_rig(kind, config, payload_bytes=4 * KIB, slots=8) as rig:
        for slot in range(8):
            rig.fill(slot)
        records = [
            rig.record(Opcode.WRITE, index % 8, flags=SubmitFlag(0)) for index in range(3000)
        ]
        for transfer in rig.submit(records):
            assert await transfer.end() == 0
        stats = rig.engine.stats()
        assert sum(counts.transfers for counts in stats.classes) == 3000
        assert stats.classes[IoClass.REQUIRED].done_bytes == 3000 * 8 * KIB


async def test_several_transfers_progress_at_once(open_rig: Any) -> None:
    """INV-131: a ring, or 2 workers, have several transfers in the device."""
    for engine_kind in ("io_uring", "threads"):
        async with open_rig(engine_kind) as rig:
            hold = rig.inject("hold", count=2)
            held = [rig.write(slot, flags=SubmitFlag(0)) for slot in (0, 1)]
            await rig.until_in_device(IoClass.REQUIRED, pieces=2)
            assert await rig.write(2).end() == 0
            hold.release()
            assert [0, 0] == [await transfer.end() for transfer in held]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", 1),
        ("offset", 512),
        ("payload_bytes", 0),
        ("header_bytes", 512),
        ("file_id", 77),
        ("io_class", 3),
        ("opcode", 2),
        ("gate_word", 64),
        ("flags", int(SubmitFlag.VERIFY)),
    ],
)
async def test_a_malformed_record_refuses_the_whole_batch(
    open_rig: Any, native_kind: str, field: str, value: int
) -> None:
    """A batch is taken whole or not at all, and a bad record is an error, not a crash."""
    async with open_rig(native_kind) as rig:
        good, bad = rig.record(Opcode.WRITE, 0), rig.record(Opcode.WRITE, 1)
        bad[field] = value
        with pytest.raises(EngineError, match="refused"):
            rig.submit([good, bad])
        assert rig.engine.stats().classes[IoClass.REQUIRED].transfers == 0


async def test_an_empty_batch_is_nothing(open_rig: Any, native_kind: str) -> None:
    """INV-711: nothing to do is done."""
    async with open_rig(native_kind) as rig:
        rig.engine.submit(rig.queue, np.zeros(0, SUBMISSION_DTYPE))
        assert await rig.engine.drain(rig.file_id, 1.0)


async def test_zero_threads_do_the_work_in_the_call(open_rig: Any) -> None:
    """INV-125: with 0 threads submit does the I/O itself."""
    async with open_rig("threads", IoConfig(disk_io_threads=0)) as rig:
        data = rig.fill(4)
        transfer = rig.write(4)
        assert rig.engine.stats().classes[IoClass.REQUIRED].done_bytes == rig.slot_bytes
        assert await transfer.end() == 0
        assert await rig.read(4).end() == 0
        assert np.array_equal(data, rig.payload(rig.slot_count + 4))


async def test_the_serial_engine_does_not_block_the_loop(open_rig: Any) -> None:
    """INV-125: one transfer at a time, in order, while the loop goes on."""
    async with open_rig("serial") as rig:
        hold = rig.inject("hold")
        first, second = rig.write(0, io_class=IoClass.BACKGROUND), rig.write(1)
        await asyncio.sleep(0.01)
        assert not first.events
        assert not second.events
        hold.release()
        assert await second.end() == 0
        assert first.events, "first in, first out"


async def test_closing_twice_and_calls_after_it(open_rig: Any, native_kind: str) -> None:
    """INV-909: a second close does nothing, other calls raise, the last snapshot stays."""
    async with open_rig(native_kind) as rig:
        rig.fill(0)
        assert await rig.write(0).end() == 0
        await rig.engine.aclose()
        await rig.engine.aclose()
        with pytest.raises(StoreClosed):
            rig.write(1)
        assert rig.engine.stats().classes[IoClass.REQUIRED].done_bytes == rig.slot_bytes


async def test_files_come_and_go(open_rig: Any, native_kind: str) -> None:
    """A file id is reused only after the engine has let go of the file behind it."""
    async with open_rig(native_kind) as rig:
        with pytest.raises(EngineError):
            rig.engine.register_file(-1, -1)
        for _ in range(20):
            file_id = rig.engine.register_file(rig.slot_file.direct_fd, rig.slot_file.buffered_fd)
            rig.fill(1)
            assert await rig.write(1, file_id=file_id).end() == 0
            rig.engine.unregister_file(file_id)
        with pytest.raises(LogicError):
            rig.engine.unregister_file(file_id)


async def test_transfers_on_unregistered_memory_work(open_rig: Any, native_kind: str) -> None:
    """INV-138: registration is an extra; I/O on other memory is slower, not wrong."""
    async with open_rig(native_kind) as rig:
        rig.engine.unregister_memory(rig.arena.address)
        data = rig.fill(2)
        assert await rig.write(2).end() == 0
        assert await rig.read(2).end() == 0
        assert np.array_equal(data, rig.payload(rig.slot_count + 2))
