"""Least recently used, lowest priority first: the default policy (INV-409).

Each priority has two lanes, one for held and one for droppable pages, each ordered by the stamp
of the last use. A selection merges them, so a held victim that has no room below is passed over
without scanning (INV-414, INV-420). All slots of one batch share a stamp; on a tie the droppable
one goes first, because a held child implies a held parent.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from typing import final

from kvstore.core.eviction.base import EvictionPolicy, Selection
from kvstore.core.slots import Lane, Link, Slot


@final
class LruPolicy(EvictionPolicy):
    """See the module. Cost: O(1) per call, O(victims + excluded) per selection."""

    __slots__ = ("_droppable", "_held", "_priorities")

    def __init__(self) -> None:
        super().__init__(is_ordered=True)
        self._held: dict[int, Lane] = {}
        self._droppable: dict[int, Lane] = {}
        self._priorities: list[int] = []

    def _lane(self, priority: int, *, is_held: bool) -> Lane:
        lanes = self._held if is_held else self._droppable
        lane = lanes.get(priority)
        if lane is None:
            if priority not in self._held:
                insort(self._priorities, priority)
                self._held[priority] = Lane(self, priority=priority, is_held=True)
                self._droppable[priority] = Lane(self, priority=priority)
            lane = lanes[priority]
        return lane

    def insert(self, slot: Slot, stamp: int, *, is_held: bool) -> None:
        """Link the slot as the most recently used one of its priority."""
        assert slot.page is not None
        priority = slot.page.priority
        lane = (self._held if is_held else self._droppable).get(priority)
        if lane is None:
            lane = self._lane(priority, is_held=is_held)
        if is_held:
            self.held_count += 1
        else:
            self.droppable_count += 1
        slot.stamp = stamp
        last = lane.prev
        assert last is not None
        last.next = slot
        slot.prev = last
        slot.next = lane
        lane.prev = slot
        slot.lane = lane
        lane.count += 1

    def insert_oldest(self, slot: Slot) -> None:
        """Link a recovered slot as the oldest droppable one."""
        assert slot.page is not None
        lane = self._lane(slot.page.priority, is_held=False)
        slot.stamp = 0
        lane.insert_oldest(slot)
        self.droppable_count += 1

    def insert_below(self, slot: Slot, parent: Slot) -> bool:
        """Link the slot as the next older neighbour of its parent, if both share a lane."""
        page, lane = slot.page, parent.lane
        assert page is not None
        is_held = page.hold_count > 0
        if lane is None or lane.owner is not self:
            return False
        if lane.priority != page.priority or lane.is_held != is_held:
            return False
        slot.stamp = parent.stamp
        lane.insert_before(slot, parent)
        if is_held:
            self.held_count += 1
        else:
            self.droppable_count += 1
        return True

    def touch(self, slot: Slot, stamp: int, *, is_held: bool) -> None:
        """Make the slot the most recently used one."""
        self.remove(slot)
        self.insert(slot, stamp, is_held=is_held)

    def remove(self, slot: Slot) -> None:
        """Unlink the slot."""
        lane, before, after = slot.lane, slot.prev, slot.next
        assert lane is not None
        assert before is not None
        assert after is not None
        before.next = after
        after.prev = before
        slot.prev = slot.next = slot.lane = None
        lane.count -= 1
        if lane.is_held:
            self.held_count -= 1
        else:
            self.droppable_count -= 1

    def select(self, count: int, *, held_limit: int, excluded: Collection[Slot] = ()) -> Selection:
        """Merge the lanes by priority, then by age; held ones only up to their limit."""
        victims: list[Slot] = []
        for priority in self._priorities:
            held, droppable = self._held[priority], self._droppable[priority]
            next_held: Link | None = held.next
            next_droppable: Link | None = droppable.next
            if next_held is held or held_limit <= 0:  # the usual case: nothing to merge
                missing = count - len(victims)
                while missing and isinstance(next_droppable, Slot):
                    if next_droppable not in excluded:
                        victims.append(next_droppable)
                        missing -= 1
                    next_droppable = next_droppable.next
            while len(victims) < count:
                slot: Slot
                if isinstance(next_droppable, Slot) and not (
                    held_limit > 0
                    and isinstance(next_held, Slot)
                    and next_held.stamp < next_droppable.stamp
                ):
                    slot = next_droppable
                    next_droppable = slot.next
                elif held_limit > 0 and isinstance(next_held, Slot):
                    slot = next_held
                    next_held = slot.next
                    if slot not in excluded:
                        held_limit -= 1
                else:
                    break
                if slot not in excluded:
                    victims.append(slot)
            if len(victims) >= count:
                break
        return Selection(victims)

    def commit(self, selection: Selection) -> None:
        """Do nothing: a selection changes no order here."""

    def newest_first(self) -> list[Slot]:
        """Return the slots by falling priority and recency."""
        slots: list[Slot] = []
        for priority in reversed(self._priorities):
            both = [*self._held[priority], *self._droppable[priority]]
            position = {slot: index for index, slot in enumerate(both)}
            both.sort(key=lambda slot: (slot.stamp, position[slot]), reverse=True)
            slots.extend(both)
        return slots
