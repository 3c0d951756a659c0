"""Slots that wait for transfers which do not come back are no room: who asks for more than the rest
gets an answer, nobody behind waits for it, and with the transfers the room comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest

from kvstore._uring.base import Opcode
from kvstore.config import IoClass, PoolGroupConfig, slot_bytes
from kvstore.errors import DeadlineError, OutOfPages
from kvstore.testing import FaultPlan, SimClient, SimRig, sim_config

BLOCK = 8
DEADLINE_S = 2.0
STAGING_SLOTS = 8  # more than get lost


def tokens_of(blocks: int, first: int = 0) -> list[int]:
    """Return the tokens of that many blocks."""
    return list(range(first, first + blocks * BLOCK))


LOST, LARGE, SMALL = tokens_of(4), tokens_of(10, 1000), tokens_of(2, 2000)


@contextlib.asynccontextmanager
async def opened(
    *cold: Sequence[int], **options: Any
) -> AsyncIterator[tuple[Any, SimClient, SimRig]]:
    """Open a store of 12 device slots with the sequences in ``cold`` on its disk."""
    io = {"deadline": DEADLINE_S, "staging_bytes": STAGING_SLOTS * slot_bytes(8192)}
    config = sim_config(**({"disk_pages": 96, "io": io} | options))
    rig = SimRig.create(config, faults=FaultPlan())
    async with rig.open(config) as store:
        client = SimClient(store, rig, config)
        for tokens in cold:
            await client.put(tokens)
        await client.flood(48)
        for tokens in cold:
            assert {"disk": len(tokens)} == store.probe(tokens).by_level
        yield store, client, rig
    rig.check_closed()


async def lose(client: SimClient, **options: Any) -> asyncio.Task[int]:
    """Start a restore of `LOST` none of whose reads comes back."""
    client.rig.faults.add("never", opcode=Opcode.READ, count=len(LOST) // BLOCK)
    task = asyncio.create_task(client.get(LOST, **options))
    await asyncio.sleep(0.1)
    return task


@pytest.mark.parametrize("small_waits", [False, True])
async def test_the_oldest_restore_no_longer_fits_while_slots_are_quarantined(small_waits):
    """INV-119, INV-335, INV-416: the oldest of those who wait needs 10 of 12 slots when 4 go into
    quarantine: it is refused, the smaller one behind it is served, and later the large one is too.
    """
    async with opened(LOST, LARGE, SMALL) as (_store, client, rig):
        lost = await lose(client)
        large = asyncio.create_task(client.get(LARGE))
        await asyncio.sleep(0.1)
        small = asyncio.create_task(client.get(SMALL)) if small_waits else None
        with anyio.fail_after(2 * DEADLINE_S):
            assert 0 == await lost
            with pytest.raises(OutOfPages) as refused:
                await large
            assert (len(SMALL) == await small) if small else True
        assert (0, 10, 8) == (
            refused.value.level,
            refused.value.needed,
            refused.value.available,
        )
        with pytest.raises(OutOfPages):
            await client.get(LARGE)
        with anyio.fail_after(1):
            assert len(SMALL) == await client.get(SMALL)
        assert 4 == rig.faults.release()
        await asyncio.sleep(0.1)
        with anyio.fail_after(1):
            assert len(LARGE) == await client.get(LARGE)


async def test_no_tier_has_room_for_a_swap_while_a_slot_is_quarantined():
    """INV-119, INV-335: every slot holds a page of somebody, one is in quarantine and nothing else
    moves: who would need it is told, and served once the transfer has ended.
    """
    options = {"device_pages": 4, "host_pages": 4, "disk_pages": 4, "write_through": True}
    config = sim_config(io={"deadline": DEADLINE_S}, **options)
    rig = SimRig.create(config, faults=FaultPlan())
    async with rig.open(config) as store, contextlib.AsyncExitStack() as stack:
        client = SimClient(store, rig, config)
        rig.faults.add("never", opcode=Opcode.WRITE, io_class=IoClass.BACKGROUND, nth=1)
        histories = [client.history(tokens_of(*one)) for one in ((3, 0), (4, 1000), (4, 2000))]
        sessions = []
        for history in histories:
            await client.put(history.tokens)
            await asyncio.sleep(0.5)
            sessions.append(await stack.enter_async_context(client.session(history.tokens)))
        await asyncio.sleep(2 * DEADLINE_S)
        client.step()
        assert 1 == rig.faults.held_count
        assert [{"disk": 24}, {"host": 32}, {"device": 32}] == [
            store.probe(history.tokens).by_level for history in histories
        ]
        waiting = [
            asyncio.create_task(client.resume(session, history))
            for session, history in zip(sessions[1:], histories[1:], strict=True)
        ]
        with anyio.fail_after(1):
            with pytest.raises(OutOfPages):
                await waiting[0]
            assert 32 == await waiting[1]
        sessions[2].suspend(client.stream.record())
        rig.faults.release()
        await asyncio.sleep(0.1)
        with anyio.fail_after(1):
            assert 32 == await client.resume(sessions[1], histories[1])
    rig.check_closed()


async def test_moves_in_a_ring_do_not_wait_for_a_lost_bounce_slot():
    """INV-119, INV-407: two full tiers swap page by page, and the first read into the only bounce
    slot does not come back: the other pages have an answer too, now and at the next swap.
    """
    config = sim_config(
        host_pages=0,
        device_pages=4,
        disk_pages=4,
        io={"deadline": DEADLINE_S, "bounce_pages": 1},
    )
    rig = SimRig.create(config, faults=FaultPlan())
    async with rig.open(config) as store, contextlib.AsyncExitStack() as stack:
        client = SimClient(store, rig, config)
        histories = [client.history(tokens_of(4, first)) for first in (0, 1000)]
        sessions = []
        for history in histories:
            await client.put(history.tokens)
            sessions.append(await stack.enter_async_context(client.session(history.tokens)))
            client.step()
        rig.faults.add("never", opcode=Opcode.READ)
        for session, history in zip(sessions, histories, strict=True):
            with anyio.fail_after(3 * DEADLINE_S), contextlib.suppress(OutOfPages):
                history.truncate(await client.resume(session, history))
                session.suspend(client.stream.record())
                client.step()
        assert 1 == rig.faults.held_count
        rig.faults.release()
        await asyncio.sleep(0.1)
        for session, history in zip(sessions, histories, strict=True):
            with anyio.fail_after(1):
                assert len(history.tokens) == await client.resume(session, history)
                session.suspend(client.stream.record())
                client.step()
    rig.check_closed()


async def test_lost_landing_slots_of_one_group_are_noticed_while_another_group_works():
    """INV-119, INV-334: every landing slot of one pool group is lost. Who waits for one is told at
    its deadline, although those of the other group come and go.
    """
    documents = [tokens_of(2, 1000 * number) for number in range(1, 7)]
    groups = (PoolGroupConfig("a", 8192), PoolGroupConfig("b", 8192))
    io = {"deadline": DEADLINE_S, "staging_bytes": 4 * slot_bytes(8192)}
    async with opened(*documents, groups=groups, disk_pages=192, io=io) as (store, client, rig):
        file_id = store._disk.groups[1].file_ids[0]
        rig.faults.add("never", opcode=Opcode.READ, file_id=file_id, count=2)
        assert 0 == await client.get(documents[0])
        assert 2 == rig.faults.held_count

        async def others() -> None:
            while True:
                for tokens in documents[3:]:
                    with contextlib.suppress(DeadlineError, OutOfPages):
                        await client.get(tokens, deadline=0.3)
                    await client.flood(48)  # down to the disk again

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            await asyncio.sleep(0.1)
            with anyio.fail_after(1.1 * DEADLINE_S):
                assert 0 == await client.get(documents[2])
            tasks.cancel_scope.cancel()
        rig.faults.release()
        await asyncio.sleep(0.1)
        with anyio.fail_after(1):
            assert 2 * BLOCK == await client.get(documents[3])
