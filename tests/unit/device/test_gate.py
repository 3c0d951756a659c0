"""The gate as a public primitive, over native words and the CPU device."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import numpy as np
import pytest

from kvstore.errors import DeviceError, GateBusy, LogicError, UnsupportedError
from kvstore.gate import Gate


def test_any_awaited_read_publishes_the_ticket(harness: Any, on_loop: Any) -> None:
    """INV-201, INV-204: the stream goes on when the awaited read has resolved, with its data."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)
    gate = Gate(device, harness.ring)
    stream = device.stream("gated0")

    async def read() -> int:
        await asyncio.sleep(0.01)
        harness.fill(4, 9)
        return 17

    async def body(waiting: Any) -> None:
        ticket = gate.take(stream)
        harness.to_device(stream, pool, [1], [4])
        assert ticket.status is None
        assert await ticket.cover(read()) == 17
        assert await waiting.notified(device, stream) == 0
        assert np.array_equal(harness.payload(4), pool.as_tensor()[1])
        assert ticket.status == 0 and not ticket.publish(-5)
        ticket.release()

    on_loop(body)
    stats = gate.stats()
    assert (1, 1, 0, 0) == (stats.taken, stats.published_good, stats.published_failed, stats.open)


def test_failed_and_cancelled_reads_open_the_gate(harness: Any, on_loop: Any) -> None:
    """INV-204: an error or a cancellation publishes failure before it propagates."""
    device = harness.open()
    gate = Gate(device, harness.ring)
    stream = device.stream("gated0")

    async def broken() -> None:
        raise OSError(errno.EIO, "bad sector")

    async def body(waiting: Any) -> None:
        ticket = gate.take(stream)
        with pytest.raises(OSError, match="bad sector"):
            await ticket.cover(broken())
        assert ticket.status == -errno.EIO
        assert await waiting.notified(device, stream) == 0
        ticket.release()
        ticket = gate.take(stream)
        task = asyncio.ensure_future(ticket.cover(asyncio.sleep(60)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ticket.status == -errno.ECANCELED
        assert await waiting.notified(device, stream) == 0
        ticket.release()

    on_loop(body)
    assert gate.stats().published_failed == 2


def test_cap_counts_distinct_parked_streams(harness: Any) -> None:
    """INV-211: streams of callers count, several tickets of one stream count once."""
    device = harness.open()
    gate = Gate(device, harness.ring, streams_max=2)
    first, second, third = (device.new_stream() for _ in range(3))
    one = gate.take(first, behind=(second,))
    two = gate.take(first)
    assert gate.room() == 0
    with pytest.raises(GateBusy):
        gate.take(third)
    one.publish()
    assert gate.room() == 1
    three = gate.take(third)
    with pytest.raises(GateBusy):
        gate.take(second)
    for ticket in (two, three):
        ticket.publish()
    device.synchronize()
    stats = gate.stats()
    assert (3, 2, 0) == (stats.published_good, stats.busy, stats.parked_streams)
    assert stats.taken == stats.published_good + stats.published_failed + stats.open


def test_cap_of_zero_switches_the_gate_off(harness: Any) -> None:
    """INV-211: gated_streams=0 means await mode always; above 4 is refused."""
    device = harness.open()
    with pytest.raises(GateBusy):
        Gate(device, harness.ring, streams_max=0).take(device.stream("gated0"))
    with pytest.raises(LogicError):
        Gate(device, harness.ring, streams_max=5)


def test_words_run_out_without_blocking(make_harness: Any) -> None:
    """INV-211: no word left is GateBusy; a reservation of several takes all or none."""
    harness = make_harness(words=2)
    device, ring = harness.open(), harness.ring
    gate = Gate(device, ring, streams_max=4)
    stream = device.stream("gated0")
    with pytest.raises(GateBusy):
        gate.reserve(stream, (1, 1, 1))
    assert gate.stats().open == 0
    tickets = gate.reserve(stream, (1, 1))
    with pytest.raises(GateBusy):
        gate.take(stream)
    assert gate.fail(tickets) == 2


def test_layer_groups_have_a_ticket_each(harness: Any, on_loop: Any) -> None:
    """Layer groups: the first group's work runs while the later gates are still closed."""
    device = harness.open()
    pool = device.create_pool("full", 8, harness.page_bytes)
    gate = Gate(device, harness.ring)
    stream = device.stream("gated0")

    async def body(waiting: Any) -> None:
        tickets = gate.reserve(stream, (1,) * 4)
        events = []
        for group, ticket in enumerate(tickets):
            ticket.enqueue_wait()
            harness.to_device(stream, pool, [group], [group])
            events.append(stream.record())
        assert gate.stats().parked_streams == 1
        for group, ticket in enumerate(tickets):
            want = harness.fill(group, group + 50)
            ticket.publish()
            token, future = waiting.token()
            device.notify_event(events[group], waiting.queue, token)
            assert await future == 0
            assert np.array_equal(want, pool.as_tensor()[group])
            assert not any(event.query() for event in events[group + 1 :])

    on_loop(body)


def test_c19_a_failed_launch_publishes_its_ticket(harness: Any, on_loop: Any) -> None:
    """C19, INV-213, INV-215: the error is raised after publication; the next gate works."""
    device = harness.open()
    gate = Gate(device, harness.ring)
    stream = device.stream("gated0")

    async def body(waiting: Any) -> None:
        device.inject("wait_ticket", 1)
        with pytest.raises(DeviceError):
            gate.take(stream)
        stats = gate.stats()
        assert (1, 1, 0, 1) == (
            stats.taken,
            stats.published_failed,
            stats.open,
            stats.await_fallbacks,
        )
        ticket = gate.take(stream)
        ticket.publish()
        assert await waiting.notified(device, stream) == 0

    on_loop(body)


def test_c19_failure_at_each_step_behind_the_gate(harness: Any, on_loop: Any) -> None:
    """C19: whichever call behind the wait fails, failing the batch opens its gates."""
    device = harness.open()
    pool = device.create_pool("full", 8, harness.page_bytes)
    gate = Gate(device, harness.ring)
    stream = device.stream("gated0")

    async def body(waiting: Any) -> None:
        for call in ("wait_ticket", "copy_pages", "record", "notify"):
            for nth in (1, 2):
                device.inject(call, 1, nth=nth)
                tickets = gate.reserve(stream, (1, 1))
                with pytest.raises(DeviceError):
                    for ticket in tickets:
                        ticket.enqueue_wait()
                        harness.to_device(stream, pool, [0], [0])
                        stream.record()
                        token, _ = waiting.token()
                        device.notify(stream, waiting.queue, token)
                gate.fail(tickets)
                assert all(ticket.status < 0 for ticket in tickets)
                assert await waiting.notified(device, stream) == 0
                for ticket in tickets:
                    ticket.release()

    on_loop(body)
    assert gate.stats().open == 0


def test_gates_are_refused_on_capturing_streams_and_weak_devices(harness: Any) -> None:
    """INV-212, INV-213: nothing is taken where the stream cannot wait."""
    device = harness.open()
    stream = device.stream("aux")
    gate = Gate(device, harness.ring)
    stream.begin_capture()
    with pytest.raises(UnsupportedError):
        gate.take(stream)
    stream.end_capture()
    with pytest.raises(LogicError):
        harness.open(gates=False).wrap_stream(stream)
    with pytest.raises(UnsupportedError):
        Gate(harness.device, harness.ring).take(None)
    assert gate.stats().taken == 0


def test_aarch64_needs_native_words(harness: Any, monkeypatch: Any) -> None:
    """INV-218: without the store barrier of the extension the gate is refused."""

    class PlainWords:
        def take(self, _count: int) -> None:
            raise AssertionError

    device = harness.open()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UnsupportedError):
        Gate(device, PlainWords()).take(None)
    ticket = Gate(device, harness.ring).take(None)
    ticket.publish()


def test_close_opens_every_gate(harness: Any, on_loop: Any) -> None:
    """INV-222: closing publishes all open tickets, so that no stream stays parked."""
    device = harness.open()
    gate = Gate(device, harness.ring, streams_max=4)
    streams = [device.new_stream() for _ in range(4)]

    async def body(waiting: Any) -> None:
        tickets = [gate.take(stream) for stream in streams]
        assert gate.close() == 4
        for stream, ticket in zip(streams, tickets, strict=True):
            assert await waiting.notified(device, stream) == 0
            assert ticket.status == -errno.ECANCELED

    on_loop(body)


def test_status_outlives_the_reuse_of_the_word(make_harness: Any) -> None:
    """INV-203, INV-207, INV-210: a word is used again only after publication; statuses stay."""
    harness = make_harness(words=1)
    device, ring = harness.open(), harness.ring
    gate = Gate(device, ring, streams_max=4)
    stream = device.stream("gated0")
    first = gate.take(stream)
    assert first.publish(-7)
    second = gate.take(stream)
    assert (first.word, first.generation + 1) == (second.word, second.generation)
    second.publish()
    assert (-7, 0) == (first.status, second.status)
    device.synchronize()


def test_many_cycles_over_eight_streams(make_harness: Any) -> None:
    """T2: tickets of eight streams published in random order all open their own gate."""
    harness = make_harness(words=16)
    device, ring = harness.open(), harness.ring
    rng = np.random.default_rng(3)
    streams = [device.new_stream() for _ in range(8)]
    for _ in range(300):
        taken = [ring.take(1) for _ in streams]
        for stream, ticket in zip(streams, taken, strict=True):
            stream.wait_ticket(ticket)
        events = [stream.record() for stream in streams]
        for index in rng.permutation(8):
            ring.publish(taken[index], 0)
        device.synchronize()
        assert all(event.query() for event in events)
        for ticket in taken:
            ring.release(ticket)


def test_the_oldest_open_ticket_is_visible_and_stays_open(harness: Any) -> None:
    """INV-223: the watchdog sees the age of the oldest ticket and publishes nothing by itself."""
    device = harness.open()
    gate = Gate(device, harness.ring)
    assert harness.ring.oldest_open() is None
    first = gate.take(device.stream("gated0"))
    second = gate.take(device.stream("gated1"))
    oldest = harness.ring.oldest_open()
    assert (first.word, first.generation) == (oldest.word, oldest.generation)
    assert oldest.age_ns >= 0
    assert first.status is None and second.status is None
    first.publish()
    assert second.word == harness.ring.oldest_open().word
    second.publish()
    assert harness.ring.oldest_open() is None


def test_no_fallback_polls_by_time(harness: Any, on_loop: Any) -> None:
    """INV-214: waiting at a gate wakes nobody; the publication alone wakes the stream."""
    device = harness.open()
    gate = Gate(device, harness.ring)
    stream = device.stream("gated0")

    async def body(waiting: Any) -> None:
        ticket = gate.take(stream)
        token, future = waiting.token()
        device.notify(stream, waiting.queue, token)
        wakeups = waiting.queue.wakeups
        begin = time.process_time()
        await asyncio.sleep(0.2)
        assert wakeups == waiting.queue.wakeups
        assert time.process_time() - begin < 0.1
        ticket.publish()
        assert await future == 0

    on_loop(body)
