"""A scan-resistant policy after S3-FIFO, behind the same protocol (INV-409).

Droppable pages wait in a *small* or a *main* queue. A page used once enters small; a page used
again, in this life or in one the use table remembers, enters main. Victims come from small while
it holds more than a tenth of the slots, else from main, where a page with uses left gets another
round. Held pages queue apart by age and go last: they are promised to somebody.

A prefix tree adds one demand that plain S3-FIFO does not know: leaves go before what they depend
on (INV-324, INV-325). So a victim takes its descendants in this pool with it, deepest first.
Priorities order the held pages only through the order in which they were released.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from kvstore.core.eviction.base import EvictionPolicy, Selection
from kvstore.core.slots import Lane, Slot

_USES_MAX = 3
_SMALL_SHARE = 10  # small may hold one in ten slots before it is drained first


@final
class S3FifoPolicy(EvictionPolicy):
    """See the module. In main, ``slot.stamp`` is the number of rounds a page has left."""

    __slots__ = ("_held", "_main", "_small", "_small_target")

    def __init__(self, slot_count: int) -> None:
        super().__init__(is_ordered=False)
        self._held = Lane(self, is_held=True)
        self._small = Lane(self)
        self._main = Lane(self, priority=1)
        self._small_target = max(1, slot_count // _SMALL_SHARE)

    def insert(self, slot: Slot, stamp: int, *, is_held: bool) -> None:
        """Queue a held page by age, a droppable one by its uses."""
        assert slot.page is not None
        if is_held:
            slot.stamp = stamp
            self.held_count += 1
            self._held.append(slot)
            return
        self.droppable_count += 1
        slot.stamp = min(_USES_MAX, max(0, slot.page.uses - 1))
        (self._main if slot.stamp else self._small).append(slot)

    def insert_oldest(self, slot: Slot) -> None:
        """Queue a recovered page as the next to leave small."""
        slot.stamp = 0
        self.droppable_count += 1
        self._small.insert_oldest(slot)

    def insert_below(self, slot: Slot, parent: Slot) -> bool:  # noqa: ARG002
        """Leave the place to `insert`: victims take their descendants along anyway."""
        return False

    def touch(self, slot: Slot, stamp: int, *, is_held: bool) -> None:
        """Queue the page anew."""
        self.remove(slot)
        self.insert(slot, stamp, is_held=is_held)

    def remove(self, slot: Slot) -> None:
        """Unlink the slot."""
        lane = slot.lane
        assert lane is not None
        if lane.is_held:
            self.held_count -= 1
        else:
            self.droppable_count -= 1
        lane.remove(slot)

    def select(self, count: int, *, held_limit: int, excluded: Collection[Slot] = ()) -> Selection:
        """Walk small and main as S3-FIFO would, changing nothing; held pages follow."""
        victims: dict[Slot, None] = {}
        passed_over: list[Slot] = []
        small, main = iter(self._small), iter(self._main)
        small_left = self._small.count
        rounds_left = 4 * count + 16  # bounds the walk; then main goes by age
        second_round: list[Slot] = []
        while len(victims) < count:
            slot = next(small, None) if small_left > self._small_target else None
            if slot is not None:
                small_left -= 1
            else:
                slot = next(main, None)
                if slot is not None and slot.stamp and rounds_left:
                    rounds_left -= 1
                    passed_over.append(slot)
                    second_round.append(slot)
                    continue
            if slot is None:
                slot = next(small, None)
            if slot is None:
                break
            if slot not in excluded:
                self._take(slot, victims, excluded)
        for slot in second_round:
            if len(victims) >= count:
                break
            if slot not in excluded:
                self._take(slot, victims, excluded)
        chosen = list(victims)[:count]
        held = iter(self._held)
        while len(chosen) < count and held_limit > 0:
            slot = next(held, None)
            if slot is None:
                break
            if slot not in excluded:
                held_limit -= 1
                chosen.append(slot)
        taken = set(chosen)
        return Selection(chosen, tuple(slot for slot in passed_over if slot not in taken))

    def _take(self, slot: Slot, victims: dict[Slot, None], excluded: Collection[Slot]) -> None:
        """Add a victim after its descendants in this pool, deepest first."""
        order, stack = [], [slot]
        while stack:
            node = stack.pop()
            if node in victims or node in excluded:
                continue
            order.append(node)
            assert node.page is not None
            for child in node.page.child_list():
                primary = child.primary
                if primary is None or primary.pool is not node.pool:
                    continue
                if primary.lane is not None and not primary.lane.is_held:
                    stack.append(primary)
        for node in reversed(order):
            victims[node] = None

    def commit(self, selection: Selection) -> None:
        """Give the passed-over pages their further round."""
        for slot in selection.passed_over:
            if slot.lane is self._main:
                self._main.remove(slot)
                slot.stamp -= 1
                self._main.append(slot)

    def newest_first(self) -> list[Slot]:
        """Return held pages, then main, then small, newest first."""
        lanes = (self._held, self._main, self._small)
        return [slot for lane in lanes for slot in lane.newest_first()]
