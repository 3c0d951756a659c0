"""The simulated device: ordered streams, events, gates, finite queues, sticky errors."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvstore.devices.base import DEVICE_STATUS, CopyDirection, HostLayout
from kvstore.errors import CapacityError, ConfigError, DeviceError, LogicError, UnsupportedError
from kvstore.testing import (
    SimCompletions,
    SimDeadlock,
    SimDevice,
    SimGateWords,
    SimMemory,
    check_pattern,
    pattern,
    read_page,
    write_page,
)

PAGE = 8192
SLOT = PAGE + 4096
H2D, D2H = CopyDirection.TO_DEVICE, CopyDirection.TO_HOST


class Rig:
    """A device with one pool, four host slots in two slabs, and a completion queue."""

    def __init__(self, **options) -> None:
        self.gate = SimGateWords(8)
        self.device = SimDevice(gate=self.gate, **options)
        self.queue = SimCompletions()
        self.pool = self.device.create_pool("full", 8, PAGE)
        self.memory = SimMemory(1 << 18)
        self.layout = HostLayout(self.memory.address, SLOT, 3, 1 << 16)
        self.done: list[int] = []
        self.device.register_host(self.memory.address, self.memory.length)

    def host(self, slot: int) -> np.ndarray:
        offset = self.layout.address(slot) - self.memory.address + 4096
        return self.memory.view(offset, PAGE)

    def copy(self, stream, device_slots, host_slots, direction) -> None:
        self.device.copy_pages(
            stream,
            self.pool,
            np.array(device_slots, np.int32),
            self.layout,
            np.array(host_slots, np.int32),
            direction,
        )

    def notify(self, stream) -> None:
        self.device.notify(
            stream, self.queue, self.queue.token(lambda s, f, v: self.done.append(s))
        )


async def test_pages_travel_both_ways_and_across_a_slab_border():
    """Page i pairs device slot i with host slot i; slot 3 lies in the second slab (INV-339)."""
    rig = Rig()
    up, down = rig.device.stream("h2d"), rig.device.stream("d2h")
    for slot in range(4):
        rig.host(slot)[:] = pattern(slot, PAGE)
    rig.copy(up, [5, 2, 7], [0, 2, 3], H2D)
    rig.notify(up)
    assert [] == rig.done
    await asyncio.sleep(1)
    assert [0] == rig.done
    check_pattern(3, read_page(rig.pool, 7))
    rig.memory.array[:] = 0
    rig.copy(down, [7, 5], [1, 3], D2H)
    rig.device.synchronize()
    check_pattern(3, rig.host(1))
    check_pattern(0, rig.host(3))
    assert 3 * PAGE == rig.device.copied_bytes[H2D]


async def test_streams_order_their_own_work_and_events_order_streams():
    """A copy behind an event sees what the kernel before the event wrote."""
    rig = Rig()
    compute, down = rig.device.stream("compute"), rig.device.stream("d2h")
    compute.launch(lambda: write_page(rig.pool, 1, pattern("kernel", PAGE)), 10**9)
    event = compute.record()
    assert not event.query()
    down.wait_event(event)
    rig.copy(down, [1], [0], D2H)
    rig.notify(down)
    await asyncio.sleep(0.5)
    assert [] == rig.done
    await asyncio.sleep(1)
    assert event.query()
    check_pattern("kernel", rig.host(0))
    assert rig.device.stream("idle").record().query()


async def test_a_copy_without_the_event_reads_old_bytes():
    """The simulation can fail: without ordering the copy overtakes the kernel."""
    rig = Rig()
    compute, down = rig.device.stream("compute"), rig.device.stream("d2h")
    compute.launch(lambda: write_page(rig.pool, 1, pattern("kernel", PAGE)), 10**9)
    rig.copy(down, [1], [0], D2H)
    await asyncio.sleep(2)
    with pytest.raises(AssertionError):
        check_pattern("kernel", rig.host(0))


async def test_source_overwritten_during_a_copy_shows():
    """A copy moves half of each page at its start and half at its end."""
    rig = Rig(latency_ns=(10**6, 10**6))
    rig.host(0)[:] = pattern("first", PAGE)
    rig.copy(rig.device.stream("h2d"), [0], [0], H2D)
    rig.host(0)[:] = pattern("second", PAGE)
    await asyncio.sleep(1)
    for key in ("first", "second"):
        with pytest.raises(AssertionError):
            check_pattern(key, read_page(rig.pool, 0))


async def test_gate_parks_a_stream_until_the_ticket_is_published():
    """Work behind a ticket runs after the publication, other streams go on (INV-209)."""
    rig = Rig()
    gated, other = rig.device.stream("gated0"), rig.device.stream("h2d")
    ticket = rig.gate.take(1)
    assert ticket is not None
    gated.wait_ticket(ticket)
    rig.copy(gated, [0], [0], H2D)
    rig.notify(gated)
    rig.copy(other, [1], [1], H2D)
    rig.notify(other)
    await asyncio.sleep(1)
    assert [0] == rig.done
    assert {"gated0"} == rig.device.gated_streams
    with pytest.raises(SimDeadlock):
        rig.device.synchronize()
    rig.host(0)[:] = pattern("landed", PAGE)
    rig.gate.publish(ticket, 0)
    await asyncio.sleep(1)
    assert [0, 0] == rig.done
    check_pattern("landed", read_page(rig.pool, 0))
    assert set() == rig.device.gated_streams


async def test_streams_on_one_hardware_queue_block_each_other():
    """With one queue a parked stream holds up its neighbour: head-of-line blocking."""
    rig = Rig(hardware_queues=1)
    gated, other = rig.device.stream("gated0"), rig.device.stream("h2d")
    ticket = rig.gate.take(1)
    assert ticket is not None
    gated.wait_ticket(ticket)
    rig.notify(other)
    await asyncio.sleep(1)
    assert [] == rig.done
    rig.gate.publish(ticket, 0)
    await asyncio.sleep(1)
    assert [0] == rig.done


async def test_full_queue_blocks_and_behind_a_gate_it_is_a_deadlock():
    """A launch into a full queue runs it inside the call; a closed gate never opens there."""
    rig = Rig(queue_depth=2)
    stream = rig.device.stream("h2d")
    for _ in range(5):
        rig.copy(stream, [0], [0], H2D)
    assert 3 == rig.device.full_count
    await asyncio.sleep(1)
    ticket = rig.gate.take(1)
    assert ticket is not None
    stream.wait_ticket(ticket)
    rig.copy(stream, [0], [0], H2D)
    with pytest.raises(SimDeadlock):
        rig.copy(stream, [0], [0], H2D)


async def test_sticky_error_completes_every_notification():
    """After the device is lost each call raises and no waiter is left (INV-917)."""
    rig = Rig()
    stream = rig.device.stream("h2d")
    rig.copy(stream, [0], [0], H2D)
    rig.notify(stream)
    event = stream.record()
    rig.device.notify_event(event, rig.queue, rig.queue.token(lambda s, f, v: rig.done.append(s)))
    rig.device.fail()
    await asyncio.sleep(1)
    assert [DEVICE_STATUS - 719] * 2 == rig.done
    for call in (stream.record, event.query, lambda: rig.notify(stream)):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.is_sticky
    rig.device.close()
    rig.device.close()


async def test_refused_calls_fail_once_and_enqueue_nothing():
    """A passing error raises, moves nothing, and the next call works (INV-213)."""
    rig = Rig()
    stream = rig.device.stream("h2d")
    for call in ("copy_pages", "create_pool", "register_host", "wait_ticket"):
        rig.device.inject(call, 2)
    with pytest.raises(DeviceError) as caught:
        rig.copy(stream, [0], [0], H2D)
    assert not caught.value.is_sticky
    with pytest.raises(CapacityError):
        rig.device.create_pool("more", 1, PAGE)
    with pytest.raises(DeviceError):
        rig.device.register_host(0, 4096)
    ticket = rig.gate.take(1)
    assert ticket is not None
    with pytest.raises(DeviceError):
        stream.wait_ticket(ticket)
    assert 0 == stream.depth
    rig.copy(stream, [0], [0], H2D)
    assert 1 == stream.depth


async def test_capture_refuses_copies_gates_and_notifications():
    """Nothing of the store can be captured into a graph."""
    rig = Rig()
    stream = rig.device.stream("h2d")
    ticket = rig.gate.take(1)
    assert ticket is not None
    stream.begin_capture()
    for call in (
        lambda: rig.copy(stream, [0], [0], H2D),
        lambda: stream.wait_ticket(ticket),
        lambda: rig.notify(stream),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert not caught.value.is_sticky
    stream.end_capture()
    rig.copy(stream, [0], [0], H2D)


async def test_device_without_memory_operations_refuses_gates():
    """A device that cannot wait says so (INV-212)."""
    rig = Rig(memops=False)
    ticket = rig.gate.take(1)
    assert ticket is not None
    with pytest.raises(UnsupportedError):
        rig.device.stream("h2d").wait_ticket(ticket)


async def test_adopted_arrays_are_one_piece_each():
    """A page of an adopted pool is split over the arrays, and the bytes must add up."""
    rig = Rig()
    keys, values = np.zeros((8, 6144), np.uint8), np.zeros((8, 1024), np.uint16)
    rig.pool = rig.device.adopt_pool("full", [keys, values], 0, PAGE)
    rig.host(0)[:] = pattern("split", PAGE)
    rig.copy(rig.device.stream("h2d"), [3], [0], H2D)
    await asyncio.sleep(1)
    check_pattern("split", read_page(rig.pool, 3))
    assert np.array_equal(pattern("split", PAGE)[:6144], keys[3])
    with pytest.raises(ConfigError):
        rig.device.adopt_pool("full", [keys], 0, PAGE)


async def test_wrapped_streams_and_events():
    """None is the default stream and a passed event; the same caller's number is one stream."""
    rig = Rig()
    assert rig.device.wrap_stream(None) is rig.device.wrap_stream(None)
    stream = rig.device.new_stream()
    assert stream is rig.device.wrap_stream(stream)
    with pytest.raises(LogicError):
        SimDevice().wrap_stream(stream)
    assert rig.device.wrap_event(None).query()
    with pytest.raises(LogicError):
        rig.device.wrap_event(object())
    rig.copy(stream, [], [], H2D)
    assert 0 == rig.device.copy_calls[H2D]


async def test_unregistered_memory_and_foreign_slots_are_refused():
    """A copy names registered memory and slots of the pool, or nothing is enqueued."""
    rig = Rig()
    rig.device.unregister_host(rig.memory.address)
    with pytest.raises(LogicError, match="not registered"):
        rig.copy(rig.device.stream("h2d"), [0], [0], H2D)
    rig.device.register_host(rig.memory.address, rig.memory.length)
    with pytest.raises(LogicError):
        rig.copy(rig.device.stream("h2d"), [8], [0], H2D)
    assert 0 == rig.device.stream("h2d").depth


async def test_batch_that_fails_in_execution_loses_the_device():
    """An accepted batch that fails later is sticky and reaches its notification."""
    rig = Rig()
    stream = rig.device.stream("h2d")
    rig.device.inject("execute", 719)
    rig.copy(stream, [0], [0], H2D)
    rig.notify(stream)
    assert 0 == rig.device.error
    await asyncio.sleep(1)
    assert [DEVICE_STATUS - 719] == rig.done
    assert 719 == rig.device.error
