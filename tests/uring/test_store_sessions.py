"""Sessions on real pieces: growing, sharing, waiting, prefetching, forking, resizing, gates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import kvstore
from kvstore import executor
from kvstore import session as session_module
from kvstore._uring.base import Opcode
from kvstore._uring.engine import FaultRule
from kvstore.testing import pattern

PAGE_BYTES = 16 << 10
SLOT_BYTES = PAGE_BYTES + 4096
BLOCK = 8


def config(
    path: Path, *, device: int = 8, host: int = 8, disk: int = 64, **options: Any
) -> kvstore.StoreConfig:
    """Return a store of so many slots per tier; ``host=0`` leaves that tier out."""
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=device * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=host * SLOT_BYTES) if host else None,
        disk=kvstore.DiskTierConfig(
            disk_cache_size=disk * SLOT_BYTES, disk_cache_path=str(path / "kv")
        ),
        check_invariants=True,
        **{"io": kvstore.IoConfig()} | options,
    )


def tokens_of(number: int, blocks: int = 4) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens of one request."""
    return np.arange(blocks * BLOCK) + number * 10_000


def pool_of(store: kvstore.KVStore) -> Any:
    """Return the device pool as (slots, page bytes)."""
    return np.asarray(store.device_pool("full").as_tensor()).reshape(-1, PAGE_BYTES)


async def fill(store: kvstore.KVStore, session: kvstore.Session, number: int, blocks: int) -> None:
    """Compute what is missing of the first blocks, commit it."""
    tokens = tokens_of(number, blocks)
    pool = pool_of(store)
    start = session.history_tokens // BLOCK
    await session.grow(len(tokens))
    table = session.page_table("full")
    for block in range(start, blocks):
        pool[table[block]] = pattern(f"{number}.{block}", PAGE_BYTES)
    session.commit(tokens[session.history_tokens :])


def check(store: kvstore.KVStore, session: kvstore.Session, number: int, blocks: int) -> None:
    """Compare the first blocks of an active session with what was computed."""
    pool, table = pool_of(store), session.page_table("full")
    for block in range(blocks):
        assert np.array_equal(pattern(f"{number}.{block}", PAGE_BYTES), pool[table[block]]), block


async def put(store: kvstore.KVStore, number: int, blocks: int = 4) -> None:
    """Compute and commit one request."""
    async with store.session(tokens_of(number, blocks)) as session:
        await session.resume()
        await fill(store, session, number, blocks)


async def get(store: kvstore.KVStore, number: int, blocks: int = 4, **options: Any) -> int:
    """Resume one request, verify it and return the valid blocks."""
    async with store.session(tokens_of(number, blocks)) as session:
        restore = await session.resume(**options)
        await restore.ready()
        check(store, session, number, restore.valid_tokens // BLOCK)
        return restore.valid_tokens // BLOCK


async def held(store: kvstore.KVStore, number: int) -> Any:
    """Compute one request and return its session, suspended: its pages are held."""
    session = store.session(tokens_of(number))
    await session.resume()
    await fill(store, session, number, 4)
    session.suspend()
    return session


async def test_without_a_host_tier_pages_go_to_disk_through_staging(tmp_path: Path) -> None:
    """INV-415: a store without a host tier is legal, and every byte comes back."""
    async with kvstore.open_store(config(tmp_path, host=0)) as store:
        for number in range(10):
            await put(store, number)
        assert [4] * 10 == [await get(store, number) for number in range(10)]
        assert ("device", "disk") == store.stats().levels


async def test_full_tiers_swap_by_the_bounce_buffer(tmp_path: Path) -> None:
    """INV-407, INV-408: held pages fill every tier, and still each session can be resumed."""
    async with kvstore.open_store(config(tmp_path, device=4, host=4, disk=8)) as store:
        sessions = [await held(store, number) for number in range(4)]
        for _ in range(3):
            for number, session in enumerate(sessions):
                (await session.resume()).raise_for_status()
                check(store, session, number, 4)
                session.suspend()
        for session in sessions:
            await session.aclose()


async def test_a_partial_tail_survives_with_what_was_decoded_into_it(tmp_path: Path) -> None:
    """INV-313, INV-314: demote, restore, decode into the tail, demote, restore: the new bytes."""
    async with kvstore.open_store(config(tmp_path, device=4, host=4)) as store:
        pool = pool_of(store)
        async with store.session(tokens_of(1, 2)) as session:
            await session.resume()
            await session.grow(2 * BLOCK + 3)
            await store.step()
            pool[session.page_table("full")[:2]] = 1
            session.commit(np.arange(2 * BLOCK + 3))
            for round_number in range(3):
                await store.step()
                pool[session.page_table("full")[2]] = 10 + round_number
                session.suspend()
                for number in range(10, 14):
                    await put(store, number)
                (await session.resume()).raise_for_status()
                assert 2 * BLOCK + 3 == session.history_tokens
                assert np.all(pool[session.page_table("full")[2]] == 10 + round_number)
        assert 0 == store.probe(np.arange(2 * BLOCK + 3)) % BLOCK  # the tail is not in the index


async def test_try_grow_refuses_and_changes_nothing(tmp_path: Path) -> None:
    """INV-417: False leaves the session as it was."""
    async with (
        kvstore.open_store(config(tmp_path)) as store,
        store.session() as session,
    ):
        await session.resume()
        assert session.try_grow(8 * BLOCK)
        before = store.stats().pools
        assert not session.try_grow(8 * BLOCK + 1)
        assert 8 * BLOCK == session.capacity_tokens
        after = store.stats().pools
        assert before["host", "full"] == after["host", "full"]
        assert 1 == store.stats().plans_refused


async def test_a_restore_that_never_fits_raises_out_of_pages(tmp_path: Path) -> None:
    """INV-335, INV-404: the error names level, pool group, slots needed and available."""
    async with kvstore.open_store(config(tmp_path, device=8)) as store:
        for number in range(3):
            await put(store, number)
        blocker = store.session(tokens_of(0))
        await blocker.resume()
        await blocker.grow(8 * BLOCK)
        async with store.session(tokens_of(1)) as session:
            with pytest.raises(kvstore.OutOfPages) as caught:
                await session.resume(wait=False)
            assert 0 == caught.value.level  # type: ignore[attr-defined]
            assert "suspended" == session.state
            with pytest.raises(kvstore.DeadlineError):
                await session.resume(deadline=0.02)
            async with anyio.create_task_group() as group:
                group.start_soon(session.resume)
                await asyncio.sleep(0.01)
                assert "restoring" == session.state
                await blocker.aclose()
            check(store, session, 1, 4)


async def test_sessions_share_one_transfer_and_cancel_alone(tmp_path: Path) -> None:
    """INV-326, INV-327: one read per page for many waiters; a cancelled one hurts nobody."""
    async with kvstore.open_store(config(tmp_path, device=12)) as store:
        for number in range(10):
            await put(store, number)
        reads = store.stats().engine.classes[0].transfers
        levels = store.probe(tokens_of(0)).by_level
        assert {"disk": 4 * BLOCK} == levels
        results: list[int] = []

        async def one(patience: float) -> None:
            with anyio.move_on_after(patience):
                results.append(await get(store, 0))

        async with anyio.create_task_group() as group:
            for patience in (60, 60, 0.0001, 60):
                group.start_soon(one, patience)
        assert results.count(4) >= 3
        assert 4 == store.stats().engine.classes[0].transfers - reads


async def test_a_cancelled_restore_leaks_nothing(tmp_path: Path) -> None:
    """INV-916: slots drain or keep their pages, holds are dropped; the next resume works."""
    async with kvstore.open_store(config(tmp_path)) as store:
        for number in range(10):
            await put(store, number)
        for delay in (0.0, 0.0001, 0.0005, 0.001, 0.003):
            async with store.session(tokens_of(0)) as session:
                with anyio.move_on_after(delay):
                    await session.resume()
                    session.suspend()
                (await session.resume()).raise_for_status()
                check(store, session, 0, 4)
            for number in range(1, 5):
                await put(store, number)
        await asyncio.sleep(0.05)
        for pool in store.stats().pools.values():
            assert pool.primaries == pool.evictable
            assert 0 == pool.draining


async def test_a_prefetch_is_awaited_used_and_bounded(tmp_path: Path) -> None:
    """INV-333: pages come up to the host tier within the budget; a resume then reads nothing."""
    async with kvstore.open_store(config(tmp_path, host=16)) as store:
        for number in range(12):
            await put(store, number)
        async with store.session(tokens_of(0)) as session:
            assert {"disk": 4 * BLOCK} == session.cached_tokens_by_level
            assert session.estimate_restore().pages_by_level == {"disk": 4}
            assert session.estimate_restore().seconds > 0
            handle = session.prefetch("host")
            assert 4 == await handle
            assert {"host": 4} == session.estimate_restore().pages_by_level
            reads = store.stats().engine.classes[0].transfers
            (await session.resume()).raise_for_status()
            check(store, session, 0, 4)
            assert reads == store.stats().engine.classes[0].transfers
        sessions = [store.session(tokens_of(number)) for number in range(1, 6)]
        handles = [session.prefetch("host") for session in sessions]
        assert 4 >= sum(handle.page_count for handle in handles)  # a quarter of 16
        for session in sessions:
            await session.aclose()
        assert 4 == await get(store, 3)


async def test_fork_shares_the_committed_blocks(tmp_path: Path) -> None:
    """N > 1 sampling: the fork holds the same blocks, and diverges without touching its twin."""
    async with kvstore.open_store(config(tmp_path, device=12)) as store:
        async with store.session(tokens_of(1)) as session:
            await session.resume()
            await fill(store, session, 1, 4)
            hashes = session.hash_count
            async with session.fork() as twin:
                assert session.history_tokens == twin.history_tokens
                await twin.resume()
                assert list(session.page_table("full")) == list(twin.page_table("full"))
                await twin.grow(5 * BLOCK)
                await session.grow(5 * BLOCK)
                twin.commit([7] * BLOCK)
                session.commit([9] * BLOCK)
                assert twin.page_table("full")[4] != session.page_table("full")[4]
                assert 0 == twin.hash_count - 1  # one new block, nothing hashed again
            assert hashes + 1 == session.hash_count


async def test_committing_a_known_block_shares_its_page(tmp_path: Path) -> None:
    """INV-322: the session uses the existing page and frees its own slot."""
    async with kvstore.open_store(config(tmp_path, device=12)) as store:
        first, second = store.session(), store.session()
        for session in (first, second):
            await session.resume()
            await session.grow(2 * BLOCK)
        for session in (first, second):
            session.commit(np.arange(2 * BLOCK))
        assert list(first.page_table("full")) == list(second.page_table("full"))
        assert 2 == store.stats().pages
        await first.aclose()
        await second.aclose()


async def test_calls_in_the_wrong_state_do_nothing(tmp_path: Path) -> None:
    """INV-332: LogicError, and committed <= history <= capacity throughout."""
    async with kvstore.open_store(config(tmp_path)) as store:
        session = store.session(tokens_of(1))
        for call in (
            lambda: session.try_grow(8),
            lambda: session.commit([1]),
            session.suspend,
            lambda: session.page_table("full"),
        ):
            with pytest.raises(kvstore.LogicError, match="suspended"):
                call()
        await session.resume()
        with pytest.raises(kvstore.LogicError):
            await session.resume()
        with pytest.raises(kvstore.LogicError, match="capacity"):
            session.commit([1, 2, 3])
        assert session.try_grow(BLOCK + 1)
        session.commit(tokens_of(1)[: BLOCK + 1])
        assert BLOCK == session.committed_tokens < session.history_tokens < session.capacity_tokens
        with pytest.raises(ValueError, match="32 bits"):
            session.commit([1 << 32])
        assert BLOCK + 1 == session.history_tokens
        await session.aclose()
        await session.aclose()
        with pytest.raises(kvstore.LogicError, match="closed"):
            await session.resume()


async def test_sliding_windows_release_pages_and_show_minus_one(tmp_path: Path) -> None:
    """INV-337: a page that leaves the window loses lock and hold at the next commit."""
    groups = (
        kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),
        kvstore.PoolGroupConfig("local", page_bytes=PAGE_BYTES, window=2 * BLOCK, sinks=BLOCK),
    )
    windowed = kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=groups,
        device=kvstore.DeviceTierConfig(gpu_cache_size=2 * 12 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=2 * 8 * SLOT_BYTES),
        check_invariants=True,
    )
    async with kvstore.open_store(windowed) as store:
        async with store.session() as session:
            await session.resume()
            for count in range(1, 8):
                await session.grow(count * BLOCK)
                session.commit(np.arange((count - 1) * BLOCK, count * BLOCK))
            table = session.page_table("local")
            assert [False, True, True, True, True, False, False] == [slot < 0 for slot in table]
            assert all(slot >= 0 for slot in session.page_table("full"))
            session.suspend()
            (await session.resume()).raise_for_status()
            assert list(table < 0) == list(session.page_table("local") < 0)
        assert 7 * BLOCK == store.probe(np.arange(7 * BLOCK))


@pytest.mark.parametrize("level", ["host", "disk"])
async def test_resize_online_with_open_sessions(tmp_path: Path, level: str) -> None:
    """INV-901 to INV-906: shrink and grow under open sessions; every byte stays right."""
    async with kvstore.open_store(config(tmp_path, host=16, disk=64)) as store:
        for number in range(12):
            await put(store, number)
        async with store.session(tokens_of(0)) as session:
            await session.resume()
            for size in (24, 12, 40, 8, 64):
                await store.resize(level, size * SLOT_BYTES)
                assert size == store.stats().pools[level, "full"].total
                check(store, session, 0, 4)
                for number in range(8, 12):
                    assert await get(store, number) <= 4
                    await put(store, number)
            with pytest.raises(ValueError, match="size_bytes"):
                await store.resize(level, 100)
            with pytest.raises(kvstore.LogicError, match="device tier is fixed"):
                await store.resize("device", 1 << 30)


async def test_a_shrink_that_held_pages_do_not_survive_is_refused(tmp_path: Path) -> None:
    """INV-902: OutOfPages, and nothing changed."""
    async with kvstore.open_store(config(tmp_path, device=4, host=8, disk=8)) as store:
        sessions = [await held(store, number) for number in range(5)]
        with pytest.raises(kvstore.OutOfPages, match="resize"):
            await store.resize("disk", 2 * SLOT_BYTES)
        assert 8 == store.stats().pools["disk", "full"].total
        for number, session in enumerate(sessions):
            (await session.resume()).raise_for_status()
            check(store, session, number, 4)
            session.suspend()
        for session in sessions:
            await session.aclose()


def two_groups(path: Path) -> kvstore.StoreConfig:
    """Return a store with two layer groups and named files, so that a restart starts on disk."""
    groups = (
        kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),
        kvstore.PoolGroupConfig("late", page_bytes=PAGE_BYTES),
    )
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=groups,
        device=kvstore.DeviceTierConfig(gpu_cache_size=2 * 32 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=2 * 16 * SLOT_BYTES),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=2 * 64 * SLOT_BYTES, disk_cache_path=str(path / "kv")
        ),
        fingerprint="model",
        check_invariants=True,
    )


@pytest.fixture(params=["one ticket per group", "one ticket per page"])
def tickets_per_group(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a gated restore of four blocks be one slice per pool group, or four."""
    if "group" in request.param:
        return 1
    monkeypatch.setattr(executor, "SLICE_BYTES", 1)
    return 4


async def test_gated_restores_arrive_and_are_counted(
    tmp_path: Path, tickets_per_group: int
) -> None:
    """INV-202, INV-811: one ticket per slice, queued behind the gate, verified, committed."""
    async with kvstore.open_store(two_groups(tmp_path)) as store:
        for number in range(4):
            await put(store, number)
        await store.aclose(flush=True)
    async with kvstore.open_store(two_groups(tmp_path)) as store:
        await store.recovered()
        stream = store.stream()
        for number in range(4):
            async with store.session(tokens_of(number)) as session:
                restore = await session.resume(stream, gated=True)
                assert restore.is_gated
                assert not restore.is_done
                restore.wait_group("full", stream)
                await restore.ready("full")
                await restore.ready()
                assert restore.is_done
                check(store, session, number, 4)
                await session.grow(5 * BLOCK)
                session.commit([5] * BLOCK)
        assert store.gate is not None
        gate = store.gate.stats()
        assert 8 * tickets_per_group == gate.taken == gate.published_good
        assert 0 == gate.open == gate.parked_streams == store.stats().gate_await_fallbacks


@pytest.mark.usefixtures("tickets_per_group")
async def test_a_failed_read_behind_the_gate_voids_the_step(tmp_path: Path) -> None:
    """INV-219 to INV-221: the session learns the first bad block; its tokens stay uncommitted."""
    async with kvstore.open_store(two_groups(tmp_path)) as store:
        await put(store, 1)
        await store.aclose(flush=True)
    path = tmp_path / "kv" / "late.0.slots"
    with path.open("r+b") as file:
        for slot in range(64):
            file.seek(4096 + slot * SLOT_BYTES)
            header = file.read(208)
            if header[:8] == b"KVSTSLOT" and int.from_bytes(header[112:120], "little") == 2:
                file.seek(4096 + slot * SLOT_BYTES + 5000)
                file.write(b"damage")
    async with kvstore.open_store(two_groups(tmp_path)) as store:
        await store.recovered()
        stream = store.stream()
        async with store.session(tokens_of(1)) as session:
            restore = await session.resume(stream, gated=True)
            assert restore.is_gated
            await session.grow(5 * BLOCK)
            with pytest.raises(kvstore.PagesLost) as caught:
                await restore.ready()
            assert 2 * BLOCK == caught.value.first_failed_token  # type: ignore[attr-defined]
            assert [("late", 2)] == restore.failed_pages
            with pytest.raises(kvstore.PagesLost):
                session.commit([5] * BLOCK)
            assert 2 * BLOCK == session.history_tokens == restore.valid_tokens
            session.suspend()
            (await session.resume()).raise_for_status()
            check(store, session, 1, 2)
        assert 2 * BLOCK == store.probe(tokens_of(1))


async def test_gate_busy_falls_back_to_await(tmp_path: Path) -> None:
    """INV-202, INV-211: too few landing slots: the call awaits instead, and that is counted."""
    io = kvstore.IoConfig(staging_bytes=2 * SLOT_BYTES)
    async with kvstore.open_store(config(tmp_path, device=12, io=io)) as store:
        for number in range(10):
            await put(store, number)
        assert 4 == await get(store, 0, gated=True)
        stats = store.stats()
        assert 1 == stats.gate_await_fallbacks
        assert 0 == stats.engine.tickets_taken


async def test_kv_events_tell_a_router_what_is_where(tmp_path: Path) -> None:
    """Design section 4: stored, moved and removed, by a callback per store; off by default."""
    events: list[kvstore.KVEvent] = []
    options = config(tmp_path, on_event=events.append)
    async with kvstore.open_store(options) as store:
        for number in range(10):
            await put(store, number)
        await store.clear()
    kinds = {event.kind for event in events}
    assert {"stored", "moved", "removed"} == kinds
    stored = [event for event in events if event.kind == "stored"]
    assert 40 == len({event.key for event in stored})
    assert {("full", "device")} == {(event.group, event.level) for event in stored}


async def test_ranks_agree_on_the_smallest_prefix(tmp_path: Path) -> None:
    """Design section 11: the hook gets the local prefix and answers the common one."""
    asked: list[int] = []

    def agree(tokens: int) -> int:
        asked.append(tokens)
        return min(tokens, 2 * BLOCK)

    async with kvstore.open_store(config(tmp_path, agree=agree)) as store:
        await put(store, 1)
        async with store.session(tokens_of(1)) as session:
            assert 2 * BLOCK == session.cached_tokens
    assert [0, 4 * BLOCK] == asked


async def test_adopted_tensors_keep_their_reserved_slots(tmp_path: Path) -> None:
    """Design section 4: the scheduler's own tensors are the pool; reserved slots stay untouched."""
    tensors = [np.zeros((10, PAGE_BYTES // 2), np.uint8) for _ in range(2)]
    adopted = kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(tensors={"full": tensors}, reserved_slots=(0, 5)),
        host=kvstore.HostTierConfig(host_cache_size=16 * SLOT_BYTES),
    )
    async with kvstore.open_store(adopted) as store:
        for _ in range(2):
            for number in range(4):
                async with store.session(tokens_of(number)) as session:
                    await session.resume()
                    await session.grow(4 * BLOCK)
                    table = session.page_table("full")
                    assert not set(table) & {0, 5}
                    for block in range(session.history_tokens // BLOCK):
                        for tensor in tensors:
                            assert np.all(tensor[table[block]] == 10 * number + block + 1)
                    for block in range(session.history_tokens // BLOCK, 4):
                        for tensor in tensors:
                            tensor[table[block]] = 10 * number + block + 1
                    session.commit(tokens_of(number)[session.history_tokens :])
    for tensor in tensors:
        assert not np.any(tensor[[0, 5]])


async def test_a_slot_is_granted_only_when_its_last_use_can_be_waited_for(tmp_path: Path) -> None:
    """INV-338, INV-417: no slot enters the page table while its eviction is not even enqueued.

    Host and device are full, and the disk writes that would free host slots are held back: the
    copies out of the device cannot be enqueued, so no stream could wait for them.
    """
    async with kvstore.open_store(config(tmp_path, device=4, host=4)) as store:
        for number in range(2):
            await put(store, number)
        rule = store.engine.inject(FaultRule(action="hold", opcode=Opcode.WRITE, count=None))
        async with store.session(tokens_of(2)) as session:
            await session.resume(store.stream())
            assert not session.try_grow(4 * BLOCK)
            assert session.is_growing
            assert 0 == session.capacity_tokens == len(session.page_table("full"))
            drain = store.step()
            assert not drain.is_done
            rule.release()
            await drain
            await session.grow(4 * BLOCK)
            assert 4 == len(session.page_table("full"))
            assert not session.is_growing
        assert 4 == await get(store, 0)


async def test_a_session_that_closes_while_growing_gives_its_slots_back(tmp_path: Path) -> None:
    """INV-804, INV-916: slots that were never granted are free again when their use has ended."""
    async with kvstore.open_store(config(tmp_path, device=4, host=4)) as store:
        for number in range(2):
            await put(store, number)
        rule = store.engine.inject(FaultRule(action="hold", opcode=Opcode.WRITE, count=None))
        async with store.session(tokens_of(2)) as session:
            await session.resume(store.stream())
            assert not session.try_grow(4 * BLOCK)
        rule.release()
        await put(store, 3)
        assert 4 == await get(store, 1)


async def test_a_large_restore_starts_group_after_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-129, INV-416: planned and submitted in parts, arrived as one."""
    monkeypatch.setattr(session_module, "PARTS_MIN", 1)
    async with kvstore.open_store(two_groups(tmp_path)) as store:
        for number in range(6):
            await put(store, number)
        for number in range(6):
            assert 4 == await get(store, number)
        assert 0 == store.restores.waiting_count
