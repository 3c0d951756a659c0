"""Cases C31 to C40: disk, file system, permissions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvstore._uring.base import Opcode
from kvstore.config import DiskTierConfig, IoClass, Tier, slot_bytes
from kvstore.core.planner import Refusal
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import Tables
from kvstore.errors import BusyError, CapacityError, ConfigError, OutOfPages
from kvstore.keys import BlockKey
from kvstore.testing import FaultPlan, SimClient, SimDisk, SimRig, sim_config

from .opening import BLOCK, opened, tokens_of  # noqa: TID252

PAGE = 8192
READ, WRITE = Opcode.READ, Opcode.WRITE


async def test_c31_writes_that_all_fail_show_in_health():
    """Every write answers EINVAL: data stays right, health says degraded, the errno is counted."""
    plan = FaultPlan()
    plan.add("errno", errno.EINVAL, opcode=WRITE, count=None)
    async with opened(sim_config(host_pages=0), faults=plan) as (store, client, _):
        await client.put(tokens_of(4))
        await client.flood(40)
        await asyncio.sleep(1)
        assert errno.EINVAL in store.stats().engine.classes[IoClass.REQUIRED].errors
        assert "ok" != store.stats().health
        assert 0 == await client.get(tokens_of(4))


@pytest.mark.parametrize("page_bytes", [5000, 8192, 8193, 12288 - 1])
async def test_c34_every_request_is_aligned_and_bytes_are_exact(page_bytes):
    """Any page size: each request is aligned in offset and length, each page keeps its bytes."""
    async with opened(sim_config(page_bytes=page_bytes, host_pages=0)) as (_, client, rig):
        seen: list[tuple[int, int]] = []
        rig.engine.on_dispatch = lambda c, o, f, offset, length: seen.append((offset, length))
        await client.put(tokens_of(5))
        await client.flood(40)
        assert 5 * BLOCK == await client.get(tokens_of(5))
        assert seen
        assert all(offset % 4096 == 0 for offset, _ in seen)
        assert all(length % 4096 == 0 for _, length in seen)


async def test_c32_a_padded_page_gives_no_warning(caplog):
    """A page size that is no multiple of the alignment is padded without a warning."""
    async with opened(sim_config(page_bytes=5000)) as (_, client, _rig):
        await client.put(tokens_of(3))
        await client.flood(40)
        assert 3 * BLOCK == await client.get(tokens_of(3))
    assert not [record for record in caplog.records if "align" in record.getMessage().lower()]


async def _persist(blocks: int = 4, **fields) -> tuple[SimDisk, object]:
    config, disk = sim_config(fingerprint="m", **fields), SimDisk()
    async with opened(config, disk=disk) as (store, client, _):
        await client.put(tokens_of(blocks))
        await store.aclose(flush=True)
    return disk, config


async def test_c35_what_a_restart_finds_counts_against_the_limit():
    """Reopened half full: found pages are counted, and further writes stay within the capacity."""
    disk, config = await _persist(10, disk_pages=20)
    async with opened(config, disk=disk) as (store, client, _):
        await asyncio.sleep(5)
        pool = store.stats().pools["disk", "full"]
        assert 10 == pool.primaries
        before = disk.used_bytes
        await client.flood(60)
        await asyncio.sleep(1)
        pool = store.stats().pools["disk", "full"]
        assert pool.primaries + pool.copies <= pool.total == 20
        assert before == disk.used_bytes


async def test_c35_a_second_store_on_one_directory_is_refused():
    """Two owners of one file would destroy each other's slots (INV-923)."""
    config, disk = sim_config(fingerprint="m"), SimDisk()
    async with opened(config, disk=disk):
        second = SimRig.create(config, disk=disk)
        with pytest.raises(BusyError):
            async with second.open(config):
                pass


async def test_c35_no_space_while_preallocating_is_one_error_and_leaves_nothing():
    """The error names the bytes needed and free, and no file stays behind."""
    disk = SimDisk(capacity_bytes=10 * slot_bytes(PAGE))
    config = sim_config(fingerprint="m")
    rig = SimRig.create(config, disk=disk)
    with pytest.raises(CapacityError) as caught:
        async with rig.open(config):
            pass
    assert caught.value.needed > caught.value.available
    assert 0 == disk.used_bytes
    rig.check_closed()


def test_c36_a_disk_tier_without_a_capacity_is_a_configuration_error():
    """There is no unbounded file tier."""
    for size in (0, -1):
        with pytest.raises(ConfigError) as caught:
            DiskTierConfig(disk_cache_size=size, disk_cache_path="/kv")
        assert "disk_cache_size" == caught.value.field


async def test_c36_three_times_the_capacity_never_goes_above_it():
    """Writing far more than fits keeps every tier inside its slots."""
    async with opened(sim_config(disk_pages=16)) as (store, client, rig):
        used = rig.disk.used_bytes
        for _ in range(12):
            await client.flood(8)
            pool = store.stats().pools["disk", "full"]
            assert pool.primaries + pool.copies <= 16
            assert used == rig.disk.used_bytes


async def test_c37_cut_at_each_write_step_then_reopened(seed):
    """A crash in the middle of each write: prefix-consistent, no torn value, no orphaned space."""
    config, disk = sim_config(fingerprint="m", host_pages=0, disk_pages=24), SimDisk()
    rig = SimRig.create(config, disk=disk, seed=seed)
    random = Random(seed)
    with contextlib.suppress(Exception):
        async with rig.open(config) as store:
            client = SimClient(store, rig, config)
            await client.put(tokens_of(6))
            loop = asyncio.get_running_loop()
            loop.call_later(random.random() * 4e-3, rig.engine.crash)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.flood(20)
            snapshot = disk.copy()
            raise ConnectionError("the power is off")
    async with opened(config, disk=snapshot) as (store, client, _):
        await asyncio.sleep(5)
        valid = await client.get(tokens_of(6))  # get compares every byte it is served
        assert valid % BLOCK == 0
        await client.put(tokens_of(6))
        await client.flood(24)
        assert 6 * BLOCK == await client.get(tokens_of(6))
        pool = store.stats().pools["disk", "full"]
        assert pool.total == pool.ready + pool.draining + pool.primaries + pool.copies


SEEDS = 24


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_c38_directory_and_files_are_private(mask, tmp_path):
    """Whatever the umask: directory 0700, files 0600, and a failed open leaves no file."""
    from kvstore.tiers.disk import OsSlotFiles

    files = OsSlotFiles()
    old = os.umask(mask)
    try:
        lock = files.lock(str(tmp_path / "kv"))
        file = files.open(str(tmp_path / "kv"), "full.0.slots", 1 << 20, "auto")
        files.close(file)
        files.unlock(lock)
    finally:
        os.umask(old)
    assert 0o700 == stat.S_IMODE((tmp_path / "kv").stat().st_mode)
    assert 0o600 == stat.S_IMODE((tmp_path / "kv" / "full.0.slots").stat().st_mode)
    with pytest.raises(CapacityError):
        files.open(str(tmp_path / "kv"), "huge.0.slots", 1 << 50, "auto")
    assert ["full.0.slots"] == sorted(path.name for path in (tmp_path / "kv").iterdir())


def test_c38_symlinks_and_shared_directories_are_refused(tmp_path):
    """A symlink, a world-writable directory and a linked file are typed errors."""
    from kvstore.tiers.disk import OsSlotFiles

    files = OsSlotFiles()
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(ConfigError):
        files.lock(str(tmp_path / "link"))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError):
        files.lock(str(shared))
    (real / "full.0.slots").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((ConfigError, OSError)):
        files.open(str(real), "full.0.slots", 1 << 20, "auto")
    assert not (tmp_path / "elsewhere").exists()


async def test_c39_without_a_free_slot_the_refusal_is_typed_and_counted():
    """Every device slot locked: grow is refused, counted by one, stored entries are intact."""
    config = sim_config(device_pages=6, host_pages=4)
    async with opened(config) as (store, client, _):
        await client.put(tokens_of(3))
        history = client.history(tokens_of(6, 5000))
        async with client.session(tokens_of(6, 5000)) as session:
            await session.resume(client.stream)
            assert await client.grow(session, 6 * BLOCK)
            client.compute(session, history)
            session.commit(np.array(tokens_of(6, 5000)))
            before = store.stats()
            async with client.session(tokens_of(1, 9000)) as other:
                with pytest.raises(OutOfPages) as caught:
                    await other.resume(client.stream, wait=False)
                    if not other.try_grow(BLOCK):
                        raise OutOfPages("grow", level=0, pool_group="full", needed=1, available=0)
                assert caught.value.needed >= 1
            after = store.stats()
            assert before.plans_refused + 1 == after.plans_refused
            session.suspend(client.stream.record())
        assert 3 * BLOCK == await client.get(tokens_of(3))
        assert 6 * BLOCK == await client.get(tokens_of(6, 5000))


async def test_c40_the_write_counter_is_the_scripted_bytes():
    """Nine pages evicted to disk once are nine slots of bytes, and a second eviction of a kept
    copy writes nothing.
    """
    config = sim_config(device_pages=9, host_pages=0, keep_disk=True)
    async with opened(config) as (store, client, _):
        await client.put(tokens_of(9))
        await client.put(tokens_of(9, 5000))
        await asyncio.sleep(1)
        engine = store.stats().engine
        assert 9 * slot_bytes(PAGE) == engine.classes[IoClass.REQUIRED].written_bytes
        assert 9 * BLOCK == await client.get(tokens_of(9))
        assert 9 * BLOCK == await client.get(tokens_of(9, 5000))
        await asyncio.sleep(1)
        engine = store.stats().engine
        assert 18 * slot_bytes(PAGE) == engine.classes[IoClass.REQUIRED].written_bytes
        assert 0 == engine.classes[IoClass.BACKGROUND].written_bytes


def _replay(trace: Path, uses: int | None) -> int:
    """Run the block ids of a trace through the tables; returns the pages written to disk."""
    tables = Tables(
        TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=(
                LevelSpec(tier=Tier.DEVICE, slot_counts=(400,)),
                LevelSpec(tier=Tier.DISK, slot_counts=(200_000,), keep_copy=True),
            ),
            block_tokens=512,
            selective_uses=uses,
        )
    )
    written = 0
    keys: dict[int, BlockKey] = {}

    def settle() -> None:
        nonlocal written
        while (outbox := tables.take_outbox()).start:
            for move in outbox.start:
                written += tables.tiers[move.target.level] is Tier.DISK
                tables.move_done(move)
                if move.target.level == 0:
                    tables.lock([move.page])

    for line in trace.read_text(encoding="utf-8").splitlines():
        chain = [
            keys.setdefault(number, BlockKey(hashlib.sha256(str(number).encode()).digest()))
            for number in json.loads(line)["hash_ids"]
        ]
        match = tables.match(chain)
        pages = list(match.pages[0])
        tables.hold(pages)
        resident = [page for page in pages if page.level == 0]
        plan = tables.plan_restore([pages], [len(chain) - match.block_count])
        assert not isinstance(plan, Refusal), plan
        applied = tables.apply(plan)
        tables.lock(resident)
        settle()
        parent = pages[-1] if pages else None
        for index, page in enumerate(applied.new_pages[0], match.block_count):
            parent = tables.commit(page, chain[index], parent, index)
            pages.append(parent)
        tables.fence_passed(tables.rotate_step_fence())
        tables.unlock(pages)
        tables.unhold(pages)
        settle()
    # evict what is left on the device
    plan = tables.plan_grow([400])
    assert not isinstance(plan, Refusal), plan
    tables.apply(plan)
    settle()
    return written


@pytest.mark.parametrize(("uses", "expected"), [(None, 99_716), (2, 23_399)])
def test_c40_blocks_written_for_the_conversation_trace(trace_path, uses, expected):
    """First 6,000 conversation rows, unlimited capacity: all blocks, or those used twice."""
    rows = trace_path.read_text(encoding="utf-8").count("\n")
    if rows != 6000 or "conversation" not in trace_path.name:
        pytest.skip("the figures belong to the first 6,000 conversation rows")
    assert expected == _replay(trace_path, uses)


def test_c33_preallocation_writes_nothing_unaligned(tmp_path, monkeypatch):
    """Space is taken with fallocate; what is written at open is aligned in offset and length."""
    from kvstore.tiers.disk import OsSlotFiles

    seen: list[tuple[int, int]] = []
    for name in ("pwrite", "pwritev", "write"):
        original = getattr(os, name)

        def spy(fd, data, offset=0, *rest, call=original):
            size = len(data) if isinstance(data, bytes) else sum(len(part) for part in data)
            seen.append((offset, size))
            return call(fd, data, offset, *rest) if offset or rest else call(fd, data, offset)

        monkeypatch.setattr(os, name, spy)
    files = OsSlotFiles()
    lock = files.lock(str(tmp_path / "kv"))
    file = files.open(str(tmp_path / "kv"), "full.0.slots", 8 << 20, "auto")
    assert (tmp_path / "kv" / "full.0.slots").stat().st_size >= 8 << 20
    assert all(offset % 4096 == 0 and size % 4096 == 0 for offset, size in seen)
    files.close(file)
    files.unlock(lock)


async def test_c35_ranks_need_directories_of_their_own():
    """One store per rank: each has its own limit, and a shared directory is refused."""
    config = sim_config(fingerprint="m/tp0of2")
    disk = SimDisk()
    other = dataclasses.replace(
        config,
        fingerprint="m/tp1of2",
        disk=dataclasses.replace(config.disk, disk_cache_path="/simulated-1"),
    )
    first, second = SimRig.create(config, disk=disk), SimRig.create(other, disk=disk)
    async with first.open(config) as store, second.open(other) as twin:
        await SimClient(store, first, config).put(tokens_of(3))
        await SimClient(twin, second, other).put(tokens_of(3))
        assert 48 == store.stats().pools["disk", "full"].total
        assert 2 == disk.lock_count
    second.check_closed()
