"""The CPU device: order, gates, limits and failures, with native workers on a real loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvstore.config import DeviceTierConfig
from kvstore.devices import create_device
from kvstore.devices.base import DEVICE_STATUS, CopyDirection, error_from_status
from kvstore.devices.cpu import CpuDevice
from kvstore.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    LogicError,
    StoreClosed,
    UnsupportedError,
)

MS = 1_000_000


def test_pages_survive_the_round_trip(harness: Any, on_loop: Any) -> None:
    """INV-225: pages copied to the device and back are the same bytes, headers untouched."""
    device = harness.open()
    pool = device.create_pool("full", 8, harness.page_bytes)

    async def body(waiting: Any) -> None:
        expected = [harness.fill(slot, slot + 1) for slot in (3, 17, 40)]
        up, down = device.stream("h2d"), device.stream("d2h")
        harness.to_device(up, pool, [7, 0, 2], [3, 17, 40])
        down.wait_event(up.record())
        harness.to_host(down, pool, [2, 7, 0], [63, 1, 2])
        assert await waiting.notified(device, down) == 0
        for slot, want in zip((1, 2, 63), expected, strict=True):
            assert np.array_equal(want, harness.payload(slot))
        assert np.array_equal(expected[0], pool.as_tensor()[7])
        headers = [
            harness.arena.view(harness.host.address(s) - harness.arena.address, 4096)
            for s in (1, 2, 63)
        ]
        assert not any(header.any() for header in headers)

    on_loop(body)
    counters = device.counters()
    assert (3, 3) == (counters.pages_to_device, counters.pages_to_host)


def test_batch_pieces_may_run_in_any_order(harness: Any, on_loop: Any) -> None:
    """A shuffled batch still puts each page into its own slot."""
    device = harness.open(shuffle_seed=99)
    pool = device.create_pool("full", 64, harness.page_bytes)

    async def body(waiting: Any) -> None:
        for slot in range(64):
            harness.fill(slot, slot)
        harness.to_device(device.stream("h2d"), pool, list(range(63, -1, -1)), list(range(64)))
        assert await waiting.notified(device, device.stream("h2d")) == 0
        view = pool.as_tensor()
        for slot in range(64):
            assert np.array_equal(harness.payload(slot), view[63 - slot])

    on_loop(body)


def test_adopted_tensors_are_pieces_of_one_page(harness: Any, on_loop: Any) -> None:
    """INV-339: a page of adopted tensors is contiguous on the host, piece after piece."""
    device = harness.open()
    keys = np.zeros((4, 2, 1024), np.uint8)  # block_dim 0: one piece of 2048 bytes
    values = np.zeros((4, 6144), np.uint8)
    pool = device.adopt_pool("full", [keys, values], 0, harness.page_bytes)

    async def body(waiting: Any) -> None:
        want = harness.fill(5, 11)
        harness.to_device(device.stream("h2d"), pool, [2], [5])
        assert await waiting.notified(device, device.stream("h2d")) == 0
        assert np.array_equal(want[:2048], keys[2].ravel())
        assert np.array_equal(want[2048:], values[2])
        assert not keys[1].any() and not keys[3].any()

    on_loop(body)


def test_adopted_tensor_with_inner_block_dim(harness: Any, on_loop: Any) -> None:
    """A tensor (2, blocks, ...) gives one piece per leading index."""
    device = harness.open()
    cache = np.zeros((2, 6, harness.page_bytes // 2), np.uint8)
    pool = device.adopt_pool("full", [cache], 1, harness.page_bytes)

    async def body(waiting: Any) -> None:
        want = harness.fill(0, 3)
        harness.to_device(device.stream("h2d"), pool, [4], [0])
        assert await waiting.notified(device, device.stream("h2d")) == 0
        assert np.array_equal(want, np.concatenate([cache[0, 4], cache[1, 4]]))

    on_loop(body)


def test_adopted_bytes_must_add_up(harness: Any) -> None:
    """INV-132: tensors whose bytes per block differ from page_bytes are refused by name."""
    device = harness.open()
    with pytest.raises(ConfigError) as refused:
        device.adopt_pool("full", [np.zeros((4, 100), np.uint8)], 0, harness.page_bytes)
    assert refused.value.field == "page_bytes"
    with pytest.raises(ConfigError):
        device.adopt_pool("full", [np.zeros((4, 8192), np.uint8)[:, ::2]], 0, 4096)


def test_c03_eviction_waits_for_the_kernel_that_fills_the_page(harness: Any, on_loop: Any) -> None:
    """C03, INV-305: a copy ordered behind a slow writer sees the bytes after the kernel."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)
    compute, down = device.stream("default"), device.stream("d2h")

    async def body(waiting: Any) -> None:
        compute.work(30 * MS, pool.as_tensor()[1].ctypes.data, harness.page_bytes, 0x5A)
        down.wait_event(compute.record())
        harness.to_host(down, pool, [1], [9])
        assert await waiting.notified(device, down) == 0
        assert (harness.payload(9) == 0x5A).all()

    on_loop(body)


def test_event_is_a_snapshot_of_its_recording(harness: Any, on_loop: Any) -> None:
    """Work enqueued after record() does not hold the event back; unrecorded is complete."""
    device = harness.open()
    stream = device.stream("default")

    async def body(waiting: Any) -> None:
        assert device.wrap_event(None).query()
        event = stream.record()
        ticket = harness.ring.take(1)
        stream.wait_ticket(ticket)
        later = stream.record()
        token, future = waiting.token()
        device.notify_event(event, waiting.queue, token)
        assert await future == 0
        assert event.query() and not later.query()
        token, future = waiting.token()
        device.notify_event(later, waiting.queue, token)
        harness.ring.publish(ticket, 0)
        assert await future == 0

    on_loop(body)


def test_gate_holds_the_copy_until_it_is_published(harness: Any, on_loop: Any) -> None:
    """INV-201, INV-206: bytes written before publication are what the gated copy reads."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)
    stream = device.stream("gated0")

    async def body(waiting: Any) -> None:
        for turn in range(200):
            ticket = harness.ring.take(1)
            stream.wait_ticket(ticket)
            harness.to_device(stream, pool, [0], [4])
            token, future = waiting.token()
            device.notify(stream, waiting.queue, token)
            want = harness.fill(4, turn)
            harness.ring.publish(ticket, 0)
            assert await future == 0
            assert np.array_equal(want, pool.as_tensor()[0])
            assert ticket.status == 0
            harness.ring.release(ticket)

    on_loop(body)


def test_early_source_reads_are_the_race_that_stream_order_forbids(
    harness: Any, on_loop: Any
) -> None:
    """P11: a device that reads sources early copies stale bytes through a gate."""
    device = harness.open(early_reads=True)
    pool = device.create_pool("full", 2, harness.page_bytes)
    stream = device.stream("gated0")

    async def body(waiting: Any) -> None:
        old = harness.fill(4, 1)
        ticket = harness.ring.take(1)
        stream.wait_ticket(ticket)
        harness.to_device(stream, pool, [0], [4])
        harness.fill(4, 2)
        harness.ring.publish(ticket, 0)
        assert await waiting.notified(device, stream) == 0
        assert np.array_equal(old, pool.as_tensor()[0])

    on_loop(body)


@pytest.mark.parametrize(
    ("start", "value", "passes"),
    [
        ((1 << 63) - 1, (1 << 63) - 2, True),
        ((1 << 63) - 2, (1 << 63) - 1, False),
        (5, 9, False),
        (9, 5, True),
        ((1 << 64) - 1, 0, False),
        ((1 << 63) - 1, 1 << 62, True),
    ],
)
def test_wait_is_signed_and_cyclic(
    harness: Any, on_loop: Any, start: int, value: int, *, passes: bool
) -> None:
    """INV-209: the wait is (int64)(word - value) >= 0; all ones is minus one, not for ever."""
    device = harness.open()
    word = harness.arena.view(0, 8).view(np.uint64)
    word[0] = start
    stream, other = device.stream("aux"), device.stream("default")

    async def body(waiting: Any) -> None:
        stream.wait_word(harness.arena.address, value)
        event = stream.record()
        assert await waiting.notified(device, other) == 0
        if passes:
            assert await waiting.notified(device, stream) == 0
        else:
            await asyncio.sleep(0.02)
            assert not event.query()
            other.write_word(harness.arena.address, value)
            assert await waiting.notified(device, stream) == 0

    on_loop(body)


def test_wait_32_looks_at_the_low_half_only(harness: Any, on_loop: Any) -> None:
    """The 32-bit wait of older devices shares the word, including its wrap."""
    device = harness.open()
    word = harness.arena.view(0, 8).view(np.uint64)
    word[0] = (7 << 32) | 3
    stream = device.stream("aux")

    async def body(waiting: Any) -> None:
        stream.wait_word(harness.arena.address, 0xFFFFFFFE, bits=32)
        assert await waiting.notified(device, stream) == 0

    on_loop(body)


@pytest.mark.parametrize("queue_count", [1, 2, 8])
def test_a_closed_gate_blocks_the_streams_of_its_hardware_queue(
    harness: Any, on_loop: Any, queue_count: int
) -> None:
    """INV-211: head-of-line blocking follows the number of hardware queues."""
    device = harness.open(queue_count=queue_count)
    streams = [device.new_stream() for _ in range(queue_count * 2)]

    async def body(waiting: Any) -> None:
        ticket = harness.ring.take(1)
        streams[0].wait_ticket(ticket)
        events = [stream.record() for stream in streams]
        free = [i for i in range(len(streams)) if i % queue_count]
        for index in free:
            token, future = waiting.token()
            device.notify_event(events[index], waiting.queue, token)
            assert await future == 0
        await asyncio.sleep(0.02)
        blocked = [i for i in range(len(streams)) if i % queue_count == 0]
        assert not any(events[index].query() for index in blocked)
        harness.ring.publish(ticket, -5)
        for stream in streams:
            assert await waiting.notified(device, stream) == 0

    on_loop(body)


def test_gates_open_while_the_loop_holds_the_gil(harness: Any, on_loop: Any) -> None:
    """INV-216: stream and publisher go on while Python never lets go of the interpreter."""
    device = harness.open()
    stream = device.stream("gated0")

    async def body(_waiting: Any) -> None:
        word = harness.arena.view(0, 8).view(np.uint64)
        word[0] = 0
        stream.wait_word(harness.arena.address, 1)
        event = stream.record()
        writer = device.stream("aux")
        writer.work(5 * MS)
        writer.write_word(harness.arena.address, 1)
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass
        assert event.query()

    on_loop(body)


def test_a_full_queue_refuses_in_bounded_time(harness: Any) -> None:
    """A closed gate fills the queue; the call that finds it full gives up and enqueues nothing."""
    device = harness.open(queue_depth=4, full_timeout_ns=20 * MS)
    stream = device.stream("gated0")
    ticket = harness.ring.take(1)
    stream.wait_ticket(ticket)
    for _ in range(3):
        stream.record()
    with pytest.raises(DeviceError) as full:
        stream.record()
    assert not full.value.is_sticky
    harness.ring.publish(ticket, 0)
    device.synchronize()
    stream.record()


def test_a_full_queue_goes_on_when_room_comes(harness: Any) -> None:
    """An enqueue that waits for room is released by the gate, not by its time limit."""
    device = harness.open(queue_depth=2, full_timeout_ns=10_000 * MS)
    stream = device.stream("gated0")
    ticket = harness.ring.take(1)
    stream.wait_ticket(ticket)
    stream.record()
    opener = threading.Timer(0.05, harness.ring.publish, (ticket, 0))
    opener.start()
    begin = time.perf_counter()
    stream.record()
    assert time.perf_counter() - begin < 5
    opener.join()


def test_sticky_error_ends_every_pending_wait(harness: Any, on_loop: Any) -> None:
    """INV-917: a lost device completes notifications behind closed gates and refuses calls."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)
    gated, other = device.stream("gated0"), device.stream("h2d")

    async def body(waiting: Any) -> None:
        ticket = harness.ring.take(1)
        gated.wait_ticket(ticket)
        event = gated.record()
        other.wait_event(event)
        futures = []
        for stream in (gated, other):
            token, future = waiting.token()
            device.notify(stream, waiting.queue, token)
            futures.append(future)
        token, future = waiting.token()
        device.notify_event(event, waiting.queue, token)
        futures.append(future)
        device.fail(719)
        for future in futures:
            status = await future
            assert status == DEVICE_STATUS - 719
            assert error_from_status(status).is_sticky
        with pytest.raises(DeviceError) as lost:
            harness.to_device(other, pool, [0], [0])
        assert lost.value.is_sticky and lost.value.code == 719
        with pytest.raises(DeviceError):
            event.query()
        assert device.error == 719

    on_loop(body)


def test_a_batch_that_fails_later_loses_the_device(harness: Any, on_loop: Any) -> None:
    """INV-917: an error of the work itself arrives with the completion, and no byte is written."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)

    async def body(waiting: Any) -> None:
        device.inject("execute", 700)
        harness.fill(0, 1)
        harness.to_device(device.stream("h2d"), pool, [0], [0])
        assert await waiting.notified(device, device.stream("h2d")) == DEVICE_STATUS - 700
        assert not pool.as_tensor()[0].any()

    try:
        on_loop(body)
    except DeviceError as error:  # the notification may find the device lost already
        assert error.code == 700


def test_a_failed_call_fails_alone(harness: Any, on_loop: Any) -> None:
    """INV-213, INV-917: a call that fails with a passing error leaves the device usable."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)

    async def body(waiting: Any) -> None:
        device.inject("copy_pages", 1, nth=2)
        harness.fill(0, 1)
        harness.to_device(device.stream("h2d"), pool, [0], [0])
        with pytest.raises(DeviceError) as failed:
            harness.to_device(device.stream("h2d"), pool, [0], [0])
        assert not failed.value.is_sticky
        harness.to_device(device.stream("h2d"), pool, [1], [0])
        assert await waiting.notified(device, device.stream("h2d")) == 0
        assert np.array_equal(harness.payload(0), pool.as_tensor()[1])

    on_loop(body)


def test_capture_refuses_gates_batches_and_queries(harness: Any) -> None:
    """T7, P13, P15: a capturing stream takes no gate, batch or notification, and is invalidated."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)
    stream = device.stream("aux")
    event = stream.record()
    calls = [
        lambda: stream.wait_ticket(harness.ring.take(1)),
        lambda: harness.to_device(stream, pool, [0], [0]),
        event.query,
    ]
    for call in calls:
        stream.begin_capture()
        assert stream.is_capturing()
        with pytest.raises(DeviceError) as refused:
            call()
        assert refused.value.code == 900
        with pytest.raises(DeviceError):
            stream.end_capture()
        assert not stream.is_capturing()
    stream.begin_capture("thread_local")
    device.synchronize()
    assert event.query()
    stream.end_capture()


def test_slots_and_regions_are_checked(harness: Any) -> None:
    """INV-339, P15: an id outside the pool or memory outside one registration is refused."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)
    stream = device.stream("h2d")
    for device_slots, host_slots in (([2], [0]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(LogicError):
            harness.to_device(stream, pool, device_slots, host_slots)
    with pytest.raises(LogicError):
        harness.to_device(stream, pool, [0], [64])
    device.unregister_host(harness.arena.address)
    with pytest.raises(LogicError):
        harness.to_device(stream, pool, [0], [3])
    harness.to_device(stream, pool, [0], [17])
    with pytest.raises(LogicError):
        device.register_host(harness.arena.address + (1 << 21) + 4096, 4096)


def test_an_empty_batch_issues_no_work(harness: Any) -> None:
    """INV-711: nothing to copy is nothing enqueued."""
    device = harness.open()
    pool = device.create_pool("full", 2, harness.page_bytes)
    harness.to_device(device.stream("h2d"), pool, [], [])
    device.synchronize()
    assert device.counters().batches == 0


def test_capability_belongs_to_the_device(harness: Any) -> None:
    """INV-212: a device without stream memory operations does not switch others off."""
    weak = harness.open(gates=False)
    strong = CpuDevice(harness.ring)
    try:
        ticket = harness.ring.take(1)
        with pytest.raises(UnsupportedError):
            weak.stream("gated0").wait_ticket(ticket)
        assert strong.caps.memops64 and not weak.caps.memops64
        strong.stream("gated0").wait_ticket(ticket)
        harness.ring.publish(ticket, 0)
    finally:
        strong.close()


def test_close_breaks_off_nothing_that_can_end(harness: Any) -> None:
    """INV-908: closing finishes the enqueued work, joins, and refuses later calls (INV-909)."""
    device = harness.open()
    before = threading.active_count()
    pool = device.create_pool("full", 2, harness.page_bytes)
    view = pool.as_tensor()
    want = harness.fill(0, 5)
    harness.to_device(device.stream("h2d"), pool, [0], [0])
    device.close()
    device.close()
    assert np.array_equal(want, view[0])
    assert before == threading.active_count()
    with pytest.raises(StoreClosed):
        device.stream("h2d").record()


def test_close_with_a_closed_gate_is_bounded(harness: Any, monkeypatch: Any) -> None:
    """INV-204: a gate nobody publishes cannot hold the process; the work behind it is dropped."""
    monkeypatch.setattr("kvstore.devices.cpu.CLOSE_TIMEOUT_NS", 50 * MS)
    device = harness.open()
    device.stream("gated0").wait_ticket(harness.ring.take(1))
    begin = time.perf_counter()
    device.close()
    assert time.perf_counter() - begin < 5


def test_throttle_takes_the_time_of_the_wire(harness: Any, on_loop: Any) -> None:
    """A bandwidth limit makes a batch take bytes / rate."""
    device = harness.open(bytes_per_s=10 * harness.page_bytes * 10)
    pool = device.create_pool("full", 8, harness.page_bytes)

    async def body(waiting: Any) -> None:
        begin = time.perf_counter()
        harness.to_device(device.stream("h2d"), pool, list(range(8)), list(range(8)))
        assert await waiting.notified(device, device.stream("h2d")) == 0
        assert time.perf_counter() - begin >= 0.079

    on_loop(body)


def test_pool_views(harness: Any) -> None:
    """A pool is a view of one page's shape per slot, and says when the bytes do not match."""
    device = harness.open()
    pool = device.create_pool("full", 4, harness.page_bytes)
    assert pool.as_tensor().shape == (4, 8192)
    assert pool.as_tensor(np.float32, (2, 1024)).shape == (4, 2, 1024)
    assert pool.as_tensor(np.float32, (4, 2, 1024)).shape == (4, 2, 1024)
    with pytest.raises(LogicError):
        pool.as_tensor(np.float32, (3, 1024))


def test_allocation_failure_is_a_capacity_error(harness: Any) -> None:
    """A pool the device cannot hold is refused with a typed error."""
    device = harness.open()
    device.inject("create_pool", 2)
    with pytest.raises(CapacityError):
        device.create_pool("full", 4, harness.page_bytes)
    with pytest.raises(CapacityError):
        device.create_pool("full", 1 << 40, 1 << 20)


def test_the_device_of_a_configuration(harness: Any) -> None:
    """INV-225: device="cpu" gives the CPU device."""
    device = create_device(DeviceTierConfig(gpu_cache_size=1 << 20), harness.ring)
    assert device.caps.kind == "cpu"
    device.close()


def test_nothing_of_cuda_is_imported_unless_asked() -> None:
    """The package and its CPU device work without a driver, cuda-bindings and torch."""
    code = (
        "import sys, kvstore.devices, kvstore.gate;"
        "bad = {'torch', 'cuda', 'kvstore.devices.cuda'} & set(sys.modules);"
        "sys.exit(1 if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_directions_are_independent(harness: Any, on_loop: Any) -> None:
    """Many batches both ways on two streams keep every page right."""
    device = harness.open(queue_count=4)
    pool = device.create_pool("full", 32, harness.page_bytes)
    rng = np.random.default_rng(7)

    async def body(waiting: Any) -> None:
        up, down = device.stream("h2d"), device.stream("d2h")
        for turn in range(30):
            slots = rng.permutation(32).astype(np.int32)
            for host in range(32):
                harness.fill(host, turn * 100 + host)
            sources = np.arange(32, dtype=np.int32)
            device.copy_pages(up, pool, slots, harness.host, sources, CopyDirection.TO_DEVICE)
            down.wait_event(up.record())
            device.copy_pages(down, pool, slots, harness.host, sources + 32, CopyDirection.TO_HOST)
            assert await waiting.notified(device, down) == 0
            for host in range(32):
                assert np.array_equal(harness.payload(host), harness.payload(host + 32))

    on_loop(body)
