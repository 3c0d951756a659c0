"""`KVStore`: opens and closes everything, and is the face that sessions and schedulers talk to.

One event loop owns all tables; nothing here takes a lock. Opening and closing are done by one task,
the owner: `open_store` is its async context manager. Blocking work (files, memory) runs on a small
thread pool of the store's own; everything else happens in the calls and completions of the loop.

The order of closing is fixed (INV-908): refuse new calls, cancel what is open, drain, publish
tickets, end pages and copies, close files, unpin host memory, free device memory, stop the engine.
Memory that a transfer may still write to is leaked on purpose rather than freed (INV-139).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, final

import anyio
import anyio.abc
import anyio.lowlevel

from kvstore import compiled, devices
from kvstore import config as cfg
from kvstore._uring import open_engine
from kvstore._uring.base import Completions, Engine, GateWords
from kvstore._uring.native import Arena, CompletionQueue, GateRing
from kvstore.config import StoreConfig, Tier
from kvstore.core import spec as core_spec
from kvstore.core.slots import Fence
from kvstore.core.tables import PASSED, Match, Refusal, Tables
from kvstore.devices.base import Device, DevicePool, Stream, device_error
from kvstore.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    DeviceError,
    GateBusy,
    KVStoreError,
    LogicError,
    OutOfPages,
    StoreClosed,
    StoreFailed,
    UnsupportedError,
)
from kvstore.executor import Executor, resolve
from kvstore.gate import Gate, GateTicket
from kvstore.keys import BlockKey, Tokens, scope_key
from kvstore.session import History, PrefetchBudget, RestoreQueue, Session
from kvstore.stats import EngineStats, StoreStats
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk import SCAN_SLOTS, DiskGroup, DiskTier, OsSlotFiles, SlotFiles
from kvstore.tiers.host import HostPool, HostTier, Run, SlotLoans, growth_parts

logger = logging.getLogger(__name__)

T = TypeVar("T")
WORKERS = 4
#: Slots that one turn of the loop gives up while the store closes.
CLOSE_SLOTS_MAX = 1024
SURVIVED_CANCELS_MAX = 1000
#: A slot that drains may wait for a transfer that has only begun when the wait does, and then for
#: what its verdict sets free: one deadline of a transfer would be too short (INV-119).
DRAIN_DEADLINES = 2
DEGRADED_WRITE_FAILURES = 3  # required or background writes that failed in a row


class StoreState(Enum):
    """The life of a store."""

    OPENING = "opening"
    OPEN = "open"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"


class Health(str):
    """``ok``, ``degraded`` or ``failed``; ``reasons`` says why."""

    __slots__ = ("reasons",)
    reasons: tuple[str, ...]

    def __new__(cls, state: str, reasons: Iterable[str] = ()) -> Self:
        """Return the state with its reasons."""
        self = super().__new__(cls, state)
        self.reasons = tuple(reasons)
        return self


class Probe(int):
    """Tokens that a match would find now; ``by_level`` says where. Nothing was taken (INV-321)."""

    by_level: dict[str, int]

    def __new__(cls, tokens: int, by_level: dict[str, int]) -> Self:
        """Return the number with its parts."""
        self = super().__new__(cls, tokens)
        self.by_level = by_level
        return self


class KVEvent(NamedTuple):
    """A change a cache-aware router wants to know: ``stored``, ``removed`` or ``moved``."""

    kind: str
    group: str
    key: bytes
    level: str


# Opening.


def open_store(
    config: StoreConfig,
    engine: Engine | None = None,
    *,
    allow_optimized: bool = False,
    device: Device | None = None,
    completions: Completions | None = None,
    clock: Callable[[], int] | None = None,
    files: SlotFiles | None = None,
    gate_words: GateWords | None = None,
    memory: Callable[..., Any] | None = None,
) -> StoreContext:
    """Open a store: ``async with kvstore.open_store(config) as store``.

    ``engine`` shares one that its creator stops (INV-122, INV-123). The task that enters owns the
    store and leaves it; any task of the loop may use it. Leaving always closes (INV-907).
    The remaining parameters replace parts of the store in tests; ``device`` and ``completions``
    stay the caller's.
    Raises: ConfigError: a field is wrong. CapacityError: no memory or no disk space. BusyError:
    another store uses the directory. UnsupportedError: the system lacks something; or asserts are
    off (``python -O``) and ``allow_optimized`` is not set.
    """
    parts = _Parts(engine, device, completions, clock, files, gate_words, memory)
    return StoreContext(config, parts, allow_optimized=allow_optimized)


class _Parts(NamedTuple):
    """What a caller brings along instead of what the store would make."""

    engine: Engine | None
    device: Device | None
    completions: Completions | None
    clock: Callable[[], int] | None
    files: SlotFiles | None
    gate_words: GateWords | None
    memory: Callable[..., Any] | None


@final
class StoreContext:
    """The async context manager of one store: one owner task opens and closes."""

    __slots__ = ("_allow_optimized", "_config", "_group", "_parts", "_store")

    def __init__(self, config: StoreConfig, parts: _Parts, *, allow_optimized: bool) -> None:
        self._config = config
        self._parts = parts
        self._allow_optimized = allow_optimized
        self._group: anyio.abc.TaskGroup | None = None
        self._store: KVStore | None = None

    async def __aenter__(self) -> KVStore:
        """Open. On a failure, or a cancellation, everything made so far is undone."""
        if not __debug__ and not self._allow_optimized:
            raise UnsupportedError(
                "kvstore checks itself with assert statements, which python -O removes; "
                "run without -O or pass allow_optimized=True"
            )
        store = KVStore(self._config, self._parts)
        group = anyio.create_task_group()
        await group.__aenter__()
        self._group, self._store = group, store
        try:
            await store._open(group)  # noqa: SLF001  the context is the other half of the store
        except BaseException:
            await store._close_from_owner(flush=False)  # noqa: SLF001
            await group.__aexit__(None, None, None)
            raise
        return store

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, whatever happened; sessions left open are ended first (INV-907)."""
        store, group = self._store, self._group
        assert store is not None
        assert group is not None
        if store.is_foreign:
            return  # a forked child owns nothing of it, its parent's loop and tasks included
        left_open, closing = store._end_sessions()  # noqa: SLF001
        try:
            await store._close_from_owner(flush=False)  # noqa: SLF001
        except BaseException as failure:  # noqa: BLE001  raised below, after the group has ended
            closing = closing or failure
        await group.__aexit__(None, None, None)
        if error is not None:
            return
        if closing is not None:
            raise closing
        if left_open:
            raise LogicError(
                f"leaving open_store: {left_open} sessions were still open and were ended",
                sessions=left_open,
            )


@final
class _Resources:
    """What has to be given back, in reverse order; one failure does not spare the rest (C28)."""

    __slots__ = ("_undo",)

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def push(self, undo: Callable[[], Any]) -> None:
        """Note how to undo what was just done; the call may return an awaitable."""
        self._undo.append(undo)

    async def close(self) -> list[BaseException]:
        """Undo everything and return what went wrong."""
        errors: list[BaseException] = []
        while self._undo:
            undo = self._undo.pop()
            try:
                result = undo()
                if asyncio.iscoroutine(result):
                    result = await result
                if isinstance(result, list):
                    errors.extend(result)
            except Exception as error:  # noqa: BLE001  gathered and raised together
                errors.append(error)
        return errors


def slot_counts(
    total_bytes: int, groups: Sequence[cfg.PoolGroupConfig], unit_bytes: Sequence[int]
) -> list[int]:
    """Divide a tier's bytes among the pool groups by share; by default all get equal counts."""
    weights = [
        float(group.share) if group.share is not None else float(unit)
        for group, unit in zip(groups, unit_bytes, strict=True)
    ]
    if any(group.share is not None for group in groups):
        sizes = sum(unit_bytes)
        weights = [
            float(group.share) if group.share is not None else unit / sizes
            for group, unit in zip(groups, unit_bytes, strict=True)
        ]
    total = sum(weights)
    return [
        int(total_bytes * weight / total) // unit
        for weight, unit in zip(weights, unit_bytes, strict=True)
    ]


def _check_counts(field: str, config: StoreConfig, counts: Sequence[int]) -> None:
    """A size below the minimum for one session is refused, never adjusted (INV-905)."""
    for group, count in zip(config.pool_groups, counts, strict=True):
        needed = 1
        if group.window is not None and field == "gpu_cache_size":
            blocks = -(-group.window // config.block_tokens) + 1
            needed = blocks + -(-group.sinks // config.block_tokens)
        if count < needed:
            raise ConfigError(
                f"{field}: pool group {group.name} gets {count} slots, one session needs {needed}",
                field=field,
            )


def _check_memory(needed: int) -> None:
    """Refuse host memory that the machine does not have, before a part of it is taken."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise CapacityError(
            f"host_cache_size: {needed} bytes needed, the machine has {memory}",
            needed=needed,
            available=memory,
        )


_live_stores: weakref.WeakSet[KVStore] = weakref.WeakSet()


def _poison_after_fork() -> None:
    """A ring and its threads do not survive a fork: the child's stores refuse every call."""
    for store in list(_live_stores):
        store._poisoned = "the process was forked; a store belongs to the process that opened it"  # noqa: SLF001


os.register_at_fork(after_in_child=_poison_after_fork)


@final
class KVStore:
    """One store: tables, tiers and the executor that moves pages between them.

    Made by `open_store`. All calls come from the thread of the loop that opened it (INV-331).
    """

    def __init__(self, config: StoreConfig, parts: _Parts) -> None:
        self.config = config
        self._parts = parts
        self._state = StoreState.OPENING
        self._thread_id = threading.get_ident()
        self._poisoned = ""
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._resources = _Resources()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="kvstore")
        self._group: anyio.abc.TaskGroup | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self._background_open = 0
        self._closing: asyncio.Future[list[BaseException]] | None = None
        self._sessions: set[Session] = set()
        self._levels = [Tier.DEVICE]
        self._granted: dict[Fence, None] = {}
        self._drains: list[Drain] = []
        self._unfenced: list[Fence] = []
        self._unnotified: list[Fence] = []
        self._gated_busy: dict[int, float] = {}  # stream -> since when
        self._matched: dict[str, int] = {}
        self._matched_total = 0
        self._resizing: set[int] = set()
        self._metadata = anyio.Lock()  # superblocks are written one change after the other
        self._shrunk: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._recovery = RecoveryReport()
        self._recovered = self._loop.create_future()
        self._host_wanted: list[int] = []
        self._host_filled: asyncio.Future[None] = self._loop.create_future()
        self._host_parts_failed = 0
        self._host_shortage = ""
        self._open_seconds = 0.0
        self._is_syncing = False
        self._persistent_pages = 0
        self._watch_timer: asyncio.TimerHandle | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._gate_await_fallbacks = 0
        self._gate_busy = 0
        self._is_engine_shared = parts.engine is not None
        self.engine: Engine | None = None
        self.gate: Gate | None = None
        self.queue: Completions
        self.device: Device
        self.tables: Tables
        self.executor: Executor
        self.restores: RestoreQueue
        self.prefetches: PrefetchBudget
        self._device_tier: DeviceTier
        self._host: HostTier | None = None
        self._disk: DiskTier | None = None
        self._landing: list[HostPool] = []
        self._staging: list[SlotLoans] = []
        self._bounce: list[SlotLoans] = []

    # Opening.

    async def _open(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        started_at = self._loop.time()
        config = self.config
        counts = self._slot_counts()
        await self._open_native()
        self._make_device(counts[0])
        await self._open_host_memory(counts)
        await self._open_disk(counts)
        self._make_tables(counts)
        _live_stores.add(self)
        self._state = StoreState.OPEN
        self._open_seconds = self._loop.time() - started_at
        if self._host is not None and self._host_wanted != self._totals(1):
            self._start_background(self._fill_host)
        else:
            self._host_filled.set_result(None)
        disk = self._disk
        if disk is not None and disk.can_recover and disk.recovered_files:
            self._start_background(self._recover)
        else:
            self._recovered.set_result(None)
        if self._write_through_is_off:
            logger.warning("disk_write_through needs a host tier above the disk; it is off")
        if not config.prefix_reuse and self._has_copy_options:
            logger.warning("copy options act on reusable pages only; prefix_reuse is off (INV-133)")

    def _slot_counts(self) -> list[list[int]]:
        """Work out the slots per level and group, before anything is allocated (INV-132)."""
        config = self.config
        page_bytes = [group.page_bytes for group in config.pool_groups]
        slot_bytes = [cfg.slot_bytes(size) for size in page_bytes]
        counts = []
        if config.device.tensors is not None:
            counts.append([0] * len(page_bytes))  # known once the tensors are adopted
        else:
            device = slot_counts(config.device.gpu_cache_size, config.pool_groups, page_bytes)
            _check_counts("gpu_cache_size", config, device)
            counts.append(device)
        for tier, size, field in (
            (Tier.HOST, config.host.host_cache_size if config.host else 0, "host_cache_size"),
            (Tier.DISK, config.disk.disk_cache_size if config.disk else 0, "disk_cache_size"),
        ):
            if not size:
                continue
            level = slot_counts(size, config.pool_groups, slot_bytes)
            _check_counts(field, config, level)
            counts.append(level)
            self._levels.append(tier)
        return counts

    async def _open_native(self) -> None:
        """Make completion queue, gate words and engine; they are running when this returns."""
        parts, config = self._parts, self.config
        if parts.completions is not None:
            self.queue = parts.completions
        else:
            queue = CompletionQueue(self._loop)
            self.queue = queue
            self._resources.push(queue.close)
        words = parts.gate_words or getattr(parts.engine, "gate", None)
        if config.disk is not None and parts.engine is None:
            ring = GateRing()
            self._resources.push(lambda: self._end_words(ring))
            engine = await self._blocking(
                lambda: open_engine(config.io, gate=ring), undo=lambda made: made.close()
            )
            self._resources.push(engine.aclose)
            self.engine, words = engine, ring
        else:
            self.engine = parts.engine
        self._gate_words: GateWords | None = words

    def _make_device(self, counts: list[int]) -> None:
        config, parts = self.config, self._parts
        if parts.device is not None:
            self.device = parts.device
        else:
            self.device = devices.create_device(config.device, self._gate_words)
            self._resources.push(self.device.close)
        streams = config.device.gated_streams if self._gate_words is not None else 0
        tier = self._device_tier = DeviceTier(self.device, self.queue, streams)
        tier.create_pools(config.pool_groups, counts, config.device)
        counts[:] = tier.slot_counts
        _check_counts("gpu_cache_size", config, counts)
        if self._gate_words is not None and self.device.caps.memops64:
            self.gate = Gate(self.device, self._gate_words, streams_max=config.device.gated_streams)

    def _host_pool(self, page_bytes: int) -> HostPool:
        factory = self._parts.memory or _make_arena
        return HostPool(page_bytes, factory, self.engine, self.device, self._numa_node())

    def _numa_node(self) -> int | None:
        """Return the node of host memory: the configured one, else the device's, else any."""
        near = self.device.caps.host_numa
        asked = self.config.host.numa_node if self.config.host is not None else None
        return asked if asked is not None else (near if near >= 0 else None)

    def _check_numa(self) -> None:
        """Say once if host memory lies on another node than the device (C58)."""
        node, near = self._numa_node(), self.device.caps.host_numa
        if node is not None and near >= 0 and node != near:
            logger.warning("numa_node is %d, but the device is attached to node %d", node, near)

    async def _open_host_memory(self, counts: list[list[int]]) -> None:
        """Map, touch and register host memory, off the loop and in parallel (INV-906).

        Of the host tier only the first part of each pool group: the rest arrives while the store
        serves. ``counts`` says afterwards what is there.
        """
        config = self.config
        self._check_numa()
        sizes = [group.page_bytes for group in config.pool_groups]
        slot_bytes = [cfg.slot_bytes(size) for size in sizes]
        if Tier.HOST in self._levels:
            level = self._levels.index(Tier.HOST)
            self._host_wanted, first = counts[level], []
            if self._parts.memory is None:
                wanted_bytes = zip(self._host_wanted, slot_bytes, strict=True)
                _check_memory(sum(count * size for count, size in wanted_bytes))
            host = self._host = HostTier([self._host_pool(size) for size in sizes])
            for pool, wanted in zip(host.pools, self._host_wanted, strict=True):
                first.append(next(growth_parts(wanted, pool.slot_bytes)))
                await self._grow_pool(pool, first[-1])
            counts[level] = first
        staging = slot_counts(config.io.staging_bytes, config.pool_groups, slot_bytes)
        for size, count in zip(sizes, staging, strict=True):
            needs_staging = Tier.DISK in self._levels
            for loans, slots in (
                (self._staging, max(2, count) if needs_staging else 1),
                (self._bounce, config.io.bounce_pages),
            ):
                pool = self._host_pool(size)
                await self._grow_pool(pool, slots)
                self._landing.append(pool)
                loans.append(SlotLoans(pool, slots))

    async def _grow_pool(self, pool: HostPool, slots: int) -> None:
        def make() -> Run:
            run = pool.map(slots)
            try:
                pool.register(run)
            except BaseException:
                run.memory.close()
                raise
            return run

        run = await self._blocking(make, undo=pool.release)
        pool.add(run)

    async def _fill_host(self) -> None:
        """Bring the rest of the host tier in, part by part, all groups alike (INV-906)."""
        level = self._levels.index(Tier.HOST)
        present = self._totals(level)
        sizes = [cfg.slot_bytes(group.page_bytes) for group in self.config.pool_groups]
        rests = [
            growth_parts(wanted - have, size)
            for wanted, have, size in zip(self._host_wanted, present, sizes, strict=True)
        ]
        try:
            for parts in itertools.zip_longest(*rests, fillvalue=0):
                for group, part in enumerate(parts):
                    if part:
                        await self._grow_by(level, group, part)
        except (KVStoreError, OSError) as error:
            self._note_shortage(error)
        finally:
            resolve(self._host_filled)

    def _note_shortage(self, error: Exception) -> None:
        """A later part of the host tier was refused: the store goes on with what it has."""
        if self._state is not StoreState.OPEN:
            return
        self._host_parts_failed += 1
        self._host_shortage = (
            f"the host tier stays smaller, {self._host_mapped_bytes} bytes are mapped: {error}"
        )
        logger.warning("%s", self._host_shortage)
        if getattr(error, "is_sticky", False):
            self.fail(error)

    async def filled(self) -> None:
        """Wait until the host tier has its whole size, or grows no further (INV-906).

        The store serves from the start; `health` says if memory was refused later.
        """
        self.check_open()
        await asyncio.shield(self._host_filled)

    def _quiesce_device(self) -> list[BaseException]:
        self.device.quiesce()
        return []

    @property
    def _device_holds_memory(self) -> bool:
        return hasattr(self, "device") and self.device.holds_memory

    def _end_words(self, ring: GateRing) -> None:
        """Give the gate words up, or keep them for a stream that still reads them (INV-222)."""
        if self._device_holds_memory:
            ring.leak()
        else:
            ring.close()

    def _release_memory(self, *, leak: bool) -> list[BaseException]:
        errors: list[BaseException] = []
        host = self._host.pools if self._host is not None else []
        for pool in [*self._landing, *host]:
            for run in pool.cut(0):
                try:
                    pool.release(run, leak=leak)
                except Exception as error:  # noqa: BLE001  gathered and raised together
                    errors.append(error)
        return errors

    async def _open_disk(self, counts: list[list[int]]) -> None:
        config = self.config
        if config.disk is None:
            return
        assert self.engine is not None
        disk = DiskTier(
            self._parts.files or OsSlotFiles(),
            self.engine,
            config.disk,
            config.pool_groups,
            fingerprint=config.fingerprint,
            direct=config.io.direct,
        )
        level = counts[self._levels.index(Tier.DISK)]
        await self._blocking(lambda: disk.open(level), undo=lambda _: disk.close_files())
        self._disk = disk

    def _make_tables(self, counts: list[list[int]]) -> None:
        config = self.config
        self.tables = Tables(self._tables_spec(counts))
        self.executor = Executor(
            loop=self._loop,
            tables=self.tables,
            tiers=self._levels,
            queue=self.queue,
            device=self._device_tier,
            host=self._host,
            disk=self._disk,
            staging=self._staging,
            bounce=self._bounce,
            on_failure=self.fail,
            after_turn=self._after_turn,
            offload=self._offload,
            stall_s=config.io.deadline,
        )
        if config.on_event is not None:
            self.executor.on_event = self._publish_event
        self.executor.on_shrunk = self._note_shrunk
        device = counts[0]
        self.restores = RestoreQueue(
            self, self._loop, [max(1, int(config.restore_fraction * count)) for count in device]
        )
        self.prefetches = PrefetchBudget(
            {
                (level, group): max(1, int(config.prefetch_fraction * count))
                for level, level_counts in enumerate(counts)
                for group, count in enumerate(level_counts)
            }
        )

    def _tables_spec(self, counts: list[list[int]]) -> core_spec.TablesSpec:
        config = self.config
        levels = []
        for tier, level_counts in zip(self._levels, counts, strict=True):
            keep, fraction = False, "1.0"
            if tier is Tier.HOST and config.host is not None:
                keep = config.host.keep_copy_after_restore
                fraction = str(config.host.protected_copy_fraction)
            if tier is Tier.DISK and config.disk is not None:
                keep = config.disk.disk_keep_copy_after_restore
                fraction = str(config.disk.disk_protected_copy_fraction)
            levels.append(
                core_spec.LevelSpec(
                    tier=tier,
                    slot_counts=tuple(level_counts),
                    keep_copy=keep,
                    share_fraction=fraction,
                )
            )
        disk = config.disk
        selective = disk is not None and disk.write_policy == "selective"
        return core_spec.TablesSpec(
            groups=tuple(
                core_spec.GroupSpec(
                    name=group.name,
                    page_bytes=group.page_bytes,
                    window=group.window,
                    sinks=group.sinks,
                    eviction_policy=group.eviction_policy,
                )
                for group in config.pool_groups
            ),
            levels=tuple(levels),
            block_tokens=config.block_tokens,
            write_through=disk is not None and disk.disk_write_through,
            selective_uses=disk.selective_uses if disk is not None and selective else None,
            bounce_pages=config.io.bounce_pages,
            background_bytes_max=config.io.background_bytes_max,
            events=config.on_event is not None,
        )

    @property
    def _write_through_is_off(self) -> bool:
        spec = self.tables.spec
        return spec.write_through and not spec.is_write_through

    @property
    def _has_copy_options(self) -> bool:
        config = self.config
        host = config.host is not None and config.host.keep_copy_after_restore
        disk = config.disk is not None and (
            config.disk.disk_keep_copy_after_restore or config.disk.disk_write_through
        )
        return host or disk

    # Sessions.

    def session(
        self, tokens: Tokens = (), *, salt: bytes = b"", adapter: bytes = b"", priority: int = 35
    ) -> Session:
        """Match ``tokens`` and hold what is there; nothing moves (INV-321).

        Use it as ``async with store.session(...) as session``.
        Cost: one digest per full block of tokens, one look-up per block and pool group.
        Raises: ValueError: a token outside 32 bits, or a priority that is no whole number.
        TypeError: the salt is not bytes. StoreClosed, StoreFailed.
        """
        self.check_open()
        cfg.check_int("priority", priority, cfg.PRIORITY_MIN, cfg.PRIORITY_MAX)
        root = scope_key(salt, adapter)
        history = History(self.config.block_tokens, root, tokens)
        match = self._agreed_match(history)
        rows = [list(row) for row in match.pages]
        for row in rows:
            self.tables.hold(row)
        session = Session(self, history, priority, rows, match.block_count)
        by_level = self._tokens_by_level(match)
        session.cached_tokens_by_level = by_level
        for name, count in by_level.items():
            self._matched[name] = self._matched.get(name, 0) + count
        self._matched_total += session.cached_tokens
        self.adopt(session)
        return session

    def probe(self, tokens: Tokens, *, salt: bytes = b"", adapter: bytes = b"") -> Probe:
        """Return how many tokens a session would find now, and where; takes nothing (INV-321)."""
        self.check_open()
        history = History(self.config.block_tokens, scope_key(salt, adapter), tokens)
        match = self._match(history)
        return Probe(match.block_count * self.config.block_tokens, self._tokens_by_level(match))

    def _match(self, history: History) -> Match:
        return self.tables.match(history.keys if self.config.prefix_reuse else [])

    def _agreed_match(self, history: History) -> Match:
        """Match, and let ranks settle on the smallest common prefix."""
        match = self._match(history)
        if self.config.agree is None:
            return match
        block_tokens = self.config.block_tokens
        agreed = self.config.agree(match.block_count * block_tokens)
        blocks = max(0, min(match.block_count, agreed // block_tokens))
        return match if blocks == match.block_count else self.tables.match(history.keys[:blocks])

    def _tokens_by_level(self, match: Match) -> dict[str, int]:
        return {
            self._levels[level].name.lower(): blocks * self.config.block_tokens
            for level, blocks in match.blocks_by_level().items()
        }

    @property
    def has_active(self) -> bool:
        """Whether any session is active, so that its locks may go without anything moving."""
        return any(session.state == "active" for session in self._sessions)

    def adopt(self, session: Session) -> None:
        """Note that a session is open."""
        self._sessions.add(session)

    def forget(self, session: Session) -> None:
        """Note that a session is closed."""
        self._sessions.discard(session)

    def _end_sessions(self) -> tuple[int, BaseException | None]:
        """Close every session that is open; return how many there were and what went wrong.

        A session that cannot be closed must not keep the store from closing (INV-907).
        """
        sessions = list(self._sessions)
        failure: BaseException | None = None
        for session in sessions:
            try:
                session.close()
            except BaseException as error:  # noqa: BLE001  raised once the store is closed
                failure = failure or error
        return len(sessions), failure

    # What sessions and the executor need.

    def check_open(self) -> None:
        """Raise unless calls are allowed now.

        Raises: StoreClosed (INV-909), StoreFailed (INV-917), LogicError: another thread (INV-331).
        """
        if self._state is StoreState.OPEN and threading.get_ident() == self._thread_id:
            if self._poisoned:
                raise StoreFailed(self._poisoned)
            if not self.device.error:
                return
            self._notice_loss()
        if threading.get_ident() != self._thread_id:
            raise LogicError("a store is used from the thread of its event loop only")
        if self._state is StoreState.FAILED:
            raise StoreFailed(f"the store has failed: {self._failure}") from self._failure
        raise StoreClosed(f"the store is {self._state.value}")

    def _notice_loss(self) -> None:
        """Fail if the device is lost, whoever met the error first: no device call of the store may
        be due for long, and its waiters need to hear of it (INV-917).
        """
        if self._state is StoreState.OPEN and not self._poisoned and self.device.error:
            self.fail(device_error(self.device.error, "the device"))

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked child of the one that opened the store."""
        return bool(self._poisoned)

    def settle(self) -> None:
        """Act on what the last transitions asked for, and serve waiting restores."""
        self.executor.settle()
        self._after_turn()

    def _after_turn(self) -> None:
        """Let those go on who waited for room or for a fence."""
        executor = self.executor
        if executor.room_grew and self.restores.waiting_count and self._pump_handle is None:
            self._pump_handle = self._loop.call_soon(self._pump)
        executor.room_grew = False
        if self._is_engine_shared and self.engine is not None:
            self.tables.engine_room_bytes = self.engine.background_room_bytes()  # INV-123
        if self._drains:
            self._drains = [drain for drain in self._drains if not drain.check()]
        if self.config.check_invariants:
            self._check_state()
        if executor.written_since_sync and self._is_strict and not self._is_syncing:
            self._is_syncing = True
            self._start_background(self._sync_files)

    def _pump(self) -> None:
        """Serve waiting restores, once per turn of the loop: a plan costs O(its pages)."""
        self._pump_handle = None
        if self._state is StoreState.OPEN:
            self.restores.pump()
            self._after_turn()

    def _check_state(self) -> None:
        try:
            from kvstore.core import invariants
        except ImportError:
            return
        invariants.check_state(self.tables)

    @property
    def _is_strict(self) -> bool:
        disk = self.config.disk
        return (
            disk is not None
            and disk.persist_mode == "strict"
            and self.config.fingerprint is not None
            and self._state is StoreState.OPEN
        )

    def wrap_stream(self, stream: Any) -> Stream:
        """Wrap a caller's stream; None is the device's default stream."""
        return self.device.wrap_stream(stream)

    def stream(self) -> Stream:
        """Return the default stream of the device, for callers without one of their own."""
        self.check_open()
        return self.device.wrap_stream(None)

    def level_index(self, level: str | int) -> int:
        """Return the index of a level given by name (``host``) or index.

        Raises: LogicError: there is no such level.
        """
        if isinstance(level, int):
            if 0 <= level < len(self._levels):
                return level
        else:
            for index, tier in enumerate(self._levels):
                if tier.name.lower() == level:
                    return index
        raise LogicError(f"this store has no level {level!r}", level=level)

    def device_slot(self, group: int, slot_id: int) -> int:
        """Return the position in the device pool of a slot id of the tables."""
        return self._device_tier.position(group, slot_id)

    # Steps and fences.

    def step(self, fence: Any = None) -> Drain:
        """Close a scheduler step: slots released in it are reused after ``fence`` (INV-224).

        ``fence`` is an event behind the step's work, ours or torch's; None has passed on the CPU
        device and means the next step on others (INV-338). The result may be awaited: it is done
        when every slot that `Session.try_grow` asked for since the last step is drained. Work on
        streams needs no awaiting: they have been made to wait for what was granted.
        """
        self.check_open()
        closed = self.tables.rotate_step_fence()
        unnotified, self._unnotified = self._unnotified, []
        for one in unnotified:
            self._bind_fence(one, one.event)
        older, self._unfenced = self._unfenced, []
        if fence is None and not self.device.none_fence_has_passed:
            for one in older:  # the step after theirs has ended by now
                self.tables.fence_passed(one)
            self._unfenced = [closed]
        else:
            for one in (*older, closed):
                self._bind_fence(one, fence)
        self.executor.settle()
        return self.drain()

    def drain(self) -> Drain:
        """As `step`, without closing the step: done when the slots asked for so far are drained."""
        granted, self._granted = self._granted, {}
        open_fences = [one for one in granted if not one.passed]
        drain = Drain(self._loop, open_fences, DRAIN_DEADLINES * self.config.io.deadline)
        if not drain.check():
            self._drains.append(drain)
        self._after_turn()
        return drain

    def fence(self, event: Any) -> Fence | None:
        """Turn a caller's fence into one of the tables; `PASSED` on the CPU device for None."""
        if event is None:
            return PASSED if self.device.none_fence_has_passed else None
        fence = self.tables.new_fence()
        self._bind_fence(fence, event)
        return fence

    def _bind_fence(self, fence: Fence, event: Any) -> None:
        if event is None:
            self.tables.fence_passed(fence)
            return
        wrapped = self.device.wrap_event(event)
        if wrapped.query():
            self.tables.fence_passed(fence)
            return
        self.tables.fence_enqueued(fence, wrapped)
        try:
            self._device_tier.notify_event(
                wrapped, lambda status, *_: self._fence_passed(fence, status)
            )
        except DeviceError as error:
            self._unnotified.append(fence)  # or its slots would drain for ever
            self._refused("notification of a fence", error)

    def _fence_passed(self, fence: Fence, status: int) -> None:
        if status:
            self.fail(StoreFailed(f"the device reported {status} for a step's fence"))
        self.tables.fence_passed(fence)
        self.executor.room_grew = True
        self.settle()

    def grant(self, stream: Stream | None, fences: Sequence[Fence]) -> bool:
        """Let the stream wait until the slots are drained (INV-338, INV-417).

        False: a use of them has not even been enqueued, so no stream can wait for it, or there is
        no stream and a use has not ended. The next step's awaitable covers the slots either way.
        """
        if stream is not None and any(not fence.passed and fence.event is None for fence in fences):
            self.executor.flush_copies_out()  # what is only collected yet gets its events
        still_open = [fence for fence in dict.fromkeys(fences) if not fence.passed]
        self._granted.update(dict.fromkeys(still_open))
        if any(stream is None or fence.event is None for fence in still_open):
            return False
        try:
            for event in {id(fence.event): fence.event for fence in still_open}.values():
                assert stream is not None
                assert event is not None
                stream.wait_event(event)
        except DeviceError as error:
            self._refused("wait for a fence", error)
            return False
        return True

    def _refused(self, what: str, error: DeviceError) -> None:
        """A device call was refused: that is this call's trouble, unless the device is lost."""
        logger.warning("%s refused: %s", what, error)
        if getattr(error, "is_sticky", False):
            self.fail(error)

    # The gate.

    def take_gate(self, behind: Stream | None) -> _GateLease | None:
        """Reserve a gated stream, or None: busy or not supported, both counted (INV-211)."""
        free = [i for i in range(len(self._device_tier.gated)) if i not in self._gated_busy]
        if self.gate is None or not free:
            self._gate_busy += 1
            self._gate_await_fallbacks += 1
            return None
        self._gated_busy[free[0]] = self._loop.time()
        self._arm_watchdog()
        return _GateLease(self, self.gate, free[0], behind)

    def release_gate(self, index: int, *, is_fallback: bool) -> None:
        """Give a gated stream back."""
        self._gated_busy.pop(index, None)
        self._gate_await_fallbacks += is_fallback

    def gated_stream(self, index: int) -> Stream:
        """Return one of the store's gated streams."""
        return self._device_tier.gated[index]

    def count_gate_busy(self) -> None:
        """Count a reservation that the gate refused."""
        self._gate_busy += 1

    def _arm_watchdog(self) -> None:
        if self._watch_timer is None:
            self._watch_timer = self._loop.call_later(self.config.io.watchdog, self._watch)

    def _watch(self) -> None:
        """Log the oldest unpublished ticket after a limit; never publish (INV-223)."""
        self._watch_timer = None
        if not self._gated_busy:
            return
        age = self._loop.time() - min(self._gated_busy.values())
        if age >= self.config.io.watchdog:
            oldest = getattr(self._gate_words, "oldest_open", lambda: None)()
            logger.warning(
                "a gated restore (class read) is unpublished for %.1f s; %d streams are parked; "
                "oldest ticket: %s",
                age,
                len(self._gated_busy),
                oldest,
            )
        self._arm_watchdog()

    # Reading.

    def stats(self) -> StoreStats:
        """Return a frozen snapshot. Cost: O(levels x pool groups); no waiting (INV-813)."""
        tables, executor = self.tables, self.executor
        levels = tuple(tier.name.lower() for tier in self._levels)
        groups = tuple(group.name for group in self.config.pool_groups)
        counters = tables.counters
        return StoreStats(
            levels=levels,
            groups=groups,
            pools={
                (levels[level], groups[group]): pool
                for (level, group), pool in tables.snapshot().items()
            },
            moved_bytes=dict(executor.moved_bytes),
            device_bytes=self._device_bytes(),
            matched_tokens=self._matched_total,
            matched_tokens_by_level=dict(self._matched),
            write_through_issued=counters.write_through_issued,
            write_through_skipped=counters.write_through_skipped,
            write_through_skipped_by=dict(counters.write_through_skipped_by),
            lost_pages=counters.lost_pages,
            plans_refused=counters.plans_refused,
            restores=self.restores.started_count,
            restores_waited=self.restores.waited_count,
            gate_busy=self._gate_busy,
            gate_await_fallbacks=self._gate_await_fallbacks,
            sessions_open=len(self._sessions),
            pages=tables.page_count,
            persistent_pages=self._persistent_pages,
            recovered_pages=self._recovery.taken,
            recovery_free_slots=self._recovery.free,
            host_numa_node=self._numa_node(),
            host_mapped_bytes=self._host_mapped_bytes,
            host_parts_failed=self._host_parts_failed,
            open_seconds=self._open_seconds,
            disk_modes=self._disk.modes() if self._disk is not None else {},
            core=compiled.describe(),
            health=str(self.health()),
            engine=self.engine.stats() if self.engine is not None else EngineStats(),
        )

    @property
    def _host_mapped_bytes(self) -> int:
        tier = self._host.mapped_bytes if self._host is not None else 0
        return tier + sum(pool.mapped_bytes for pool in self._landing)

    def _device_bytes(self) -> dict[str, int]:
        """Bytes that disk devices moved, header and retries included (INV-807)."""
        if self.engine is None:
            return {}
        read, required, background = self.engine.stats().classes
        return {
            "disk:read": read.read_bytes,
            "disk:required": required.written_bytes,
            "disk:background": background.written_bytes,
        }

    def health(self) -> Health:
        """Return ``ok``, ``degraded`` or ``failed``, with reasons."""
        self._notice_loss()
        if self._state is StoreState.FAILED:
            return Health("failed", (str(self._failure),))
        reasons = []
        executor = self.executor
        if executor.write_failures_in_a_row >= DEGRADED_WRITE_FAILURES:
            reasons.append(
                f"the last {executor.write_failures_in_a_row} disk writes failed: "
                f"{executor.last_write_error}"
            )
        if executor.read_failures_in_a_row >= DEGRADED_WRITE_FAILURES:
            reasons.append(f"the last {executor.read_failures_in_a_row} disk reads failed")
        if self._host_shortage:
            reasons.append(self._host_shortage)
        return Health("degraded" if reasons else "ok", reasons)

    def available(self, level: str | int = 0, group: str | None = None) -> int:
        """Return the slots a plan can get on a level: free, evictable, and unreserved copies.

        For one pool group, or the smallest number over all of them (INV-803).
        """
        self.check_open()
        index = self.level_index(level)
        counts = [
            self.tables.available_count(index, i)
            for i, one in enumerate(self.config.pool_groups)
            if group is None or one.name == group
        ]
        if not counts:
            raise LogicError(f"unknown pool group {group!r}", pool_group=group)
        return min(counts)

    def device_pool(self, group: str) -> DevicePool:
        """Return the device pool of a group: ``device_pool("full").as_tensor(dtype, shape)``."""
        for index, one in enumerate(self.config.pool_groups):
            if one.name == group:
                return self._device_tier.pools[index]
        raise LogicError(f"unknown pool group {group!r}", pool_group=group)

    async def recovered(self) -> RecoveryReport:
        """Wait until recovery has looked at every slot, and return what it found (INV-922)."""
        await asyncio.shield(self._recovered)
        return self._recovery

    # Changing: clear, epoch, resize.

    def _refuse_sessions(self, call: str) -> None:
        if self._sessions:
            raise LogicError(
                f"{call}: {len(self._sessions)} sessions are open", sessions=len(self._sessions)
            )

    async def clear(self) -> None:
        """Drop every page of every tier; what was cleared does not come back (INV-907, INV-925).

        Raises: LogicError: sessions are open; nothing was changed.
        """
        self.check_open()
        self._refuse_sessions("clear")
        await self._raise_epoch()

    async def bump_epoch(self) -> None:
        """Forget everything because the model's weights changed, also after a restart (INV-925).

        Raises: LogicError: sessions are open; nothing was changed.
        """
        self.check_open()
        self._refuse_sessions("bump_epoch")
        await self._raise_epoch()

    async def _raise_epoch(self) -> None:
        self.tables.clear()
        if self._disk is not None:
            self._disk.raise_epoch()
        self.settle()
        if self._disk is not None:
            async with self._metadata:
                await self._blocking(self._disk.write_superblocks)

    async def resize(self, level: str | int, size_bytes: int) -> None:
        """Change the size of the host or disk tier while sessions are open (INV-901 to INV-906).

        Growth arrives in parts that are usable at once. A shrink first empties what is beyond the
        new end, then gives it back.
        Cancellation: ends the wait; the resize goes on.
        Raises: ValueError: below the minimum. OutOfPages: held pages do not fit. CapacityError: no
        memory or disk space. In each case nothing was changed, or a growth ends at a part.
        """
        self.check_open()
        index = self.level_index(level)
        if index == 0:
            raise LogicError("resize: the device tier is fixed (INV-901)")
        cfg.check_int("size_bytes", size_bytes, 1)
        groups = self.config.pool_groups
        counts = slot_counts(size_bytes, groups, [cfg.slot_bytes(g.page_bytes) for g in groups])
        _check_counts("size_bytes", self.config, counts)
        if index in self._resizing:
            raise LogicError(f"resize: level {level} is being resized already")
        await self._check_room(index, counts)
        self.check_open()
        if index in self._resizing:
            raise LogicError(f"resize: level {level} is being resized already")
        self._resizing.add(index)
        outcome = self._loop.create_future()
        self._start_background(functools.partial(self._resize, index, counts, outcome))
        await asyncio.shield(outcome)

    async def _resize(self, index: int, counts: list[int], outcome: asyncio.Future[None]) -> None:
        """Resize in a child of the store: slots half given back would be nobody's (INV-904)."""
        error: BaseException = StoreClosed("resize: the store was closed meanwhile")
        try:
            await asyncio.shield(self._recovered)
            if self._levels[index] is Tier.HOST:
                await asyncio.shield(self._host_filled)
            await self._grow(index, counts)
            await self._shrink(index, counts)
            if self._levels[index] is Tier.HOST:
                self._host_shortage = ""  # the operator knows, and has what was asked for
        except Exception as failure:  # noqa: BLE001  raised where it is awaited
            error = failure
        else:
            resolve(outcome)
        finally:
            self._resizing.discard(index)
            _reject(outcome, error)

    async def _check_room(self, level: int, counts: list[int]) -> None:
        """Refuse a growth that can never fit before a byte of it is taken."""
        slot_bytes = [cfg.slot_bytes(group.page_bytes) for group in self.config.pool_groups]
        missing = [
            max(0, count - total) for count, total in zip(counts, self._totals(level), strict=True)
        ]
        if not any(missing):
            return
        if self._levels[level] is Tier.DISK:
            disk = self._disk
            assert disk is not None
            await self._blocking(lambda: disk.check_room(missing))
            return
        _check_memory(sum(count * size for count, size in zip(missing, slot_bytes, strict=True)))

    def _totals(self, level: int) -> list[int]:
        return [pool.total for pool in self.tables.pools[level]]

    async def _grow(self, level: int, counts: list[int]) -> None:
        for group, count in enumerate(counts):
            slot_bytes = cfg.slot_bytes(self.config.pool_groups[group].page_bytes)
            missing = count - self._totals(level)[group]
            for part in growth_parts(missing, slot_bytes):
                await self._grow_by(level, group, part)

    async def _grow_by(self, level: int, group: int, part: int) -> None:
        """Add slots to one pool group of a level; they are usable when this returns."""
        total = self._totals(level)[group] + part
        if self._levels[level] is Tier.HOST:
            assert self._host is not None
            spare = self._host.pools[group].slot_count - self._totals(level)[group]
            if spare < part:
                await self._grow_pool(self._host.pools[group], part - max(0, spare))
        else:
            await self._resize_disk_group(group, total)
        self.check_open()
        wanted = self._totals(level)
        wanted[group] = total
        plan = self.tables.plan_resize(level, wanted)
        assert not isinstance(plan, Refusal), "growing needs no room"
        self.tables.apply(plan)
        self.executor.room_grew = True
        self.settle()

    async def _resize_disk_group(self, group: int, total: int) -> None:
        disk = self._disk
        assert disk is not None
        owner = disk.groups[group]
        async with self._metadata:
            await self._blocking(lambda: disk.resize_files(owner, total))
        owner.set_slot_count(total)

    async def _shrink(self, level: int, counts: list[int]) -> None:
        totals = self._totals(level)
        smaller = [group for group, count in enumerate(counts) if count < totals[group]]
        if not smaller:
            return
        wanted = [min(count, total) for count, total in zip(counts, totals, strict=True)]
        plan = self.tables.plan_resize(level, wanted)
        if isinstance(plan, Refusal):
            raise OutOfPages(
                f"resize: level {plan.level}, pool group {plan.group}: "
                f"{plan.needed} slots needed, {plan.available} available",
                level=plan.level,
                pool_group=plan.group,
                needed=plan.needed,
                available=plan.available,
            )
        waits = []
        for group in smaller:
            future = self._shrunk[level, group] = self._loop.create_future()
            waits.append((group, future))
        self.tables.apply(plan)
        self.settle()
        for group, future in waits:
            await asyncio.shield(future)
            await self._give_back(level, group, counts[group])

    def _note_shrunk(self, places: list[tuple[int, int]]) -> None:
        for place in places:
            future = self._shrunk.pop(place, None)
            if future is not None and not future.done():
                future.set_result(None)

    async def _give_back(self, level: int, group: int, count: int) -> None:
        """Return memory or disk space beyond the new end; everything there has drained."""
        if self._levels[level] is Tier.DISK:
            assert self._disk is not None
            self._disk.groups[group].set_slot_count(count)
            await self._resize_disk_group(group, count)
            return
        assert self._host is not None
        pool = self._host.pools[group]
        freed = pool.cut(count)

        def release() -> None:
            for run in freed:
                pool.release(run)

        await self._blocking(release)

    # Recovery and persistence.

    async def _recover(self) -> None:
        """Take pages of an earlier life in, in parts and off the loop (INV-919 to INV-922)."""
        disk = self._disk
        assert disk is not None
        try:
            for group in disk.groups:
                for start in range(0, group.slot_count, SCAN_SLOTS):
                    await self._recover_part(disk, group, start)
        finally:
            orphans = self.tables.recovery_done()
            self._recovery.taken -= orphans
            self._recovery.free["no_ancestor"] = orphans
            self.settle()
            if not self._recovered.done():
                self._recovered.set_result(None)
        logger.info("recovery took %d pages in", self._recovery.taken)

    async def _recover_part(self, disk: DiskTier, group: DiskGroup, start: int) -> None:
        stop = min(start + SCAN_SLOTS, group.slot_count)
        found = await self._blocking(lambda: list(disk.scan(group, start, stop)))
        report = self._recovery
        epoch = disk.epoch
        for one in found:
            if one.header is None:
                report.count_free(one.reason)
                continue
            identity = one.header.identity
            if identity.epoch != epoch or disk.is_touched(group.index, one.slot_id):
                report.count_free("stale")
                continue
            page = self.tables.recover(
                group.index,
                one.slot_id,
                BlockKey(identity.key),
                BlockKey(identity.parent_key),
                identity.block_index,
                identity.generation,
            )
            if page is None:
                report.count_free("duplicate")
                continue
            disk.adopt(group.index, one)
            report.taken += 1
        self.settle()

    async def _sync_files(self) -> None:
        """Sync once per batch, in the background; then its pages count as persistent (INV-927)."""
        disk = self._disk
        assert disk is not None
        try:
            while self.executor.written_since_sync:
                written, self.executor.written_since_sync = self.executor.written_since_sync, 0
                await self._blocking(disk.sync)
                self._persistent_pages += written
        finally:
            self._is_syncing = False

    def _publish_event(self, event: tuple[str, int, bytes, int]) -> None:
        kind, group, key, level = event
        assert self.config.on_event is not None
        name = self._levels[level].name.lower() if level >= 0 else ""
        try:
            self.config.on_event(KVEvent(kind, self.config.pool_groups[group].name, key, name))
        except Exception:
            logger.exception("the on_event callback raised")

    # Failing and closing.

    def fail(self, error: BaseException) -> None:
        """Stop serving: a sticky device error or a broken rule (INV-917). Tickets are published."""
        if self._state is not StoreState.OPEN:
            return
        logger.error("the store has failed: %r", error)
        self._state = StoreState.FAILED
        self._failure = error
        if self.gate is not None:
            self.gate.close()
        self.restores.fail_all(StoreFailed(f"the store has failed: {error}"))
        self.executor.abandon_waiters()
        self._end_drains(StoreFailed(f"the store has failed: {error}"))
        for future in self._shrunk.values():
            _reject(future, StoreFailed(f"the store has failed: {error}"))

    def _end_drains(self, error: KVStoreError) -> None:
        drains, self._drains = self._drains, []
        for drain in drains:
            drain.fail(error)

    async def aclose(self, *, flush: bool = False) -> None:
        """Close the store; a second call does nothing (INV-909).

        ``flush`` writes committed pages to free disk slots first, within the deadline (INV-926).
        Raises: LogicError: sessions are open; nothing was done (INV-907).
        """
        if threading.get_ident() != self._thread_id:
            raise LogicError("a store is used from the thread of its event loop only")
        if self._poisoned:
            raise StoreFailed(self._poisoned)
        if self._state in {StoreState.CLOSING, StoreState.CLOSED}:
            if self._closing is not None:
                await asyncio.shield(self._closing)
            return
        self._refuse_sessions("aclose")
        await self._close_from_owner(flush=flush)

    async def _close_from_owner(self, *, flush: bool) -> None:
        """Close in a shielded child: repeated cancels of the owner do not cut it short (C21)."""
        if self._closing is None:
            self._closing = self._loop.create_future()
            assert self._group is not None or self._state is StoreState.OPENING
            if self._group is None:
                self._closing.set_result(await self._resources.close())
            else:
                self._group.start_soon(self._close_job, flush, name="kvstore close")
        cancelled: BaseException | None = None
        while not self._closing.done():
            try:
                with anyio.CancelScope(shield=True):
                    await asyncio.shield(self._closing)
            except asyncio.CancelledError as error:
                cancelled = error
        errors = self._closing.result()
        if cancelled is not None:
            raise cancelled
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup("closing the store", errors)

    async def _close_job(self, flush: bool) -> None:
        assert self._closing is not None
        errors: list[BaseException] = []
        with anyio.CancelScope(shield=True):
            try:
                errors = await self._shut_down(flush=flush)
            except BaseException as error:  # noqa: BLE001  handed to whoever closes
                errors.append(error)
            finally:
                if not self._closing.done():
                    self._closing.set_result(errors)

    async def _shut_down(self, *, flush: bool) -> list[BaseException]:
        errors: list[BaseException] = []
        was_opened = hasattr(self, "restores")
        is_flushing = flush and self._state is StoreState.OPEN
        self._state = StoreState.CLOSING
        if is_flushing:
            try:
                await self._flush()
            except Exception as error:  # noqa: BLE001  gathered and raised together
                errors.append(error)
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        for scope in self._scopes:
            scope.cancel()
        is_drained = True
        if was_opened:
            reason = StoreClosed("the store is closing")
            steps: list[Callable[[], object]] = [
                lambda: self.restores.fail_all(reason),
                lambda: self._end_drains(reason),
                self.executor.cancel_all,
            ]
            if self.gate is not None:
                steps.append(self.gate.close)
            for step in steps:
                try:
                    step()
                except Exception as error:  # noqa: BLE001  gathered and raised together
                    errors.append(error)
            try:
                is_drained = await self._drain()
            except Exception as error:  # noqa: BLE001  gathered and raised together
                errors.append(error)
                is_drained = False
            errors += await self._end_tables()
        limit_at = self._loop.time() + self.config.io.drain_timeout
        while self._background_open and self._loop.time() < limit_at:
            await _survive(lambda: anyio.sleep(0.001))
        is_drained &= not self._background_open  # it may still use files and memory (INV-139)
        if self._disk is not None:
            disk = self._disk
            errors += await self._closing_step(lambda: disk.close_files(leak=not is_drained))
        if hasattr(self, "device"):  # a stream that never ends may read arenas and gate words
            errors += await self._closing_step(self._quiesce_device)
        holds = not is_drained or self._device_holds_memory
        errors += await self._closing_step(lambda: self._release_memory(leak=holds))
        errors += await self._resources.close()
        self._workers.shutdown(wait=False)
        self._state = StoreState.CLOSED
        _live_stores.discard(self)
        return errors

    async def _closing_step(self, work: Callable[[], list[BaseException]]) -> list[BaseException]:
        try:
            return await _survive(lambda: self._blocking(work))
        except Exception as error:  # noqa: BLE001  gathered and raised together
            return [error]

    async def _end_tables(self) -> list[BaseException]:
        try:
            while not self.tables.close_some(CLOSE_SLOTS_MAX):
                await _survive(anyio.lowlevel.checkpoint)
            self.tables.take_outbox()
        except Exception as error:  # noqa: BLE001  gathered and raised together
            return [error]
        return []

    async def _drain(self) -> bool:
        """Wait until nothing of this store is in flight; False after the limit (INV-139)."""
        limit = self.config.io.drain_timeout
        is_drained = await self._wait_idle(limit)
        if self._disk is not None:
            for file_id in [one for group in self._disk.groups for one in group.file_ids]:
                is_drained &= await self._drain_file(file_id, limit)
        if not is_drained:
            logger.error("closing: transfers never came back within %.1f s", limit)
        return is_drained

    async def _drain_file(self, file_id: int, limit: float) -> bool:
        engine = self.engine
        assert engine is not None
        return await _survive(lambda: engine.drain(file_id, limit))

    async def _wait_idle(self, limit: float) -> bool:
        executor = self.executor
        deadline_at = self._loop.time() + limit
        while not executor.is_idle and self._loop.time() < deadline_at:
            idle = self._loop.create_future()
            executor.on_idle.append(functools.partial(resolve, idle))
            timer = self._loop.call_at(deadline_at, resolve, idle)
            try:
                await _survive(functools.partial(_wait, idle))
            finally:
                timer.cancel()
        return executor.is_idle

    async def _flush(self) -> None:
        """Write committed pages to free disk slots, within the deadline (INV-926)."""
        plan = self.tables.plan_flush()
        self.tables.apply(plan)
        self.settle()
        await self._wait_idle(self.config.io.deadline)
        if self._disk is not None and self.config.fingerprint is not None:
            await _survive(lambda: self._blocking(self._disk_sync))

    def _disk_sync(self) -> None:
        assert self._disk is not None
        self._disk.sync()

    # Work off the loop.

    async def _blocking(self, work: Callable[[], T], undo: Callable[[T], Any] | None = None) -> T:
        """Run blocking work on the store's threads.

        Cancellation: waits for the work, which cannot be recalled; ``undo`` gives its result back.
        """
        future = self._loop.run_in_executor(self._workers, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _survive(lambda: _wait(future))
            if undo is not None and future.exception() is None:
                undo(future.result())
            raise

    def _offload(
        self, work: Callable[..., Any], args: tuple[Any, ...], done: Callable[[int], None]
    ) -> None:
        """Run ``work`` off the loop and call ``done`` with a status on the loop."""
        future = self._loop.run_in_executor(self._workers, work, *args)

        def ended(finished: asyncio.Future[Any]) -> None:
            failed = finished.cancelled() or finished.exception() is not None
            done(-5 if failed else 0)

        future.add_done_callback(ended)

    def _start_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a child of the store's task group; it ends with the store."""
        assert self._group is not None
        self._background_open += 1

        scope = anyio.CancelScope()
        self._scopes.add(scope)

        async def run() -> None:
            try:
                with scope:
                    await work()
            except KVStoreError as error:
                logger.warning("background work ended: %s", error)
            except Exception as error:
                logger.exception("background work failed")
                self.fail(error)
            finally:
                self._scopes.discard(scope)
                self._background_open -= 1

        self._group.start_soon(run)


def _reject(future: asyncio.Future[None], error: BaseException) -> None:
    """Fail a wait, unless it has ended; nobody may be waiting any more (C21)."""
    if not future.done():
        future.set_exception(error)
        future.exception()


async def _wait(future: asyncio.Future[Any]) -> None:
    """Wait until a future is done, whatever its outcome."""
    while not future.done():
        await asyncio.wait([future])


async def _survive(step: Callable[[], Awaitable[T]]) -> T:
    """Run an idempotent step to its end: shielded from anyio, again after a native cancel."""
    for _ in range(SURVIVED_CANCELS_MAX):
        try:
            with anyio.CancelScope(shield=True):
                return await step()
        except asyncio.CancelledError:
            continue
    return await step()


def _make_arena(length: int, slab_bytes: int, numa_node: int | None) -> Arena:
    return Arena(length, slab_bytes=slab_bytes, numa_node=numa_node)


@final
class Drain:
    """What `KVStore.step` returns: done when the slots asked for before it are drained."""

    __slots__ = ("_deadline_s", "_error", "_fences", "_future", "_loop", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fences: list[Fence], deadline_s: float
    ) -> None:
        """Bound the wait: the last user of a slot may be a transfer that never ends (INV-119)."""
        self._loop = loop
        self._fences = fences
        self._deadline_s = deadline_s
        self._timer: asyncio.TimerHandle | None = None
        self._future: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether every slot is drained."""
        return not self._fences

    def check(self) -> bool:
        """Forget the fences that have passed; True when none is left."""
        fences = self._fences
        while fences and fences[-1].passed:  # asked after each completion: never the whole list
            fences.pop()
        if not fences and self._future is not None and not self._future.done():
            self._future.set_result(None)
            self._stop_timer()
        return not fences

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self.fail(
            DeadlineError(
                f"step: slots that sessions asked for did not drain within {self._deadline_s:g} s; "
                "close such a session, its slots come back with the transfer that uses them"
            )
        )

    def fail(self, error: BaseException) -> None:
        """End the wait with an error; the store is closing or has failed."""
        self._error = error
        self._stop_timer()
        if self._future is not None:
            _reject(self._future, error)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until every slot is drained. Raises: StoreClosed, StoreFailed, DeadlineError."""
        if self._error is not None:
            raise self._error
        if self.check():
            return
        if self._future is None:
            self._future = self._loop.create_future()
            self._timer = self._loop.call_later(self._deadline_s, self._expire)
        yield from asyncio.shield(self._future).__await__()


@final
class RecoveryReport:
    """What a restart found: pages taken in, and free slots by reason."""

    __slots__ = ("free", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.free: dict[str, int] = {}

    def count_free(self, reason: str) -> None:
        """Count a slot that is free after recovery."""
        self.free[reason] = self.free.get(reason, 0) + 1


@final
class _GateLease:
    """One gated stream, reserved until the restore behind it has ended."""

    __slots__ = ("_behind", "_gate", "_index", "_is_ended", "_store", "stream")

    def __init__(self, store: KVStore, gate: Gate, index: int, behind: Stream | None) -> None:
        self._store = store
        self._gate = gate
        self._index = index
        self._behind = behind
        self._is_ended = False
        self.stream = store.gated_stream(index)

    def reserve(self, transfers: Sequence[int]) -> list[GateTicket] | None:
        """Take one ticket per entry, all or none; None is `GateBusy`, counted (INV-211)."""
        behind = () if self._behind is None else (self._behind,)
        try:
            return self._gate.reserve(self.stream, transfers, behind=behind)
        except (GateBusy, UnsupportedError):
            self._store.count_gate_busy()
            return None

    def end(self, tickets: Iterable[GateTicket], *, is_fallback: bool = False) -> None:
        """Release tickets and the stream."""
        if self._is_ended:
            return
        self._is_ended = True
        for ticket in tickets:
            if ticket.status is None:
                ticket.publish(-125)
            ticket.release()
        self._store.release_gate(self._index, is_fallback=is_fallback)
