"""Runs the moves of applied plans: takes what the tables want, moves bytes, reports verdicts.

A move is one page's way from a source slot to a target slot. Some ways are direct (a copy between
host and device, a disk transfer from or into a host slot), the others go through a *landing* slot:
a staging slot, or a bounce slot when the planner asked for one to break a cycle (INV-407). The
executor decides nothing about policy: the tables say which moves may start (INV-418), which to
promote and which to withdraw, and each end is reported back page by page (INV-419).

Work is batched per loop turn: one engine call for all disk transfers, one device call per
(direction, pool). Memory and slots belong to the move until its last completion (INV-120): a
waiter that goes away only detaches.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from kvstore._uring.base import (
    CANCELLED,
    DEADLINE,
    END_OF_FILE,
    MISMATCH,
    OK,
    CompletionFlag,
    Completions,
    Opcode,
    Ticket,
)
from kvstore.config import IoClass, Tier
from kvstore.core.page import Move, MoveState, Page
from kvstore.core.tables import Tables
from kvstore.devices.base import CopyDirection, Stream
from kvstore.errors import DeviceError, KVStoreError, StoreClosed
from kvstore.gate import GateTicket
from kvstore.tiers import disk_format
from kvstore.tiers.device import CopyBatch, DeviceTier
from kvstore.tiers.disk import DiskTier, Transfer
from kvstore.tiers.host import HostPool, HostTier, SlotLoans

logger = logging.getLogger(__name__)

#: Status of a page whose move ended for somebody else's reason; the waiter plans again.
RETRY = -10_100
#: Status of a move that the device refused.
DEVICE_FAILED = -10_101
#: Pages handed to device and engine in one turn of the loop; the rest leaves in the next ones.
TURN_PAGES_MAX = 256
#: Between two attempts to be told of the end of device copies.
NOTIFY_RETRY_S = 0.01
#: The first transfers of a large restore leave before the rest is prepared: the disk is not idle.
#: What is beyond them is started in the next turns, `TURN_PAGES_MAX` at a time (INV-129).
EARLY_PAGES = 64
#: Payload behind one ticket of a gated restore: disk and device link overlap slice by slice.
SLICE_BYTES = 16 << 20
#: Slices of one gated restore; each is a wait, a batch and two small launches behind the gate, and
#: about a thousand launches fit.
SLICES_MAX = 64

VERDICT = int(CompletionFlag.VERDICT)
END = int(CompletionFlag.END)


@final
class Flight:
    """One waiter for pages on their way to a level: a future of its own (INV-326, INV-336).

    ``arrived`` and ``failed`` say how each page ended. ``on_page`` is called in the loop turn in
    which a page arrives, so that a restored page is locked before anything else happens.
    """

    __slots__ = (
        "_loop",
        "_on_done",
        "_on_page",
        "deadline_at",
        "failed",
        "is_cancelled",
        "level",
        "open_count",
        "remaining",
        "timer",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, level: int, on_page: Callable[[Page], None]
    ) -> None:
        self._loop = loop
        self._on_page = on_page
        self._on_done: list[tuple[int | None, Callable[[], None]]] = []
        self.level = level
        self.remaining: dict[Page, None] = {}
        self.open_count: dict[int, int] = {}  # by pool group
        self.failed: dict[Page, int] = {}
        self.is_cancelled = False
        self.deadline_at = 0.0  # loop time; 0: every transfer has the default deadline
        self.timer: asyncio.TimerHandle | None = None

    def set_deadline(self, deadline_at: float, expire: Callable[[Flight], None]) -> None:
        """Call ``expire`` at a time of the loop, unless everything has ended by then."""
        self.deadline_at = deadline_at
        if not self.is_done:
            self.timer = self._loop.call_at(deadline_at, expire, self)

    @property
    def is_done(self) -> bool:
        """Whether nothing is awaited any more."""
        return not self.remaining

    def is_group_done(self, group: int | None) -> bool:
        """Whether nothing of a pool group (None: of any) is awaited any more."""
        return not self.remaining if group is None else not self.open_count.get(group)

    def add(self, pages: Sequence[Page]) -> None:
        """Await more pages."""
        self.remaining.update(dict.fromkeys(pages))
        for group, count in Counter([page.group for page in pages]).items():
            self.open_count[group] = self.open_count.get(group, 0) + count

    def arrive(self, page: Page) -> None:
        """Note that a page is where the waiter wants it."""
        self._remove(page)
        self._on_page(page)
        self._check_done(page.group)

    def fail(self, page: Page, status: int) -> None:
        """Note that a page will not come."""
        self._remove(page)
        self.failed[page] = status
        self._check_done(page.group)

    def _remove(self, page: Page) -> None:
        del self.remaining[page]
        self.open_count[page.group] -= 1

    def when_done(self, callback: Callable[[], None], group: int | None = None) -> None:
        """Call ``callback`` when the last page (of a group) has ended, at once if it has."""
        if self.is_group_done(group):
            callback()
        else:
            self._on_done.append((group, callback))

    def abandon(self) -> None:
        """Await nothing any more; who waits for the flight goes on and sees ``is_cancelled``."""
        self.remaining, self.open_count = {}, {}
        callbacks, self._on_done = self._on_done, []
        for _, callback in callbacks:
            callback()

    async def wait(self, group: int | None = None) -> None:
        """Wait for the last page (of a group). Cancellation: ends this wait only."""
        if self.is_group_done(group):
            return
        future = self._loop.create_future()
        self.when_done(lambda: resolve(future), group)
        await future

    def _check_done(self, group: int) -> None:
        if self.open_count[group]:
            return
        if not self.remaining and self.timer is not None:
            self.timer.cancel()
            self.timer = None
        callbacks = self._on_done
        self._on_done = [entry for entry in callbacks if not self.is_group_done(entry[0])]
        for waited, callback in callbacks:
            if self.is_group_done(waited):
                callback()


def resolve(future: asyncio.Future[None]) -> None:
    """End a wait, unless it has ended."""
    if not future.done():
        future.set_result(None)


@final
class _Job:
    """A move in the executor's hands, from its start to its last completion.

    ``landing`` is a slot of ``loans`` that belongs to the job. ``status`` is the verdict of its
    disk transfer so far, ``copy_status`` that of its device copies; ``is_gated`` moves were
    enqueued behind a ticket.
    """

    __slots__ = (
        "bounds",
        "copies_open",
        "copy_status",
        "expires_at",
        "is_cancelled",
        "is_ended",
        "is_gated",
        "is_void",
        "landing",
        "loans",
        "move",
        "stall_timer",
        "status",
        "ticket",
        "transfer",
    )

    def __init__(self, move: Move) -> None:
        self.move = move
        self.loans: SlotLoans | None = None
        self.landing = -1
        self.transfer: Transfer | None = None
        self.status = OK
        self.is_cancelled = False
        self.is_gated = False
        self.is_ended = False  # no piece of its disk transfer is in flight
        self.ticket: Ticket | None = None  # of a gated move, while its status may be read
        self.is_void = False  # its ticket may have been published before its bytes were there
        self.copies_open = 0
        self.copy_status = OK
        self.stall_timer: asyncio.TimerHandle | None = None
        self.expires_at = 0.0  # the deadline of its disk transfer, loop time
        self.bounds: dict[Flight, asyncio.TimerHandle] = {}  # who leaves before that

    def give_back(self) -> None:
        """Return the landing slot."""
        if self.loans is not None and self.landing >= 0:
            loans, landing = self.loans, self.landing
            self.landing = -1
            loans.give(landing)


@final
class _Rate:
    """Bytes per second of a path while it is busy, smoothed over the last batches."""

    __slots__ = ("_busy_since", "_open", "bytes_per_s")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._open = 0
        self._busy_since = 0.0

    def start(self, now: float, page_count: int = 1) -> None:
        """Note that more pages are on their way."""
        if not self._open:
            self._busy_since = now
        self._open += page_count

    def end(self, now: float, byte_count: int) -> None:
        """Note that a page has arrived: its share of the busy time is its cost."""
        elapsed = now - self._busy_since
        self._busy_since = now
        self._open = max(0, self._open - 1)
        if elapsed > 0 and byte_count:
            self.bytes_per_s += 0.1 * (byte_count / elapsed - self.bytes_per_s)


@final
class Executor:
    """Executes moves. All calls come from the loop's thread; nothing here waits or raises for a
    failed page.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        tables: Tables,
        tiers: Sequence[Tier],
        queue: Completions,
        device: DeviceTier,
        host: HostTier | None,
        disk: DiskTier | None,
        staging: Sequence[SlotLoans],
        bounce: Sequence[SlotLoans],
        on_failure: Callable[[BaseException], None],
        after_turn: Callable[[], None],
        offload: Callable[[Callable[..., Any], tuple[Any, ...], Callable[[int], None]], None],
        stall_s: float,
    ) -> None:
        self._loop = loop
        self._tables = tables
        self._tiers = tuple(tiers)
        self._queue = queue
        self._device = device
        self._host = host
        self._disk = disk
        self._staging = staging
        self._bounce = bounce
        self._on_failure = on_failure
        self._after_turn = after_turn
        self._offload = offload
        self._stall_s = stall_s
        self.jobs: dict[Move, _Job] = {}
        self._waiters: dict[Page, list[Flight]] = {}
        self._transfers: dict[_Job, Transfer] = {}
        self._copies: dict[CopyDirection, dict[tuple[int, int], tuple[HostPool, list[_Job]]]] = {
            CopyDirection.TO_HOST: {},
            CopyDirection.TO_DEVICE: {},
        }
        self._copy_slots: dict[_Job, tuple[int, int]] = {}
        self._unstarted: dict[Move, None] = {}  # moves to start in the next turns, oldest first
        self._is_flush_scheduled = False
        self.is_closing = False
        self._landless: dict[_Job, None] = {}  # jobs that wait for a landing slot
        self._held: set[Move] = set()  # moves that a gated restore starts itself,
        self._ready: list[Move] = []  # and those of them that may start
        self._landing_timers: dict[SlotLoans, asyncio.TimerHandle] = {}
        self.on_idle: list[Callable[[], None]] = []
        self._open_io = 0  # transfers and batches of copies that native code has
        self._is_broken = False
        self.on_event: Callable[[Any], None] | None = None
        self.on_shrunk: Callable[[list[tuple[int, int]]], None] = lambda _: None
        self.room_grew = False
        self.moved_bytes: dict[str, int] = {}
        self.page_bytes: list[int] = [pool.page_bytes for pool in device.pools]
        self.rates = {Tier.DISK: _Rate(1e9), Tier.HOST: _Rate(8e9)}
        self.written_since_sync = 0
        self.write_failures_in_a_row = 0
        self.read_failures_in_a_row = 0
        self.last_write_error = ""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight; after a bug of ours only native code is asked."""
        return not self._open_io and (self._is_broken or not (self.jobs or self._unstarted))

    # What the tables want.

    def settle(self) -> None:
        """Take the outbox and act on it; the bytes leave at the end of this loop turn.

        The first transfers of many leave at once: the disk works while the rest is prepared.
        """
        is_early = False
        room = EARLY_PAGES
        while self._tables.outbox:
            outbox = self._tables.take_outbox()
            start = outbox.start
            if self._held:
                self._ready += [move for move in start if move in self._held]
                start = [move for move in start if move not in self._held]
            if not self.is_closing and (self._unstarted or len(start) > room):
                if self._unstarted:
                    room = 0
                late = start[room:]
                again = [move for move in late if move in self.jobs]  # from the bounce buffer
                self._unstarted.update(dict.fromkeys(late))
                for move in again:
                    del self._unstarted[move]
                start = start[:room] + again
            room = max(0, room - len(start))
            for move in start:
                self._start(move)
                if len(self._transfers) == EARLY_PAGES and not is_early:
                    is_early = True
                    self._flush_transfers(None)
            for move in outbox.promote:
                self._promote(move)
            for move in outbox.cancel:
                self._withdraw(move)
            for move in outbox.resolved:
                self.review(move.page)
            for page in outbox.lost:
                self.review(page)
            if self.on_event is not None:
                for event in outbox.events:
                    self.on_event(event)
            if outbox.shrunk:
                self.on_shrunk(outbox.shrunk)
        self._schedule_flush()

    def settle_soon(self) -> None:
        """As `settle`, in the next turn: the caller has held the loop long enough (INV-129)."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush_turn)

    def _schedule_flush(self) -> None:
        if self._has_work:
            self.settle_soon()

    @property
    def _has_work(self) -> bool:
        return bool(self._unstarted or self._transfers) or any(self._copies.values())

    def _flush_turn(self) -> None:
        self._is_flush_scheduled = False
        self._guarded(self._turn)

    def _turn(self) -> None:
        self._start_late(itertools.islice(self._unstarted, TURN_PAGES_MAX))
        self.flush(TURN_PAGES_MAX)

    def _start_late(self, moves: Iterable[Move]) -> None:
        """Start moves that an earlier turn left."""
        for move in list(moves):
            if move in self._unstarted:  # else it was withdrawn meanwhile
                del self._unstarted[move]
                self._start(move)

    def _start_copies_out(self) -> None:
        """Start what leaves the device, so that it can be enqueued now."""
        self._start_late(
            move for move in self._unstarted if self._tiers[move.source.level] is Tier.DEVICE
        )

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Run what a completion asks for; a bug of ours stops the store, not the loop (INV-917)."""
        try:
            step(*args)
            self._settle_after()
        except Exception as error:
            logger.exception("the executor failed")
            self._is_broken = True
            self._on_failure(error)
        if self.on_idle and self.is_idle:
            callbacks, self.on_idle = self.on_idle, []
            for callback in callbacks:
                callback()

    def _settle_after(self) -> None:
        self.settle()
        self._after_turn()

    def flush(self, page_count: int | None = None) -> None:
        """Hand over what was collected: device copies out first, because they free slots for the
        copies in; then one engine call.

        With a bound, what is beyond it leaves in the next turns, so that a large restore does not
        hold the loop (INV-129).
        """
        if page_count is None:
            self._start_late(self._unstarted)
        for direction, stream in (
            (CopyDirection.TO_HOST, self._device.d2h),
            (CopyDirection.TO_DEVICE, self._device.h2d),
        ):
            self._flush_copies(direction, stream, page_count)
        if page_count is None and any(self._copies.values()):
            self.flush()
            return
        self._flush_transfers(page_count)
        self._schedule_flush()

    def submit_early(self) -> None:
        """Hand over what was collected for the disk, within the bound of a turn."""
        self._flush_transfers(TURN_PAGES_MAX)

    def flush_copies_out(self) -> None:
        """Enqueue every copy out of the device, so that the fences of its slots have events."""
        self._start_copies_out()
        self._flush_copies(CopyDirection.TO_HOST, self._device.d2h, None)
        self._schedule_flush()

    def _start(self, move: Move) -> None:
        job = self.jobs.get(move)
        if job is not None:  # second start of a bounced move: from the bounce slot to the target
            assert move.via_bounce
            assert move.state is MoveState.STARTED
            self._push(job)  # also while closing: the bounce slot ends with the job
            return
        job = self.jobs[move] = _Job(move)
        if self.is_closing:
            job.is_cancelled = True
            self._end(job, CANCELLED)
            return
        source, target = self._tiers[move.source.level], self._tiers[move.target.level]
        if move.via_bounce:
            self._land(job, self._bounce[move.page.group])
        elif (source, target) in _STAGED:
            self._land(job, self._staging[move.page.group])
        elif Tier.DEVICE in {source, target}:
            self._copy_direct(job, source)
        elif source is Tier.DISK:
            self._read(job, self._host_pool(move.target.group).address(move.target.slot_id))
        elif target is Tier.DISK:
            self._write(job, self._host_pool(move.source.group).address(move.source.slot_id))
        else:
            pool = self._host_pool(move.source.group)
            self._copy_host(job, pool, move.source.slot_id, pool, move.target.slot_id)

    def _host_pool(self, group: int) -> HostPool:
        assert self._host is not None
        return self._host.pools[group]

    # By way of a landing slot: first stage (pull) and second stage (push).

    def _land(self, job: _Job, loans: SlotLoans) -> None:
        job.loans = loans

        def taken(slot_id: int) -> bool:
            if job.move not in self.jobs:
                return False
            job.landing = slot_id
            self._landless.pop(job, None)
            self._pull(job)
            self._schedule_flush()
            return True

        self._landless[job] = None
        loans.take(taken)
        if job in self._landless and loans not in self._landing_timers:
            self._watch_landing(loans)

    def _watch_landing(self, loans: SlotLoans) -> None:
        """Fail those who wait for landing slots of one pool when none comes back (INV-119).

        Slots that transfers never gave back would otherwise keep every later move waiting.
        """
        given = loans.given_count

        def check() -> None:
            del self._landing_timers[loans]
            if loans.given_count == given:
                for job in self._waiting_for(loans):
                    self._end(job, DEADLINE)
            if self._waiting_for(loans) and loans not in self._landing_timers:
                self._watch_landing(loans)

        self._landing_timers[loans] = self._loop.call_later(self._stall_s, self._guarded, check)

    def _waiting_for(self, loans: SlotLoans) -> list[_Job]:
        return [job for job in self._landless if job.loans is loans]

    def _pull(self, job: _Job) -> None:
        """Bring the bytes from the source into the landing slot."""
        move = job.move
        assert job.loans is not None
        source = self._tiers[move.source.level]
        if source is Tier.DISK:
            self._read(job, job.loans.pool.address(job.landing))
        elif source is Tier.DEVICE:
            self._add_copy(
                job, CopyDirection.TO_HOST, job.loans.pool, move.source.slot_id, job.landing
            )
        else:
            pool = self._host_pool(move.source.group)
            self._copy_host(job, pool, move.source.slot_id, job.loans.pool, job.landing)

    def _pulled(self, job: _Job) -> None:
        """The bytes are in the landing slot and good: the source may drain (INV-329)."""
        self._tables.move_source_released(job.move)
        if not job.move.via_bounce and not job.is_gated:
            self._push(job)

    def _push(self, job: _Job) -> None:
        """Bring the bytes from the landing slot to the target."""
        move = job.move
        assert job.loans is not None
        target = self._tiers[move.target.level]
        if target is Tier.DEVICE:
            self._add_copy(
                job, CopyDirection.TO_DEVICE, job.loans.pool, move.target.slot_id, job.landing
            )
        elif target is Tier.DISK:
            self._write(job, job.loans.pool.address(job.landing))
        else:
            pool = self._host_pool(move.target.group)
            self._copy_host(job, job.loans.pool, job.landing, pool, move.target.slot_id)

    def _is_pulling(self, job: _Job) -> bool:
        """Whether the bytes are still on their way into the landing slot."""
        return job.loans is not None and not job.move.is_source_released

    # Copies between host and device.

    def _copy_direct(self, job: _Job, source: Tier) -> None:
        move = job.move
        pool = self._host_pool(move.page.group)
        if source is Tier.DEVICE:
            self._add_copy(
                job, CopyDirection.TO_HOST, pool, move.source.slot_id, move.target.slot_id
            )
        else:
            self._add_copy(
                job, CopyDirection.TO_DEVICE, pool, move.target.slot_id, move.source.slot_id
            )

    def _add_copy(
        self, job: _Job, direction: CopyDirection, pool: HostPool, device_slot: int, host_slot: int
    ) -> None:
        key = (job.move.page.group, id(pool))
        self._copies[direction].setdefault(key, (pool, []))[1].append(job)
        self._copy_slots[job] = (device_slot, host_slot)

    def _flush_copies(
        self, direction: CopyDirection, stream: Stream, page_count: int | None
    ) -> None:
        batches, self._copies[direction] = self._copies[direction], {}
        left = page_count
        for key, (pool, jobs) in batches.items():
            if left is not None and len(jobs) > left:
                self._copies[direction][key] = (pool, jobs[left:])
                jobs = jobs[:left]
            if left is not None:
                left -= len(jobs)
            if jobs:
                self._enqueue_copies(direction, stream, key[0], pool, jobs)
        if batches:
            self.settle_now()

    def settle_now(self) -> None:
        """Act on the outbox without scheduling another flush: a flush is running."""
        scheduled, self._is_flush_scheduled = self._is_flush_scheduled, True
        try:
            self.settle()
        finally:
            self._is_flush_scheduled = scheduled

    def _enqueue_copies(
        self,
        direction: CopyDirection,
        stream: Stream,
        group: int,
        pool: HostPool,
        jobs: list[_Job],
        seen: set[int] | None = None,
    ) -> Any:
        """Enqueue one batch behind the fences of its slots; returns the event behind it.

        ``seen``: events that the stream waits for already; added to.
        """
        slots = [self._copy_slots.pop(job) for job in jobs]
        batch = CopyBatch(
            group=group,
            host=pool,
            direction=direction,
            device_slots=[device_slot for device_slot, _ in slots],
            host_slots=[host_slot for _, host_slot in slots],
        )
        is_accepted = True
        try:
            self._wait_fences(stream, jobs, set() if seen is None else seen)
            self._device.copy(stream, batch)
        except KVStoreError as error:
            # A part may have been enqueued: slots come back only once the stream has passed.
            is_accepted = False
            logger.warning("device copy of %d pages refused: %s", len(jobs), error)
            for job in jobs:
                job.copy_status = DEVICE_FAILED
        for job in jobs:
            job.copies_open += 1
        self._open_io += 1
        event = self._record(stream) if is_accepted else None
        self._notify_copies(stream, jobs)
        if not is_accepted:
            return None
        name = direction.value
        self.moved_bytes[name] = self.moved_bytes.get(name, 0) + self.page_bytes[group] * len(jobs)
        for job in jobs:
            move = job.move
            if event is None:
                continue  # others wait for the end itself
            if direction is CopyDirection.TO_DEVICE:
                self._tables.fence_enqueued(move.target_fence, event)
            if not move.is_source_released and (
                direction is CopyDirection.TO_HOST or job.loans is None
            ):
                self._tables.fence_enqueued(move.source_fence, event)
        return event

    def _wait_fences(self, stream: Stream, jobs: Iterable[_Job], seen: set[int]) -> None:
        """Order a batch behind the last users of its slots: kernels, copies out, copies in."""
        for job in jobs:
            for fence in job.move.waits:
                if not fence.passed and fence.event is not None and id(fence.event) not in seen:
                    seen.add(id(fence.event))
                    stream.wait_event(fence.event)

    def _record(self, stream: Stream) -> Any:
        """Return an event behind the batch, or None if the device refuses to record one."""
        try:
            return stream.record()
        except KVStoreError as error:
            logger.warning("event behind a device copy refused: %s", error)
            return None

    def _notify_copies(self, stream: Stream, jobs: list[_Job]) -> None:
        """Ask to be told when the stream has passed; until then nothing of the batch is free.

        A refusal is tried again, because the copies may be running (INV-120). On a lost device
        nothing runs any more: the pages fail, and the store with them.
        """
        try:
            self._device.notify(stream, lambda status, *_: self._copies_back(jobs, status))
        except KVStoreError as error:
            if isinstance(error, DeviceError) and not getattr(error, "is_sticky", False):
                logger.warning("notification of a device copy refused: %s", error)
                self._loop.call_later(
                    NOTIFY_RETRY_S, self._guarded, self._notify_copies, stream, jobs
                )
                return
            self._open_io -= 1
            for job in jobs:
                job.copies_open -= 1
                job.copy_status = DEVICE_FAILED
                if job.is_gated:
                    self._end_gated(job)  # its read may be on the way still
                else:
                    self._end(job, DEVICE_FAILED)
            if getattr(error, "is_sticky", False):
                self._on_failure(error)

    def _copies_back(self, jobs: list[_Job], status: int) -> None:
        self._open_io -= 1
        self._guarded(self._copied, jobs, status)

    def _copied(self, jobs: list[_Job], status: int) -> None:
        """A batch of device copies has completed."""
        for job in jobs:
            job.copies_open -= 1
            job.copy_status = job.copy_status or status
            if job.is_gated:
                self._end_gated(job)
            elif job.copy_status != OK:
                self._end(job, job.copy_status)
            elif self._is_pulling(job):
                self._pulled(job)
            else:
                self._end(job, OK)
        if status != OK:
            self._on_failure(DeviceError(f"a device copy failed: {status}", code=status))

    # Copies inside host memory: relocation and the bounce buffer.

    def _copy_host(
        self, job: _Job, source: HostPool, source_id: int, target: HostPool, target_id: int
    ) -> None:
        """Copy one page between host slots, off the loop."""
        from_view, to_view = source.payload(source_id), target.payload(target_id)

        def copied(status: int) -> None:
            if self._is_pulling(job) and status == OK:
                self._pulled(job)
            else:
                self._end(job, status)

        self._offload(np.copyto, (to_view, from_view), lambda status: self._guarded(copied, status))

    # Disk transfers.

    def _read(self, job: _Job, address: int) -> None:
        move = job.move
        self._add_transfer(job, move.source.slot_id, move.source.generation, address, Opcode.READ)
        self.rates[Tier.DISK].start(self._loop.time())

    def _write(self, job: _Job, address: int) -> None:
        move = job.move
        self._add_transfer(job, move.target.slot_id, move.target.generation, address, Opcode.WRITE)

    def _add_transfer(
        self, job: _Job, slot_id: int, generation: int, address: int, opcode: Opcode
    ) -> None:
        page = job.move.page
        deadline_ns = self._deadline_ns(page) if opcode is Opcode.READ else 0
        self._transfers[job] = self._transfer(
            job, slot_id, generation, address, opcode, deadline_ns
        )

    def _transfer(
        self,
        job: _Job,
        slot_id: int,
        generation: int,
        address: int,
        opcode: Opcode,
        deadline_ns: int,
    ) -> Transfer:
        page = job.move.page
        # The callback finds its transfer through the job: a closure over it would be a cycle of
        # references for each disk transfer, and the collector's pauses block the loop.
        transfer = job.transfer = Transfer(
            group=page.group,
            slot_id=slot_id,
            generation=generation,
            address=address,
            opcode=opcode,
            io_class=IoClass.READ if opcode is Opcode.READ else job.move.io_class,
            key=page.key or disk_format.NO_KEY,
            parent_key=page.parent_key or disk_format.NO_KEY,
            block_index=max(0, page.block_index),
            callback=partial(self._transfer_back, job),
            deadline_ns=deadline_ns,
        )
        return transfer

    def _deadline_ns(self, page: Page) -> int:
        """Return the latest deadline of those who wait, if it is later than the default (INV-336).

        An earlier one ends that wait only. 0 is the engine's default.
        """
        latest = max((flight.deadline_at for flight in self._waiters.get(page, ())), default=0.0)
        if latest <= self._loop.time() + self._stall_s:
            return 0
        return round(latest * 1e9)

    def share_deadline(self, flight: Flight, pages: Iterable[Page]) -> None:
        """Give transfers that a waiter has joined the time it is ready to wait (INV-336).

        Those who wait already leave at the deadline they had, so that newcomers cannot keep them
        for ever (INV-119). A gated transfer keeps its own: it parks a stream of the device.
        """
        own = flight.deadline_at or self._loop.time() + self._stall_s
        for page in pages:
            job = self.jobs.get(page.move) if page.move is not None else None
            transfer = job.transfer if job is not None else None
            if job is None or transfer is None or transfer.opcode is not Opcode.READ:
                continue
            if not transfer.is_submitted:
                transfer.deadline_ns = self._deadline_ns(page)
            elif not job.is_gated and job.status == OK and own > job.expires_at:
                self._extend(job, transfer, flight, own)

    def _extend(self, job: _Job, transfer: Transfer, flight: Flight, expires_at: float) -> None:
        assert self._disk is not None
        before, job.expires_at = job.expires_at, expires_at
        page = job.move.page
        for other in self._waiters.get(page, ()):
            if other is not flight and not other.deadline_at and other not in job.bounds:
                job.bounds[other] = self._loop.call_at(
                    before, self._guarded, self._leave, other, page
                )
        self._disk.extend_deadline(transfer, round(expires_at * 1e9))

    def _leave(self, flight: Flight, page: Page) -> None:
        """Tell one waiter that its deadline for one page has passed; others go on waiting."""
        if flight in self._waiters.get(page, ()):
            self._detach_page(flight, page)
            flight.fail(page, DEADLINE)

    def _flush_transfers(self, page_count: int | None) -> None:
        if not self._transfers:
            return
        batch = self._transfers
        if page_count is not None and len(batch) > page_count:
            batch = dict(itertools.islice(batch.items(), page_count))
            for job in batch:
                del self._transfers[job]
        else:
            self._transfers = {}
        assert self._disk is not None
        try:
            self._disk.submit(self._queue, list(batch.values()))
            self._open_io += len(batch)
            self._note_expiry(batch)
        except (KVStoreError, OSError) as error:
            logger.warning("%d disk transfers refused: %s", len(batch), error)
            for job in batch:
                job.status = job.status or (CANCELLED if isinstance(error, StoreClosed) else -5)
                self._transfer_ended(job)
            self.settle()

    def _note_expiry(self, jobs: Iterable[_Job]) -> None:
        default = self._loop.time() + self._stall_s
        for job in jobs:
            if job.transfer is not None:
                job.expires_at = job.transfer.deadline_ns / 1e9 or default

    def _transfer_back(self, job: _Job, status: int, flags: int, _value: int) -> None:
        transfer = job.transfer
        assert transfer is not None
        if flags & END:
            self._open_io -= 1
        self._guarded(self._transferred, job, transfer, status, flags)

    def _transferred(self, job: _Job, transfer: Transfer, status: int, flags: int) -> None:
        """A disk transfer has a verdict, has ended, or both (INV-118, INV-119)."""
        if flags & VERDICT:
            job.status = job.status or status  # a copy behind the gate may have failed before
            if not flags & END and status != OK:
                self._early_verdict(job, status)
        if flags & END:
            self._count_transfer(job, transfer)
            self._transfer_ended(job)

    def _early_verdict(self, job: _Job, status: int) -> None:
        """The waiters hear it at once; pieces are in flight, so slots and memory stay (INV-119).

        After a deadline nothing may wait for these slots any more. A cancelled transfer usually
        ends soon: it gets as long again before it counts as stalled.
        """
        self._tell_waiters(job, status)
        if status == CANCELLED:
            job.stall_timer = self._loop.call_later(self._stall_s, self._guarded, self._stall, job)
        else:
            self._stall(job)

    def _stall(self, job: _Job) -> None:
        job.stall_timer = None
        if job.move in self.jobs and not job.is_gated:
            logger.warning("a disk transfer does not come back: %r", job.move)
            self._tables.move_stalled(job.move)
            self.room_grew = True

    def _count_transfer(self, job: _Job, transfer: Transfer) -> None:
        byte_count = self.page_bytes[transfer.group] if job.status == OK else 0
        self._note_health(job.status, transfer)
        if transfer.opcode is Opcode.READ:
            self.rates[Tier.DISK].end(self._loop.time(), byte_count)
            name = "disk2h"
        else:
            name = f"h2disk:{transfer.io_class.name.lower()}"
            self.written_since_sync += byte_count > 0
        self.moved_bytes[name] = self.moved_bytes.get(name, 0) + byte_count

    def _note_health(self, status: int, transfer: Transfer) -> None:
        """Count failures in a row: a disk that refuses everything must show (C31)."""
        if status == CANCELLED:
            return
        if transfer.opcode is Opcode.READ:
            self.read_failures_in_a_row = self.read_failures_in_a_row + 1 if status else 0
        elif status:
            self.write_failures_in_a_row += 1
            self.last_write_error = status_text(status)
        else:
            self.write_failures_in_a_row = 0
        if status:
            logger.warning(
                "disk %s of slot %d, pool group %d failed: %s",
                transfer.opcode.name.lower(),
                transfer.slot_id,
                transfer.group,
                status_text(status),
            )

    def _transfer_ended(self, job: _Job) -> None:
        job.transfer = None
        job.is_ended = True
        if job.is_gated:
            if job.status == OK and job.copy_status == OK:
                job.is_void |= job.ticket is not None and job.ticket.status not in {None, OK}
                self._pulled(job)
            self._end_gated(job)
        elif job.status == OK and self._is_pulling(job):
            self._pulled(job)
        else:
            self._end(job, job.status)

    # The end of a move.

    def _end(self, job: _Job, status: int) -> None:
        """Report the end of a move, whichever it is, and tell those who wait for its page."""
        move = job.move
        if self.jobs.pop(move, None) is None:
            return
        job.is_ended = True
        is_withdrawn = job.is_cancelled or move.page.move is not move
        self._landless.pop(job, None)
        if job.stall_timer is not None:
            job.stall_timer.cancel()
        for timer in job.bounds.values():
            timer.cancel()
        if status == OK:
            self._tables.move_done(move)
        elif status == CANCELLED and job.is_cancelled:
            self._tables.move_cancelled(move)
        elif (job.loans is not None and job.landing < 0) or (job.is_gated and job.status == OK):
            self._tables.move_failed(move, status, is_source_bad=False)  # INV-329: it was read well
        else:
            self._tables.move_failed(move, status)
        job.give_back()
        self.room_grew = True
        self.review(move.page, OK if is_withdrawn else status)

    def review(self, page: Page, status: int = OK) -> None:
        """Tell the waiters of a page, unless bytes of it are still on their way up.

        A page that is not where a waiter wants it, for whatever reason, ends that wait: with the
        verdict if there is a bad one, else with RETRY, and then the waiter plans again.
        """
        flights = self._waiters.get(page)
        if not flights or page.move is not None:
            return
        del self._waiters[page]
        for flight in flights:
            if page.is_ready and page.level <= flight.level:
                flight.arrive(page)
            else:
                flight.fail(page, status or RETRY)

    def _tell_waiters(self, job: _Job, status: int) -> None:
        """Tell the waiters the verdict at once; the slot stays with the move until its end.

        A move that was withdrawn has none: who waits for its page now waits for another move.
        """
        if job.is_cancelled or job.move.page.move is not job.move:
            return
        for flight in self._waiters.pop(job.move.page, ()):
            flight.fail(job.move.page, status)

    def _promote(self, move: Move) -> None:
        """Raise a background write to required (INV-109)."""
        job = self.jobs.get(move)
        if job is None or job.transfer is None:
            return
        job.transfer.io_class = IoClass.REQUIRED
        if job.transfer.is_submitted and self._disk is not None:
            self._disk.promote(job.transfer)

    def _withdraw(self, move: Move) -> None:
        """Cancel a move: at once if nothing is in flight, else at its last piece (INV-118)."""
        job = self.jobs.get(move)
        if job is None:
            if move in self._unstarted:
                del self._unstarted[move]
                job = self.jobs[move] = _Job(move)
                job.is_cancelled = True
                self._end(job, CANCELLED)
            return
        if move.state is MoveState.ENDED:  # by the tables, while it waited for its target
            del self.jobs[move]
            job.give_back()
            self.room_grew = True
            self.review(move.page)
            return
        job.is_cancelled = True
        transfer = job.transfer
        if transfer is not None and transfer.is_submitted:
            assert self._disk is not None
            self._disk.cancel(transfer)
        elif transfer is not None:
            del self._transfers[job]
            job.transfer = None
            self._end(job, CANCELLED)
        elif job.loans is not None and job.landing < 0:
            self._end(job, CANCELLED)
        # Otherwise a copy is running: it cannot be recalled, and its end is a good one.

    # Waiters.

    def attach(self, flight: Flight, pages: Sequence[Page]) -> None:
        """Let a flight wait for pages that are on their way."""
        flight.add(pages)
        waiters = self._waiters
        for page in pages:
            flights = waiters.get(page)
            if flights is None:
                waiters[page] = [flight]
            else:
                flights.append(flight)

    def detach(self, flight: Flight) -> None:
        """End a wait; the move of a page that nobody waits for any more is cancelled (INV-327)."""
        flight.is_cancelled = True
        if flight.timer is not None:
            flight.timer.cancel()
            flight.timer = None
        self._detach_pages(flight)
        flight.abandon()
        self.settle()

    def expire(self, flight: Flight) -> None:
        """The deadline of a waiter has passed: it is told at once (INV-119)."""
        flight.timer = None
        self._detach_pages(flight)
        for page in list(flight.remaining):
            flight.fail(page, DEADLINE)
        self.settle()

    def _detach_pages(self, flight: Flight) -> None:
        for page in flight.remaining:
            self._detach_page(flight, page)

    def _detach_page(self, flight: Flight, page: Page) -> None:
        flights = self._waiters.get(page)
        if not flights or flight not in flights:
            return
        flights.remove(flight)
        if not flights:
            del self._waiters[page]
            self._tables.abandon([page])

    def abandon_waiters(self) -> None:
        """End every wait: the store has failed."""
        flights = {id(flight): flight for line in self._waiters.values() for flight in line}
        self._waiters.clear()
        for flight in flights.values():
            flight.is_cancelled = True
            if flight.timer is not None:
                flight.timer.cancel()
                flight.timer = None
            flight.abandon()

    def cancel_all(self) -> None:
        """Withdraw every open transfer and start no other; the store is closing (INV-908)."""
        self.is_closing = True
        self.abandon_waiters()
        self._start_late(self._unstarted)  # which ends them
        for move in list(self.jobs):
            self._withdraw(move)
        self.settle()
        self.flush()

    # The gate.

    def start_gated(
        self,
        moves: Sequence[Move],
        stream: Stream,
        reserve: Callable[[Sequence[int]], list[GateTicket] | None],
        deadline_ns: int,
    ) -> Gated | None:
        """Start freshly planned restores behind tickets and settle everything else (INV-202).

        Callers guarantee: nobody has settled since the moves were applied. Pool group after pool
        group, and slice after slice within one, each behind a ticket of its own: reads leave while
        later slices are prepared, and a slice is copied while the next ones are read. All reads
        are submitted before the first device wait is enqueued, because a launch behind a closed
        gate may block the loop, and nothing behind a closed gate may need the loop.
        Returns: None if something is not ready (`GateBusy`); the moves then go on in await mode.
        """
        self._settle_others(moves)
        ready, self._ready = self._ready, []
        slices = self._slices(moves) if len(ready) == len(moves) else None
        counts = [len(part) for part in slices or ()]
        tickets = None if slices is None else reserve(counts) if counts else []
        if slices is None or tickets is None:
            for move in ready[:EARLY_PAGES]:
                self._start(move)
            self._unstarted.update(dict.fromkeys(ready[EARLY_PAGES:]))
            self.settle()
            return None
        gated = Gated(tickets)
        parts = [
            self._submit_gated(part, ticket, gated, deadline_ns)
            for part, ticket in zip(slices, tickets, strict=True)
        ]
        seen: set[int] = set()
        self._enqueue_recalls(stream, moves, gated, seen)
        for jobs, ticket in zip(parts, tickets, strict=True):
            self._enqueue_gated(stream, jobs, ticket, gated, seen)
        self.settle()
        return gated

    def _settle_others(self, moves: Sequence[Move]) -> None:
        """Settle, copies out of the device included; of ``moves`` collect those that may start."""
        self._held = set(moves)
        try:
            self.settle_now()
            self._start_copies_out()
            self._flush_copies(CopyDirection.TO_HOST, self._device.d2h, None)
        finally:
            self._held = set()

    def _slices(self, moves: Sequence[Move]) -> list[list[Move]] | None:
        """Return the reads, group-major, in the parts that get a ticket each.

        None: not everything that they need is there, that is a landing slot for each.
        """
        reads: dict[int, list[Move]] = {}
        for move in moves:
            source, target = self._tiers[move.source.level], self._tiers[move.target.level]
            if move.via_bounce or target is not Tier.DEVICE or source is Tier.DEVICE:
                return None
            if source is Tier.DISK:
                reads.setdefault(move.page.group, []).append(move)
        if self.is_closing or any(
            len(row) > self._staging[group].free_count for group, row in reads.items()
        ):
            return None
        slices: list[list[Move]] = []
        for group, row in sorted(reads.items()):  # group after group, so the first is early
            least = -(-len(row) * len(reads) // SLICES_MAX)
            size = max(1, least, SLICE_BYTES // self.page_bytes[group])
            slices += (row[start : start + size] for start in range(0, len(row), size))
        return slices

    def _submit_gated(
        self, moves: Sequence[Move], ticket: GateTicket, gated: Gated, deadline_ns: int
    ) -> list[_Job]:
        """Hand the reads of one ticket to the engine."""
        assert self._disk is not None
        jobs = [self._gated_read(move, ticket, deadline_ns) for move in moves]
        gated.jobs += jobs
        try:
            self._disk.submit(self._queue, [job.transfer for job in jobs if job.transfer])
            self._open_io += len(jobs)
            self.rates[Tier.DISK].start(self._loop.time(), len(jobs))
        except (KVStoreError, OSError):
            ticket.publish(CANCELLED)  # INV-215: as failed, before anything else happens
            for job in jobs:
                job.status = CANCELLED
                job.is_ended = True
                job.transfer = None
        return jobs

    def _gated_read(self, move: Move, ticket: GateTicket, deadline_ns: int) -> _Job:
        job = self.jobs[move] = _Job(move)
        job.is_gated = True
        loans = job.loans = self._staging[move.page.group]
        landing = loans.take_nowait()
        assert landing is not None, "the landing slots were counted"
        job.landing = landing
        source, address = move.source, loans.pool.address(landing)
        transfer = self._transfer(
            job, source.slot_id, source.generation, address, Opcode.READ, deadline_ns
        )
        job.ticket = transfer.ticket = ticket.ticket
        return job

    def _enqueue_recalls(
        self, stream: Stream, moves: Sequence[Move], gated: Gated, seen: set[int]
    ) -> None:
        """Enqueue the copies from host slots: they need no ticket, so they come first."""
        by_group: dict[int, list[_Job]] = {}
        for move in moves:
            if self._tiers[move.source.level] is Tier.HOST:
                job = self.jobs[move] = _Job(move)
                job.is_gated = job.is_ended = True  # there is no transfer
                by_group.setdefault(move.page.group, []).append(job)
                self._copy_slots[job] = (move.target.slot_id, move.source.slot_id)
        for group, jobs in sorted(by_group.items()):
            event = self._enqueue_copies(
                CopyDirection.TO_DEVICE, stream, group, self._host_pool(group), jobs, seen
            )
            gated.note(group, event)

    def _enqueue_gated(
        self, stream: Stream, jobs: list[_Job], ticket: GateTicket, gated: Gated, seen: set[int]
    ) -> None:
        """Enqueue one slice's copies; if the wait is refused its pages go on in await mode."""
        group = jobs[0].move.page.group
        try:
            ticket.enqueue_wait()
        except KVStoreError as error:
            logger.info("gate wait refused, group %d goes on in await mode: %s", group, error)
            gated.is_whole = False
            for job in jobs:
                job.is_gated = False
                if job.is_ended:  # the submission was refused already
                    self._end(job, job.status)
            return
        assert jobs[0].loans is not None
        for job in jobs:
            self._copy_slots[job] = (job.move.target.slot_id, job.landing)
        event = self._enqueue_copies(
            CopyDirection.TO_DEVICE, stream, group, jobs[0].loans.pool, jobs, seen
        )
        gated.note(group, event)

    def _end_gated(self, job: _Job) -> None:
        """A gated move ends when its copy has passed and its transfer has ended."""
        if job.copies_open or not job.is_ended:
            return
        if job.is_void and job.status == OK and job.copy_status == OK:
            job.is_gated = False
            self._push(job)  # the copy behind the gate took what lay there before
            return
        status = job.status or job.copy_status
        # A refused copy says nothing about the page: its waiters plan again, and await (INV-213).
        self._end(job, RETRY if status == DEVICE_FAILED else status)

    def void(self, gated: Gated) -> None:
        """Note that the tickets are given up: open ones are published although their bytes are not
        there, so the copies behind them read the landing slots too early.

        Whoever else waits for these pages is served by a second copy, after the verdict (INV-205,
        INV-220).
        """
        for job in gated.jobs:
            if job.ticket is not None:
                job.is_void |= job.ticket.status != OK
                job.ticket = None


@final
class Gated:
    """What a gated start enqueued: its tickets, and the event behind the copies per pool group.

    ``jobs`` are the reads behind the tickets. ``is_whole``: streams can wait for everything, no
    wait, copy or event was refused.
    """

    __slots__ = ("events", "is_whole", "jobs", "tickets")

    def __init__(self, tickets: Sequence[GateTicket]) -> None:
        self.tickets = tuple(tickets)
        self.jobs: list[_Job] = []
        self.events: dict[int, Any] = {}
        self.is_whole = True

    def note(self, group: int, event: Any) -> None:
        """Note the event behind a batch; None is a batch, or its event, that was refused."""
        self.events[group] = event
        self.is_whole &= event is not None


def status_text(status: int) -> str:
    """Say what a status means: the name of the errno, or one of ours."""
    names = {
        MISMATCH: "checksum or header mismatch",
        END_OF_FILE: "unexpected end of file",
        RETRY: "superseded",
        DEVICE_FAILED: "device copy refused",
    }
    return names.get(status) or f"{errno.errorcode.get(-status, status)} {os.strerror(-status)}"


#: Ways that lead through a staging slot (INV-334, INV-415).
_STAGED = {
    (Tier.DISK, Tier.DEVICE),
    (Tier.DEVICE, Tier.DISK),
    (Tier.DISK, Tier.DISK),
}
