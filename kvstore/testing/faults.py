"""Fault plans: which pieces of disk I/O go wrong, and how.

A rule selects pieces by class, opcode, file offset and count, and says what happens to them. The
plan is consulted once per dispatch of a piece, retries included, in the order of the rules; the
first rule that applies decides. A plan is data: printing it next to a seed replays a failure.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import final

from kvstore._uring.base import Opcode
from kvstore.config import IoClass


class FaultKind(Enum):
    """What happens to a piece."""

    ERRNO = "errno"  # fails with -value
    SHORT = "short"  # moves at most value bytes and reports that
    ZERO = "zero"  # reports 0: end of file
    AGAIN = "again"  # reports -EAGAIN
    FLIP = "flip"  # moves everything, one bit of the data wrong, reports success
    TORN = "torn"  # a write: only the first value bytes reach the file, reports success
    SECTORS = "sectors"  # a write: only 4 KiB sectors with bit i % 32 of value set, reports success
    LOST = "lost"  # a write: nothing reaches the file, reports success
    MISDIRECTED = "misdirected"  # moves value bytes from there in the file, reports success
    NEVER = "never"  # no completion until `FaultPlan.release`
    LATE = "late"  # completes value nanoseconds later


#: Kinds that let reads pass.
WRITE_KINDS = frozenset({FaultKind.TORN, FaultKind.SECTORS, FaultKind.LOST})


@dataclass(slots=True)
class Fault:
    """One rule. None selects everything; the rule skips ``nth`` matching pieces, then applies
    ``count`` times (None: for ever). Units of ``value``: as its kind says.
    """

    kind: FaultKind
    value: int = 0
    io_class: IoClass | None = None
    opcode: Opcode | None = None
    nth: int = 0
    count: int | None = 1
    offset_min: int | None = None
    offset_max: int | None = None  # exclusive
    file_id: int | None = None
    hit_count: int = 0
    _seen: int = field(default=0, repr=False)

    def selects(
        self, io_class: IoClass, opcode: Opcode, file_id: int, offset: int, length: int
    ) -> bool:
        """Count a matching piece and return whether the rule applies to it."""
        if self.io_class is not None and io_class != self.io_class:
            return False
        if self.opcode is not None and opcode != self.opcode:
            return False
        if self.file_id is not None and file_id != self.file_id:
            return False
        if self.offset_min is not None and offset + length <= self.offset_min:
            return False
        if self.offset_max is not None and offset >= self.offset_max:
            return False
        if self.count is not None and self.hit_count >= self.count:
            return False
        self._seen += 1
        if self._seen <= self.nth:
            return False
        self.hit_count += 1
        return True


@final
class FaultPlan:
    """An ordered list of rules, given to an engine; rules may be added while it runs."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        self._held: list[Callable[[], None]] = []

    def add(self, kind: FaultKind | str, value: int = 0, **where: object) -> Fault:
        """Append a rule and return it: ``plan.add("errno", errno.EIO, opcode=Opcode.READ)``."""
        fault = Fault(FaultKind(kind), value, **where)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """Drop every rule; pieces already held stay held."""
        self.faults.clear()

    def decide(
        self, io_class: IoClass, opcode: Opcode, file_id: int, offset: int, length: int
    ) -> Fault | None:
        """Return the rule that applies to this dispatch, or None."""
        for fault in self.faults:
            if fault.kind in WRITE_KINDS and opcode is not Opcode.WRITE:
                continue
            if fault.selects(io_class, opcode, file_id, offset, length):
                return fault
        return None

    def hold(self, complete: Callable[[], None]) -> None:
        """Keep a piece that never completes, until `release`."""
        self._held.append(complete)

    @property
    def held_count(self) -> int:
        """Pieces that would never complete."""
        return len(self._held)

    def release(self) -> int:
        """Complete every held piece now, as a hung mount that comes back; return how many."""
        held, self._held = self._held, []
        for complete in held:
            complete()
        return len(held)

    @property
    def hit_count(self) -> int:
        """How often any rule applied: zero means that the plan tested nothing."""
        return sum(fault.hit_count for fault in self.faults)

    @classmethod
    def random(cls, rng: Random, *, rate: int = 3, never: bool = False) -> FaultPlan:
        """Return up to ``rate`` random rules of every kind that a store must survive."""
        kinds = [kind for kind in FaultKind if never or kind is not FaultKind.NEVER]
        plan = cls()
        for _ in range(rng.randrange(rate + 1)):
            kind = rng.choice(kinds)
            value = 0
            if kind is FaultKind.ERRNO:
                value = rng.choice([errno.EIO, errno.ENOSPC, errno.EINVAL, errno.EFBIG])
            elif kind is FaultKind.SHORT:
                value = rng.choice([1, 511, 4096, 8192])
            elif kind is FaultKind.TORN:
                value = 4096 * rng.randrange(1, 4)
            elif kind is FaultKind.MISDIRECTED:
                value = 4096 * rng.choice([-6, -3, -2, -1, 1, 2, 3, 6])
            elif kind is FaultKind.SECTORS:
                value = rng.getrandbits(32)
            elif kind is FaultKind.LATE:
                value = rng.randrange(1_000_000, 2_000_000_000)
            plan.add(
                kind,
                value,
                io_class=rng.choice([None, *IoClass]),
                opcode=rng.choice([None, *Opcode]),
                nth=rng.randrange(40),
                count=rng.choice([1, 1, 2, 4, 12]),
            )
        return plan

    def __repr__(self) -> str:
        return f"FaultPlan({self.faults!r})"
