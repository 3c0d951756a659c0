"""A session that ends while its restore is on its way leaves nothing locked."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvstore._uring.base import Opcode
from kvstore.core.invariants import check_state
from kvstore.errors import LogicError
from kvstore.testing import SimClient, SimRig, sim_config

BLOCK = 8
TOKENS = list(range(4 * BLOCK))


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[Any, SimClient]]:
    """Open a store whose four cached blocks have been pushed off the device."""
    config = sim_config(device_pages=4, host_pages=12, disk_pages=0, block_tokens=BLOCK)
    rig = SimRig.create(config)
    async with rig.open(config) as store:
        client = SimClient(store, rig, config)
        await client.put(TOKENS)
        await client.flood(4)
        client.step()
        await client.settle()
        yield store, client
        await asyncio.sleep(60)
        client.step()
        client.step()
        await asyncio.sleep(60)
        check_state(store.tables)
        for place, pool in store.stats().pools.items():
            assert pool.primaries == pool.evictable, f"{place}: held at rest: {pool}"
            assert pool.total == pool.available, place
    rig.check_closed()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 10])
@pytest.mark.parametrize("is_shared", [False, True])
async def test_closing_while_restoring_locks_nothing_later(turns: int, is_shared: bool) -> None:
    """INV-332, INV-916: pages that arrive for a closed session, because another one still holds
    them, are not locked for it; the resume ends with an error.
    """
    async with opened() as (store, client):
        session = store.session(np.array(TOKENS))
        other = store.session(np.array(TOKENS)) if is_shared else None
        resume = asyncio.create_task(session.resume(client.stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        session.close()
        with contextlib.suppress(LogicError):
            await resume
        if other is not None:
            assert 4 * BLOCK == await client.resume(other, client.history(TOKENS))
            other.close()


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
async def test_closing_while_waiting_for_slots_leaves_the_queue(turns: int) -> None:
    """INV-416, INV-916: a session that closes in the queue is granted nothing when room comes."""
    async with opened() as (store, client):
        blocker = store.session(())
        await blocker.resume(client.stream)
        assert await client.grow(blocker, 4 * BLOCK)
        session = store.session(np.array(TOKENS))
        resume = asyncio.create_task(session.resume(client.stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        session.close()
        blocker.close()
        with pytest.raises(LogicError, match="closed meanwhile"):
            await resume
        assert 4 * BLOCK == await client.get(TOKENS)


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_ending_a_gated_resume_locks_nothing_later(turns: int, how: str) -> None:
    """INV-220, INV-916: also in the one turn between enqueueing and the return of the call."""
    async with opened() as (store, client):
        session = store.session(np.array(TOKENS))
        resume = asyncio.create_task(session.resume(client.stream, gated=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        if how == "close":
            session.close()
        else:
            resume.cancel()
        with contextlib.suppress(LogicError, asyncio.CancelledError):
            await resume
        session.close()


async def test_forking_a_session_that_lost_a_page() -> None:
    """INV-911: the fork is made; like its session it is cut at the lost page when it resumes."""
    config = sim_config(device_pages=4, host_pages=0, disk_pages=16, block_tokens=BLOCK)
    rig = SimRig.create(config)
    async with rig.open(config) as store:
        client = SimClient(store, rig, config)
        await client.put(TOKENS)
        await client.flood(4)
        session = store.session(np.array(TOKENS))
        rig.faults.add("errno", errno.EIO, opcode=Opcode.READ, nth=2)
        assert 0 < await client.get(TOKENS) < 4 * BLOCK  # somebody else met the bad sector
        twin = session.fork()
        for one in (twin, session):
            restore = await one.resume(client.stream)
            assert restore.valid_tokens < 4 * BLOCK
            client.verify(one, client.history(TOKENS), restore.valid_tokens)
            await client.settle()
            one.close()
        check_state(store.tables)
    rig.check_closed()
