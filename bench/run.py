"""One run of a replay: open a store, serve the workload, read the counters."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

import kvstore
from kvstore.config import (
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    IoClass,
    IoConfig,
    PoolGroupConfig,
    StoreConfig,
)
from kvstore.errors import OutOfPages
from kvstore.stats import EngineStats, StoreStats

from .ablation import Variant
from .costs import CostModel
from .oracle import HitCount
from .pages import PagePattern
from .results import Measures, percentile
from .scheduler import GROUP, Flow, Outcome, PageMemory, Scheduler, chain_keys
from .workload import Request, Workload

LAG_PERIOD_S = 0.005
STALL_S = 60.0
PAGE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What all rows of a report share. ``disk_bytes`` or ``host_bytes`` 0: no such tier."""

    block_tokens: int = 512
    page_bytes: int = PAGE_BYTES
    device_bytes: int = 48 << 20
    host_bytes: int = 128 << 20
    disk_bytes: int = 0
    io_threads: int = 16
    protected_copy_fraction: float = 1.0
    write_policy: str = "all"
    eviction_policy: str = "lru"
    sessions: int = 16
    time_scale: float = 1.0
    cost: CostModel = field(default_factory=CostModel)

    def store_config(self, variant: Variant, directory: str) -> StoreConfig:
        """Return the configuration of one row. Raises: ConfigError: a field is wrong."""
        fraction = variant.protected_copy_fraction
        if fraction is None:
            fraction = self.protected_copy_fraction
        group = PoolGroupConfig(
            GROUP,
            page_bytes=self.page_bytes,
            eviction_policy=variant.eviction_policy or self.eviction_policy,
        )
        host = disk = None
        if self.host_bytes:
            host = HostTierConfig(
                host_cache_size=self.host_bytes, keep_copy_after_restore=variant.inclusive_host
            )
        if self.disk_bytes:
            disk = DiskTierConfig(
                disk_cache_size=self.disk_bytes,
                disk_cache_path=directory,
                disk_keep_copy_after_restore=variant.keep_copy,
                disk_write_through=variant.write_through,
                disk_protected_copy_fraction=str(fraction),
                write_policy=variant.write_policy or self.write_policy,
            )
        name = "threads" if variant.engine == "serial" else variant.engine
        return StoreConfig(
            block_tokens=self.block_tokens,
            pool_groups=(group,),
            device=DeviceTierConfig(gpu_cache_size=self.device_bytes, device="cpu"),
            host=host,
            disk=disk,
            io=IoConfig(io_engine=name, disk_io_threads=self.io_threads),
        )


class LoopLag:
    """How late the event loop wakes a coroutine that sleeps 5 ms: whatever blocks it shows here.

    Pauses of the garbage collector are measured beside it, because they are part of the lag.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.pauses_s: list[float] = []
        self._collecting_since_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        clock = asyncio.get_running_loop().time
        gc.callbacks.append(self._on_collection)
        try:
            while True:
                due_s = clock() + LAG_PERIOD_S
                await asyncio.sleep(LAG_PERIOD_S)
                self.late_s.append(max(0.0, clock() - due_s))
        finally:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._collecting_since_s = time.perf_counter()
        elif self._collecting_since_s:
            self.pauses_s.append(time.perf_counter() - self._collecting_since_s)

    def measures(self) -> Measures:
        """Return the largest lag and two percentiles in seconds."""
        return {
            "loop_lag_max_s": max(self.late_s, default=0.0),
            "loop_lag_p99_s": percentile(self.late_s, 99),
            "loop_lag_p50_s": percentile(self.late_s, 50),
            "gc_pause_max_s": max(self.pauses_s, default=0.0),
            "gc_pause_sum_s": sum(self.pauses_s),
        }


class ReplayStalled(RuntimeError):
    """Nothing has moved for a long time: a bug, reported instead of waiting for ever."""


async def watch_for_stall(scheduler: Scheduler, limit_s: float = STALL_S) -> None:
    """Raise ReplayStalled once no step was made and no request ended for ``limit_s``."""
    clock = asyncio.get_running_loop().time
    seen, since_s = (-1, -1), clock()
    while True:
        now = (scheduler.outcome.steps, len(scheduler.outcome.latency_s))
        if now != seen:
            seen, since_s = now, clock()
        elif clock() - since_s > limit_s:
            raise ReplayStalled(f"no progress for {limit_s:g} s: {scheduler.describe()}")
        await asyncio.sleep(limit_s / 60)


@contextlib.asynccontextmanager
async def open_row(config: StoreConfig, variant: Variant) -> AsyncIterator[Any]:
    """Open the store of a row and let its host tier arrive.

    The serial engine is a baseline that no store would choose.
    """
    if variant.engine != "serial":
        async with kvstore.open_store(config) as store:
            await store.filled()
            yield store
        return
    from kvstore._uring import open_engine

    engine = open_engine(config.io, kind="serial")
    try:
        async with kvstore.open_store(config, engine=engine) as store:
            await store.filled()
            yield store
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


async def run_once(
    options: ReplayOptions,
    variant: Variant,
    workload: Workload,
    directory: str,
    on_request: Callable[[], object] = lambda: None,
) -> Measures:
    """Replay the workload once through a fresh store and return its measures."""
    config = options.store_config(variant, directory)
    lag = LoopLag()
    gc.collect()
    gc.freeze()  # as a serving process does: the workload is no business of the collector
    async with open_row(config, variant) as store:
        scheduler = Scheduler(
            store,
            page_bytes=options.page_bytes,
            block_tokens=options.block_tokens,
            cost=options.cost,
            time_scale=options.time_scale,
            on_request=on_request,
        )
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        async with anyio.create_task_group() as group:
            group.start_soon(lag.watch)
            group.start_soon(watch_for_stall, scheduler)
            outcome = await scheduler.run(workload, options.sessions)
            group.cancel_scope.cancel()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        stats = store.stats()
    gc.unfreeze()
    return measures(outcome, stats, wall_s, cpu_s) | lag.measures()


def measures(outcome: Outcome, stats: StoreStats, wall_s: float, cpu_s: float) -> Measures:
    """Return the measures of a finished run; sizes in bytes, times in seconds."""
    served = len(outcome.latency_s)
    hit_tokens = sum(outcome.hit_tokens.values())
    moved = stats.moved_bytes
    classes = stats.engine.classes
    required, background = classes[IoClass.REQUIRED], classes[IoClass.BACKGROUND]
    moved_bytes = sum(value for key, value in moved.items() if ":" not in key)
    return {
        "engine": stats.engine.engine or "none",
        "engine_settings": engine_settings(stats.engine),
        "requests_per_s": served / wall_s,
        "ttft_p50_s": percentile(outcome.ttft_s, 50),
        "ttft_p90_s": percentile(outcome.ttft_s, 90),
        "ttft_p99_s": percentile(outcome.ttft_s, 99),
        "latency_p50_s": percentile(outcome.latency_s, 50),
        "latency_p90_s": percentile(outcome.latency_s, 90),
        "restore_wait_p50_s": percentile(outcome.restore_wait_s, 50),
        "restore_wait_p90_s": percentile(outcome.restore_wait_s, 90),
        "restore_wait_p99_s": percentile(outcome.restore_wait_s, 99),
        "cached_tokens_per_s": hit_tokens / wall_s,
        "hit_rate": hit_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0,
        "hit_tokens": {name: outcome.hit_tokens.get(name, 0) for name in stats.levels},
        "ssd_bytes_written": sum(one.written_bytes for one in classes),
        "ssd_bytes_read": sum(one.read_bytes for one in classes),
        "required_writes": required.transfers,
        "required_bytes_written": required.written_bytes,
        "background_writes": background.transfers,
        "background_bytes_written": background.written_bytes,
        "promotions": background.promotions,
        "d2h_bytes": moved.get("d2h", 0),
        "h2d_bytes": moved.get("h2d", 0),
        "verified_pages": outcome.verified_pages,
        "mismatches": outcome.mismatches,
        "checksum_mismatches": stats.engine.mismatches,
        "lost_pages": stats.lost_pages,
        "requests": served,
        "refused_requests": outcome.refused,
        "preemptions": outcome.preemptions,
        "truncated_restores": outcome.truncations,
        "computed_tokens": outcome.computed_tokens,
        "recomputed_tokens": outcome.recomputed_tokens,
        "steps": outcome.steps,
        "disk_free_slots": sum(
            pool.ready for (level, _), pool in stats.pools.items() if level == "disk"
        ),
        "moved_bytes": dict(moved),
        "write_through_issued": stats.write_through_issued,
        "write_through_skipped": stats.write_through_skipped,
        "write_through_skipped_by": dict(stats.write_through_skipped_by),
        "disk_copies": copy_counts(stats, "disk"),
        "host_copies": copy_counts(stats, "host"),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "cpu_s_per_gib_moved": cpu_s / (moved_bytes / 2**30) if moved_bytes else 0.0,
        "first_mismatch": outcome.first_mismatch,
    }


def copy_counts(stats: StoreStats, level: str) -> dict[str, int]:
    """Return what became of the copies on a level (INV-805), over all pool groups."""
    names = ("kept", "written_through", "reused", "reused_pending", "reclaimed", "died")
    pools = [pool for (name, _), pool in stats.pools.items() if name == level]
    return {name: sum(getattr(pool, name) for pool in pools) for name in names}


def engine_settings(stats: EngineStats) -> dict[str, Any]:
    """Return what the engine of a run was: threads or depth, flags and bounds (INV-815)."""
    return {
        "engine": stats.engine,
        "fallback_reason": stats.fallback_reason,
        "threads": stats.threads,
        "kernel_rings": stats.kernel_rings,
        "ring_entries": stats.ring_entries,
        "ring_flags": list(stats.ring_flags),
        "bounds": dict(stats.bounds),
        "registered_buffers": stats.registered_buffers,
        "huge_pages": stats.huge_pages,
        "direct_files": stats.direct_files,
        "buffered_files": stats.buffered_files,
    }


async def run_oracle(
    options: ReplayOptions,
    requests: Sequence[Request],
    on_request: Callable[[], object] = lambda: None,
) -> tuple[list[int], Outcome]:
    """Replay one request at a time on the device tier alone; returns the hits of each in blocks.

    The last id of a request stands for a full block, and no output is committed. Requests longer
    than the tier are cut to its capacity; see `oracle` for why that changes no hit.
    """
    options = replace(options, host_bytes=0, disk_bytes=0)
    config = options.store_config(Variant("oracle", "auto"), "")
    found: list[int] = []
    outcome = Outcome()
    async with kvstore.open_store(config) as store:
        pattern = PagePattern(options.page_bytes, options.block_tokens)
        memory = PageMemory(store.device_pool(GROUP), options.page_bytes, pattern)
        stream = store.stream()
        for request in requests:
            blocks = min(len(request.source), len(memory.words))
            whole = replace(request, prompt_tokens=blocks * options.block_tokens, output_tokens=0)
            tokens = whole.tokens()
            flow = Flow(request.index, whole, tokens, chain_keys(tokens, options.block_tokens))
            async with store.session(tokens) as session:
                flow.session = session
                cached = session.cached_tokens
                found.append(cached // options.block_tokens)
                restore = await session.resume(stream)
                restore.raise_for_status()
                await memory.check(flow, cached, outcome)
                if cached < tokens.size:
                    if not session.try_grow(tokens.size):
                        raise OutOfPages(f"request {request.index} does not fit")
                    drained = store.step(None)
                    if drained is not None:
                        await drained
                    memory.fill(flow, cached, tokens.size)
                    session.commit(tokens[cached:])
            on_request()
    return found, outcome


def oracle_report(found: Sequence[int], expected: Sequence[int], refs: int) -> dict[str, Any]:
    """Return hits of store and reference, and the first request where they differ."""
    differing = [
        i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]
    ]
    return {
        "requests": len(found),
        "block_references": refs,
        "hits": sum(found),
        "hits_reference": sum(expected),
        "hit_rate": HitCount(sum(found), refs).rate,
        "hit_rate_reference": HitCount(sum(expected), refs).rate,
        "is_equal": not differing,
        "differing_requests": len(differing),
        "first_difference": (
            {
                "request": differing[0],
                "hits": found[differing[0]],
                "reference": expected[differing[0]],
            }
            if differing
            else None
        ),
    }
