"""Pages that cycle through the tiers leave nothing for the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np

import kvstore

BLOCK_TOKENS = 16
PAGE_BYTES = 4096
KINDS = {"Transfer", "_Job", "Move", "Slot", "Page", "Session", "Restore", "History", "Flight"}


async def test_page_moves_leave_no_cycles_of_references(tmp_path):
    """A collector's pause blocks the loop, so evictions and restores must not feed it (INV-420)."""
    config = kvstore.StoreConfig(
        block_tokens=BLOCK_TOKENS,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=8 * (PAGE_BYTES + 4096)),
        disk=kvstore.DiskTierConfig(disk_cache_size=1 << 20, disk_cache_path=str(tmp_path)),
    )
    async with kvstore.open_store(config) as store:

        async def turn(number: int) -> None:
            tokens = np.arange(4 * BLOCK_TOKENS) + 1000 * number
            async with store.session(tokens) as session:
                await session.resume()
                cached = session.cached_tokens
                await session.grow(tokens.size)
                await store.step()
                session.commit(tokens[cached:])

        for number in range(12):
            await turn(number)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(24):
                await turn(number % 12)
            gc.collect()
            found = Counter(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        stats = store.stats()
        assert stats.moved_bytes["disk2h"] > 0
        assert stats.moved_bytes["h2disk:required"] > 0
    assert {kind: found[kind] for kind in KINDS if found[kind]} == {}
