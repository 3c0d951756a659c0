"""Copies: one mechanism for retained disk copies and host shadows (INV-301, INV-701).

A copy is a slot of a committed page below its primary. It is *pending* while its bytes are still
being written and *finished* afterwards; *reserved* is a mark that lives in a plan and nowhere
else, so a reservation cannot outlive its plan (INV-511, INV-512). Each pool keeps its copies in
the order in which they became copies, finished before pending (INV-510).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from typing import final

from kvstore.core.slots import Lane, Slot


class CopyEnd(Enum):
    """Why a copy stopped being one: the right-hand side of the balance of INV-805."""

    REUSED = "reused"  # taken back
    RECLAIMED = "reclaimed"  # its slot was needed
    DIED = "died"  # with its page, or replaced
    FAILED = "copy_failed"  # its write failed, or its read proved it bad
    RESIZED = "released_by_resize"
    CLOSED = "released_by_close"


class CopyState(Enum):
    """The life of a copy."""

    PENDING = "pending"
    FINISHED = "finished"
    ENDED = "ended"


#: The one table of a copy's life. Taking back ends a copy by making it the primary.
COPY_TRANSITIONS: dict[CopyState, frozenset[CopyState]] = {
    CopyState.PENDING: frozenset((CopyState.FINISHED, CopyState.ENDED)),
    CopyState.FINISHED: frozenset((CopyState.ENDED,)),
    CopyState.ENDED: frozenset(),
}


@final
class CopyQueue:
    """The copies of one pool, oldest first, finished ones before pending ones (INV-510)."""

    __slots__ = ("finished", "pending")

    def __init__(self) -> None:
        self.finished = Lane(self)
        self.pending = Lane(self)

    @property
    def count(self) -> int:
        """All copies, pending ones included."""
        return self.finished.count + self.pending.count

    def add(self, slot: Slot) -> None:
        """Take in a slot that has become a copy."""
        (self.pending if slot.is_pending else self.finished).append(slot)

    def finish(self, slot: Slot) -> None:
        """Move a pending copy whose write was good to the finished ones."""
        self.pending.remove(slot)
        self.finished.append(slot)

    def remove(self, slot: Slot) -> None:
        """Take out a slot that is no copy any more."""
        assert slot.lane is not None
        slot.lane.remove(slot)

    def has(self, slot: Slot) -> bool:
        """Tell whether the slot is a copy of this pool."""
        return slot.lane is self.finished or slot.lane is self.pending

    def oldest(self, reserved: Collection[Slot] = ()) -> Iterator[Slot]:
        """Yield the unreserved copies in reclaim order."""
        for lane in (self.finished, self.pending):
            for slot in lane:
                if slot not in reserved:
                    yield slot
