"""What every device promises: the same tests over the CPU, a stand-in driver and a real GPU."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvstore.devices.base import CopyDirection, DeviceCaps
from kvstore.errors import DeviceError, LogicError, StoreClosed
from kvstore.gate import Gate


def test_round_trip_of_permuted_pages(any_device: Any, harness: Any, on_loop: Any) -> None:
    """INV-225: every page comes back from the slot it was put into."""
    device, rng = any_device, np.random.default_rng(1)
    pool = device.create_pool("full", 32, harness.page_bytes)

    async def body(waiting: Any) -> None:
        up, down = device.stream("h2d"), device.stream("d2h")
        for turn in range(5):
            slots = rng.permutation(32).astype(np.int32)
            for host in range(32):
                harness.fill(host, turn * 64 + host)
            source = np.arange(32, dtype=np.int32)
            device.copy_pages(up, pool, slots, harness.host, source, CopyDirection.TO_DEVICE)
            down.wait_event(up.record())
            device.copy_pages(down, pool, slots, harness.host, source + 32, CopyDirection.TO_HOST)
            assert await waiting.notified(device, down) == 0
            for host in range(32):
                assert np.array_equal(harness.payload(host), harness.payload(host + 32))

    on_loop(body)


def test_gate_orders_the_copy_behind_the_data(any_device: Any, harness: Any, on_loop: Any) -> None:
    """INV-201, INV-206, T3: bytes stored right before publication are what the copy reads."""
    device = any_device
    pool = device.create_pool("full", 2, harness.page_bytes)
    gate = Gate(device, harness.ring)
    gated, down = device.stream("gated0"), device.stream("d2h")

    async def body(waiting: Any) -> None:
        for turn in range(50):
            ticket = gate.take(gated)
            harness.to_device(gated, pool, [0], [4])
            down.wait_event(gated.record())
            harness.to_host(down, pool, [0], [5])
            token, future = waiting.token()
            device.notify(down, waiting.queue, token)
            want = harness.fill(4, turn)
            ticket.publish()
            assert await future == 0
            assert np.array_equal(want, harness.payload(5))
            ticket.release()

    on_loop(body)


def test_a_closed_gate_holds_notifications_back(
    any_device: Any, harness: Any, on_loop: Any
) -> None:
    """The notification of a parked stream comes after publication, that of others before."""
    device = any_device

    async def body(waiting: Any) -> None:
        gate = Gate(device, harness.ring)
        gated, other = device.stream("gated0"), device.stream("aux")
        ticket = gate.take(gated)
        event = gated.record()
        token, future = waiting.token()
        device.notify(gated, waiting.queue, token)
        token, late = waiting.token()
        device.notify_event(event, waiting.queue, token)
        assert await waiting.notified(device, other) == 0
        await asyncio.sleep(0.01)
        assert not future.done() and not late.done() and not event.query()
        ticket.publish(-5)
        assert await future == 0 and await late == 0
        assert event.query()

    on_loop(body)


def test_layer_groups_arrive_one_by_one(any_device: Any, harness: Any, on_loop: Any) -> None:
    """One ticket and one event per layer group on one gated stream."""
    device = any_device
    pool = device.create_pool("full", 8, harness.page_bytes)
    gate = Gate(device, harness.ring)
    gated = device.stream("gated0")

    async def body(waiting: Any) -> None:
        tickets = gate.reserve(gated, (1,) * 6)
        events = []
        for group, ticket in enumerate(tickets):
            ticket.enqueue_wait()
            harness.to_device(gated, pool, [group], [group])
            events.append(gated.record())
        for group, ticket in enumerate(tickets):
            harness.fill(group, group)
            ticket.publish()
            token, future = waiting.token()
            device.notify_event(events[group], waiting.queue, token)
            assert await future == 0
            assert not any(event.query() for event in events[group + 1 :])

    on_loop(body)


def test_streams_and_events_are_wrapped_once(any_device: Any) -> None:
    """A wrapped stream is the same for the same handle; strangers are refused."""
    device = any_device
    stream = device.stream("h2d")
    assert device.wrap_stream(stream) is stream
    assert device.stream("h2d") is stream
    event = stream.record()
    assert device.wrap_event(event) is event
    for stranger in ("text", 3.5):
        with pytest.raises(LogicError):
            device.wrap_stream(stranger)
        with pytest.raises(LogicError):
            device.wrap_event(stranger)
    assert isinstance(device.caps, DeviceCaps)


def test_memory_outside_registrations_is_refused(any_device: Any, harness: Any) -> None:
    """INV-339, P15: the copy must lie inside one registered range, the slots inside the pool."""
    pool = any_device.create_pool("full", 2, harness.page_bytes)
    stream = any_device.stream("h2d")
    for device_slots, host_slots in (([2], [0]), ([-1], [0]), ([0], [64]), ([0, 1], [0])):
        with pytest.raises(LogicError):
            harness.to_device(stream, pool, device_slots, host_slots)
    any_device.unregister_host(harness.arena.address)
    with pytest.raises(LogicError):
        harness.to_device(stream, pool, [0], [0])
    any_device.register_host(harness.arena.address, 1 << 21)
    harness.to_device(stream, pool, [0], [0])
    any_device.synchronize()


def test_close_ends_everything(any_device: Any, harness: Any) -> None:
    """INV-908, INV-909: a second close does nothing, later calls are refused."""
    device = any_device
    pool = device.create_pool("full", 2, harness.page_bytes)
    harness.to_device(device.stream("h2d"), pool, [0], [0])
    stream = device.stream("h2d")
    device.close()
    device.close()
    with pytest.raises(StoreClosed):
        harness.to_device(stream, pool, [0], [0])
    with pytest.raises(StoreClosed):
        device.create_pool("more", 2, harness.page_bytes)
    device.unregister_host(harness.arena.address)


def test_a_lost_device_fails_what_is_pending(any_device: Any, harness: Any, on_loop: Any) -> None:
    """INV-917, T8: every pending notification ends within a second, as a sticky error."""
    device = any_device

    async def body(waiting: Any) -> None:
        gate = Gate(device, harness.ring)
        gated = device.stream("gated0")
        ticket = gate.take(gated)
        token, future = waiting.token()
        device.notify(gated, waiting.queue, token)
        device.fail(719)
        status = await asyncio.wait_for(future, 1.0)
        assert status == -20_719
        ticket.publish(-5)
        token, future = waiting.token()
        with pytest.raises(DeviceError) as lost:
            device.notify(gated, waiting.queue, token)
        assert lost.value.is_sticky

    on_loop(body)
