"""Cases C23 to C30: accounting, leaks, failures that spread."""

from __future__ import annotations

import asyncio
import errno
import gc
import tracemalloc
from random import Random

import anyio
import numpy as np
import pytest

from kvstore._uring.base import Opcode
from kvstore.config import HEADER_BYTES, Tier
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import Tables
from kvstore.errors import KVStoreError, LogicError
from kvstore.keys import KeyChain, scope_key
from kvstore.testing import FaultPlan, SimClient, SimRig, check_balances, sim_config

from .opening import BLOCK, opened, tokens_of  # noqa: TID252

READ, WRITE = Opcode.READ, Opcode.WRITE


def _tables(device: int = 8) -> Tables:
    return Tables(
        TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=(LevelSpec(tier=Tier.DEVICE, slot_counts=(device,)),),
            block_tokens=BLOCK,
        )
    )


def _committed(tables: Tables, salt: bytes = b"", blocks: int = 3):
    """Commit a few blocks; returns their keys and pages, held and locked once."""
    chain = KeyChain(BLOCK, scope_key(salt))
    chain.extend(tokens_of(blocks))
    applied = tables.apply(tables.plan_grow([blocks]))
    pages, parent = [], None
    for index, page in enumerate(applied.new_pages[0]):
        parent = tables.commit(page, chain.keys[index], parent, index)
        pages.append(parent)
    return chain.keys, pages


def test_c23_the_second_release_raises_and_changes_nothing():
    """A hold or lock released twice is a typed error; every counter stays (INV-311)."""
    tables = _tables()
    _, pages = _committed(tables)
    tables.hold(pages)
    before = [(page.hold_count, page.lock_count) for page in pages]
    tables.unhold(pages)
    tables.hold(pages)
    assert before == [(page.hold_count, page.lock_count) for page in pages]
    holds = pages[0].hold_count
    for _ in range(holds):
        tables.unhold(pages)
    version = tables.version
    with pytest.raises(LogicError):
        tables.unhold(pages)
    assert version == tables.version
    assert all(page.hold_count == 0 for page in pages)


def test_c23_no_counter_is_ever_negative_in_random_sequences():
    """Random holds, locks and releases, some of them wrong: refused as a whole or done."""
    random = Random(7)
    tables = _tables()
    _, pages = _committed(tables)
    tables.unlock(pages)
    for page in pages:
        while page.lock_count:
            tables.unlock([page])
    for _ in range(2000):
        some = random.sample(pages, random.randrange(1, 4))
        call = random.choice([tables.hold, tables.unhold, tables.lock, tables.unlock])
        before = [(page.hold_count, page.lock_count) for page in pages]
        try:
            call(some)
        except LogicError:
            assert before == [(page.hold_count, page.lock_count) for page in pages]
        assert all(page.hold_count >= 0 and page.lock_count >= 0 for page in pages)


def test_c26_a_lock_ends_with_its_own_page_only():
    """One key field changed at a time: the release reaches another page, and raises there."""
    tables = _tables(16)
    _, pages = _committed(tables)
    _, others = _committed(tables, b"other salt")
    tables.unlock([page for page in pages for _ in range(1)])
    tables.unlock([page for page in others for _ in range(1)])
    counts = [page.lock_count for page in pages]
    tables.lock(pages)
    with pytest.raises(LogicError):
        tables.unlock([page for page in others for _ in range(others[0].lock_count + 1)])
    assert [count + 1 for count in counts] == [page.lock_count for page in pages]
    tables.unlock(pages)
    assert counts == [page.lock_count for page in pages]


async def test_c24_cancelled_lookups_leave_nothing_without_further_calls():
    """Requests cancelled while they restore: holds, staging and slots are back while idle."""
    plan = FaultPlan()
    plan.add("late", 20_000_000, opcode=READ, count=None)
    async with opened(sim_config(host_pages=0), faults=plan) as (store, client, rig):
        await client.put(tokens_of(4))
        await client.flood(40)
        await asyncio.sleep(1)

        async def ask() -> None:
            async with client.session(tokens_of(4)) as session:
                await session.resume(client.stream)

        for patience in (0.0001, 0.001, 0.01, 0.015):
            with anyio.move_on_after(patience):
                await ask()
        await asyncio.sleep(1)
        stats = store.stats()
        assert 0 == stats.sessions_open
        for pool in stats.pools.values():
            assert pool.total == pool.ready + pool.draining + pool.primaries + pool.copies
            assert pool.evictable + pool.ready >= pool.total - pool.copies - pool.primaries
        assert 0 == rig.engine.open_count
        assert 4 * BLOCK == await client.get(tokens_of(4))


async def test_c25_many_cycles_leave_no_slope():
    """Hundreds of get and free cycles: traced memory does not grow from the half to the end."""
    async with opened(sim_config(check_invariants=False)) as (_, client, _rig):
        await client.put(tokens_of(3))

        async def cycles(count: int) -> int:
            for _ in range(count):
                async with client.session(tokens_of(3)) as session:
                    await session.resume(client.stream)
                    table = session.page_table("full")
                    assert len(table) == 3
                    session.suspend(client.stream.record())
                client.step()
            await asyncio.sleep(1)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            await cycles(50)
            middle = await cycles(300)
            end = await cycles(300)
        finally:
            tracemalloc.stop()
        assert end - middle < 64 * 300


async def test_c25_a_closed_session_refuses_every_view():
    """Using a session after it is closed raises (INV-332)."""
    async with opened() as (_, client, _rig):
        await client.put(tokens_of(3))
        async with client.session(tokens_of(3)) as session:
            await session.resume(client.stream)
        for call in (
            lambda: session.page_table("full"),
            lambda: session.try_grow(8),
            lambda: session.commit(np.arange(8)),
            lambda: session.suspend(None),
        ):
            with pytest.raises(LogicError):
                call()


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_c27_a_completion_after_its_owner_is_gone(how):
    """Reads complete after the request ended: usage, counters and index agree."""
    plan = FaultPlan()
    plan.add("late", 500_000_000, opcode=READ, count=None)
    async with opened(sim_config(host_pages=0), faults=plan) as (store, client, rig):
        await client.put(tokens_of(4))
        await client.flood(40)
        with anyio.move_on_after(0.1):
            async with client.session(tokens_of(4)) as session:
                if how == "closed":
                    async with anyio.create_task_group() as group:
                        group.start_soon(session.resume, client.stream)
                        await asyncio.sleep(0.05)
                        group.cancel_scope.cancel()
                else:
                    await session.resume(client.stream)
        assert rig.engine.open_count > 0
        await asyncio.sleep(5)
        assert 0 == rig.engine.open_count
        check_balances(store.stats())
        assert 4 * BLOCK == await client.get(tokens_of(4))


async def test_c28_one_part_failing_at_close_does_not_take_the_others_along():
    """A disk that cannot be closed: memory and device come back, the error is raised at the end."""
    config = sim_config(fingerprint="m")
    rig = SimRig.create(config)
    closed: list[str] = []

    def fail(*_args: object) -> None:
        closed.append("tried")
        raise OSError(errno.EIO, "the disk is gone")

    with pytest.raises((OSError, ExceptionGroup)) as caught:
        async with rig.open(config) as store:
            client = SimClient(store, rig, config)
            await client.put(tokens_of(3))
            rig.disk.close = fail  # type: ignore[method-assign]
    assert closed
    assert "the disk is gone" in str(caught.value) or "gone" in repr(caught.value)
    assert 0 == rig.device.registered_count
    assert 0 == rig.engine.open_count
    assert 0 == rig.disk.lock_count


async def test_c29_one_bad_page_of_a_batch_fails_alone():
    """A duplicate block, an unreadable page and good pages in one go: the good ones are served."""
    async with opened(sim_config(host_pages=0)) as (store, client, rig):
        for number in range(3):
            await client.put(tokens_of(3, number * 1000))
        await client.put(tokens_of(3))  # a duplicate of the first
        await client.flood(40)
        rig.faults.add("errno", errno.EIO, opcode=READ, nth=4)
        found: dict[int, int] = {}

        async def ask(number: int) -> None:
            found[number] = await client.get(tokens_of(3, number * 1000))

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(ask, number)
        assert 1 == rig.faults.hit_count
        assert 2 == sum(valid == 3 * BLOCK for valid in found.values())
        assert 1 == sum(valid < 3 * BLOCK for valid in found.values())
        assert store.stats().lost_pages >= 1


@pytest.mark.parametrize("extra", [1, 2, 10])
async def test_c30_prefixes_larger_than_staging_come_back_whole(extra):
    """Staging for two pages, restores of more: exact, and staging is complete afterwards."""
    slot = 8192 + HEADER_BYTES
    config = sim_config(
        device_pages=16, host_pages=0, disk_pages=64, io={"staging_bytes": 2 * slot}
    )
    blocks = min(14, 2 + extra)
    async with opened(config) as (_, client, _rig):
        await client.put(tokens_of(blocks))
        await client.flood(48)
        for _ in range(2):
            assert blocks * BLOCK == await client.get(tokens_of(blocks))
            await client.flood(48)


async def test_c29_errors_are_per_request_not_per_store():
    """A token outside 32 bits fails its own call only."""
    async with opened() as (store, client, _):
        with pytest.raises((ValueError, KVStoreError)):
            async with client.session([1, 2, 1 << 40]):
                pass
        await client.put(tokens_of(2))
        assert 0 == store.stats().sessions_open
