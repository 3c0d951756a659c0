"""Cases C13 to C22: hangs and deadlocks. A hang raises SimDeadlock here, or the watchdog fires."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import subprocess
import sys
import textwrap

import anyio
import numpy as np
import pytest

from kvstore._uring.base import Opcode
from kvstore.config import IoClass, PoolGroupConfig
from kvstore.errors import (
    DeadlineError,
    DeviceError,
    KVStoreError,
    LogicError,
    OutOfPages,
    PagesLost,
)
from kvstore.testing import FaultPlan, SimClient, SimRig, sim_config

from .opening import BLOCK, opened, tokens_of  # noqa: TID252

READ, WRITE = Opcode.READ, Opcode.WRITE


async def _cold(client: SimClient, blocks: int = 4) -> None:
    """Put a sequence and push it down to the disk."""
    await client.put(tokens_of(blocks))
    await client.flood(60)


@pytest.mark.parametrize("call", ["copy_pages", "notify", "notify_event", "wait_event", "record"])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_c13_a_failed_call_leaves_nothing_locked(call, nth):
    """The n-th device call fails for every kind of call; afterwards any operation still ends."""
    async with opened(sim_config(host_pages=6)) as (_, client, rig):
        await client.put(tokens_of(4))
        rig.device.inject(call, 1, nth=nth)
        with contextlib.suppress(KVStoreError, AssertionError):
            await client.flood(12)
        with contextlib.suppress(KVStoreError, AssertionError):
            await client.get(tokens_of(4))
        rig.device.clear_injected()
        client.step()
        with anyio.fail_after(1):
            await client.put(tokens_of(2, 7000))
            assert 2 * BLOCK == await client.get(tokens_of(2, 7000))


@pytest.mark.parametrize(
    ("call", "nth"),
    [("create_pool", 1), ("create_pool", 2)]
    + [("register_host", nth) for nth in (1, 2, 3, 4, 5, 6)],
)
async def test_c13_a_failed_allocation_at_open_gives_everything_back(call, nth):
    """Open fails with a typed error, and the next open on the same machine works."""
    groups = (PoolGroupConfig("full", 8192), PoolGroupConfig("local", 4096, window=16))
    config = sim_config(groups=groups)
    rig = SimRig.create(config)
    rig.device.inject(call, 2, nth=nth)
    reached = True
    try:
        async with rig.open(config):
            reached = not rig.device.clear_injected()
    except KVStoreError:
        pass
    assert reached
    rig.check_closed()
    again = SimRig.create(config, disk=rig.disk)
    async with again.open(config) as store:
        client = SimClient(store, again, config)
        await client.put(tokens_of(2))


async def test_c14_collection_at_any_point_is_harmless():
    """A garbage collection in every turn of the loop, with dropped handles waiting: no hang."""
    async with opened() as (_, client, rig):
        loop = asyncio.get_running_loop()
        is_on = True

        def collect() -> None:
            gc.collect(0)
            if is_on:
                loop.call_later(1e-5, collect)

        collect()
        await client.put(tokens_of(4))
        rig.faults.add("errno", errno.EIO, opcode=READ)
        await client.flood(20)
        await client.get(tokens_of(4))
        is_on = False
        await asyncio.sleep(1e-3)


async def test_c15_ranks_agree_on_the_smallest_common_prefix():
    """Each rank serves no more than the hook answers, and asks once per match in the same order."""
    asked: list[list[int]] = [[], []]
    limits = [3 * BLOCK, 2 * BLOCK]

    def rank(number: int):
        def agree(tokens: int) -> int:
            asked[number].append(tokens)
            return min(tokens, *limits)

        return dataclasses.replace(sim_config(), agree=agree)

    for number in range(2):
        async with opened(rank(number), seed=number) as (_, client, _rig):
            await client.put(tokens_of(4))
            async with client.session(tokens_of(4)) as session:
                assert session.cached_tokens <= 2 * BLOCK
            assert await client.get(tokens_of(4)) <= 2 * BLOCK
    assert len(asked[0]) == len(asked[1])
    assert asked[0]


async def test_c15_a_rank_that_fails_releases_the_others():
    """An error of the hook reaches the caller and leaves no hold behind."""

    def agree(_tokens: int) -> int:
        raise TimeoutError("rank 3 is gone")

    config = dataclasses.replace(sim_config(), agree=agree)
    async with opened(config) as (store, client, _):
        with pytest.raises(TimeoutError):
            async with client.session(tokens_of(4)) as session:
                await session.resume(client.stream)
        assert store.stats().sessions_open == 0


async def test_c16_a_stalled_disk_never_stops_the_loop():
    """Every write hangs: requests wait or are refused, can be cancelled, and the loop goes on."""
    plan = FaultPlan()
    plan.add("never", opcode=WRITE, count=None)
    config = sim_config(host_pages=0, io={"deadline": 5.0, "drain_timeout": 5.0})
    async with opened(config, faults=plan) as (_, client, _rig):
        await client.put(tokens_of(6))
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await anyio.sleep(0.01)
                beats += 1

        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            with anyio.move_on_after(2) as scope:
                with contextlib.suppress(KVStoreError, AssertionError):
                    await client.flood(30)
                await anyio.sleep(5)
            assert scope.cancelled_caught
            group.cancel_scope.cancel()
        assert 150 <= beats
        plan.clear()
        plan.release()


async def test_c18_one_operation_that_never_completes():
    """Its waiter gets the deadline on time, others go on, the buffer comes back at the end."""
    config = sim_config(host_pages=0, disk_pages=200, io={"deadline": 2.0})
    async with opened(config) as (store, client, rig):
        await _cold(client, 3)
        await client.put(tokens_of(2, 5000))
        await client.flood(60)
        rig.faults.add("never", opcode=READ)
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with client.session(tokens_of(3)) as session:
            restore = await session.resume(client.stream)
            assert loop.time() - start <= 2.5
            with pytest.raises(PagesLost) as caught:
                restore.raise_for_status()
            assert isinstance(caught.value.__cause__, DeadlineError)
        client.step()
        rig.faults.add("never", opcode=READ)
        async with client.session(tokens_of(2, 5000)) as session:
            start = loop.time()
            with pytest.raises(DeadlineError):
                await session.resume(client.stream, deadline=0.5)
            assert 0.5 <= loop.time() - start <= 0.6
        client.step()
        start = loop.time()
        assert 2 * BLOCK == await client.get(tokens_of(2, 5000))
        assert loop.time() - start < 2.1, "its slots count as stalled after the deadline"
        start = loop.time()
        assert 0 == await client.put(tokens_of(2, 8000))
        assert loop.time() - start < 0.1
        assert 2 == rig.faults.held_count, "the memory is quarantined while the pieces are out"
        rig.faults.release()
        await asyncio.sleep(0.1)
        assert 0 == rig.engine.open_count
        await client.flood(20)
        assert store.stats().health in {"ok", "degraded"}


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("call", ["copy_pages", "wait_ticket", "notify", "record", "wait_event"])
async def test_c19_a_failed_launch_behind_a_gate_opens_the_gate(call, nth):
    """Each step after the gate was enqueued fails once: no stream stays parked, the next works."""
    async with opened(sim_config(host_pages=0)) as (store, client, rig):
        await _cold(client)
        rig.device.inject(call, 1, nth=nth)
        with contextlib.suppress(KVStoreError):
            async with client.session(tokens_of(4)) as session:
                restore = await session.resume(client.stream, gated=True)
                await restore.ready()
        rig.device.clear_injected()
        await asyncio.sleep(2)
        assert set() == rig.device.gated_streams
        assert 0 == rig.gate.open_count
        await client.put(tokens_of(2, 9000))
        assert 2 * BLOCK == await client.get(tokens_of(2, 9000))
        assert store.stats().engine.mismatches == 0


async def test_c20_slow_disk_does_not_delay_other_coroutines():
    """At two seconds per operation a keep-alive coroutine stays punctual."""
    plan = FaultPlan()
    plan.add("late", 2 * 10**9, count=None)
    async with opened(sim_config(), faults=plan) as (_, client, _rig):
        loop = asyncio.get_running_loop()
        late: list[float] = []

        async def keep_alive() -> None:
            while True:
                due = loop.time() + 0.05
                await anyio.sleep(0.05)
                late.append(loop.time() - due)

        async with anyio.create_task_group() as group:
            group.start_soon(keep_alive)
            await _cold(client)
            await client.get(tokens_of(4))
            group.cancel_scope.cancel()
        assert max(late) < 0.05
        assert len(late) > 20


@pytest.mark.parametrize("how", ["plain", "cancelled", "interrupted"])
def test_c21_nothing_is_left_at_exit(how, tmp_path):
    """Close under load, on cancellation and on an interrupt: no warning, thread or descriptor."""
    script = f"""
        import asyncio, contextlib, os, signal, sys, threading, time, warnings
        import numpy as np
        import kvstore

        warnings.simplefilter("error")
        HOW = {how!r}
        config = kvstore.StoreConfig(
            block_tokens=16,
            pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=65536),),
            device=kvstore.DeviceTierConfig(gpu_cache_size=16 * 65536),
            host=kvstore.HostTierConfig(host_cache_size=16 * 69632),
            disk=kvstore.DiskTierConfig(
                disk_cache_size=64 * 69632, disk_cache_path={str(tmp_path / "kv")!r}
            ),
            io=kvstore.IoConfig(io_engine="threads", disk_io_threads=2, staging_bytes=4 << 20),
        )

        async def request(store, number):
            with contextlib.suppress(kvstore.KVStoreError):
                await rounds(store, number)

        async def rounds(store, number):
            tokens = np.arange(number * 1000, number * 1000 + 64)
            while True:
                async with store.session(tokens) as session:
                    await session.resume(None)
                    if session.try_grow(64) and session.cached_tokens < 64:
                        session.commit(tokens[session.cached_tokens:])
                    session.suspend(None)
                store.step(None)
                await asyncio.sleep(0)

        async def main():
            async with kvstore.open_store(config) as store:
                tasks = [asyncio.create_task(request(store, n)) for n in range(6)]
                await asyncio.sleep(0.3)
                if HOW == "cancelled":
                    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
                    await asyncio.sleep(60)
                if HOW == "interrupted":
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.sleep(60)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        def left():
            return (threading.active_count(), len(os.listdir("/proc/self/fd")),
                    len(os.listdir("/proc/self/task")))

        before = left()
        try:
            asyncio.run(main())
        except (asyncio.CancelledError, KeyboardInterrupt):
            assert HOW != "plain"
        for _ in range(100):
            if before == left():
                break
            time.sleep(0.02)  # idle workers that were told to end do so in a moment
        assert before == left(), (before, left())
        print("clean")
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "clean\n" == done.stdout, done.stderr
    noise = [line for line in done.stderr.splitlines() if "took" not in line]
    assert [] == noise


async def test_c22_clear_with_writes_in_flight_returns_and_revives_nothing():
    """After the sessions have ended, clear drains background and eviction writes, then 0 hits."""
    plan = FaultPlan()
    plan.add("late", 300_000_000, opcode=WRITE, count=None)
    async with opened(sim_config(write_through=True), faults=plan) as (store, client, rig):
        async with client.session(tokens_of(2)) as session:
            await session.resume(client.stream)
            with pytest.raises((LogicError, KVStoreError), match="session"):
                result = store.clear()  # INV-907: it names the open sessions and does nothing
                if hasattr(result, "__await__"):
                    await result
        await client.put(tokens_of(4))
        await client.flood(20)
        assert rig.engine.open_count > 0
        result = store.clear()
        if hasattr(result, "__await__"):
            await result
        await asyncio.sleep(2)
        assert 0 == store.stats().pages
        assert 0 == await client.get(tokens_of(4))
        disk = store.stats().pools["disk", "full"]
        assert disk.total == disk.ready
        assert rig.engine.open_count == 0


async def test_c13_a_refused_request_blocks_nobody():
    """A request that can never fit raises, and requests behind it go on (INV-335)."""
    async with opened(sim_config(device_pages=8)) as (store, client, _):
        async with client.session(tokens_of(20)) as session:
            await session.resume(client.stream)
            assert not session.try_grow(20 * BLOCK)
            assert await client.grow(session, 4 * BLOCK)
        with anyio.fail_after(1):
            await client.put(tokens_of(4))
        assert store.stats().sessions_open == 0


async def test_c18_requests_without_room_give_up_by_their_deadline():
    """With wait=False a resume that does not fit is refused at once."""
    async with opened(sim_config(device_pages=8)) as (_, client, _rig):
        await client.put(tokens_of(6))
        history = client.history(tokens_of(7, 4000))
        async with client.session(tokens_of(7, 4000)) as other:
            await other.resume(client.stream)
            assert await client.grow(other, 7 * BLOCK)
            client.compute(other, history)
            other.commit(np.array(tokens_of(7, 4000)))
            async with client.session(tokens_of(6)) as session:
                with pytest.raises(OutOfPages):
                    await session.resume(client.stream, wait=False)
            other.suspend(client.stream.record())
        assert 6 * BLOCK == await client.get(tokens_of(6))


async def test_c19_lost_device_publishes_all_tickets():
    """A sticky device error fails the store, and no ticket stays open (INV-917)."""
    config = sim_config(host_pages=0)
    rig = SimRig.create(config)
    with contextlib.suppress(KVStoreError):
        async with rig.open(config) as store:
            client = SimClient(store, rig, config)
            await _cold(client)
            with contextlib.suppress(KVStoreError, DeviceError):
                async with client.session(tokens_of(4)) as session:
                    await session.resume(client.stream, gated=True)
                    rig.device.fail()
                    await asyncio.sleep(0.5)
                    await session.resume(client.stream)
    assert 0 == rig.gate.open_count
    assert 0 == rig.engine.stats().classes[IoClass.READ].inflight_bytes


async def test_c13_a_restore_that_needs_a_second_turn_does_not_block_the_queue():
    """A page fails, the window moves, more pages are needed while another restore waits (INV-416).

    The first restore gives its locks up while it waits; otherwise it would wait behind the second
    one, and the second one for its slots, for ever.
    """
    groups = (PoolGroupConfig("full", 8192), PoolGroupConfig("local", 4096, window=16))
    async with opened(sim_config(groups=groups, device_pages=8, host_pages=0)) as (_, client, rig):
        await client.put(tokens_of(6))
        await client.put(tokens_of(6, 5000))
        await client.flood(16)
        rig.faults.add("errno", errno.EIO, opcode=READ, file_id=0, nth=5)
        found: dict[int, int] = {}

        async def ask(base: int) -> None:
            found[base] = await client.get(tokens_of(6, base))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(ask, 0)
                group.start_soon(ask, 5000)
        assert 1 == rig.faults.hit_count
        assert {0: 5 * BLOCK, 5000: 6 * BLOCK} == found


async def test_c18_growing_onto_the_slot_of_a_hung_transfer_ends_by_the_deadline():
    """The slot does not drain while the read hangs: the grower is told, others go on, and the
    slot is back when the read is (INV-119).
    """
    config = sim_config(device_pages=4, host_pages=0, disk_pages=64, io={"deadline": 2.0})
    async with opened(config) as (store, client, rig):
        await client.put(tokens_of(2))
        await client.flood(8)
        rig.faults.add("never", opcode=READ)
        with pytest.raises(DeadlineError):
            async with client.session(tokens_of(2)) as session:
                await session.resume(client.stream, deadline=0.5)
        client.step()
        with anyio.fail_after(5):
            async with client.session(tokens_of(4, 9000)) as session:
                await session.resume(client.stream)
                try:
                    grown = await client.grow(session, 4 * BLOCK)
                except DeadlineError:
                    grown = False
                assert not grown
        client.step()
        await client.put(tokens_of(2, 7000))
        assert 1 == rig.faults.release()
        await asyncio.sleep(1)
        await client.put(tokens_of(4, 5000))
        assert 0 == store.stats().sessions_open
