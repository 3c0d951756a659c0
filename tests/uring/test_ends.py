"""Cancel, deadline, promotion, cap, drain, close: every end of a transfer, in every state."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from typing import Any

import numpy as np
import pytest

from kvstore._uring import open_engine
from kvstore._uring.base import CANCELLED, DEADLINE, Opcode, SubmitFlag
from kvstore._uring.native import CompletionQueue, now_ns
from kvstore.config import KIB, MIB, IoClass, IoConfig
from kvstore.errors import BusyError, StoreClosed

BACKGROUND, REQUIRED = IoClass.BACKGROUND, IoClass.REQUIRED
VERDICT, END, BOTH = 1, 2, 3


def soon_ns(rig: Any, seconds: float = 0.03) -> int:
    """A deadline on the clock of the engine."""
    if rig.kind == "simulated":
        return round((asyncio.get_running_loop().time() + seconds) * 1e9)
    return now_ns() + round(seconds * 1e9)


async def test_cancelling_a_queued_transfer_ends_it_at_once(
    open_rig: Any, kind: str, narrow: IoConfig
) -> None:
    """INV-118: queued pieces are withdrawn at once; nothing of them reaches the device."""
    async with open_rig(kind, narrow) as rig:
        hold, held = await rig.hold_one()
        queued = rig.write(1, flags=SubmitFlag(0))
        assert rig.engine.cancel(queued.handle)
        assert await queued.end() == CANCELLED
        assert queued.flags == [BOTH]
        hold.release()
        assert await held.end() == 0
        stats = rig.engine.stats()
        assert stats.cancelled == 1
        assert stats.classes[REQUIRED].withdrawn_bytes == rig.slot_bytes


async def test_cancelling_in_the_device_tells_now_and_ends_later(open_rig: Any, kind: str) -> None:
    """INV-118, INV-120: the verdict comes at once, the end with the last piece."""
    async with open_rig(kind) as rig:
        hold, transfer = await rig.hold_one()
        assert rig.engine.cancel(transfer.handle)
        assert await transfer.verdict() == CANCELLED
        await asyncio.sleep(0.01)
        assert transfer.flags == [VERDICT]
        assert not rig.engine.cancel(transfer.handle)
        hold.release()
        assert await transfer.end() == CANCELLED
        assert transfer.flags == [VERDICT, END]


async def test_cancelling_a_transfer_partly_in_the_device(
    open_rig: Any, kind: str, narrow: IoConfig
) -> None:
    """INV-118: the queued half is withdrawn, the piece in the device awaited."""
    async with open_rig(kind, narrow, payload_bytes=256 * KIB, slots=2) as rig:
        if kind == "serial":
            pytest.skip("its pieces are as large as the transfer")
        hold = rig.inject("hold", skip=1)
        transfer = rig.write(0, io_class=BACKGROUND)
        await asyncio.sleep(0.02)
        rig.engine.cancel(transfer.handle)
        assert await transfer.verdict() == CANCELLED
        hold.release()
        assert await transfer.end() == CANCELLED
        assert rig.engine.stats().background_bytes == 0


async def test_cancelling_what_is_over_does_nothing(open_rig: Any, kind: str) -> None:
    """INV-118: a late cancel returns False, and never hits the next user of the slot."""
    async with open_rig(kind) as rig:
        first = rig.write(0)
        assert await first.end() == 0
        second = rig.write(1)
        assert not rig.engine.cancel(first.handle)
        assert not rig.engine.cancel(0)
        assert not rig.engine.cancel((1 << 64) - 1)
        assert await second.end() == 0


async def test_cancelling_right_after_submit_or_before_reaping(open_rig: Any, kind: str) -> None:
    """INV-118: whatever state the race finds, there is one verdict and one end."""
    async with open_rig(kind) as rig:
        for wait in (None, 0.0, 0.0005, 0.002):
            transfers = [rig.write(slot) for slot in range(16)]
            if wait is not None:
                await asyncio.sleep(wait)
            for transfer in transfers:
                rig.engine.cancel(transfer.handle)
            for transfer in transfers:
                assert await transfer.end() in {0, CANCELLED}
        stats = rig.engine.stats()
        assert stats.classes[REQUIRED].inflight_bytes == stats.classes[REQUIRED].queued_bytes == 0


async def test_cancelling_while_native_code_seals_or_verifies(
    open_rig: Any, native_kind: str
) -> None:
    """INV-118, INV-120: work on the memory is a user of it; the end waits for it."""
    async with open_rig(native_kind, payload_bytes=16 * MIB, slots=3) as rig:
        for _ in range(5):
            transfers = [rig.write(slot) for slot in range(3)]
            for transfer in transfers:
                rig.engine.cancel(transfer.handle)
            for transfer in transfers:
                assert await transfer.end() in {0, CANCELLED}
        assert await rig.write(0).end() == 0
        for step in range(10):
            transfer = rig.read(0, flags=SubmitFlag.VERIFY | SubmitFlag.POISON)
            await asyncio.sleep(step * 0.001)
            rig.engine.cancel(transfer.handle)
            assert await transfer.end() in {0, CANCELLED}


@pytest.mark.parametrize("payload_bytes", [64 * KIB, MIB])
async def test_a_cancelled_read_in_the_queue_is_poisoned(
    open_rig: Any, kind: str, narrow: IoConfig, payload_bytes: int
) -> None:
    """INV-219: a read withdrawn from the queue leaves no plausible bytes either."""
    async with open_rig(kind, narrow, payload_bytes=payload_bytes, slots=4) as rig:
        hold, _ = await rig.hold_one()
        transfer = rig.read(1, flags=SubmitFlag.VERIFY | SubmitFlag.POISON)
        rig.engine.cancel(transfer.handle)
        assert await transfer.end() == CANCELLED
        assert (rig.slot(5) == 0xFF).all()
        hold.release()


async def test_a_deadline_in_the_queue_ends_the_transfer(
    open_rig: Any, kind: str, narrow: IoConfig
) -> None:
    """INV-119: when it passes, queued pieces are withdrawn and the waiter is told."""
    async with open_rig(kind, narrow) as rig:
        hold, _ = await rig.hold_one()
        late = rig.write(1, deadline_ns=soon_ns(rig), flags=SubmitFlag(0))
        assert await late.end() == DEADLINE
        assert late.flags == [BOTH]
        assert rig.engine.stats().deadlines == 1
        hold.release()


async def test_an_operation_that_never_completes_is_quarantined(open_rig: Any, kind: str) -> None:
    """INV-119, INV-120: the waiter is told in time, the end comes with the piece, others go on."""
    async with open_rig(kind) as rig:
        hold = rig.inject("hold")
        started = asyncio.get_running_loop().time()
        stuck = rig.write(0, deadline_ns=soon_ns(rig, 0.05))
        assert await stuck.verdict() == DEADLINE
        assert asyncio.get_running_loop().time() - started < 1.0
        assert stuck.flags == [VERDICT]
        if kind != "serial":  # its one worker has nothing else to do
            assert await rig.write(1).end() == 0
        hold.release()
        assert await stuck.end() == DEADLINE


async def test_the_deadline_of_the_configuration_is_the_default(open_rig: Any, kind: str) -> None:
    """INV-119: 0 takes the engine's deadline; all ones take none."""
    async with open_rig(kind, IoConfig(deadline=0.05)) as rig:
        hold = rig.inject("hold", count=2)
        by_default, without = rig.write(0), None
        if kind != "serial":
            without = rig.write(1, deadline_ns=(1 << 64) - 1)
        assert await by_default.verdict() == DEADLINE
        await asyncio.sleep(0.05)
        hold.release()
        assert await by_default.end() == DEADLINE
        if without is not None:
            assert await without.end() == 0


async def test_a_deadline_can_be_moved_to_a_later_time_only(open_rig: Any, kind: str) -> None:
    """INV-336: extending works while the verdict is open, also to never; nothing shortens it."""
    async with open_rig(kind) as rig:
        hold = rig.inject("hold", count=3)
        started = asyncio.get_running_loop().time()
        longer = rig.write(0, deadline_ns=soon_ns(rig, 0.05))
        assert rig.engine.extend_deadline(longer.handle, soon_ns(rig, 0.2))
        assert not rig.engine.extend_deadline(longer.handle, soon_ns(rig, 0.01))
        assert not rig.engine.extend_deadline(longer.handle, 0)
        assert await longer.verdict() == DEADLINE
        assert asyncio.get_running_loop().time() - started > 0.15
        assert not rig.engine.extend_deadline(longer.handle, soon_ns(rig, 5)), "told already"
        hold.release()
        assert await longer.end() == DEADLINE
        hold = rig.inject("hold")
        endless = rig.write(0, deadline_ns=soon_ns(rig, 0.05))
        assert rig.engine.extend_deadline(endless.handle, (1 << 64) - 1)
        assert not rig.engine.extend_deadline(endless.handle, soon_ns(rig, 5)), "never is later"
        await asyncio.sleep(0.1)
        hold.release()
        assert await endless.end() == 0
        assert not rig.engine.extend_deadline(endless.handle, soon_ns(rig, 5)), "over"


async def test_extended_deadlines_pass_in_their_new_order(
    open_rig: Any, kind: str, narrow: IoConfig
) -> None:
    """INV-336, INV-119: the queue of deadlines stays in order when one moves to a later time."""
    async with open_rig(kind, narrow) as rig:
        hold, _ = await rig.hold_one()
        base, told, handles = soon_ns(rig, 0.3), [], []
        for step in range(8):
            record = rig.record(
                Opcode.WRITE, 1, flags=SubmitFlag(0), deadline_ns=base + step * 2_000_000
            )
            record["token"] = rig.queue.token(lambda *_, step=step: told.append(step))
            rig.engine.submit(rig.queue, record)
            handles.append(int(record["handle"][0]))
        last = rig.write(2, deadline_ns=base + 60_000_000)
        for step in (0, 3, 6):
            later = base + (20 - step) * 2_000_000
            assert rig.engine.extend_deadline(handles[step], later)
        assert await last.end() == DEADLINE
        assert told == [1, 2, 4, 5, 7, 6, 3, 0]
        hold.release()


async def test_many_deadlines_pass_in_order(open_rig: Any, kind: str, narrow: IoConfig) -> None:
    """INV-119: deadlines are kept whatever the order of their submission."""
    async with open_rig(kind, narrow) as rig:
        hold, _ = await rig.hold_one()
        base, told, transfers = soon_ns(rig, 0.3), [], []
        for step in (5, 1, 9, 3, 7, 2, 8, 4, 6, 0):
            record = rig.record(
                Opcode.WRITE, 1, flags=SubmitFlag(0), deadline_ns=base + step * 2_000_000
            )
            record["token"] = rig.queue.token(lambda *_, step=step: told.append(step))
            rig.engine.submit(rig.queue, record)
        transfers.append(rig.write(2, deadline_ns=base + 25_000_000))
        assert await transfers[0].end() == DEADLINE
        assert told == list(range(10))
        hold.release()


async def test_promotion_in_every_state(open_rig: Any, kind: str, narrow: IoConfig) -> None:
    """INV-108, INV-110, INV-112: queued yes, twice no, finished no; the cap is not repaid."""
    async with open_rig(kind, narrow) as rig:
        hold, _ = await rig.hold_one()
        queued = rig.write(1, io_class=BACKGROUND, flags=SubmitFlag(0))
        charged = rig.engine.stats().background_bytes
        assert charged == rig.slot_bytes
        assert rig.engine.promote(queued.handle)
        assert not rig.engine.promote(queued.handle)
        assert rig.engine.stats().background_bytes == charged
        required = rig.write(2)
        assert not rig.engine.promote(required.handle)
        hold.release()
        assert await queued.end() == 0
        assert await required.end() == 0
        assert not rig.engine.promote(queued.handle)
        stats = rig.engine.stats()
        assert stats.classes[BACKGROUND].promoted_out_bytes == rig.slot_bytes
        assert stats.classes[REQUIRED].promoted_in_bytes == rig.slot_bytes
        assert stats.background_bytes == 0


async def test_promotion_while_the_header_is_laid_down(open_rig: Any, native_kind: str) -> None:
    """INV-108: pieces that are not queued yet enter the required queue directly."""
    async with open_rig(native_kind, payload_bytes=16 * MIB, slots=3) as rig:
        transfers = [rig.write(slot, io_class=BACKGROUND) for slot in range(3)]
        promoted = [rig.engine.promote(transfer.handle) for transfer in transfers]
        assert [0, 0, 0] == [await transfer.end() for transfer in transfers]
        stats = rig.engine.stats()
        assert stats.classes[BACKGROUND].promotions == sum(promoted)
        assert stats.background_bytes == 0


async def test_the_background_cap_skips_and_counts(open_rig: Any, kind: str) -> None:
    """INV-111: above the cap a background transfer completes at once with ENOBUFS."""
    config = IoConfig(background_bytes_max=300 * KIB)
    async with open_rig(kind, config) as rig:
        hold = rig.inject("hold", count=None)
        room = rig.engine.background_room_bytes()
        assert room == 300 * KIB
        transfers = [rig.write(slot, io_class=BACKGROUND) for slot in range(3)]
        assert await transfers[2].end() == -errno.ENOBUFS
        assert rig.engine.background_room_bytes() == room - 2 * rig.slot_bytes
        hold.release()
        assert [0, 0] == [await transfer.end() for transfer in transfers[:2]]
        assert rig.engine.background_room_bytes() == room
        assert rig.engine.stats().classes[BACKGROUND].skipped == 1


async def test_drain_waits_for_one_file_only(open_rig: Any, kind: str) -> None:
    """INV-121, INV-123: another file's transfers do not hold it up, and its own are awaited."""
    async with open_rig(kind) as rig:
        if kind == "serial":
            pytest.skip("one transfer at a time: a held one holds up everything")
        if kind == "simulated":
            other = rig.engine.register_file(-1, -1)
        else:
            file = rig.slot_file
            other = rig.engine.register_file(file.direct_fd, file.buffered_fd)
        hold = rig.inject("hold", file_id=other)
        stuck = rig.write(1, file_id=other)
        mine = rig.write(0)
        assert await rig.engine.drain(rig.file_id, 5.0)
        assert await mine.end() == 0
        assert not await rig.engine.drain(other, 0.02)
        with pytest.raises(BusyError):
            rig.engine.unregister_file(other)
        waiter = asyncio.ensure_future(rig.engine.drain(other, 5.0))
        await asyncio.sleep(0.01)
        assert not waiter.done()
        hold.release()
        assert await waiter
        assert await stuck.end() == 0
        rig.engine.unregister_file(other)


async def test_drain_can_be_cancelled(open_rig: Any, native_kind: str) -> None:
    """Cancelling a drain stops the waiting and nothing else."""
    async with open_rig(native_kind) as rig:
        hold = rig.inject("hold")
        transfer = rig.write(0)
        waiter = asyncio.ensure_future(rig.engine.drain(rig.file_id, 5.0))
        await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        hold.release()
        assert await transfer.end() == 0


async def test_closing_ends_every_transfer_once(open_rig: Any, kind: str) -> None:
    """INV-113, INV-120: close cancels what is queued and waits for what is in the device."""
    async with open_rig(kind) as rig:
        transfers = [rig.write(slot % 16, io_class=IoClass(1 + slot % 2)) for slot in range(200)]
        await rig.engine.aclose()
        statuses = [await transfer.end() for transfer in transfers]
        assert set(statuses) <= {0, CANCELLED}
        with pytest.raises(StoreClosed):
            rig.write(0)


async def test_closing_waits_for_a_slow_piece(open_rig: Any, native_kind: str) -> None:
    """INV-120: the engine is not closed before the last piece is back."""
    async with open_rig(native_kind) as rig:
        rig.inject("delay", 100_000_000)
        transfer = rig.write(0)
        await asyncio.sleep(0.01)
        started = asyncio.get_running_loop().time()
        await rig.engine.aclose()
        assert asyncio.get_running_loop().time() - started > 0.05
        assert await transfer.end() == CANCELLED
        assert not rig.engine.leaked


async def test_a_piece_that_never_comes_back_bounds_the_close(
    open_rig: Any, native_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """INV-139: if draining fails within its limit, memory and threads are leaked and reported."""
    async with open_rig(native_kind, IoConfig(drain_timeout=0.05)) as rig:
        _, transfer = await rig.hold_one()
        handle = rig.engine.handle
        await rig.engine.aclose()
        assert rig.engine.leaked
        assert "did not come back" in caplog.text
        assert await transfer.verdict() == CANCELLED
        assert transfer.flags == [VERDICT]
        with pytest.raises(StoreClosed):
            rig.write(1)
        from kvstore._uring._ffi import lib

        lib.kvs_engine_release(handle, 0)  # the mount comes back
        assert await transfer.end() == CANCELLED
        assert lib.kvs_engine_join(handle, 10**9) == 0
        lib.kvs_engine_free(handle)


async def test_a_cancelled_close_still_closes(open_rig: Any, native_kind: str) -> None:
    """A second cancel of the task makes the rest of the close synchronous, never skipped."""
    async with open_rig(native_kind) as rig:
        rig.inject("delay", 50_000_000)
        transfer = rig.write(0)
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(rig.engine.aclose())
        await asyncio.sleep(0.005)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(StoreClosed):
            rig.write(0)
        assert await transfer.end() == CANCELLED


async def test_closing_from_two_tasks(open_rig: Any, native_kind: str) -> None:
    """INV-909: both calls return once the engine is closed."""
    async with open_rig(native_kind) as rig:
        rig.inject("delay", 30_000_000)
        transfer = rig.write(0)
        await asyncio.sleep(0.01)
        await asyncio.gather(rig.engine.aclose(), rig.engine.aclose())
        assert await transfer.end() == CANCELLED
        with pytest.raises(StoreClosed):
            rig.write(1)


async def test_two_queues_share_an_engine(open_rig: Any, native_kind: str) -> None:
    """INV-122, INV-123: each store has its own queue; cap and piece queues are shared."""
    async with open_rig(native_kind) as rig:
        second = CompletionQueue(asyncio.get_running_loop())
        mine = rig.submit([rig.record(Opcode.WRITE, slot) for slot in range(8)])
        theirs = rig.submit([rig.record(Opcode.WRITE, slot) for slot in range(8, 16)], second)
        for transfer in mine + theirs:
            assert await transfer.end() == 0
        late = rig.submit([rig.record(Opcode.WRITE, 0)], second)[0]
        second.close()
        assert await rig.write(1).end() == 0
        assert await rig.engine.drain(rig.file_id, 5.0)
        assert not late.events


async def test_an_engine_outlives_the_queue_of_a_transfer(open_rig: Any, native_kind: str) -> None:
    """INV-120: a queue closed with work in flight is kept alive by that work."""
    async with open_rig(native_kind) as rig:
        hold = rig.inject("hold")
        rig.write(0)
        rig.queue.close()
        hold.release()
        assert await rig.engine.drain(rig.file_id, 5.0)
        rig.queue = CompletionQueue(asyncio.get_running_loop())
        assert await rig.write(1).end() == 0


def test_a_loop_closed_with_work_in_flight(tmp_path: Any, native_kind: str) -> None:
    """INV-120: asyncio.run may end in the middle; the engine goes on and closes without a loop."""
    from kvstore._uring.base import SUBMISSION_DTYPE
    from kvstore._uring.engine import FaultRule
    from kvstore._uring.native import Arena
    from kvstore._uring.probe import open_slot_file

    file = open_slot_file(tmp_path / "slots", MIB)
    arena = Arena(MIB)
    engine = open_engine(kind=native_kind)
    file_id = engine.register_file(file.direct_fd, file.buffered_fd)
    fault = engine.inject(FaultRule(action="hold"))

    async def main() -> CompletionQueue:
        queue = CompletionQueue(asyncio.get_running_loop())
        record = np.zeros(1, SUBMISSION_DTYPE)
        record["address"], record["payload_bytes"] = arena.address, 64 * KIB
        record["gate_word"], record["file_id"] = -1, file_id
        record["io_class"], record["opcode"] = 1, 1
        record["token"] = queue.token(lambda *_: None)
        engine.submit(queue, record)
        await asyncio.sleep(0)
        return queue

    queue = asyncio.run(main())
    queue.close()
    fault.release()
    engine.close()
    assert not engine.leaked
    assert engine.stats().classes[REQUIRED].inflight_bytes == 0
    file.close()
    arena.close()


def test_two_loops_in_one_process(tmp_path: Any, native_kind: str) -> None:
    """INV-122: engines on two loops in two threads do not know of each other."""
    import threading

    from kvstore._uring.base import SUBMISSION_DTYPE
    from kvstore._uring.native import Arena
    from kvstore._uring.probe import open_slot_file

    results: list[int] = []

    async def main(name: str) -> None:
        file, arena = open_slot_file(tmp_path / name, MIB), Arena(MIB)
        engine = open_engine(kind=native_kind)
        file_id = engine.register_file(file.direct_fd, file.buffered_fd)
        queue = CompletionQueue(asyncio.get_running_loop())
        for _ in range(50):
            done = asyncio.get_running_loop().create_future()
            record = np.zeros(1, SUBMISSION_DTYPE)
            record["address"], record["payload_bytes"] = arena.address, 64 * KIB
            record["gate_word"], record["file_id"] = -1, file_id
            record["io_class"], record["opcode"] = 1, 1
            record["token"] = queue.token(lambda status, *_, done=done: done.set_result(status))
            engine.submit(queue, record)
            results.append(await done)
        await engine.aclose()
        queue.close()
        file.close()
        arena.close()

    threads = [
        threading.Thread(target=lambda name=name: asyncio.run(main(name))) for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0] * 100


async def test_settings_of_one_engine_do_not_change_another(open_rig: Any, narrow: Any) -> None:
    """INV-122: there is no hidden process-wide engine."""
    async with open_rig("threads", narrow) as rig:
        wide = open_engine(dataclasses.replace(narrow, inflight_bytes=MIB), kind="threads")
        assert (4096, MIB) == (rig.engine.stats().bounds["total"], wide.stats().bounds["total"])
        wide.close()
