"""Eviction policies behind one protocol (INV-409, INV-414, INV-420)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.eviction.base import EvictionPolicy
from kvstore.core.eviction.lru import LruPolicy
from kvstore.core.eviction.s3fifo import S3FifoPolicy
from kvstore.core.spec import GroupSpec

S3 = (GroupSpec(name="full", eviction_policy="s3fifo"),)


def names(driver: Any, count: int, held_limit: int = 100) -> list[tuple[str, int]]:
    """Return (name, block) of the next victims on the device."""
    policy: EvictionPolicy = driver.tables.pools[0][0].policy
    found = []
    for slot in policy.select(count, held_limit=held_limit).victims:
        text = slot.page.key.rstrip(b"\0").decode()
        name, block = text.split(":")
        found.append((name, int(block)))
    return found


def test_lowest_priority_goes_first_then_the_least_recently_used(make: Any) -> None:
    """INV-409: the default policy."""
    driver = make(8, None, None)
    driver.put("high", 1, priority=80)
    driver.put("old", 1, priority=35)
    driver.put("low", 1, priority=5)
    driver.put("new", 1, priority=35)
    driver.get("old", 1)
    assert names(driver, 4) == [("low", 0), ("new", 0), ("old", 0), ("high", 0)]


def test_held_pages_pass_in_their_turn_while_there_is_room_below(make: Any) -> None:
    """INV-414: age decides, but only as many held ones as fit below."""
    driver = make(8, None, None)
    first = driver.fill("h1", 1).suspend()
    driver.put("d1", 1)
    second = driver.fill("h2", 1).suspend()
    driver.put("d2", 1)
    assert names(driver, 4) == [("h1", 0), ("d1", 0), ("h2", 0), ("d2", 0)]
    assert names(driver, 4, held_limit=1) == [("h1", 0), ("d1", 0), ("d2", 0)]
    assert names(driver, 4, held_limit=0) == [("d1", 0), ("d2", 0)]
    first.close()
    second.close()


@pytest.mark.parametrize("policy", [LruPolicy(), S3FifoPolicy(8)])
def test_selecting_from_nothing_gives_nothing(policy: EvictionPolicy) -> None:
    """INV-401: and changes nothing."""
    assert policy.select(3, held_limit=3).victims == []
    assert (policy.held_count, policy.droppable_count) == (0, 0)
    assert policy.newest_first() == []


def test_scan_passes_through_the_small_queue(make: Any) -> None:
    """INV-409: pages used once do not push out pages used again."""
    driver = make(10, None, None, groups=S3)
    driver.put("hot", 2)
    driver.get("hot", 2)
    for index in range(20):
        driver.put(f"scan{index}", 2)
    assert [driver.has("hot", block) for block in range(2)] == [True, True]
    lru = make(10, None, None)
    lru.put("hot", 2)
    lru.get("hot", 2)
    for index in range(20):
        lru.put(f"scan{index}", 2)
    assert not lru.has("hot", 0)


def test_scan_resistant_victims_take_their_descendants_first(make: Any) -> None:
    """INV-324, INV-325: leaves go before what they depend on, whatever their queue."""
    driver = make(8, None, None, groups=S3)
    driver.put("a", 2)
    driver.get("a", 2)  # in main
    driver.put("a", 4)  # two fresh leaves, in small
    order = names(driver, 4)
    for parent in range(3):
        for child in range(parent + 1, 4):
            if ("a", parent) in order:
                assert order.index(("a", child)) < order.index(("a", parent))


def test_a_page_with_uses_left_gets_another_round_only_when_the_plan_is_applied(
    make: Any,
) -> None:
    """INV-401, INV-403: the selection is pure, the rotation part of applying."""
    driver = make(4, None, None, groups=S3)
    for name in "ab":
        driver.put(name, 2)
        driver.get(name, 2)
    policy = driver.tables.pools[0][0].policy
    before = [(slot.slot_id, slot.stamp) for slot in policy._main]
    first = policy.select(1, held_limit=0)
    assert [(slot.slot_id, slot.stamp) for slot in policy._main] == before
    assert policy.select(1, held_limit=0) == first
    assert first.passed_over
    policy.commit(first)
    assert [(slot.slot_id, slot.stamp) for slot in policy._main] != before


def test_held_pages_go_last_under_the_scan_resistant_policy(make: Any) -> None:
    """INV-409, INV-414: they are promised to somebody."""
    driver = make(8, None, None, groups=S3)
    session = driver.fill("h", 1).suspend()
    driver.put("d", 1)
    assert names(driver, 2) == [("d", 0), ("h", 0)]
    assert names(driver, 2, held_limit=0) == [("d", 0)]
    session.close()


def test_the_whole_store_works_under_the_scan_resistant_policy(make: Any) -> None:
    """INV-409: every rule of the tables holds with either policy."""
    driver = make(4, 4, 8, groups=S3, keep_host=True, keep_disk=True, write_through=True)
    for turn in range(30):
        driver.put("abcde"[turn * 7 % 5], 3)
        driver.get("abcde"[turn * 3 % 5], 3)
    driver.tables.clear()
    driver.pump()
    assert [driver.stats(level).ready for level in range(3)] == [4, 4, 8]


def test_recovered_pages_leave_first_under_the_scan_resistant_policy(
    make: Any, block_key: Any
) -> None:
    """INV-921, INV-409: nobody has used them in this life."""
    driver = make(2, None, 4, groups=S3)
    driver.put("a", 2)
    driver.tables.apply(driver.tables.plan_trim(0, (2,)))
    driver.pump()
    driver.finish_all()
    free = next(slot for slot in range(4) if driver.tables.pools[1][0].handles[slot] is None)
    driver.tables.recover(0, free, block_key("r", 0), block_key("r", -1), 0, 1)
    driver.pump()
    plan = driver.tables.plan_trim(1, (2,))
    assert [page.key for page in plan.groups[0].drops] == [block_key("r", 0)]
