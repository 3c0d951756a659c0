"""Upstream's tests of whole stores, mirrored with real bytes on virtual time.

What upstream tests at the level of tables is in `core/test_core_upstream.py`; the table in
`docs/testing.md` names the counterpart of each test.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvstore.config import slot_bytes
from kvstore.devices.base import CODE_LAUNCH_FAILED
from kvstore.errors import LogicError, OutOfPages, StoreFailed
from kvstore.keys import KeyChain, scope_key
from kvstore.testing import SimClient, SimDisk, SimRig, check_balances, sim_config

BLOCK = 8
PAGE = 8192
ALL_ON: dict[str, Any] = {"keep_disk": True, "write_through": True, "keep_host": True}
FIXED_DIGESTS = [  # tokens 0..15 in blocks of 8, salt "tenant", adapter "adapter"
    "4160ced549045625c8f87a4c52826926ee96a74fc552d83e1f97acacdec035b2",
    "02415877f4ccebc3d18fbee096825e92476873a2556c5b1c0a7c5793e2a92bef",
]
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"keep_disk": True}, id="keep"),
    pytest.param({"write_through": True}, id="write-through"),
    pytest.param({"keep_host": True}, id="inclusive"),
    pytest.param(ALL_ON, id="all"),
]


@contextlib.asynccontextmanager
async def opened(
    disk: SimDisk | None = None, **options: Any
) -> AsyncIterator[tuple[Any, SimClient, SimRig]]:
    """Open a small store; what must not be left behind is checked after it."""
    config = sim_config(block_tokens=BLOCK, page_bytes=PAGE, **options)
    rig = SimRig.create(config, disk=disk)
    async with rig.open(config) as store:
        yield store, SimClient(store, rig, config), rig
    rig.check_closed()


def tokens(number: int, blocks: int, tail: int = 0) -> list[int]:
    """Return the tokens of one request; ``tail`` more than its full blocks."""
    return list(range(number * 1000, number * 1000 + blocks * BLOCK + tail))


@pytest.mark.parametrize("requests", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS)
async def test_no_batching_cache_reuse(options: dict[str, Any], requests: int) -> None:
    """INV-134, INV-309, INV-319, INV-503, INV-611: requests one after another, through host and
    disk, a prefix that is not aligned to blocks: every byte is right and all pages droppable.
    """
    async with opened(device_pages=6, host_pages=6, disk_pages=48, **options) as (store, client, _):
        for number in range(requests):
            assert 0 == await client.put(tokens(number, 4, tail=3))
        await client.flood(12)
        for number in range(requests):
            longer = tokens(number, 4, tail=3) + tokens(90 + number, 1)
            assert 4 * BLOCK == await client.put(longer)  # the tail is no block yet
            assert 5 * BLOCK == await client.get(longer)
        stats = store.stats()
        assert stats.moved_bytes["disk2h"] > 0
        check_balances(stats)
        store.step(None)
        for place, pool in store.stats().pools.items():
            assert pool.primaries == pool.evictable, place


@pytest.mark.parametrize("options", OPTIONS)
async def test_no_batching_memory_limit(options: dict[str, Any]) -> None:
    """INV-134, INV-404, INV-412, INV-417: a suspended request keeps no device memory, and one
    token more than the device holds is refused with nothing changed.
    """
    async with opened(device_pages=6, host_pages=6, disk_pages=12, **options) as (
        store,
        client,
        _,
    ):
        first, second = tokens(1, 6), tokens(2, 6)
        async with client.session(first) as held:
            history = client.history(first)
            await client.resume(held, history)
            assert await client.grow(held, 6 * BLOCK)
            assert not await client.grow(held, 6 * BLOCK + 1)
            assert 6 * BLOCK == held.capacity_tokens
            client.compute(held, history)
            held.commit(np.array(first))
            held.suspend(client.stream.record())
            await client.put(second)  # takes the whole device
            assert 6 * BLOCK == await client.resume(held, history)
            held.suspend(client.stream.record())
        async with client.session(tokens(3, 1)) as wide:
            await wide.resume(client.stream)
            assert not await client.grow(wide, 7 * BLOCK)
        check_balances(store.stats())


@pytest.mark.parametrize("options", OPTIONS)
async def test_resize_quota(options: dict[str, Any]) -> None:
    """INV-408, INV-520, INV-901, INV-902, INV-903, INV-904, INV-906: all tiers full of two held
    requests, each shrunk: a shrink that does not fit changes nothing, one of the requests resumes,
    and after growing a prefetch moves exactly the disk pages.
    """
    config: dict[str, Any] = {"device_pages": 6, "host_pages": 6, "disk_pages": 12}
    size = slot_bytes(PAGE)
    async with opened(**config, **options, prefetch_fraction=1.0) as (store, client, _):
        sessions = []
        for number in range(4):  # 24 held pages: everything is full
            session = client.session(tokens(number, 6))
            history = client.history(tokens(number, 6))
            sessions.append((session, history))
            await client.resume(session, history)
            assert await client.grow(session, 6 * BLOCK)
            client.compute(session, history)
            session.commit(np.array(history.tokens))
            session.suspend(client.stream.record())
        await client.settle()
        totals = {place: pool.total for place, pool in store.stats().pools.items()}
        for level, slots in (("host", 6), ("disk", 6)):
            with pytest.raises(OutOfPages):
                await store.resize(level, (slots - 1) * size)
        assert totals == {place: pool.total for place, pool in store.stats().pools.items()}
        for session, _ in sessions[:2]:
            session.close()
        await store.resize("disk", 6 * size)  # 12 held pages, 18 slots
        await store.resize("host", 2 * size)
        check_balances(store.stats())
        for session, history in sessions[2:]:  # one after the other, not both
            assert 6 * BLOCK == await client.resume(session, history)
            session.suspend(client.stream.record())
        with pytest.raises(OutOfPages):
            await store.resize("disk", 2 * size)
        await store.resize("host", 12 * size)
        await store.resize("disk", 12 * size)
        for session, history in sessions[2:]:
            below = session.estimate_restore().pages_by_level.get("disk", 0)
            moved = store.stats().moved_bytes.get("disk2h", 0)
            await session.prefetch("host")
            assert below * PAGE == store.stats().moved_bytes.get("disk2h", 0) - moved
            assert 0 == session.estimate_restore().pages_by_level.get("disk", 0)
            assert 6 * BLOCK == await client.resume(session, history)
            session.suspend(client.stream.record())
            session.close()
        check_balances(store.stats())


@pytest.mark.parametrize("option", ["keep_disk", "write_through"])
async def test_copies_survive_a_resize_that_does_not_shrink_them(option: str) -> None:
    """INV-502, INV-520, INV-805: growth costs no copy, a shrink releases and counts them."""
    async with opened(
        device_pages=4, host_pages=4, disk_pages=24, **{option: True, "keep_disk": True}
    ) as (store, client, _):
        for number in range(3):
            await client.put(tokens(number, 4))
        for number in range(3):
            await client.get(tokens(number, 4))
        copies = store.stats().pools["disk", "full"].copies
        assert copies > 0
        await store.resize("disk", 30 * slot_bytes(PAGE))
        assert copies == store.stats().pools["disk", "full"].copies
        assert 0 == store.stats().pools["disk", "full"].released_by_resize
        await store.resize("disk", 12 * slot_bytes(PAGE))
        assert store.stats().pools["disk", "full"].released_by_resize > 0
        assert 0 == store.stats().pools["disk", "full"].copies
        check_balances(store.stats())
        for number in range(3):
            await client.get(tokens(number, 4))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("call", ["clear", "bump_epoch", "aclose"])
async def test_living_kv_cache_guard(call: str, count: int) -> None:
    """INV-907: refused while sessions live, the message names the call and how many, and nothing
    changes.
    """
    async with opened() as (store, client, _):
        await client.put(tokens(1, 4))
        sessions = [client.session(tokens(1, 4)) for _ in range(count)]
        before = (store.stats().pools, store.tables.version, store.stats().pages)
        with pytest.raises(LogicError, match=rf"{call}: {count} sessions? (is|are) open"):
            await getattr(store, call)()
        assert before == (store.stats().pools, store.tables.version, store.stats().pages)
        assert 4 * BLOCK == await client.resume(sessions[0], client.history(tokens(1, 4)))
        for session in sessions:
            session.close()
        await client.settle()
        await getattr(store, call)()


async def test_leaving_with_living_sessions_names_how_many() -> None:
    """INV-907: leaving the store always closes it, and says how many sessions there were."""
    rig = SimRig.create(config := sim_config(block_tokens=BLOCK))
    with pytest.raises(LogicError, match="2 sessions"):
        async with rig.open(config) as store:
            client = SimClient(store, rig, config)
            await client.put(tokens(1, 2))
            kept = [client.session(tokens(1, 2)) for _ in range(2)]
    assert ["closed", "closed"] == [session.state for session in kept]
    rig.check_closed()


@pytest.mark.parametrize("level", ["host", "disk"])
@pytest.mark.parametrize("used", [1, 20])
async def test_slot_allocator_shrink(level: str, used: int) -> None:
    """INV-902, INV-903, INV-904: a full tier and a hardly used one shrink and grow back; what is
    still there is right, what is gone is a miss.
    """
    async with opened(device_pages=4, host_pages=12, disk_pages=12) as (store, client, _):
        for number in range(used):
            await client.put(tokens(number, 2))
        for slots in (3, 12):
            await store.resize(level, slots * slot_bytes(PAGE))
            store.step(None)
            pool = store.stats().pools[level, "full"]
            assert slots == pool.total
            check_balances(store.stats())
        for number in range(used):
            await client.get(tokens(number, 2))


async def test_block_key_hashing_through_the_store() -> None:
    """INV-316, INV-318: keys are whole 32-byte digests, the same in every process; a store finds
    a block by all of its bits.
    """
    chain = KeyChain(BLOCK, scope_key(b"tenant", b"adapter"))
    chain.extend(np.arange(2 * BLOCK))
    assert [32, 32] == [len(key) for key in chain.keys]
    assert FIXED_DIGESTS == [key.hex() for key in chain.keys]
    async with opened() as (store, client, _):
        await client.put(tokens(1, 2))
        key = client.history(tokens(1, 2)).key(1)
        for bit in (0, 128, 255):
            wrong = bytearray(key)
            wrong[bit // 8] ^= 1 << bit % 8
            first = client.history(tokens(1, 2)).key(0)
            assert 1 == store.tables.match([first, type(key)(wrong)]).block_count
        assert 2 == store.tables.match([client.history(tokens(1, 2)).key(0), key]).block_count


async def test_reuse_scopes_do_not_match() -> None:
    """INV-317: equal tokens in another salt or adapter are a miss, on every level."""
    async with opened(device_pages=4, host_pages=4, disk_pages=24) as (store, client, _):
        await client.put(tokens(1, 3), salt=b"a")
        for _ in range(3):
            for scope in ({}, {"salt": b"b"}, {"adapter": b"a"}, {"salt": b"a", "adapter": b"x"}):
                assert 0 == store.probe(np.array(tokens(1, 3)), **scope)
            assert 3 * BLOCK == store.probe(np.array(tokens(1, 3)), salt=b"a")
            await client.flood(4)


async def test_teardown_without_device_context() -> None:
    """INV-908, INV-924: the device is gone before close: no device call is made or waited for,
    files, locks and tickets are given back, and no page is ended by the garbage collector.
    """
    config = sim_config(block_tokens=BLOCK, **ALL_ON)
    rig = SimRig.create(config)
    with pytest.raises((StoreFailed, ExceptionGroup, LogicError)):
        async with rig.open(config) as store:
            client = SimClient(store, rig, config)
            for number in range(4):
                await client.put(tokens(number, 4))
            session = client.session(tokens(1, 4))
            copies = dict(rig.device.copy_calls)
            rig.device.fail(CODE_LAUNCH_FAILED)
            store.session(np.array(tokens(1, 1))).close()
            with contextlib.suppress(StoreFailed):
                await session.resume(client.stream)
            raise StoreFailed("the server ends")
    assert copies == rig.device.copy_calls
    assert "closed" == session.state
    assert 0 == rig.engine.open_count == rig.gate.open_count
    assert 0 == rig.disk.open_count == rig.disk.lock_count


async def test_retention_order() -> None:
    """INV-309, INV-409: of two requests the one of lower priority leaves first, although it is the
    newer one; among equals the older.
    """
    async with opened(device_pages=4, host_pages=0, disk_pages=8) as (store, client, _):
        await client.put(tokens(1, 2), priority=90)
        await client.put(tokens(2, 2), priority=10)
        await client.put(tokens(3, 2), priority=35)
        where = {
            number: dict(store.probe(np.array(tokens(number, 2))).by_level) for number in (1, 2, 3)
        }
        assert {"device": 2 * BLOCK} == where[1] == where[3]
        assert {"disk": 2 * BLOCK} == where[2]
        await client.put(tokens(4, 2), priority=35)
        assert {"device": 2 * BLOCK} == store.probe(np.array(tokens(1, 2))).by_level
        assert {"disk": 2 * BLOCK} == store.probe(np.array(tokens(3, 2))).by_level


async def test_cached_tokens_by_tier() -> None:
    """INV-812: what a session finds is told per tier, and the parts add up to the total."""
    async with opened(device_pages=6, host_pages=3, disk_pages=24) as (store, client, _):
        await client.put(tokens(1, 6))
        await client.flood(5)
        async with client.session(tokens(1, 6)) as session:
            by_level = dict(session.cached_tokens_by_level)
            assert 6 * BLOCK == session.cached_tokens == sum(by_level.values())
            assert len(by_level) > 1, by_level
            below = {name: count // BLOCK for name, count in by_level.items() if name != "device"}
            assert below == session.estimate_restore().pages_by_level
        check_balances(store.stats())


async def test_storage_statistics() -> None:
    """INV-802, INV-803, INV-804: per level and group, from empty over full to cleared."""
    async with opened(device_pages=4, host_pages=4, disk_pages=12, **ALL_ON) as (store, client, _):
        for (level, group), pool in store.stats().pools.items():
            assert (level, group) in {("device", "full"), ("host", "full"), ("disk", "full")}
            assert pool.total == pool.ready == pool.available
        for number in range(8):
            await client.put(tokens(number, 2))
        await client.get(tokens(0, 2))
        store.step(None)
        await client.settle()
        stats = store.stats()
        check_balances(stats)
        for pool in stats.pools.values():
            free = pool.ready + pool.draining
            assert pool.available == free + pool.evictable + pool.copies
            assert pool.evictable == pool.primaries
        assert stats.pages == sum(pool.primaries for pool in stats.pools.values())
        assert store.available("disk") == stats.pools["disk", "full"].available
        await store.clear()
        assert all(pool.total == pool.available for pool in store.stats().pools.values())


async def test_hand_over_between_instances() -> None:
    """INV-919, INV-926: what one instance computed and flushed, the next one on the disk serves."""
    disk = SimDisk()
    options: dict[str, Any] = {"fingerprint": "model", "disk_pages": 24}
    async with opened(disk, **options) as (store, client, _):
        await client.put(tokens(1, 6))
        await store.aclose(flush=True)
    async with opened(disk, **options) as (store, client, _):
        await store.recovered()
        assert 6 * BLOCK == await client.get(tokens(1, 6))
        assert {"disk": 6 * BLOCK} == store.stats().matched_tokens_by_level
