"""The tables and their primitive transitions: what happens to pages, slots, copies and fences.

Everything here keeps the rules of one step; which steps to take is decided by the planner and by
the facade in `tables`. Nothing here waits, and nothing raises once it has begun to change things,
apart from `InvariantError`, which reports a bug of ours (INV-523).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from kvstore.config import IoClass, Tier
from kvstore.core.copies import CopyEnd, CopyQueue
from kvstore.core.eviction.base import EvictionPolicy
from kvstore.core.eviction.lru import LruPolicy
from kvstore.core.eviction.s3fifo import S3FifoPolicy
from kvstore.core.index import PrefixIndex
from kvstore.core.page import Move, MoveKind, MoveState, Page, PageState
from kvstore.core.slots import Fence, Pool, Slot, SlotState
from kvstore.core.spec import TablesSpec
from kvstore.keys import BlockKey

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda _slot_count: LruPolicy(),
    "s3fifo": S3FifoPolicy,
}

#: An event for cache-aware routers: (``stored``/``removed``/``moved``, group, key, level).
TableEvent = tuple[str, int, BlockKey, int]


@final
class Outbox:
    """What the executor has to do or to know, in order, since it was last taken.

    ``start``: moves to start now (a via-bounce move comes twice, see `Move`). ``promote``: writes
    to raise to required. ``cancel``: started moves whose outcome nobody wants; they still end with
    move_done, move_failed or move_cancelled. ``resolved``: restores superseded because the bytes
    came another way; their waiters may go on. ``lost``: held pages whose data is gone (INV-911).
    ``shrunk``: (level, group) whose slots above the new end have all drained (INV-904).
    """

    __slots__ = ("cancel", "events", "lost", "promote", "resolved", "shrunk", "start")

    def __init__(self) -> None:
        self.start: list[Move] = []
        self.promote: list[Move] = []
        self.cancel: list[Move] = []
        self.resolved: list[Move] = []
        self.lost: list[Page] = []
        self.shrunk: list[tuple[int, int]] = []
        self.events: list[TableEvent] = []

    def __bool__(self) -> bool:
        """Tell whether there is anything to do."""
        return bool(
            self.start
            or self.promote
            or self.cancel
            or self.resolved
            or self.lost
            or self.shrunk
            or self.events
        )


@final
class Counters:
    """Counters of the whole store; those per level and pool group are on the pools (INV-801)."""

    __slots__ = (
        "lost_pages",
        "plans_applied",
        "plans_refused",
        "recalled_demotions",
        "write_through_candidates",
        "write_through_issued",
        "write_through_skipped",
        "write_through_skipped_by",
    )

    def __init__(self) -> None:
        self.lost_pages = 0
        self.plans_applied = 0
        self.plans_refused = 0
        self.recalled_demotions = 0
        self.write_through_candidates = 0
        self.write_through_issued = 0
        self.write_through_skipped = 0
        #: The first reason that binds, in this order (INV-615); `admission` is INV-409.
        self.write_through_skipped_by = {
            "admission": 0,
            "no_free_slot": 0,
            "share": 0,
            "cap": 0,
        }


_WAITING: Final = (MoveState.PLANNED, MoveState.BOUNCED)

#: Members by plain names: these functions run for every page that moves, and reaching a member
#: through its class costs as much as a dictionary entry.
_PLANNED: Final = MoveState.PLANNED
_BOUNCED: Final = MoveState.BOUNCED
_STARTED: Final = MoveState.STARTED
_ENDED: Final = MoveState.ENDED
_RESTORE: Final = MoveKind.RESTORE
_RELOCATE: Final = MoveKind.RELOCATE
_WRITING: Final = SlotState.WRITING
_VALID: Final = SlotState.VALID
_DRAINING: Final = SlotState.DRAINING
_COMMITTED: Final = PageState.COMMITTED
_DEAD: Final = PageState.DEAD
_RECLAIMED: Final = CopyEnd.RECLAIMED
_DIED: Final = CopyEnd.DIED
_BACKGROUND: Final = IoClass.BACKGROUND


class Transitions:
    """State and primitive steps; `kvstore.core.tables.Tables` is the face of it."""

    def __init__(self, spec: TablesSpec) -> None:
        self.spec = spec
        self.version = 0
        self.level_count = len(spec.levels)
        self.last_level = self.level_count - 1
        self.tiers = tuple(level.tier for level in spec.levels)
        self.pools: list[list[Pool]] = [
            [
                Pool(level, group, count, POLICIES[group_spec.eviction_policy](count), CopyQueue())
                for group, (count, group_spec) in enumerate(
                    zip(level_spec.slot_counts, spec.groups, strict=True)
                )
            ]
            for level, level_spec in enumerate(spec.levels)
        ]
        self.index = PrefixIndex(spec.groups, spec.block_tokens)
        self.outbox = Outbox()
        self.counters = Counters()
        self.page_count = 0
        self.moves: dict[Move, None] = {}  # every move that has not ended, oldest first
        self.step_fence = Fence(is_kernel=True)
        #: Bytes of write-through that are planned or issued and not over (INV-111, INV-112).
        self.background_bytes = 0
        #: Set by the store when stores share an engine: room left under the engine's cap.
        self.engine_room_bytes: int | None = None
        self._unissued_bytes = 0
        #: Moves with a bad verdict whose last piece may never come back (INV-119).
        self.stalled_moves: set[Move] = set()
        self.bounce_free = [spec.bounce_pages] * len(spec.groups)
        #: More moves were sent to the executor than it has bounce pages: see `_grant_bounce`.
        self.bounce_promised = [False] * len(spec.groups)
        self._bounce_line: list[deque[Move]] = [deque() for _ in spec.groups]
        #: Whether holds and commits count uses: admission or a policy asks for them.
        self.counts_uses = spec.selective_uses is not None or any(
            group.eviction_policy == "s3fifo" for group in spec.groups
        )
        #: Use counts of keys whose pages are gone, bounded (INV-409).
        self._past_uses: OrderedDict[tuple[int, BlockKey], int] = OrderedDict()
        self._past_uses_max = 4 * sum(sum(level.slot_counts) for level in spec.levels)
        self._waiting_children: dict[tuple[int, BlockKey], list[Page]] = {}
        self._stamp = 0
        self._sequence = 0

    # -- queues -------------------------------------------------------------------------------

    def next_stamp(self) -> int:
        """Return a fresh time of use; all pages of one batch share one."""
        self._stamp += 1
        return self._stamp

    def enter_queue(self, page: Page, stamp: int) -> None:
        """Queue the primary for eviction unless the page is locked or restoring (INV-312)."""
        slot = page.primary
        assert slot is not None
        if not page.lock_count and (slot.level or slot.write is None):
            slot.pool.policy.insert(slot, stamp, is_held=page.hold_count > 0)

    def requeue(self, page: Page) -> None:
        """Queue a page that came back out of order, so that leaves still go first (INV-324).

        Its place is just below its parent; if one of its children is newer than that, the page
        counts as used now and its ancestors with it.
        """
        slot, parent = page.primary, page.parent
        assert slot is not None
        if page.lock_count or page.is_restoring:
            return
        policy = slot.pool.policy
        above = parent.primary if parent is not None else None
        if above is None or not policy.is_ordered or not self._is_peer(above, slot.pool):
            self.enter_queue(page, self.next_stamp())
            return
        is_newer = False
        if page.children is not None:
            for child in page.child_list():
                below = child.primary
                if below is not None and self._is_peer(below, slot.pool):
                    is_newer = is_newer or below.stamp > above.stamp
        if not is_newer and policy.insert_below(slot, above):
            return
        self.arrive(page, self.next_stamp())

    def arrive(self, page: Page, stamp: int) -> None:
        """Queue a page as the newest, and its ancestors on that level with it (INV-324)."""
        slot, parent = page.primary, page.parent
        assert slot is not None
        pool = slot.pool
        policy = pool.policy
        if not page.lock_count and (slot.level or slot.write is None):
            policy.insert(slot, stamp, is_held=page.hold_count > 0)
        while parent is not None:
            above = parent.primary
            if above is None or above.pool is not pool or above.lane is None:
                return
            if above.stamp >= stamp or not policy.is_ordered or not self._is_peer(above, pool):
                return
            policy.touch(above, stamp, is_held=parent.hold_count > 0)
            parent = parent.parent

    @staticmethod
    def _is_peer(slot: Slot, pool: Pool) -> bool:
        return slot.pool is pool and slot.lane is not None and slot.lane.owner is pool.policy

    def leave_queue(self, slot: Slot) -> None:
        """Take the primary out of the eviction queue, if it is in."""
        if slot.lane is not None:
            slot.pool.policy.remove(slot)

    # -- slots of a page ----------------------------------------------------------------------

    def bind_primary(self, page: Page, slot: Slot) -> None:
        """Make an unowned slot the primary."""
        first = page.primary
        assert first is None or first.level > slot.level, "INV-302: a primary is the hottest slot"
        slot.page = page
        slot.colder = first
        page.primary = slot
        slot.pool.primaries += 1

    def unbind_primary(self, page: Page) -> Slot:
        """Take the primary from the page; the slot belongs to nobody until it is released."""
        slot = page.primary
        assert slot is not None
        pool = slot.pool
        if slot.lane is not None:
            pool.policy.remove(slot)
        page.primary = slot.colder
        slot.colder = None
        pool.primaries -= 1
        return slot

    def release(self, slot: Slot) -> None:
        """Give up a slot that no page owns any more.

        A background write that reads it is promoted, because the next owner waits for it
        (INV-109, INV-610); a write into it that nobody else needs is cancelled (INV-515).
        """
        is_read = slot.page is not None and self._promote_readers(slot)
        if slot.write is not None and not is_read:
            self.detach_move(slot.write)
        slot.pool.release(slot)

    def depart(
        self,
        pages: Sequence[Page],
        kind: MoveKind,
        io_class: IoClass,
        kept: set[Page] | None = None,
    ) -> list[Move]:
        """Take pages off their primaries, to be moved: one move per page, in that order.

        The source of a page in ``kept`` becomes a copy (INV-502, INV-702). Any other one drains,
        and until it is promised to somebody the page can return to it.
        """
        sources: list[Slot] = []
        for page in pages:
            source = page.primary
            assert source is not None
            pool = source.pool
            if source.lane is not None:
                pool.policy.remove(source)
            pool.primaries -= 1
            if kept is not None and page in kept:
                self.make_copy(source)
            else:
                page.primary = source.colder
                source.colder = None
            sources.append(source)
        moves = Move.make(pages, sources, kind, io_class, self._sequence + 1)
        self._sequence += len(moves)
        known = self.moves
        for move in moves:
            known[move] = None
            source = move.source
            readers = source.readers
            if (
                move.page.primary is None
                and source.state is _VALID
                and (readers is None or (not isinstance(readers, list) and readers.passed))
            ):
                # The usual case: nobody else uses the slot.
                pool = source.pool
                if source.slot_id < pool.total:
                    source.readers = move
                    move.dependents = source
                    source.state = _DRAINING
                    pool.draining.append(source)
                    continue
            self._read_source(move)
            if move.page.primary is not source:  # or it stays as a copy
                self.release_source(source)
        return moves

    def release_source(self, slot: Slot) -> None:
        """Give up the source of a move just made; a write still bringing its bytes runs on."""
        page = slot.page
        if page is not None and page.primary is not None:
            self._promote_readers(slot)
        slot.pool.release(slot)

    def _promote_readers(self, slot: Slot) -> bool:
        """Promote the page's own writes that read a slot; tell whether there are any."""
        is_read = False
        if slot.page is not None:
            for move in self._readers_of(slot.page, slot):
                is_read = True
                self.promote(move)
        return is_read

    @staticmethod
    def _readers_of(page: Page, slot: Slot) -> list[Move]:
        """Return the moves that read a slot so that the page gets its bytes, however indirectly.

        A page may move on before an earlier move has ended; such moves form a chain.
        """
        readers: list[Move] = []
        other = page.primary
        while other is not None:
            move = other.write
            while move is not None and not move.is_detached:
                if move.source is slot:
                    readers.append(move)
                move = move.source.write
            other = other.colder
        return readers

    def end_copy(self, slot: Slot, end: CopyEnd) -> None:
        """Give up a copy for good; its primary is not touched (INV-525)."""
        page = slot.page
        assert page is not None
        pool = slot.pool
        pool.copies.remove(slot)
        if end is _RECLAIMED:
            pool.reclaimed += 1
        elif end is _DIED:
            pool.died += 1
        else:
            setattr(pool, end.value, getattr(pool, end.value) + 1)
        page.detach(slot)
        self.release(slot)
        slot.page = None

    def make_copy(self, slot: Slot) -> None:
        """Turn a slot below the primary into a copy (INV-502, INV-702)."""
        slot.pool.copies.add(slot)
        slot.pool.kept += 1

    def take_back(self, page: Page, copy: Slot) -> None:
        """Make the hottest copy the primary again, without moving data (INV-411, INV-503).

        The caller queues the page for eviction.

        Callers guarantee: the page has no primary any more. A pending copy's write is promoted;
        nothing is written twice (INV-514).
        """
        assert page.primary is copy
        pool = copy.pool
        pool.copies.remove(copy)
        pool.reused += 1
        pool.primaries += 1
        if copy.write is not None:
            pool.reused_pending += 1  # part of reused (INV-806)
            self.promote(copy.write)

    def is_returnable(self, page: Page, slot: Slot) -> bool:
        """Tell whether a draining slot still holds the page's data and is promised to nobody."""
        return slot.state is _DRAINING and slot.page is page and slot.slot_id < slot.pool.total

    def return_to(self, page: Page, slot: Slot) -> None:
        """Give a draining slot back to the page whose data it holds (INV-330, INV-911)."""
        slot.pool.take_back(slot)
        self.bind_primary(page, slot)

    # -- recalls ------------------------------------------------------------------------------

    def recall_source(self, page: Page) -> Slot | None:
        """Return the hottest slot a running demotion of the page can be undone to (INV-330)."""
        best: Slot | None = None
        slot = page.primary
        while slot is not None and slot.write is not None:
            move = slot.write
            source = move.source
            if move.is_detached or source.level >= slot.level:
                break
            if self.is_returnable(page, source):
                best = source
            slot = source
        return best

    def keeps_recalled(self, page: Page, source: Slot) -> bool:
        """Tell whether a recall would leave the write it interrupts running, as a copy."""
        slot = page.primary
        return (
            slot is not None
            and slot.write is not None
            and slot.write.source is source
            and self.spec.levels[slot.level].keep_copy
            and self.tiers[slot.level] is Tier.DISK
            and page.state is _COMMITTED
        )

    def recall(self, page: Page, source: Slot, *, is_kept: bool = True) -> None:
        """Undo a demotion: the page goes back to the slot that still holds the data (INV-330).

        The target is given up and its write cancelled, unless the disk tier keeps copies and the
        page is committed: then the running write becomes a pending copy.
        """
        self.counters.recalled_demotions += 1
        is_kept = is_kept and self.keeps_recalled(page, source)
        slot = self.unbind_primary(page)
        self.return_to(page, source)
        if is_kept:
            page.attach(slot)
            self.make_copy(slot)
        else:
            self.release(slot)  # a pending copy that reads it still gets its bytes
            slot.page = None
        self.requeue(page)

    # -- moves and fences ---------------------------------------------------------------------

    def new_move(self, page: Page, kind: MoveKind, source: Slot, io_class: IoClass) -> Move:
        """Make a move that reads its source from now on (INV-609).

        It will wait for the write of its source, and for the step that may still write a device
        source. That is noted here, because the slot may be promised before `schedule`.
        """
        self._sequence += 1
        move = Move.make((page,), (source,), kind, io_class, self._sequence)[0]
        self._read_source(move)
        self.moves[move] = None
        return move

    def _read_source(self, move: Move) -> None:
        """Note that a move reads its source from now on, and what it waits for there."""
        source = move.source
        readers, write = source.readers, source.write
        if write is not None:
            move.waits = (write.target_fence,)
        if readers is None:
            source.readers = move
            return
        if source.level == 0:
            kernels = [fence for fence in source.outstanding() if fence.is_kernel]
            if kernels:
                move.waits = (*move.waits, *kernels)
        source.add_reader(move)

    def schedule(self, moves: Iterable[Move]) -> None:
        """Work out what moves wait for, and start those that wait for nothing (INV-418).

        A move waits for its source (see `new_move`) and for every earlier use of its target.
        """
        start = self.outbox.start
        for move in moves:
            target = move.target
            if move.via_bounce:
                self._bounce_line[move.page.group].append(move)
                move.target_waits = target.outstanding_readers()
                move.is_device_copy = move.source.level == 0
                fences = move.waits
            else:
                move.is_device_copy = move.source.level == 0 or target.level == 0
                fences = move.waits
                readers = target.readers
                if readers is not None:
                    if not fences and not isinstance(readers, list):
                        self._wait_for(move, readers)
                        self._try_start(move)
                        continue
                    fences = [*fences, *target.outstanding_readers()]
                elif not fences and not move.background_bytes:
                    move.state = _STARTED
                    start.append(move)
                    continue
            move.waits = ()
            for fence in fences:
                self._wait_for(move, fence)
            self._try_start(move)

    def _wait_for(self, move: Move, fence: Fence) -> None:
        if fence.passed:
            return
        waits = move.waits
        move.waits = (*waits, fence) if waits else (fence,)
        if fence.event is not None and move.is_device_copy:
            return  # its stream waits for the event
        move.blocked += 1
        fence.add_dependent(move)

    def _try_start(self, move: Move) -> None:
        if move.blocked:
            return
        state = move.state
        if state is not _PLANNED and state is not _BOUNCED:
            return
        if move.via_bounce and state is _PLANNED:
            self._grant_bounce(move.page.group)
            return
        if move.background_bytes:
            self._unissued_bytes -= move.background_bytes
        move.state = _STARTED
        self.outbox.start.append(move)

    def _grant_bounce(self, group: int) -> None:
        """Hand bounce pages out in the order of the plans, so that holders never wait in a ring.

        One page per cycle, given back when the move has ended (INV-407). When stalled moves have
        every page, nobody waits for them here (INV-119): who gets none from the executor within
        the default deadline fails.
        """
        line = self._bounce_line[group]
        while line and not line[0].blocked:
            if self.bounce_free[group] <= 0:
                if not self.has_lost_bounce(group):
                    return
                self.bounce_promised[group] = True
            move = line.popleft()
            self.bounce_free[group] -= 1
            move.set_state(MoveState.BOUNCING)
            self.outbox.start.append(move)

    def has_lost_bounce(self, group: int) -> bool:
        """Tell whether every bounce page of a group belongs to a move that has stalled."""
        lost = 0
        for move in self.stalled_moves:
            lost += move.via_bounce and move.page.group == group
        return lost >= self.spec.bounce_pages

    def charge_background(self, move: Move, page_bytes: int) -> None:
        """Count a write-through against the cap until it is over (INV-111, INV-112)."""
        move.background_bytes = page_bytes
        self.background_bytes += page_bytes
        self._unissued_bytes += page_bytes
        move.source.pool.pending_sources += 1

    def unissued_background_bytes(self) -> int:
        """Return the planned background bytes that no engine knows of yet."""
        return self._unissued_bytes

    def bounced(self, move: Move) -> None:
        """Note that the data is in the bounce page: now the move waits for its target."""
        move.set_state(_BOUNCED)
        move.waits = ()
        move.is_device_copy = move.target.level == 0
        for fence in move.target_waits:
            self._wait_for(move, fence)
        self._try_start(move)

    def pass_fence(self, fence: Fence) -> None:
        """End a use: slots may become ready, moves may start. Passing twice changes nothing."""
        if fence.passed:
            return
        fence.passed = True
        dependents, fence.dependents = fence.dependents, None
        if dependents is None:
            return
        if isinstance(dependents, list):
            for dependent in dependents:
                self._hear(dependent, fence)
        else:
            self._hear(dependents, fence)

    def _hear(self, dependent: Slot | Move, fence: Fence) -> None:
        """Let one dependent of a fence know that it has passed."""
        if isinstance(dependent, Slot):
            pool = dependent.pool
            was_retiring = bool(pool.retiring)
            pool.fence_passed(dependent, fence)
            if was_retiring and not pool.retiring:
                self.outbox.shrunk.append((pool.level, pool.group))
        elif dependent.state is not _ENDED:
            dependent.blocked -= 1
            self._try_start(dependent)

    def enqueue_fence(self, fence: Fence, event: object) -> None:
        """Note that the use is in a device queue: device copies may be enqueued behind it."""
        if fence.passed or fence.event is not None:
            return
        fence.event = event
        dependents = fence.dependent_list()
        copies = [one for one in dependents if isinstance(one, Move) and one.is_device_copy]
        if not copies:
            return
        fence.dependents = [
            one for one in dependents if not (isinstance(one, Move) and one.is_device_copy)
        ] or None
        for move in copies:
            move.blocked -= 1
            self._try_start(move)

    def promote(self, move: Move) -> None:
        """Raise a background write; anything else stays as it is (INV-109, INV-110)."""
        if move.io_class is _BACKGROUND and move.state is not _ENDED:
            move.io_class = IoClass.REQUIRED
            if move.is_started:
                self.outbox.promote.append(move)

    def detach_move(self, move: Move) -> None:
        """Stop caring for a move: it is withdrawn, and its target drains until its end.

        If its source is only there to be read by it, the move that writes that source goes too.
        """
        if move.is_detached or move.state is _ENDED:
            return
        move.is_detached = True
        source, page = move.source, move.page
        if move.state is _PLANNED or move.state is _BOUNCED:
            self.end_move(move)  # nothing of it is in flight
        else:
            self.outbox.cancel.append(move)
        self._detach_writer(source, page)

    def _detach_writer(self, source: Slot, page: Page) -> None:
        """Withdraw the write of a slot that its page neither owns nor reads any more."""
        if source.write is None or self._is_owned(source, page):
            return
        if not self._readers_of(page, source):
            self.detach_move(source.write)

    @staticmethod
    def _is_owned(slot: Slot, page: Page) -> bool:
        return slot.page is page and slot.state is not _DRAINING

    def end_move(self, move: Move) -> None:
        """No piece is in flight any more: pass both fences and repay what was charged."""
        state, source, target = move.state, move.source, move.target
        if self.stalled_moves:
            self.stalled_moves.discard(move)
        if state is _ENDED:
            move.set_state(_ENDED)  # raises: a move ends once
        move.state = _ENDED
        del self.moves[move]
        if move.background_bytes:
            self.background_bytes -= move.background_bytes
            if state is _PLANNED:
                self._unissued_bytes -= move.background_bytes
            source.pool.pending_sources -= 1
            move.background_bytes = 0
        if target.write is move:
            target.write = None
        self.pass_fence(move)  # its reading
        if move.write_fence is not None:
            self.pass_fence(move.write_fence)
        # What an ended move knows of others is of no use: old moves would hang on it in a chain.
        move.waits = move.target_waits = ()
        user = source.pool.handles[source.slot_id]  # the source itself, or who inherited its uses
        if user is not None and user.readers is not None:
            user.forget_reader(move)
        if state is _BOUNCED:
            self.outbox.cancel.append(move)  # between its stages: the executor has a slot of it
        if move.via_bounce:
            group = move.page.group
            if state is _PLANNED:
                self._bounce_line[group].remove(move)
            else:
                self.bounce_free[group] += 1
                if self.bounce_free[group] >= 0:
                    self.bounce_promised[group] = False
            self._grant_bounce(group)

    # -- outcomes -----------------------------------------------------------------------------

    def finish_move(self, move: Move) -> None:
        """The bytes are at the target: it becomes valid, and only now (INV-114)."""
        target, page = move.target, move.page
        if not move.is_detached and target.state is _WRITING:
            target.state = _VALID
            if page.primary is not target:
                target.pool.copies.finish(target)
        self.end_move(move)
        if move.is_detached or page.primary is not target:
            return
        if move.kind is _RESTORE:
            self.requeue(page)
        if self.spec.events and move.kind is not _RELOCATE:
            self.note("moved", page)

    def fail_move(self, move: Move, *, is_source_bad: bool, is_stalled: bool = False) -> None:
        """The bytes will not come. The failure stays with this page (INV-419).

        A failed copy is detached (INV-516). A page returns to its source if that is still its
        own, else to a copy; without either a droppable page is dropped and a held one is lost
        (INV-911, INV-912). A bad source is neither kept nor returned to (INV-526, INV-913).
        ``is_stalled``: pieces are still in flight, perhaps for ever; its slots wait for them.
        """
        page, source, target = move.page, move.source, move.target
        if is_stalled:
            move.source_fence.is_stalled = move.target_fence.is_stalled = True
        if move.is_detached:
            self._end_or_stall(move, is_stalled=is_stalled)
            return
        move.is_detached = True
        self._void_readers(page, target)
        if target.pool.copies.has(target):
            self.end_copy(target, CopyEnd.FAILED)
        elif page.primary is target:
            self.unbind_primary(page)
            target.page = None
        if is_source_bad:
            if source.page is page and page.slot_at(source.level) is source:
                self.end_copy(source, CopyEnd.FAILED)
            elif source.page is page:
                source.page = None
        elif not self._primary_is_real(page) and self.is_returnable(page, source):
            self.return_to(page, source)
            self.requeue(page)
        if target.state is _WRITING:
            target.pool.release(target)
        self._end_or_stall(move, is_stalled=is_stalled)
        if not self._primary_is_real(page):
            self._fall_back(page, is_lost=is_source_bad)
        self._detach_writer(source, page)

    def _end_or_stall(self, move: Move, *, is_stalled: bool) -> None:
        """End the move; or, if it may never end, let nothing wait for its slots (INV-119)."""
        if not is_stalled:
            self.end_move(move)
            return
        self.stalled_moves.add(move)
        if move.via_bounce:
            self._grant_bounce(move.page.group)
        for used in (move.source, move.target):
            slot = used.pool.handles[used.slot_id]  # a later handle of the slot inherits the use
            if slot is not None and any(fence.is_stalled for fence in slot.outstanding()):
                used.pool.stall(slot)
        for fence in (move.source_fence, move.target_fence):
            for dependent in fence.dependent_list():
                if isinstance(dependent, Move) and dependent.state in _WAITING:
                    self.give_up(dependent)

    def stalled_slots(self) -> set[Slot]:
        """Return the owned slots that a stalled move still uses: they give no room (INV-119)."""
        found: set[Slot] = set()
        for move in self.stalled_moves:
            for used in (move.source, move.target):
                slot = used.pool.handles[used.slot_id]
                if slot is None or slot.state is _DRAINING:
                    continue
                if any(fence.is_stalled for fence in slot.outstanding()):
                    found.add(slot)
        return found

    def give_up(self, move: Move) -> None:
        """Fail a move that waits for a slot that may never drain; its waiters plan again."""
        if not move.is_detached:
            self.outbox.resolved.append(move)
        self.fail_move(move, is_source_bad=False)

    def _fall_back(self, page: Page, *, is_lost: bool = False) -> None:
        """The primary is gone: use the hottest copy, or end the page."""
        if page.state is _DEAD:
            return
        if page.primary is not None and not is_lost:
            self.take_back(page, page.primary)
            self.requeue(page)
        elif page.hold_count:
            self.lose(page)
        else:
            self.drop(page)

    def _void_readers(self, page: Page, slot: Slot) -> None:
        """Undo the moves of the page that would have read bytes that never came."""
        for other in page.slots:
            move = other.write
            while move is not None and not move.is_detached and move.source is not slot:
                move = move.source.write
            if move is None or move.is_detached:
                continue
            if other.pool.copies.has(other):
                self.end_copy(other, CopyEnd.FAILED)
            else:
                self.unbind_primary(page)
                other.page = None
                self.release(other)

    # -- ends of pages ------------------------------------------------------------------------

    def lose(self, page: Page) -> None:
        """End a held page whose data is gone; its holders are told (INV-911, INV-913)."""
        self.counters.lost_pages += 1
        self.outbox.lost.append(page)
        self._end_with_descendants(page)

    def drop(self, page: Page) -> None:
        """Forget a droppable page and what only it made reachable (INV-325)."""
        if page.primary is not None:
            page.primary.pool.dropped += 1
        if page.children is None:
            self.end_page(page)
        else:
            self._end_with_descendants(page)

    def _end_with_descendants(self, page: Page) -> None:
        stack = page.child_list()
        self.end_page(page)
        while stack:
            child = stack.pop()
            stack.extend(child.child_list())
            if child.hold_count or child.lock_count:
                self._make_orphan(child)
            else:
                if child.primary is not None:
                    child.primary.pool.dropped += 1
                self.end_page(child)

    def _make_orphan(self, page: Page) -> None:
        """Take a held page out of the index: its holder may use it, nobody can match it."""
        self.index.remove(page)
        self.note("removed", page)
        page.set_state(PageState.ORPHAN)
        page.parent = page.children = None

    def end_page(self, page: Page) -> None:
        """Free all slots of a page, copies first, so that no dying write is promoted (INV-519)."""
        if page.state is _COMMITTED:
            self.index.remove(page)
            if self.spec.events:
                self.note("removed", page)
            if self.counts_uses:
                self._remember_uses(page)
        parent = page.parent
        if parent is not None:
            if parent.children is page:
                parent.children = None
            else:
                parent.remove_child(page)
            page.parent = None
        page.children = None
        primary = page.primary
        if primary is not None and (primary.colder is not None or not self._is_primary(primary)):
            copies = page.slots[1:] if self._is_primary(primary) else page.slots
            for slot in reversed(copies):
                self.end_copy(slot, CopyEnd.DIED)
            primary = page.primary
        if primary is not None:
            pool = primary.pool
            if primary.lane is not None:
                pool.policy.remove(primary)
            page.primary = primary.page = None
            pool.primaries -= 1
            if primary.write is not None:
                self.detach_move(primary.write)
            pool.release(primary)
        if page.state is _DEAD:
            page.set_state(_DEAD)  # raises: a page ends once
        page.state = _DEAD
        self.page_count -= 1

    def _primary_is_real(self, page: Page) -> bool:
        return page.primary is not None and self._is_primary(page.primary)

    @staticmethod
    def _is_primary(slot: Slot) -> bool:
        """Tell whether an owned slot is no copy: it is in no queue, or in that of a policy."""
        lane = slot.lane
        return lane is None or lane.owner is slot.pool.policy

    def _remember_uses(self, page: Page) -> None:
        assert page.key is not None
        past = self._past_uses
        past[page.group, page.key] = page.uses
        past.move_to_end((page.group, page.key))
        if len(past) > self._past_uses_max:
            past.popitem(last=False)

    def note(self, kind: str, page: Page) -> None:
        """Append an event for routers, if anybody listens."""
        if self.spec.events and page.key is not None and page.state is _COMMITTED:
            self.outbox.events.append((kind, page.group, page.key, page.level))

    def settle_unheld(self, page: Page) -> None:
        """Decide what becomes of a page nobody holds or locks any more (INV-310, INV-327)."""
        if page.state is not _COMMITTED:
            if page.state is not _DEAD:
                self.end_page(page)
        elif page.is_restoring:
            self.cancel_restore(page)

    def cancel_restore(self, page: Page) -> bool:
        """Withdraw a restore nobody waits for, if its source still holds the data (INV-327).

        Returns: False if the restore has to run on, because it carries the only data.
        """
        move = page.move
        if move is None or move.is_detached:
            return False
        source = move.source
        is_copy = source.page is page and source.pool.copies.has(source)
        if not is_copy and not self.is_returnable(page, source):
            return False
        target = self.unbind_primary(page)
        target.page = None
        if is_copy:
            self.take_back(page, source)
        else:
            self.return_to(page, source)
        self.requeue(page)
        self.release(target)
        return True
