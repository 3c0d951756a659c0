"""A whole store on virtual time: the simulated parts together, and what a close must leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

from kvstore.config import (
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    IoConfig,
    PoolGroupConfig,
    StoreConfig,
    slot_bytes,
)
from kvstore.errors import DeviceError
from kvstore.stats import PoolStats, StoreStats
from kvstore.testing.completions import SimCompletions
from kvstore.testing.device import SimDevice
from kvstore.testing.engine import SimEngine
from kvstore.testing.faults import FaultPlan
from kvstore.testing.files import SimDisk
from kvstore.testing.gate import SimGateWords
from kvstore.testing.loop import SimLoop


def sim_config(
    *,
    device_pages: int = 12,
    host_pages: int = 12,
    disk_pages: int = 48,
    page_bytes: int = 8192,
    block_tokens: int = 8,
    groups: Sequence[PoolGroupConfig] | None = None,
    keep_disk: bool = False,
    write_through: bool = False,
    keep_host: bool = False,
    disk: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
    io: dict[str, Any] | None = None,
    **fields: Any,
) -> StoreConfig:
    """Return a small store: sizes are pages per pool group, 0 leaves a tier out.

    ``disk``, ``host`` and ``io`` are further fields of those records, ``fields`` of the whole.
    """
    groups = groups or (PoolGroupConfig("full", page_bytes),)
    pages = sum(group.page_bytes for group in groups)
    slots = sum(slot_bytes(group.page_bytes) for group in groups)
    return StoreConfig(
        block_tokens=block_tokens,
        pool_groups=groups,
        device=DeviceTierConfig(gpu_cache_size=device_pages * pages),
        host=HostTierConfig(
            host_cache_size=host_pages * slots, keep_copy_after_restore=keep_host, **(host or {})
        )
        if host_pages
        else None,
        disk=DiskTierConfig(
            disk_cache_size=disk_pages * slots,
            disk_cache_path="/simulated",
            disk_keep_copy_after_restore=keep_disk,
            disk_write_through=write_through,
            **(disk or {}),
        )
        if disk_pages
        else None,
        io=IoConfig(**({"staging_bytes": 4 * slots} | (io or {}))),
        **({"check_invariants": True} | fields),
    )


@final
@dataclass(eq=False)
class SimRig:
    """Engine, device, gate words, completions and disk of one simulated machine.

    Make it with `SimRig.create` on a running `SimLoop`; `open` runs a store on it. A rig serves
    one store; its ``disk`` may go on to the next rig, as after a restart.
    """

    loop: SimLoop
    engine: SimEngine
    device: SimDevice
    gate: SimGateWords
    completions: SimCompletions
    disk: SimDisk
    faults: FaultPlan = field(default_factory=FaultPlan)

    @classmethod
    def create(
        cls,
        config: StoreConfig,
        *,
        seed: int = 0,
        faults: FaultPlan | None = None,
        disk: SimDisk | None = None,
        engine: dict[str, Any] | None = None,
        device: dict[str, Any] | None = None,
    ) -> SimRig:
        """Build the parts; ``engine`` and ``device`` are further options of theirs."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop), "a simulated store runs on SimLoop"
        gate, plan = SimGateWords(), faults or FaultPlan()
        disk = disk or SimDisk()
        sim_engine = SimEngine(
            loop,
            config=config.io,
            faults=plan,
            gate=gate,
            disk=disk,
            **({"seed": seed} | (engine or {})),
        )
        options: dict[str, Any] = {"gate": gate, "seed": seed + 1} | (device or {})
        sim_device = SimDevice(loop, **options)
        return cls(loop, sim_engine, sim_device, gate, SimCompletions(loop), disk, plan)

    @contextlib.asynccontextmanager
    async def open(self, config: StoreConfig) -> AsyncIterator[Any]:
        """Open a store on the rig; closing it closes the engine too."""
        from kvstore.store import open_store

        try:
            async with open_store(
                config,
                self.engine,
                device=self.device,
                completions=self.completions,
                clock=self.loop.clock,
                files=cast("Any", self.disk),
                gate_words=self.gate,
            ) as store:
                yield store
        finally:
            self.faults.clear()
            self.faults.release()
            if not self.engine.is_crashed:
                await self.engine.aclose()

    async def event(self, stream: Any) -> None:
        """Wait until the stream gets here. Raises: DeviceError: it never will."""
        future: asyncio.Future[int] = self.loop.create_future()

        def done(status: int, _flags: int, _value: int) -> None:
            if not future.done():
                future.set_result(status)

        token = self.completions.token(done)
        try:
            self.device.notify(stream, self.completions, token)
        except BaseException:
            self.completions.discard(token)
            raise
        status = await future
        if status != 0:
            raise DeviceError(f"the device answered {status}", code=status)

    def check_closed(self) -> None:
        """Raise AssertionError if the store left something behind (INV-908)."""
        assert self.engine.open_count == 0, "transfers are open after close"
        assert self.completions.token_count == 0, "tokens are open after close"
        assert self.device.pending_count == 0, "device notifications are open after close"
        assert self.device.registered_count == 0, "host memory is still registered"
        assert self.disk.open_count == 0, "files are open after close"
        assert self.disk.lock_count == 0, "directories are locked after close"
        assert self.gate.open_count == 0, "tickets are open after close"


@contextlib.asynccontextmanager
async def open_sim_store(
    config: StoreConfig,
    *,
    seed: int = 0,
    faults: FaultPlan | None = None,
    disk: SimDisk | None = None,
    engine: dict[str, Any] | None = None,
    device: dict[str, Any] | None = None,
) -> AsyncIterator[Any]:
    """Open a store on simulated parts, as `kvstore.open_store` on real ones.

    The parts are reachable as ``store.engine`` and ``store.device``; for more of them make a
    `SimRig` and use its `open`. What must not be left behind is checked after a clean close.
    """
    rig = SimRig.create(config, seed=seed, faults=faults, disk=disk, engine=engine, device=device)
    async with rig.open(config) as store:
        yield store
    rig.check_closed()


def check_balances(stats: StoreStats) -> None:
    """Raise AssertionError naming the conservation law that a snapshot breaks."""
    for (level, group), pool in stats.pools.items():
        check_pool(f"{level}/{group}", pool)
    for io_class in stats.engine.classes:
        entered = io_class.issued_bytes + io_class.promoted_in_bytes
        left = (
            io_class.done_bytes
            + io_class.failed_bytes
            + io_class.withdrawn_bytes
            + io_class.promoted_out_bytes
            + io_class.queued_bytes
            + io_class.inflight_bytes
        )
        assert entered == left, f"INV-808: {io_class}"
    by_level = sum(stats.matched_tokens_by_level.values())
    assert stats.matched_tokens == by_level, f"INV-812: {stats.matched_tokens_by_level}"
    skipped = sum(stats.write_through_skipped_by.values())
    assert stats.write_through_skipped == skipped, f"INV-615: {stats.write_through_skipped_by}"


def check_pool(name: str, pool: PoolStats) -> None:
    """Raise AssertionError if slots or copies of one pool group do not add up."""
    slots = pool.ready + pool.draining + pool.primaries + pool.copies
    assert pool.total == slots, f"INV-804: {name}: {pool}"
    ended = (
        pool.reused
        + pool.reclaimed
        + pool.died
        + pool.copy_failed
        + pool.released_by_resize
        + pool.released_by_close
    )
    assert pool.kept + pool.written_through == ended + pool.copies, f"INV-805: {name}: {pool}"
    for field_name in PoolStats.__dataclass_fields__:
        assert getattr(pool, field_name) >= 0, f"INV-801: {name}: {field_name}"
