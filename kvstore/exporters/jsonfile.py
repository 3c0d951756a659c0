"""Write ``stats()`` to a JSON file now and then: what ``kvstore top`` reads.

async with anyio.create_task_group() as group:
    group.start_soon(write_stats, store, "/run/kvstore/stats.json")
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from kvstore.config import IoClass
from kvstore.stats import LatencySnapshot, StoreStats


class HasStats(Protocol):
    """What is written: a store, or anything that hands out the same snapshot."""

    def stats(self) -> StoreStats:
        """Return a frozen snapshot."""
        ...


def _latency(latency: LatencySnapshot) -> dict[str, int]:
    return {
        "total": latency.total,
        "sum_ns": latency.sum_ns,
        "max_ns": latency.max_ns,
        "p50_ns": latency.percentile_ns(50),
        "p99_ns": latency.percentile_ns(99),
        "p99_9_ns": latency.percentile_ns(99.9),
    }


def as_dict(stats: StoreStats) -> dict[str, Any]:
    """Return a snapshot as plain dicts: keys joined by ``/``, latencies as percentiles."""
    plain: dict[str, Any] = {
        field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)
    }
    plain["pools"] = {
        f"{level}/{group}": dataclasses.asdict(pool) for (level, group), pool in stats.pools.items()
    }
    engine = {
        field.name: getattr(stats.engine, field.name) for field in dataclasses.fields(stats.engine)
    }
    engine["classes"] = {
        io_class.name.lower(): {
            field.name: _latency(value) if isinstance(value, LatencySnapshot) else value
            for field in dataclasses.fields(counts)
            for value in (getattr(counts, field.name),)
        }
        for io_class, counts in zip(IoClass, stats.engine.classes, strict=True)
    }
    plain["engine"] = engine
    return plain


def _replace(path: Path, text: str) -> None:
    """Write beside the file and rename, so that a reader never sees half of it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


async def write_stats(store: HasStats, path: str | Path, *, interval: float = 1.0) -> None:
    """Write the snapshot every ``interval`` seconds until cancelled, then remove the file.

    Cancellation: at once, between two writes; the file goes, so that nobody reads old numbers.
    Cost: one snapshot on the loop; encoding and writing happen in a worker thread.
    """
    target = Path(path)
    try:
        while True:
            text = await anyio.to_thread.run_sync(json.dumps, as_dict(store.stats()))
            await anyio.to_thread.run_sync(_replace, target, text)
            await anyio.sleep(interval)
    finally:
        target.unlink(missing_ok=True)  # noqa: ASYNC240  one system call, and no await is left
