"""Hits of the tables against the exact LRU definition, one request at a time.

The definition: a request's leading known blocks are hits; then all of its blocks count as used,
from the tail, so that the root is newest; then the oldest are trimmed. A store with one tier of
``capacity`` slots, plus room for the request that runs, must agree block by block (INV-319,
INV-324, INV-409).
"""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.config import Tier
from kvstore.core.page import Page
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Plan, Tables
from kvstore.keys import BlockKey


def oracle(rows: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Return the hits of each request under the definition."""
    lru: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ids in rows:
        lead = 0
        while lead < len(ids) and ids[lead] in lru:
            lead += 1
        hits.append(lead)
        for block in reversed(ids):
            lru[block] = None
            lru.move_to_end(block)
        while len(lru) > capacity:
            lru.popitem(last=False)
    return hits


def replay(rows: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Return the hits of each request in tables with one tier.

    The tier has room for the longest request on top; it is trimmed after each request, as the
    definition does.
    """
    longest = max(map(len, rows))
    total = capacity + longest
    tables = Tables(
        TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=(LevelSpec(tier=Tier.DEVICE, slot_counts=(total,)),),
            block_tokens=1,
        )
    )
    hits = []
    for ids in rows:
        keys = [BlockKey(block.to_bytes(32, "little")) for block in ids]
        match = tables.match(keys)
        hits.append(match.block_count)
        row: list[Page | None] = list(match.pages[0])
        tables.hold(row)
        plan = tables.plan_restore((row,), (len(keys) - len(row),))
        assert isinstance(plan, Plan)
        new = tables.apply(plan).new_pages[0]
        tables.lock(row)
        for page in new:
            block = len(row)
            parent = row[-1] if row else None
            row.append(tables.commit(page, keys[block], parent, block))
        tables.unlock(row, PASSED)
        tables.unhold(row)
        trim = tables.plan_trim(0, (total - capacity,))
        assert isinstance(trim, Plan)
        tables.apply(trim)
        assert not tables.take_outbox()
    return hits


def synthetic(seed: int, requests: int) -> list[list[int]]:
    """Return multi-turn requests over a growing tree of blocks."""
    generator = random.Random(seed)
    histories: list[list[int]] = [[]]
    rows, fresh = [], 0
    for _ in range(requests):
        history = list(generator.choice(histories[-12:]))
        if history and generator.random() < 0.3:
            history = history[: generator.randrange(len(history)) + 1]
        for _ in range(generator.randint(1, 6)):
            fresh += 1
            history.append(fresh)
        histories.append(history)
        rows.append(history)
    return rows


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("capacity", [3, 17, 60])
def test_hits_equal_the_definition_on_synthetic_requests(case: int, capacity: int) -> None:
    """INV-324, INV-409: block by block."""
    rows = synthetic(case, 150)
    assert replay(rows, capacity) == oracle(rows, capacity)


@pytest.mark.skipif("KVSTORE_TRACES" not in os.environ, reason="KVSTORE_TRACES names no folder")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "rate"), [(1_000, 4.35), (5_000, 11.30), (20_000, 28.03), (100_000, 34.63)]
)
def test_hits_equal_the_definition_on_the_trace(capacity: int, rate: float) -> None:
    """INV-324, INV-409: the first 6,000 rows of the conversation trace, and the known rates."""
    path = Path(os.environ["KVSTORE_TRACES"]) / "mooncake_conversation_6000.jsonl"
    rows = [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]
    found = replay(rows, capacity)
    assert found == oracle(rows, capacity)
    assert round(100 * sum(found) / sum(map(len, rows)), 2) == rate
