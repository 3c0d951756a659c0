"""The upstream tests of the specification, mirrored at the level of the tables.

Names follow upstream; what needs real bytes, sessions or a device is mirrored by the tests of the
store. The simulated executor of `tests/property/table_model.py` adds the data check.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.core.page import MoveKind
from kvstore.core.planner import Plan, Refusal
from kvstore.errors import LogicError


def drain_level(driver: Any, level: int) -> None:
    plan = driver.tables.plan_trim(level, (driver.tables.pools[level][0].total,))
    assert isinstance(plan, Plan)
    driver.tables.apply(plan)
    driver.pump()
    driver.finish_all()


def balance(driver: Any, level: int) -> None:
    stats = driver.stats(level)
    ended = stats.reused + stats.reclaimed + stats.died + stats.copy_failed
    ended += stats.released_by_resize + stats.released_by_close
    assert stats.kept + stats.written_through == ended + stats.copies


def test_keep_copy_without_write_through(make: Any) -> None:
    """INV-502, INV-503, INV-614, INV-805: filling makes none, restores do, evictions use them."""
    driver = make(4, None, 16, keep_disk=True)
    for name in "abc":
        driver.put(name, 4)
    assert driver.stats(1).copies == 0
    driver.get("a", 4)
    assert driver.stats(1).copies == 4
    writes = driver.writes(1)
    driver.get("b", 4)  # a goes down again, into its copies
    assert driver.writes(1) == writes
    assert driver.stats(1).reused == 4
    balance(driver, 1)


def test_write_through_without_keep_copy(make: Any) -> None:
    """INV-611, INV-614: write-through alone spares the required write."""
    driver = make(4, 16, 16, write_through=True)
    driver.put("a", 4)
    driver.put("b", 4)
    assert driver.stats(2).written_through == 4
    required = [m for m in driver.started if m.target.level == 2 and m.kind is MoveKind.EVICT]
    drain_level(driver, 1)
    again = [m for m in driver.started if m.target.level == 2 and m.kind is MoveKind.EVICT]
    assert again == required == []
    balance(driver, 2)


def test_retained_disk_copies_are_reused_and_reclaimed(make: Any) -> None:
    """INV-502, INV-503, INV-520, INV-805: they survive growth and go with a shrink."""
    driver = make(4, None, 8, keep_disk=True)
    driver.put("a", 4)
    drain_level(driver, 0)
    driver.get("a", 4)
    driver.tables.apply(driver.tables.plan_resize(1, (12,)))
    driver.pump()
    assert driver.stats(1).copies == 4
    drain_level(driver, 0)
    assert driver.stats(1).reused == 4
    driver.get("a", 4)
    driver.tables.apply(driver.tables.plan_resize(1, (6,)))
    driver.pump()
    stats = driver.stats(1)
    assert (stats.copies, stats.released_by_resize) == (0, 4)
    balance(driver, 1)


def test_write_through_uses_only_free_disk_slots(make: Any) -> None:
    """INV-603, INV-605, INV-617: on a full disk no more copies than free slots."""
    driver = make(4, 16, 2, write_through=True)
    driver.put("a", 4)
    driver.put("b", 4)
    assert driver.stats(2).copies == 2
    assert driver.stats(2).reclaimed == 0


def test_full_disk_evicts_lru_pages_before_retained_copies(make: Any) -> None:
    """INV-504, INV-505: no copy goes while a disk page can."""
    driver = make(4, None, 8, keep_disk=True)
    driver.put("a", 4)
    drain_level(driver, 0)
    driver.put("b", 4)
    drain_level(driver, 0)
    driver.get("a", 4)  # 4 copies, 4 disk pages
    driver.put("c", 4)
    drain_level(driver, 0)
    assert driver.stats(1).reclaimed == 0
    assert not driver.has("b", 0)
    assert driver.levels("c", 4) == [1] * 4


def test_held_pages_take_kept_copy_slots_on_a_full_disk(make: Any) -> None:
    """INV-517, INV-518: a promise to a session outranks a saved write."""
    driver = make(4, None, 2, keep_disk=True)
    driver.put("a", 2)
    drain_level(driver, 0)
    driver.get("a", 2)
    session = driver.fill("h", 2).suspend()
    driver.open("x", 4).resume(4).close()
    assert driver.levels("h", 2) == [1, 1]
    assert not driver.has("a", 0)
    balance(driver, 1)
    session.close()


def test_partial_tail_decoded_after_restore_reads_back_correctly(make: Any) -> None:
    """INV-313, INV-314: the colder slot goes at the restore, whatever the options say."""
    driver = make(2, 4, 4, keep_host=True, keep_disk=True, write_through=True)
    session = driver.open("a", 1).resume(1).suspend()
    page = session.pages[0]
    for _ in range(2):
        drain_level(driver, 0)
        assert len(page.slots) == 1
        drain_level(driver, 1)
        assert [slot.level for slot in page.slots] == [2]
        session.resume()
        assert [slot.level for slot in page.slots] == [0]
        session.suspend()
    written = [move.target.level for move in driver.started if move.page is page]
    assert written == [1, 2, 0, 1, 2, 0]
    session.close()


def test_failed_write_through_copy_is_not_reused(make: Any) -> None:
    """INV-516, INV-612: the page is written again."""
    driver = make(2, 8, 8, write_through=True)
    driver.put("a", 2)
    plan = driver.tables.plan_trim(0, (2,))
    driver.tables.apply(plan)
    driver.pump()
    driver.finish_all(MoveKind.EVICT)
    for move in list(driver.running):
        driver.end(move, "failed")
    before = driver.writes(2)
    drain_level(driver, 1)
    assert driver.writes(2) == before + 2
    assert driver.stats(2).reused == 0


@pytest.mark.parametrize("fraction", ["0", "0.25", "1"])
def test_fractions(make: Any, fraction: str) -> None:
    """INV-506 to INV-509, INV-605, INV-506: reclaim order and write-through follow the share."""
    driver = make(8, 32, 8, write_through=True, share_disk=fraction)
    driver.put("a", 8)
    plan = driver.tables.plan_grow((8,))
    assert isinstance(plan, Plan)
    assert len(plan.groups[0].writes) == int(float(fraction) * 8)


def test_cache_reuse(make: Any) -> None:
    """INV-309, INV-319, INV-324: 1, 2 and 4 requests through host and disk; all droppable after."""
    for count in (1, 2, 4):
        driver = make(8, 8, 32)
        driver.put("shared", 3)
        for level in (0, 1):
            drain_level(driver, level)
        sessions = [driver.open("shared", 5) for _ in range(count)]
        assert [session.committed for session in sessions] == [3] * count
        for session in sessions:
            session.start()
        driver.finish_all()
        reads = [move for move in driver.started if move.kind is MoveKind.RESTORE]
        assert len(reads) == 3
        for session in sessions:
            session.lock().close()
        assert driver.stats(0).evictable == driver.stats(0).primaries == 3


def test_sol_mem_utilization(make: Any) -> None:
    """INV-404, INV-412, INV-417: a suspended request needs no device slot; one more is refused."""
    driver = make(4, 4, None)
    first = driver.fill("a", 4).suspend()
    second = driver.fill("b", 4)
    assert driver.stats(0).primaries == 4
    refusal = driver.tables.plan_grow((1,))
    assert isinstance(refusal, Refusal)
    assert (refusal.needed, refusal.available) == (1, 0)
    first.close()
    second.close()


def test_resize_quota(make: Any) -> None:
    """INV-408, INV-902, INV-906: all tiers full, shrink, one resumes, grow, prefetch from disk."""
    driver = make(4, 4, 4)
    sessions = [driver.fill(name, 4).suspend() for name in "abc"]
    assert isinstance(driver.tables.plan_resize(2, (3,)), Refusal)
    sessions[0].close()
    shrunk = driver.tables.plan_resize(1, (2,))
    assert isinstance(shrunk, Plan)
    driver.tables.apply(shrunk)
    driver.pump()
    driver.finish_all()
    sessions[1].resume().suspend()
    driver.tables.apply(driver.tables.plan_resize(1, (6,)))
    on_disk = [page for page in sessions[2].pages if page.level == 2]
    assert on_disk
    plan = driver.tables.plan_prefetch(sessions[2].rows)
    assert isinstance(plan, Plan)
    applied = driver.tables.apply(plan)
    driver.pump()
    fetched = [move.page for move in applied.moves if move.kind is MoveKind.PREFETCH]
    assert fetched == on_disk
    driver.finish_all()
    for session in sessions[1:]:
        session.close()


def test_living_kv_cache_guard(make: Any) -> None:
    """INV-907: clear is refused while requests live; nothing changes."""
    driver = make()
    session = driver.fill("a", 2)
    before = driver.tables.snapshot()
    with pytest.raises(LogicError):
        driver.tables.clear()
    assert driver.tables.snapshot() == before
    session.close()


def test_inflight_batching(make: Any) -> None:
    """INV-301, INV-302, INV-303, INV-403: random turns of several requests, always checked."""
    generator = random.Random(11)
    driver = make(6, 6, 12, keep_disk=True, keep_host=True, write_through=True)
    open_sessions: list[Any] = []
    for turn in range(150):
        if len(open_sessions) < 3:
            open_sessions.append(driver.open(generator.choice("abcdef"), 3))
        session = generator.choice(open_sessions)
        plan = session.plan(3 - len(session.rows[0]))
        if isinstance(plan, Plan) and not any(page.lock_count for page in session.pages):
            session.resume(3 - len(session.rows[0])).commit().suspend()
            driver.tables.fence_passed(driver.tables.rotate_step_fence())
            driver.pump()
        if generator.random() < 0.4:
            open_sessions.remove(session)
            session.close()
        assert turn >= 0
    for session in open_sessions:
        session.close()


def test_slot_allocator_shrink(make: Any) -> None:
    """INV-902, INV-903, INV-904: a normal shrink, and one of a hardly used pool."""
    driver = make(2, 8, None)
    for name in "abcd":
        driver.put(name, 2)
    driver.tables.apply(driver.tables.plan_resize(1, (4,)))
    driver.pump()
    driver.finish_all()
    assert (driver.stats(1).total, driver.stats(1).primaries) == (4, 4)
    assert driver.shrunk == [(1, 0)]
    empty = make(2, 64, None)
    empty.put("a", 1)
    empty.tables.apply(empty.tables.plan_resize(1, (1,)))
    empty.pump()
    assert empty.shrunk == [(1, 0)]


def test_retention_and_cached_tokens_by_tier(make: Any, block_key: Any) -> None:
    """INV-309, INV-409, INV-802, INV-812: retention order, tokens per tier, level statistics."""
    driver = make(3, 3, 6)
    driver.put("keep", 3, priority=90)
    for name in "xyz":
        driver.put(name, 2, priority=10)
    assert driver.levels("keep", 3).count(0) >= 1
    keys = [block_key("keep", block) for block in range(3)]
    by_level = driver.tables.match(keys).blocks_by_level()
    assert sum(by_level.values()) == 3
    assert sum(driver.stats(level).evictable for level in range(3)) == driver.tables.page_count
