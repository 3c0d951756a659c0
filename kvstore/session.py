"""One request's view of the store: match, restore, grow, commit, suspend, prefetch, fork.

A session holds its pages for as long as it lives, so they may move down but are never dropped, and
locks them while it is active, so they stay on the device. Decisions are made in plain functions;
only `Session.resume`, `Restore.ready` and a `Prefetch` wait, each on a future of its own, so
cancelling one waiter never touches another (INV-326, INV-327, INV-336).
"""

from __future__ import annotations

import asyncio
import logging
import operator
import warnings
from collections import deque
from collections.abc import Awaitable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self, final

import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from kvstore import config as cfg
from kvstore._uring.base import DEADLINE, OK
from kvstore.core.page import Page, PageState
from kvstore.core.slots import Fence
from kvstore.core.tables import PASSED, Applied, Plan, Refusal, Tables
from kvstore.devices.base import Device, Stream
from kvstore.errors import (
    DeadlineError,
    DeviceError,
    EngineError,
    LogicError,
    OutOfPages,
    PagesLost,
    UnsupportedError,
)
from kvstore.executor import RETRY, Executor, Flight, Gated
from kvstore.gate import GateTicket
from kvstore.keys import BlockKey, KeyChain, Tokens, token_bytes

logger = logging.getLogger(__name__)

PageTable = npt.NDArray[np.int32]

ROUNDS_MAX = 64  # plans of one resume; each round either finishes or shortens the session
#: Restores of at least so many pages are planned and started one pool group after the other.
PARTS_MIN = 512


class SessionState(Enum):
    """Where a session stands (INV-332)."""

    SUSPENDED = "suspended"
    RESTORING = "restoring"
    ACTIVE = "active"
    CLOSED = "closed"


_NEXT: dict[SessionState, frozenset[SessionState]] = {
    SessionState.SUSPENDED: frozenset({SessionState.RESTORING, SessionState.CLOSED}),
    SessionState.RESTORING: frozenset(
        {SessionState.ACTIVE, SessionState.SUSPENDED, SessionState.CLOSED}
    ),
    SessionState.ACTIVE: frozenset({SessionState.SUSPENDED, SessionState.CLOSED}),
    SessionState.CLOSED: frozenset(),
}


class StoreServices(Protocol):
    """What a session needs of its store; `KVStore` provides it."""

    config: cfg.StoreConfig
    device: Device
    tables: Tables
    executor: Executor
    restores: RestoreQueue
    prefetches: PrefetchBudget

    @property
    def is_foreign(self) -> bool:
        """Whether the process was forked since: then nothing may be touched, nor given back."""
        ...

    def check_open(self) -> None:
        """Raise StoreClosed, StoreFailed, or LogicError in a foreign thread."""
        ...

    def settle(self) -> None:
        """Act on what the last transitions of the tables asked for."""
        ...

    def wrap_stream(self, stream: Any) -> Stream:
        """Wrap a caller's stream; None is the store's default stream."""
        ...

    def grant(self, stream: Stream | None, fences: Sequence[Fence]) -> bool:
        """Let the stream wait until freshly granted slots are drained (INV-338, INV-417).

        False: no stream can wait for one of them yet; the awaitable of the next step covers it.
        """
        ...

    def step(self, fence: Any = None) -> Awaitable[None]:
        """Close a scheduler step; the result is done when the granted slots are drained."""
        ...

    def drain(self) -> Awaitable[None]:
        """Wait, without closing the step, until the slots asked for so far are drained."""
        ...

    def fence(self, event: Any) -> Fence | None:
        """Turn a caller's fence into one of the tables; None has passed (INV-338)."""
        ...

    def take_gate(self, behind: Stream | None) -> GateLease | None:
        """Reserve a gated stream, or None: busy or not supported (INV-211)."""
        ...

    @property
    def has_active(self) -> bool:
        """Whether any session is active, so that its locks may go without anything moving."""
        ...

    def level_index(self, level: str | int) -> int:
        """Return the index of a level given by name or index."""
        ...

    def device_slot(self, group: int, slot_id: int) -> int:
        """Return the position in the device pool of a slot id of the tables."""
        ...

    def adopt(self, session: Session) -> None:
        """Note that a session is open."""
        ...

    def forget(self, session: Session) -> None:
        """Note that a session is closed."""
        ...


class GateLease(Protocol):
    """One gated stream, reserved until the restore behind it has ended."""

    stream: Stream

    def reserve(self, transfers: Sequence[int]) -> list[GateTicket] | None:
        """Take one ticket per entry, all or none; None is `GateBusy`, counted (INV-211)."""
        ...

    def end(self, tickets: Iterable[GateTicket], *, is_fallback: bool = False) -> None:
        """Release tickets and the stream; ``is_fallback`` counts a restore that awaits instead."""
        ...


@final
class History:
    """The tokens of a session that it knows, and their keys, each made once (INV-323).

    More tokens may be known than computed: the rest of the prompt, and what a lost page takes back.
    """

    __slots__ = ("_known", "block_tokens", "chain")

    def __init__(self, block_tokens: int, root: BlockKey, tokens: Tokens) -> None:
        self.block_tokens = block_tokens
        self.chain = KeyChain(block_tokens, root)
        self._known = bytearray(token_bytes(tokens))
        self.chain.extend(np.frombuffer(bytes(self._known), "<u4"))

    @property
    def known_count(self) -> int:
        """Tokens known."""
        return len(self._known) // 4

    @property
    def keys(self) -> list[BlockKey]:
        """The keys of the full blocks known."""
        return self.chain.keys

    def put(self, position: int, tokens: Tokens) -> int:
        """Note ``tokens`` from ``position`` on and return how many they are.

        Tokens that repeat what is known cost no digest; others replace it from there on.
        Raises: ValueError: a token outside 32 bits; nothing is changed then.
        """
        data = token_bytes(tokens)
        start = position * 4
        assert start <= len(self._known)
        overlap = min(len(data), len(self._known) - start)
        if self._known[start : start + overlap] != data[:overlap]:
            self._cut(position)
            overlap = 0
        if overlap < len(data):
            self.chain.extend(np.frombuffer(data[overlap:], "<u4"))
            self._known += data[overlap:]
        return len(data) // 4

    def _cut(self, position: int) -> None:
        """Forget the tokens from ``position`` on; a new chain takes over the keys before it."""
        full = position // self.block_tokens
        del self._known[position * 4 :]
        chain = KeyChain(self.block_tokens, self.chain.root)
        chain.keys = self.chain.keys[:full]
        chain.hash_count = self.chain.hash_count
        chain.extend(np.frombuffer(bytes(self._known[full * self.block_tokens * 4 :]), "<u4"))
        self.chain = chain

    def fork(self, token_count: int) -> History:
        """Return an independent history of the first tokens; no full block is hashed again."""
        twin = object.__new__(History)
        twin.block_tokens = self.block_tokens
        twin.chain = self.chain.fork()
        twin._known = bytearray(self._known)
        if token_count < twin.known_count:
            twin._cut(token_count)
        return twin


@final
class Restore:
    """The outcome of a resume, final at once in await mode, on its way in gated mode.

    ``valid_tokens`` is what the session holds; ``failed_pages`` are (group, block) pairs that could
    not be served and ``first_failed_token`` is the first token lost with them, or None (INV-335).
    """

    __slots__ = (
        "_flight",
        "_gated",
        "_groups",
        "_session",
        "failed_pages",
        "first_failed_token",
        "is_gated",
        "status",
        "valid_tokens",
    )

    def __init__(self, session: Session, *, is_gated: bool = False) -> None:
        self._session = session
        self._flight: Flight | None = None
        self._gated: Gated | None = None
        self._groups = [group.name for group in session.store.config.pool_groups]
        self.is_gated = is_gated
        self.valid_tokens = session.history_tokens
        self.failed_pages: list[tuple[str, int]] = []
        self.first_failed_token: int | None = None
        self.status = OK

    @property
    def is_done(self) -> bool:
        """Whether the verdict of every page is known."""
        return self._flight is None

    def note_failure(self, pages: Sequence[tuple[int, int]], token: int, status: int) -> None:
        """Record pages that could not be served; the session has been cut already."""
        self.failed_pages.extend((self._groups[group], block) for group, block in pages)
        if self.first_failed_token is None or token < self.first_failed_token:
            self.first_failed_token = token
        self.status = self.status or status
        self.valid_tokens = self._session.history_tokens

    def raise_for_status(self) -> None:
        """Raise PagesLost unless every page was served.

        Raises: LogicError: a gated restore whose verdict is not known yet; await `ready` first.
        """
        if not self.is_done and not self._tickets_failed():
            raise LogicError("raise_for_status: the verdict of this gated restore is not known yet")
        if self.first_failed_token is None and not self._tickets_failed():
            return
        lost = PagesLost(
            f"{len(self.failed_pages)} pages could not be served, "
            f"valid up to token {self.valid_tokens}",
            first_failed_token=self.first_failed_token,
            failed_pages=tuple(self.failed_pages),
            valid_tokens=self.valid_tokens,
            status=self.status,
        )
        if self.status == DEADLINE:
            raise lost from DeadlineError("the deadline of a transfer passed")
        if self.status < 0:
            raise lost from EngineError(f"transfer status {self.status}", errno=-self.status)
        raise lost

    def __await__(self) -> Generator[Any, None, None]:
        """As `ready` for every group."""
        return self.ready().__await__()

    async def ready(self, group: str | None = None) -> None:
        """Wait until the pages of a group, or of all, are on the device or have failed.

        Cancellation: ends this wait only. Raises: PagesLost as `raise_for_status`.
        """
        flight = self._flight
        if flight is not None:
            index = None if group is None else self._group_index(group)
            await flight.wait(index)
        if self.is_done:
            self.raise_for_status()
        elif self._tickets_failed():
            raise PagesLost("a gated restore failed", first_failed_token=self.first_failed_token)

    def wait_group(self, group: str, stream: Any) -> None:
        """Let later work of ``stream`` wait until the pages of ``group`` have arrived.

        In await mode everything has arrived and nothing is enqueued. The data is good only if the
        verdict is: what is computed from it can be committed only then (INV-221).
        """
        index = self._group_index(group)
        if self._gated is not None and index in self._gated.events:
            event = self._gated.events[index]
            if event is not None:
                self._session.store.wrap_stream(stream).wait_event(event)

    def _group_index(self, group: str) -> int:
        try:
            return self._groups.index(group)
        except ValueError:
            raise LogicError(f"unknown pool group {group!r}", pool_group=group) from None

    def _tickets_failed(self) -> bool:
        if self._gated is None:
            return False
        return any(ticket.status not in {None, OK} for ticket in self._gated.tickets)

    def _tickets_open(self) -> bool:
        if self._gated is None:
            return False
        return any(ticket.status is None for ticket in self._gated.tickets)


@final
class _Waiting:
    """One restore in the queue."""

    __slots__ = ("deadline_at", "future", "pages", "session")

    def __init__(
        self,
        session: Session,
        pages: list[Page],
        future: asyncio.Future[Started],
        deadline_at: float | None,
    ) -> None:
        self.session = session
        self.pages = pages
        self.future = future
        self.deadline_at = deadline_at


@dataclass(slots=True)
class Started:
    """A restore whose slots are granted: who waits, and the moves made for it."""

    flight: Flight
    applied: Applied


@final
class RestoreQueue:
    """Grants slots to restores by age, all or none, within a budget (INV-416).

    The budget bounds the slots of restores on their way; one that is larger than the budget goes
    alone. A smaller later restore never passes an older one.
    """

    __slots__ = (
        "_is_pumping",
        "_loop",
        "_open",
        "_store",
        "_waiting",
        "budgets",
        "started_count",
        "waited_count",
    )

    def __init__(
        self, store: StoreServices, loop: asyncio.AbstractEventLoop, budgets: Sequence[int]
    ) -> None:
        self._store = store
        self._loop = loop
        self.budgets = list(budgets)
        self._open = [0] * len(budgets)
        self._waiting: deque[_Waiting] = deque()
        self.started_count = 0
        self.waited_count = 0
        self._is_pumping = False

    @property
    def waiting_count(self) -> int:
        """Restores that wait for slots."""
        return len(self._waiting)

    def start_now(
        self,
        session: Session,
        pages: list[Page],
        deadline_at: float | None,
        *,
        is_settled: bool = True,
    ) -> Started | Refusal | None:
        """Start a restore if nobody older waits and it fits; None: it is not its turn.

        Without ``is_settled`` the caller settles: a gated restore starts its moves itself.
        """
        if self._waiting:
            return None
        return self._start(session, pages, deadline_at, is_settled=is_settled)

    def _take(self, session: Session, flight: Flight, pages: list[Page], plan: Plan) -> Applied:
        """Apply a plan; what is there is locked, for the rest the flight waits."""
        applied = self._store.tables.apply(plan)
        session.lock_ready(pages)
        waiting = [page for page in pages if not session.has_locked(page)]
        self._store.executor.attach(flight, waiting)
        self._store.executor.share_deadline(flight, waiting)
        return applied

    def _apply_parts(self, session: Session, flight: Flight, rows: list[list[Page]]) -> Applied:
        """Plan and start one pool group after the other: the disk reads while the next is planned.

        The caller has planned it all, and groups share no slots. What a group lacks in spite of
        that is planned again after this flight.
        """
        executor = self._store.executor
        total = Applied([], [], [], [], [])
        for row in rows:
            part = self._store.tables.plan_restore([row if row is one else [] for one in rows])
            if isinstance(part, Refusal):
                continue
            total.moves += self._take(session, flight, row, part).moves
            executor.settle()
            executor.submit_early()
        return total

    async def start(
        self,
        session: Session,
        pages: list[Page],
        *,
        wait: bool,
        deadline_at: float | None,
        is_again: bool = False,
    ) -> Started:
        """Start a restore now or when its turn comes.

        ``is_again``: the restore had its turn and needs another one, so it is older than all that
        wait. If it has to wait it gives its locks up first: nobody waits with half of its slots.
        Cancellation: leaves the queue. Raises: OutOfPages: it never fits, or ``wait`` is False.
        DeadlineError: the deadline passed before its turn came.
        """
        if is_again:
            started = self._start(session, pages, deadline_at)
        else:
            started = self.start_now(session, pages, deadline_at)
        if isinstance(started, Started):
            return started
        if not wait or (started is not None and self._is_hopeless(started)):
            raise _out_of_pages(started)
        self.waited_count += 1
        waiting = _Waiting(session, pages, self._loop.create_future(), deadline_at)
        if is_again:
            waiting.pages = session.give_up_locks()
            self._waiting.appendleft(waiting)
            self._store.settle()
        else:
            self._waiting.append(waiting)
        timer = None
        if deadline_at is not None:
            timer = self._loop.call_at(deadline_at, _expire, waiting.future)
        try:
            return await waiting.future
        except BaseException:
            self._leave(waiting)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def pump(self) -> None:
        """Serve those who wait, oldest first, until one does not fit."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            self._serve()
        finally:
            self._is_pumping = False

    def _serve(self) -> None:
        while self._waiting:
            head = self._waiting[0]
            if head.future.done():
                self._waiting.popleft()
                continue
            started = self._start(head.session, head.pages, head.deadline_at)
            if isinstance(started, Started):
                head.future.set_result(started)
            elif started is not None and self._is_hopeless(started):
                head.future.set_exception(_out_of_pages(started))
            else:
                return
            self._waiting.popleft()

    def _is_hopeless(self, refusal: Refusal) -> bool:
        """Tell whether waiting may last for ever, and with it that of all who came later (INV-119).

        It does if the wish never fits; or if nobody is active and nothing moves but transfers that
        have stalled, so that only their end can make room (ADR 0016).
        """
        return refusal.never or (self._store.tables.is_stuck and not self._store.has_active)

    def fail_all(self, error: BaseException) -> None:
        """End every wait; the store is closing or has failed."""
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            if not entry.future.done():
                entry.future.set_exception(error)

    def forget(self, session: Session) -> None:
        """End the wait of a session that closes: nothing may be granted to it any more."""
        for waiting in [entry for entry in self._waiting if entry.session is session]:
            self._waiting.remove(waiting)
            if not waiting.future.done():
                waiting.future.set_exception(LogicError("resume: the session was closed meanwhile"))

    def _leave(self, waiting: _Waiting) -> None:
        future = waiting.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self._store.executor.detach(future.result().flight)  # granted in the turn of the cancel
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        self._store.executor.room_grew = True
        self._store.settle()

    def _start(
        self,
        session: Session,
        pages: list[Page],
        deadline_at: float | None,
        *,
        is_settled: bool = True,
    ) -> Started | Refusal | None:
        tables = self._store.tables
        dead = PageState.DEAD
        pages = [page for page in pages if page.state is not dead]
        need = [0] * len(self.budgets)
        rows: list[list[Page]] = [[] for _ in self.budgets]
        for page in pages:
            need[page.group] += page.level != 0
            rows[page.group].append(page)
        for group, count in enumerate(need):
            if self._open[group] and self._open[group] + count > self.budgets[group]:
                return None
            if self._waiting and count > tables.available_count(0, group):
                if len(rows[group]) <= tables.usable_count(0, group):
                    return None  # not worth a plan yet
                break  # quarantined slots have made it too large: it gets its refusal
        plan = tables.plan_restore(rows)
        if isinstance(plan, Refusal):
            return plan
        executor = self._store.executor
        flight = Flight(self._loop, 0, session.on_restored)
        session.wait_for(flight)
        flight.deadline_at = deadline_at or 0.0
        if is_settled and len(pages) >= PARTS_MIN and sum(map(bool, rows)) > 1:
            applied = self._apply_parts(session, flight, rows)
        else:
            applied = self._take(session, flight, pages, plan)
        if deadline_at is not None:
            flight.set_deadline(deadline_at, executor.expire)
        self.started_count += 1
        for group, count in enumerate(need):
            self._open[group] += count
        flight.when_done(lambda: self._ended(need))
        if is_settled and len(pages) >= PARTS_MIN:
            executor.settle_soon()
        elif is_settled:
            executor.settle()
        return Started(flight, applied)

    def _ended(self, need: list[int]) -> None:
        for group, count in enumerate(need):
            self._open[group] -= count
        self._store.executor.room_grew = True


def _expire(future: asyncio.Future[Started]) -> None:
    if not future.done():
        future.set_exception(DeadlineError("resume: the deadline passed while waiting for slots"))


def _out_of_pages(refusal: Refusal | None) -> OutOfPages:
    if refusal is None:
        return OutOfPages("resume: an older restore waits for slots", level=0)
    return OutOfPages(
        f"resume: level {refusal.level}, pool group {refusal.group}: "
        f"{refusal.needed} slots needed, {refusal.available} available",
        level=refusal.level,
        pool_group=refusal.group,
        needed=refusal.needed,
        available=refusal.available,
    )


@final
class Session:
    """One request's blocks: holds while it lives, locks while it is active (INV-332).

    Made by `KVStore.session`, used as an async context manager; leaving it closes the session.
    Always committed <= history <= capacity, all in tokens.
    """

    def __init__(
        self,
        store: StoreServices,
        history: History,
        priority: int,
        pages: list[list[Page | None]],
        block_count: int,
    ) -> None:
        self.store = store
        self.priority = priority
        self._state = SessionState.SUSPENDED
        self._known = history
        self._pages = pages
        self._block_tokens = store.config.block_tokens
        self._locked: set[Page] = set()
        self._growing: list[list[Page]] = [[] for _ in pages]  # not yet in the page table
        self._growing_fences: list[Fence] = []
        self._stream: Stream | None = None
        self._is_stream_given = False
        self._is_host_ordered = False  # no stream orders the caller's use of its pages
        self._restore: Restore | None = None
        self._flight: Flight | None = None  # what a resume waits for
        self._lease: GateLease | None = None
        self._prefetches: list[Prefetch] = []
        self._tables: list[PageTable] = []
        self._window_start = [0] * len(pages)  # first block of the window, per group
        self.history_tokens = block_count * self._block_tokens
        self.cached_tokens = self.history_tokens
        self.cached_tokens_by_level: dict[str, int] = {}

    # What a session says about itself.

    @property
    def state(self) -> str:
        """``suspended``, ``restoring``, ``active`` or ``closed``."""
        return self._state.value

    @property
    def committed_tokens(self) -> int:
        """Tokens in full blocks, which others may share."""
        return self.history_tokens // self._block_tokens * self._block_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens the pages of the session can take."""
        return self._block_count * self._block_tokens

    @property
    def known_tokens(self) -> int:
        """Tokens whose values are known, computed or not: the prompt and what was committed."""
        return self._known.known_count

    @property
    def hash_count(self) -> int:
        """Block digests made for this session (INV-323)."""
        return self._known.chain.hash_count

    @property
    def _block_count(self) -> int:
        return len(self._pages[0])

    def page_table(self, group: str) -> PageTable:
        """Return the device slot of each block of a pool group.

        Shapes: (blocks,) int32, -1 where the block has left the window, and, behind a gate, where
        its read had failed before `resume` returned. A copy: the caller may keep it; it is right
        until the next `try_grow`, `commit` or `suspend`.
        Raises: LogicError: the session is not active.
        """
        self._need(SessionState.ACTIVE, "page_table")
        index = self._group_index(group)
        return self._tables[index][: self._block_count].copy()

    # Restore.

    async def resume(
        self,
        stream: Any = None,
        *,
        gated: bool = False,
        wait: bool = True,
        deadline: float | None = None,
    ) -> Restore:
        """Bring every page of the session to the device and lock it.

        Lost or unreadable pages cut the session at the first of them; look at ``valid_tokens`` or
        call ``raise_for_status`` (INV-335). ``gated``: everything is enqueued behind the gate and
        the call returns at once, with ``stream`` (if given) waiting for all of it; if something is
        not ready the call falls back to await mode, which is counted (INV-202).
        Units: ``deadline`` in seconds from now.
        Cancellation: the session is suspended again and holds what it held (INV-916).
        Raises: OutOfPages: it never fits, or not now with ``wait=False``, or only the end of a
        transfer that has stalled could make room (ADR 0016); the pages stay held. DeadlineError:
        the deadline passed; the session is suspended. LogicError: not suspended. ValueError: the
        deadline is not a finite number.
        """
        self._need(SessionState.SUSPENDED, "resume")
        if deadline is not None:
            cfg.check_seconds("deadline", deadline)
        self._go(SessionState.RESTORING)
        self._restore = None
        try:
            self._stream = self.store.wrap_stream(stream)
            self._is_stream_given = stream is not None
            self._is_host_ordered = stream is None and self.store.device.caps.kind != "cuda"
            restore = Restore(self)
            started = self._start_gated(restore, stream, deadline) if gated else None
            if not restore.is_gated:
                await self._run_restore(restore, started, wait=wait, deadline=deadline)
            await anyio.lowlevel.checkpoint()  # a loop of resident resumes lets others run
            if self._state is not SessionState.RESTORING:
                raise LogicError("resume: the session was closed meanwhile")
        except BaseException:
            self._back_to_suspended()
            raise
        self._end_prefetches()
        self._go(SessionState.ACTIVE)
        self._restore, self._flight = restore, None
        self._rebuild_tables()
        restore.valid_tokens = self.history_tokens
        return restore

    async def _run_restore(
        self, restore: Restore, started: Started | None, *, wait: bool, deadline: float | None
    ) -> None:
        """Plan, wait, cut what was lost; until every page left is locked on the device."""
        deadline_at = None if deadline is None else self._now() + deadline
        is_again = False
        for _ in range(ROUNDS_MAX):
            if started is None:
                self._cut_lost(restore)
                wanted = self._unlocked_pages()
                if not wanted:
                    return
                started = await self.store.restores.start(
                    self, wanted, wait=wait, deadline_at=deadline_at, is_again=is_again
                )
            is_again = True
            self._end_prefetches()  # our flight waits for their transfers now
            await self._await_flight(started.flight)
            self._take_failures(started.flight, restore, is_own_deadline=deadline is not None)
            started = None
            if self._state is not SessionState.RESTORING:
                raise LogicError("resume: the session was closed meanwhile")
            self.store.check_open()
        raise LogicError("resume: the pages of this session do not come to rest")

    async def _await_flight(self, flight: Flight) -> None:
        if flight.is_done:
            return
        try:
            await flight.wait()
        except BaseException:
            self.store.executor.detach(flight)
            raise

    def _take_failures(self, flight: Flight, restore: Restore, *, is_own_deadline: bool) -> None:
        """Cut the session at the first page whose verdict is bad; RETRY plans again."""
        if flight.is_cancelled and not flight.failed:
            return
        bad = {page: status for page, status in flight.failed.items() if status != RETRY}
        if not bad:
            return
        if is_own_deadline and all(status == DEADLINE for status in bad.values()):
            raise DeadlineError("resume: the deadline passed before every page had arrived")
        self._cut_pages(bad, restore)

    def _cut_lost(self, restore: Restore) -> None:
        """Cut the session at the first page that is gone (INV-911)."""
        ended = PageState.DEAD
        dead = {
            page: OK
            for row in self._pages
            for page in row
            if page is not None and page.state is ended
        }
        if dead:
            self._cut_pages(dead, restore)

    def _cut_pages(self, bad: dict[Page, int], restore: Restore) -> None:
        failed = [
            (group, block)
            for group, row in enumerate(self._pages)
            for block, page in enumerate(row)
            if page is not None and page in bad
        ]
        if not failed:
            return
        first = min(block for _, block in failed)
        status = next((status for status in bad.values() if status != OK), OK)
        token = min(first * self._block_tokens, self.history_tokens)
        self._cut(first)
        restore.note_failure(failed, token, status)

    def _cut(self, block_count: int) -> None:
        """Keep the first blocks, or fewer where a window cannot serve that length (INV-319)."""
        if self._needs_rematch(block_count):
            match = self.store.tables.match(self._known.keys[:block_count])
            rows, block_count = match.pages, match.block_count
            fresh = [
                page
                for row, old in zip(rows, self._pages, strict=True)
                for page in row
                if page is not None and page not in set(old)
            ]
            self.store.tables.hold(fresh)
            self._drop_pages(self._pages, keep={page for row in rows for page in row})
            self._pages = [list(row) for row in rows]
        else:
            self._drop_pages([row[block_count:] for row in self._pages], keep=set())
            for row in self._pages:
                del row[block_count:]
        self.touch()
        self.history_tokens = min(self.history_tokens, block_count * self._block_tokens)
        self.store.settle()

    def _needs_rematch(self, block_count: int) -> bool:
        specs = self.store.tables.spec.groups
        for group, spec in enumerate(specs):
            if spec.window is None:
                continue
            for block in range(block_count):
                if self._pages[group][block] is None and spec.needs_block(
                    block, block_count, self._block_tokens
                ):
                    return True
        return False

    def _drop_pages(self, rows: Iterable[Sequence[Page | None]], keep: set[Page | None]) -> None:
        """Give up locks and holds; the tables release them from the tail (INV-324)."""
        pages = [page for row in rows for page in row if page is not None and page not in keep]
        locked = [page for page in pages if page in self._locked]
        self._locked.difference_update(locked)
        tables = self.store.tables
        # While restoring no kernel of this session has seen the pages yet.
        fence = PASSED if self._state is SessionState.RESTORING else None
        tables.unlock([page for page in locked if page.state is not PageState.DEAD], fence)
        tables.unhold([page for page in pages if page.state is not PageState.DEAD])

    def _unlocked_pages(self) -> list[Page]:
        """Return what is not locked yet, group by group (INV-337)."""
        locked = self._locked
        return [
            page for row in self._pages for page in row if page is not None and page not in locked
        ]

    def lock_ready(self, pages: Iterable[Page]) -> None:
        """Lock the pages that are on the device already."""
        ready = [page for page in pages if page.level == 0 and page.move is None]
        self.store.tables.lock(ready)
        self._locked.update(ready)

    def on_restored(self, page: Page) -> None:
        """Lock a page in the loop turn in which it arrives."""
        self.store.tables.lock([page])
        self._locked.add(page)

    def has_locked(self, page: Page) -> bool:
        """Whether this session holds a lock on the page."""
        return page in self._locked

    def wait_for(self, flight: Flight) -> None:
        """Note what the resume waits for: it ends with the resume or with the session."""
        self._flight = flight

    def _end_flight(self) -> None:
        """Wait no longer; pages that arrive later are not locked for this session (INV-916)."""
        flight, self._flight = self._flight, None
        if flight is not None and not flight.is_done:
            self.store.executor.detach(flight)

    def _back_to_suspended(self) -> None:
        if self._state is SessionState.CLOSED:
            return
        self._end_flight()
        self._unlock_all(PASSED)
        self._go(SessionState.SUSPENDED)
        self.store.executor.room_grew = True
        self.store.settle()

    def _unlock_all(self, fence: Fence | None) -> None:
        pages = [
            page
            for row in self._pages
            for page in row
            if page is not None and page in self._locked and page.state is not PageState.DEAD
        ]
        is_partial = any(
            page is not None and page not in self._locked for row in self._pages for page in row
        )
        self._locked.clear()
        self.store.tables.unlock(pages, fence)
        if is_partial:
            self.touch()

    def give_up_locks(self) -> list[Page]:
        """Turn every lock into a hold while the restore waits for slots; return all its pages.

        Others may use the slots meanwhile, or two half-restored sessions would wait for each
        other for ever (INV-416).
        """
        self._unlock_all(PASSED)
        self.store.executor.room_grew = True
        return self._unlocked_pages()

    def touch(self) -> None:
        """Use every page once, so that no page is more recently used than its parent (INV-324).

        Needed wherever only some pages of a history were locked, held or released.
        """
        tables = self.store.tables
        for row in self._pages:
            living = [page for page in row if page is not None and page.state is not PageState.DEAD]
            tables.hold(living, is_use=False)
            tables.unhold(living)

    # The gate.

    def _start_gated(self, restore: Restore, stream: Any, deadline: float | None) -> Started | None:
        """Enqueue everything behind the gate; otherwise return what was started for await mode."""
        self._cut_lost(restore)
        wanted = self._unlocked_pages()
        lease = self.store.take_gate(None if stream is None else self._stream)
        if lease is None:
            return None
        deadline_at = None if deadline is None else self._now() + deadline
        started = self.store.restores.start_now(self, wanted, deadline_at, is_settled=False)
        if not isinstance(started, Started):
            lease.end((), is_fallback=True)
            return None
        gated = self._enqueue_gated(started, lease, deadline)
        if gated is None:
            lease.end((), is_fallback=True)
            return started
        if not (gated.is_whole and self._follow(gated, stream)):
            # Something is not ordered behind the gate: only the loop knows its end (INV-213).
            started.flight.when_done(lambda: self._end_lease(gated, lease))
            return started
        restore.is_gated = True
        restore._flight = started.flight  # noqa: SLF001  the restore is ours
        restore._gated = gated  # noqa: SLF001
        self._lease = lease
        started.flight.when_done(lambda: self._gated_done(restore, started.flight, gated, lease))
        return started

    def _end_lease(self, gated: Gated, lease: GateLease) -> None:
        self.store.executor.void(gated)
        lease.end(gated.tickets, is_fallback=True)

    def _follow(self, gated: Gated, stream: Any) -> bool:
        """Let the caller's stream wait for the copies; False if the device refuses."""
        if stream is None or self._stream is None:
            return True
        try:
            for event in gated.events.values():
                self._stream.wait_event(event)
        except DeviceError as error:
            logger.warning("wait behind a gated restore refused: %s", error)
            return False
        return True

    def _enqueue_gated(
        self, started: Started, lease: GateLease, deadline: float | None
    ) -> Gated | None:
        moves = [move for move in started.applied.moves if move.page in started.flight.remaining]
        own = {move.page for move in moves}
        if any(page not in own for page in started.flight.remaining):
            self.store.executor.settle()
            return None  # somebody else's transfer is on its way: its verdict comes by the loop
        seconds = self.store.config.io.deadline if deadline is None else deadline
        return self.store.executor.start_gated(
            moves, lease.stream, lease.reserve, self._deadline_ns(seconds)
        )

    def _deadline_ns(self, seconds: float) -> int:
        return round((self._now() + seconds) * 1e9)

    def _gated_done(self, restore: Restore, flight: Flight, gated: Gated, lease: GateLease) -> None:
        """The loop has read every verdict: what failed cuts the session (INV-220, INV-221)."""
        restore._flight = None  # noqa: SLF001
        failed = dict(flight.failed)
        if failed and self._state in {SessionState.ACTIVE, SessionState.RESTORING}:
            self._cut_pages(failed, restore)
            if self._state is SessionState.ACTIVE:
                self._rebuild_tables()
        restore._gated = None  # noqa: SLF001
        self.store.executor.void(gated)
        lease.end(gated.tickets)

    # Growing and committing.

    def try_grow(self, tokens_total: int) -> bool:
        """Make room for ``tokens_total`` tokens; False, and nothing changed, if it does not fit.

        True: every slot is drained, or the session's stream has been made to wait for it, so work
        enqueued on that stream may use the page table at once (INV-338, INV-417). A caller that
        touches pages from the host awaits the next `KVStore.step` first, or resumes the session
        without a stream on the CPU device: then only drained slots are granted. False with
        `is_growing`: the slots are being drained; await the next step and call again. False
        without it: there is no room.
        Cost: O(new blocks). Raises: LogicError: the session is not active.
        """
        self._need(SessionState.ACTIVE, "try_grow")
        tokens_total = operator.index(tokens_total)
        missing = -(-tokens_total // self._block_tokens) - self._block_count
        if missing <= 0:
            return True
        missing -= len(self._growing[0])
        if missing > 0 and not self._start_growing(missing):
            return False
        stream = None if self._is_host_ordered else self._stream
        if self._growing_fences and not self.store.grant(stream, self._growing_fences):
            return False
        self._take_grown()
        self._extend_tables()
        return True

    async def grow(self, tokens_total: int) -> None:
        """As `try_grow`, waiting while the slots drain.

        On a GPU slots that were released in the open step wait until the scheduler closes it: this
        call never does, because only the scheduler knows the fence (INV-224).
        Raises: OutOfPages: there is no room; nothing was changed. LogicError: not active.
        """
        while not self.try_grow(tokens_total):
            if not self.is_growing:
                raise OutOfPages(
                    f"grow: no room on the device for {tokens_total} tokens", level="device"
                )
            if self.store.device.none_fence_has_passed:
                await self.store.step()
            else:
                await self.store.drain()

    @property
    def is_growing(self) -> bool:
        """Whether slots for this session are being drained after a `try_grow` that said False."""
        return any(not fence.passed for fence in self._growing_fences)

    def _start_growing(self, block_count: int) -> bool:
        """Take slots for more blocks; they stay out of the page table until they are usable."""
        tables = self.store.tables
        plan = tables.plan_grow([block_count] * len(self._pages), self.priority)
        if isinstance(plan, Refusal):
            return False
        applied = tables.apply(plan)
        for row, new_pages in zip(self._growing, applied.new_pages, strict=True):
            row.extend(new_pages)
            self._locked.update(new_pages)
        self._growing_fences.extend(applied.fences)
        self.store.settle()
        return True

    def _take_grown(self) -> None:
        for row, grown in zip(self._pages, self._growing, strict=True):
            row.extend(grown)
            grown.clear()
        self._growing_fences.clear()

    def commit(self, new_tokens: Tokens) -> int:
        """Append computed tokens; blocks that are full now become shareable.

        Tokens that repeat the known prompt cost no new digest. Returns the blocks completed.
        Raises: LogicError: not active, or beyond the capacity. PagesLost: the restore behind these
        tokens failed, so they are void (INV-221). ValueError: a token outside 32 bits.
        """
        self._need(SessionState.ACTIVE, "commit")
        self._check_restore()
        count = len(new_tokens)
        if self.history_tokens + count > self.capacity_tokens:
            raise LogicError(
                f"commit: {self.history_tokens + count} tokens exceed the capacity of "
                f"{self.capacity_tokens}; call try_grow first"
            )
        self._known.put(self.history_tokens, new_tokens)
        first = self.history_tokens // self._block_tokens
        self.history_tokens += count
        last = self.history_tokens // self._block_tokens
        for block in range(first, last):
            self._commit_block(block)
        if last > first:
            self._leave_windows(last)
            self.store.settle()
        return last - first

    def _check_restore(self) -> None:
        restore = self._restore
        if restore is None or not restore.is_gated:
            return
        if restore.first_failed_token is not None or restore._tickets_failed():  # noqa: SLF001
            restore.raise_for_status()
        if restore._tickets_open():  # noqa: SLF001
            raise LogicError("commit: the gated restore has no verdict yet; await ready() first")

    def _commit_block(self, block: int) -> None:
        """Put one full block into the index, or share the page that is there (INV-322)."""
        tables = self.store.tables
        key = self._known.keys[block]
        for group, row in enumerate(self._pages):
            page = row[block]
            assert page is not None
            parent = row[block - 1] if block else None
            parent_key = self._known.keys[block - 1] if block else None
            shared = tables.commit(page, key, parent, block, self.priority, parent_key=parent_key)
            if shared is not page:
                row[block] = shared
                self._locked.discard(page)
                self._locked.add(shared)
                self._tables[group][block] = self._position(shared)

    def _leave_windows(self, block_count: int) -> None:
        """Give up the pages that left a sliding window with this commit (INV-337)."""
        for group, spec in enumerate(self.store.tables.spec.groups):
            if spec.window is None:
                continue
            start = spec.first_window_block(block_count, self._block_tokens)
            sinks = spec.sink_blocks(self._block_tokens)
            row = self._pages[group]
            gone = [
                block
                for block in range(max(sinks, self._window_start[group]), start)
                if row[block] is not None
            ]
            self._window_start[group] = max(start, self._window_start[group])
            self._drop_pages([[row[block] for block in gone]], keep=set())
            for block in gone:
                row[block] = None
                self._tables[group][block] = -1

    # Suspending and closing.

    def suspend(self, fence: Any = None) -> None:
        """Turn locks into holds: the pages may move down once ``fence`` has passed.

        ``fence`` is an event behind the last work that uses the pages. None has passed on a CPU
        device; on others it is an event recorded now on the stream given to `resume`, or without
        one the next `KVStore.step` (INV-338, ADR 0006). Grown room without tokens is given back.
        Raises: LogicError: the session is not active.
        """
        self._need(SessionState.ACTIVE, "suspend")
        self._abandon_gate()
        self._take_grown()
        self._unlock_all(self._end_of_use(fence))
        used = -(-self.history_tokens // self._block_tokens)
        self._drop_pages([row[used:] for row in self._pages], keep=set())
        for row in self._pages:
            del row[used:]
        self._go(SessionState.SUSPENDED)
        self.store.executor.room_grew = True
        self.store.settle()

    async def aclose(self) -> None:
        """Give up every page; a second call does nothing (INV-332)."""
        self.close()
        await anyio.lowlevel.checkpoint()

    def close(self, fence: Any = None) -> None:
        """As `aclose`, at once. ``fence`` as in `suspend`."""
        if self._state is SessionState.CLOSED:
            return
        if self.store.is_foreign:
            self._state = SessionState.CLOSED
            return
        self._end_prefetches()
        self.store.restores.forget(self)
        self._end_flight()
        self._abandon_gate()
        self._take_grown()
        was_active = bool(self._locked)
        self._unlock_all(self._end_of_use(fence) if was_active else None)
        self._drop_pages(self._pages, keep=set())
        self._pages = [[] for _ in self._pages]
        self._restore = None  # it names this session: no cycle outlives a session
        self._state = SessionState.CLOSED
        self.store.forget(self)
        self.store.executor.room_grew = True
        self.store.settle()

    def _end_of_use(self, fence: Any) -> Fence | None:
        """Return the end of the work that uses the pages of this session (INV-338, ADR 0006).

        All use of the pages is ordered with the stream given to `resume`, or growing would not be
        safe either, so an event recorded there now is late enough, and nobody has to step.
        """
        if fence is None and self._is_stream_given and not self.store.device.none_fence_has_passed:
            assert self._stream is not None
            try:
                fence = self._stream.record()
            except (DeviceError, UnsupportedError) as error:  # captures, or the device is lost
                logger.info(
                    "no event behind the pages of a session, the next step counts: %s", error
                )
        return self.store.fence(fence)

    def _abandon_gate(self) -> None:
        restore = self._restore
        if restore is not None and restore._flight is not None:  # noqa: SLF001
            self.store.executor.detach(restore._flight)  # noqa: SLF001

    # Sharing, prefetching, estimating.

    def fork(self) -> Session:
        """Return a suspended session that shares the committed blocks (``n > 1`` sampling).

        Raises: LogicError: the session is restoring or closed.
        """
        if self._state not in {SessionState.ACTIVE, SessionState.SUSPENDED}:
            raise LogicError(f"fork: the session is {self.state}", state=self.state)
        self.store.check_open()
        blocks = self.history_tokens // self._block_tokens
        pages = [list(row[:blocks]) for row in self._pages]
        # A page lost meanwhile cuts the fork at its resume, as it cuts this session (INV-911).
        shared = [page for row in pages for page in row if page is not None]
        self.store.tables.hold([page for page in shared if page.state is not PageState.DEAD])
        history = self._known.fork(blocks * self._block_tokens)
        twin = Session(self.store, history, self.priority, pages, blocks)
        twin.cached_tokens_by_level = dict(self.cached_tokens_by_level)
        twin._window_start = list(self._window_start)
        self.store.adopt(twin)
        return twin

    def prefetch(self, level: str | int = 1, *, timeout: float | None = None) -> Prefetch:
        """Start to bring pages up to ``level``, within the store's budget (INV-333).

        Returns at once: an awaitable handle that holds its pages until the session resumes, it is
        cancelled, or ``timeout`` seconds have passed. Pages beyond the budget stay where they are.
        Raises: LogicError: the session is not suspended, or the level is the device.
        """
        self._need(SessionState.SUSPENDED, "prefetch")
        index = self.store.level_index(level)
        if timeout is not None:
            cfg.check_seconds("timeout", timeout)
        if index == 0:
            raise LogicError("prefetch: level 0 is what resume is for")
        handle = Prefetch(
            self, index, self.store.config.io.deadline if timeout is None else timeout
        )
        handle.start([page for row in zip(*self._pages, strict=True) for page in row if page])
        self._prefetches.append(handle)
        return handle

    def _end_prefetches(self) -> None:
        """End the handles: a resume has joined their transfers, or the session closes."""
        prefetches, self._prefetches = self._prefetches, []
        for handle in prefetches:
            handle.cancel()

    def estimate_restore(self) -> RestoreEstimate:
        """Estimate what a resume would move now; changes nothing and costs O(pages)."""
        by_level: dict[str, int] = {}
        byte_count: dict[str, int] = {}
        seconds = 0.0
        for row in self._pages:
            for page in row:
                if page is None or page.level <= 0:
                    continue
                tier = self.store.tables.spec.levels[page.level].tier
                name = tier.name.lower()
                size = self.store.executor.page_bytes[page.group]
                by_level[name] = by_level.get(name, 0) + 1
                byte_count[name] = byte_count.get(name, 0) + size
                seconds += size / self.store.executor.rates[tier].bytes_per_s
        return RestoreEstimate(by_level, byte_count, seconds)

    # Plumbing.

    def _need(self, state: SessionState, call: str) -> None:
        self.store.check_open()
        if self._state is not state:
            raise LogicError(
                f"{call}: the session is {self.state}, not {state.value}", state=self.state
            )

    def _go(self, state: SessionState) -> None:
        assert state in _NEXT[self._state], f"INV-332: {self._state} to {state}"
        self._state = state

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _group_index(self, name: str) -> int:
        for index, group in enumerate(self.store.config.pool_groups):
            if group.name == name:
                return index
        raise LogicError(f"unknown pool group {name!r}", pool_group=name)

    def _position(self, page: Page | None) -> int:
        if page is None or page.primary is None or page.primary.level != 0:
            return -1
        return self.store.device_slot(page.group, page.primary.slot_id)

    def _rebuild_tables(self) -> None:
        self._tables = [np.full(max(16, 2 * len(row)), -1, np.int32) for row in self._pages]
        for row, table in zip(self._pages, self._tables, strict=True):
            table[: len(row)] = [self._position(page) for page in row]

    def _extend_tables(self) -> None:
        """Add the slots of freshly grown blocks; the arrays double, so growing stays O(new)."""
        for group, row in enumerate(self._pages):
            table = self._tables[group]
            if len(row) > len(table):
                wider = np.full(2 * len(row), -1, np.int32)
                wider[: len(table)] = table
                table = self._tables[group] = wider
            start = len(row) - 1
            while start >= 0 and table[start] < 0 and row[start] is not None:
                table[start] = self._position(row[start])
                start -= 1

    async def __aenter__(self) -> Self:
        """Return the session; it was opened by `KVStore.session`."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the session on every way out."""
        self.close()
        if kind is None:
            await anyio.lowlevel.checkpoint()

    def __del__(self) -> None:
        """Warn of a session that was dropped open; the store is not touched (INV-311)."""
        if getattr(self, "_state", SessionState.CLOSED) is not SessionState.CLOSED:
            warnings.warn("a kvstore session was dropped without aclose()", ResourceWarning, 1)


@dataclass(frozen=True, slots=True)
class RestoreEstimate:
    """What a resume would have to move. ``seconds`` comes from bandwidth measured so far."""

    pages_by_level: dict[str, int]
    bytes_by_level: dict[str, int]
    seconds: float


@final
class Prefetch:
    """A prefetch on its way: await it, cancel it, or let the session's resume use it (INV-333).

    Awaiting returns the number of pages that are on the level (or above) now. No call polls.
    """

    __slots__ = ("_flight", "_is_ended", "_level", "_pages", "_session", "_timeout", "_timer")

    def __init__(self, session: Session, level: int, timeout: float) -> None:
        self._session = session
        self._level = level
        self._timeout = timeout
        self._flight: Flight | None = None
        self._pages: list[Page] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_ended = False

    @property
    def page_count(self) -> int:
        """Pages the prefetch covers: what the budget allowed."""
        return len(self._pages)

    @property
    def is_done(self) -> bool:
        """Whether nothing is on its way any more."""
        return self._flight is None or self._flight.is_done

    def start(self, pages: Sequence[Page]) -> None:
        """Take what the budget allows, in prefix order, and plan it."""
        store = self._session.store
        wanted = store.prefetches.take(
            self._level, [page for page in pages if page.level > self._level]
        )
        plan: Plan | Refusal | None = None
        while wanted:
            rows: list[list[Page]] = [[] for _ in store.config.pool_groups]
            for page in wanted:
                rows[page.group].append(page)
            plan = store.tables.plan_prefetch(rows, self._level)
            if not isinstance(plan, Refusal):
                break
            given_up = wanted[len(wanted) // 2 :] if len(wanted) > 1 else wanted
            store.prefetches.give(self._level, given_up)
            wanted = wanted[: len(wanted) - len(given_up)]
        if plan is None or isinstance(plan, Refusal):
            return
        store.tables.apply(plan)
        self._pages = list(wanted)
        store.tables.hold(self._pages, is_use=False)
        self._session.touch()
        loop = asyncio.get_running_loop()
        self._flight = Flight(loop, self._level, lambda _: None)
        store.executor.attach(
            self._flight,
            [page for page in wanted if page.level > self._level or not page.is_ready],
        )
        store.executor.share_deadline(self._flight, self._flight.remaining)
        self._timer = loop.call_later(self._timeout, self.cancel)
        store.settle()

    def cancel(self) -> None:
        """Give up: what is on its way is withdrawn unless somebody else waits for it."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._timer is not None:
            self._timer.cancel()
        store = self._session.store
        if self._flight is not None:
            store.executor.detach(self._flight)
        if self._pages:
            store.tables.unhold([page for page in self._pages if page.state is not PageState.DEAD])
            self._session.touch()
            store.prefetches.give(self._level, self._pages)
        store.executor.room_grew = True
        store.settle()

    def __await__(self) -> Generator[Any, None, int]:
        """Wait until every page has arrived or failed."""
        return self._wait().__await__()

    async def _wait(self) -> int:
        if self._flight is not None:
            await self._flight.wait()
        return sum(
            1
            for page in self._pages
            if page.state is not PageState.DEAD and page.is_ready and page.level <= self._level
        )


@final
class PrefetchBudget:
    """How many pages prefetches may hold per level and pool group (INV-333)."""

    __slots__ = ("_held", "limits")

    def __init__(self, limits: dict[tuple[int, int], int]) -> None:
        self.limits = limits
        self._held: dict[tuple[int, int], int] = {}

    def take(self, level: int, pages: Sequence[Page]) -> list[Page]:
        """Return the leading pages that the budget allows, and charge them."""
        granted = []
        for page in pages:
            place = (level, page.group)
            if self._held.get(place, 0) >= self.limits.get(place, 0):
                break
            self._held[place] = self._held.get(place, 0) + 1
            granted.append(page)
        return granted

    def give(self, level: int, pages: Iterable[Page]) -> None:
        """Repay."""
        for page in pages:
            self._held[level, page.group] -= 1
