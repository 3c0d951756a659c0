"""Retained disk copies and host shadows: one mechanism (INV-301, 302, 5xx, 7xx, 805, 806)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import share_slots
from kvstore.core.page import MoveKind
from kvstore.core.planner import Plan


def down(driver: Any, name: str, blocks: int, last: int | None = None) -> None:
    """Push every device page down, step by step, to a level."""
    for level in range(last if last is not None else len(driver.spec.levels) - 1):
        counts = [pool.total for pool in driver.tables.pools[level]]
        plan = driver.tables.plan_trim(level, counts)
        assert isinstance(plan, Plan), plan
        driver.tables.apply(plan)
        driver.pump()
        driver.finish_all()
    assert all(driver.has(name, block) for block in range(blocks))


def disk_of(driver: Any) -> int:
    return len(driver.spec.levels) - 1


# -- keep after restore ------------------------------------------------------------------------


def test_without_the_option_a_restore_frees_the_disk_slot(make: Any) -> None:
    """INV-501, INV-134: one slot per page."""
    driver = make(2, None, 4)
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.get("a", 2)
    assert driver.slots_of("a", 0) == [0]
    assert (driver.stats(1).ready, driver.stats(1).kept) == (4, 0)


@pytest.mark.parametrize("target", ["device", "host"])
def test_with_the_option_the_disk_slot_stays(make: Any, target: str) -> None:
    """INV-502: after a restore to the device and to the host alike."""
    driver = make(2, 2, 4, keep_disk=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    if target == "device":
        driver.get("a", 2)
        assert driver.slots_of("a", 0) == [0, 2]
    else:
        session = driver.open("a", 2)
        driver.tables.apply(driver.tables.plan_prefetch(session.rows))
        driver.pump()
        driver.finish_all()
        assert driver.slots_of("a", 0) == [1, 2]
        session.close()
    stats = driver.stats(2)
    assert (stats.kept, stats.copies, stats.retained_copies) == (2, 2, 2)


def test_taking_back_writes_nothing_and_takes_no_slot(make: Any) -> None:
    """INV-503, INV-711: an eviction of copies only has no move at all."""
    driver = make(2, None, 4, keep_disk=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.get("a", 2)
    started, ready = len(driver.started), driver.stats(1).ready
    driver.open("b", 2).resume(2).close()
    assert driver.levels("a", 2) == [1, 1]
    assert len(driver.started) == started
    assert (driver.stats(1).ready, driver.stats(1).reused) == (ready, 2)


@pytest.mark.parametrize("fraction", ["0.0", "0.25", "1.0"])
def test_reclaim_order_follows_the_share(make: Any, fraction: str) -> None:
    """INV-504, INV-506, INV-508: above the share copies go first, inside it disk-only pages."""
    driver = make(4, None, 8, keep_disk=True, share_disk=fraction)
    driver.put("a", 4)
    down(driver, "a", 4)
    driver.put("d", 4)
    down(driver, "d", 4)
    session = driver.fill("a", 4).suspend()  # 4 copies, 4 disk-only pages, nothing free
    assert driver.stats(1).copies == 4
    extra = driver.open("x", 4)
    down_plan = extra.plan(2)  # 2 of a's pages go down: they take back
    assert isinstance(down_plan, Plan)
    assert len(down_plan.groups[0].take_backs) == 2
    session.resume()
    fresh = driver.tables.plan_trim(1, (3,))
    assert isinstance(fresh, Plan)
    reclaimed = len(fresh.groups[0].reclaims)
    dropped = len(fresh.groups[0].drops)
    share = share_slots(fraction, 8)
    excess = max(0, 4 - share)
    assert (reclaimed, dropped) == (min(excess, 3), 3 - min(excess, 3))
    session.close()


def test_no_copy_in_the_share_goes_while_a_page_can_be_evicted(make: Any) -> None:
    """INV-504, INV-505: the copies follow only when the disk-only pages are used up."""
    driver = make(2, None, 4, keep_disk=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.put("d", 2)
    down(driver, "d", 2)
    session = driver.fill("a", 2)
    plan = driver.tables.plan_trim(1, (2,))
    assert [page.key for page in plan.groups[0].drops] == [
        driver.page("d", 1).key,
        driver.page("d", 0).key,
    ]
    assert plan.groups[0].reclaims == []
    plan = driver.tables.plan_trim(1, (3,))
    assert (len(plan.groups[0].drops), len(plan.groups[0].reclaims)) == (2, 1)
    session.close()


def test_share_comes_from_the_decimal_text() -> None:
    """INV-507: 0.29 of 100 slots is 29."""
    assert share_slots(0.29, 100) == 29
    assert share_slots("0.29", 100) == 29
    assert share_slots(1.0, 7) == 7
    assert share_slots(0.0, 7) == 0


def test_keeping_may_exceed_the_share(make: Any) -> None:
    """INV-509: the restore keeps its copy, the excess only goes first."""
    driver = make(2, None, 4, keep_disk=True, share_disk="0.25")
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.get("a", 2)
    assert driver.stats(1).copies == 2


def test_oldest_copy_goes_first_and_pending_ones_last(make: Any) -> None:
    """INV-510: by the time they became copies."""
    driver = make(4, None, 4, keep_disk=True, share_disk="0.0")
    for name in "ab":
        driver.put(name, 1)
    down(driver, "a", 1)
    driver.get("b", 1)
    driver.get("a", 1)
    plan = driver.tables.plan_trim(1, (3,))
    assert [slot.page for slot, _end in plan.groups[0].reclaims] == [driver.page("b", 0)]
    flush = driver.tables
    driver.put("c", 1)
    flush.apply(flush.plan_flush())  # a pending copy of c
    driver.pump()
    order = list(driver.tables.pools[1][0].copies.oldest())
    assert [slot.page.key for slot in order] == [
        driver.page("b", 0).key,
        driver.page("a", 0).key,
        driver.page("c", 0).key,
    ]
    driver.finish_all()


def test_reserved_copies_cannot_be_reclaimed_by_their_own_plan(make: Any) -> None:
    """INV-511, INV-508: what falls takes its copy back, the others give theirs."""
    driver = make(4, None, 4, keep_disk=True, share_disk="0.0")
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.get("a", 2)
    driver.put("b", 2)
    plan = driver.tables.plan_grow((4,))
    assert isinstance(plan, Plan)
    taken = {slot for _page, slot in plan.groups[0].take_backs}
    assert len(taken) == 2
    assert not taken & {slot for slot, _end in plan.groups[0].reclaims}


def test_held_newcomer_takes_the_copy_slots_reserved_for_droppable_pages(make: Any) -> None:
    """INV-517, INV-518: the droppable page is dropped with its copy, and counted."""
    driver = make(4, None, 2, keep_disk=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.get("a", 2)  # two droppable device pages with copies; the disk is full of them
    session = driver.fill("h", 2).suspend()
    assert driver.stats(1).copies == 2
    plan = driver.tables.plan_grow((4,))
    assert isinstance(plan, Plan)
    assert len(plan.groups[0].evicts) == 2
    assert len(plan.groups[0].drops) == 2
    dropped = driver.stats(0).dropped
    driver.tables.apply(plan)
    driver.pump()
    driver.finish_all()
    assert driver.levels("h", 2) == [1, 1]
    assert not driver.has("a", 0)
    assert driver.stats(0).dropped == dropped + 2
    assert driver.stats(1).died == 2
    session.close()


def test_copies_end_with_their_page(make: Any) -> None:
    """INV-519: on drop, on replacement by another page, on clear."""
    driver = make(2, 2, 4, keep_disk=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    session = driver.open("a", 1)
    driver.tables.apply(driver.tables.plan_prefetch(session.rows))
    driver.pump()
    driver.finish_all()
    assert driver.slots_of("a", 0) == [1, 2]
    again = driver.open("zzz", 1).resume(1)
    again.name = "a"
    again.commit()  # the key exists on the host: its colder slots are released
    assert driver.slots_of("a", 0) == [0]
    assert driver.stats(2).died == 1
    again.close()
    session.close()
    driver.tables.clear()
    assert (driver.stats(2).copies, driver.stats(2).ready) == (0, 4)


def test_close_gives_up_all_copies_and_writes_nothing(make: Any) -> None:
    """INV-521, INV-709: the pages go too; nothing is started."""
    driver = make(2, 2, 4, keep_disk=True, keep_host=True)
    driver.put("a", 2)
    down(driver, "a", 2, 1)
    driver.get("a", 2)
    assert driver.stats(1).copies == 2
    started = len(driver.started)
    driver.tables.close()
    driver.pump()
    assert len(driver.started) == started
    assert driver.stats(1).released_by_close == 2
    assert driver.stats(0).ready == 2


def test_reclaiming_moves_nothing_and_leaves_the_primary(make: Any) -> None:
    """INV-525: cheap by definition."""
    driver = make(2, None, 4, keep_disk=True, share_disk="0.0")
    driver.put("a", 2)
    down(driver, "a", 2)
    session = driver.fill("a", 2)
    primaries = [page.primary for page in session.pages]
    driver.tables.apply(driver.tables.plan_trim(1, (4,)))
    driver.pump()
    assert driver.running == []
    assert [page.primary for page in session.pages] == primaries
    assert driver.stats(1).reclaimed == 2
    session.close()


# -- shadows -----------------------------------------------------------------------------------


def test_no_shadow_without_the_option(make: Any) -> None:
    """INV-701: off by default."""
    driver = make(2, 4, None)
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.get("a", 2)
    assert driver.slots_of("a", 0) == [0]


def test_recall_leaves_a_shadow_and_eviction_takes_it_back(make: Any) -> None:
    """INV-702, INV-704, INV-705: no second copy to the host, free host slots unchanged."""
    driver = make(2, 4, None, keep_host=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    free = driver.stats(1).ready
    driver.get("a", 2)
    assert driver.slots_of("a", 0) == [0, 1]
    assert driver.stats(1).ready == free
    copies = driver.writes(1)
    down(driver, "a", 2)
    assert driver.slots_of("a", 0) == [1]
    assert driver.stats(1).ready == free
    assert driver.writes(1) == copies
    assert driver.stats(1).reused == 2


def test_no_shadow_on_a_restore_from_disk(make: Any) -> None:
    """INV-703: staging memory is no level."""
    driver = make(2, 2, 4, keep_host=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    driver.get("a", 2)
    assert driver.slots_of("a", 0) == [0]
    assert driver.stats(1).kept == 0


def test_shadows_go_before_real_pages_oldest_first(make: Any) -> None:
    """INV-706: exactly min(shortage, unreserved shadows) of them."""
    driver = make(4, 4, None, keep_host=True)
    driver.put("a", 4)
    down(driver, "a", 4)
    driver.get("a", 2)  # shadows of a0, a1; a2, a3 are real host pages
    driver.put("b", 2)
    plan = driver.tables.plan_trim(1, (3,))
    assert isinstance(plan, Plan)
    ended = [slot.page for slot, _end in plan.groups[0].reclaims]
    assert ended == [driver.page("a", 0), driver.page("a", 1)]
    assert len(plan.groups[0].drops) == 1


def test_host_fraction_protects_shadows(make: Any) -> None:
    """INV-707: the same order as on disk."""
    driver = make(4, 4, None, keep_host=True, share_host="1.0")
    driver.put("a", 4)
    down(driver, "a", 4)
    driver.get("a", 2)
    plan = driver.tables.plan_trim(1, (2,))
    assert isinstance(plan, Plan)
    assert plan.groups[0].reclaims == []
    assert len(plan.groups[0].drops) == 2


def test_a_shadow_never_moves_down(make: Any) -> None:
    """INV-708: released, not written."""
    driver = make(2, 2, 4, keep_host=True)
    driver.put("a", 2)
    down(driver, "a", 2, 1)
    session = driver.fill("a", 2)
    assert driver.slots_of("a", 0) == [0, 1]
    before = driver.writes(2)
    driver.tables.apply(driver.tables.plan_trim(1, (2,)))
    driver.pump()
    assert driver.writes(2) == before
    assert driver.slots_of("a", 0) == [0]
    session.close()


def test_shadow_and_disk_copy_are_independent(make: Any) -> None:
    """INV-712: a page owns both; losing one leaves the other."""
    driver = make(2, 2, 4, keep_host=True, keep_disk=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    session = driver.open("a", 2)
    driver.tables.apply(driver.tables.plan_prefetch(session.rows))
    driver.pump()
    driver.finish_all()
    session.resume()
    assert driver.slots_of("a", 0) == [0, 1, 2]
    driver.tables.apply(driver.tables.plan_trim(1, (2,)))
    driver.pump()
    assert driver.slots_of("a", 0) == [0, 2]
    session.close()


def test_a_shadow_being_read_is_taken_back_at_once_or_drains(make: Any) -> None:
    """INV-713, INV-522: readers do not conflict; the next writer waits for them."""
    driver = make(2, 2, None, keep_host=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    session = driver.open("a", 2).start()
    reads = list(driver.running)
    assert driver.stats(1).copies == 2
    driver.tables.apply(driver.tables.plan_trim(1, (1,)))
    driver.pump()
    assert (driver.stats(1).draining, driver.stats(1).ready) == (1, 0)
    session.driver.tables.abandon(session.pages)
    driver.pump()
    # One shadow is taken back though its recall still reads it; the other page has no source
    # any more and its restore runs on.
    assert sorted(page.level for page in session.pages) == [0, 1]
    for move in reads:
        driver.end(move, "done")
    session.resume().close()


@pytest.mark.parametrize(
    ("keep_host", "keep_disk", "write_through"),
    [(h, d, w) for h in (False, True) for d in (False, True) for w in (False, True)],
)
def test_copies_balance_whatever_is_switched_on(
    make: Any, keep_host: bool, keep_disk: bool, write_through: bool
) -> None:
    """INV-805, INV-806, INV-614: created = ended + retained now, for all settings."""
    driver = make(3, 8, 24, keep_host=keep_host, keep_disk=keep_disk, write_through=write_through)
    for turn in range(16):
        driver.put("abcdef"[turn % 6], 3)
        driver.get("abcdef"[(turn + 5) % 6], 3)
    for level in (1, 2):
        stats = driver.stats(level)
        ended = (
            stats.reused
            + stats.reclaimed
            + stats.died
            + stats.copy_failed
            + stats.released_by_resize
            + stats.released_by_close
        )
        assert stats.kept + stats.written_through == ended + stats.copies
        assert stats.reused_pending <= stats.reused
    assert (driver.stats(1).kept > 0) == keep_host
    assert (driver.stats(2).kept > 0) == keep_disk
    assert (driver.stats(2).written_through > 0) == write_through


def test_option_detectors(make: Any) -> None:
    """INV-814: each option changes a count; with all off each eviction is a required write."""
    plain, kept = make(2, None, 8), make(2, None, 8, keep_disk=True)
    for driver in (plain, kept):
        for turn in range(8):
            driver.put("ab"[turn % 2], 2)
    assert kept.writes(1) < plain.writes(1)
    assert plain.stats(1).evicted == plain.stats(1).kept == 0
    exclusive, inclusive = make(2, 8, None), make(2, 8, None, keep_host=True)
    for driver in (exclusive, inclusive):
        for turn in range(8):
            driver.put("ab"[turn % 2], 2)
    assert inclusive.writes(1) < exclusive.writes(1)
    off, through = make(2, 4, 8), make(2, 4, 8, write_through=True)
    for driver in (off, through):
        for name in "abcd":
            driver.put(name, 2)
            driver.finish_all()
    required = [
        sum(m.target.level == 2 and m.kind is MoveKind.EVICT for m in driver.started)
        for driver in (off, through)
    ]
    assert required[1] < required[0]


def test_error_cleanup_skips_a_shadow_that_is_bound(make: Any) -> None:
    """INV-710, INV-523, INV-524: a recall that fails leaves its shadow with the page, once."""
    driver = make(2, 4, None, keep_host=True)
    driver.put("a", 2)
    down(driver, "a", 2)
    session = driver.open("a", 2).start()
    shadows = [page.slot_at(1) for page in session.pages]
    driver.end(session.pages[0].move, "failed")
    page = session.pages[0]
    assert (page.primary, page.level) == (shadows[0], 1)
    assert driver.stats(1).copies == 1
    driver.finish_all()
    assert session.pages[1].slot_at(1) is shadows[1]
    session.resume().close()
    assert driver.stats(1).ready == 2


def test_snapshot_costs_levels_times_groups(make: Any) -> None:
    """INV-813, INV-801, INV-802, INV-803: one frozen record per pool, without a look at pages."""
    driver = make(4, 4, 8, keep_host=True, keep_disk=True)
    for turn in range(6):
        driver.put("abc"[turn % 3], 3)

    class Untouchable(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("a snapshot walks no slots")

    for level in driver.tables.pools:
        for pool in level:
            pool.handles = Untouchable(pool.handles)
    snapshot = driver.tables.snapshot()
    assert set(snapshot) == {(0, 0), (1, 0), (2, 0)}
    for stats in snapshot.values():
        free = stats.ready + stats.draining
        assert stats.total == free + stats.primaries + stats.copies
        assert stats.available == free + stats.evictable + stats.copies
        assert stats.retained_copies == stats.copies
    with pytest.raises(AttributeError):
        snapshot[0, 0].total = 1
