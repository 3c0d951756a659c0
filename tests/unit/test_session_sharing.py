"""Waiters with deadlines, counted bytes, warnings: what a session and its neighbours share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

import kvstore
from kvstore._uring.base import Opcode
from kvstore._uring.native import Arena
from kvstore.config import HEADER_BYTES, IoClass
from kvstore.keys import scope_key
from kvstore.session import History
from kvstore.testing import FaultPlan, SimClient, SimRig, check_balances, sim_config

BLOCK = 8
PAGE_BYTES = 8192
TOKENS = list(range(4 * BLOCK))


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[Any, SimClient, SimRig]]:
    """Open a small store on virtual time."""
    sizes = {"device_pages": 8, "host_pages": 8, "disk_pages": 96, "block_tokens": BLOCK}
    config = sim_config(**(sizes | options))
    rig = SimRig.create(config, faults=FaultPlan())
    async with rig.open(config) as store:
        yield store, SimClient(store, rig, config), rig
        check_balances(store.stats())
    rig.check_closed()


async def test_each_waiter_has_a_deadline_of_its_own_and_the_latest_wins() -> None:
    """INV-336, INV-119: one flight; the impatient waiter is told on time, the other is served."""
    async with opened(device_pages=12) as (store, client, rig):
        await client.put(TOKENS)
        await client.flood(32)
        rig.faults.add("late", 200_000_000, opcode=Opcode.READ, count=None)
        before = store.stats().engine.classes[IoClass.READ].transfers
        told: dict[str, float] = {}
        start = rig.loop.time()

        async def impatient() -> None:
            async with client.session(TOKENS) as session:
                with pytest.raises(kvstore.DeadlineError):
                    await session.resume(client.stream, deadline=0.01)
                told["impatient"] = rig.loop.time() - start
                assert "suspended" == session.state

        async def patient() -> None:
            assert len(TOKENS) == await client.get(TOKENS)
            told["patient"] = rig.loop.time() - start

        async with anyio.create_task_group() as group:
            group.start_soon(impatient)
            group.start_soon(patient)
        assert told["impatient"] == pytest.approx(0.01, abs=1e-3)
        assert told["patient"] >= 0.2
        assert 4 == store.stats().engine.classes[IoClass.READ].transfers - before


async def test_a_longer_deadline_outlives_the_default() -> None:
    """INV-336: a transfer has the latest deadline of those who wait, also above the default."""
    async with opened(io={"deadline": 0.1}) as (_store, client, rig):
        await client.put(TOKENS)
        await client.flood(24)
        rig.faults.add("late", 300_000_000, opcode=Opcode.READ, count=None)
        assert len(TOKENS) == await client.get(TOKENS, deadline=5.0)


async def test_a_later_waiter_extends_a_transfer_under_way() -> None:
    """INV-336, INV-119: the newcomer is served after the old deadline; who was there is not kept
    beyond it.
    """
    async with opened(device_pages=16, io={"deadline": 0.1}) as (_store, client, rig):
        await client.put(TOKENS)
        await client.flood(40)
        rig.faults.add("late", 300_000_000, opcode=Opcode.READ, count=None)
        start, told = rig.loop.time(), {}

        async def first() -> None:
            async with client.session(TOKENS) as session:
                restore = await session.resume(client.stream)
                told["first"] = rig.loop.time() - start
                with pytest.raises(kvstore.PagesLost) as caught:
                    restore.raise_for_status()
                assert isinstance(caught.value.__cause__, kvstore.DeadlineError)

        async def second() -> None:
            await anyio.sleep(0.05)
            assert len(TOKENS) == await client.get(TOKENS, deadline=5.0)
            told["second"] = rig.loop.time() - start

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            group.start_soon(second)
        assert told["first"] == pytest.approx(0.1, abs=0.02)
        assert 0.3 <= told["second"] < 1.0


async def test_a_crowd_of_newcomers_keeps_nobody_for_ever() -> None:
    """INV-119: each of them waits for a page that never comes, and each is told in its time."""
    async with opened(device_pages=16, io={"deadline": 0.1, "drain_timeout": 1.0}) as (
        store,
        client,
        rig,
    ):
        await client.put(TOKENS)
        await client.flood(40)
        rig.faults.add("never", 0, opcode=Opcode.READ, count=None)
        waits: list[float] = []

        async def ask(after: float) -> None:
            await anyio.sleep(after)
            start = rig.loop.time()
            async with client.session(TOKENS) as session:
                await session.resume(client.stream)
            waits.append(rig.loop.time() - start)

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(ask, 0.04 * number)
        assert 10 == len(waits)
        assert max(waits) < 0.12
        rig.faults.release()
        store.step()
        await anyio.sleep(0.5)


async def test_the_default_deadline_makes_a_hung_page_a_miss() -> None:
    """INV-119, C18: the waiter is told on time, with the deadline as the cause; others go on."""
    async with opened(io={"deadline": 0.1, "drain_timeout": 1.0}) as (store, client, rig):
        await client.put(TOKENS)
        await client.put(list(range(500, 532)))
        await client.flood(24)
        rig.faults.add("never", 0, opcode=Opcode.READ)
        start = rig.loop.time()
        async with client.session(TOKENS) as session:
            restore = await session.resume(client.stream)
            assert rig.loop.time() - start == pytest.approx(0.1, abs=0.02)
            with pytest.raises(kvstore.PagesLost) as caught:
                restore.raise_for_status()
            assert isinstance(caught.value.__cause__, kvstore.DeadlineError)
        assert 32 == await client.get(list(range(500, 532)))
        rig.faults.release()
        store.step()
        await anyio.sleep(0.01)


async def test_bytes_are_counted_by_way_and_class() -> None:
    """INV-807: payload per pair of tiers and class, device bytes with headers apart."""
    async with opened() as (store, client, _rig):
        await client.put(TOKENS)
        await client.flood(24)
        await client.get(TOKENS)
        store.step()
        await anyio.sleep(1)
        stats = store.stats()
        evicted = stats.pools["host", "full"].evicted
        assert evicted * PAGE_BYTES == stats.moved_bytes["h2disk:required"]
        assert evicted * (PAGE_BYTES + HEADER_BYTES) == stats.device_bytes["disk:required"]
        assert 4 * PAGE_BYTES == stats.moved_bytes["disk2h"] == stats.moved_bytes["h2d"]
        assert 4 * (PAGE_BYTES + HEADER_BYTES) == stats.device_bytes["disk:read"]
        assert stats.pools["device", "full"].evicted * PAGE_BYTES == stats.moved_bytes["d2h"]
        assert 0 == stats.device_bytes["disk:background"]


async def test_a_promoted_write_counts_as_required() -> None:
    """INV-807, INV-514: a pending copy that is taken back is written once, under required."""
    narrow = {"background_inflight_bytes": PAGE_BYTES + HEADER_BYTES}
    async with opened(write_through=True, io=narrow) as (store, client, rig):
        rig.faults.add("late", 50_000_000, io_class=IoClass.BACKGROUND, count=None)
        await client.put(TOKENS)
        await client.flood(24)
        store.step()
        await anyio.sleep(1)
        stats = store.stats()
        pool = stats.pools["disk", "full"]
        assert pool.reused_pending > 0
        required, background = stats.engine.classes[IoClass.REQUIRED :]
        assert required.promoted_in_bytes == background.promoted_out_bytes > 0
        written = stats.moved_bytes["h2disk:required"] + stats.moved_bytes["h2disk:background"]
        assert stats.moved_bytes["h2disk:required"] > 0
        assert written == stats.engine.classes[1].transfers * PAGE_BYTES + (
            stats.engine.classes[2].transfers * PAGE_BYTES
        )


@pytest.mark.parametrize("how", ["suspend", "close"])
async def test_who_leaves_the_gate_early_does_not_spoil_it_for_others(how: str) -> None:
    """INV-205, INV-336: the ticket is published at once, its copy reads too early; the waiter that
    shares the transfer gets the bytes all the same.
    """
    async with opened(device_pages=16) as (store, client, rig):
        await client.put(TOKENS)
        await client.flood(40)
        async with client.session([]) as session:  # leaves free slots behind
            await session.resume(client.stream)
            assert await client.grow(session, 8 * BLOCK)
        for _ in range(2):
            client.step()
            await anyio.sleep(1)
        rig.faults.add("late", 50_000_000, opcode=Opcode.READ, count=None)

        async def gated() -> None:
            async with client.session(TOKENS) as session:
                restore = await session.resume(client.stream, gated=True)
                assert restore.is_gated
                await anyio.sleep(0.02)
                if how == "suspend":
                    session.suspend()

        async def awaited() -> None:
            await anyio.sleep(0.01)
            assert len(TOKENS) == await client.get(TOKENS)

        async with anyio.create_task_group() as group:
            group.start_soon(gated)
            group.start_soon(awaited)
        assert len(TOKENS) == await client.get(TOKENS)
        assert 1 == store.stats().engine.tickets_failed


async def test_nobody_queues_for_the_slots_of_a_transfer_that_never_ends() -> None:
    """INV-119, INV-335: a restore that fits only with them is refused, so that others get by."""
    wide = list(range(500, 500 + 8 * BLOCK))
    async with opened(
        device_pages=8, host_pages=16, io={"deadline": 0.1, "drain_timeout": 1.0}
    ) as (
        _store,
        client,
        rig,
    ):
        await client.put(wide)
        await client.put(TOKENS)
        await client.flood(40)
        rig.faults.add("never", 0, opcode=Opcode.READ, count=2)
        assert len(TOKENS) > await client.get(TOKENS)
        client.step()
        with anyio.fail_after(5):
            with pytest.raises(kvstore.OutOfPages):
                await client.get(wide)
            assert 32 == await client.get(wide[:32])
        rig.faults.release()
        client.step()
        await anyio.sleep(0.1)
        client.step()
        assert len(wide) == await client.get(wide)


async def test_copy_options_without_prefix_reuse_warn(caplog: pytest.LogCaptureFixture) -> None:
    """INV-133: they act on reusable pages only; a warning, not an error, and no page matches."""
    with caplog.at_level(logging.WARNING, "kvstore.store"):
        async with opened(keep_disk=True, prefix_reuse=False) as (store, client, _rig):
            await client.put(TOKENS)
            assert 0 == store.probe(TOKENS)
            assert 0 == await client.get(TOKENS)
    assert 1 == sum("INV-133" in record.message for record in caplog.records)


def test_tokens_are_hashed_once_and_replaced_where_they_differ() -> None:
    """INV-323: the prompt's keys are made once; other tokens than announced make new ones."""
    history = History(4, scope_key(), list(range(10)))
    keys = list(history.keys)
    assert 2 == history.chain.hash_count
    assert 10 == history.put(0, list(range(10)))
    assert 2 == history.chain.hash_count
    history.put(10, [10, 11])
    assert 3 == history.chain.hash_count
    history.put(5, [99, 99, 99])
    assert 8 == history.known_count
    assert keys[0] == history.keys[0]
    assert keys[1] != history.keys[1]
    twin = history.fork(4)
    twin.put(4, [5, 6, 7, 8])
    assert 8 == history.known_count
    assert history.keys[0] == twin.keys[0]
    assert history.keys[1] != twin.keys[1]


@pytest.mark.parametrize("gated", [False, True])
async def test_an_await_restore_holds_no_stream(gated: bool) -> None:
    """INV-201: by default the restore completes with its data on the device, no stream waits."""
    async with opened() as (store, client, rig):
        await client.put(TOKENS)
        await client.flood(24)
        restore = None
        async with client.session(TOKENS) as session:
            restore = await session.resume(client.stream, gated=gated)
            await restore.ready()
            assert restore.is_done
            client.verify(session, client.history(TOKENS), len(TOKENS))
            await client.settle()
        assert 0 == rig.gate.open_count
        taken = rig.gate.tickets_taken
        assert taken == 0 or gated
        assert store.stats().gate_await_fallbacks + taken == int(gated)


@pytest.mark.parametrize(
    ("asked", "near", "node", "warned"),
    [
        (None, -1, None, 0),
        (None, 1, 1, 0),
        (1, 1, 1, 0),
        (0, 1, 0, 1),
        (0, -1, 0, 0),
    ],
)
async def test_c58_host_memory_lies_on_the_node_of_the_device(
    asked: int | None, near: int, node: int | None, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """C58: `numa_node` is honoured, the node is in the statistics, a mismatch is logged once."""
    config = sim_config(host={"numa_node": asked})
    rig = SimRig.create(config)
    rig.device.caps = rig.device.caps._replace(host_numa=near)
    nodes: list[int | None] = []

    def memory(length: int, slab_bytes: int, numa_node: int | None) -> Any:
        nodes.append(numa_node)
        return Arena(length, slab_bytes=slab_bytes)

    with caplog.at_level(logging.WARNING, "kvstore.store"):
        async with kvstore.open_store(
            config,
            rig.engine,
            device=rig.device,
            completions=rig.completions,
            files=rig.disk,
            gate_words=rig.gate,
            memory=memory,
        ) as store:
            assert node == store.stats().host_numa_node
    assert {node} == set(nodes)
    assert warned == sum("numa_node" in record.message for record in caplog.records)
    await rig.engine.aclose()
