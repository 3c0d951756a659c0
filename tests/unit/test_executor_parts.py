"""Plans of many pages are started in parts, so that other coroutines get their turns between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.executor import EARLY_PAGES, TURN_PAGES_MAX, Executor
from kvstore.testing import check_balances, open_sim_store, sim_config

BLOCK = 8
PAGES = 600


def config(**options: Any) -> Any:
    """Return a store in which a second session of `PAGES` pages moves all pages of the first."""
    sizes = {"device_pages": PAGES, "host_pages": PAGES, "disk_pages": 3 * PAGES}
    return sim_config(**sizes, block_tokens=BLOCK, check_invariants=False, **options)


def tokens(number: int) -> list[int]:
    return [number] * BLOCK + list(range((PAGES - 1) * BLOCK))


async def end_steps(store: Any) -> None:
    """Let the work of closed sessions end: without a fence that is the step after theirs."""
    for _ in range(2):
        await store.step()


async def put(store: Any, number: int) -> None:
    """Leave `PAGES` pages behind."""
    async with store.session(tokens(number)) as session:
        await session.resume()
        await session.grow(PAGES * BLOCK)
        session.commit(tokens(number)[session.history_tokens :])
    await end_steps(store)


class Starts:
    """Counts the moves that begin: in all, and in each turn that is the executor's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.turns: list[int] = []
        start, turn = Executor._start, Executor._turn

        def counted(executor: Executor, move: Any) -> None:
            self.count += 1
            start(executor, move)

        def in_turn(executor: Executor) -> None:
            before = self.count
            turn(executor)
            self.turns.append(self.count - before)

        monkeypatch.setattr(Executor, "_start", counted)
        monkeypatch.setattr(Executor, "_turn", in_turn)


async def test_moves_of_a_large_plan_begin_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """INV-129: 64 with the plan, 256 in each turn after it, and all of them in the end."""
    async with open_sim_store(config()) as store:
        await put(store, 1)
        await put(store, 2)
        starts = Starts(monkeypatch)
        async with store.session(tokens(3)) as session:
            await session.resume()
            assert not session.try_grow(PAGES * BLOCK)
            assert starts.count == EARLY_PAGES
            await session.grow(PAGES * BLOCK)
        await end_steps(store)
        assert TURN_PAGES_MAX // 2 < max(starts.turns) <= TURN_PAGES_MAX
        assert starts.count == 2 * PAGES  # to the host, and from there to the disk
        check_balances(store.stats())


async def test_moves_that_have_not_begun_are_withdrawn() -> None:
    """INV-118, INV-327: a restore that is cancelled at once ends without a read for its rest."""
    async with open_sim_store(config()) as store:
        for number in (1, 2, 3):
            await put(store, number)
        session = store.session(tokens(1))
        waiting = asyncio.get_running_loop().create_task(session.resume())
        for _ in range(2):  # the plan, and the first of its moves in the turn after it
            await asyncio.sleep(0)
        assert not waiting.done()
        assert len(store.executor._unstarted) > PAGES // 2
        waiting.cancel()
        await asyncio.wait([waiting])
        session.close()
        await end_steps(store)
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert store.executor.is_idle
        assert not store.tables.moves
        check_balances(store.stats())
        async with store.session(tokens(2)) as again:
            assert again.cached_tokens == PAGES * BLOCK
            (await again.resume()).raise_for_status()


async def test_a_close_ends_what_has_not_begun() -> None:
    """INV-908: the store closes with most of a plan not started; the rig finds nothing left."""
    async with open_sim_store(config()) as store:
        await put(store, 1)
        await put(store, 2)
        session = store.session(tokens(3))
        await session.resume()
        session.try_grow(PAGES * BLOCK)
        assert store.executor._unstarted
        session.close()
