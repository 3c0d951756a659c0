"""Prefix index, commit and windows (INV-319 to INV-325, INV-337, INV-812)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.page import PageState
from kvstore.core.planner import Plan
from kvstore.core.spec import GroupSpec

WINDOW = (GroupSpec(name="full"), GroupSpec(name="window", window=8, sinks=4))


def test_match_is_the_longest_run_of_full_blocks(make: Any, block_key: Any) -> None:
    """INV-319, INV-320: a gap ends it."""
    driver = make(8, None, None)
    driver.put("a", 4)
    keys = [block_key("a", block) for block in range(4)]
    assert driver.tables.match(keys).block_count == 4
    assert driver.tables.match([*keys[:2], block_key("x", 9), keys[3]]).block_count == 2
    assert driver.tables.match([block_key("x", 0)]).block_count == 0
    assert driver.tables.match([]).block_count == 0


def test_match_takes_nothing_and_moves_nothing(make: Any, block_key: Any) -> None:
    """INV-321: the holds are taken by hold, and nothing is copied."""
    driver = make(2, 2, None)
    driver.put("a", 2)
    driver.put("b", 2)
    version = driver.tables.version
    match = driver.tables.match([block_key("a", 0), block_key("a", 1)])
    assert driver.tables.version == version
    assert [page.hold_count for page in match.pages[0]] == [0, 0]
    driver.tables.hold(match.pages[0])
    assert [page.hold_count for page in match.pages[0]] == [1, 1]
    assert driver.levels("a", 2) == [1, 1]
    driver.tables.unhold(match.pages[0])


def test_levels_of_a_match_add_up(make: Any, block_key: Any) -> None:
    """INV-812: each block counts once, for the level that serves it."""
    driver = make(4, 2, 8)
    driver.put("a", 4)
    driver.put("b", 3)
    match = driver.tables.match([block_key("a", block) for block in range(4)])
    by_level = match.blocks_by_level()
    assert sum(by_level.values()) == match.block_count == 4
    assert by_level == {0: 1, 1: 2, 2: 1}


def test_commit_of_a_known_key_uses_the_page_that_is_there(make: Any, block_key: Any) -> None:
    """INV-322: the session's own slot is freed; holds and locks move over."""
    driver = make(4, None, None)
    first = driver.fill("a", 1)
    second = driver.open("b", 1).resume(1)
    second.name = "a"
    own = second.pages[0]
    second.commit()
    assert second.pages[0] is first.pages[0]
    assert own.state is PageState.DEAD
    page = first.pages[0]
    assert (page.hold_count, page.lock_count) == (2, 2)
    fence = driver.tables.rotate_step_fence()
    driver.tables.fence_passed(fence)
    assert driver.stats(0).ready == 3
    first.close()
    assert page.status == "locked"
    second.close()
    assert page.status == "droppable"
    assert driver.tables.match([block_key("a", 0)]).block_count == 1


@pytest.mark.parametrize("where", ["host", "disk"])
def test_commit_of_a_known_key_elsewhere_makes_the_new_slot_the_primary(
    make: Any, where: str
) -> None:
    """INV-322: no restore for data just computed; the colder slots are released."""
    driver = make(4, 4, 4)
    driver.put("a", 1)
    for level in range(1 if where == "host" else 2):
        driver.tables.apply(driver.tables.plan_trim(level, (4,)))
        driver.pump()
        driver.finish_all()
    page = driver.page("a", 0)
    session = driver.open("b", 1).resume(1)
    session.name = "a"
    session.commit()
    assert session.pages == [page]
    assert driver.slots_of("a", 0) == [0]
    assert (driver.stats(1).ready, driver.stats(2).ready) == (4, 4)
    session.close()


def test_blocks_are_released_from_the_tail(make: Any) -> None:
    """INV-324: the leaf is evicted first, the root last."""
    driver = make(4, 8, None)
    driver.put("a", 4)
    for kept in (3, 2, 1):
        driver.put(f"x{kept}", 1)
        assert [level for level in driver.levels("a", 4) if level == 0] == [0] * kept
        assert driver.levels("a", 4)[:kept] == [0] * kept
        driver.tables.clear()
        driver.put("a", 4)
        for index in range(4 - kept):
            driver.put(f"y{kept}{index}", 1)


def test_a_shared_parent_is_as_recent_as_its_newest_child(make: Any) -> None:
    """INV-324: using one branch keeps the trunk."""
    driver = make(4, 8, None)
    driver.put("a", 3)
    driver.put("b", 1)
    driver.get("a", 1)
    driver.put("c", 2)
    assert driver.levels("a", 3) == [0, 1, 1]


def test_a_child_of_high_priority_lifts_its_ancestors(make: Any, block_key: Any) -> None:
    """INV-324, INV-409: otherwise the trunk would go before the leaf."""
    driver = make(3, 8, None)
    driver.put("a", 1, priority=10)
    session = driver.fill("a", 2, priority=90)
    session.close()
    driver.put("b", 1, priority=50)
    driver.put("c", 1, priority=50)
    assert driver.levels("a", 2) == [0, 0]
    assert driver.page("a", 0).priority == 90


def test_death_takes_the_descendants_out_of_the_index(make: Any) -> None:
    """INV-325: droppable ones die, held ones become unreachable for others."""
    driver = make(4, None, None)
    driver.put("a", 4)
    session = driver.open("a", 4)
    inner = driver.open("a", 2)
    driver.tables.unhold(session.rows[0][2:])
    driver.tables.lose(driver.page("a", 1))
    driver.pump()
    assert driver.lost == [inner.pages[1]]
    assert driver.has("a", 0)
    assert not driver.has("a", 2)
    assert not driver.has("a", 3)
    driver.tables.unhold(session.rows[0][:2])
    inner.close()


def test_children_of_an_orphan_are_not_indexed(make: Any, block_key: Any) -> None:
    """INV-325: a block below a lost one can never be matched."""
    driver = make(4, None, None)
    session = driver.fill("a", 1)
    orphan = session.pages[0]
    driver.put("p", 1)
    grown = driver.tables.apply(driver.tables.plan_grow((1,))).new_pages[0][0]
    driver.tables._make_orphan(orphan)
    child = driver.tables.commit(grown, block_key("a", 1), orphan, 1)
    assert child.state is PageState.ORPHAN
    driver.tables.unlock([child])
    driver.tables.unhold([child])
    assert child.state is PageState.DEAD
    session.close()


# -- windows -----------------------------------------------------------------------------------


def release_outside(driver: Any, session: Any) -> None:
    """Do what a session does after a commit: let go of what left the window."""
    spec = WINDOW[1]
    for block, page in enumerate(session.rows[1]):
        if page is not None and not spec.needs_block(block, session.committed, 4):
            session.rows[1][block] = None
            driver.tables.unlock([page])
            driver.tables.unhold([page])
    driver.pump()


def test_a_window_needs_its_sinks_and_its_tail(make: Any, block_key: Any) -> None:
    """INV-319, INV-337: sinks of 4 tokens are block 0, a window of 8 the last two blocks."""
    driver = make(8, None, None, groups=WINDOW)
    session = driver.fill("a", 5)
    release_outside(driver, session)
    session.close()
    match = driver.tables.match([block_key("a", block) for block in range(5)])
    assert match.block_count == 5
    assert [page is not None for page in match.pages[1]] == [True, False, False, True, True]
    assert all(page is not None for page in match.pages[0])
    assert not WINDOW[1].needs_block(2, 5, 4)


def test_a_missing_window_block_shortens_the_match(make: Any, block_key: Any) -> None:
    """INV-319: the longest length whose own window is there."""
    driver = make(8, None, None, groups=WINDOW)
    driver.put("a", 6)
    keys = [block_key("a", block) for block in range(6)]
    assert driver.tables.match(keys).block_count == 6
    driver.tables.drop(driver.page("a", 5, 1))
    assert driver.tables.match(keys).block_count == 5
    driver.tables.drop(driver.page("a", 3, 1))  # in the windows of 4 and 5
    assert driver.tables.match(keys).block_count == 3
    driver.tables.drop(driver.page("a", 0, 1))  # the sink
    assert driver.tables.match(keys).block_count == 0


def test_a_window_page_dies_alone(make: Any, block_key: Any) -> None:
    """INV-325: for a sliding window only its own entry leaves the index."""
    driver = make(8, None, None, groups=WINDOW)
    driver.put("a", 4)
    driver.tables.drop(driver.page("a", 1, 1))
    assert [driver.has("a", block, 1) for block in range(4)] == [True, False, True, True]
    assert [driver.has("a", block, 0) for block in range(4)] == [True] * 4


def test_windowed_sessions_restore_group_by_group(make: Any) -> None:
    """INV-337: rows with holes restore, suspend and close like full ones."""
    driver = make(6, 8, 8, groups=WINDOW)
    session = driver.fill("a", 5)
    release_outside(driver, session)
    session.suspend()
    driver.put("b", 5)
    assert isinstance(session.plan(), Plan)
    session.resume()
    assert all(page.level == 0 for page in session.pages)
    session.close()


def test_brute_force_agrees_on_random_windows(make: Any, block_key: Any) -> None:
    """INV-319, INV-337: the match against a direct reading of the definition."""
    import random

    generator = random.Random(7)
    for _ in range(60):
        groups = (
            GroupSpec(name="full"),
            GroupSpec(name="w1", window=generator.randint(1, 14), sinks=generator.randint(0, 9)),
            GroupSpec(name="w2", window=generator.randint(1, 14), sinks=generator.randint(0, 5)),
        )
        driver = make(8, None, None, groups=groups)
        driver.put("a", 7)
        for group in (1, 2):
            for block in range(7):
                if generator.random() < 0.3:
                    driver.tables.drop(driver.page("a", block, group))
        if generator.random() < 0.3:
            driver.tables.drop(driver.page("a", generator.randrange(7), 0))

        def servable(length: int, driver: Any = driver) -> bool:
            for group, spec in enumerate(driver.spec.groups):
                for block in range(length):
                    is_sink = block * 4 < spec.sinks
                    start = 0 if spec.window is None else length * 4 - spec.window
                    if (is_sink or (block + 1) * 4 > start) and not driver.has("a", block, group):
                        return False
            return True

        expected = max(length for length in range(8) if servable(length))
        found = driver.tables.match([block_key("a", block) for block in range(7)])
        assert found.block_count == expected, driver.spec.groups
