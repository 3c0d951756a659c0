"""Whole stores on virtual time: random requests, random faults, one seed each.

Every served page is compared with the reference model, every balance is looked at after each
step, and a hang raises SimDeadlock. ``--seed N`` replays one seed, ``--seeds N`` runs more.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from random import Random
from typing import Any

import anyio

from kvstore._uring.base import Opcode
from kvstore.config import PoolGroupConfig, StoreConfig
from kvstore.errors import KVStoreError
from kvstore.testing import FaultPlan, SimDisk, SimRig, Traffic, TrafficSpec, sim_config

SEEDS = 16
#: Virtual seconds that no run may take: a request that waits for ever would.
TIME_LIMIT = 600.0


def _config(random: Random) -> StoreConfig:
    """Return a store of random shape: tiers, groups, options."""
    policy = random.choice(["lru", "lru", "s3fifo"])
    full = PoolGroupConfig("full", random.choice([4096, 8192]), eviction_policy=policy)
    groups = random.choice(
        [
            (full,),
            (full, PoolGroupConfig("local", 4096, window=24)),
            (full, PoolGroupConfig("local", 5000, window=16, sinks=8)),
        ]
    )
    host_pages = random.choice([0, 6, 12, 24])
    disk_pages = random.choice([0, 24, 48, 96]) if host_pages else random.choice([24, 48, 96])
    disk: dict[str, Any] = {}
    if disk_pages:
        disk["disk_protected_copy_fraction"] = random.choice([0.0, 0.25, 1.0])
        disk["write_policy"] = random.choice(["all", "all", "selective"])
        disk["persist_mode"] = random.choice(["relaxed", "strict"])
    return sim_config(
        check_invariants=random.random() < 0.3,  # after each turn; the steps check in any case
        groups=groups,
        device_pages=random.choice([12, 16, 24]),
        host_pages=host_pages,
        disk_pages=disk_pages,
        keep_disk=bool(disk_pages) and random.random() < 0.5,
        write_through=bool(disk_pages) and random.random() < 0.5,
        keep_host=random.random() < 0.5,
        disk=disk,
        io={
            "deadline": 2.0,
            "drain_timeout": 5.0,
            "write_piece_bytes": random.choice([4096, 1 << 20]),
            "background_bytes_max": random.choice([1 << 30, 40_000]),
            "bounce_pages": random.choice([1, 2]),
        },
        fingerprint=random.choice([None, "model"]),
        restore_fraction=random.choice([0.25, 0.5, 1.0]),
        prefetch_fraction=random.choice([0.25, 1.0]),
    )


async def _run(config: StoreConfig, spec: TrafficSpec, plan: FaultPlan, seed: int) -> Traffic:
    """Run one store from open to close and check what is left."""
    rig = SimRig.create(config, seed=seed, faults=plan)
    async with rig.open(config) as store:
        traffic = Traffic(store, rig, config, spec, seed)
        with anyio.fail_after(TIME_LIMIT):
            await traffic.run()
        with anyio.fail_after(TIME_LIMIT):
            rig.faults.clear()
            rig.faults.release()
            rig.device.clear_injected()
            await _come_to_rest(store, rig)
    rig.check_closed()
    return traffic


async def _come_to_rest(store: Any, rig: SimRig) -> None:
    """After the last request nothing is held, in flight or charged (INV-112, INV-916)."""
    await asyncio.sleep(30)
    store.step(None)
    store.step(None)
    await asyncio.sleep(30)
    stats = store.stats()
    assert 0 == stats.sessions_open
    assert 0 == rig.engine.open_count
    assert 0 == stats.engine.background_bytes
    for (level, group), pool in stats.pools.items():
        assert 0 == pool.draining, f"{level}/{group}: slots still drain at rest: {pool}"
        assert pool.primaries == pool.evictable, f"{level}/{group}: held at rest: {pool}"
        assert pool.total == pool.available, f"{level}/{group}: {pool}"
    await store.clear()
    for place, pool in store.stats().pools.items():
        assert pool.total == pool.ready, f"{place}: {pool}"
    assert 0 == store.stats().pages


async def test_random_requests_without_faults(seed):
    """No fault: every page served is right, nothing is ever lost or mismatched."""
    config = _config(Random(seed))
    traffic = await _run(config, TrafficSpec(cancel_rate=0.0), FaultPlan(), seed)
    assert traffic.served_pages > 0
    assert "PagesLost" not in traffic.expected, traffic.expected


async def _noted(config: StoreConfig, spec: TrafficSpec, plan: FaultPlan, seed: int) -> Traffic:
    """As `_run`; a failure names the seed and the faults that were planned."""
    faults = repr(plan)
    try:
        return await _run(config, spec, plan, seed)
    except BaseException as error:
        error.add_note(f"seed {seed}: {faults}")
        raise


async def test_random_requests_with_faults_and_cancels(seed):
    """Clients hang up, the disk misbehaves: misses, typed refusals, never a wrong page."""
    random = Random(seed)
    config = _config(random)
    plan = FaultPlan.random(random, rate=5, never=True)
    await _noted(config, TrafficSpec(), plan, seed)


async def test_random_gated_restores(seed):
    """Restores behind the gate beside awaited ones, with faults: tickets all end (INV-204)."""
    random = Random(seed)
    config = _config(random)
    plan = FaultPlan.random(random, rate=3, never=True)
    await _noted(config, TrafficSpec(gated_rate=0.5), plan, seed)


async def test_random_resizes_and_refused_device_calls(seed):
    """Tiers grow and shrink under open sessions, and device calls fail: pages stay right."""
    random = Random(seed)
    config = _config(random)
    spec = TrafficSpec(resize_rate=0.5, device_fault_rate=0.2)
    await _noted(config, spec, FaultPlan(), seed)


def _hard_plan(random: Random) -> FaultPlan:
    """Return a plan with many rules, among them operations that do not come back."""
    plan = FaultPlan.random(random, rate=8, never=True)
    for _ in range(random.randrange(3)):
        plan.add(
            "never",
            opcode=random.choice([None, Opcode.READ, Opcode.WRITE]),
            nth=random.randrange(60),
            count=random.choice([1, 3, 8, 20]),
        )
    return plan


async def test_random_everything_at_once(seed):
    """Lost operations, gates, resizes, refused device calls and cancels in one run: every request
    ends while the operations are lost, and all comes back with them (INV-119, INV-204, INV-416).
    """
    random = Random(seed)
    config = _config(random)
    plan = _hard_plan(random)
    spec = TrafficSpec(
        gated_rate=random.choice([0.0, 0.5]),
        resize_rate=random.choice([0.0, 0.5]),
        device_fault_rate=random.choice([0.0, 0.0, 0.2]),
        cancel_rate=random.choice([0.1, 0.5]),
    )
    await _noted(config, spec, plan, seed)


async def test_random_close_with_lost_operations(seed):
    """The store is left in the middle of all that: closing ends, and no gate stays shut (INV-139,
    INV-222, INV-907).
    """
    random = Random(seed)
    config = _config(random)
    rig = SimRig.create(config, seed=seed, faults=_hard_plan(random))
    spec = TrafficSpec(
        gated_rate=random.choice([0.0, 0.5]), resize_rate=random.choice([0.0, 0.5]), cancel_rate=0.2
    )

    async def leave() -> None:
        await asyncio.sleep(random.random() * random.choice([0.01, 0.1, 3.0]))
        raise _PowerOffError

    try:
        with anyio.fail_after(TIME_LIMIT):
            async with rig.open(config) as store, anyio.create_task_group() as group:
                group.start_soon(Traffic(store, rig, config, spec, seed).run)
                group.start_soon(leave)
    except BaseException as error:
        for leaf in _leaves(error):
            if not isinstance(leaf, (_PowerOffError, KVStoreError)):
                raise
    assert 0 == rig.gate.open_count
    assert 0 == rig.engine.open_count


class _PowerOffError(Exception):
    """The machine is gone, or the caller leaves; what the store says afterwards does not matter."""


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def test_random_power_cuts_and_restarts(seed):
    """The power goes off in the middle of the traffic; the next store serves right pages or misses
    (INV-920), and what it took in takes part in all balances.
    """
    random = Random(seed)
    config = dataclasses.replace(_config(random), fingerprint="model")
    if config.disk is None:
        config = dataclasses.replace(config, disk=sim_config().disk)
    rig, left = SimRig.create(config, seed=seed), SimDisk()

    async def cut() -> None:
        nonlocal left
        await asyncio.sleep(random.random() * 0.1)
        rig.engine.crash()
        left = rig.disk.copy()
        raise _PowerOffError

    with contextlib.suppress(Exception):
        async with rig.open(config) as store, anyio.create_task_group() as group:
            group.start_soon(Traffic(store, rig, config, TrafficSpec(), seed).run)
            group.start_soon(cut)
    second = SimRig.create(config, seed=seed + 1, disk=left)
    async with second.open(config) as store:
        await store.recovered()
        traffic = Traffic(store, second, config, TrafficSpec(), seed)
        with anyio.fail_after(TIME_LIMIT):
            await traffic.run()
            await _come_to_rest(store, second)
    second.check_closed()
    assert traffic.served_pages > 0


async def test_random_loss_of_the_device(seed):
    """The device is lost in the middle of the traffic: typed errors, and a close that ends
    (INV-917, INV-924).
    """
    random = Random(seed)
    config = _config(random)
    rig = SimRig.create(config, seed=seed)
    is_lost = False

    async def lose() -> None:
        nonlocal is_lost
        await asyncio.sleep(random.random() * 0.02)
        is_lost = True
        rig.device.fail()

    try:
        with anyio.fail_after(TIME_LIMIT):
            async with rig.open(config) as store, anyio.create_task_group() as group:
                spec = TrafficSpec(gated_rate=0.3)
                group.start_soon(Traffic(store, rig, config, spec, seed).run)
                group.start_soon(lose)
    except BaseException as error:
        for leaf in _leaves(error):
            if not isinstance(leaf, KVStoreError):
                raise
    assert is_lost
    assert 0 == rig.engine.open_count
    assert 0 == rig.gate.open_count
    assert 0 == rig.disk.open_count == rig.disk.lock_count
