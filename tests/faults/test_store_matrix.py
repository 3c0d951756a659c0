"""The fault matrix: each fault on each class of transfer, with the page held, droppable, reserved.

Whatever fails, no page served is wrong, neighbours are unharmed, every balance holds and nothing is
left behind (INV-910 to INV-914, INV-419, INV-612). "Fail the n-th" runs over the first transfers.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest

import kvstore
from kvstore._uring.base import Opcode
from kvstore.config import IoClass
from kvstore.testing import FaultPlan, SimClient, SimRig, check_balances, sim_config

BLOCK = 8
BLOCKS = 4
TOKENS = list(range(BLOCKS * BLOCK))
NEIGHBOUR = list(range(5000, 5000 + BLOCKS * BLOCK))

#: Faults that a transfer survives: it continues, or is tried again (INV-116, INV-117).
MENDED = {"short": ("short", 4096), "odd": ("short", 511), "again": ("again", 0)}
BROKEN = {
    "eio": ("errno", errno.EIO),
    "enospc": ("errno", errno.ENOSPC),
    "efbig": ("errno", errno.EFBIG),
    "einval": ("errno", errno.EINVAL),
    "zero": ("zero", 0),
    "never": ("never", 0),
}
SILENT = {"flip": ("flip", 0), "misdirected": ("misdirected", 4096)}
FAULTS = MENDED | BROKEN | SILENT


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[Any, SimClient, SimRig]]:
    """Open a small store; what must not be left behind is checked at the end."""
    config = sim_config(
        device_pages=8,
        host_pages=8,
        disk_pages=96,
        block_tokens=BLOCK,
        io={"deadline": 0.5, "drain_timeout": 1.0},
        **options,
    )
    rig = SimRig.create(config, faults=FaultPlan())
    async with rig.open(config) as store:
        yield store, SimClient(store, rig, config), rig
        rig.faults.clear()
        rig.faults.release()
        check_balances(store.stats())
    rig.check_closed()


async def rest(store: Any, rig: SimRig) -> None:
    """Let what is in flight end, deadlines included."""
    import anyio

    store.step(None)
    await anyio.sleep(5)
    store.step(None)
    check_balances(store.stats())


def add(rig: SimRig, name: str, **where: Any) -> None:
    """Put one fault into force."""
    kind, value = FAULTS[name]
    rig.faults.add(kind, value, **where)


@pytest.mark.parametrize("nth", range(BLOCKS))
@pytest.mark.parametrize("held", [True, False], ids=["held", "droppable"])
@pytest.mark.parametrize("name", FAULTS)
async def test_read(name: str, held: bool, nth: int) -> None:
    """INV-913, INV-914: a bad read is a miss from that block on, for each waiter, with no retry."""
    async with opened() as (store, client, rig):
        await client.put(TOKENS)
        await client.put(NEIGHBOUR)
        await client.flood(24)
        session = client.session(TOKENS) if held else None
        assert {"disk": len(TOKENS)} == store.probe(TOKENS).by_level
        add(rig, name, opcode=Opcode.READ, nth=nth)
        if session is not None:
            restore = await session.resume(client.stream)
            valid = restore.valid_tokens
            if valid < len(TOKENS):
                with pytest.raises(kvstore.PagesLost) as caught:
                    restore.raise_for_status()
                assert valid == caught.value.first_failed_token  # type: ignore[attr-defined]
            client.verify(session, client.history(TOKENS), valid)
            await client.settle()
            session.suspend(client.stream.record())
            await session.aclose()
        else:
            valid = await client.get(TOKENS)
        assert 1 == rig.faults.hit_count
        assert valid == len(TOKENS) if name in MENDED else 0 <= valid < len(TOKENS)
        assert valid == store.probe(TOKENS)  # the bad page left the index at once
        assert len(NEIGHBOUR) == await client.get(NEIGHBOUR)  # INV-419
        rig.faults.clear()
        rig.faults.release()
        await rest(store, rig)
        assert valid == await client.get(TOKENS)  # no second trial, no wrong byte
        await client.put(TOKENS)
        assert len(TOKENS) == await client.get(TOKENS)


@pytest.mark.parametrize("nth", range(0, 12, 3))
@pytest.mark.parametrize("held", [True, False], ids=["held", "droppable"])
@pytest.mark.parametrize("name", FAULTS)
async def test_required_write(name: str, held: bool, nth: int) -> None:
    """INV-911: a failed eviction never becomes a copy; holders are told, others see a miss."""
    async with opened() as (store, client, rig):
        await client.put(NEIGHBOUR)
        await client.put(TOKENS)
        session = client.session(TOKENS) if held else None
        add(rig, name, io_class=IoClass.REQUIRED, nth=nth, count=2)
        await client.flood(24)
        await rest(store, rig)
        assert rig.faults.hit_count > 0
        for tokens in (TOKENS, NEIGHBOUR):
            one = session if tokens is TOKENS and session is not None else client.session(tokens)
            restore = await one.resume(client.stream)
            valid = restore.valid_tokens
            if name in MENDED:
                assert len(tokens) == valid or one is not session
            if one is session and valid < len(tokens):
                with pytest.raises(kvstore.PagesLost):
                    restore.raise_for_status()
            client.verify(one, client.history(tokens), valid)
            await client.settle()
            one.suspend(client.stream.record())
            await one.aclose()
        if name in BROKEN and name != "never":
            errors = store.stats().engine.classes[IoClass.REQUIRED].errors
            number = FAULTS[name][1]
            assert number == 0 or errors.get(number, 0) > 0  # INV-810


@pytest.mark.parametrize("keep", [True, False], ids=["reserved", "plain"])
@pytest.mark.parametrize("name", FAULTS)
async def test_background_write(name: str, keep: bool) -> None:
    """INV-612, INV-516: a failed copy never fails its eviction and is never reused."""
    async with opened(write_through=True, keep_disk=keep) as (store, client, rig):
        add(rig, name, io_class=IoClass.BACKGROUND, count=6)
        await client.put(TOKENS)
        await client.put(NEIGHBOUR)
        await client.flood(8)
        await rest(store, rig)
        assert rig.faults.hit_count > 0
        rig.faults.clear()
        rig.faults.release()
        for _ in range(2):
            await client.flood(24)
            for tokens in (TOKENS, NEIGHBOUR):
                valid = await client.get(tokens)
                if name not in SILENT:
                    assert len(tokens) == valid
        pool = store.stats().pools["disk", "full"]
        if name in BROKEN:
            assert pool.copy_failed > 0


@pytest.mark.parametrize("name", BROKEN)
async def test_pending_copy_that_was_taken_back(name: str) -> None:
    """INV-912: the write of a pending copy fails after it was taken back: INV-911 applies."""
    async with opened(write_through=True) as (store, client, rig):
        rig.faults.add("late", 50_000_000, io_class=IoClass.BACKGROUND, count=None)
        await client.put(TOKENS)
        session = client.session(TOKENS)
        add(rig, name, io_class=IoClass.REQUIRED, count=4)
        await client.flood(30)
        await rest(store, rig)
        restore = await session.resume(client.stream)
        client.verify(session, client.history(TOKENS), restore.valid_tokens)
        await client.settle()
        session.suspend(client.stream.record())
        await session.aclose()


@pytest.mark.parametrize("nth", range(6))
async def test_device_copies_that_are_refused_fail_their_pages_only(nth: int) -> None:
    """INV-419, INV-917: a failed device call that is not sticky fails its move, not the store."""
    async with opened() as (store, client, rig):
        await client.put(TOKENS)
        rig.device.inject("copy_pages", 1, nth=nth + 1)
        with contextlib.suppress(kvstore.PagesLost):
            await client.flood(24)
            await client.get(TOKENS)
        await rest(store, rig)
        assert "failed" != store.health()
        valid = await client.put(TOKENS)
        assert 0 <= valid <= len(TOKENS)
        assert len(TOKENS) == await client.get(TOKENS)


async def test_writes_that_all_fail_turn_health_to_degraded() -> None:
    """C31: a disk that refuses everything shows: health names the errno; the store still serves."""
    async with opened() as (store, client, rig):
        rig.faults.add("errno", errno.EIO, opcode=Opcode.WRITE, count=None)
        assert "ok" == store.health()
        await client.put(TOKENS)
        await client.flood(24)
        await rest(store, rig)
        assert "degraded" == store.health() == store.stats().health
        assert "EIO" in store.health().reasons[0]
        rig.faults.clear()
        await client.flood(8)
        await rest(store, rig)
        assert "ok" == store.health()
