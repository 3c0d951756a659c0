"""Write-through (INV-601 to INV-617) and admission (INV-409)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import IoClass, Tier
from kvstore.core.page import MoveKind, MoveState
from kvstore.core.planner import Plan
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec


def through(driver: Any) -> list[Any]:
    """Return the write-through moves made so far, ended ones excluded."""
    return [move for move in driver.tables.moves if move.kind is MoveKind.WRITE_THROUGH]


def test_the_write_follows_a_verified_host_slot(make: Any) -> None:
    """INV-601, INV-607, INV-609: it waits for the copy, and reads the host slot meanwhile."""
    driver = make(2, 8, 8, write_through=True)
    driver.put("a", 2)
    plan = driver.tables.plan_grow((2,))
    assert isinstance(plan, Plan)
    driver.tables.apply(plan)
    driver.pump()
    writes = through(driver)
    assert len(writes) == 2
    assert {move.state for move in writes} == {MoveState.PLANNED}
    assert {move.io_class for move in writes} == {IoClass.BACKGROUND}
    driver.finish_all(MoveKind.EVICT)
    assert {move.state for move in writes} == {MoveState.STARTED}
    for move in writes:
        assert move.source.level == 1
        assert move.source_fence in move.source.outstanding()
    driver.finish_all()
    assert driver.slots_of("a", 0) == [1, 2]


def test_only_full_committed_pages_without_a_disk_slot(make: Any) -> None:
    """INV-602, INV-313: no tail, no second copy, pending ones included."""
    driver = make(2, 8, 8, write_through=True)
    session = driver.open("t", 1).resume(1).suspend()
    driver.put("a", 1)
    driver.put("b", 2)
    assert driver.tables.counters.write_through_candidates == 1
    driver.get("a", 1)
    driver.put("c", 2)
    assert driver.stats(2).written_through == driver.tables.counters.write_through_issued
    pages = [move.page for move in driver.started if move.kind is MoveKind.WRITE_THROUGH]
    assert len(pages) == len(set(pages))
    session.close()


def test_it_uses_ready_slots_only_and_comes_last(make: Any) -> None:
    """INV-603, INV-604, INV-617: a full disk behaves as if the option were off."""
    found = []
    for option in (False, True):
        driver = make(2, 4, 2, write_through=option)
        for name in "abcd":
            driver.put(name, 2)
        found.append([driver.levels(name, 2) for name in "abcd"])
    assert found[0] == found[1]
    assert driver.tables.counters.write_through_skipped_by["no_free_slot"] > 0


@pytest.mark.parametrize(
    ("disk", "share", "cap", "host", "issued", "reason"),
    [
        (8, "1.0", 100, 16, 4, None),
        (3, "1.0", 100, 16, 3, "no_free_slot"),
        (8, "0.25", 100, 16, 2, "share"),
        (8, "1.0", 3, 16, 3, "cap"),
        (8, "1.0", 100, 8, 2, "cap"),  # a quarter of the host slots
        (2, "0.5", 0, 16, 0, "cap"),
    ],
)
def test_the_formula(
    make: Any, disk: int, share: str, cap: int, host: int, issued: int, reason: str | None
) -> None:
    """INV-605, INV-615: the minimum of five, and the first reason that binds."""
    driver = make(4, host, disk, write_through=True, share_disk=share, background_bytes_max=cap)
    driver.put("a", 4)
    plan = driver.tables.plan_grow((4,))
    assert isinstance(plan, Plan)
    assert len(plan.groups[0].writes) == issued
    driver.tables.apply(plan)
    counters = driver.tables.counters
    assert counters.write_through_candidates == 4
    assert counters.write_through_skipped == 4 - issued
    if reason is not None:
        assert counters.write_through_skipped_by[reason] > 0


def test_candidates_go_in_eviction_order(make: Any) -> None:
    """INV-606: what is evicted first is likely to leave the host first."""
    driver = make(4, 16, 2, write_through=True)
    driver.put("a", 4)
    plan = driver.tables.plan_grow((4,))
    assert [page.block_index for page in plan.groups[0].writes] == [3, 2]


def test_the_cap_is_charged_and_repaid(make: Any) -> None:
    """INV-111, INV-112: an idle store shows zero, whatever the verdicts were."""
    driver = make(2, 16, 8, write_through=True)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_grow((2,)))
    driver.pump()
    assert driver.tables.background_bytes == 2
    driver.finish_all(MoveKind.EVICT)
    writes = [move for move in driver.running if move.kind is MoveKind.WRITE_THROUGH]
    driver.end(writes[0], "failed")
    driver.end(writes[1])
    assert driver.tables.background_bytes == 0


def test_a_recall_does_not_wait_for_the_write(make: Any) -> None:
    """INV-608: the write is on the disk slot; the page is ready at once."""
    driver = make(2, 8, 8, write_through=True)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    driver.finish_all(MoveKind.EVICT)
    session = driver.open("a", 2).start()
    restores = [move for move in driver.running if move.kind is MoveKind.RESTORE]
    assert len(restores) == 2
    driver.finish_all(MoveKind.RESTORE)
    assert all(page.is_ready for page in session.pages)
    driver.finish_all()
    session.lock().close()


def test_releasing_the_host_slot_promotes_the_write(make: Any) -> None:
    """INV-109, INV-110, INV-610: once; a second promotion changes nothing."""
    driver = make(2, 8, 8, write_through=True)
    writes = driver.evict_written_through("a", 2)
    session = driver.open("a", 2).start()
    assert set(driver.promoted) == set(writes)
    driver.tables.promote(writes[0])
    driver.pump()
    assert len(driver.promoted) == 2
    assert {move.io_class for move in writes} == {IoClass.REQUIRED}
    driver.finish_all()
    session.lock().close()


def test_a_later_eviction_writes_nothing(make: Any) -> None:
    """INV-611: the copy is taken back."""
    driver = make(2, 4, 8, write_through=True)
    driver.put("a", 1)
    driver.put("b", 2)
    assert driver.slots_of("a", 0) == [1, 2]
    before = driver.writes(2)
    driver.tables.apply(driver.tables.plan_trim(1, (4,)))
    driver.pump()
    assert driver.slots_of("a", 0) == [2]
    assert driver.writes(2) == before


def test_a_pending_copy_is_taken_back_and_promoted(make: Any) -> None:
    """INV-514, INV-806: no second write; reused_pending counts inside reused."""
    driver = make(2, 8, 8, write_through=True)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    driver.finish_all(MoveKind.EVICT)
    before = driver.writes(2)
    driver.tables.apply(driver.tables.plan_trim(1, (8,)))
    driver.pump()
    stats = driver.stats(2)
    assert (stats.reused, stats.reused_pending) == (2, 2)
    assert len(driver.promoted) == 2
    assert driver.writes(2) == before
    assert driver.levels("a", 2) == [2, 2]
    assert not driver.page("a", 0).is_ready
    driver.finish_all()
    assert driver.page("a", 0).is_ready


def test_a_dying_pending_copy_is_withdrawn_not_promoted(make: Any) -> None:
    """INV-515, INV-610: nobody wants the data any more."""
    driver = make(2, 8, 8, write_through=True)
    writes = driver.evict_written_through("a", 2)
    driver.tables.clear()
    driver.pump()
    assert driver.promoted == []
    assert set(driver.cancelled) == set(writes)
    assert driver.stats(2).draining == 2
    for move in writes:
        driver.end(move, "cancelled")
    assert (driver.stats(2).ready, driver.stats(1).ready) == (8, 8)


def test_a_failed_copy_never_fails_its_eviction(make: Any) -> None:
    """INV-516, INV-612: the slots are given back; the page is written as usual later."""
    driver = make(2, 8, 8, write_through=True)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    driver.finish_all(MoveKind.EVICT)
    for move in list(driver.running):
        driver.end(move, "failed")
    assert driver.levels("a", 2) == [1, 1]
    assert driver.slots_of("a", 0) == [1]
    stats = driver.stats(2)
    assert (stats.copy_failed, stats.ready) == (2, 8)
    before = driver.writes(2)
    driver.tables.apply(driver.tables.plan_trim(1, (8,)))
    driver.pump()
    driver.finish_all()
    assert driver.writes(2) == before + 2


def test_it_needs_a_host_tier_directly_above_the_disk() -> None:
    """INV-613: otherwise it is off."""
    one = (GroupSpec(name="full"),)
    device, host, disk = (
        LevelSpec(tier=tier, slot_counts=(2,)) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
    )
    make = lambda *levels: TablesSpec(  # noqa: E731
        groups=one, levels=levels, block_tokens=4, write_through=True
    )
    assert make(device, host, disk).is_write_through
    assert not make(device, disk).is_write_through
    assert not make(device, host).is_write_through


def test_taking_back_a_shadow_triggers_it_too(make: Any) -> None:
    """INV-616: the host slot is equally valid."""
    driver = make(2, 8, 8, write_through=True, keep_host=True)
    driver.tables.engine_room_bytes = 0
    driver.put("a", 2)
    driver.put("b", 2)
    driver.get("a", 2)
    assert driver.slots_of("a", 0) == [0, 1]
    driver.tables.engine_room_bytes = None
    plan = driver.tables.plan_trim(0, (2,))
    assert isinstance(plan, Plan)
    assert len(plan.groups[0].take_backs) == 2
    assert len(plan.groups[0].writes) == 2


def test_a_shared_engine_limits_the_cap(make: Any) -> None:
    """INV-111, INV-123: the room of the engine counts, planned bytes taken off."""
    driver = make(4, 16, 8, write_through=True)
    driver.tables.engine_room_bytes = 3
    driver.put("a", 4)
    plan = driver.tables.plan_grow((4,))
    assert len(plan.groups[0].writes) == 3
    driver.tables.apply(plan)
    assert driver.tables.unissued_background_bytes() == 3


def test_selective_admission_drops_single_use_pages_instead_of_writing_them(make: Any) -> None:
    """INV-409: below n uses a droppable page is dropped; used again it is written."""
    driver = make(2, None, 8, selective_uses=2)
    driver.put("a", 2)
    driver.put("b", 2)
    assert not driver.has("a", 0)
    assert driver.writes(1) == 0
    assert driver.tables.counters.write_through_skipped_by["admission"] == 2
    driver.put("a", 2)  # the table remembers the first use
    driver.put("c", 2)
    assert driver.levels("a", 2) == [1, 1]
    assert driver.writes(1) == 2


def test_selective_admission_always_writes_held_pages(make: Any) -> None:
    """INV-409: a promise is not subject to admission; write-through is."""
    driver = make(2, None, 8, selective_uses=3)
    session = driver.fill("a", 2).suspend()
    driver.put("b", 2)
    assert driver.levels("a", 2) == [1, 1]
    session.close()
    through_driver = make(2, 8, 8, selective_uses=2, write_through=True)
    through_driver.put("a", 2)
    through_driver.put("b", 2)
    assert through_driver.levels("a", 2) == [1, 1]
    assert through_driver.stats(2).written_through == 0
    assert through_driver.tables.counters.write_through_skipped_by["admission"] == 2


def test_use_counts_are_bounded(make: Any) -> None:
    """INV-409: they outlive pages, in a table with an end."""
    driver = make(2, None, 2, selective_uses=2)
    for index in range(60):
        driver.put(f"n{index}", 2)
    assert len(driver.tables._past_uses) <= driver.tables._past_uses_max == 16
