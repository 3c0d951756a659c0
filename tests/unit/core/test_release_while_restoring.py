"""Pages released while some of their chain is still on its way keep their order."""

from __future__ import annotations

from kvstore.config import Tier
from kvstore.core.invariants import check_state
from kvstore.core.planner import Refusal
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Tables
from kvstore.keys import KeyChain, scope_key

BLOCK = 4


def _settle(tables: Tables) -> None:
    while (outbox := tables.take_outbox()).start:
        for move in outbox.start:
            tables.move_done(move)


def test_a_parent_back_at_its_source_stays_newer_than_a_withdrawn_child() -> None:
    """INV-324: the root's restore failed, its children are withdrawn by the release after it."""
    tables = Tables(
        TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=(
                LevelSpec(tier=Tier.DEVICE, slot_counts=(4,)),
                LevelSpec(tier=Tier.HOST, slot_counts=(8,)),
            ),
            block_tokens=BLOCK,
        )
    )
    chain = KeyChain(BLOCK, scope_key())
    chain.extend(range(3 * BLOCK))
    plan = tables.plan_grow([3])
    assert not isinstance(plan, Refusal)
    pages = []
    for index, fresh in enumerate(tables.apply(plan).new_pages[0]):
        parent = pages[-1] if pages else None
        pages.append(tables.commit(fresh, chain.keys[index], parent, index))
    tables.unlock(pages, PASSED)
    tables.unhold(pages)
    filler = tables.plan_grow([4])
    assert not isinstance(filler, Refusal)
    others = tables.apply(filler).new_pages[0]
    _settle(tables)
    tables.unlock(others, PASSED)
    tables.unhold(others)
    assert [1, 1, 1] == [page.level for page in pages]

    tables.hold(pages)
    restore = tables.plan_restore([pages])
    assert not isinstance(restore, Refusal)
    tables.apply(restore)
    starts = tables.take_outbox().start
    root = next(move for move in starts if move.page is pages[0])
    tables.move_failed(root, -5, is_source_bad=False)
    assert 1 == pages[0].level
    check_state(tables)
    tables.unhold(pages)
    check_state(tables)
    stamps = [page.primary.stamp for page in pages if page.primary is not None]
    assert sorted(stamps, reverse=True) == stamps
