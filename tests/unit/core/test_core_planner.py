"""The cascade and its plans (INV-401 to INV-420)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import IoClass
from kvstore.core import planner
from kvstore.core.page import MoveKind, MoveState
from kvstore.core.planner import Plan, Refusal
from kvstore.errors import OutOfPages, StalePlan


def test_planning_changes_nothing_and_repeats_itself(make: Any) -> None:
    """INV-401, INV-135: the same tables give the same plan."""
    driver = make(2, 2, 2)
    for name in "abc":
        driver.put(name, 2)
    session = driver.open("a", 2)
    version = driver.tables.version
    first, second = session.plan(), session.plan()
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.groups[0].evicts == second.groups[0].evicts
    assert first.groups[0].restores == second.groups[0].restores
    assert driver.tables.version == version
    session.close()


def test_a_plan_for_older_tables_does_nothing(make: Any) -> None:
    """INV-402, INV-512: StalePlan; nothing was reserved, so nothing leaks."""
    driver = make(2, 4, 4, keep_disk=True, keep_host=True)
    driver.put("a", 2)
    driver.put("b", 2)
    driver.put("a", 2)
    plan = driver.tables.plan_grow((2,))
    assert isinstance(plan, Plan)
    assert plan.groups[0].take_backs
    driver.get("a", 1)
    before = driver.tables.snapshot()
    with pytest.raises(StalePlan):
        driver.tables.apply(plan)
    assert driver.tables.snapshot() == before
    assert isinstance(driver.tables.plan_grow((2,)), Plan)


def test_a_plan_cannot_be_applied_twice(make: Any) -> None:
    """INV-402: applying makes the plan stale."""
    driver = make()
    plan = driver.tables.plan_grow((1,))
    driver.tables.apply(plan)
    with pytest.raises(StalePlan):
        driver.tables.apply(plan)


def test_a_refusal_leaves_only_its_counter(make: Any) -> None:
    """INV-403: also when the refusal comes from the last level."""
    driver = make(2, 1, 1)
    sessions = [driver.fill("a", 2).suspend(), driver.fill("b", 2).suspend()]
    before = driver.tables.snapshot()
    version = driver.tables.version
    refusal = driver.tables.plan_grow((1,))
    assert isinstance(refusal, Refusal)
    after = driver.tables.snapshot()
    level = refusal.level
    assert after[level, 0].refused == before[level, 0].refused + 1
    for where, stats in before.items():
        for name in stats.__slots__:
            if name != "refused":
                assert getattr(after[where], name) == getattr(stats, name)
    assert driver.tables.version == version
    for session in sessions:
        session.close()


def test_a_refusal_says_what_is_missing(make: Any) -> None:
    """INV-404: level, pool group, needed and available, as OutOfPages carries them."""
    driver = make(3, 1, None)
    session = driver.fill("a", 2)
    refusal = driver.tables.plan_grow((2,))
    assert refusal == Refusal(level=0, group=0, needed=2, available=1, never=False)
    never = driver.tables.plan_grow((4,))
    assert isinstance(never, Refusal)
    assert never.never
    error = OutOfPages(
        "no room",
        level=refusal.level,
        pool_group=refusal.group,
        needed=refusal.needed,
        available=refusal.available,
    )
    assert (error.needed, error.available) == (2, 1)
    session.close()


def test_slots_given_back_by_promoted_pages_are_room(make: Any) -> None:
    """INV-405: full host, full device, and still both sessions can change places."""
    driver = make(2, 2, None)
    first = driver.fill("a", 2).suspend()
    second = driver.fill("b", 2).suspend()
    assert driver.levels("a", 2) == [1, 1]
    first.resume()
    assert (driver.levels("a", 2), driver.levels("b", 2)) == ([0, 0], [1, 1])
    first.suspend()
    second.resume().close()
    first.close()


def test_draining_slots_are_free_for_required_moves(make: Any) -> None:
    """INV-406: the move waits for the fence; write-through takes ready ones only."""
    driver = make(1, 1, 1)
    session = driver.fill("a", 1)
    fence = driver.tables.new_fence()
    session.suspend(fence).close()
    plan = driver.tables.plan_grow((1,))
    assert isinstance(plan, Plan)
    driver.tables.apply(plan)
    driver.pump()
    assert driver.running == []
    driver.tables.fence_passed(fence)
    driver.pump()
    assert len(driver.running) == 1
    driver.finish_all()


def test_the_bounce_buffer_breaks_each_cycle_one_page_at_a_time(make: Any) -> None:
    """INV-407: one via-bounce move per ring, and never more at once than there are pages."""
    driver = make(3, 3, None, bounce_pages=1)
    first = driver.fill("a", 3).suspend()
    second = driver.fill("b", 3).suspend()
    first.start()
    bounced = [move for move in first.applied.moves if move.via_bounce]
    assert len(bounced) == 3
    assert {move.kind for move in bounced} == {MoveKind.RESTORE}
    assert sum(move.state is MoveState.BOUNCING for move in bounced) == 1
    driver.finish_all()
    assert driver.tables.bounce_free == [1]
    assert driver.stats(1).total == 3
    first.lock().suspend()
    second.resume().close()
    first.close()


def test_a_move_that_ends_between_its_stages_is_reported(make: Any) -> None:
    """INV-120, INV-407: its bytes lie in a bounce slot of the executor, which has to hear of it."""
    driver = make(3, 3, None, bounce_pages=1)
    first = driver.fill("a", 3).suspend()
    second = driver.fill("b", 3).suspend()
    first.start()
    (move,) = [move for move in driver.running if move.state is MoveState.BOUNCING]
    driver.end(move)
    assert move.state is MoveState.BOUNCED
    first.close()
    second.close()
    driver.tables.clear()
    driver.pump()
    assert move.state is MoveState.ENDED
    assert move in driver.cancelled
    driver.finish_all()
    assert driver.tables.bounce_free == [1]


def test_a_full_store_swaps_without_a_host_tier(make: Any) -> None:
    """INV-407, INV-415: device and disk alone work the same way."""
    driver = make(2, None, 2)
    first = driver.fill("a", 2).suspend()
    second = driver.fill("b", 2).suspend()
    for _ in range(3):
        first.resume().suspend()
        second.resume().suspend()
    first.close()
    second.close()


def test_refusal_follows_plain_counting(make: Any) -> None:
    """INV-408: exactly as many held pages as slots fit, one more does not."""
    driver = make(2, 2, 2)
    sessions = [driver.fill(name, 2).suspend() for name in "abc"]
    for session in sessions:
        session.resume().suspend()
    assert isinstance(driver.tables.plan_grow((1,)), Refusal)
    sessions[0].close()
    plan = driver.tables.plan_grow((2,))
    assert isinstance(plan, Plan)
    for session in sessions[1:]:
        session.close()


def test_prefix_of_a_level_stays_and_older_pages_fall_past_it(make: Any) -> None:
    """INV-410: victims of a level go in front; the newest that fit stay; a page may skip."""
    driver = make(4, 2, 8)
    driver.put("a", 4)
    driver.put("b", 4)
    assert sorted(driver.levels("a", 4), key=str) == [1, 1, 2, 2]
    skipped = [m for m in driver.started if (m.source.level, m.target.level) == (0, 2)]
    assert len(skipped) == 2
    assert driver.levels("a", 4) == [1, 1, 2, 2]  # leaves are older than the root


def test_a_page_with_a_copy_below_takes_it_back(make: Any) -> None:
    """INV-411, INV-503: no slot, no write; the copy is not up for reclaim in its own plan."""
    driver = make(2, None, 2, keep_disk=True)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    driver.finish_all()
    driver.get("a", 2)
    before = len(driver.started)
    plan = driver.tables.plan_grow((2,))
    assert isinstance(plan, Plan)
    assert len(plan.groups[0].take_backs) == 2
    assert plan.groups[0].reclaims == []
    driver.tables.apply(plan)
    driver.pump()
    assert driver.writes(1, before) == 0
    assert driver.stats(1).reused == 2


def test_last_level_drops_oldest_first_and_places_held_ones(make: Any) -> None:
    """INV-412, INV-413: droppable pages go, held newcomers stay and are not victims again."""
    driver = make(2, None, 2)
    driver.put("a", 2)
    session = driver.fill("b", 2).suspend()
    driver.put("c", 2)
    assert driver.levels("b", 2) == [1, 1]
    assert not driver.has("a", 0)
    driver.put("d", 2)
    assert driver.levels("b", 2) == [1, 1]
    assert not driver.has("c", 0)
    session.close()


def test_droppable_victim_goes_when_a_held_one_has_no_room(make: Any) -> None:
    """INV-414: the held page is older, but there is no room for it below."""
    driver = make(2, 1, None)
    held = driver.fill("a", 1).suspend()
    blocker = driver.fill("b", 1).suspend()
    driver.put("c", 1)
    assert driver.levels("a", 1) == [1]
    assert driver.levels("b", 1) == [0]
    driver.put("d", 1)
    assert driver.levels("b", 1) == [0]
    assert not driver.has("c", 0)
    held.close()
    blocker.close()


def test_a_move_starts_only_when_its_target_is_drained(make: Any) -> None:
    """INV-418, INV-522: neither order nor luck, only fences."""
    driver = make(1, 1, 2)
    driver.put("a", 1)
    driver.put("b", 1)
    plan = driver.tables.plan_grow((1,))
    assert isinstance(plan, Plan)
    applied = driver.tables.apply(plan)
    driver.pump()
    to_disk, to_host = sorted(applied.moves, key=lambda move: -move.target.level)
    assert to_disk.state is MoveState.STARTED
    assert to_host.state is MoveState.PLANNED
    driver.end(to_disk)
    assert to_host.state is MoveState.STARTED
    driver.finish_all()


def test_a_failed_move_stays_with_its_page(make: Any) -> None:
    """INV-419: the other moves of the plan go on."""
    driver = make(2, 2, None)
    driver.put("a", 2)
    plan = driver.tables.plan_grow((2,))
    assert isinstance(plan, Plan)
    applied = driver.tables.apply(plan)
    driver.pump()
    driver.end(applied.moves[0], "failed")
    driver.finish_all()
    gone = applied.moves[0].page
    assert gone is not applied.moves[1].page
    assert applied.moves[1].page.is_ready


def test_planning_looks_only_at_what_it_moves(make: Any) -> None:
    """INV-420: slots looked at grow with the victims, not with the pages of the store."""

    class Counting(set[Any]):
        """The excluded slots: a selection asks for each slot that it looks at."""

        looked_at = 0

        def __contains__(self, slot: object) -> bool:
            Counting.looked_at += 1
            return super().__contains__(slot)

    def looked_at(size: int) -> int:
        driver = make(size, size, None)
        for name in range(size // 4):
            driver.put(f"n{name}", 4)
        Counting.looked_at = 0
        pool = driver.tables.pools[0][0]
        assert len(pool.policy.select(3, held_limit=0, excluded=Counting()).victims) == 3
        plan = driver.tables.plan_grow((3,))
        assert isinstance(plan, Plan)
        assert len(plan.groups[0].evicts) == 3
        return Counting.looked_at

    assert looked_at(16) == looked_at(256) == 3


def test_growing_leaves_the_session_alone_if_it_is_refused(make: Any) -> None:
    """INV-417: no page, no slot, no lock changes."""
    driver = make(2, 1, None)
    session = driver.fill("a", 2)
    before = driver.tables.snapshot()
    refusal = driver.tables.plan_grow((1,))
    assert isinstance(refusal, Refusal)
    after = driver.tables.snapshot()
    assert before[0, 0].primaries == after[0, 0].primaries == len(session.pages)
    session.close()


def test_one_flight_serves_all_who_want_a_page(make: Any) -> None:
    """INV-326, INV-327, INV-336: the second joins the page's transfer; each has its own hold."""
    driver = make(2, 2, None)
    driver.put("a", 1)
    driver.put("b", 2)
    first = driver.open("a", 1).start()
    second = driver.open("a", 1).start()
    restores = [move for move in driver.tables.moves if move.kind is MoveKind.RESTORE]
    assert second.applied.moves == []
    assert second.applied.joined == restores
    first.driver.tables.unhold(first.rows[0])
    driver.pump()
    assert driver.cancelled == []
    driver.finish_all()
    second.lock().close()


def test_an_abandoned_restore_returns_to_its_source(make: Any) -> None:
    """INV-327, INV-916: the last waiter withdraws the transfer; nothing leaks."""
    driver = make(2, 4, None)
    driver.put("a", 1)
    driver.put("b", 2)
    session = driver.open("a", 1).start()
    page = session.pages[0]
    restore = page.move
    driver.finish_all(MoveKind.EVICT)
    assert driver.tables.abandon([page]) == []
    driver.pump()
    assert restore in driver.cancelled
    assert (page.level, page.is_ready) == (1, True)
    assert driver.stats(0).draining == 1
    driver.end(restore, "cancelled")
    assert driver.stats(0).draining == 0
    session.resume().close()


def test_closing_the_last_holder_withdraws_the_restore(make: Any) -> None:
    """INV-327: no hold, no reason to read."""
    driver = make(2, 4, None)
    driver.put("a", 1)
    driver.put("b", 2)
    session = driver.open("a", 1).start()
    restore = session.pages[0].move
    driver.finish_all(MoveKind.EVICT)
    session.close()
    assert restore in driver.cancelled
    driver.end(restore, "done")
    assert driver.levels("a", 1) == [1]


def test_a_prefetch_brings_disk_pages_to_the_host_only(make: Any) -> None:
    """INV-333, INV-334, INV-703: pages land in host slots; no shadow appears."""
    driver = make(2, 2, 4, keep_host=True)
    for name in "abc":
        driver.put(name, 2)
    assert driver.levels("a", 2) == [2, 2]
    session = driver.open("a", 2)
    plan = driver.tables.plan_prefetch(session.rows)
    assert isinstance(plan, Plan)
    applied = driver.tables.apply(plan)
    driver.pump()
    fetched = [move for move in applied.moves if move.kind is MoveKind.PREFETCH]
    assert len(fetched) == 2
    assert {move.io_class for move in fetched} == {IoClass.READ}
    driver.finish_all()
    assert driver.levels("a", 2) == [1, 1]
    assert driver.slots_of("a", 0) == [1]
    assert driver.stats(1).copies == 0
    session.close()


def test_disk_restore_takes_no_host_slot(make: Any) -> None:
    """INV-334: a disk to device restore is one move and evicts nobody from the host."""
    driver = make(2, 2, 4)
    for name in "abc":
        driver.put(name, 2)
    host_before = {driver.page("b", block) for block in range(2)}
    session = driver.open("a", 1).start()
    (restore,) = [move for move in session.applied.moves if move.kind is MoveKind.RESTORE]
    assert (restore.source.level, restore.target.level) == (2, 0)
    assert planner._kept_level(driver.tables, restore.page) == -1
    driver.finish_all()
    assert any(page.level == 1 for page in host_before)
    session.lock().close()


def test_flush_writes_committed_pages_to_ready_disk_slots(make: Any) -> None:
    """INV-926: the most valuable first, parents before children, only into ready slots."""
    driver = make(4, None, 2)
    driver.put("a", 4)
    plan = driver.tables.plan_flush()
    applied = driver.tables.apply(plan)
    driver.pump()
    assert [move.page.block_index for move in applied.moves] == [0, 1]
    assert {move.io_class for move in applied.moves} == {IoClass.REQUIRED}
    driver.finish_all()
    assert driver.slots_of("a", 0) == [0, 1]
    assert driver.tables.plan_flush().is_empty


def test_held_newcomer_outranks_a_reserved_shadow(make: Any) -> None:
    """INV-414, INV-517, INV-412: with nothing free below, a droppable page gives up its shadow."""
    driver = make(3, 2, 1, keep_host=True)
    blocker = driver.fill("k", 1).suspend()
    for level in (0, 1):
        driver.tables.apply(
            driver.tables.plan_trim(level, (driver.spec.levels[level].slot_counts[0],))
        )
        driver.pump()
        driver.finish_all()
    assert driver.levels("k", 1) == [2]
    driver.put("d", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (3,)))
    driver.pump()
    driver.finish_all()
    driver.get("d", 2)
    assert driver.stats(1).copies == 2
    held = driver.fill("h", 1).suspend()
    plan = driver.tables.plan_grow((3,))
    assert isinstance(plan, Plan)
    assert [page.key for page in plan.groups[0].drops] == [driver.page("d", 1).key]
    driver.tables.apply(plan)
    driver.pump()
    driver.finish_all()
    assert (driver.levels("h", 1), driver.levels("k", 1)) == ([1], [2])
    assert driver.levels("d", 2) == [1, None]
    held.close()
    blocker.close()
