"""Every rule that is visible in the tables, checked over the whole state.

`check_state` costs O(slots + pages): always on in tests, by a switch of the configuration
elsewhere. It reads and changes nothing. Each check names the rule it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.config import IoClass
from kvstore.core.copies import CopyEnd
from kvstore.core.eviction.lru import LruPolicy
from kvstore.core.page import Move, MoveKind, MoveState, Page, PageState
from kvstore.core.slots import Pool, Slot, SlotState
from kvstore.core.transitions import Transitions
from kvstore.errors import InvariantError


def _require(condition: object, rule: str, message: str, *subjects: object) -> None:
    if not condition:
        detail = "; ".join(map(repr, subjects))
        raise InvariantError(f"{rule}: {message}{': ' if detail else ''}{detail}")


def check_state(tables: Transitions) -> None:
    """Raise InvariantError, with the number of the rule, if the tables break one."""
    pages: dict[Page, None] = {}
    for level in tables.pools:
        for pool in level:
            _check_pool(tables, pool)
            for slot in _owned(pool):
                assert slot.page is not None
                pages[slot.page] = None
    for page in pages:
        _check_page(page)
    _require(len(pages) == tables.page_count, "INV-301", "a page was forgotten")
    _check_index(tables, pages)
    wanted = set(_wanted_moves(pages))
    for move in tables.moves:
        _check_move(move)
        is_known = move.is_detached or move in wanted
        _require(is_known, "INV-515", "nobody wants a running move", move, move.page)
    _check_moves(tables)


def _wanted_moves(pages: dict[Page, None]) -> Iterator[Move]:
    """Yield the moves that bring bytes to a slot of a page, however indirectly."""
    for page in pages:
        for slot in page.slots:
            move = slot.write
            while move is not None and not move.is_detached:
                yield move
                move = move.source.write


def _owned(pool: Pool) -> Iterator[Slot]:
    for slot in pool.handles:
        if slot is not None and slot.state is not SlotState.DRAINING:
            yield slot


def _check_pool(tables: Transitions, pool: Pool) -> None:
    ready = draining = retiring = primaries = copies = held = droppable = 0
    evictable = 0
    for slot_id, slot in enumerate(pool.handles):
        if slot is None:
            ready += slot_id < pool.total
            continue
        _require(slot.slot_id == slot_id and slot.pool is pool, "INV-301", "wrong handle", slot)
        _require(slot.state is not SlotState.RELEASED, "INV-303", "ended handle in use", slot)
        _require(slot.generation == pool.generations[slot_id], "INV-304", "old handle", slot)
        if slot.state is SlotState.DRAINING:
            _require(slot.outstanding(), "INV-306", "drained slot is not ready", slot)
            is_queued = slot.lane is not None and slot.lane is not pool.draining
            _require(not is_queued, "INV-303", "draining slot is queued", slot)
            if slot_id < pool.total:
                draining += 1
                is_known = slot.lane is pool.draining or slot in pool.stalled
                _require(is_known, "INV-306", "not among the draining", slot)
            else:
                retiring += 1
                _require(slot in pool.retiring, "INV-904", "not among the retiring", slot)
            continue
        _require(slot_id < pool.total, "INV-904", "owned slot above the end", slot)
        page = slot.page
        _require(page is not None, "INV-301", "slot without an owner", slot)
        assert page is not None
        _require(slot in page.slots, "INV-301", "owner does not know the slot", slot, page)
        pending = slot.state is SlotState.WRITING
        _require(pending == (slot.write is not None), "INV-303", "written without a move", slot)
        if pool.copies.has(slot):
            copies += 1
            lane = pool.copies.pending if pending else pool.copies.finished
            _require(slot.lane is lane, "INV-510", "copy in the wrong lane", slot)
            _require(page.primary is not slot, "INV-302", "a copy is the hottest slot", slot)
        else:
            primaries += 1
            _require(page.primary is slot, "INV-302", "a colder slot is no copy", slot, page)
            if slot.lane is not None:
                _require(slot.lane.owner is pool.policy, "INV-312", "foreign queue", slot)
                held += slot.lane.is_held
                droppable += not slot.lane.is_held
                evictable += not slot.lane.is_held or pool.level < tables.last_level
    _require(ready == pool.ready_count, "INV-804", "ready count", pool.level, ready)
    waiting = len(pool.draining) + len(pool.stalled)
    _require(draining == waiting, "INV-804", "draining count", pool.level)
    _require(retiring == len(pool.retiring), "INV-904", "retiring count", pool.level)
    _require(primaries == pool.primaries, "INV-804", "primaries count", pool.level, primaries)
    _require(copies == pool.copies.count, "INV-804", "copies count", pool.level, copies)
    _require(pool.total == ready + draining + primaries + copies, "INV-804", "slots do not balance")
    _require(held == pool.policy.held_count, "INV-312", "held count", pool.level, held)
    _require(droppable == pool.policy.droppable_count, "INV-312", "droppable count", pool.level)
    _require(
        evictable == (droppable + held if pool.level < tables.last_level else droppable),
        "INV-802",
        "evictable count",
    )
    created = pool.kept + pool.written_through
    ended = sum(getattr(pool, end.value) for end in CopyEnd)
    _require(created == ended + pool.copies.count, "INV-805", "copies do not balance", pool.level)
    _require(pool.reused_pending <= pool.reused, "INV-806", "reused_pending above reused")
    reading = sum(move.background_bytes > 0 and move.source.pool is pool for move in tables.moves)
    _require(reading == pool.pending_sources, "INV-605", "pending writes", pool.level, reading)


def _check_page(page: Page) -> None:
    _require(page.state is not PageState.DEAD, "INV-519", "a dead page owns a slot", page)
    _require(page.hold_count >= 0 and page.lock_count >= 0, "INV-311", "negative count", page)
    levels = [slot.level for slot in page.slots]
    _require(levels == sorted(set(levels)), "INV-301", "two slots on one level", page)
    for slot in page.slots:
        _require(slot.page is page and slot.group == page.group, "INV-301", "foreign slot", slot)
        _require(slot.pool.handles[slot.slot_id] is slot, "INV-304", "stale slot in use", slot)
    primary = page.primary
    assert primary is not None
    if page.lock_count:
        _require(primary.level == 0, "INV-309", "a locked page left the device", page)
        _require(primary.write is None, "INV-328", "a locked page is still arriving", page)
    if page.state is not PageState.COMMITTED:
        is_kept = page.hold_count > 0 or page.lock_count > 0
        _require(is_kept, "INV-310", "an unfindable page without holds", page)
    if page.state is PageState.FILLING:
        _require(len(page.slots) == 1, "INV-313", "a mutable page owns a copy", page)
    is_queued = primary.lane is not None
    may_queue = not page.lock_count and not page.is_restoring
    _require(is_queued == may_queue, "INV-312", "queued although not evictable, or not", page)
    if primary.lane is not None:
        _require(primary.lane.is_held == (page.hold_count > 0), "INV-312", "wrong queue", page)
    parent = page.parent
    if parent is not None:
        _require(parent.state is PageState.COMMITTED, "INV-325", "parent left the index", page)
        _require(page in parent.child_list(), "INV-325", "parent forgot its child", page)
        _require(parent.priority >= page.priority, "INV-324", "child above its parent", page)
        above = parent.primary
        if (
            above is not None
            and primary.lane is not None
            and above.lane is primary.lane
            and isinstance(primary.pool.policy, LruPolicy)
        ):
            _require(above.stamp >= primary.stamp, "INV-324", "child newer than parent", page)


def _check_index(tables: Transitions, pages: dict[Page, None]) -> None:
    found = sum(page.state is PageState.COMMITTED for page in pages)
    _require(found == len(tables.index), "INV-319", "the index and the pages differ")
    for page in pages:
        if page.state is PageState.COMMITTED:
            assert page.key is not None
            known = tables.index.get(page.group, page.key)
            _require(known is page, "INV-322", "two pages for one key", page)
        for child in page.child_list():
            _require(child.parent is page, "INV-325", "a child of another parent", child)


def _check_move(move: Move) -> None:
    page, source, target = move.page, move.source, move.target
    _require(move.state is not MoveState.ENDED, "INV-114", "an ended move is listed", move)
    _require(not move.target_fence.passed, "INV-305", "written before the end", move)
    if not move.is_source_released:
        _require(not move.source_fence.passed, "INV-329", "released before its end", move)
        current = source.pool.handles[source.slot_id]
        _require(current is not None, "INV-329", "a source in use is ready", move)
        if current is not None and current is not source:
            _require(
                move.source_fence in current.outstanding(), "INV-522", "reader forgotten", move
            )
    if not move.is_detached:
        _require(target.write is move, "INV-303", "target written by another move", move)
        if target.state is SlotState.WRITING:
            _require(target in page.slots, "INV-524", "a bound slot lost its page", move)
        for slot in page.slots:
            _require(
                slot is target or slot.write is not move, "INV-303", "a move writes twice", move
            )
    if move.state is MoveState.STARTED or move.state is MoveState.BOUNCING:
        for fence in move.waits:
            may_start = fence.passed or (move.is_device_copy and fence.event is not None)
            _require(may_start, "INV-418", "started before its target drained", move)
    if move.kind is not MoveKind.WRITE_THROUGH:
        _require(move.io_class is not IoClass.BACKGROUND, "INV-607", "class", move)


def _check_moves(tables: Transitions) -> None:
    planned = sum(move.background_bytes for move in tables.moves if move.state is MoveState.PLANNED)
    charged = sum(move.background_bytes for move in tables.moves)
    _require(charged == tables.background_bytes, "INV-112", "the cap is charged wrongly")
    _require(planned == tables.unissued_background_bytes(), "INV-112", "planned bytes")
    _require(
        tables.background_bytes <= tables.spec.background_bytes_max, "INV-111", "above the cap"
    )
    for group, free in enumerate(tables.bounce_free):
        used = sum(
            move.via_bounce and move.page.group == group and move.state is not MoveState.PLANNED
            for move in tables.moves
        )
        _require(free + used == tables.spec.bounce_pages and free >= 0, "INV-407", "bounce pages")
    counters = tables.counters
    skipped = sum(counters.write_through_skipped_by.values())
    _require(skipped == counters.write_through_skipped, "INV-615", "a skip without a reason")
    _require(
        counters.write_through_candidates == counters.write_through_issued + skipped,
        "INV-615",
        "skipped = candidates - issued",
    )
