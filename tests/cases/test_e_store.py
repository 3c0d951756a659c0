"""Cases C41 to C49: latency of a whole store, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import anyio
import pytest

from kvstore._uring.base import Opcode
from kvstore.config import IoClass, slot_bytes
from kvstore.testing import FaultPlan, sim_config

from .opening import BLOCK, opened, tokens_of  # noqa: TID252

PAGE = 8192
READ, WRITE = Opcode.READ, Opcode.WRITE


async def test_c41_the_cost_of_a_restore_is_known_before_it_starts():
    """The estimate is above zero for a cold prefix, zero for a resident one, and moves nothing."""
    config = sim_config(host_pages=0)
    async with opened(config, engine={"bytes_per_s": 4 << 20}) as (store, client, _):
        await client.put(tokens_of(6))
        async with client.session(tokens_of(6)) as session:
            warm = session.estimate_restore()
        await client.flood(40)
        before = store.stats().engine.classes[IoClass.READ].transfers
        async with client.session(tokens_of(6)) as session:
            cold = session.estimate_restore()
            assert before == store.stats().engine.classes[IoClass.READ].transfers
        assert _seconds(warm) < _seconds(cold)
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert 6 * BLOCK == await client.get(tokens_of(6))
        took = loop.time() - start
        assert took >= 6 * slot_bytes(PAGE) / (4 << 20)


def _seconds(estimate: object) -> float:
    return float(getattr(estimate, "seconds", estimate))  # type: ignore[arg-type]


async def test_c41_c42_a_long_prefix_keeps_many_reads_in_flight():
    """A restore of many blocks is one batch: as many reads at once as staging holds."""
    config = sim_config(
        device_pages=16, host_pages=0, disk_pages=64, io={"staging_bytes": 8 * slot_bytes(PAGE)}
    )
    async with opened(config, engine={"latency_ns": (10**6, 10**6)}) as (_, client, rig):
        await client.put(tokens_of(14))
        await client.flood(48)
        inflight, most = 0, 0
        original = rig.engine.faults.decide

        def decide(io_class, opcode, *rest):
            nonlocal most
            most = max(most, rig.engine.open_count)
            return original(io_class, opcode, *rest)

        rig.engine.faults.decide = decide  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert 14 * BLOCK == await client.get(tokens_of(14))
        assert most >= 8
        assert loop.time() - start < 14 * 1e-3, "the reads did not overlap"
        assert inflight == 0


async def test_c42_one_host_copy_per_loaded_byte():
    """A disk to device restore crosses host memory once: one read and one copy per page."""
    async with opened(sim_config(host_pages=8)) as (store, client, rig):
        await client.put(tokens_of(5))
        await client.flood(40)
        from kvstore.devices.base import CopyDirection

        read_before = store.stats().engine.classes[IoClass.READ].read_bytes
        copied_before = rig.device.copied_bytes[CopyDirection.TO_DEVICE]
        assert 5 * BLOCK == await client.get(tokens_of(5))
        stats = store.stats()
        read = stats.engine.classes[IoClass.READ].read_bytes - read_before
        copied = rig.device.copied_bytes[CopyDirection.TO_DEVICE] - copied_before
        assert read == 5 * slot_bytes(PAGE)
        assert copied == 5 * PAGE


async def test_c46_an_awaited_prefetch_wakes_nobody_until_it_completes():
    """A prefetch held for a second: no completion and no loop turn on its behalf before."""
    async with opened(sim_config(device_pages=8, host_pages=8)) as (_, client, rig):
        await client.put(tokens_of(2))
        await client.flood(40)
        await asyncio.sleep(10)
        rig.faults.add("late", 10**9, opcode=READ, count=None)
        async with client.session(tokens_of(2)) as session:
            handle = session.prefetch("host")
            await asyncio.sleep(0.1)
            before = rig.completions.wakeup_count
            turns = 0
            loop = asyncio.get_running_loop()
            original = loop._run_once  # type: ignore[attr-defined]

            def run_once() -> None:
                nonlocal turns
                turns += 1
                original()

            loop._run_once = run_once  # type: ignore[attr-defined]
            await asyncio.sleep(0.7)
            loop._run_once = original  # type: ignore[attr-defined]
            assert before == rig.completions.wakeup_count
            assert turns <= 4
            await handle
        rig.faults.clear()
        assert 2 * BLOCK == await client.get(tokens_of(2))


async def test_c47_prefetches_of_waiting_requests_stay_in_their_budget():
    """Hundreds of queued requests prefetch: the budget holds, and a demand load finds room."""
    config = sim_config(device_pages=8, host_pages=16, disk_pages=256)
    async with opened(config) as (store, client, rig):
        for number in range(40):
            await client.put(tokens_of(4, number * 1000))
        await client.flood(40)
        await asyncio.sleep(1)
        rig.faults.add("late", 10**8, opcode=READ, count=None)
        budget = int(config.prefetch_fraction * 16)
        most = 0

        async def waiting(number: int) -> None:
            nonlocal most
            async with client.session(tokens_of(4, number * 1000)) as session:
                handle = session.prefetch("host")
                with anyio.move_on_after(0.3), contextlib.suppress(Exception):
                    await handle
                most = max(most, rig.engine.stats().classes[IoClass.READ].transfers)

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(waiting, number)
            await asyncio.sleep(0.05)
            in_flight = rig.engine.open_count
            assert in_flight <= budget
            assert 4 * BLOCK == await client.get(tokens_of(4, 39_000))
        rig.faults.clear()
        assert store.stats().sessions_open == 0


async def test_c49_with_write_through_a_load_waits_for_no_eviction_write():
    """Host full, disk with room: pages leave the host by taking their copies back, so a load
    issues no required write in the steady state (INV-611; the store has no watermarks).
    """
    config = sim_config(device_pages=8, host_pages=16, disk_pages=256, write_through=True)
    async with opened(config) as (store, client, _):
        for number in range(24):
            await client.put(tokens_of(4, number * 1000))
            await asyncio.sleep(0.1)  # the background copies are written meanwhile
        required = store.stats().engine.classes[IoClass.REQUIRED].transfers
        for number in range(24):
            assert 4 * BLOCK == await client.get(tokens_of(4, number * 1000))
            await asyncio.sleep(0.1)
        assert required == store.stats().engine.classes[IoClass.REQUIRED].transfers
        assert store.stats().write_through_issued > 0


async def test_c49_without_write_through_the_same_load_writes():
    """The check above can fail: plain eviction writes on the way of the load."""
    config = sim_config(device_pages=8, host_pages=16, disk_pages=256)
    async with opened(config) as (store, client, _):
        for number in range(24):
            await client.put(tokens_of(4, number * 1000))
            await asyncio.sleep(0.1)
        required = store.stats().engine.classes[IoClass.REQUIRED].transfers
        for number in range(24):
            assert 4 * BLOCK == await client.get(tokens_of(4, number * 1000))
            await asyncio.sleep(0.1)
        assert required < store.stats().engine.classes[IoClass.REQUIRED].transfers


@pytest.mark.parametrize("engine", [{"latency_ns": (2 * 10**6, 4 * 10**6)}])
async def test_c44_many_operations_cost_the_loop_few_turns(engine):
    """Pages travel in batches: far fewer wake-ups and submits than pages."""
    config = sim_config(
        device_pages=64,
        host_pages=0,
        disk_pages=256,
        io={"staging_bytes": 64 * slot_bytes(PAGE)},
        check_invariants=False,
    )
    async with opened(config, engine=engine) as (store, client, _):
        await client.put(tokens_of(60))
        calls = store.stats().engine.submit_calls
        await client.put(tokens_of(60, 5000))
        await asyncio.sleep(1)
        engine = store.stats().engine
        assert engine.classes[IoClass.REQUIRED].transfers >= 56
        assert engine.submit_calls - calls <= 6


async def test_c46_no_wakeups_when_idle():
    """An idle store schedules nothing at all on the loop."""
    plan = FaultPlan()
    async with opened(faults=plan) as (_, client, rig):
        await client.put(tokens_of(3))
        await asyncio.sleep(60)
        before = rig.completions.wakeup_count
        loop = asyncio.get_running_loop()
        timers = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        await asyncio.sleep(3600)
        assert before == rig.completions.wakeup_count
        assert [] == timers
