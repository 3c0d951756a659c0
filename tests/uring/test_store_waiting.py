"""Restores that wait for slots: served by age, each once, however many wait."""

from __future__ import annotations

import anyio
import numpy as np

import kvstore

BLOCK_TOKENS = 16
PAGE_BYTES = 4096
BLOCKS = 4


async def test_many_waiting_restores_are_each_started_once():
    """INV-416: starting one waiting restore does not serve the queue from inside itself.

    The last session waits behind others although its pages are on the device: its restore is over
    at once, which asks for the queue to be served again.
    """
    config = kvstore.StoreConfig(
        block_tokens=BLOCK_TOKENS,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=4 * BLOCKS * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=4 << 20),
    )
    count: int = 100
    order: list[int] = []
    async with kvstore.open_store(config) as store:
        sessions = []
        for number in range(count):
            tokens = np.arange(BLOCKS * BLOCK_TOKENS) + 1000 * number
            session = await store.session(tokens).__aenter__()
            await session.resume()
            await session.grow(tokens.size)
            session.commit(tokens)
            session.suspend()
            sessions.append(session)

        async def visit(number: int) -> None:
            restore = await sessions[number].resume()
            restore.raise_for_status()
            order.append(number)
            await anyio.sleep(0.001)
            await sessions[number].aclose()

        started = store.restores.started_count
        async with anyio.create_task_group() as group:
            for number in (0, 1, 2, count - 1, *range(3, count - 1)):
                group.start_soon(visit, number)
        assert store.restores.waiting_count == 0
        assert store.restores.started_count - started <= count
    assert sorted(order) == list(range(count))
