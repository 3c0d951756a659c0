"""What a caller can do wrong, and what can go wrong at the end: nobody else pays for it."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import kvstore
from kvstore._uring.base import Opcode
from kvstore._uring.engine import FaultRule
from kvstore.testing import pattern

PAGE_BYTES = 16 << 10
SLOT_BYTES = PAGE_BYTES + 4096
BLOCK = 8


def config(path: Path, **options: Any) -> kvstore.StoreConfig:
    """Return a store whose disk holds most of what it serves."""
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=8 * SLOT_BYTES),
        check_invariants=True,
        **{
            "disk": kvstore.DiskTierConfig(
                disk_cache_size=64 * SLOT_BYTES, disk_cache_path=path / "kv"
            ),
            "io": kvstore.IoConfig(io_engine="threads", disk_io_threads=4),
        }
        | options,
    )


def tokens_of(number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens of one request of four blocks."""
    return np.arange(4 * BLOCK) + number * 10_000


def pool_of(store: kvstore.KVStore) -> Any:
    """Return the device pool as (slots, page bytes)."""
    return np.asarray(store.device_pool("full").as_tensor()).reshape(-1, PAGE_BYTES)


async def put(store: kvstore.KVStore, number: int) -> None:
    """Compute and commit one request."""
    tokens = tokens_of(number)
    async with store.session(tokens) as session:
        await session.resume()
        start = session.history_tokens // BLOCK
        await session.grow(len(tokens))
        table = session.page_table("full")
        for block in range(start, 4):
            pool_of(store)[table[block]] = pattern(f"{number}.{block}", PAGE_BYTES)
        session.commit(tokens[session.history_tokens :])


async def get(store: kvstore.KVStore, number: int, **options: Any) -> int:
    """Resume one request, verify its bytes and return the valid blocks."""
    async with store.session(tokens_of(number)) as session:
        restore = await session.resume(**options)
        await restore.ready()
        table, blocks = session.page_table("full"), restore.valid_tokens // BLOCK
        for block in range(blocks):
            assert np.array_equal(
                pattern(f"{number}.{block}", PAGE_BYTES), pool_of(store)[table[block]]
            )
        return blocks


@pytest.mark.parametrize("gated", [False, True], ids=["await", "gate"])
async def test_a_deadline_that_is_no_time_hurts_its_caller_only(
    tmp_path: Path, gated: bool
) -> None:
    """INV-917: a bad argument is refused before anything is planned; the store goes on."""
    async with kvstore.open_store(config(tmp_path)) as store:
        for number in range(8):
            await put(store, number)
        for wrong in (math.nan, math.inf, 1e300, "3", True):
            with pytest.raises(ValueError, match="deadline"):
                await get(store, 0, gated=gated, deadline=wrong)
        with pytest.raises(kvstore.DeadlineError):
            await get(store, 0, gated=gated, deadline=-1.0)
        async with store.session(tokens_of(1)) as session:
            with pytest.raises(ValueError, match="timeout"):
                session.prefetch(timeout=math.nan)
        assert ("ok", 4) == (store.health(), await get(store, 0, gated=gated))


async def test_arguments_of_the_wrong_kind_change_nothing(tmp_path: Path) -> None:
    """INV-318, INV-332: priorities, salts, token rows and sizes are checked where they come in."""
    async with kvstore.open_store(config(tmp_path)) as store:
        for priority in ("high", 1.5, None, math.nan, 1 << 70):
            with pytest.raises(ValueError, match="priority"):
                store.session(tokens_of(1), priority=priority)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="salt must be bytes"):
            store.session(tokens_of(1), salt="tenant")  # type: ignore[arg-type]
        for tokens in (np.zeros((2, 8), int), 5, b"12345678", [0.5], iter([1])):
            with pytest.raises(ValueError, match="token"):
                store.session(tokens)  # type: ignore[arg-type]
        async with store.session(()) as session:
            await session.resume()
            for total in (1.5, math.nan, "8", None):
                with pytest.raises(TypeError):
                    session.try_grow(total)  # type: ignore[arg-type]
            assert session.try_grow(16)
            with pytest.raises(ValueError, match="one row"):
                session.commit(np.zeros((2, 2), int))
            assert (0, 0) == (session.history_tokens, session.known_tokens)
        assert 0 == store.stats().sessions_open


async def test_a_failed_sync_does_not_keep_the_store_from_closing(tmp_path: Path) -> None:
    """INV-907, INV-926: the error is raised, once, after everything has been given back."""
    with pytest.raises(OSError, match="injected"):
        async with kvstore.open_store(config(tmp_path, fingerprint="m")) as store:
            await put(store, 1)

            def broken() -> None:
                raise OSError(5, "injected")

            assert store._disk is not None
            store._disk.sync = broken  # type: ignore[method-assign]
            await store.aclose(flush=True)
    async with kvstore.open_store(config(tmp_path, fingerprint="m")) as again:
        assert "ok" == again.health()


async def test_a_session_that_cannot_be_closed_does_not_keep_the_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-907: leaving always closes, whatever ending the sessions brings up."""
    with pytest.raises(kvstore.InvariantError, match="injected"):
        async with kvstore.open_store(config(tmp_path)) as store:
            session = store.session(tokens_of(1))
            await session.resume()

            def broken(*_args: Any) -> None:
                raise kvstore.InvariantError("injected")

            monkeypatch.setattr(type(store.tables), "unhold", broken)
    monkeypatch.undo()
    session._state = type(session._state).CLOSED  # or dropping it warns
    async with kvstore.open_store(config(tmp_path)) as again:
        await put(again, 1)


@pytest.mark.parametrize("level", ["host", "disk"])
async def test_closing_ends_a_resize_that_waits(tmp_path: Path, level: str) -> None:
    """INV-904, INV-908: whoever waits for a resize hears of the close; nobody waits for ever."""
    outcomes: list[str] = []

    async def shrink(store: kvstore.KVStore) -> None:
        try:
            await store.resize(level, 2 * SLOT_BYTES)
            outcomes.append("done")
        except kvstore.StoreClosed:
            outcomes.append("closed")

    async def read(store: kvstore.KVStore) -> None:
        with contextlib.suppress(kvstore.KVStoreError):
            await get(store, 0)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            async with kvstore.open_store(config(tmp_path)) as store:
                for number in range(8):
                    await put(store, number)
                hold = store.engine.inject(FaultRule(action="hold", count=None))  # type: ignore[union-attr]
                group.start_soon(read, store)
                await anyio.sleep(0.05)
                group.start_soon(shrink, store)
                await anyio.sleep(0.05)
                hold.release()
                for session in list(store._sessions):
                    session.close()
                await store.aclose()
    assert outcomes in (["closed"], ["done"])


async def test_a_resize_whose_caller_gave_up_ends_by_itself(tmp_path: Path) -> None:
    """INV-904: cancelling the wait never leaves slots beyond the end half given back."""
    async with kvstore.open_store(config(tmp_path)) as store:
        for number in range(14):
            await put(store, number)
        assert store.engine is not None
        hold = store.engine.inject(FaultRule(action="hold", opcode=Opcode.READ, count=None))
        async with anyio.create_task_group() as group:
            group.start_soon(get, store, 0)
            await anyio.sleep(0.05)
            with anyio.move_on_after(0.05) as scope:
                await store.resize("disk", 8 * SLOT_BYTES)
            assert scope.cancelled_caught
            with pytest.raises(kvstore.LogicError, match="being resized already"):
                await store.resize("disk", 20 * SLOT_BYTES)
            hold.release()
        with anyio.fail_after(10):
            while store._resizing:
                await anyio.sleep(0.01)
        await store.resize("disk", 64 * SLOT_BYTES)
        for number in range(14):
            await put(store, number)
        assert [4] * 14 == [await get(store, number) for number in range(14)]


@pytest.mark.parametrize("level", ["host", "disk"])
async def test_a_growth_that_can_never_fit_takes_nothing(tmp_path: Path, level: str) -> None:
    """INV-902, C35: it is refused as a whole, instead of filling the machine part by part."""
    async with kvstore.open_store(config(tmp_path)) as store:
        before = store.stats()
        with pytest.raises(kvstore.CapacityError, match=f"{level}_cache_size: "):
            await store.resize(level, 1 << 60)
        assert before.pools == store.stats().pools
        assert before.host_mapped_bytes == store.stats().host_mapped_bytes


async def test_one_directory_twice_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    """INV-132: and not a second store, which BusyError would name."""
    wrong = kvstore.DiskTierConfig(
        disk_cache_size=64 * SLOT_BYTES, disk_cache_path=[tmp_path / "kv", f"{tmp_path}/./kv"]
    )
    with pytest.raises(kvstore.ConfigError, match=r"disk_cache_path: .* twice"):
        async with kvstore.open_store(config(tmp_path, disk=wrong)):
            pass


async def test_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    """INV-138: the child's calls raise, its exits touch nothing, and the parent goes on."""
    async with kvstore.open_store(config(tmp_path)) as store:
        for number in range(8):
            await put(store, number)
        session = store.session(tokens_of(0))
        await session.resume()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads exist; that is the point
            child = os.fork()
        if child == 0:
            failures = 0
            for call in (lambda: store.session([1]), store.step, session.suspend):
                try:
                    call()
                except kvstore.StoreFailed:
                    failures += 1
            session.close()
            os._exit(0 if (failures, session.state) == (3, "closed") else 1)
        with anyio.fail_after(20):
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):  # noqa: ASYNC222
                await anyio.sleep(0.01)
        assert (child, 0) == ended
        await session.aclose()
        assert [4] * 8 == [await get(store, number) for number in range(8)]
