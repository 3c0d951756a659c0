"""The interface of an eviction policy: who goes first, per level and pool group (INV-409)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvstore.core.slots import Slot


@dataclass(frozen=True, slots=True)
class Selection:
    """Victims in eviction order, and what the policy wants to change if they are taken.

    ``passed_over`` are slots a scan-resistant policy gave another round; nothing was changed yet.
    """

    victims: list[Slot]
    passed_over: tuple[Slot, ...] = ()


class EvictionPolicy:
    """Orders the primaries of one pool that are neither locked nor restoring.

    Callers guarantee: a slot is inserted at most once and belongs to a page; batches come from
    the tail of a prefix to its root, so a child is never more recently used than its parent
    (INV-324). Implementations must: keep that order among victims, so that leaves go before what
    they depend on; select without changing anything (INV-401).

    A base class and no typing protocol: the compiled core calls its methods without a look-up.
    """

    __slots__ = ("droppable_count", "held_count", "is_ordered")

    def __init__(self, *, is_ordered: bool) -> None:
        self.held_count = 0
        self.droppable_count = 0
        #: Whether the stamps of a lane rise from its oldest slot to its newest.
        self.is_ordered = is_ordered

    def insert(self, slot: Slot, stamp: int, *, is_held: bool) -> None:
        """Take in a slot as the most recently used one."""
        raise NotImplementedError

    def insert_oldest(self, slot: Slot) -> None:
        """Take in a recovered droppable slot as the oldest."""
        raise NotImplementedError

    def insert_below(self, slot: Slot, parent: Slot) -> bool:
        """Take in a slot as just older than its parent's; False if the two do not queue together.

        Pages come back in any order; this keeps INV-324 for those nobody locks at once.
        Callers guarantee: no child of the page is newer than the parent.
        """
        raise NotImplementedError

    def touch(self, slot: Slot, stamp: int, *, is_held: bool) -> None:
        """Note a use of a slot that is in, or change whether its page is held."""
        raise NotImplementedError

    def remove(self, slot: Slot) -> None:
        """Take a slot out; its page was locked, moved or ended."""
        raise NotImplementedError

    def select(self, count: int, *, held_limit: int, excluded: Collection[Slot] = ()) -> Selection:
        """Return up to ``count`` victims, at most ``held_limit`` of them held (INV-414).

        Pure. Cost: O(victims + excluded).
        """
        raise NotImplementedError

    def commit(self, selection: Selection) -> None:
        """Carry out what a selection decided beyond its victims. Cannot fail."""
        raise NotImplementedError

    def newest_first(self) -> list[Slot]:
        """Return all slots, most valuable first. Cost: O(slots); for shutdown only."""
        raise NotImplementedError
