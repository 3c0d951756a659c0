"""Gated reads: every ticket is published exactly once, whatever happens to its transfers."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from kvstore._uring.base import CANCELLED, DEADLINE, MISMATCH, SubmitFlag
from kvstore._uring.native import now_ns
from kvstore.config import KIB, MIB, IoClass, IoConfig

GATED = SubmitFlag.VERIFY | SubmitFlag.POISON


async def prepare(rig: Any, slots: int) -> None:
    for slot in range(slots):
        rig.fill(slot)
        assert await rig.write(slot).end() == 0


def check_counts(rig: Any, *, good: int, failed: int) -> None:
    """INV-811: taken = published + open."""
    counts = rig.gate.counts
    assert {"taken": good + failed, "good": good, "failed": failed, "open": 0} == counts
    stats = rig.engine.stats()
    assert (good, failed) == (stats.tickets_good, stats.tickets_failed)


@pytest.mark.parametrize("payload_bytes", [64 * KIB, MIB])
async def test_success_is_published_after_the_last_verdict(
    open_rig: Any, native_kind: str, payload_bytes: int
) -> None:
    """INV-203 to INV-206: one ticket covers a batch; it opens with the last page, verified."""
    async with open_rig(native_kind, payload_bytes=payload_bytes, slots=4) as rig:
        await prepare(rig, 4)
        ticket = rig.gate.take(4)
        hold = rig.inject("hold", skip=3)
        reads = [rig.read(slot, flags=GATED, ticket=ticket) for slot in range(4)]
        await asyncio.sleep(0.02)
        assert ticket.status is None
        assert not rig.gate.passed(ticket)
        hold.release()
        assert [0] * 4 == [await read.end() for read in reads]
        assert ticket.status == 0
        assert rig.gate.passed(ticket)
        check_counts(rig, good=1, failed=0)


@pytest.mark.parametrize(
    ("action", "argument", "expected"),
    [("errno", errno.EIO, -errno.EIO), ("zero", 0, None), ("flip", 8 * 4100, MISMATCH)],
)
async def test_failure_is_published_after_the_poison(
    open_rig: Any, native_kind: str, action: str, argument: int, expected: int | None
) -> None:
    """INV-204, INV-205, INV-219: one bad page fails the ticket, once all pages are back."""
    async with open_rig(native_kind, slots=4) as rig:
        await prepare(rig, 3)
        ticket = rig.gate.take(3)
        where = {"offset": (rig.slot_bytes, rig.slot_bytes + 1)}
        rig.inject(action, argument, **where)
        reads = [rig.read(slot, flags=GATED, ticket=ticket) for slot in range(3)]
        statuses = [await read.end() for read in reads]
        assert [0, 0] == [statuses[0], statuses[2]]
        assert ticket.status == statuses[1] != 0
        assert expected is None or ticket.status == expected
        assert (rig.slot(4 + 1) == 0xFF).all()
        check_counts(rig, good=0, failed=1)


async def test_a_deadline_opens_the_gate_at_once(open_rig: Any, native_kind: str) -> None:
    """INV-205: a lost completion does not keep the gate shut; the slot stays quarantined."""
    async with open_rig(native_kind) as rig:
        await prepare(rig, 1)
        ticket = rig.gate.take(2)
        hold = rig.inject("hold")
        read = rig.read(0, flags=GATED, ticket=ticket, deadline_ns=now_ns() + 30_000_000)
        assert await read.verdict() == DEADLINE
        assert ticket.status == DEADLINE
        assert read.flags == [1]
        hold.release()
        assert await read.end() == DEADLINE
        check_counts(rig, good=0, failed=1)


async def test_a_cancel_opens_the_gate_at_once(
    open_rig: Any, native_kind: str, narrow: IoConfig
) -> None:
    """INV-204: cancelled in the device and cancelled in the queue."""
    async with open_rig(native_kind, narrow) as rig:
        await prepare(rig, 2)
        first, second = rig.gate.take(1), rig.gate.take(1)
        hold = rig.inject("hold")
        in_device = rig.read(0, flags=GATED, ticket=first)
        await rig.until_in_device(IoClass.READ)
        queued = rig.read(1, flags=GATED, ticket=second)
        rig.engine.cancel(in_device.handle)
        assert first.status == CANCELLED
        rig.engine.cancel(queued.handle)
        assert await queued.end() == CANCELLED
        assert second.status == CANCELLED
        assert (rig.slot(rig.slot_count + 1) == 0xFF).all()
        hold.release()
        assert await in_device.end() == CANCELLED
        check_counts(rig, good=0, failed=2)


async def test_closing_opens_every_gate(open_rig: Any, native_kind: str, narrow: IoConfig) -> None:
    """INV-204: engine stop publishes queued, running and never submitted tickets."""
    async with open_rig(native_kind, narrow) as rig:
        await prepare(rig, 3)
        tickets = [rig.gate.take(1) for _ in range(4)]
        rig.inject("delay", 50_000_000)
        reads = [rig.read(slot, flags=GATED, ticket=tickets[slot]) for slot in range(3)]
        await rig.engine.aclose()
        for read in reads:
            await read.end()
        assert all(ticket.status == CANCELLED for ticket in tickets)
        assert rig.gate.counts["open"] == 0


@pytest.mark.parametrize("opener", ["stop", "caller", "caller-good"])
async def test_the_first_failure_of_a_batch_is_kept_whoever_opens_the_gate(
    open_rig: Any, native_kind: str, opener: str
) -> None:
    """INV-204 to INV-207: a read has failed, the rest of its batch is never submitted: the ticket
    says why, also when an engine stop opens it, or a caller, and is never good.
    """
    async with open_rig(native_kind) as rig:
        await prepare(rig, 1)
        ticket = rig.gate.take(2)
        rig.inject("errno", errno.EIO)
        assert -errno.EIO == await rig.read(0, flags=GATED, ticket=ticket).end()
        assert ticket.status is None
        if opener == "stop":
            await rig.engine.aclose()
        else:
            assert rig.gate.publish(ticket, CANCELLED if opener == "caller" else 0)
        assert -errno.EIO == ticket.status


async def test_a_stop_during_the_poison_tells_why(open_rig: Any, native_kind: str) -> None:
    """INV-205, INV-206: a stop opens the gate of a read that has failed before its memory is
    poisoned; ticket and verdict say the same.
    """
    async with open_rig(native_kind, payload_bytes=64 * MIB, slots=1) as rig:
        await prepare(rig, 1)
        ticket = rig.gate.take(1)
        rig.inject("errno", errno.EIO)
        read = rig.read(0, flags=GATED, ticket=ticket)
        while not rig.engine.stats().classes[IoClass.READ].errors and ticket.status is None:
            pass  # the loop stands still, the engine does not
        await rig.engine.aclose()
        assert -errno.EIO == await read.end() == ticket.status
        assert (rig.slot(1) == 0xFF).all()


async def test_a_gate_opens_while_the_loop_is_blocked(open_rig: Any, native_kind: str) -> None:
    """INV-205, design 2: publication needs neither the loop nor the GIL's owner to return."""
    import time

    from kvstore._uring._ffi import lib

    async with open_rig(native_kind) as rig:
        await prepare(rig, 1)
        ticket = rig.gate.take(1)
        read = rig.read(0, flags=GATED, ticket=ticket)
        # the wait is native and on the loop's own thread: nothing of Python runs meanwhile
        until_ns = now_ns() + 5_000_000_000
        assert lib.kvs_gate_wait(rig.gate.handle, ticket.word, ticket.generation, until_ns) == 0
        started = time.perf_counter()
        assert await read.end() == 0
        assert time.perf_counter() - started < 1.0


async def test_a_late_transfer_does_not_touch_a_reused_word(
    open_rig: Any, native_kind: str
) -> None:
    """INV-203, INV-207: a word on its next ticket is not published by a late transfer."""
    async with open_rig(native_kind) as rig:
        await prepare(rig, 1)
        first = rig.gate.take(1)
        hold = rig.inject("hold")
        read = rig.read(0, flags=GATED, ticket=first)
        await rig.until_in_device(IoClass.READ)
        assert rig.gate.publish(first, -errno.EIO)
        second = rig.gate.take(1)
        assert first.word == second.word
        hold.release()
        assert await read.end() == 0
        assert second.status is None
        assert first.status == -errno.EIO
        rig.gate.publish(second, 0)
