"""A scheduler's request on a real store: what was cached is compared, the rest is computed."""

from __future__ import annotations

import numpy as np

import kvstore
from kvstore.testing import pattern

PAGE_BYTES = 64 << 10
BLOCK = 16
BLOCKS = 4  # per request


def tokens_of(number: int) -> list[int]:
    """Return the tokens of one request."""
    return list(range(number * 1000, number * 1000 + BLOCK * BLOCKS))


async def serve(store: kvstore.KVStore, number: int) -> int:
    """Run one request: check what was cached, compute the rest; returns the cached blocks.

    Raises: PagesLost: a page that was cached when the session began could not be read.
    """
    pool = np.asarray(store.device_pool("full").as_tensor()).reshape(-1, PAGE_BYTES)
    tokens = tokens_of(number)
    async with store.session(tokens) as session:
        restore = await session.resume()
        restore.raise_for_status()
        cached = session.cached_tokens // BLOCK
        table = session.page_table("full")
        for block in range(cached):
            assert np.array_equal(pattern(f"{number}.{block}", PAGE_BYTES), pool[table[block]])
        await session.grow(len(tokens))
        table = session.page_table("full")
        for block in range(cached, BLOCKS):
            pool[table[block]] = pattern(f"{number}.{block}", PAGE_BYTES)
        session.commit(tokens[session.history_tokens :])
        session.suspend()
    return cached
