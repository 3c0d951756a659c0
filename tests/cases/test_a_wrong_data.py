"""Cases C01 to C12: wrong data. put is commit plus eviction, get is resume, lookup is match."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import numpy as np
import pytest

from kvstore._uring.base import Opcode
from kvstore.config import HEADER_BYTES, IoClass, PoolGroupConfig
from kvstore.errors import ConfigError, PagesLost
from kvstore.testing import FaultPlan, SimDevice, SimDisk, sim_config

from .opening import BLOCK, opened, tokens_of  # noqa: TID252

READ, WRITE = Opcode.READ, Opcode.WRITE


async def test_c01_a_half_failed_batch_serves_exactly_the_blocks_that_were_read():
    """One unreadable block of six: the blocks before it are served right, nothing after it is."""
    async with opened(sim_config(host_pages=0)) as (_, client, rig):
        await client.put(tokens_of(6))
        await client.flood(40)
        rig.faults.add("errno", errno.EIO, opcode=READ, nth=3)
        history = client.history(tokens_of(6))
        async with client.session(tokens_of(6)) as session:
            assert 6 * BLOCK == session.cached_tokens
            restore = await session.resume(client.stream)
            assert restore.valid_tokens < 6 * BLOCK
            assert restore.valid_tokens % BLOCK == 0
            assert restore.failed_pages
            assert restore.first_failed_token == restore.valid_tokens
            with pytest.raises(PagesLost):
                restore.raise_for_status()
            client.verify(session, history, restore.valid_tokens)
            await client.settle()
            table = session.page_table("full")
            assert restore.valid_tokens // BLOCK == len([slot for slot in table if slot >= 0])
        assert 1 == rig.faults.hit_count


async def test_c01_short_of_room_nothing_half_read_is_visible():
    """With staging for two pages and poison in the landing slots six pages come back exact."""
    slot = 8192 + HEADER_BYTES
    async with opened(sim_config(host_pages=0, io={"staging_bytes": 2 * slot})) as (_, client, rig):
        await client.put(tokens_of(6))
        await client.flood(40)
        assert 6 * BLOCK == await client.get(tokens_of(6))
        assert 0 == rig.engine.stats().mismatches


async def test_c02_a_block_is_invisible_until_it_is_committed():
    """Another session misses while the block is computed, and gets exact bytes after the commit."""
    async with opened() as (store, client, _):
        history = client.history(tokens_of(2))
        async with client.session(tokens_of(2)) as session:
            await session.resume(client.stream)
            assert await client.grow(session, 2 * BLOCK)
            client.compute(session, history, duration_ns=10**9)
            assert 0 == await client.get(tokens_of(2))
            async with client.session(tokens_of(2)) as other:
                assert 0 == other.cached_tokens
            session.commit(np.array(tokens_of(2)))
            async with client.session(tokens_of(2)) as other:
                assert 2 * BLOCK == other.cached_tokens
            session.suspend(client.stream.record())
        assert 2 * BLOCK == await client.get(tokens_of(2))
        assert store.stats().sessions_open == 0


async def test_c03_eviction_waits_for_the_kernel_that_fills_the_block():
    """The copy out of the device is ordered behind the writing kernel, into every lower tier."""
    async with opened() as (store, client, _):
        history = client.history(tokens_of(4))
        async with client.session(tokens_of(4)) as session:
            await session.resume(client.stream)
            assert await client.grow(session, 4 * BLOCK)
            client.compute(session, history, duration_ns=500_000_000)
            session.commit(np.array(tokens_of(4)))
            session.suspend(client.stream.record())
        await client.flood(12)  # to the host
        assert 4 * BLOCK == await client.get(tokens_of(4))
        await client.flood(40)  # to the disk
        assert 4 * BLOCK == await client.get(tokens_of(4))
        assert store.stats().engine.mismatches == 0


async def test_c04_the_source_may_be_reused_only_when_its_bytes_are_safe():
    """Slow eviction writes: the device slots go to other requests, and each gets its own bytes."""
    plan = FaultPlan()
    plan.add("late", 50_000_000, opcode=WRITE, count=None)
    async with opened(sim_config(host_pages=4), faults=plan) as (_, client, rig):
        for number in range(8):
            await client.put(tokens_of(4, number * 1000))
        for number in reversed(range(8)):
            assert await client.get(tokens_of(4, number * 1000)) in {0, 32}
        assert client.model.checked_pages >= 32
        assert rig.engine.stats().mismatches == 0
        assert plan.hit_count > 0


async def test_c04_a_write_that_fails_is_counted_and_visible():
    """A block whose eviction write failed is a miss, counted, and never another's bytes."""
    async with opened(sim_config(host_pages=0)) as (store, client, rig):
        await client.put(tokens_of(4))
        rig.faults.add("errno", errno.EIO, opcode=WRITE, count=4)
        await client.flood(12)
        rig.faults.clear()
        valid = await client.get(tokens_of(4))
        assert valid < 4 * BLOCK
        stats = store.stats()
        assert {errno.EIO: 4} == stats.engine.classes[IoClass.REQUIRED].errors


@pytest.mark.parametrize("failing", [0, 1])
async def test_c05_two_writers_of_one_key_one_of_them_failing(failing):
    """Both orders: each reader gets the complete value or a miss, never a mixture."""
    async with opened(sim_config(host_pages=0, disk_pages=24)) as (store, client, rig):
        history = client.history(tokens_of(3))
        async with client.session(tokens_of(3)) as first, client.session(tokens_of(3)) as second:
            for session in (first, second):
                await session.resume(client.stream)
                assert await client.grow(session, 3 * BLOCK)
                client.compute(session, history)
            first.commit(np.array(tokens_of(3)))
            second.commit(np.array(tokens_of(3)))
            client.verify(first, history, 3 * BLOCK)
            client.verify(second, history, 3 * BLOCK)
            await client.settle()
            for session in (first, second):
                session.suspend(client.stream.record())
        assert 3 == store.stats().pages
        rig.faults.add("errno", errno.EIO, opcode=WRITE, nth=failing)
        await client.flood(12)
        rig.faults.clear()
        valid = await client.get(tokens_of(3))
        assert valid in {0, BLOCK, 2 * BLOCK, 3 * BLOCK}
        await client.put(tokens_of(3))
        assert 3 * BLOCK == await client.get(tokens_of(3))


FINGERPRINT = "model/rev1/bf16/hnd/tp0of2"


async def _restart(disk: SimDisk, config, blocks: int) -> int:
    """Open a store over what the last one left; returns how many tokens it serves."""
    async with opened(config, disk=disk) as (_, client, _rig):
        await asyncio.sleep(5)
        return await client.get(tokens_of(blocks))


async def _persist(config) -> SimDisk:
    disk = SimDisk()
    async with opened(config, disk=disk) as (store, client, _):
        await client.put(tokens_of(4))
        await store.aclose(flush=True)
    return disk


async def test_c06_another_fingerprint_serves_nothing():
    """One part changed at a time: no hit and no error. Unchanged: hits as before (INV-919)."""
    config = sim_config(fingerprint=FINGERPRINT)
    disk = await _persist(config)
    assert 4 * BLOCK == await _restart(disk.copy(), config, 4)
    for changed in (
        "other/rev1/bf16/hnd/tp0of2",
        "model/rev2/bf16/hnd/tp0of2",
        "model/rev1/fp8/hnd/tp0of2",
        "model/rev1/bf16/nhd/tp0of2",
        "model/rev1/bf16/hnd/tp1of2",
        "model/rev1/bf16/hnd/tp0of4",
    ):
        assert 0 == await _restart(disk.copy(), sim_config(fingerprint=changed), 4)
    assert 0 == await _restart(disk.copy(), sim_config(fingerprint=FINGERPRINT, page_bytes=4096), 4)


async def test_c06_after_a_new_epoch_nothing_comes_back():
    """bump_epoch and clear empty every tier, also for a store that is opened later (INV-925)."""
    config = sim_config(fingerprint=FINGERPRINT)
    disk = SimDisk()
    async with opened(config, disk=disk) as (store, client, _):
        await client.put(tokens_of(4))
        await client.flood(40)
        await _maybe(store.bump_epoch())
        assert 0 == await client.get(tokens_of(4))
    assert 0 == await _restart(disk, config, 4)


async def _maybe(value):
    """Await what a call returned if it is awaitable."""
    return await value if asyncio.iscoroutine(value) or hasattr(value, "__await__") else value


async def test_c07_salts_share_nothing_anywhere():
    """Two salts, equal tokens: no hit across, in lookup, get, prefetch and after a restart."""
    config = sim_config(fingerprint=FINGERPRINT)
    disk = SimDisk()
    async with opened(config, disk=disk) as (store, client, _):
        await client.put(tokens_of(4), b"tenant-a")
        assert 0 == await client.get(tokens_of(4), b"tenant-b")
        assert 0 == await client.get(tokens_of(4))
        async with client.session(tokens_of(4), salt=b"tenant-b") as session:
            assert 0 == session.cached_tokens
            assert 0 == sum(session.cached_tokens_by_level.values())
        assert 4 * BLOCK == await client.get(tokens_of(4), b"tenant-a")
        async with client.session(tokens_of(4), salt=b"tenant-a", adapter=b"lora") as session:
            assert 0 == session.cached_tokens
        await store.aclose(flush=True)
    async with opened(config, disk=disk) as (_, client, _rig):
        await asyncio.sleep(5)
        assert 0 == await client.get(tokens_of(4), b"tenant-b")
        assert 4 * BLOCK == await client.get(tokens_of(4), b"tenant-a")


@pytest.mark.parametrize("length", [1, 511, 4096, HEADER_BYTES + 8192 - 1])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("opcode", [READ, WRITE])
async def test_c09_short_completions_are_continued_exactly(length, count, opcode):
    """Reads and writes shortened once and repeatedly: the data is byte-exact."""
    plan = FaultPlan()
    plan.add("short", length, opcode=opcode, count=count)
    async with opened(sim_config(host_pages=0), faults=plan) as (store, client, _):
        await client.put(tokens_of(6))
        await client.flood(40)
        assert 6 * BLOCK == await client.get(tokens_of(6))
        assert plan.hit_count > 0
        assert store.stats().engine.short_transfers > 0
        assert store.stats().engine.mismatches == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
async def test_c10_a_full_disk_never_reports_success(code):
    """ENOSPC and EFBIG on every write: the entry is absent, used slots are unchanged."""
    async with opened(sim_config(host_pages=0)) as (store, client, rig):
        await client.put(tokens_of(4))
        rig.faults.add("errno", code, opcode=WRITE, count=None)
        await client.flood(30)
        await asyncio.sleep(1)
        disk = store.stats().pools["disk", "full"]
        assert disk.total == disk.ready + disk.draining
        rig.faults.clear()
        assert 0 == await client.get(tokens_of(4))
        await client.flood(30)
        assert store.stats().pools["disk", "full"].primaries > 0


@pytest.mark.parametrize("kind", ["zero", "short"])
async def test_c11_the_recovery_scan_continues_or_misses(kind):
    """Reads shortened during recovery: each page is whole or a miss, and the store opens."""
    config = sim_config(fingerprint=FINGERPRINT)
    disk = await _persist(config)
    plan = FaultPlan()
    plan.add(kind, 1, opcode=READ, count=6)
    async with opened(config, disk=disk, faults=plan) as (_, client, _rig):
        await asyncio.sleep(5)
        valid = await client.get(tokens_of(4))
        assert valid % BLOCK == 0
        await client.put(tokens_of(4))
        assert 4 * BLOCK == await client.get(tokens_of(4))


async def test_c12_a_strided_target_is_refused_before_any_io():
    """Tensors whose pages are not contiguous behind block_dim are a typed error at open."""
    device = SimDevice()
    base = np.zeros((6, 4, 2, 1024), np.uint8)
    with pytest.raises(ConfigError) as refused:
        device.adopt_pool("full", [base[:, :, ::2]], 0, 4096)
    assert "tensors" == refused.value.field


async def test_c12_gaps_between_pages_stay_untouched():
    """Pages that lie apart in a larger tensor arrive exactly, the bytes between them stay."""
    rows = np.full((12, 2, 8192), 0x77, np.uint8)
    config = sim_config(device_pages=12)
    config = dataclasses.replace(
        config,
        device=dataclasses.replace(config.device, gpu_cache_size=0, tensors={"full": [rows[:, 0]]}),
    )
    async with opened(config) as (_, client, _rig):
        client.model.pages = lambda pool, group: rows[:, 0]  # type: ignore[method-assign]
        await client.put(tokens_of(4))
        await client.flood(40)
        assert 4 * BLOCK == await client.get(tokens_of(4))
    assert (rows[:, 1] == 0x77).all()


async def test_c08_slots_in_flight_are_never_reused():
    """Slow transfers in both directions on a small store: every owner's bytes are exact."""
    plan = FaultPlan()
    plan.add("late", 5_000_000, count=None)
    config = sim_config(device_pages=8, host_pages=4, disk_pages=24)
    async with opened(config, faults=plan, device={"latency_ns": (10**6, 10**7)}) as (
        store,
        client,
        _,
    ):
        groups = [tokens_of(3, number * 1000) for number in range(10)]
        for tokens in groups * 3:
            await client.put(tokens)
            client.step()
        assert client.model.checked_pages >= 90
        assert store.stats().engine.mismatches == 0


async def test_c11_two_groups_short_reads_of_either():
    """A short read of a sliding-window page is continued like one of a full-attention page."""
    groups = (PoolGroupConfig("full", 8192), PoolGroupConfig("local", 4096, window=16))
    plan = FaultPlan()
    plan.add("short", 4096, opcode=READ, count=None)
    async with opened(sim_config(groups=groups), faults=plan) as (_, client, _rig):
        await client.put(tokens_of(5))
        await client.flood(40)
        assert 5 * BLOCK == await client.get(tokens_of(5))
        assert plan.hit_count > 0
