"""All tables of one store and every transition on them: the face of the core.

Pure and synchronous: the store calls a method, takes the outbox and lets its executor carry out
what is in it. Between two calls every rule that is visible in the tables holds; `check_state` of
`kvstore.core.invariants` verifies that. All calls come from one event loop (INV-331); times do
not appear here at all.

How a resume goes::

    match = tables.match(keys)                      # pure
    tables.hold(pages)                              # root first; released tail first
    plan = tables.plan_restore(rows, grow=counts)   # pure; or a Refusal
    applied = tables.apply(plan)                    # cannot fail
    tables.lock(resident pages and applied.recalled)
    outbox = tables.take_outbox()                   # start its moves
    ...
    tables.move_done(move); tables.lock([move.page])    # in the same turn of the loop
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

from kvstore.config import IoClass, Tier
from kvstore.core import planner
from kvstore.core.copies import CopyEnd
from kvstore.core.index import Match
from kvstore.core.page import Move, MoveKind, MoveState, Page, PageState
from kvstore.core.planner import Applied, Plan, Refusal
from kvstore.core.slots import Fence, Pool, Slot, SlotState
from kvstore.core.transitions import Outbox, Transitions
from kvstore.errors import LogicError
from kvstore.keys import BlockKey
from kvstore.stats import PoolStats

#: Members by plain names, see `kvstore.core.transitions`.
_FILLING: Final = PageState.FILLING
_COMMITTED: Final = PageState.COMMITTED
_DEAD: Final = PageState.DEAD

DEFAULT_PRIORITY: Final = 35
_NO_PARENT: Final = BlockKey(bytes(32))

#: A fence that has passed: for callers whose device work is over when they call.
PASSED = Fence(is_kernel=True)
PASSED.passed = True


@final
class Tables(Transitions):
    """See the module. Every method costs O(pages it is given or moves), never O(all pages)."""

    # -- looking up ---------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Return the longest servable run of full blocks; takes nothing (INV-319 to INV-321)."""
        return self.index.match(keys)

    # -- holds and locks ----------------------------------------------------------------------

    def hold(self, pages: Sequence[Page | None], *, is_use: bool = True) -> None:
        """Take one hold on each page, given from the root on; None is skipped.

        The pages count as used, the root most recently (INV-324). ``is_use=False`` renews their
        age without counting a use for write admission (INV-409).
        Raises: LogicError: a dead page; nothing is changed.
        """
        for page in pages:
            if page is not None and page.state is _DEAD:
                raise LogicError("a dead page cannot be held")
        self.version += 1
        self._stamp = stamp = self._stamp + 1
        counts_uses = self.counts_uses and is_use
        for page in reversed(pages):
            if page is None:
                continue
            page.hold_count += 1
            if counts_uses:
                page.uses += 1
            slot = page.primary
            if slot is not None and slot.lane is not None:
                slot.pool.policy.touch(slot, stamp, is_held=True)

    def unhold(self, pages: Sequence[Page | None]) -> None:
        """Release one hold on each page, given from the root on and released tail first.

        A page without holds that is not committed is freed at once (INV-310); a restore that
        nobody holds is withdrawn if its source still has the data (INV-327).
        Raises: LogicError: more releases than holds; nothing is changed (INV-311).
        """
        self._check_counts(pages, "hold_count")
        self.version += 1
        self._stamp = stamp = self._stamp + 1
        unheld: list[Page] = []
        for page in reversed(pages):
            if page is None:
                continue
            page.hold_count = count = page.hold_count - 1
            slot = page.primary
            if slot is not None and slot.lane is not None:
                slot.pool.policy.touch(slot, stamp, is_held=count > 0)
            if (
                not count
                and not page.lock_count
                and (page.state is not _COMMITTED or page.is_restoring)
            ):
                unheld.append(page)
        # After the batch and root first: a withdrawn page goes below its parent (INV-324).
        for page in reversed(unheld):
            self.settle_unheld(page)

    def lock(self, pages: Sequence[Page | None]) -> None:
        """Take one lock on each page; a locked page stays on the device tier (INV-309).

        Raises: LogicError: a page is not on the device tier, or still on its way there
        (INV-328); nothing is changed.
        """
        for page in pages:
            if page is not None:
                slot = page.primary
                if slot is None or slot.level or slot.write is not None:
                    raise LogicError("only a page that is on the device tier can be locked")
        self.version += 1
        for page in pages:
            if page is None:
                continue
            page.lock_count += 1
            slot = page.primary
            if slot is not None and slot.lane is not None:
                slot.pool.policy.remove(slot)

    def unlock(self, pages: Sequence[Page | None], fence: Fence | None = None) -> None:
        """Release one lock on each page, tail first.

        ``fence`` ends the device work that may still use the slots; without one it is the open
        step's (INV-224, INV-338). A later owner of a slot waits for it.
        Raises: LogicError: more releases than locks; nothing is changed (INV-311).
        """
        self._check_counts(pages, "lock_count")
        self.version += 1
        self._stamp = stamp = self._stamp + 1
        use = self.step_fence if fence is None else fence
        is_open = not use.passed
        for page in reversed(pages):
            if page is None:
                continue
            page.lock_count = count = page.lock_count - 1
            slot = page.primary
            if slot is None:
                continue
            if is_open and slot.readers is not use:
                slot.add_reader(use)
            if not count:
                slot.pool.policy.insert(slot, stamp, is_held=page.hold_count > 0)
                if not page.hold_count:
                    self.settle_unheld(page)

    def _check_counts(self, pages: Sequence[Page | None], name: str) -> None:
        is_short = False
        if name == "hold_count":
            for page in pages:
                if page is not None and page.hold_count <= 0:
                    is_short = True
        else:
            for page in pages:
                if page is not None and page.lock_count <= 0:
                    is_short = True
        if not is_short and len(set(pages)) != len(pages):
            needed: dict[Page, int] = {}
            for page in pages:
                if page is not None:
                    needed[page] = needed.get(page, 0) + 1
            is_short = any(getattr(page, name) < count for page, count in needed.items())
        if is_short:
            raise LogicError(f"released more often than taken ({name})")

    # -- commit -------------------------------------------------------------------------------

    def commit(
        self,
        page: Page,
        key: BlockKey,
        parent_page: Page | None,
        block_index: int,
        priority: int = DEFAULT_PRIORITY,
        *,
        parent_key: BlockKey | None = None,
    ) -> Page:
        """Make a full block immutable and findable; return the page to use from now on.

        If the key exists, that is the existing page: the holds and locks of the given one move
        over, and one of the two slots is freed (INV-322). ``parent_key`` is needed for a block
        whose parent page is not given (window groups); it travels in the slot header.
        Raises: LogicError: the page is not filling, or is not locked; nothing is changed.
        """
        slot = page.primary
        if page.state is not _FILLING or not page.lock_count or slot is None:
            raise LogicError("only a locked page that is being filled can be committed")
        self.version += 1
        existing = self.index.get(page.group, key)
        if existing is not None:
            self._merge(page, existing, priority)
            return existing
        page.key = key
        page.block_index = block_index
        page.priority = priority
        page.parent_key = parent_key or (parent_page.key if parent_page else None) or _NO_PARENT
        if self.counts_uses:
            page.uses = self._past_uses.pop((page.group, key), 0) + 1
        is_tree = self.spec.groups[page.group].window is None
        if is_tree and parent_page is not None and parent_page.state is not _COMMITTED:
            page.set_state(PageState.ORPHAN)  # an ancestor left the index: unreachable (INV-325)
            return page
        page.set_state(_COMMITTED)
        self.index.add(page)
        if is_tree and parent_page is not None:
            page.parent = parent_page
            parent_page.add_child(page)
            if parent_page.priority < priority:
                self._raise_priority(parent_page, priority)
        if self._waiting_children:
            self._adopt_children(page)
        if self.spec.events:
            self.note("stored", page)
        return page

    def _raise_priority(self, page: Page | None, priority: int) -> None:
        """Keep every ancestor at least as valuable as its child, so leaves go first (INV-324).

        Changing its lane makes a page the newest of it, so the ancestors there count as used too.
        """
        stamp = self._stamp
        pool: Pool | None = None
        while page is not None and page.priority < priority:
            page.priority = priority
            slot = page.primary
            if slot is not None and slot.lane is not None and not slot.pool.copies.has(slot):
                pool = slot.pool
                pool.policy.touch(slot, stamp, is_held=page.hold_count > 0)
            page = page.parent
        while page is not None and pool is not None and pool.policy.is_ordered:
            slot = page.primary
            if slot is None or not self._is_peer(slot, pool) or slot.stamp >= stamp:
                return
            pool.policy.touch(slot, stamp, is_held=page.hold_count > 0)
            page = page.parent

    def _merge(self, page: Page, existing: Page, priority: int) -> None:
        """Let the session of ``page`` use the page that has the key already (INV-322)."""
        slot = page.primary
        assert slot is not None
        if existing.level != 0 or existing.is_restoring:
            self._replace_primary(page, existing)
        existing.hold_count += page.hold_count
        existing.lock_count += page.lock_count
        if self.counts_uses:
            existing.uses += 1
        page.hold_count = page.lock_count = 0
        present = existing.primary
        assert present is not None
        if present.lane is not None:
            self.leave_queue(present)
        if existing.priority < priority:
            self._raise_priority(existing, priority)
        if page.state is _FILLING:
            # The step that filled the slot may still be running (INV-224).
            if page.primary is not None and not self.step_fence.passed:
                page.primary.add_reader(self.step_fence)
            self.end_page(page)

    def _replace_primary(self, page: Page, existing: Page) -> None:
        """Give the session's slot to a page that is not on the device; its colder slots go.

        A restore on its way is superseded: its waiters may go on at once.
        """
        slot = page.primary
        assert slot is not None
        page.detach(slot)
        move = existing.move
        if move is not None and move.kind is MoveKind.RESTORE and not move.is_detached:
            self.outbox.resolved.append(move)
        for copy in reversed(existing.slots[1:]):
            self.end_copy(copy, CopyEnd.DIED)
        old = self.unbind_primary(existing)
        old.page = None
        self.release(old)
        existing.attach(slot)
        page.set_state(_DEAD)
        self.page_count -= 1

    # -- planning -----------------------------------------------------------------------------

    def plan_grow(self, counts: Sequence[int], priority: int = DEFAULT_PRIORITY) -> Plan | Refusal:
        """Plan ``counts[group]`` new blocks on the device. Pure but for the refusal counter."""
        rows: tuple[tuple[Page, ...], ...] = ((),) * len(counts)
        return self._refused(planner.plan_restore(self, rows, counts, 0, priority))

    def plan_restore(
        self,
        pages: Sequence[Sequence[Page | None]],
        grow: Sequence[int] | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> Plan | Refusal:
        """Plan to bring all of ``pages[group]`` to the device, and to grow, whole or not at all.

        Pages that are there already are left for the caller to lock; they are never victims of
        this plan. Pure but for the refusal counter.
        Raises: LogicError: one of the pages is dead.
        """
        return self._refused(planner.plan_restore(self, pages, grow, 0, priority))

    def plan_prefetch(
        self, pages: Sequence[Sequence[Page | None]], level: int = 1
    ) -> Plan | Refusal:
        """Plan to bring pages up to the host tier; those there or hotter are left (INV-333).

        Raises: LogicError: the level is not a host tier above another one.
        """
        if not 0 < level < self.level_count or self.tiers[level] is not Tier.HOST:
            raise LogicError(f"level {level} is no host tier to prefetch into")
        return self._refused(planner.plan_restore(self, pages, None, level))

    def plan_resize(self, level: int, slot_counts: Sequence[int]) -> Plan | Refusal:
        """Plan new slot counts of a level, shrinking and growing groups alike (INV-901, INV-902).

        Raises: ValueError: the device tier, or a size below one slot (INV-905).
        """
        return self._refused(planner.plan_resize(self, level, slot_counts))

    def plan_trim(self, level: int, free_counts: Sequence[int]) -> Plan | Refusal:
        """Plan to have ``free_counts[group]`` free slots on a level ahead of use.

        For eviction between two watermarks; pages recalled meanwhile come back for free (INV-330).
        """
        return self._refused(planner.plan_trim(self, level, free_counts))

    def plan_flush(self) -> Plan:
        """Plan to write committed pages to ready disk slots before a planned restart (INV-926)."""
        return planner.plan_flush(self)

    def _refused(self, plan: Plan | Refusal) -> Plan | Refusal:
        """Count a refusal: the one trace it leaves (INV-403)."""
        if isinstance(plan, Refusal):
            self.counters.plans_refused += 1
            self.pools[plan.level][plan.group].refused += 1
        return plan

    def apply(self, plan: Plan) -> Applied:
        """Carry a plan out. Raises: StalePlan: the tables have changed; nothing was done."""
        return planner.apply(self, plan)

    # -- what the executor reports ------------------------------------------------------------

    def move_source_released(self, move: Move) -> None:
        """The data is verified in staging or bounce memory: the source may drain (INV-329).

        A via-bounce move then waits for its target and comes up in ``outbox.start`` again.
        """
        self._check_running(move)
        self.version += 1
        move.is_source_released = True
        self.pass_fence(move.source_fence)
        if move.state is MoveState.BOUNCING:
            if move.is_detached:
                self.end_move(move)
            else:
                self.bounced(move)

    def move_done(self, move: Move) -> None:
        """The bytes are at the target and good. Lock the page of a restore in the same turn."""
        self._check_running(move)
        self.version += 1
        self.finish_move(move)

    def move_failed(self, move: Move, status: int, *, is_source_bad: bool | None = None) -> None:
        """The bytes will not come, and no piece is in flight any more (INV-113, INV-910).

        ``is_source_bad``: the source slot itself proved bad; by default that is taken to be so
        when the source is on disk and was not yet verified. ``status`` is for the caller's log.
        """
        del status
        self._check_running(move)
        self.version += 1
        if is_source_bad is None:
            is_source_bad = (
                self.tiers[move.source.level] is Tier.DISK and not move.is_source_released
            )
        self.fail_move(move, is_source_bad=is_source_bad)

    def move_cancelled(self, move: Move) -> None:
        """The move was withdrawn and no piece is in flight any more (INV-118).

        Usually the tables asked for it. If the executor cancelled by itself, the page returns to
        its source like after a failure, and the source counts as good.
        """
        self._check_running(move)
        self.version += 1
        self.fail_move(move, is_source_bad=False)

    def move_stalled(self, move: Move) -> None:
        """The verdict is bad, but a piece may be in flight for ever (INV-119, INV-205).

        The page is served or lost as after `move_failed`; the slots of the move are handed out to
        nobody until its end is reported as usual, and what waited for them is given up.
        """
        self._check_running(move)
        self.version += 1
        is_read = self.tiers[move.source.level] is Tier.DISK and not move.is_source_released
        self.fail_move(move, is_source_bad=is_read, is_stalled=True)

    def _check_running(self, move: Move) -> None:
        if move.state is not MoveState.STARTED and move.state is not MoveState.BOUNCING:
            raise LogicError(f"the move is not with the executor: {move!r}")

    def abandon(self, pages: Iterable[Page]) -> list[Page]:
        """Nobody waits for these restoring pages any more, though they are held (INV-327).

        Their moves are withdrawn and they go back to their sources. Returns: the pages whose
        restore has to run on because their source has gone to another page.
        """
        self.version += 1
        return [page for page in pages if page.move is not None and not self._withdraw(page)]

    def _withdraw(self, page: Page) -> bool:
        move = page.move
        if move is None or move.kind not in (MoveKind.RESTORE, MoveKind.PREFETCH):
            return True
        return self.cancel_restore(page)

    # -- fences -------------------------------------------------------------------------------

    def new_fence(self) -> Fence:
        """Return an open fence for device work of one session (`suspend(fence)`, INV-338)."""
        return Fence(is_kernel=True)

    def fence_enqueued(self, fence: Fence, event: object) -> None:
        """The use is in a device queue and ``event`` marks its end: device copies may follow."""
        self.version += 1
        self.enqueue_fence(fence, event)

    def fence_passed(self, fence: Fence) -> None:
        """The use has ended: slots become ready and moves startable. Twice is harmless."""
        self.version += 1
        self.pass_fence(fence)

    def rotate_step_fence(self) -> Fence:
        """Close the open step and return its fence; a new one is open from now on (INV-224)."""
        fence, self.step_fence = self.step_fence, Fence(is_kernel=True)
        return fence

    # -- life of the store --------------------------------------------------------------------

    def recover(
        self,
        group: int,
        slot_id: int,
        key: BlockKey,
        parent_key: BlockKey,
        block_index: int,
        generation: int,
    ) -> Page | None:
        """Take in a page found on disk; it starts droppable and disk-only (INV-921).

        Pages come in any order; those without an ancestor wait for it until `recovery_done`.
        Returns: None if the slot has been handed out meanwhile or the key exists; the slot stays
        what it is.
        """
        pool = self.pools[self.last_level][group]
        if self.index.get(group, key) is not None:
            return None
        slot = pool.adopt(slot_id, generation)
        if slot is None:
            return None
        self.version += 1
        page = Page.make(group, DEFAULT_PRIORITY, 1)[0]
        page.key, page.parent_key, page.block_index = key, parent_key, block_index
        page.uses = 1
        page.set_state(_COMMITTED)
        self.bind_primary(page, slot)
        self.page_count += 1
        self.index.add(page)
        parent = self.index.get(group, parent_key) if block_index else None
        if self.spec.groups[group].window is None:
            if parent is not None:
                page.parent = parent
                parent.add_child(page)
                if parent.priority < page.priority:
                    self._raise_priority(parent, page.priority)
            elif block_index:
                self._waiting_children.setdefault((group, parent_key), []).append(page)
        beside = parent.primary if parent is not None else None
        if beside is None or beside.stamp or not pool.policy.insert_below(slot, beside):
            pool.policy.insert_oldest(slot)
        self._adopt_children(page)
        return page

    def _adopt_children(self, page: Page) -> None:
        assert page.key is not None
        for child in self._waiting_children.pop((page.group, page.key), ()):
            if child.state is _COMMITTED:
                child.parent = page
                page.add_child(child)
                if page.priority < child.priority:
                    self._raise_priority(page, child.priority)

    def recovery_done(self) -> int:
        """Drop the recovered pages whose ancestors are missing; return how many (INV-921)."""
        self.version += 1
        waiting, self._waiting_children = self._waiting_children, {}
        before = self.page_count
        for pages in waiting.values():
            for page in pages:
                if page.state is _COMMITTED and not page.hold_count:
                    self.drop(page)
        return before - self.page_count

    def clear(self) -> None:
        """Drop every page. Raises: LogicError: pages are held or locked; nothing is changed."""
        pages = self._all_pages()
        if any(page.hold_count or page.lock_count for page in pages):
            raise LogicError("clear: pages are still held")
        self.version += 1
        for page in pages:
            if page.state is not _DEAD:
                self.drop(page)
        self._past_uses.clear()
        self._waiting_children.clear()

    def close(self) -> None:
        """Give up all copies and all pages, held or not; nothing is written (INV-521, INV-908).

        Moves that are with the executor still report their end.
        """
        while not self.close_some(4096):
            pass

    def close_some(self, slot_count: int) -> bool:
        """Carry on `close` for a number of slots; True when everything is given up.

        For a loop that has others to serve meanwhile. Callers guarantee: between the parts nothing
        is planned, grown or held.
        """
        self.version += 1
        for level in self.pools:
            for pool in level:
                handles = pool.handles
                end = min(pool.closed_count + slot_count, len(handles))
                slot_count -= end - pool.closed_count
                for slot_id in range(pool.closed_count, end):
                    slot = handles[slot_id]
                    page = slot.page if slot is not None else None
                    if page is not None and page.primary is slot:
                        self._close_page(page)
                pool.closed_count = end
                if end < len(handles):
                    return False
        return True

    def _close_page(self, page: Page) -> None:
        first = page.primary
        if first is not None and first.colder is not None:
            for slot in reversed(page.slots[1:]):
                self.end_copy(slot, CopyEnd.CLOSED)
        if page.children is not None:
            for child in page.child_list():
                child.parent = None  # it ends in another part
        page.hold_count = page.lock_count = 0
        self.end_page(page)

    def _all_pages(self) -> list[Page]:
        """Return every living page; O(slots), for `clear` only."""
        return [
            slot.page
            for level in self.pools
            for pool in level
            for slot in pool.handles
            if slot is not None and slot.page is not None and slot.page.primary is slot
        ]

    # -- reading ------------------------------------------------------------------------------

    def take_outbox(self) -> Outbox:
        """Return what has to be done since the last call, and start an empty list."""
        outbox, self.outbox = self.outbox, Outbox()
        return outbox

    def verify_slot(self, slot: Slot) -> None:
        """Raise StaleSlot unless the handle still stands for its slot (INV-304, INV-331)."""
        slot.verify()

    def snapshot(self) -> dict[tuple[int, int], PoolStats]:
        """Return a frozen record per (level, group). Cost: O(levels x groups) (INV-813)."""
        return {
            (pool.level, pool.group): PoolStats(
                total=pool.total,
                ready=pool.ready_count,
                draining=len(pool.draining) + len(pool.stalled),
                primaries=pool.primaries,
                copies=pool.copies.count,
                evictable=self.evictable_count(pool.level, pool.group),
                available=self.available_count(pool.level, pool.group),
                retained_copies=pool.copies.count,
                kept=pool.kept,
                written_through=pool.written_through,
                reused=pool.reused,
                reused_pending=pool.reused_pending,
                reclaimed=pool.reclaimed,
                died=pool.died,
                copy_failed=pool.copy_failed,
                released_by_resize=pool.released_by_resize,
                released_by_close=pool.released_by_close,
                evicted=pool.evicted,
                dropped=pool.dropped,
                refused=pool.refused,
            )
            for level in self.pools
            for pool in level
        }

    def evictable_count(self, level: int, group: int) -> int:
        """Return the real pages a plan may evict: droppable ones, and held ones that can still
        go down (INV-312, INV-802).
        """
        policy = self.pools[level][group].policy
        held = policy.held_count if level < self.last_level else 0
        return policy.droppable_count + held

    def usable_count(self, level: int, group: int) -> int:
        """Return the slots of a pool that no stalled transfer keeps from everybody (INV-119)."""
        pool = self.pools[level][group]
        return pool.total - len(pool.stalled)

    @property
    def is_stuck(self) -> bool:
        """Whether transfers have stalled and nothing else moves: no room will come by itself."""
        return 0 < len(self.stalled_moves) == len(self.moves)

    def available_count(self, level: int, group: int) -> int:
        """Return free + evictable + copies: what a plan can get (INV-803).

        Reservations live in plans, and none is open between two calls (INV-512).
        """
        pool = self.pools[level][group]
        return pool.free_count + self.evictable_count(level, group) + pool.copies.count


__all__ = [
    "DEFAULT_PRIORITY",
    "PASSED",
    "Applied",
    "Fence",
    "IoClass",
    "Match",
    "Move",
    "MoveKind",
    "MoveState",
    "Outbox",
    "Page",
    "PageState",
    "Plan",
    "Refusal",
    "Slot",
    "SlotState",
    "Tables",
]
