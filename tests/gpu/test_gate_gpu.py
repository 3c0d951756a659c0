"""T1 to T6, T10, T14: what the gate rests on, on a real GPU (INV-201 to INV-219)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvstore._uring.device_native import spin_until
from kvstore.gate import Gate

pytestmark = pytest.mark.gpu

US = 1_000
MS = 1_000_000


def _words(harness: Any) -> Any:
    """Return words of a registered page of the arena, zeroed, one per cache line."""
    page = harness.arena.view(harness.arena.length - 65536, 65536)
    page[:] = 0
    return page.view(np.uint64).reshape(-1, 8)


def _address(words: Any, index: int) -> int:
    return int(words[index].ctypes.data)


def _percentiles(values: Any) -> dict[str, float]:
    us = np.asarray(values, np.float64) / 1000
    return {
        name: round(float(np.percentile(us, percent)), 2)
        for name, percent in (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100))
    }


def test_t1_cpu_store_wakes_a_pending_wait_idle(
    cuda: Any, harness: Any, record: Any, scale: int
) -> None:
    """T1, INV-208: idle GPU, registered word: p99 from store to stream at most 30 us."""
    words = _words(harness)
    result, took = cuda.native.gate_latency(
        cuda.stream("gated0").key, _address(words, 0), _address(words, 1), 1, 500 * scale, 50 * US
    )
    assert result == 0
    record(gate_idle_us=_percentiles(took))
    assert np.percentile(took, 99) <= 30 * US


def test_t1_cpu_store_wakes_a_pending_wait_busy(
    cuda: Any, harness: Any, record: Any, scale: int
) -> None:
    """T1: busy multiprocessors and copies in both directions: p99 at most 60 us."""
    words = _words(harness)
    blocks = cuda.driver.multiprocessors * 2
    stop = threading.Event()
    results: list[int] = []
    big_result, device_memory = cuda.native.alloc(64 << 20)
    assert big_result == 0
    source = harness.arena.address

    def load() -> None:
        while not stop.is_set():
            for _ in range(8):
                cuda.native.launch(cuda.stream("default").key, "kvs_spin", blocks, 256, (MS,))
                results.append(
                    cuda.native.memcpy(cuda.stream("h2d").key, device_memory, source, 2 << 20)
                )
                results.append(
                    cuda.native.memcpy(
                        cuda.stream("d2h").key,
                        source + (2 << 20),
                        device_memory + (32 << 20),
                        2 << 20,
                    )
                )
            cuda.native.stream_synchronize(cuda.stream("default").key)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        result, took = cuda.native.gate_latency(
            cuda.stream("gated0").key,
            _address(words, 0),
            _address(words, 1),
            1,
            500 * scale,
            50 * US,
        )
    finally:
        stop.set()
        loader.join()
    cuda.synchronize()
    cuda.native.free(device_memory)
    assert not any(results)
    assert result == 0
    record(gate_busy_us=_percentiles(took))
    assert np.percentile(took, 99) <= 60 * US


def test_t1_a_gate_pending_for_long_opens_promptly(cuda: Any, harness: Any, record: Any) -> None:
    """T1: after two seconds of waiting the store still wakes the stream."""
    words = _words(harness)
    stream = cuda.stream("gated0")
    result = cuda.native.wait_word(stream.key, _address(words, 0), 1)
    result = result or cuda.native.write_word(stream.key, _address(words, 1), 1)
    assert result == 0
    time.sleep(2.0)
    begin = time.monotonic_ns()
    words[0, 0] = 1
    seen = spin_until(_address(words, 1), 1, 5_000 * MS)
    assert seen
    record(gate_long_us=(seen - begin) / 1000)
    assert seen - begin < 1 * MS


def test_t1_many_streams_behind_one_word(cuda: Any, harness: Any) -> None:
    """T1: up to the cap of four streams parked at once all pass with one store."""
    words = _words(harness)
    streams = [cuda.stream(role) for role in ("gated0", "gated1", "h2d", "d2h")]
    for index, stream in enumerate(streams):
        assert cuda.native.wait_word(stream.key, _address(words, 0), 1) == 0
        assert cuda.native.write_word(stream.key, _address(words, index + 1), 1) == 0
    time.sleep(0.01)
    assert not words[1:5, 0].any()
    words[0, 0] = 1
    for index in range(4):
        assert spin_until(_address(words, index + 1), 1, 1_000 * MS)


def test_t2_a_million_tickets_in_random_order(
    cuda: Any, harness: Any, record: Any, scale: int
) -> None:
    """T2, INV-203, INV-210: words are used again and again, published early and late."""
    rng = np.random.default_rng(2)
    ring = harness.ring
    streams = [cuda.stream(r) for r in ("gated0", "gated1", "h2d", "d2h", "aux", "default")] + [
        cuda.new_stream(),
        cuda.new_stream(),
    ]
    rounds = 6_250 * scale
    begin = time.perf_counter()
    for turn in range(rounds):
        tickets = [ring.take(1) for _ in streams]
        early = turn % 2
        order = rng.permutation(8)
        for index in order:
            if early and index % 2:
                ring.publish(tickets[index], 0)
            streams[index].wait_ticket(tickets[index])
        for index in order[::-1]:
            ring.publish(tickets[index], 0)
        for ticket in tickets:
            ring.release(ticket)
        if turn % 64 == 63:
            cuda.synchronize()
    cuda.synchronize()
    took = time.perf_counter() - begin
    record(gate_cycles=rounds * 8, seconds=took)
    assert ring.counts["open"] == 0


def test_t2_waits_are_signed_and_cyclic(cuda: Any, harness: Any) -> None:
    """INV-209, P6: GEQ near 2^63 and the low half of the word with its wrap."""
    words = _words(harness)
    stream = cuda.stream("gated0")
    cases = [
        ((1 << 63) - 1, (1 << 63) - 2, 64, True),
        ((1 << 63) - 1, 1 << 62, 64, True),
        (9, 5, 64, True),
        (5, 9, 64, False),
        ((1 << 64) - 1, 0, 64, False),
        ((7 << 32) | 3, 0xFFFFFFFE, 32, True),
        ((7 << 32) | 3, 4, 32, False),
    ]
    for index, (start, value, bits, passes) in enumerate(cases):
        word = words[2 * index]
        word[0] = start
        assert cuda.native.wait_word(stream.key, int(word.ctypes.data), value, bits) == 0
        done = words[2 * index + 1]
        assert cuda.native.write_word(stream.key, int(done.ctypes.data), 1) == 0
        seen = spin_until(int(done.ctypes.data), 1, (1_000 if passes else 20) * MS)
        assert bool(seen) == passes, cases[index]
        if not passes:
            word[0] = value
            assert spin_until(int(done.ctypes.data), 1, 1_000 * MS)


def _checked_gate_rounds(cuda: Any, harness: Any, rounds: int, order: int) -> int:
    """Fill a page right before publishing, copy it behind the gate, check it by a kernel."""
    count = harness.page_bytes // 4
    pool = cuda.create_pool(f"t3_{order}", 32, harness.page_bytes)
    result, bad = cuda.native.alloc(8)
    assert result == 0
    stream, ring = cuda.stream("gated0"), harness.ring
    cuda.native.memset(stream.key, bad, 0, 8)
    ramp = np.arange(count, dtype=np.uint32) * np.uint32(2654435761)
    pages = [harness.payload(slot).view(np.uint32) for slot in range(16)]
    cuda.native.set_source_order(order)
    cuda.native.set_min_dma(0)
    plan = pool.plan(harness.host)
    ids = np.arange(32, dtype=np.int32)  # two pages per batch, so that it is one
    for turn in range(rounds):
        slot = turn % 16
        if slot == 0:
            cuda.native.stream_synchronize(stream.key)
        ticket = ring.take(1)
        stream.wait_ticket(ticket)
        targets, sources = ids[[slot, 16 + slot]], ids[[slot, 16 + slot]]
        cuda.native.copy(stream.key, plan, targets, sources, to_device=True)
        address = int(pool.bases[0]) + slot * harness.page_bytes
        cuda.native.launch(stream.key, "kvs_check", 1, 256, (address, count, turn + 1, bad))
        np.add(ramp, np.uint32(turn + 1), out=pages[slot])
        ring.publish(ticket, 0)
        ring.release(ticket)
    cuda.native.stream_synchronize(stream.key)
    cuda.native.set_source_order(1)
    words = _words(harness)
    cuda.native.memcpy(stream.key, _address(words, 3), bad, 8)
    cuda.native.stream_synchronize(stream.key)
    cuda.native.free(bad)
    return int(words[3, 0])


def test_t3_no_stale_byte_behind_a_gate(cuda: Any, harness: Any, record: Any, scale: int) -> None:
    """T3, INV-206, P11: gate, copy in STREAM order, kernel check: no mismatch."""
    rounds = 5_000 * scale
    begin = time.perf_counter()
    assert _checked_gate_rounds(cuda, harness, rounds, order=1) == 0
    record(gate_data_rounds=rounds, mismatches=0, seconds=time.perf_counter() - begin)


def test_t3_source_order_any_is_recorded(cuda: Any, harness: Any, record: Any, scale: int) -> None:
    """P11: with ANY the copy may read before the gate opens; how often is only written down."""
    rounds = 500 * scale
    record(any_rounds=rounds, any_mismatched_words=_checked_gate_rounds(cuda, harness, rounds, 3))


_HEAD_OF_LINE = """
import json, sys, time
import numpy as np
from kvstore._uring.native import GateRing
from kvstore.devices.cuda import CudaDevice
ring = GateRing(64)
device = CudaDevice(0, ring, calibrate=False)
parked = [device.new_stream() for _ in range(16)]
others = [device.new_stream() for _ in range(40)]
for stream in parked + others:
    device.native.launch(stream.key, "kvs_spin", 1, 1, (0,))
device.synchronize()
finished = {}
for count in (1, 2, 4, 6, 8, 16):
    tickets = [ring.take(1) for _ in range(count)]
    for stream, ticket in zip(parked, tickets):
        stream.wait_ticket(ticket)
    for stream in others:
        device.native.launch(stream.key, "kvs_spin", 1, 1, (1000,))
    time.sleep(0.05)
    finished[count] = sum(device.native.stream_query(s.key) == 0 for s in others)
    for ticket in tickets:
        ring.publish(ticket, 0)
        ring.release(ticket)
    device.synchronize()
device.close()
print(json.dumps(finished))
"""


@pytest.mark.parametrize("connections", ["default", "1", "8", "32"])
def test_t4_parked_streams_up_to_the_cap_block_nobody(
    cuda: Any, record: Any, connections: str
) -> None:
    """T4, INV-211: with two parked streams, the default cap, all other streams go on."""
    cuda.close()
    environment = dict(os.environ)
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections != "default":
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    done = subprocess.run(
        [sys.executable, "-c", _HEAD_OF_LINE],
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    finished = json.loads(done.stdout.splitlines()[-1])
    record(connections=connections, finished_of_40=finished)
    if connections != "1":
        assert finished["1"] == finished["2"] == 40


def test_t5_launches_behind_a_closed_gate_are_bounded(cuda: Any, harness: Any, record: Any) -> None:
    """T5: some thousand launches fit behind a gate; the thread that blocks is freed by a store."""
    stream = cuda.stream("gated0")
    ticket = harness.ring.take(1)
    stream.wait_ticket(ticket)
    launched = 0
    timer = threading.Timer(1.0, harness.ring.publish, (ticket, 0))
    timer.start()
    begin = time.perf_counter()
    blocked_at = 0
    while time.perf_counter() - begin < 1.5 and launched < 4_000:
        before = time.perf_counter()
        assert cuda.native.launch(stream.key, "kvs_spin", 1, 1, (0,)) == 0
        launched += 1
        if not blocked_at and time.perf_counter() - before > 0.1:
            blocked_at = launched
    timer.join()
    cuda.synchronize()
    record(launches_before_blocking=blocked_at)


def test_t5_allocation_behind_a_closed_gate_finishes(
    cuda: Any, harness: Any, torch_cuda: Any, record: Any
) -> None:
    """T5: an allocating thread waits for the gate; a publisher without loop or GIL frees it."""
    stream = cuda.stream("gated0")
    ticket = harness.ring.take(1)
    torch_cuda.empty(1 << 20, device="cuda:0")
    stream.wait_ticket(ticket)
    took: list[float] = []

    def allocate() -> None:
        begin = time.perf_counter()
        torch_cuda.empty(1 << 30, dtype=torch_cuda.uint8, device="cuda:0")
        took.append(time.perf_counter() - begin)

    worker = threading.Thread(target=allocate)
    worker.start()
    time.sleep(0.3)
    waited = not took
    harness.ring.publish(ticket, 0)
    worker.join(10)
    assert not worker.is_alive()
    cuda.synchronize()
    record(allocation_waited_for_the_gate=waited, allocation_s=took[0])


def test_t6_completion_words_come_after_the_data(
    cuda: Any, harness: Any, record: Any, scale: int
) -> None:
    """T6, P22: when the CPU sees the word, the copied bytes are there."""
    words = _words(harness)
    stream = cuda.stream("d2h")
    length = 1 << 20
    result, memory = cuda.native.alloc(length)
    assert result == 0
    target = harness.arena.view(0, length).view(np.uint32)
    ramp = np.arange(length // 4, dtype=np.uint32) * np.uint32(2654435761)
    rounds = 1_000 * scale
    for turn in range(1, rounds + 1):
        part = (4096, 65536, 262144, length)[turn % 4 if turn % 32 == 0 else 0]
        count = part // 4
        cuda.native.launch(stream.key, "kvs_fill", 4, 256, (memory, count, turn))
        cuda.native.memcpy(stream.key, harness.arena.address, memory, part)
        cuda.native.write_word(stream.key, _address(words, 0), turn)
        assert spin_until(_address(words, 0), turn, 2_000 * MS)
        assert target[count - 1] == ramp[count - 1] + np.uint32(turn)
        if turn % 8 == 0:
            assert np.array_equal(target[:count], ramp[:count] + np.uint32(turn))
    cuda.native.free(memory)
    record(completion_word_rounds=rounds, mismatches=0)


def test_t10_restore_waits_for_the_last_reader(cuda: Any, harness: Any) -> None:
    """T10, P12, INV-305: a page is overwritten only after the kernels that read it."""
    count = harness.page_bytes // 4
    pool = cuda.create_pool("war", 2, harness.page_bytes)
    compute, up = cuda.stream("default"), cuda.stream("h2d")
    result, bad = cuda.native.alloc(8)
    assert result == 0
    cuda.native.memset(compute.key, bad, 0, 8)
    address = int(pool.bases[0])
    for turn in range(200):
        cuda.native.launch(compute.key, "kvs_fill", 2, 256, (address, count, turn))
        cuda.native.launch(compute.key, "kvs_spin", 1, 1, (200 * US,))
        cuda.native.launch(compute.key, "kvs_check", 2, 256, (address, count, turn, bad))
        harness.payload(0)[:] = 0xEE
        up.wait_event(compute.record())
        harness.to_device(up, pool, [0], [0])
        compute.wait_event(up.record())
    cuda.synchronize()
    words = _words(harness)
    cuda.native.memcpy(up.key, _address(words, 0), bad, 8)
    cuda.synchronize()
    cuda.native.free(bad)
    assert words[0, 0] == 0


def test_t14_data_checks_pinned_to_two_cores(
    cuda: Any, harness: Any, record: Any, scale: int
) -> None:
    """T14: the same race windows on two cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:2]))
    try:
        assert _checked_gate_rounds(cuda, harness, 1_000 * scale, order=1) == 0
    finally:
        os.sched_setaffinity(0, allowed)
    record(pinned_rounds=1_000 * scale, mismatches=0)


def test_cap_on_parked_streams(cuda: Any, harness: Any) -> None:
    """INV-211: the third stream is refused, on the GPU as on the CPU device."""
    from kvstore.errors import GateBusy

    gate = Gate(cuda, harness.ring)
    tickets = [gate.take(cuda.stream("gated0")), gate.take(cuda.stream("gated1"))]
    with pytest.raises(GateBusy):
        gate.take(cuda.stream("aux"))
    for ticket in tickets:
        ticket.publish()
    cuda.synchronize()
