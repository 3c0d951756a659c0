"""Resize, clear, close and recovery (INV-520, INV-901 to INV-907, INV-921)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import Tier
from kvstore.core.invariants import check_state
from kvstore.core.page import MoveKind, PageState
from kvstore.core.planner import Plan, Refusal
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.errors import ConfigError, LogicError


def fill_levels(driver: Any) -> None:
    for name in "abcd":
        driver.put(name, 2)


def test_resize_with_open_sessions(make: Any) -> None:
    """INV-901, INV-906: new slots are usable at once; the device tier is fixed."""
    driver = make(2, 2, 2)
    session = driver.fill("s", 1).suspend()
    plan = driver.tables.plan_resize(1, (5,))
    assert isinstance(plan, Plan)
    driver.tables.apply(plan)
    assert (driver.stats(1).total, driver.stats(1).ready) == (5, 5)
    with pytest.raises(ValueError, match="device"):
        driver.tables.plan_resize(0, (4,))
    session.resume().close()


def test_shrink_that_cannot_hold_the_held_pages_changes_nothing(make: Any) -> None:
    """INV-902: OutOfPages; no half-shrunk tier."""
    driver = make(2, 2, None)
    sessions = [driver.fill("a", 2).suspend(), driver.fill("b", 2).suspend()]
    before = driver.stats(1)
    refusal = driver.tables.plan_resize(1, (1,))
    assert isinstance(refusal, Refusal)
    assert (refusal.level, refusal.needed, refusal.available) == (1, 2, 1)
    after = driver.stats(1)
    assert (after.total, after.primaries) == (before.total, before.primaries)
    for session in sessions:
        session.close()


def test_shrink_order_copies_then_droppable_then_held(make: Any) -> None:
    """INV-903, INV-520: the cheapest loss first; held pages move inside the level or down."""
    driver = make(2, None, 6, keep_disk=True)
    driver.put("c", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    driver.finish_all()
    held = driver.open("c", 2).resume()  # two retained copies
    assert driver.stats(1).copies == 2
    plan = driver.tables.plan_resize(1, (4,))
    assert isinstance(plan, Plan)
    assert len(plan.groups[0].reclaims) == 2
    driver.tables.apply(plan)
    driver.pump()
    assert driver.stats(1).released_by_resize == 2
    assert driver.shrunk == [(1, 0)]
    held.suspend()
    session = driver.fill("d", 2).suspend()
    driver.put("e", 2)
    assert driver.stats(1).primaries == 4
    plan = driver.tables.plan_resize(1, (3,))
    assert isinstance(plan, Refusal)  # four held pages sit there
    held.close()
    plan = driver.tables.plan_resize(1, (2,))
    assert isinstance(plan, Plan)
    assert {page.key for page in plan.groups[0].drops} == {page.key for page in held.pages}
    driver.tables.apply(plan)
    driver.pump()
    driver.finish_all()
    assert driver.levels("d", 2) == [1, 1]
    session.resume().close()


def test_slots_above_the_new_end_are_not_handed_out_and_drain(make: Any) -> None:
    """INV-904: the store hears when the last of them is empty."""
    driver = make(2, 4, None)
    driver.put("a", 2)
    driver.put("b", 2)
    session = driver.open("a", 2)
    driver.put("c", 2)  # host: b and a
    top = {page.primary.slot_id for page in session.pages}
    plan = driver.tables.plan_resize(1, (2,))
    assert isinstance(plan, Plan)
    applied = driver.tables.apply(plan)
    driver.pump()
    relocated = [move for move in applied.moves if move.kind is MoveKind.RELOCATE]
    assert all(move.target.slot_id < 2 for move in relocated)
    if relocated:
        assert driver.shrunk == []
    driver.finish_all()
    assert driver.shrunk[-1:] == [(1, 0)]
    pool = driver.tables.pools[1][0]
    assert (pool.total, len(pool.retiring)) == (2, 0)
    assert all(slot_id < 2 for slot_id in pool.ready)
    assert top
    session.resume().close()


def test_host_shrink_promotes_the_background_writes_it_waits_for(make: Any) -> None:
    """INV-109: a resize that waits for a host slot makes its write required."""
    driver = make(2, 8, 8, write_through=True)
    writes = driver.evict_written_through("a", 2)
    plan = driver.tables.plan_resize(1, (1,))
    assert isinstance(plan, Plan)
    driver.tables.apply(plan)
    driver.pump()
    assert set(driver.promoted) & set(writes)
    driver.finish_all()


@pytest.mark.parametrize("counts", [(0,), (-1,), (1, 1)])
def test_sizes_below_the_minimum_are_refused(make: Any, counts: tuple[int, ...]) -> None:
    """INV-905: ValueError at resize, and at construction."""
    driver = make()
    with pytest.raises(ValueError, match="slot"):
        driver.tables.plan_resize(1, counts)
    with pytest.raises(ConfigError):
        LevelSpec(tier=Tier.HOST, slot_counts=(0,))


def test_grow_after_shrink_restores_the_full_size(make: Any) -> None:
    """INV-904, INV-906: a slot is listed once, however often the end moved."""
    driver = make(2, 4, None)
    for counts in ((2,), (6,), (1,), (4,)):
        plan = driver.tables.plan_resize(1, counts)
        assert isinstance(plan, Plan)
        driver.tables.apply(plan)
        driver.pump()
        driver.finish_all()
        fill_levels(driver)
    assert driver.stats(1).primaries == 4


def test_clear_with_held_pages_does_nothing(make: Any) -> None:
    """INV-907: the caller's sessions are still open."""
    driver = make()
    driver.put("b", 1)
    session = driver.fill("a", 1).suspend()
    with pytest.raises(LogicError):
        driver.tables.clear()
    assert driver.has("b", 0)
    session.close()
    driver.tables.clear()
    assert not driver.has("b", 0)


def test_close_ends_everything_held_or_not(make: Any) -> None:
    """INV-908: pages, copies and slots; moves in flight keep their slots until their end."""
    driver = make(2, 2, 4)
    session = driver.fill("a", 2).suspend()
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    moves = list(driver.running)
    driver.tables.close()
    driver.pump()
    assert driver.tables.page_count == 0
    assert driver.stats(1).draining == 2
    for move in moves:
        driver.end(move, "cancelled")
    assert driver.stats(1).ready == 2
    assert all(page.state is PageState.DEAD for page in session.pages)


# -- recovery ----------------------------------------------------------------------------------


def test_recovered_pages_start_droppable_and_disk_only(make: Any, block_key: Any) -> None:
    """INV-921: in any order; the match needs the whole chain."""
    driver = make(2, 2, 8)
    order = [2, 0, 3, 1]
    for slot, block in enumerate(order):
        page = driver.tables.recover(
            0, slot, block_key("a", block), block_key("a", block - 1), block, 7
        )
        assert page is not None
        assert (page.status, page.level) == ("droppable", 2)
        assert page.primary.generation == 7
        driver.pump()
    assert driver.tables.recovery_done() == 0
    assert driver.levels("a", 4) == [2, 2, 2, 2]
    assert driver.tables.match([block_key("a", block) for block in range(4)]).block_count == 4


def test_recovered_pages_without_ancestors_become_free_slots(make: Any, block_key: Any) -> None:
    """INV-921: an unreachable page is useless, and so are its descendants."""
    driver = make(2, 2, 8)
    for slot, block in enumerate((0, 2, 3)):
        driver.tables.recover(0, slot, block_key("a", block), block_key("a", block - 1), block, 1)
    assert driver.tables.recovery_done() == 2
    driver.pump()
    assert (driver.stats(2).primaries, driver.stats(2).ready) == (1, 7)


def test_recovery_respects_slots_in_use_and_known_keys(make: Any, block_key: Any) -> None:
    """INV-922: the store serves meanwhile; a slot handed out is not taken back."""
    driver = make(1, None, 2)
    driver.put("a", 1)
    driver.put("b", 1)  # a is on disk now, in slot 0
    used = driver.page("a", 0).primary.slot_id
    assert driver.tables.recover(0, used, block_key("z", 0), block_key("z", -1), 0, 1) is None
    free = 1 - used
    assert driver.tables.recover(0, free, block_key("b", 0), block_key("b", -1), 0, 1) is None
    assert driver.tables.recover(0, free, block_key("z", 0), block_key("z", -1), 0, 9) is not None
    driver.pump()
    assert driver.tables.recover(0, 99, block_key("y", 0), block_key("y", -1), 0, 1) is None


def test_a_generation_read_from_disk_is_never_handed_out_again(make: Any, block_key: Any) -> None:
    """INV-304, INV-920: the next owner of the slot has a higher one."""
    driver = make(1, None, 1)
    driver.tables.recover(0, 0, block_key("z", 0), block_key("z", -1), 0, 41)
    driver.tables.clear()
    driver.put("a", 1)
    driver.put("b", 1)
    assert driver.page("a", 0).primary.generation == 42


def test_a_commit_adopts_recovered_children(make: Any, block_key: Any) -> None:
    """INV-921, INV-325: a missing ancestor may come from a session."""
    driver = make(2, 2, 4)
    driver.tables.recover(0, 0, block_key("a", 1), block_key("a", 0), 1, 1)
    driver.put("a", 1)
    assert driver.tables.recovery_done() == 0
    assert driver.tables.match([block_key("a", 0), block_key("a", 1)]).block_count == 2


def test_a_recovered_child_never_outlives_its_parent(make: Any, block_key: Any) -> None:
    """INV-324, INV-921: of whatever priority the parent is, and whichever of the two comes first.

    A recovered page has the default priority; a parent of a lower one would be evicted before it,
    and take it along.
    """
    for is_first in (False, True):
        driver = make(2, 2, 8)
        if is_first:
            driver.tables.recover(0, 7, block_key("a", 1), block_key("a", 0), 1, 1)
        session = driver.fill("a", 1, priority=3)
        if not is_first:
            driver.tables.recover(0, 7, block_key("a", 1), block_key("a", 0), 1, 1)
        child = driver.page("a", 1)
        assert child.parent is driver.page("a", 0)
        assert child.parent.priority >= child.priority
        session.close()
        check_state(driver.tables)


def test_a_page_raised_by_a_recovered_child_stays_older_than_its_parent(
    make: Any, block_key: Any
) -> None:
    """INV-324, INV-921: raising the priority counts as a use, and so for the ancestors."""
    driver = make(4, 2, 8)
    driver.put("a", 1)
    driver.put("a", 2, priority=3)
    driver.put("b", 1)
    driver.tables.recover(0, 7, block_key("a", 2), block_key("a", 1), 2, 1)
    assert driver.page("a", 1).priority == driver.page("a", 0).priority
    check_state(driver.tables)


def test_impossible_shapes_are_refused() -> None:
    """INV-132, INV-905: levels in another order, or without a count for each group."""
    one = (GroupSpec(name="full"),)
    device = LevelSpec(tier=Tier.DEVICE, slot_counts=(1,))
    disk = LevelSpec(tier=Tier.DISK, slot_counts=(1,))
    for levels in ((), (disk,), (disk, device), (device, device)):
        with pytest.raises(ValueError, match="levels"):
            TablesSpec(groups=one, levels=levels, block_tokens=4)
    with pytest.raises(ValueError, match="slot_counts"):
        TablesSpec(groups=one * 2, levels=(device,), block_tokens=4)


def test_flush_without_a_disk_tier_is_empty(make: Any) -> None:
    """INV-926: there is nowhere to write to."""
    driver = make(2, 2, None)
    driver.put("a", 2)
    assert driver.tables.plan_flush().is_empty
