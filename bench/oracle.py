"""The exact least-recently-used reference for one tier and one request at a time.

A row's ids are a prefix chain: an id in the list means that everything before it is the same. The
reference looks up the leading run, then enters the whole request tail first, so that the root of a
prefix is newest, and trims the oldest afterwards, leaves before roots.

**How the store answers the same.** The store has ``capacity`` device slots and nothing below. A
request matches, locks its hits, takes slots for its misses (which evicts the oldest droppable
pages, leaves first) and lets go tail first. While it fits, the pages that remain are its own and
the newest others, exactly those the reference keeps after trimming. A request of more blocks than
``capacity`` leaves its first ``capacity`` blocks in the reference and nothing else; so the replay
hands the store just these blocks and counts the rest as references that missed. No headroom is
added to the tier, and no hit is gained or lost: a leading run is never longer than ``capacity``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HitCount:
    """Leading-prefix hits in blocks, of all block references."""

    hits: int
    refs: int

    @property
    def rate(self) -> float:
        """Return hits per reference, 0 without any."""
        return self.hits / self.refs if self.refs else 0.0


def lru_hits(rows: Iterable[Sequence[int]], capacity: int) -> list[int]:
    """Return the leading hits of each request under plain LRU with ``capacity`` blocks."""
    lru: OrderedDict[int, None] = OrderedDict()
    found: list[int] = []
    for ids in rows:
        lead = 0
        while lead < len(ids) and ids[lead] in lru:
            lead += 1
        found.append(lead)
        for block_id in reversed(ids):
            lru[block_id] = None
            lru.move_to_end(block_id)
        while len(lru) > capacity:
            lru.popitem(last=False)
    return found


def lru_hit_rate(rows: Sequence[Sequence[int]], capacity: int) -> HitCount:
    """Return the totals of `lru_hits`."""
    return HitCount(sum(lru_hits(rows, capacity)), sum(len(ids) for ids in rows))
