"""Stores that share an engine: one cap, one owner, and nobody waits for a stranger."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvstore
from kvstore._uring import open_engine
from kvstore._uring.native import GateRing
from kvstore.testing import pattern

PAGE_BYTES = 16 << 10
SLOT_BYTES = PAGE_BYTES + 4096
BLOCK = 8


def config(path: Path, name: str) -> kvstore.StoreConfig:
    """Return a small store with a directory of its own."""
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=8 * SLOT_BYTES),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=64 * SLOT_BYTES,
            disk_cache_path=str(path / name),
            disk_write_through=True,
        ),
        check_invariants=True,
    )


async def cycle(store: kvstore.KVStore, tag: str) -> int:
    """Commit ten requests, read them back verified; returns the cached blocks."""
    pool = np.asarray(store.device_pool("full").as_tensor()).reshape(-1, PAGE_BYTES)
    cached = 0
    for _ in range(2):
        for number in range(10):
            tokens = np.arange(4 * BLOCK) + number * 1000
            async with store.session(tokens) as session:
                (await session.resume()).raise_for_status()
                start = session.history_tokens // BLOCK
                cached += start
                await session.grow(len(tokens))
                await store.step()
                table = session.page_table("full")
                for block in range(start):
                    expected = pattern(f"{tag}.{number}.{block}", PAGE_BYTES)
                    assert np.array_equal(expected, pool[table[block]])
                for block in range(start, 4):
                    pool[table[block]] = pattern(f"{tag}.{number}.{block}", PAGE_BYTES)
                session.commit(tokens[session.history_tokens :])
    return cached


async def test_stores_share_an_engine_and_close_alone(tmp_path: Path) -> None:
    """INV-122, INV-123: closing one drains its own files; the engine runs on for the other."""
    ring = GateRing()
    engine = open_engine(gate=ring)
    try:
        async with kvstore.open_store(config(tmp_path, "a"), engine) as first:
            async with kvstore.open_store(config(tmp_path, "b"), engine) as second:
                assert engine is first.engine is second.engine
                assert 40 == await cycle(first, "a")
                assert 40 == await cycle(second, "b")
            with np.testing.assert_raises(kvstore.StoreClosed):
                second.probe([1])
            assert 80 == await cycle(first, "a")
        stats = engine.stats()
        assert 0 == stats.background_bytes
        assert 0 == stats.direct_files + stats.buffered_files
        assert 0 == stats.registered_memory_bytes
    finally:
        await engine.aclose()
        ring.close()
