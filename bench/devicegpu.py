"""The measurements B1 to B14 of ``kvstore-bench device``, one function each.

Every function takes a `Bench` and returns plain numbers. Bandwidths are GB/s (10^9 bytes) of
payload over wall-clock time from the first enqueue to the end; latencies are microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

import kvstore
from kvstore._uring.native import Arena, CompletionQueue, GateRing, now_ns, xxh3_64
from kvstore.devices.base import CopyDirection, HostLayout
from kvstore.devices.pools import PagePool

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
US, MS = 1_000, 1_000_000
Numbers = dict[str, Any]
RESTORES = 5  # per mode and number of groups, each between two passes of the disk alone


@dataclass(slots=True)
class Bench:
    """The device under measurement and its host arena; ``quick`` shrinks every count."""

    device: Any
    ring: GateRing
    arena: Arena
    directory: Path
    quick: bool
    ordinal: int
    results: Numbers = field(default_factory=dict)

    @property
    def native(self) -> Any:
        """The driver calls of the CUDA device."""
        return self.device.native

    def rounds(self, full: int) -> int:
        """Return a repetition count."""
        return max(3, full // 10) if self.quick else full

    def words(self, index: int) -> int:
        """Return the address of a zeroed, registered word at the end of the arena."""
        page = self.arena.view(self.arena.length - 64 * KIB, 64 * KIB).view(np.uint64)
        page[8 * index] = 0
        return int(page[8 * index :].ctypes.data)


def percentiles(values_ns: Any) -> Numbers:
    """Return p50, p90, p99 and max in microseconds."""
    us = np.asarray(values_ns, np.float64) / 1000
    if not len(us):
        return {}
    points = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(us, at)), 2) for name, at in points.items()}


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"{what}: {result}")


@contextlib.contextmanager
def _memory(bench: Bench, length: int) -> Iterator[int]:
    result, address = bench.native.alloc(length)
    _check(result, "cuMemAlloc")
    try:
        yield address
    finally:
        bench.native.free(address)


def _best(rounds: int, run: Callable[[], None], length: int) -> Numbers:
    run()
    rates = []
    for _ in range(rounds):
        begin = now_ns()
        run()
        rates.append(length / (now_ns() - begin))
    rates.sort()
    return {
        "min": round(rates[0], 2),
        "median": round(rates[len(rates) // 2], 2),
        "max": round(rates[-1], 2),
    }


def _sync(bench: Bench, *roles: str) -> None:
    for role in roles:
        _check(bench.native.stream_synchronize(bench.device.stream(role).key), "synchronize")


def _span(bench: Bench) -> int:
    return min(256 * MIB if bench.quick else GIB, bench.arena.length - 2 * MIB)


def b1_h2d(bench: Bench) -> Numbers:
    """One contiguous pinned copy, host to device."""
    return _one_copy(bench, to_device=True)


def b2_d2h(bench: Bench) -> Numbers:
    """One contiguous pinned copy, device to host."""
    return _one_copy(bench, to_device=False)


def _one_copy(bench: Bench, *, to_device: bool) -> Numbers:
    length = _span(bench)
    role = "h2d" if to_device else "d2h"
    host = bench.arena.address
    with _memory(bench, length) as memory:
        target, source = (memory, host) if to_device else (host, memory)

        def run() -> None:
            for start in range(0, length, 512 * MIB):  # inside one registration
                part = min(512 * MIB, length - start)
                _check(
                    bench.native.memcpy(
                        bench.device.stream(role).key, target + start, source + start, part
                    ),
                    "memcpy",
                )
            _sync(bench, role)

        return {"gb_s": _best(bench.rounds(10), run, length), "bytes": length}


def b3_both(bench: Bench) -> Numbers:
    """Both directions at once: contiguous copies, then 1 MiB pages by batch."""
    half = _span(bench) // 2 // MIB * MIB
    host = bench.arena.address
    up, down = bench.device.stream("h2d"), bench.device.stream("d2h")
    out: Numbers = {}
    with _memory(bench, 2 * half) as memory:

        def contiguous() -> None:
            for start in range(0, half, 64 * MIB):
                part = min(64 * MIB, half - start)
                _check(bench.native.memcpy(up.key, memory + start, host + start, part), "h2d")
                _check(
                    bench.native.memcpy(down.key, host + half + start, memory + half + start, part),
                    "d2h",
                )
            _sync(bench, "h2d", "d2h")

        out["contiguous_gb_s"] = _best(bench.rounds(10), contiguous, 2 * half)
        size = MIB
        count = half // size
        pool = PagePool.contiguous("both", 2 * count, size, memory, None, _no_view)
        plan = pool.plan(_layout(bench, size, 0))
        ids = np.arange(count, dtype=np.int32)
        bench.native.set_min_dma(0)

        def pages() -> None:
            for start in range(0, count, 32):
                part = ids[start : start + 32]
                _check(bench.native.copy(up.key, plan, part, part, to_device=True)[0], "h2d")
                other = (part + count).astype(np.int32)
                _check(bench.native.copy(down.key, plan, other, other, to_device=False)[0], "d2h")
            _sync(bench, "h2d", "d2h")

        out["pages_1mib_gb_s"] = _best(bench.rounds(10), pages, 2 * half)
    bench.native.set_min_dma(bench.device.min_dma)
    ratio = out["pages_1mib_gb_s"]["median"] / out["contiguous_gb_s"]["median"]
    return {**out, "pages_of_contiguous": round(ratio, 3)}


def _layout(bench: Bench, size: int, header: int) -> HostLayout:
    slot = size + header
    return HostLayout(bench.arena.address, slot, GIB // slot, GIB, payload_offset=header)


def _no_view(_dtype: Any, _shape: Any) -> Any:
    raise RuntimeError("no view")


def b4_pages(bench: Bench) -> Numbers:
    """Page copies by batch and by loop, 4 KiB to 4 MiB, both directions, permuted targets."""
    rng = np.random.default_rng(4)
    sizes = [4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB]
    one = {
        name: bench.results.get(key, {}).get("gb_s", {}).get("median", 0.0)
        for name, key in (("h2d", "B1"), ("d2h", "B2"))
    }
    out: Numbers = {}
    with _memory(bench, GIB) as memory:
        for size in sizes:
            total = min(GIB, _span(bench), 8192 * size)
            count = min(total // size, (bench.arena.length - 2 * MIB) // (size + 4096))
            pool = PagePool.contiguous("pages", count, size, memory, None, _no_view)
            plan = pool.plan(_layout(bench, size, 4096))
            hosts = np.arange(count, dtype=np.int32)
            slots = rng.permutation(count).astype(np.int32)
            for direction in ("h2d", "d2h"):
                for kind, min_dma in (("batch", 0), ("loop", 1 << 40)):
                    stream = bench.device.stream(direction)
                    submit: list[int] = []

                    def run(
                        kind: str = kind,
                        min_dma: int = min_dma,
                        stream: Any = stream,
                        direction: str = direction,
                        submit: list[int] = submit,
                        plan: Any = plan,
                        slots: Any = slots,
                        hosts: Any = hosts,
                    ) -> None:
                        bench.native.set_min_dma(min_dma)
                        begin = now_ns()
                        _check(
                            bench.native.copy(
                                stream.key, plan, slots, hosts, to_device=direction == "h2d"
                            )[0],
                            kind,
                        )
                        submit.append(now_ns() - begin)
                        _sync(bench, direction)

                    rate = _best(bench.rounds(7), run, count * size)
                    key = f"{direction} {size // KIB} KiB {kind}"
                    out[key] = {
                        "gb_s": rate,
                        "pages": count,
                        "submit_us_per_page": round(min(submit) / count / 1000, 3),
                    }
                    if one[direction]:
                        out[key]["of_contiguous"] = round(rate["median"] / one[direction], 3)
    bench.native.set_min_dma(bench.device.min_dma)
    out["min_dma_calibrated"] = bench.device.min_dma
    return out


def b5_pageable(bench: Bench) -> Numbers:
    """Host to device from memory that is not pinned: the control."""
    length = 64 * MIB
    data = np.ones(length, np.uint8)
    stream = bench.device.stream("h2d").key
    with _memory(bench, length) as memory:

        def run() -> None:
            _check(bench.native.memcpy(stream, memory, int(data.ctypes.data), length), "memcpy")
            _sync(bench, "h2d")

        return {"gb_s": _best(bench.rounds(10), run, length)}


def b6_enqueue(bench: Bench) -> Numbers:
    """Cost of each call on the calling thread, in native code."""
    names = ("memcpy_4k", "wait_word", "write_word", "record", "query")
    out: Numbers = {}
    stream = bench.device.stream("aux").key
    word = bench.words(1)
    with _memory(bench, 64 * KIB) as memory:
        for call, name in enumerate(names):
            a, b = (memory, bench.arena.address) if call == 0 else (word, 1)
            costs = []
            for _ in range(bench.rounds(20)):
                result, total = bench.native.enqueue_cost(stream, call, a, b, 200)
                _check(result, name)
                costs.append(total / 200)
                _sync(bench, "aux")
            out[f"{name}_us"] = round(float(np.median(costs)) / 1000, 3)
    return out


@contextlib.contextmanager
def busy(bench: Bench) -> Iterator[None]:
    """Keep the multiprocessors and both copy directions busy."""
    stop = threading.Event()
    blocks = bench.device.driver.multiprocessors * 2
    with _memory(bench, 128 * MIB) as memory:

        def load() -> None:
            native, device, host = bench.native, bench.device, bench.arena.address
            while not stop.is_set():
                for _ in range(2):
                    native.launch(device.stream("default").key, "kvs_spin", blocks, 256, (2 * MS,))
                    native.memcpy(device.stream("h2d").key, memory, host, 64 * MIB)
                    native.memcpy(
                        device.stream("d2h").key, host + 64 * MIB, memory + 64 * MIB, 64 * MIB
                    )
                native.stream_synchronize(device.stream("d2h").key)
                native.stream_synchronize(device.stream("h2d").key)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            time.sleep(0.05)
            yield
        finally:
            stop.set()
            thread.join()
            bench.device.synchronize(30.0)


def b7_gate(bench: Bench) -> Numbers:
    """CPU store to the stream's next write seen by the CPU: idle, busy, and under a GIL hog."""
    count = 5000 if not bench.quick else 500
    stream = bench.device.stream("gated0").key

    def measure() -> Numbers:
        result, took = bench.native.gate_latency(
            stream, bench.words(2), bench.words(3), 1, count, 30 * US
        )
        _check(result, "gate")
        return percentiles(took)

    out: Numbers = {"idle_us": measure()}
    with busy(bench):
        out["busy_us"] = measure()
    held: list[Numbers] = []
    worker = threading.Thread(target=lambda: held.append(measure()))
    worker.start()
    while worker.is_alive():  # this thread holds the GIL; the measuring one is in C
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            pass
    out["gil_hog_us"] = held[0]
    page = bench.arena.view(0, 2 * MIB)
    sums = []
    for _ in range(bench.rounds(200)):
        begin = now_ns()
        xxh3_64(page)
        sums.append(now_ns() - begin)
    out["checksum_2_mib_us"] = percentiles(sums)  # runs before the verdict, so it is kept apart
    return out


class Awaiter:
    """Awaits tokens of one queue on the running loop."""

    def __init__(self) -> None:
        self.queue = CompletionQueue(asyncio.get_running_loop())

    def token(self) -> tuple[int, asyncio.Future[int]]:
        """Return a token and the future of its status."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(status: int, _flags: int, _value: int) -> None:
            if not future.done():
                future.set_result(status)

        return self.queue.token(done), future


def run_on(loop_factory: Callable[[], Any] | None, main: Callable[[Awaiter], Any]) -> Any:
    """Run ``main(awaiter)`` on a fresh loop and close the queue."""

    async def body() -> Any:
        awaiter = Awaiter()
        try:
            return await main(awaiter)
        finally:
            awaiter.queue.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(body())


def loops() -> dict[str, Callable[[], Any]]:
    """Return the loop implementations that are installed."""
    found: dict[str, Callable[[], Any]] = {"asyncio": asyncio.SelectorEventLoop}
    try:
        import uvloop
    except ImportError:
        return found
    found["uvloop"] = uvloop.new_event_loop
    return found


def b8_host_function(bench: Bench) -> Numbers:
    """The alternatives to a gate: a host function, and enqueueing after the loop knows."""
    rounds = bench.rounds(2000)
    stream = bench.device.stream("gated0")

    async def main(awaiter: Awaiter) -> Numbers:
        host, late = [], []
        word = bench.words(4)
        words = bench.arena.view(bench.arena.length - 64 * KIB, 64 * KIB).view(np.uint64)
        for turn in range(1, rounds + 1):
            _check(bench.native.wait_word(stream.key, word, turn), "wait")
            token, future = awaiter.token()
            _check(bench.native.host_post(stream.key, awaiter.queue, token), "host function")
            begin = now_ns()
            words[32] = turn
            await future
            host.append(now_ns() - begin)
        with _memory(bench, 64 * KIB) as memory:
            for _ in range(rounds):
                begin = now_ns()
                _check(
                    bench.native.memcpy(stream.key, memory, bench.arena.address, 64 * KIB), "memcpy"
                )
                token, future = awaiter.token()
                bench.device.notify(stream, awaiter.queue, token)
                await future
                late.append(now_ns() - begin)
        return {
            "gate_to_host_function_to_loop_us": percentiles(host),
            "late_enqueue_64k_to_loop_us": percentiles(late),
        }

    return dict(run_on(None, main))


def b9_parked(bench: Bench) -> Numbers:
    """Rate of matrix products while 0, 1, 2 and 4 streams are parked at gates."""
    torch = _torch()
    if torch is None:
        return {"skipped": "torch is not installed"}
    size, rounds = 8192, bench.rounds(50)
    a = torch.randn(size, size, device=f"cuda:{bench.ordinal}", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(5):
        torch.matmul(a, a, out=out)
    torch.cuda.synchronize()
    result: Numbers = {}
    roles = ("gated0", "gated1", "h2d", "d2h")
    for parked in (0, 1, 2, 4, 0):
        tickets = [bench.ring.take(1) for _ in range(parked)]
        for role, ticket in zip(roles, tickets, strict=False):
            bench.device.stream(role).wait_ticket(ticket)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            torch.matmul(a, a, out=out)
        end.record()
        deadline = time.perf_counter() + 20
        while not end.query() and time.perf_counter() < deadline:
            time.sleep(0.001)
        blocked = not end.query()
        for ticket in tickets:
            if ticket is not None:
                bench.ring.publish(ticket, 0)
                bench.ring.release(ticket)
        torch.cuda.synchronize()
        rate = rounds * 2 * size**3 / (start.elapsed_time(end) * 1e-3) / 1e12
        name = f"parked_{parked}" if f"parked_{parked}" not in result else "parked_0_again"
        result[name] = {"tflop_s": round(rate, 1), "was_blocked": blocked}
    return result


def b10_await(bench: Bench) -> Numbers:
    """A 10 us kernel to the awaiting coroutine, minus the same kernel seen by a spinning core."""
    from kvstore._uring.device_native import spin_until

    rounds = bench.rounds(2000)
    stream = bench.device.stream("aux")
    word = bench.words(5)
    native_ns = []
    for turn in range(1, rounds + 1):
        begin = now_ns()
        bench.native.launch(stream.key, "kvs_spin", 1, 1, (10 * US,))
        _check(bench.native.write_word(stream.key, word, turn), "write")
        native_ns.append(spin_until(word, turn, 1000 * MS) - begin)
    base = float(np.median(native_ns))
    out: Numbers = {"native_spin_us": percentiles(native_ns)}

    def make(kind: str, loaded: bool) -> Callable[[Awaiter], Any]:
        async def main(awaiter: Awaiter) -> list[float]:
            took = []
            stop = False

            async def chatter() -> None:
                while not stop:  # noqa: ASYNC110  (the load is the point)
                    await asyncio.sleep(0)

            others = [asyncio.ensure_future(chatter()) for _ in range(4 if loaded else 0)]
            for _ in range(rounds):
                token, future = awaiter.token()
                begin = now_ns()
                bench.native.launch(stream.key, "kvs_spin", 1, 1, (10 * US,))
                if kind == "hostfunc":
                    _check(bench.native.host_post(stream.key, awaiter.queue, token), "hostfunc")
                elif kind == "events":
                    bench.device.notify_event(stream.record(), awaiter.queue, token)
                else:
                    bench.device.notify(stream, awaiter.queue, token)
                await future
                took.append(now_ns() - begin - base)
                if not loaded:
                    await asyncio.sleep(0)
            stop = True
            await asyncio.gather(*others)
            return took

        return main

    for name, factory in loops().items():
        for kind in ("words", "events", "hostfunc"):
            for loaded in (False, True):
                key = f"{name} {kind} {'loaded' if loaded else 'idle'}"
                out[f"{key} beyond_us"] = percentiles(run_on(factory, make(kind, loaded)))
    before = bench.device.watch_counters()
    time.sleep(0.5)
    after = bench.device.watch_counters()
    out["idle_watch_passes_in_0.5_s"] = after.passes - before.passes
    return out


def b11_watch_cost(bench: Bench) -> Numbers:
    """Launch rate with nothing pending, and with a closed gate watched by words and by events."""
    launches = 20_000 if not bench.quick else 4_000
    stream = bench.device.stream("default").key

    def rate() -> float:
        begin = now_ns()
        for start in range(0, launches, 500):
            for _ in range(min(500, launches - start)):
                bench.native.launch(stream, "kvs_spin", 1, 1, (0,))
            _sync(bench, "default")
        return launches / ((now_ns() - begin) / 1e9)

    async def main(awaiter: Awaiter) -> Numbers:
        out: Numbers = {"alone_launches_s": round(rate())}
        for kind in ("words", "events"):
            ticket = bench.ring.take(1)
            assert ticket is not None
            gated = bench.device.stream("gated0")
            gated.wait_ticket(ticket)
            token, future = awaiter.token()
            if kind == "words":
                bench.device.notify(gated, awaiter.queue, token)
            else:
                bench.device.notify_event(gated.record(), awaiter.queue, token)
            out[f"watching_{kind}_launches_s"] = round(rate())
            bench.ring.publish(ticket, 0)
            await future
            bench.ring.release(ticket)
        out["alone_again_launches_s"] = round(rate())
        return out

    rate()
    return dict(run_on(None, main))


def b12_restore(bench: Bench) -> Numbers:
    """Disk to GPU through the store: 256 pages of 2 MiB, awaited, gated, and in layer groups."""
    pages, page_bytes = (256, 2 * MIB) if not bench.quick else (64, 2 * MIB)
    out: Numbers = {"pages": pages, "page_bytes": page_bytes}
    factory = loops().get("uvloop")
    for groups in (1, 8):
        for mode in ("await", "gated"):
            with (
                tempfile.TemporaryDirectory(dir=bench.directory) as folder,
                asyncio.Runner(loop_factory=factory) as runner,
            ):
                work = _restore(bench, Path(folder), pages, page_bytes, groups, mode)
                out[f"{mode}_{groups}_groups"] = runner.run(work)
    return out


async def _restore(
    bench: Bench, folder: Path, pages: int, page_bytes: int, groups: int, mode: str
) -> Numbers:
    names = [f"g{index}" for index in range(groups)]
    each = page_bytes // groups
    slots_bytes = (pages + 4) * groups * (each + 4096)
    # a gated restore needs every landing slot at once; an awaited one takes the default
    io = kvstore.IoConfig(staging_bytes=slots_bytes if mode == "gated" else 64 * MIB)
    config = kvstore.StoreConfig(
        block_tokens=16,
        pool_groups=tuple(kvstore.PoolGroupConfig(name, page_bytes=each) for name in names),
        device=kvstore.DeviceTierConfig(
            gpu_cache_size=(pages + 8) * page_bytes, device=f"cuda:{bench.ordinal}"
        ),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=4 * slots_bytes,
            disk_cache_path=str(folder / "kv"),
            disk_keep_copy_after_restore=True,
        ),
        io=io,
    )
    first = list(range(pages * 16))
    other = list(range(10_000_000, 10_000_000 + pages * 16))
    runs: list[Numbers] = []
    async with _DiskRate(folder, pages * groups, each) as disk, kvstore.open_store(config) as store:
        engine = store.stats().engine.engine
        await _fill(store, first)
        gc.collect()
        gc.freeze()  # as schedulers do: a full collection would stand in the middle of a restore
        for _ in range(RESTORES):
            await _fill(store, other, keep=False)  # pushes the others out to disk
            before = await disk.read()
            run = await _one_restore(store, first, names, pages * page_bytes, gated=mode == "gated")
            after = await disk.read()
            run["disk_gb_s"] = round((before + after) / 2, 3)
            run["of_disk"] = round(run["gb_s"] / run["disk_gb_s"], 3)
            runs.append(run)
        stats = store.stats()
        gc.unfreeze()
    wanted = [run for run in runs if run["is_gated"] == (mode == "gated")]
    out: Numbers = {
        "engine": engine,
        "runs": runs,
        "gate_busy": stats.gate_busy,
        "fallbacks": stats.gate_await_fallbacks,
        "counted_runs": len(wanted),
    }
    if wanted:
        out["of_disk_median"] = round(float(np.median([run["of_disk"] for run in wanted])), 3)
        out["first_group_of_all_median"] = round(
            float(np.median([run["group_ready_ms"][0] / run["ms"] for run in wanted])), 3
        )
    return out


async def _one_restore(
    store: Any, tokens: list[int], names: list[str], byte_count: int, *, gated: bool
) -> Numbers:
    stream = store.stream() if gated else None
    async with store.session(tokens) as session:
        found = dict(session.cached_tokens_by_level)
        begin = now_ns()
        restore = await session.resume(stream, gated=gated)
        enqueued = now_ns()
        times = []
        for name in names:
            await restore.ready(name)
            times.append(round((now_ns() - begin) / 1e6, 2))
        await restore.ready()
        took = now_ns() - begin
        restore.raise_for_status()
        moved = byte_count * found.get("disk", 0) / len(tokens)
        session.suspend(store.stream().record())
        await store.step(store.stream().record())
    return {
        "is_gated": restore.is_gated,
        "gb_s": round(moved / took, 3),
        "ms": round(took / 1e6, 2),
        "enqueued_ms": round((enqueued - begin) / 1e6, 2),
        "group_ready_ms": times,
        "tokens": restore.valid_tokens,
        "by_level": found,
    }


async def _fill(store: Any, tokens: Sequence[int], *, keep: bool = True) -> None:
    """Take device slots for ``tokens``; without ``keep`` they are free again afterwards."""
    async with store.session(list(tokens)) as session:
        restore = await session.resume()
        restore.raise_for_status()
        await session.grow(len(tokens))
        rest = list(tokens)[session.history_tokens :]
        if rest and keep:
            session.commit(rest)
        session.suspend(store.stream().record())
    await store.step(store.stream().record())


class _DiskRate:
    """One file read by an engine of its own with pieces of the same size; GB/s.

    The disk's own rate, measured right before and right after each restore, because shared disks
    change theirs within seconds.
    """

    def __init__(self, folder: Path, pieces: int, payload_bytes: int) -> None:
        self.pieces, self.payload_bytes = pieces, payload_bytes
        self.slot = payload_bytes + 4096
        self.depth = min(pieces, 64 * MIB // self.slot)
        self.path = folder / "rate"

    async def __aenter__(self) -> Self:
        from kvstore._uring import open_engine
        from kvstore._uring.base import Opcode
        from kvstore._uring.probe import open_slot_file

        self.opcode = Opcode
        self.file = open_slot_file(self.path, self.pieces * self.slot)
        self.engine = open_engine(kvstore.IoConfig(), kind="auto")
        self.arena = Arena(self.depth * self.slot)
        self.arena.prefault()
        self.engine.register_memory(self.arena.address, self.arena.length)
        self.file_id = self.engine.register_file(self.file.direct_fd, self.file.buffered_fd)
        self.awaiter = Awaiter()
        await self._transfer(Opcode.WRITE)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.aclose()
        self.awaiter.queue.close()
        self.file.close() if hasattr(self.file, "close") else None
        self.arena.close()

    async def read(self) -> float:
        """Read the whole file once."""
        return await self._transfer(self.opcode.READ)

    async def _transfer(self, opcode: Any) -> float:
        from kvstore._uring.base import SUBMISSION_DTYPE

        begin = now_ns()
        free = list(range(self.depth))
        pending: deque[tuple[int, asyncio.Future[int]]] = deque()
        for index in range(self.pieces):
            if not free:
                slot, future = pending.popleft()
                _check(await future, "transfer")
                free.append(slot)
                while pending and pending[0][1].done():
                    slot, future = pending.popleft()
                    _check(future.result(), "transfer")
                    free.append(slot)
            slot = free.pop()
            one = np.zeros(1, SUBMISSION_DTYPE)
            token, future = self.awaiter.token()
            one["token"], one["address"] = token, self.arena.address + slot * self.slot
            one["offset"], one["payload_bytes"] = index * self.slot, self.payload_bytes
            one["header_bytes"], one["opcode"], one["file_id"] = 4096, opcode, self.file_id
            one["gate_word"], one["io_class"] = -1, 0 if opcode is self.opcode.READ else 1
            self.engine.submit(self.awaiter.queue, one)
            pending.append((slot, future))
        for _, future in pending:
            _check(await future, "transfer")
        return self.pieces * self.payload_bytes / (now_ns() - begin)


def b13_register(bench: Bench) -> Numbers:
    """Prefault and register an arena, with huge pages where the system gives them."""
    length = (2 if not bench.quick else 1) * GIB
    arena = Arena(length)
    begin = now_ns()
    arena.prefault()
    faulted = now_ns()
    for address, part in arena.slabs():
        _check(bench.native.register(address, part), "register")
    registered = now_ns()
    for address, _ in arena.slabs():
        _check(bench.native.unregister(address), "unregister")
    out = {
        "bytes": length,
        "prefault_s": round((faulted - begin) / 1e9, 3),
        "register_s": round((registered - faulted) / 1e9, 3),
        "huge_pages": arena.huge_pages,
        "register_gb_s": round(length / (registered - faulted), 1),
    }
    arena.close()
    return out


class _Fake:
    """Device memory that looks like a tensor to `PagePool.adopted`."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "|u1",
            "version": 3,
            "strides": None,
        }


def b14_staged(bench: Bench) -> Numbers:
    """Adopted tensors with pieces of 4 to 16 KiB: one DMA and a kernel, against the loop."""
    rng = np.random.default_rng(14)
    out: Numbers = {}
    blocks = 512 if not bench.quick else 128
    for piece in (4 * KIB, 8 * KIB, 16 * KIB):
        layers = 64
        with _memory(bench, layers * blocks * piece) as memory:
            tensors = [
                _Fake(memory + layer * blocks * piece, (blocks, piece)) for layer in range(layers)
            ]
            before = bench.device.min_dma
            bench.device.min_dma = max(before, 32 * KIB)
            pool = bench.device.adopt_pool("staged", tensors, 0, layers * piece)
            bench.device.min_dma = before
            layout = _layout(bench, layers * piece, 4096)
            hosts = np.arange(blocks, dtype=np.int32)
            slots = rng.permutation(blocks).astype(np.int32)
            total = blocks * layers * piece
            for direction in CopyDirection:
                role = "h2d" if direction is CopyDirection.TO_DEVICE else "d2h"
                stream = bench.device.stream(role)

                def staged(
                    direction: CopyDirection = direction,
                    role: str = role,
                    stream: Any = stream,
                    pool: Any = pool,
                    layout: Any = layout,
                    slots: Any = slots,
                    hosts: Any = hosts,
                ) -> None:
                    bench.device.copy_pages(stream, pool, slots, layout, hosts, direction)
                    _sync(bench, role)

                def loop(
                    min_dma: int,
                    direction: CopyDirection = direction,
                    role: str = role,
                    stream: Any = stream,
                    pool: Any = pool,
                    layout: Any = layout,
                    slots: Any = slots,
                    hosts: Any = hosts,
                ) -> None:
                    bench.native.set_min_dma(min_dma)
                    to_device = direction is CopyDirection.TO_DEVICE
                    _check(
                        bench.native.copy(
                            stream.key, pool.plan(layout), slots, hosts, to_device=to_device
                        )[0],
                        "copy",
                    )
                    _sync(bench, role)

                key = f"{role} {piece // KIB} KiB"
                out[f"{key} staged_gb_s"] = _best(bench.rounds(7), staged, total)
                out[f"{key} loop_gb_s"] = _best(3, partial(loop, 1 << 40), total)
                out[f"{key} batch_gb_s"] = _best(3, partial(loop, 0), total)
                bench.native.set_min_dma(before)
    out["staged_calls"] = bench.device.counters().staged_calls
    return out


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


ALL: dict[str, Callable[[Bench], Numbers]] = {
    "B1": b1_h2d,
    "B2": b2_d2h,
    "B3": b3_both,
    "B4": b4_pages,
    "B5": b5_pageable,
    "B6": b6_enqueue,
    "B7": b7_gate,
    "B8": b8_host_function,
    "B9": b9_parked,
    "B10": b10_await,
    "B11": b11_watch_cost,
    "B12": b12_restore,
    "B13": b13_register,
    "B14": b14_staged,
}
