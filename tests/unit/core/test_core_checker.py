"""`check_state` notices broken tables: a check that cannot fail covers nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.invariants import check_state
from kvstore.core.page import PageState
from kvstore.core.slots import SlotState
from kvstore.errors import InvariantError


def setup(make: Any) -> Any:
    """Return a store with a bit of everything: holds, locks, copies, moves in flight."""
    driver = make(5, 8, 8, keep_host=True, keep_disk=True, write_through=True)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (5,)))
    driver.pump()
    driver.finish_all()
    driver.get("a", 2)
    driver.locked = driver.fill("l", 1)
    driver.held = driver.fill("h", 1).suspend()
    driver.get("a", 2)
    driver.put("b", 1)
    driver.tables.apply(driver.tables.plan_trim(0, (1,)))
    driver.pump()
    assert driver.tables.moves
    assert len(driver.page("a", 0).slots) > 1
    check_state(driver.tables)
    return driver


def lose_slot(driver: Any) -> None:
    driver.tables.pools[2][0].ready_count -= 1


def two_owners(driver: Any) -> None:
    driver.page("l", 0).primary = driver.page("h", 0).primary


def old_generation(driver: Any) -> None:
    driver.page("l", 0).primary.generation -= 1


def negative_hold(driver: Any) -> None:
    driver.page("l", 0).hold_count = -1


def locked_and_queued(driver: Any) -> None:
    driver.page("h", 0).lock_count += 1


def held_in_the_wrong_queue(driver: Any) -> None:
    driver.page("h", 0).hold_count = 0


def copy_counter(driver: Any) -> None:
    driver.tables.pools[1][0].kept += 1


def pending_without_a_move(driver: Any) -> None:
    driver.page("l", 0).primary.state = SlotState.WRITING


def dead_page_with_a_slot(driver: Any) -> None:
    driver.page("l", 0).state = PageState.DEAD


def vanished_from_the_index(driver: Any) -> None:
    driver.tables.index.remove(driver.page("h", 0))


def mutable_page_with_a_copy(driver: Any) -> None:
    driver.page("a", 0).state = PageState.FILLING


def child_above_its_parent(driver: Any) -> None:
    driver.page("a", 1).priority = 99


def unknown_child(driver: Any) -> None:
    driver.page("a", 0).children = None


def charged_twice(driver: Any) -> None:
    driver.tables.background_bytes += 1


def bounce_page_lost(driver: Any) -> None:
    driver.tables.bounce_free[0] -= 1


def skip_without_reason(driver: Any) -> None:
    driver.tables.counters.write_through_skipped += 1


def early_start(driver: Any) -> None:
    move = next(iter(driver.tables.moves))
    move.waits = [driver.tables.new_fence()]


def forgotten_page(driver: Any) -> None:
    driver.tables.page_count += 1


def source_forgotten(driver: Any) -> None:
    move = next(iter(driver.tables.moves))
    move.source_fence.passed = True


BREAKS: list[tuple[str, Callable[[Any], None]]] = [
    ("INV-804", lose_slot),
    ("INV-301|INV-302|INV-304", two_owners),
    ("INV-304", old_generation),
    ("INV-311", negative_hold),
    ("INV-312|INV-309", locked_and_queued),
    ("INV-312", held_in_the_wrong_queue),
    ("INV-805", copy_counter),
    ("INV-303", pending_without_a_move),
    ("INV-519", dead_page_with_a_slot),
    ("INV-319|INV-322", vanished_from_the_index),
    ("INV-313|INV-310|INV-319", mutable_page_with_a_copy),
    ("INV-324", child_above_its_parent),
    ("INV-325", unknown_child),
    ("INV-112", charged_twice),
    ("INV-407", bounce_page_lost),
    ("INV-615", skip_without_reason),
    ("INV-418", early_start),
    ("INV-301", forgotten_page),
    ("INV-329|INV-306|INV-522", source_forgotten),
]


@pytest.mark.parametrize(("rule", "damage"), BREAKS, ids=[damage.__name__ for _, damage in BREAKS])
def test_damage_is_found(make: Any, rule: str, damage: Callable[[Any], None]) -> None:
    """INV-301 to INV-330, INV-407, INV-804, INV-805: each named rule is really looked at."""
    driver = setup(make)
    damage(driver)
    with pytest.raises(InvariantError, match=rule):
        check_state(driver.tables)
