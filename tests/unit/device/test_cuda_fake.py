"""The CUDA device's own code over a stand-in driver: ABIs, fallbacks, error mapping, the watch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from kvstore.config import DeviceTierConfig
from kvstore.devices import create_device
from kvstore.devices.cuda import CudaDevice, open_cuda_device
from kvstore.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    LogicError,
    StoreClosed,
    UnsupportedError,
)
from kvstore.gate import Gate


@pytest.fixture
def make_cuda(harness: Any, fake: Any) -> Any:
    """Open CUDA devices over the stand-in; the harness closes them."""

    def make(**options: Any) -> CudaDevice:
        options.setdefault("calibrate", False)
        return harness.use(CudaDevice(0, harness.ring, library=fake.path, **options))

    return make


def test_configuration_opens_the_device_named(harness: Any, fake: Any, monkeypatch: Any) -> None:
    """``cuda:N`` picks the GPU; the library's name comes from the environment."""
    monkeypatch.setenv("KVSTORE_LIBCUDA", fake.path)
    config = DeviceTierConfig(gpu_cache_size=1 << 20, device="cuda:1")
    device = create_device(config, harness.ring)
    assert (device.caps.kind, device.ordinal) == ("cuda", 1)
    device.close()
    with pytest.raises(UnsupportedError, match="no GPU number 7"):
        create_device(DeviceTierConfig(gpu_cache_size=1 << 20, device="cuda:7"), harness.ring)
    with pytest.raises(ConfigError):
        open_cuda_device("cuda:x", harness.ring)


def test_a_missing_driver_is_named(monkeypatch: Any) -> None:
    """Without a driver the error names the library and the remedy."""
    monkeypatch.setenv("KVSTORE_LIBCUDA", "libcuda-that-is-not-there.so.1")
    with pytest.raises(UnsupportedError, match=r"libcuda-that-is-not-there.*cpu"):
        CudaDevice(0)


@pytest.mark.parametrize(
    ("abi", "choice", "calls"),
    [
        (13, -1, "calls_batch13"),
        (12, -1, "calls_batch12"),
        (11, -1, "calls_memcpy"),
        (13, 1, "calls_batch12"),
        (13, 0, "calls_memcpy"),
    ],
)
def test_each_abi_of_the_batch_call(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any, abi: int, choice: int, calls: str
) -> None:
    """Batches use the newest ABI the driver has, STREAM order and the overlap hint; else a loop."""
    fake["batch_abi"] = abi
    device = make_cuda(batch_copy=choice)
    device.native.set_min_dma(0)
    pool = device.create_pool("full", 16, harness.page_bytes)
    fake["calls_memcpy"] = 0

    async def body(waiting: Any) -> None:
        for host in range(16):
            harness.fill(host, host)
        harness.to_device(device.stream("h2d"), pool, list(range(16)), list(range(16)))
        harness.to_host(device.stream("h2d"), pool, list(range(16)), list(range(16, 32)))
        assert await waiting.notified(device, device.stream("h2d")) == 0
        for host in range(16):
            assert np.array_equal(harness.payload(host), harness.payload(host + 16))

    on_loop(body)
    assert fake[calls] == (32 if calls == "calls_memcpy" else 2)
    if calls != "calls_memcpy":
        assert (fake["last_order"], fake["last_flags"]) == (1, 1)


def test_a_batch_call_the_driver_lacks_becomes_a_loop(
    make_cuda: Any, harness: Any, fake: Any
) -> None:
    """801 from the batch call falls back, once and for this device."""
    device = make_cuda()
    device.native.set_min_dma(0)
    pool = device.create_pool("full", 4, harness.page_bytes)
    fake["batch_code"] = 801
    for _ in range(2):
        harness.to_device(device.stream("h2d"), pool, [0, 1, 2], [0, 1, 2])
    assert fake["calls_batch13"] == 1
    device.synchronize()


def test_small_pieces_use_the_loop(make_cuda: Any, harness: Any, fake: Any) -> None:
    """Below min_dma a batch is slower than single copies."""
    device = make_cuda()
    pool = device.create_pool("full", 4, harness.page_bytes)
    assert harness.page_bytes < device.min_dma
    harness.to_device(device.stream("h2d"), pool, [0, 1], [0, 1])
    assert fake["calls_batch13"] == 0
    device.synchronize()


def test_large_batches_are_cut(make_cuda: Any, harness: Any, fake: Any) -> None:
    """At most 2048 descriptors per driver call, so that restores get between evictions."""
    device = make_cuda()
    device.native.set_min_dma(0)
    pool = device.create_pool("full", 4, harness.page_bytes)
    slots = [i % 4 for i in range(5000)]
    harness.to_device(device.stream("h2d"), pool, slots, slots)
    assert (fake["calls_batch13"], fake["batch_runs_max"]) == (3, 2048)
    device.synchronize()


def test_failed_copy_is_typed_and_passes(make_cuda: Any, harness: Any, fake: Any) -> None:
    """INV-917: an error that is not sticky fails that call alone, and says what was enqueued."""
    device = make_cuda()
    pool = device.create_pool("full", 4, harness.page_bytes)
    fake["memcpy_code"] = 1
    with pytest.raises(DeviceError) as failed:
        harness.to_device(device.stream("h2d"), pool, [0, 1], [0, 1])
    assert (failed.value.code, failed.value.is_sticky, failed.value.enqueued) == (1, False, 0)
    fake["memcpy_code"] = 0
    harness.to_device(device.stream("h2d"), pool, [0, 1], [0, 1])
    device.synchronize()


def test_capability_is_probed_per_device(
    harness: Any, fake: Any, fake_library: Any, tmp_path: Any
) -> None:
    """INV-212: attribute 122 = 0 on one device leaves another with its own answer."""
    import shutil

    fake["memops64"] = 0
    fake["wait32_code"] = 801
    weak = CudaDevice(0, harness.ring, library=fake.path, calibrate=False)
    other = tmp_path / "other.so"
    shutil.copy(fake_library, other)
    strong = CudaDevice(0, harness.ring, library=str(other), calibrate=False)
    assert (weak.caps.memops64, weak.caps.memops32) == (False, False)
    assert (strong.caps.memops64, strong.caps.memops32) == (True, True)
    with pytest.raises(UnsupportedError):
        Gate(weak, harness.ring).take(None)
    weak.close()
    strong.close()


def test_a_word_the_device_does_not_see_fails_the_probe(harness: Any, fake: Any) -> None:
    """T1, P2: the probe waits for real; a wait that a CPU store does not wake is no capability."""
    fake["deaf_words"] = 1
    begin = time.perf_counter()
    device = CudaDevice(0, harness.ring, library=fake.path, calibrate=False)
    assert not device.caps.memops64
    assert time.perf_counter() - begin < 5
    device.close()


def test_memop32_is_the_second_choice(make_cuda: Any, harness: Any, fake: Any) -> None:
    """INV-213: 801 from the 64-bit wait marks the device and takes the 32-bit one, same word."""
    device = make_cuda()
    fake["wait64_code"] = 801
    before = fake["calls_wait32"]
    stream = device.stream("gated0")
    ticket = harness.ring.take(1)
    stream.wait_ticket(ticket)
    assert fake["calls_wait32"] == before + 1
    assert not device.caps.memops64 and device.gate_fallbacks["memop32"] == 1
    harness.ring.publish(ticket, 0)
    device.synchronize()


def test_a_passing_wait_error_does_not_mark_the_device(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any
) -> None:
    """INV-213, INV-215, C19: the ticket is published, the next gate works."""
    device = make_cuda()
    gate = Gate(device, harness.ring)
    fake["wait64_code"] = 2
    with pytest.raises(DeviceError):
        gate.take(device.stream("gated0"))
    assert gate.stats().published_failed == 1 and gate.stats().open == 0
    assert device.caps.memops64
    fake["wait64_code"] = 0

    async def body(waiting: Any) -> None:
        ticket = gate.take(device.stream("gated0"))
        ticket.publish()
        assert await waiting.notified(device, device.stream("gated0")) == 0

    on_loop(body)


def test_fail_the_nth_driver_call_behind_a_gate(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any
) -> None:
    """C19: whichever driver call fails, the gates open and the next batch works."""
    device = make_cuda()
    pool = device.create_pool("full", 8, harness.page_bytes)
    gate = Gate(device, harness.ring)
    stream = device.stream("gated0")

    async def body(waiting: Any) -> None:
        for nth in range(1, 14):
            fake["fail_code"], fake["fail_after"] = 1, nth
            tickets: list[Any] = []
            try:
                tickets = gate.reserve(stream, (1, 1))
                for ticket in tickets:
                    ticket.enqueue_wait()
                    harness.to_device(stream, pool, [0, 1], [0, 1])
                    stream.record()
                token, _ = waiting.token()
                device.notify(stream, waiting.queue, token)
            except DeviceError as error:
                assert error.code == 1
            fake["fail_after"] = 0
            gate.fail(tickets)
            assert gate.stats().open == 0
            assert await waiting.notified(device, stream) == 0

    on_loop(body)


@pytest.mark.parametrize("completion", ["words", "events"])
def test_watch_by_words_and_by_events(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any, completion: str
) -> None:
    """Both kinds of completion arrive, in order per stream; words need no query of the driver."""
    device = make_cuda(completion=completion)
    stream = device.stream("h2d")

    async def body(waiting: Any) -> None:
        order: list[int] = []
        futures = []
        fake["calls_query"] = 0
        for index in range(20):
            result = device.native.launch(stream.key, "kvs_spin", 1, 1, (200_000,))
            assert result == 0
            token, future = waiting.token()
            future.add_done_callback(lambda _done, index=index: order.append(index))
            device.notify(stream, waiting.queue, token)
            futures.append(future)
        for future in futures:
            assert await future == 0
        await asyncio.sleep(0)
        assert order == sorted(order)
        queries = fake["calls_query"]
        if completion == "words":  # a few rounds of looking for errors, nothing per completion
            assert queries <= 3 * (fake["streams"] + 1)
        else:
            assert queries > 0

    on_loop(body)
    assert device.watch_counters().pending == 0


def test_an_idle_watch_does_not_run(make_cuda: Any, harness: Any, on_loop: Any) -> None:
    """INV-129: with nothing pending neither the watch nor the loop is woken."""
    device = make_cuda()

    async def body(waiting: Any) -> None:
        assert await waiting.notified(device, device.stream("h2d")) == 0
        await asyncio.sleep(0.02)
        before, wakeups = device.watch_counters(), waiting.queue.wakeups
        await asyncio.sleep(0.2)
        assert before == device.watch_counters()
        assert wakeups == waiting.queue.wakeups

    on_loop(body)


@pytest.mark.parametrize("completion", ["words", "events"])
def test_a_context_lost_behind_our_back_ends_every_wait(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any, completion: str
) -> None:
    """INV-917, T8: the watch notices a sticky error, even when it only looks at words."""
    device = make_cuda(completion=completion)

    async def body(waiting: Any) -> None:
        futures = []
        for role in ("gated0", "gated1"):
            stream = device.stream(role)
            stream.wait_ticket(harness.ring.take(1))
            token, future = waiting.token()
            device.notify(stream, waiting.queue, token)
            futures.append(future)
        await asyncio.sleep(0.005)
        fake["sticky"] = 719
        for future in futures:
            assert await asyncio.wait_for(future, 1.0) == -20_719
        with pytest.raises(DeviceError) as lost:
            device.stream("h2d").record()
        assert lost.value.is_sticky and device.error == 719

    on_loop(body)
    device.close()


@pytest.mark.parametrize("completion", ["words", "events"])
def test_a_loss_behind_parked_gates_shows_when_they_open(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any, completion: str
) -> None:
    """INV-917, T8: nothing tells before the last gate is open, and then every wait fails.

    As measured on a GPU: while a stream is parked at a gate no call reports the fault of another
    kernel. Gates always open, at the deadline of their reads at the latest (ADR 0013).
    """
    device = make_cuda(completion=completion)

    async def body(waiting: Any) -> None:
        futures = []
        tickets = [harness.ring.take(1) for _ in range(2)]
        for role, ticket in zip(("gated0", "gated1"), tickets, strict=True):
            stream = device.stream(role)
            stream.wait_ticket(ticket)
            token, future = waiting.token()
            device.notify(stream, waiting.queue, token)
            futures.append(future)
        await asyncio.sleep(0.005)
        fake["quiet_loss"] = 700
        await asyncio.sleep(0.1)
        assert not any(future.done() for future in futures)
        begin = time.perf_counter()
        for ticket in tickets:
            harness.ring.publish(ticket, -5)
        for future in futures:
            assert await asyncio.wait_for(future, 1.0) == -20_700
        assert time.perf_counter() - begin < 1.0
        fake["quiet_loss"] = 0

    try:
        on_loop(body)
    finally:
        fake["quiet_loss"] = 0
        harness.ring.publish_all(-5)
    device.close()


def test_close_of_a_lost_device_leaves_the_driver_alone(
    make_cuda: Any, harness: Any, fake: Any
) -> None:
    """INV-924: neither frees nor unregisters are attempted, and nothing raises."""
    device = make_cuda()
    device.create_pool("full", 4, harness.page_bytes)
    fake["calls_unregister"] = 0
    fake["sticky"] = 709
    device.close()
    device.unregister_host(harness.arena.address)
    assert fake["calls_unregister"] == 0


def test_close_with_a_closed_gate_is_bounded(harness: Any, fake: Any) -> None:
    """INV-222: close with an open ticket waits its limit, leaks the device memory, and returns."""
    device = CudaDevice(0, harness.ring, library=fake.path, calibrate=False, close_timeout=0.1)
    ticket = harness.ring.take(1)
    device.stream("gated0").wait_ticket(ticket)
    begin = time.perf_counter()
    device.close()
    assert time.perf_counter() - begin < 5
    assert device.holds_memory
    harness.ring.publish(ticket, 0)
    fake.settle()


def test_close_gives_everything_back(harness: Any, fake: Any) -> None:
    """INV-908: streams, events, allocations, registrations and the context are returned."""
    device = CudaDevice(0, harness.ring, library=fake.path)
    harness.use(device)
    device.create_pool("full", 4, harness.page_bytes)
    events = [device.stream("h2d").record() for _ in range(5)]
    del events
    device.close()
    names = ("streams", "events", "allocations", "registered", "retained")
    assert [0] * 5 == [fake[name] for name in names]


def test_registration_in_parts_is_undone_when_one_fails(make_cuda: Any, fake: Any) -> None:
    """C53, C57: parts of at most 1 GiB cover the range once; a refused part undoes the earlier."""
    device = make_cuda()
    base, length = 1 << 40, (3 << 30) + 4096
    fake["register_max"] = 1 << 30
    fake["registered"] = fake["calls_register"] = fake["calls_unregister"] = 0
    device.register_host(base, length)
    assert fake["registered"] == 4
    mine = [start for start in device.regions.addresses() if start < base + length]
    assert [base, base + (1 << 30), base + (2 << 30), base + (3 << 30)] == mine
    device.unregister_host(base)
    assert fake["registered"] == 0
    fake["register_fail_at"] = fake["calls_register"] + 3
    with pytest.raises(CapacityError):
        device.register_host(base, length)
    assert fake["registered"] == 0
    assert not [start for start in device.regions.addresses() if start < base + length]
    fake["register_fail_at"] = 0
    device.register_host(base, length)
    device.unregister_host(base)


def test_out_of_memory_is_a_capacity_error(make_cuda: Any, harness: Any, fake: Any) -> None:
    """A pool the GPU cannot hold is refused with a typed error; the next call succeeds (C57)."""
    device = make_cuda()
    fake["alloc_code"] = 2
    with pytest.raises(CapacityError):
        device.create_pool("full", 4, harness.page_bytes)
    fake["alloc_code"] = 0
    device.create_pool("full", 4, harness.page_bytes)


def test_the_callers_context_stays_current(make_cuda: Any, harness: Any, fake: Any) -> None:
    """Calls put the thread's own context back, or torch would go on with the wrong GPU."""
    import ctypes

    device = make_cuda()
    library = ctypes.CDLL(fake.path)
    find, pointer, status = library.cuGetProcAddress_v2, ctypes.c_void_p(), ctypes.c_int()
    find.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ]
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    find(b"cuCtxSetCurrent", ctypes.byref(pointer), 12000, 0, ctypes.byref(status))
    prototype(pointer.value)(77)
    device.stream("h2d").record()
    assert fake["current"] == 77
    prototype(pointer.value)(0)


def test_capture_elsewhere_is_not_disturbed(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any
) -> None:
    """T7, P13: queries run with a relaxed capture mode, on the loop and in the watch."""
    device = make_cuda(completion="events")

    async def body(waiting: Any) -> None:
        fake["capturing"] = 12345
        event = device.stream("h2d").record()
        token, future = waiting.token()
        device.notify_event(event, waiting.queue, token)
        assert await future == 0
        assert event.query()
        fake["capturing"] = 0

    on_loop(body)


def test_capturing_streams_get_a_clean_refusal(make_cuda: Any, harness: Any, fake: Any) -> None:
    """T7, P15: gate and batch on a capturing caller's stream are refused before any call."""
    device = make_cuda()
    pool = device.create_pool("full", 4, harness.page_bytes)
    foreign = device.native.stream_new(0)[1]
    stream = device.wrap_stream(foreign)
    fake["capturing"] = foreign
    before = fake["calls_wait64"]
    with pytest.raises(UnsupportedError):
        Gate(device, harness.ring).take(stream)
    ticket = harness.ring.take(1)
    with pytest.raises(DeviceError) as refused:
        stream.wait_ticket(ticket)
    assert refused.value.code == 900
    with pytest.raises(DeviceError):
        harness.to_device(stream, pool, [0], [0])
    assert before == fake["calls_wait64"]
    fake["capturing"] = 0
    harness.ring.publish(ticket, -5)


def test_foreign_streams_and_events(make_cuda: Any, harness: Any, fake: Any, on_loop: Any) -> None:
    """Ints, torch-like objects and __cuda_stream__ name the same stream; events are kept alive."""
    device = make_cuda()
    handle = device.native.stream_new(0)[1]

    class Torchlike:
        cuda_stream = handle

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    class NeverRecorded:
        cuda_event = 0

    one = device.wrap_stream(handle)
    assert one is device.wrap_stream(Torchlike()) is device.wrap_stream(Protocol())
    assert device.wrap_event(NeverRecorded()).query()
    with pytest.raises(LogicError):
        device.wrap_event(None)

    async def body(waiting: Any) -> None:
        assert await waiting.notified(device, one) == 0
        token, future = waiting.token()
        device.notify_event(device.wrap_event(NeverRecorded()), waiting.queue, token)
        assert await future == 0

    on_loop(body)


def test_staged_path_of_small_adopted_pieces(
    make_cuda: Any, harness: Any, fake: Any, on_loop: Any
) -> None:
    """Below min_dma pages of many small pieces travel whole and are scattered by one kernel."""
    device = make_cuda()
    tensors = [np.zeros((40, 512), np.uint8) for _ in range(16)]
    for tensor in tensors:
        assert tensor.ctypes.data % 16 == 0
    pool = device.adopt_pool("full", tensors, 0, harness.page_bytes)

    async def body(waiting: Any) -> None:
        for host in range(30):
            harness.fill(host, host)
        slots = list(range(39, 9, -1))
        fake["calls_kernel"] = 0
        harness.to_device(device.stream("h2d"), pool, slots, list(range(30)))
        assert await waiting.notified(device, device.stream("h2d")) == 0
        assert fake["calls_kernel"] == 1
        page = np.concatenate([tensor[39] for tensor in tensors])
        assert np.array_equal(harness.payload(0), page)
        harness.to_host(device.stream("d2h"), pool, slots, list(range(30, 60)))
        assert await waiting.notified(device, device.stream("d2h")) == 0
        for host in range(30):
            assert np.array_equal(harness.payload(host), harness.payload(host + 30))

    on_loop(body)
    assert device.counters().staged_calls == 2


def test_host_function_posts_without_python(make_cuda: Any, harness: Any, on_loop: Any) -> None:
    """T9, P1: the fallback F2 goes through the driver's own symbol and a plain C callback."""
    device = make_cuda()

    async def body(waiting: Any) -> None:
        token, future = waiting.token()
        assert device.native.host_post(device.stream("aux").key, waiting.queue, token) == 0
        assert await future == 0

    on_loop(body)


def test_a_process_that_forgets_to_close_ends(fake: Any) -> None:
    """T13, P19: an exit with a closed gate opens it first; no hang within ten seconds."""
    code = f"""
from kvstore._uring.native import GateRing
from kvstore.devices.cuda import CudaDevice
ring = GateRing(64)
device = CudaDevice(0, ring, library={fake.path!r}, calibrate=False)
device.stream("gated0").wait_ticket(ring.take(1))
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=10, check=False)
    assert done.returncode == 3


def test_closed_device_refuses(make_cuda: Any, harness: Any) -> None:
    """INV-909: any call after close raises StoreClosed."""
    device = make_cuda()
    device.close()
    with pytest.raises(StoreClosed):
        device.new_stream()
    with pytest.raises(StoreClosed):
        device.notify(None, None, 0)


def test_errors_of_the_gate_words_registration(harness: Any, fake: Any) -> None:
    """A device that cannot map the gate words does not open, and nothing stays behind."""
    fake["register_code"] = 2
    with pytest.raises(DeviceError):
        CudaDevice(0, harness.ring, library=fake.path, calibrate=False)
    assert fake["retained"] == 0


def test_memory_registered_through_another_device_is_shared(fake: Any, make_cuda: Any) -> None:
    """T12: a second device uses a portable registration and leaves undoing it to the first."""
    device = make_cuda()
    before = fake["calls_unregister"]
    fake["register_code"] = 712
    device.register_host(1 << 40, 1 << 20)
    fake["register_code"] = 0
    device.unregister_host(1 << 40)
    assert before == fake["calls_unregister"]
