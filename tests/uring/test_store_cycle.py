"""The main path on real pieces: pages cycle through all tiers, and every byte is verified."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import kvstore

from .serving import BLOCK, BLOCKS, PAGE_BYTES, serve  # noqa: TID252


def config(path: Path, engine: str, **options: Any) -> kvstore.StoreConfig:
    """Return a small store whose device and host are far too small for the load."""
    disk = {"disk_cache_size": 64 * (PAGE_BYTES + 4096), "disk_cache_path": str(path / "kv")}
    host: dict[str, Any] = {"host_cache_size": 8 * (PAGE_BYTES + 4096)}
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(**host, **options.pop("host", {})),
        disk=kvstore.DiskTierConfig(**disk, **options.pop("disk", {})),
        io=kvstore.IoConfig(io_engine=engine),
        check_invariants=True,
        **options,
    )


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disk": {"disk_keep_copy_after_restore": True}},
        {"disk": {"disk_write_through": True}},
        {"host": {"keep_copy_after_restore": True}},
        {
            "disk": {"disk_keep_copy_after_restore": True, "disk_write_through": True},
            "host": {"keep_copy_after_restore": True},
        },
    ],
    ids=["plain", "keep", "write-through", "inclusive", "all"],
)
async def test_every_byte_survives_the_way_through_all_tiers(
    tmp_path: Path, engine: str, options: dict[str, Any]
) -> None:
    """Three rounds over 12 requests that fit nowhere: hits are right, options act (INV-814)."""
    async with kvstore.open_store(config(tmp_path, engine, **options)) as store:
        cached = [await serve(store, number) for _ in range(3) for number in range(12)]
        stats = store.stats()
    assert [0] * 12 + [BLOCKS] * 24 == cached
    assert engine == stats.engine.engine
    disk, host = stats.pools["disk", "full"], stats.pools["host", "full"]
    assert stats.moved_bytes["disk2h"] > 0
    for pool in (disk, host):
        assert pool.total == pool.ready + pool.draining + pool.primaries + pool.copies  # INV-804
    keep = options.get("disk", {}).get("disk_keep_copy_after_restore", False)
    through = options.get("disk", {}).get("disk_write_through", False)
    assert (disk.kept > 0) == keep
    assert (disk.reused > 0) == (keep or through)
    assert (disk.written_through > 0) == through
    assert (stats.moved_bytes.get("h2disk:background", 0) > 0) == through


def worker_count() -> int:
    """Return the workers of threads engines in this process, as the kernel sees them."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            count += (task / "comm").read_text(encoding="ascii").startswith("kvs-worker")
        except OSError:
            continue  # it has ended meanwhile
    return count


@pytest.mark.parametrize("threads", [1, 4, 16])
async def test_disk_io_threads_alone_restore_correctly(tmp_path: Path, threads: int) -> None:
    """INV-131, INV-134, INV-814: parallel I/O alone: restored data is right, no copies appear,
    every eviction to disk is a required write, and as many workers run as were asked for.
    """
    options = dataclasses.replace(
        config(tmp_path, "threads"),
        io=kvstore.IoConfig(io_engine="threads", disk_io_threads=threads),
    )
    before = worker_count()
    async with kvstore.open_store(options) as store:
        cached = [await serve(store, number) for _ in range(3) for number in range(12)]
        stats = store.stats()
        assert threads == stats.engine.threads
        assert "threads" == stats.engine.engine
        assert worker_count() >= before + threads
    assert [0] * 12 + [BLOCKS] * 24 == cached
    assert stats.moved_bytes["disk2h"] > 0
    for pool in stats.pools.values():
        assert 0 == pool.copies == pool.kept == pool.written_through == pool.reused
    assert 0 == stats.write_through_issued == stats.write_through_skipped
    assert 0 == stats.moved_bytes.get("h2disk:background", 0)
    assert stats.moved_bytes["h2disk:required"] >= stats.moved_bytes["disk2h"]
