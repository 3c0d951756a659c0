"""Refusals against brute force: a plan is refused only when counting says so (INV-408)."""

from __future__ import annotations

import itertools

import pytest

from kvstore.config import Tier
from kvstore.core.invariants import check_state
from kvstore.core.page import Page
from kvstore.core.planner import Plan
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Tables
from kvstore.keys import BlockKey


def settle(tables: Tables) -> None:
    """Run every move to its end."""
    while outbox := tables.take_outbox():
        for move in outbox.start:
            if move.state.name == "BOUNCING":
                tables.move_source_released(move)
            else:
                tables.move_done(move)


def build(shape: tuple[int, ...], kinds: tuple[str, ...], keep: bool) -> tuple[Tables, list[Page]]:
    """Return tables whose pages are held (h) or droppable (d), oldest first."""
    tiers = (Tier.DEVICE, Tier.HOST, Tier.DISK)
    tables = Tables(
        TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=tuple(
                LevelSpec(tier=tier, slot_counts=(count,), keep_copy=keep and tier > 0)
                for tier, count in zip(tiers, shape, strict=False)
            ),
            block_tokens=1,
            write_through=keep and len(shape) == 3,
        )
    )
    held: list[Page] = []
    for number, kind in enumerate(kinds):
        plan = tables.plan_grow((1,))
        if not isinstance(plan, Plan):
            break
        page = tables.apply(plan).new_pages[0][0]
        settle(tables)
        tables.commit(page, BlockKey(number.to_bytes(32, "little")), None, 0)
        tables.unlock([page], PASSED)
        if kind == "h":
            held.append(page)
        else:
            tables.unhold([page])
    return tables, held


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [(2,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 2)])
def test_refused_exactly_when_the_counts_say_so(shape: tuple[int, ...], keep: bool) -> None:
    """INV-408, INV-414: every arrangement of held and droppable pages, every wish."""
    compared = refused = 0
    for length in range(sum(shape) + 2):
        for kinds in itertools.product("hd", repeat=length):
            for wanted in range(3):
                for grow in range(3):
                    tables, held = build(shape, kinds, keep)
                    row = held[:wanted]
                    plan = tables.plan_restore((row,), (grow,))
                    fits = len(row) + grow <= shape[0] and len(held) + grow <= sum(shape)
                    assert isinstance(plan, Plan) == fits, (kinds, wanted, grow, plan)
                    compared += 1
                    refused += not fits
                    if isinstance(plan, Plan):
                        tables.apply(plan)
                        check_state(tables)
                        settle(tables)
                        check_state(tables)
                        assert all(page.level == 0 for page in row)
                        assert not tables.moves, "INV-407: moves wait for each other"
    assert compared
    assert refused
