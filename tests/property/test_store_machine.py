"""The whole store as a state machine: hypothesis drives sessions, resizes and faults.

The store is real; engine, disk and device are simulated and time is virtual. Restores and resizes
may run on while other rules happen. After each step `check_state` and every balance are looked at
and all pages of the active sessions are compared with the reference model. A failure prints the
shortest list of steps and a ``@reproduce_failure`` line. ``--hypothesis-seed N`` tries other steps,
``--hypothesis-profile deep`` twenty times as many.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore._uring.base import Opcode
from kvstore.config import PoolGroupConfig, StoreConfig
from kvstore.core.invariants import check_state
from kvstore.errors import (
    BusyError,
    CapacityError,
    DeadlineError,
    LogicError,
    OutOfPages,
    PagesLost,
    TransferError,
)
from kvstore.keys import BlockKey
from kvstore.testing import History, SimClient, SimLoop, SimRig, check_balances, sim_config

T = TypeVar("T")
BLOCK = 4
SALTS = (b"", b"tenant")
#: What a caller may meet and survive; anything else is a bug.
EXPECTED = (OutOfPages, PagesLost, DeadlineError, TransferError, CapacityError, BusyError)
GAUGES = frozenset(
    [
        "total",
        "ready",
        "draining",
        "primaries",
        "copies",
        "evictable",
        "available",
        "retained_copies",
    ]
)
PATIENCE_S = 5.0

INDEX = st.integers(0, 7)
#: Two kinds of block, so that most prefixes collide.
BLOCKS = st.builds(
    lambda kinds, count: [kinds >> index & 1 for index in range(count)],
    st.integers(0, 63),
    st.sampled_from([5, 6, 4, 3, 1, 0]),
)


@dataclass(eq=False)
class Entry:
    """One open session: the tokens it must hold, and those still to be computed."""

    session: Any
    history: History
    todo: list[int]
    task: asyncio.Task[None] | None = None
    prefetches: list[Any] = field(default_factory=list)
    is_closed: bool = False

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()

    def cut(self, valid: int) -> None:
        """Put what was lost back in front of what is still to be computed."""
        assert valid <= len(self.history.tokens)
        self.todo[:0] = self.history.tokens[valid:]
        self.history.truncate(valid)


def tokens_of(blocks: Sequence[int], tail: int) -> list[int]:
    """Return the tokens of blocks of two kinds, and a tail that is no full block."""
    full = [kind * BLOCK + index for kind in blocks for index in range(BLOCK)]
    return full + list(range(tail))


class StoreMachine(RuleBasedStateMachine):
    """Hypothesis picks the steps and every choice inside them, and shrinks what fails."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=SimLoop)
        self.entries: list[Entry] = []
        self.jobs: list[asyncio.Task[None]] = []
        self.committed: set[BlockKey] = set()
        self.met: Counter[str] = Counter()
        self.pushed = 0  # blocks of requests that nobody repeats
        self.is_broken = False
        self.is_open = False
        self._before: dict[tuple[str, str], Any] = {}

    # The loop and the one task that owns the store: each Runner.run is a task of its own, and a
    # store is left by the task that entered it.

    def go(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self.runner.run(work)
        except BaseException:
            self.is_broken = True
            raise

    @initialize(
        shape=st.sampled_from(["full", "window", "s3fifo"]),
        device_pages=st.sampled_from([8, 12]),
        host_pages=st.sampled_from([0, 6, 12]),
        disk_pages=st.sampled_from([0, 12, 24]),
        keep=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        fraction=st.sampled_from([0.0, 0.25, 1.0]),
        policy=st.sampled_from(["all", "all", "selective"]),
        seed=st.integers(0, 15),
        warm=st.lists(BLOCKS, min_size=3, max_size=9),
    )
    def start(
        self,
        shape: str,
        device_pages: int,
        host_pages: int,
        disk_pages: int,
        keep: tuple[bool, bool, bool],
        fraction: float,
        policy: str,
        seed: int,
        warm: Sequence[list[int]] = (),
    ) -> None:
        groups = [
            PoolGroupConfig("full", 512, eviction_policy="s3fifo" if shape[0] == "s" else "lru")
        ]
        if shape == "window":
            groups.append(PoolGroupConfig("local", 256, window=2 * BLOCK, sinks=BLOCK))
        disk_pages = disk_pages or (0 if host_pages else 12)
        self.config = sim_config(
            groups=groups,
            block_tokens=BLOCK,
            device_pages=device_pages,
            host_pages=host_pages,
            disk_pages=disk_pages,
            keep_disk=bool(disk_pages) and keep[0],
            write_through=bool(disk_pages and host_pages) and keep[1],
            keep_host=keep[2],
            disk={"disk_protected_copy_fraction": fraction, "write_policy": policy},
            io={"deadline": 0.5, "drain_timeout": 2.0, "bounce_pages": 1},
            check_invariants=False,
            restore_fraction=1.0,
            prefetch_fraction=0.5,
        )
        self.go(self._open(seed))
        for blocks in warm:  # full tiers from the start
            self.request(blocks, 1, b"", "close")

    async def _open(self, seed: int) -> None:
        loop = asyncio.get_running_loop()
        self.rig = SimRig.create(self.config, seed=seed)
        self.closing: asyncio.Future[None] = loop.create_future()
        ready: asyncio.Future[Any] = loop.create_future()
        self.owner = loop.create_task(self._own(ready))
        done, _ = await asyncio.wait([self.owner, ready], return_when=asyncio.FIRST_COMPLETED)
        if self.owner in done:
            self.owner.result()
        self.store = ready.result()
        self.client = SimClient(self.store, self.rig, self.config)
        self.is_open = True

    async def _own(self, ready: asyncio.Future[Any]) -> None:
        async with self.rig.open(self.config) as store:
            ready.set_result(store)
            await self.closing

    # Picking sessions.

    def _those(self, *states: str, busy: bool = False) -> list[Entry]:
        return [
            entry
            for entry in self.entries
            if entry.is_busy == busy and (busy or entry.session.state in states)
        ]

    def _pick(self, index: int, *states: str, busy: bool = False) -> Entry:
        those = self._those(*states, busy=busy)
        return those[index % len(those)]

    def _note(self, error: BaseException) -> None:
        self.met[type(error).__name__] += 1

    # Sessions.

    @precondition(lambda self: len(self.entries) < 6)
    @rule(
        blocks=BLOCKS,
        tail=st.integers(0, BLOCK - 1),
        salt=st.sampled_from(SALTS),
        priority=st.sampled_from([10, 35, 35]),
    )
    def open(self, blocks: list[int], tail: int, salt: bytes, priority: int) -> None:
        """INV-317, INV-321: a match is a prefix committed under this salt, and moves nothing."""
        self.go(self._open_session(tokens_of(blocks, tail), salt, priority))

    async def _open_session(self, tokens: list[int], salt: bytes, priority: int) -> None:
        known = np.asarray(tokens, np.int64)
        version, moved = self.store.stats().pages, dict(self.store.stats().moved_bytes)
        probe = self.store.probe(known, salt=salt)
        session = self.store.session(known, salt=salt, priority=priority)
        assert probe == session.cached_tokens
        assert session.cached_tokens % BLOCK == 0
        assert session.cached_tokens == sum(session.cached_tokens_by_level.values())
        assert version == self.store.stats().pages
        assert moved == self.store.stats().moved_bytes
        history = self.client.history(tokens[: session.cached_tokens], salt)
        self.entries.append(Entry(session, history, tokens[session.cached_tokens :]))
        for block in range(session.cached_tokens // BLOCK):
            assert history.key(block) in self.committed, "a prefix that nobody committed"

    @rule(blocks=BLOCKS, salt=st.sampled_from(SALTS))
    def probe(self, blocks: list[int], salt: bytes) -> None:
        """INV-321: a probe takes nothing, and finds only what was committed under this salt."""
        self.go(self._probe(tokens_of(blocks, 0), salt))

    async def _probe(self, tokens: list[int], salt: bytes) -> None:
        tables = self.store.tables
        version = tables.version
        found = self.store.probe(np.asarray(tokens, np.int64), salt=salt)
        assert version == tables.version
        assert found == sum(found.by_level.values())
        history = self.client.history(tokens, salt)
        for block in range(found // BLOCK):
            assert history.key(block) in self.committed

    @precondition(lambda self: len(self.entries) < 6)
    @rule(
        blocks=BLOCKS,
        tail=st.integers(0, BLOCK - 1),
        salt=st.sampled_from(SALTS),
        end=st.sampled_from(["suspend", "close", "suspend", "stay"]),
    )
    def request(self, blocks: list[int], tail: int, salt: bytes, end: str) -> None:
        """INV-303, INV-503: a whole request; what it finds and what it computes is right."""
        self.go(self._request(tokens_of(blocks, tail), salt, end))

    async def _request(self, tokens: list[int], salt: bytes, end: str) -> None:
        await self._open_session(tokens, salt, 35)
        entry = self.entries[-1]
        await self._resume(entry, gated=False, wait=True, deadline=None)
        if entry.session.state == "active" and entry.todo:
            await self._fill(entry, len(entry.todo), 0)
        if entry.session.state == "active" and end == "suspend":
            await self._suspend(entry, with_fence=True)
        elif end == "close":
            await self._close(entry)

    @precondition(lambda self: len(self.entries) < 6)
    @rule(count=st.sampled_from([2, 4, 8]), fresh=st.booleans())
    def push_down(self, count: int, fresh: bool) -> None:
        """INV-410, INV-412: the active suspend, others come: older pages move down."""
        self.go(self._push_down(count, fresh))

    async def _push_down(self, count: int, fresh: bool) -> None:
        for entry in self._those("active"):
            await self._suspend(entry, with_fence=True)
        for number in range(count):
            base = (1 << 16) + self.pushed * BLOCK if fresh else number % 2 * BLOCK
            self.pushed += 5
            await self._request(list(range(base, base + 5 * BLOCK)), b"", "close")

    @precondition(lambda self: len(self._those("suspended")) > 1)
    @rule(
        gated=st.booleans(),
        wait=st.sampled_from([True, True, False]),
        deadline=st.sampled_from([None, 0.001, 0.3]),
        is_awaited=st.booleans(),
    )
    def resume_all(self, gated: bool, wait: bool, deadline: float | None, is_awaited: bool) -> None:
        """INV-326, INV-416: many restores at once share transfers and wait by age."""
        self.go(self._resume_all(gated, wait, deadline, is_awaited))

    async def _resume_all(
        self, gated: bool, wait: bool, deadline: float | None, is_awaited: bool
    ) -> None:
        started = self._those("suspended")
        for entry in started:
            work = self._resume(entry, gated=gated, wait=wait, deadline=deadline)
            await self._start(entry, work, 0)
        for entry in started:
            if is_awaited:
                await self._await_task(entry)

    @precondition(lambda self: self._those("suspended"))
    @rule(
        index=INDEX,
        gated=st.booleans(),
        wait=st.booleans(),
        deadline=st.sampled_from([None, None, 0.001, 0.3]),
        head_start=st.sampled_from([0, 1, 50]),
    )
    def start_resume(
        self, index: int, gated: bool, wait: bool, deadline: float | None, head_start: int
    ) -> None:
        """A restore that runs on while other rules happen (INV-326, INV-416)."""
        entry = self._pick(index, "suspended")
        work = self._resume(entry, gated=gated, wait=wait, deadline=deadline)
        self.go(self._start(entry, work, head_start * 1e-6))

    async def _start(
        self, entry: Entry, work: Coroutine[Any, Any, None], head_start: float
    ) -> None:
        entry.task = asyncio.get_running_loop().create_task(work)
        await asyncio.sleep(head_start)

    @precondition(lambda self: self._those("suspended"))
    @rule(index=INDEX, gated=st.booleans(), wait=st.booleans())
    def resume(self, index: int, gated: bool, wait: bool) -> None:
        """INV-335: what is served is right; the rest is cut off."""
        entry = self._pick(index, "suspended")
        self.go(self._resume(entry, gated=gated, wait=wait, deadline=None))

    async def _resume(
        self, entry: Entry, *, gated: bool, wait: bool, deadline: float | None
    ) -> None:
        session, restore = entry.session, None
        try:
            with anyio.move_on_after(PATIENCE_S):
                restore = await session.resume(
                    self.client.stream, gated=gated, wait=wait, deadline=deadline
                )
            if restore is None:
                assert entry.is_closed or session.state == "suspended"
                self.met["gave up"] += 1
                return
            entry.prefetches.clear()
            if restore.is_gated:
                await self._await_gated(entry, restore)
        except EXPECTED as error:
            self._note(error)
            return
        except LogicError:
            if not entry.is_closed:
                raise
            return
        except asyncio.CancelledError:
            if session.state == "active":
                session.suspend(self.client.stream.record())
            raise
        if entry.is_closed:
            return
        entry.cut(int(restore.valid_tokens))
        self.met["resumed"] += 1

    async def _await_gated(self, entry: Entry, restore: Any) -> None:
        """Check behind the gate; after a bad verdict what was seen there is void (INV-221)."""
        found: list[BaseException] = []
        self.met["gated"] += 1
        valid = int(restore.valid_tokens)
        self.client.verify(entry.session, entry.history, valid, into=found)
        event = self.client.stream.record()
        try:
            await restore.ready()
        except PagesLost as error:
            self._note(error)
            while not event.query():  # what the step saw is void, and so is all it computed
                await asyncio.sleep(1e-5)
            if not entry.is_closed:
                with pytest.raises(PagesLost):
                    entry.session.commit([1])
                entry.session.suspend(event)
                entry.cut(int(restore.valid_tokens))
            raise
        while not event.query() and not entry.is_closed:
            await asyncio.sleep(1e-5)
        if found and not entry.is_closed:
            raise found[0]

    @precondition(lambda self: self._those(busy=True))
    @rule(index=INDEX)
    def await_resume(self, index: int) -> None:
        """Every restore ends, well or badly (INV-113, INV-119)."""
        self.go(self._await_task(self._pick(index, busy=True)))

    async def _await_task(self, entry: Entry) -> None:
        assert entry.task is not None
        with contextlib.suppress(asyncio.CancelledError):
            await entry.task

    @precondition(lambda self: self._those(busy=True))
    @rule(index=INDEX)
    def cancel_resume(self, index: int) -> None:
        """INV-327, INV-916: a cancelled restore leaks nothing and hurts nobody."""
        self.go(self._cancel(self._pick(index, busy=True)))

    async def _cancel(self, entry: Entry) -> None:
        assert entry.task is not None
        entry.task.cancel()
        await self._await_task(entry)
        assert entry.session.state == "suspended"

    @precondition(lambda self: self._those("active"))
    @rule(index=INDEX, count=st.integers(1, 3 * BLOCK), kind=st.integers(0, 1))
    def fill(self, index: int, count: int, kind: int) -> None:
        """INV-315, INV-322, INV-417: grow, compute and commit; a refusal changes nothing."""
        self.go(self._fill(self._pick(index, "active"), count, kind))

    async def _fill(self, entry: Entry, count: int, kind: int) -> None:
        session, history = entry.session, entry.history
        start = len(history.tokens)
        if not await self._grow(entry, start + count):
            return
        new = entry.todo[:count]
        del entry.todo[:count]
        while len(new) < count:
            new.append(kind * BLOCK + (start + len(new)) % BLOCK)
        history.extend(new)
        self.client.compute(session, history, start)
        session.commit(np.asarray(new, np.int64))
        self.committed.update(history.key(block) for block in range(len(history.tokens) // BLOCK))
        self.client.verify(session, history, len(history.tokens))
        await self.client.settle()

    @precondition(lambda self: self._those("active"))
    @rule(index=INDEX, count=st.integers(1, 12 * BLOCK))
    def grow(self, index: int, count: int) -> None:
        """INV-417: growing alone, also by more than there is."""
        entry = self._pick(index, "active")
        self.go(self._grow(entry, len(entry.history.tokens) + count))

    async def _grow(self, entry: Entry, total: int) -> bool:
        session = entry.session
        capacity, held = session.capacity_tokens, len(entry.history.tokens)
        try:
            grown = await self.client.grow(session, total)
        except EXPECTED as error:
            self._note(error)
            grown = False
        assert held == session.history_tokens
        assert session.capacity_tokens >= (total if grown else capacity)
        if not grown:
            self.met["refused"] += 1
            assert capacity == session.capacity_tokens
        return grown

    @precondition(lambda self: self._those("active"))
    @rule(index=INDEX, with_fence=st.booleans())
    def suspend(self, index: int, with_fence: bool) -> None:
        """INV-309, INV-338: pages may move down once the fence has passed."""
        self.go(self._suspend(self._pick(index, "active"), with_fence))

    async def _suspend(self, entry: Entry, with_fence: bool) -> None:
        entry.session.suspend(self.client.stream.record() if with_fence else None)

    @precondition(lambda self: self._those("suspended") and len(self.store.stats().levels) > 2)
    @rule(index=INDEX, timeout=st.sampled_from([None, 0.001]), wait=st.booleans())
    def prefetch(self, index: int, timeout: float | None, wait: bool) -> None:
        """INV-333: a prefetch is awaited, used by a resume, times out, or is cancelled below."""
        self.go(self._prefetch(self._pick(index, "suspended"), timeout, wait))

    async def _prefetch(self, entry: Entry, timeout: float | None, wait: bool) -> None:
        handle = entry.session.prefetch("host", timeout=timeout)
        entry.prefetches.append(handle)
        if wait:
            with contextlib.suppress(*EXPECTED), anyio.move_on_after(PATIENCE_S):
                await handle

    @precondition(lambda self: any(entry.prefetches for entry in self.entries))
    @rule(index=INDEX)
    def cancel_prefetch(self, index: int) -> None:
        """INV-333: cancelling once or twice gives the budget back once."""
        those = [entry for entry in self.entries if entry.prefetches]
        handle = those[index % len(those)].prefetches[-1]

        async def cancel() -> None:
            handle.cancel()

        self.go(cancel())

    @precondition(lambda self: len(self.entries) < 6 and self._those("active", "suspended"))
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        """A fork shares the committed blocks of its session and nothing else."""
        self.go(self._fork(self._pick(index, "active", "suspended")))

    async def _fork(self, entry: Entry) -> None:
        twin = entry.session.fork()
        history = entry.history.copy()
        assert twin.history_tokens == len(history.tokens) // BLOCK * BLOCK
        history.truncate(twin.history_tokens)
        self.entries.append(Entry(twin, history, []))

    @precondition(lambda self: self.entries)
    @rule(index=INDEX)
    def close(self, index: int) -> None:
        """INV-311, INV-332: closing in any state gives everything back, and only once."""
        self.go(self._close(self.entries[index % len(self.entries)]))

    async def _close(self, entry: Entry) -> None:
        self.entries.remove(entry)
        entry.is_closed = True
        entry.session.close()
        entry.session.close()
        assert entry.session.state == "closed"
        if entry.is_busy:
            await self._await_task(entry)

    @precondition(lambda self: self._those("suspended", "active"))
    @rule(index=INDEX)
    def call_in_the_wrong_state(self, index: int) -> None:
        """INV-332: a call in the wrong state raises and does nothing."""
        self.go(self._wrong(self._pick(index, "suspended", "active")))

    async def _wrong(self, entry: Entry) -> None:
        session, version = entry.session, self.store.tables.version
        if session.state == "active":
            with pytest.raises(LogicError):
                session.prefetch(1)
            with pytest.raises(LogicError):
                await session.resume(self.client.stream)
            with pytest.raises(LogicError):
                session.commit(np.zeros(session.capacity_tokens + 1, np.int64))
        else:
            for call in (session.suspend, lambda: session.try_grow(1), lambda: session.commit([1])):
                with pytest.raises(LogicError):
                    call()
        assert version == self.store.tables.version

    # The store as a whole.

    @rule(with_fence=st.booleans())
    def step(self, with_fence: bool) -> None:
        """INV-224: what was released is reused only after the step's fence."""
        self.go(self._step(with_fence))

    async def _step(self, with_fence: bool) -> None:
        self.store.step(self.client.stream.record() if with_fence else None)

    @rule(microseconds=st.sampled_from([1, 20, 200, 5_000, 600_000]))
    def wait(self, microseconds: int) -> None:
        """Let what is on its way go on for a while."""
        self.go(asyncio.sleep(microseconds * 1e-6))

    @rule(
        level=st.sampled_from(["host", "disk"]),
        quarters=st.sampled_from([1, 2, 3, 4, 6]),
        is_awaited=st.booleans(),
    )
    def resize(self, level: str, quarters: int, is_awaited: bool) -> None:
        """INV-901, INV-902: tiers change their size under open sessions, or refuse whole."""
        self.go(self._start_resize(level, quarters, is_awaited))

    async def _start_resize(self, level: str, quarters: int, is_awaited: bool) -> None:
        if level not in self.store.stats().levels:
            return
        config: StoreConfig = self.config
        size = (
            config.host.host_cache_size
            if level == "host" and config.host
            else config.disk.disk_cache_size  # type: ignore[union-attr]
        )
        job = asyncio.get_running_loop().create_task(self._resize(level, size * quarters // 4))
        self.jobs.append(job)
        if is_awaited:
            await job

    async def _resize(self, level: str, size: int) -> None:
        try:
            with anyio.move_on_after(PATIENCE_S):
                await self.store.resize(level, size)
                self.met["resized"] += 1
        except (*EXPECTED, ValueError) as error:
            self._note(error)
        except LogicError as error:
            assert "is being resized already" in str(error)

    @rule(
        fault=st.sampled_from(
            [
                ("errno", errno.EIO),
                ("errno", errno.ENOSPC),
                ("short", 511),
                ("short", 4096),
                ("zero", 0),
                ("again", 0),
                ("flip", 0),
                ("torn", 4096),
                ("sectors", 0b101),
                ("lost", 0),
                ("misdirected", 8192),
                ("misdirected", -4096),
                ("late", 700_000_000),
                ("late", 1_000_000),
                ("never", 0),
            ]
        ),
        opcode=st.sampled_from([None, Opcode.READ, Opcode.WRITE]),
        nth=st.integers(0, 2),
        count=st.sampled_from([1, 1, 3, 12]),
    )
    def break_disk(
        self, fault: tuple[str, int], opcode: Opcode | None, nth: int, count: int
    ) -> None:
        """INV-910, INV-913, INV-914: the disk may do anything; what is served stays right."""
        self.rig.faults.add(fault[0], fault[1], opcode=opcode, nth=nth, count=count)

    @rule(
        call=st.sampled_from(["copy_pages", "wait_event", "notify_event", "wait_ticket"]),
        nth=st.integers(1, 2),
    )
    def break_device_call(self, call: str, nth: int) -> None:
        """INV-419: a refused device call fails its move only."""
        self.rig.device.inject(call, 1, nth=nth)

    @rule()
    def mend(self) -> None:
        """The disk works again, and what hung comes back (INV-119, INV-120)."""
        self.go(self._mend())

    async def _mend(self) -> None:
        self.rig.faults.clear()
        self.rig.faults.release()
        self.rig.device.clear_injected()

    @rule(bump=st.booleans())
    def clear(self, bump: bool) -> None:
        """INV-907, INV-519: refused while sessions are open, naming how many; else all is gone."""
        self.go(self._clear(bump))

    async def _clear(self, bump: bool) -> None:
        call: Callable[[], Coroutine[Any, Any, None]]
        call = self.store.bump_epoch if bump else self.store.clear
        version = self.store.tables.version
        if self.entries:
            with pytest.raises(LogicError, match=f"{len(self.entries)} sessions are open"):
                await call()
            with pytest.raises(LogicError, match=f"{len(self.entries)} sessions are open"):
                await self.store.aclose()
            assert version == self.store.tables.version
            return
        await call()
        assert 0 == self.store.stats().pages
        self.committed.clear()

    # What holds after each step.

    @invariant()
    def rules_hold(self) -> None:
        """INV-301 to INV-303, INV-804, INV-805, INV-808, INV-811, INV-812, INV-801."""
        if not self.is_open or self.is_broken:
            return
        try:
            self._check()
        except BaseException:
            self.is_broken = True
            raise

    def _check(self) -> None:
        self.go(asyncio.sleep(0))  # the turn in which the last step's errors surface
        for task in [*self.jobs, *(entry.task for entry in self.entries if entry.task)]:
            if task.done() and not task.cancelled():
                task.result()
        self.jobs = [job for job in self.jobs if not job.done()]
        assert not self.owner.done(), "the store ended by itself"
        stats = self.store.stats()
        check_balances(stats)
        check_state(self.store.tables)
        engine = stats.engine
        published = engine.tickets_good + engine.tickets_failed
        assert engine.tickets_taken == published + self.rig.gate.open_count, "INV-811"
        assert len(self.entries) == stats.sessions_open
        for place, pool in stats.pools.items():
            before = self._before.get(place)
            for name in type(pool).__dataclass_fields__:
                if before is not None and name not in GAUGES:
                    assert getattr(before, name) <= getattr(pool, name), f"INV-801: {name}"
            self._before[place] = pool

    @invariant()
    def every_served_page_is_right(self) -> None:
        """INV-910, INV-302, INV-332: active sessions see the model's bytes, all of them."""
        if not self.is_open or self.is_broken:
            return
        for entry in self._those("suspended", "active"):
            session = entry.session
            held = session.history_tokens
            assert session.committed_tokens <= held <= session.capacity_tokens
            if session.state == "active":
                assert len(entry.history.tokens) == held
                self._compare(entry)

    def _compare(self, entry: Entry) -> None:
        try:
            for group in self.config.pool_groups:
                pool, table = self.store.device_pool(group.name), self._table(entry, group.name)
                self.client.model.check(pool, group.name, table, entry.history)
        except BaseException:
            self.is_broken = True
            raise

    def _table(self, entry: Entry, group: str) -> Any:
        return entry.session.page_table(group)

    # The end of a run.

    def teardown(self) -> None:
        """Mend everything, close everything, and find nothing left (INV-908, INV-112)."""
        try:
            if self.is_open and not self.is_broken:
                self.go(self._end())
        finally:
            for entry in self.entries:
                entry.is_closed = True
                with contextlib.suppress(BaseException):
                    entry.session.close()
            if self.is_open:
                self.rig.faults.clear()
                self.rig.faults.release()
            with contextlib.suppress(BaseException):
                self.runner.close()

    async def _end(self) -> None:
        await self._mend()
        for entry in list(self.entries):
            await self._close(entry)
        for job in self.jobs:
            await job
        for _ in range(2):
            await asyncio.sleep(30)
            self.store.step(None)
            self.store.step(None)
        stats = self.store.stats()
        assert 0 == self.rig.engine.open_count
        assert 0 == stats.engine.background_bytes
        for place, pool in stats.pools.items():
            assert 0 == pool.draining, f"{place}: slots still drain at rest: {pool}"
            assert pool.primaries == pool.evictable, f"{place}: held at rest: {pool}"
            assert pool.total == pool.available, f"{place}: {pool}"
        self.closing.set_result(None)
        await self.owner
        self.rig.check_closed()
        self.client.raise_errors()


TestStoreMachine = pytest.mark.slow(StoreMachine.TestCase)  # a longer watchdog
TestStoreMachine.settings = settings(
    # tests/conftest.py chooses the profile, and whether the examples are always the same.
    max_examples=settings.default.max_examples * 3 // 5,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_the_machine_compares_pages() -> None:
    """A script of its rules serves, evicts, loses and restores pages: the machine looks at them."""
    machine = StoreMachine()
    try:
        machine.start("full", 8, 6, 24, (True, True, True), 1.0, "all", 1)
        for kinds in ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [1, 0, 1, 0, 1]):
            machine.open(kinds, 2, b"", 35)
            machine.resume(0, gated=False, wait=True)
            machine.fill(0, 22, 0)
            machine.rules_hold()
            machine.every_served_page_is_right()
            machine.close(0)
        machine.break_disk(("flip", 0), Opcode.READ, 2, 1)
        for kinds in ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1]):
            machine.open(kinds, 2, b"", 35)
            assert machine.entries[0].session.cached_tokens > 0
            machine.resume(0, gated=False, wait=True)
            machine.every_served_page_is_right()
            machine.rules_hold()
            machine.close(0)
        assert machine.store.stats().moved_bytes["disk2h"] > 0
        assert machine.client.model.checked_pages > 20
        assert machine.met["resumed"] >= 6
    finally:
        machine.teardown()
