"""The loop is never blocked: no call of the store reads, writes, sleeps or waits on the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore

blockbuster = pytest.importorskip("blockbuster")

PAGE_BYTES = 16 << 10
SLOT_BYTES = PAGE_BYTES + 4096
BLOCK = 8


async def test_no_call_blocks_the_loop(tmp_path: Path) -> None:
    """C16, C20, INV-906: opening, recovery, load, resize, flush and close under blockbuster."""
    config = kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=8 * SLOT_BYTES),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=64 * SLOT_BYTES, disk_cache_path=str(tmp_path / "kv")
        ),
        fingerprint="model",
    )
    with blockbuster.blockbuster_ctx():
        for _ in range(2):
            async with kvstore.open_store(config) as store:
                await store.recovered()
                for number in range(10):
                    tokens = np.arange(4 * BLOCK) + number * 1000
                    async with store.session(tokens) as session:
                        await session.resume()
                        await session.grow(len(tokens))
                        session.commit(tokens[session.history_tokens :])
                await store.resize("host", 16 * SLOT_BYTES)
                await store.resize("disk", 32 * SLOT_BYTES)
                await store.aclose(flush=True)
