"""What failures leave behind (INV-113, 329, 513-516, 523-526, 910-913, 916)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.page import PageState
from kvstore.core.planner import Plan


def trim(driver: Any, level: int) -> list[Any]:
    """Push everything evictable off a level; return the moves, still running."""
    pool = driver.tables.pools[level][0]
    plan = driver.tables.plan_trim(level, (pool.total,))
    assert isinstance(plan, Plan), plan
    applied = driver.tables.apply(plan)
    driver.pump()
    return list(applied.moves)


def test_failed_write_returns_the_page_to_its_source(make: Any) -> None:
    """INV-329, INV-911: the source is not promised, so nothing is lost."""
    driver = make(2, None, 4)
    driver.put("a", 2)
    moves = trim(driver, 0)
    driver.end(moves[0], "failed")
    assert driver.levels("a", 2) == [1, 0]
    driver.finish_all()
    assert driver.stats(1).ready == 3
    assert driver.get("a", 2) == 2


def test_failed_write_of_a_promised_source_drops_a_droppable_page(make: Any) -> None:
    """INV-911: with its descendants."""
    driver = make(1, None, 4)
    driver.put("a", 1)
    plan = driver.tables.plan_grow((1,))
    assert isinstance(plan, Plan)
    (move,) = driver.tables.apply(plan).moves
    driver.pump()
    driver.end(move, "failed")
    assert not driver.has("a", 0)
    assert driver.lost == []
    assert driver.stats(1).ready == 4


def test_failed_write_of_a_promised_source_tells_the_holder(make: Any) -> None:
    """INV-911: the page is dead; its hold can still be released."""
    driver = make(1, None, 4)
    session = driver.fill("a", 1).suspend()
    plan = driver.tables.plan_grow((1,))
    (move,) = driver.tables.apply(plan).moves
    driver.pump()
    driver.end(move, "failed")
    (page,) = session.pages
    assert driver.lost == [page]
    assert page.state is PageState.DEAD
    assert driver.tables.counters.lost_pages == 1
    session.close()
    assert page.hold_count == 0


def test_failed_write_of_a_taken_back_copy_counts_as_a_required_one(make: Any) -> None:
    """INV-912, INV-514: it had become the required write; the page returns to the host."""
    driver = make(2, 8, 8, write_through=True)
    writes = driver.evict_written_through("a", 2)
    trim(driver, 1)
    assert driver.levels("a", 2) == [2, 2]
    driver.end(writes[0], "failed")
    assert sorted(driver.levels("a", 2), key=str) == [1, 2]
    driver.finish_all()


def test_failed_read_is_a_miss_for_all_at_once(make: Any) -> None:
    """INV-913, INV-526, INV-910: out of the index, the slot not kept, every holder told."""
    driver = make(2, None, 4, keep_disk=True)
    driver.put("a", 2)
    trim(driver, 0)
    driver.finish_all()
    first, second = driver.open("a", 2).start(), driver.open("a", 2).start()
    bad = first.pages[0].move
    driver.end(bad, "failed")
    assert not driver.has("a", 0)
    assert driver.lost == [first.pages[0]]
    assert first.pages[0].state is PageState.DEAD
    assert first.pages[1].state is PageState.ORPHAN  # nobody can reach it any more
    assert driver.tables.match([first.pages[1].key]).block_count == 0
    assert driver.stats(1).copy_failed == 1
    driver.finish_all()
    first.close()
    second.close()
    assert (driver.stats(0).ready, driver.stats(1).ready) == (2, 4)


def test_failed_device_copy_returns_to_a_good_source(make: Any) -> None:
    """INV-329, INV-419: the host slot proved nothing bad."""
    driver = make(2, 4, None)
    driver.put("a", 2)
    trim(driver, 0)
    driver.finish_all()
    session = driver.open("a", 2).start()
    driver.end(session.pages[0].move, "failed")
    assert session.pages[0].level == 1
    driver.finish_all()
    session.resume()
    assert driver.levels("a", 2) == [0, 0]
    session.close()


def test_failed_copy_after_a_verified_read_keeps_the_retained_copy(make: Any) -> None:
    """INV-526 does not apply: the disk slot was read well, the device copy failed."""
    driver = make(2, None, 4, keep_disk=True)
    driver.put("a", 1)
    trim(driver, 0)
    driver.finish_all()
    session = driver.open("a", 1).start()
    move = session.pages[0].move
    driver.tables.move_source_released(move)
    driver.end(move, "failed")
    assert driver.levels("a", 1) == [1]
    session.resume().close()


def test_failure_voids_what_would_have_read_the_target(make: Any) -> None:
    """INV-329, INV-419: a chain of moves of one page falls back as a whole."""
    driver = make(2, 2, 4)
    driver.put("a", 2)
    to_host = trim(driver, 0)
    to_disk = trim(driver, 1)
    assert driver.levels("a", 2) == [2, 2]
    assert {move.source.write for move in to_disk} == set(to_host)
    driver.end(to_host[0], "failed")
    assert driver.levels("a", 2) == [2, 0]
    driver.finish_all()
    assert driver.stats(2).ready == 3
    assert driver.get("a", 2) == 2


def test_a_reserved_copy_that_failed_is_gone_before_it_is_planned(make: Any) -> None:
    """INV-513, INV-516: the page counts as a newcomer and is written."""
    driver = make(2, 8, 8, write_through=True)
    (write,) = driver.evict_written_through("a", 1)
    driver.end(write, "failed")
    plan = driver.tables.plan_trim(1, (8,))
    assert isinstance(plan, Plan)
    assert plan.groups[0].take_backs == []
    assert len(plan.groups[0].evicts) == 1


@pytest.mark.parametrize("how", ["done", "failed", "cancelled"])
def test_late_ends_of_withdrawn_moves_free_their_slots(make: Any, how: str) -> None:
    """INV-118, INV-120, INV-522, INV-524, INV-916: whatever the verdict, the slot is owned till
    the end and free after it.
    """
    driver = make(2, 4, 4)
    driver.put("a", 2)
    moves = trim(driver, 0)
    driver.tables.clear()
    driver.pump()
    assert driver.stats(1).draining == 2
    for move in moves:
        driver.end(move, how)
    assert [driver.stats(level).ready for level in range(3)] == [2, 4, 4]


def test_a_restore_superseded_by_a_commit_lets_its_waiters_go_on(make: Any) -> None:
    """INV-322, INV-326: the bytes just computed serve everybody."""
    driver = make(4, 4, None)
    driver.put("a", 1)
    trim(driver, 0)
    driver.finish_all()
    waiting = driver.open("a", 1).start()
    move = waiting.pages[0].move
    other = driver.open("b", 1)
    other.name = "a"
    other.resume_move = None
    plan = other.plan(1)
    applied = driver.tables.apply(plan)
    other.rows[0].extend(applied.new_pages[0])
    other.commit()
    driver.pump()
    assert driver.resolved == [move]
    page = waiting.pages[0]
    assert (page.level, page.is_ready, other.pages[0]) == (0, True, page)
    waiting.lock()
    driver.end(move, "cancelled")
    waiting.close()
    other.close()
    assert driver.stats(1).ready == 4


def test_every_move_failing_once_never_breaks_a_rule(make: Any) -> None:
    """INV-910, INV-523: fail the n-th move, for every n; check_state after each step."""
    for nth in range(40):
        driver = make(3, 3, 6, keep_host=True, keep_disk=True, write_through=True)
        count = 0
        for turn in range(6):
            for name in ("ab"[turn % 2], "cd"[turn % 2]):
                session = driver.open(name, 3)
                rows_before = session.committed
                plan = session.plan(3 - rows_before)
                if not isinstance(plan, Plan):
                    session.close()
                    continue
                applied = driver.tables.apply(plan)
                for row, new in zip(session.rows, applied.new_pages, strict=True):
                    row.extend(new)
                driver.pump()
                while driver.running:
                    driver.end(driver.running[0], "failed" if count == nth else "done")
                    count += 1
                good = all(page.level == 0 and page.is_ready for page in session.pages)
                if good:
                    session.lock().commit()
                session.close()
        assert driver.tables.background_bytes == 0
        driver.tables.clear()
        driver.pump()
        assert [driver.stats(level).ready for level in range(3)] == [3, 3, 6]
