"""Pages, slots, holds, locks and fences (INV-301 to INV-315, INV-328 to INV-330, INV-338)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.copies import CopyQueue
from kvstore.core.eviction.lru import LruPolicy
from kvstore.core.page import MoveKind, PageState
from kvstore.core.planner import Plan, Refusal
from kvstore.core.slots import Pool, SlotState
from kvstore.core.tables import Fence
from kvstore.errors import InvariantError, LogicError, StaleSlot


def new_pool(total: int) -> Pool:
    return Pool(1, 0, total, LruPolicy(), CopyQueue())


def test_generation_rises_and_an_old_handle_is_stale() -> None:
    """INV-304: the generation rises at each allocation; an old handle raises, changes nothing."""
    pool = new_pool(1)
    first = pool.allocate_ready()
    pool.release(first)
    second = pool.allocate_ready()
    assert (first.slot_id, first.generation + 1) == (second.slot_id, second.generation)
    with pytest.raises(StaleSlot):
        first.verify()
    with pytest.raises(StaleSlot):
        pool.release(first)
    second.verify()
    assert pool.ready_count == 0


def test_slot_states_follow_their_table() -> None:
    """INV-303: a transition that is not in the table is a bug and raises."""
    pool = new_pool(1)
    slot = pool.allocate_ready()
    with pytest.raises(InvariantError):
        slot.set_state(SlotState.WRITING)
    pool.release(slot)
    with pytest.raises(InvariantError):
        slot.set_state(SlotState.VALID)


def test_ready_slots_go_first_and_a_slow_fence_hides_no_later_one() -> None:
    """INV-306: ready before draining; a fence that passes late does not delay its neighbours."""
    pool = new_pool(3)
    slots = [pool.allocate_ready() for _ in range(3)]
    fences = [Fence(), Fence()]
    for slot, fence in zip(slots, fences, strict=False):
        slot.add_reader(fence)
        pool.release(slot)
    assert (pool.ready_count, len(pool.draining)) == (0, 2)
    fences[1].passed = True
    pool.fence_passed(slots[1], fences[1])
    assert pool.ready_count == 1
    granted, old = pool.allocate()
    assert (granted.slot_id, old) == (slots[1].slot_id, None)
    granted, old = pool.allocate()
    assert old is slots[0]
    assert granted.outstanding() == [fences[0]]


def test_write_and_readers_have_ends_of_their_own(make: Any) -> None:
    """INV-305: the end of a write does not end the readers, and the reverse."""
    driver = make(2, 4, None, keep_host=True)
    driver.put("a", 2)
    driver.put("b", 2)
    session = driver.open("a", 1).start()
    (move,) = [move for move in driver.tables.moves if move.kind is MoveKind.RESTORE]
    host = move.source
    assert host.write is None
    assert move.source_fence in host.outstanding()
    assert move.page.primary.write is move
    driver.finish_all()
    assert host.outstanding() == []
    session.lock().close()


def test_allocation_of_several_slots_is_all_or_nothing(make: Any) -> None:
    """INV-307, INV-416: a plan that cannot have all of its slots takes none."""
    driver = make(3, 2, None)
    session = driver.fill("a", 2)
    before = driver.stats(0)
    assert isinstance(driver.tables.plan_grow((2,)), Refusal)
    after = driver.stats(0)
    assert (before.ready, before.primaries) == (after.ready, after.primaries)
    session.close()


def test_status_follows_from_the_counters(make: Any) -> None:
    """INV-308, INV-309: locked over held over droppable; a locked page stays on the device."""
    driver = make()
    session = driver.fill("a", 1)
    page = session.pages[0]
    assert page.status == "locked"
    assert isinstance(driver.tables.plan_grow((4,)), Refusal)
    session.suspend()
    assert page.status == "held"
    assert isinstance(driver.tables.plan_grow((4,)), Plan)
    session.close()
    assert page.status == "droppable"


def test_held_page_moves_down_but_is_never_dropped(make: Any) -> None:
    """INV-309: under any pressure a held page keeps a slot somewhere."""
    driver = make(2, 2, 2)
    session = driver.fill("a", 2).suspend()
    for name in "bcdefg":
        driver.put(name, 2)
    assert driver.levels("a", 2) == [2, 2]
    session.resume().close()


def test_uncommitted_page_without_holds_is_freed_at_once(make: Any) -> None:
    """INV-310: nobody can find it again, so it is never queued for eviction."""
    driver = make()
    session = driver.open("a", 2).resume(2)
    assert driver.stats(0).primaries == 2
    session.close()
    assert (driver.stats(0).primaries, driver.stats(0).ready) == (0, 4)
    assert all(page.state is PageState.DEAD for page in session.pages)


@pytest.mark.parametrize("name", ["unhold", "unlock"])
def test_releasing_more_than_taken_raises_and_changes_nothing(make: Any, name: str) -> None:
    """INV-311: also when one list names a page twice."""
    driver = make()
    session = driver.fill("a", 2)
    page, other = session.pages
    release = getattr(driver.tables, name)
    version = driver.tables.version
    with pytest.raises(LogicError):
        release([other, page, page])
    assert (driver.tables.version, page.hold_count, page.lock_count) == (version, 1, 1)
    session.close()
    with pytest.raises(LogicError):
        release([page])
    assert (page.hold_count, page.lock_count) == (0, 0)


def test_evictable_counts_what_a_plan_may_evict(make: Any) -> None:
    """INV-312, INV-802: droppable, or held and not on the last level; never locked, no copies."""
    driver = make(2, 2, 2, keep_host=True)
    session = driver.fill("a", 1)
    assert driver.stats(0).evictable == 0
    session.suspend()
    assert driver.stats(0).evictable == 1
    driver.put("b", 2)
    driver.put("c", 2)
    driver.put("d", 2)
    assert session.pages[0].level == 2
    held_on_last = driver.stats(2)
    assert (held_on_last.primaries, held_on_last.evictable) == (2, 1)
    session.resume()
    assert driver.stats(1).copies == 0
    session.close()


def test_partial_tail_is_private_and_written_in_full_every_time(make: Any) -> None:
    """INV-313, INV-314: no copy, no shadow, no write-through; each demotion writes it again."""
    driver = make(2, 2, 4, keep_host=True, keep_disk=True, write_through=True)
    session = driver.open("a", 1).resume(1).suspend()
    page = session.pages[0]
    for round_number in range(1, 4):
        driver.put(f"x{round_number}", 2)
        assert page.level == 1
        writes = [move for move in driver.started if move.page is page and move.target.level == 1]
        assert len(writes) == round_number
        session.resume()
        assert [slot.level for slot in page.slots] == [0]
        session.suspend()
    assert not any(
        move.kind is MoveKind.WRITE_THROUGH for move in driver.started if move.page is page
    )
    session.close()


def test_only_a_committed_page_owns_copies(make: Any) -> None:
    """INV-315: the same page gains a shadow once it is committed."""
    driver = make(2, 4, None, keep_host=True)
    session = driver.open("a", 1).resume(1).suspend()
    driver.fill("x", 2).close()
    session.resume()
    assert len(session.pages[0].slots) == 1
    session.commit().suspend()
    driver.put("y", 2)
    session.resume()
    assert [slot.level for slot in session.pages[0].slots] == [0, 1]
    session.close()


def test_restoring_page_cannot_be_locked_or_evicted(make: Any) -> None:
    """INV-328: its bytes are not there yet; its source is kept."""
    driver = make(2, 4, None)
    driver.put("a", 1)
    driver.put("b", 2)
    session = driver.open("a", 1).start()
    page = session.pages[0]
    assert page.is_restoring
    with pytest.raises(LogicError):
        driver.tables.lock([page])
    assert isinstance(driver.tables.plan_grow((2,)), Refusal)
    source = page.move.source
    assert source.state is SlotState.DRAINING
    assert source.page is page
    driver.finish_all()
    session.lock().close()


def test_source_drains_only_when_the_data_is_verified(make: Any) -> None:
    """INV-329, INV-501: the disk slot is given back at the verdict, not before."""
    driver = make(1, None, 2)
    driver.put("a", 1)
    driver.put("b", 1)
    session = driver.open("a", 1).start()
    driver.finish_all(MoveKind.EVICT)
    (restore,) = driver.running
    assert driver.stats(2 if len(driver.spec.levels) == 3 else 1).draining == 1
    driver.tables.move_source_released(restore)
    driver.pump()
    assert driver.stats(1).draining == 0
    driver.end(restore)
    session.lock().close()


def test_recall_during_demotion_uses_the_slot_that_still_has_the_data(make: Any) -> None:
    """INV-330: back on the device without a move; the running copy is withdrawn."""
    driver = make(2, 2, 4)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    demotions = list(driver.running)
    assert driver.levels("a", 2) == [1, 1]
    session = driver.open("a", 2).start()
    assert driver.levels("a", 2) == [0, 0]
    assert session.applied.moves == []
    assert set(session.applied.recalled) == set(session.pages)
    assert set(driver.cancelled) == set(demotions)
    session.lock()  # at once: the bytes never left
    for move in demotions:
        driver.end(move, "cancelled")
    assert driver.stats(1).ready == 2
    session.close()


def test_recall_from_a_running_disk_write_reads_the_host_slot(make: Any) -> None:
    """INV-330: the host slot gets one more reader; the disk is not read."""
    driver = make(1, 1, 4)
    driver.put("a", 1)
    driver.put("b", 1)
    driver.tables.apply(driver.tables.plan_trim(1, (1,)))
    driver.pump()
    (write,) = driver.running
    session = driver.open("a", 1).start()
    assert write in driver.cancelled
    (restore,) = [move for move in session.applied.moves if move.kind is MoveKind.RESTORE]
    assert restore.source.level == 1
    driver.end(write, "cancelled")
    driver.finish_all()
    session.lock().close()


def test_slot_of_a_suspended_session_waits_for_its_fence(make: Any) -> None:
    """INV-224, INV-338, INV-417: a slot granted while draining brings its fence along."""
    driver = make(2, 2, None)
    session = driver.fill("a", 2)
    fence = driver.tables.new_fence()
    session.suspend(fence).close()
    plan = driver.tables.plan_grow((2,))
    assert isinstance(plan, Plan)
    applied = driver.tables.apply(plan)
    driver.pump()
    evictions = applied.moves
    assert {move.kind for move in evictions} == {MoveKind.EVICT}
    assert driver.running == []  # the copy has to wait for the step that writes the pages
    assert fence in applied.fences
    driver.tables.fence_enqueued(fence, "event")
    driver.pump()
    assert driver.running == evictions  # its stream waits for the event
    driver.finish_all()
    assert all(known.passed or known is fence for known in applied.fences)


def test_step_fence_covers_slots_released_during_the_step(make: Any) -> None:
    """INV-224, INV-338: without a fence of its own a slot waits for the open step."""
    driver = make(2, None, None)
    session = driver.open("a", 2).resume(2)
    driver.tables.unlock(session.rows[0])
    driver.tables.unhold(session.rows[0])
    assert driver.stats(0).draining == 2
    fence = driver.tables.rotate_step_fence()
    assert fence is not driver.tables.step_fence
    driver.tables.fence_passed(fence)
    assert driver.stats(0).ready == 2


def test_locking_needs_the_page_on_the_device(make: Any) -> None:
    """INV-309: a page elsewhere cannot be locked, and a dead one cannot be held."""
    driver = make(1, 2, None)
    driver.put("a", 1)
    driver.put("b", 1)
    page = driver.page("a", 0)
    with pytest.raises(LogicError):
        driver.tables.lock([page])
    session = driver.open("c", 1).resume(1)
    session.close()
    with pytest.raises(LogicError):
        driver.tables.hold(session.rows[0])


def test_calls_in_a_wrong_state_do_nothing(make: Any, block_key: Any) -> None:
    """INV-332: a commit twice, a verdict twice, a prefetch to no level raise and change nothing."""
    driver = make(2, 2, None)
    session = driver.fill("a", 1)
    with pytest.raises(LogicError):
        driver.tables.commit(session.pages[0], block_key("a", 9), None, 9)
    session.close()
    driver.put("b", 2)
    move = driver.started[-1]
    with pytest.raises(LogicError):
        driver.tables.move_done(move)
    with pytest.raises(LogicError):
        driver.tables.plan_prefetch([[]], 0)


def test_an_adopted_slot_that_was_freed_is_handed_out_once():
    """INV-304, INV-921: recovery leaves the entry in the ready list; it is skipped later."""
    pool = Pool(0, 0, 2, LruPolicy(), CopyQueue())
    adopted = pool.adopt(1, 5)
    assert adopted is not None
    pool.release(adopted)
    slots, owners = pool.allocate_many(2)
    assert sorted(slot.slot_id for slot in slots) == [0, 1]
    assert owners == [None, None]
    assert pool.ready_count == 0
