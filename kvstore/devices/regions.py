"""Registered host memory: which ranges the device may reach, and that no slot crosses one.

A copy descriptor must lie inside one registration (C53, INV-339): the driver refuses one that
crosses, and unregistered memory would make a copy synchronous and block the loop.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import final

import numpy as np

from kvstore.devices.base import HostLayout, SlotIds
from kvstore.errors import LogicError

REGISTRATION_BYTES_MAX = 1 << 30


def split_registration(
    address: int, length: int, part_bytes: int = REGISTRATION_BYTES_MAX
) -> list[tuple[int, int]]:
    """Return parts of at most ``part_bytes`` that cover the range once, in order (C53)."""
    return [
        (address + offset, min(part_bytes, length - offset))
        for offset in range(0, length, part_bytes)
    ]


@final
class HostRegions:
    """The registered ranges of one device, ordered by address."""

    __slots__ = ("_checked", "_ends", "_starts")

    def __init__(self) -> None:
        """Begin with nothing registered."""
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._checked: dict[HostLayout, int] = {}

    def add(self, address: int, length: int) -> None:
        """Take a range in. Raises: LogicError: it overlaps one that is registered."""
        if length <= 0:
            raise LogicError(f"cannot register {length} bytes")
        index = bisect_right(self._starts, address)
        before = index > 0 and self._ends[self._starts[index - 1]] > address
        after = index < len(self._starts) and self._starts[index] < address + length
        if before or after:
            raise LogicError(f"host range {address:#x}+{length} overlaps a registered one")
        insort(self._starts, address)
        self._ends[address] = address + length
        self._checked.clear()

    def remove(self, address: int) -> int:
        """Forget the range that begins at ``address`` and return its length."""
        if address not in self._ends:
            raise LogicError(f"host range {address:#x} is not registered")
        self._starts.remove(address)
        self._checked.clear()
        return self._ends.pop(address) - address

    def addresses(self) -> list[int]:
        """Return the start of every range."""
        return list(self._starts)

    def holds(self, address: int, length: int) -> bool:
        """Return whether one range covers all of ``address`` .. ``address + length``."""
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address + length <= self._ends[self._starts[index]]

    def check(self, host: HostLayout, host_slots: SlotIds) -> None:
        """Raise LogicError unless every slot lies inside one registered range.

        Cost: O(1) once the slots up to the largest id have been checked for this layout.
        """
        if not len(host_slots):
            return
        highest = int(host_slots.max())
        good = self._checked.get(host, -1)
        if highest <= good:
            return
        ids = np.arange(good + 1, highest + 1, dtype=np.int64)
        first = host.base + ids // host.slots_per_slab * host.slab_bytes
        first += ids % host.slots_per_slab * host.slot_bytes
        starts = np.array(self._starts, np.int64)
        ends = np.array([self._ends[start] for start in self._starts], np.int64)
        index = np.searchsorted(starts, first, side="right") - 1
        inside = index >= 0
        inside[inside] = first[inside] + host.slot_bytes <= ends[index[inside]]
        used = np.isin(ids, host_slots)
        if not inside[used].all():
            slot = int(ids[used & ~inside][0])
            raise LogicError(f"host slot {slot} is not inside one registered range", slot_id=slot)
        if inside.all():
            self._checked[host] = highest
