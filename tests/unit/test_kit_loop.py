"""Virtual time: what asyncio and anyio promise holds on SimLoop, and a hang raises."""

from __future__ import annotations

import asyncio
import threading

import anyio
import anyio.to_thread
import pytest

from kvstore.testing import SimClock, SimCompletions, SimDeadlock, SimLoop


def _run(main):
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


async def test_sleeping_costs_no_real_time_and_moves_the_clock_exactly():
    """A day passes at once, and the clock resolution is small enough for a nanosecond."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    start_ns = loop.clock.now_ns
    await asyncio.sleep(86_400)
    assert 86_400 * 10**9 == pytest.approx(loop.clock.now_ns - start_ns, abs=2)
    start_ns = loop.clock.now_ns
    await asyncio.sleep(1e-6)
    assert 1000 <= loop.clock.now_ns - start_ns <= 1002


async def test_ready_callbacks_run_in_order():
    """FIFO of call_soon is a promise of asyncio; the simulation does not break it."""
    seen: list[int] = []
    loop = asyncio.get_running_loop()
    for number in range(20):
        loop.call_soon(seen.append, number)
    await asyncio.sleep(0)
    assert list(range(20)) == seen


async def test_timers_fire_in_order_of_time():
    """Two timers less than a microsecond apart keep their order."""
    seen: list[str] = []
    loop = asyncio.get_running_loop()
    loop.call_later(2e-6, seen.append, "late")
    loop.call_later(1.5e-6, seen.append, "early")
    await asyncio.sleep(1)
    assert ["early", "late"] == seen


def test_waiting_for_nothing_is_a_deadlock():
    """A future that nobody resolves raises instead of hanging."""

    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimDeadlock):
        _run(main())


def test_deadlock_in_a_task_group_is_found_too():
    """Two children that wait for each other end the run with SimDeadlock."""

    async def main() -> None:
        first, second = anyio.Event(), anyio.Event()

        async def child(mine: anyio.Event, other: anyio.Event) -> None:
            await other.wait()
            mine.set()

        async with anyio.create_task_group() as group:
            group.start_soon(child, first, second)
            group.start_soon(child, second, first)

    with pytest.raises(SimDeadlock):
        _run(main())


async def test_anyio_groups_scopes_and_shields_run_unchanged():
    """A deadline cancels a child in virtual time, and a shielded clean-up still waits."""
    seen: list[str] = []

    async def child() -> None:
        try:
            await anyio.sleep(3600)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(10)
                seen.append("cleaned up")

    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
    assert scope.cancelled_caught
    assert ["cleaned up"] == seen
    with pytest.raises(TimeoutError):
        with anyio.fail_after(5):
            await anyio.sleep(6)


async def test_native_cancel_reaches_a_task():
    """task.cancel works as on any loop."""
    task = asyncio.get_running_loop().create_task(asyncio.sleep(1000))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_executor_work_runs_inline():
    """Threads have no place in virtual time: to_thread runs its function at once."""
    ident = threading.get_ident()
    assert ident == await asyncio.to_thread(threading.get_ident)
    assert ident == await anyio.to_thread.run_sync(threading.get_ident)
    with pytest.raises(ValueError, match="inside"):
        await asyncio.to_thread(_fail)


def test_other_loops_keep_their_threads():
    """After a simulation has run, anyio uses worker threads again."""
    _run(asyncio.sleep(1))

    async def main() -> int:
        return await anyio.to_thread.run_sync(threading.get_ident)

    assert threading.get_ident() != asyncio.run(main())


def _fail() -> None:
    raise ValueError("inside")


def test_clock_is_callable():
    """The clock is read as an attribute or by a call."""
    clock = SimClock(5)
    clock.now_ns += 1
    assert 6 == clock() == clock.now_ns


async def test_completions_deliver_later_in_order_and_within_a_budget():
    """A record never calls back inside post; one turn handles a bounded number (INV-129)."""
    queue = SimCompletions(budget=4)
    seen: list[tuple[int, int, int, int]] = []
    tokens = [
        queue.token(lambda status, flags, value, n=number: seen.append((n, status, flags, value)))
        for number in range(10)
    ]
    for number, token in enumerate(tokens):
        queue.post(token, -number, value=number)
    assert [] == seen
    await asyncio.sleep(0)
    assert 4 == len(seen)
    await asyncio.sleep(1)
    assert [(number, -number, 3, number) for number in range(10)] == seen
    assert 3 == queue.wakeup_count
    assert 0 == queue.token_count


async def test_completion_token_lives_until_its_end_record():
    """VERDICT keeps the token, END drops it, a record after that is late and ignored."""
    queue = SimCompletions()
    flags_seen: list[int] = []
    token = queue.token(lambda status, flags, value: flags_seen.append(flags))
    queue.post(token, 0, 1)
    queue.post(token, 0, 2)
    queue.post(token, 0, 2)
    await asyncio.sleep(1)
    assert [1, 2] == flags_seen
    assert 1 == queue.late_count
    discarded = queue.token(lambda *_: flags_seen.append(99))
    queue.discard(discarded)
    queue.post(discarded, 0)
    queue.close()
    queue.post(discarded, 0)
    await asyncio.sleep(1)
    assert [1, 2] == flags_seen
