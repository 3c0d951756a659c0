"""A lost device, a broken rule, a stopped engine: the store stops, says so, and still closes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import kvstore
from kvstore.devices.base import CODE_LAUNCH_FAILED
from kvstore.testing import FaultPlan, SimClient, SimRig, sim_config

BLOCK = 8
TOKENS = list(range(4 * BLOCK))


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[Any, SimClient, SimRig]]:
    """Open a small store."""
    config = sim_config(device_pages=8, host_pages=8, disk_pages=96, block_tokens=BLOCK, **options)
    rig = SimRig.create(config, faults=FaultPlan())
    async with rig.open(config) as store:
        yield store, SimClient(store, rig, config), rig
    rig.check_closed()


@pytest.mark.parametrize("moment", ["idle", "restoring", "evicting"])
async def test_a_sticky_device_error_fails_the_store(moment: str) -> None:
    """INV-917, INV-924: each call raises StoreFailed, waiters end, and closing still works."""
    outcomes: list[str] = []
    async with opened() as (store, client, rig):
        await client.put(TOKENS)
        await client.flood(24)

        async def wait(session: Any) -> None:
            try:
                await session.resume(client.stream)
            except kvstore.StoreFailed:
                outcomes.append("failed")

        async with anyio.create_task_group() as group:
            session = client.session(TOKENS)
            if moment == "restoring":
                group.start_soon(wait, session)
                await anyio.sleep(1e-5)
            if moment == "evicting":
                other = client.session(list(range(9000, 9000 + 8 * BLOCK)))
                await other.resume()
                other.try_grow(8 * BLOCK)
                await anyio.lowlevel.checkpoint()
                other.close()
            rig.device.fail(CODE_LAUNCH_FAILED)
            await anyio.sleep(0.1)
            if moment == "idle":
                with contextlib.suppress(kvstore.KVStoreError):
                    await session.resume(client.stream)
                await anyio.sleep(0.1)
        assert "failed" == store.health()
        for call in (lambda: store.session(TOKENS), lambda: store.probe(TOKENS), store.step):
            with pytest.raises(kvstore.StoreFailed):
                call()
        assert ["failed"] * (moment == "restoring") == outcomes
        session.close()


@pytest.mark.parametrize("call", ["session", "probe", "step", "stats", "suspend", "try_grow"])
async def test_any_call_learns_of_a_lost_device(call: str) -> None:
    """INV-917: the caller's own work may lose it while the store has nothing on the device: the
    next call of whatever kind says so, and who waits for slots is told.
    """
    outcomes: list[str] = []
    async with opened() as (store, client, rig):
        await client.put(list(range(9000, 9000 + 4 * BLOCK)))
        await client.put(list(range(8 * BLOCK)))
        active = client.session(list(range(8 * BLOCK)))
        await active.resume(client.stream)
        await client.settle()

        async def wait() -> None:
            async with client.session(list(range(9000, 9000 + 4 * BLOCK))) as session:
                try:
                    await session.resume(client.stream)
                except kvstore.StoreFailed:
                    outcomes.append("failed")

        calls = {
            "session": lambda: store.session(TOKENS),
            "probe": lambda: store.probe(TOKENS),
            "step": store.step,
            "stats": store.stats,
            "suspend": active.suspend,
            "try_grow": lambda: active.try_grow(8 * BLOCK),
        }
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.1)
            assert 1 == store.restores.waiting_count
            rig.device.fail(CODE_LAUNCH_FAILED)
            if call == "stats":
                assert "failed" == calls[call]().health
            else:
                with pytest.raises(kvstore.StoreFailed):
                    calls[call]()
        assert ["failed"] == outcomes
        assert "failed" == store.health()
        active.close()


async def test_a_broken_rule_fails_the_store_and_not_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """INV-917: a bug in a completion stops this store; other tasks of the loop go on."""
    async with opened() as (store, client, _rig):
        await client.put(TOKENS)

        def broken(_tables: Any, _move: Any) -> None:
            raise kvstore.InvariantError("injected")

        monkeypatch.setattr(type(store.tables), "move_done", broken)
        with contextlib.suppress(kvstore.KVStoreError):
            await client.flood(8)
        with pytest.raises(kvstore.StoreFailed, match="injected"):
            store.session(TOKENS)
        monkeypatch.undo()


async def test_an_engine_that_stops_fails_transfers_and_nothing_hangs() -> None:
    """INV-113: a submission refused by a stopping engine is a failed transfer for its pages."""
    async with opened() as (_store, client, rig):
        await client.put(TOKENS)
        await client.flood(24)
        await rig.engine.aclose()
        assert 0 == await client.get(TOKENS)


async def test_the_watchdog_names_an_open_ticket_and_publishes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """INV-223: after the limit the oldest unpublished ticket is logged; it stays unpublished."""
    io = {"watchdog": 1.0, "deadline": 10.0}
    async with opened(io=io, keep_disk=True) as (store, client, rig):
        await client.put(TOKENS)
        await client.flood(24)
        async with client.session(TOKENS) as session:
            await session.resume(client.stream)
            session.suspend(client.stream.record())
        assert store.gate is not None
        lease = store.take_gate(None)
        assert lease is not None
        tickets = lease.reserve([1])
        assert tickets is not None
        with caplog.at_level(logging.WARNING, "kvstore.store"):
            await anyio.sleep(3.5)
        assert tickets[0].status is None
        assert any("unpublished" in record.message for record in caplog.records)
        lease.end(tickets)
        assert 0 == rig.gate.open_count


@pytest.mark.parametrize("microseconds", range(0, 800, 20))
async def test_a_device_lost_in_the_middle_of_a_swap(
    microseconds: int, caplog: pytest.LogCaptureFixture
) -> None:
    """INV-120, INV-407, INV-917: a page in the bounce buffer whose move ends there gives its bounce
    slot back; the store closes at once and leaves nothing.
    """
    config = sim_config(device_pages=4, host_pages=4, disk_pages=4, block_tokens=BLOCK)
    rig = SimRig.create(config)
    async with rig.open(config) as store:
        client = SimClient(store, rig, config)
        sessions = []
        for base in (0, 1000, 2000):  # held pages fill every tier
            session = client.session(list(range(base, base + 4 * BLOCK)))
            await session.resume(client.stream)
            assert await client.grow(session, 4 * BLOCK)
            session.commit(list(range(base, base + 4 * BLOCK)))
            await client.settle()
            session.suspend(client.stream.record())
            await client.step()
            sessions.append(session)

        async def restore() -> None:
            with contextlib.suppress(kvstore.StoreFailed, kvstore.LogicError):
                await sessions[0].resume(client.stream)

        async with anyio.create_task_group() as group:
            group.start_soon(restore)
            await anyio.sleep(microseconds * 1e-6)
            rig.device.fail(CODE_LAUNCH_FAILED)
            for session in sessions:
                session.close()
        await anyio.sleep(0.1)
        for loans in (*store._staging, *store._bounce):
            assert loans.slot_count == loans.free_count
    assert "never came back" not in caplog.text
    rig.check_closed()
