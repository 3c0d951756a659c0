"""Host memory in slots: the host tier, the staging slots and the bounce buffer.

All three share one geometry (INV-339): a slot is a 4 KiB header directly before the payload, and no
slot crosses a slab, because a slab is what is registered with the ring and with the device. A
`HostPool` is the slots of one pool group: one run of slots per arena, so that growth adds an arena
and a shrink gives whole ones back (INV-904, INV-906). Staging and bounce slots are pools that no
level counts (INV-334, INV-407).

Blocking calls (map, touch, register) are plain functions that the store runs off the loop.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

from kvstore import config as cfg
from kvstore._uring.base import Engine
from kvstore.devices.base import Device, HostLayout, SlotIds
from kvstore.errors import CapacityError

SLAB_BYTES = 1 << 30
ARENA_BYTES_GROW_MAX = 1 << 30  # a growth arrives in parts of at most this size (INV-906)

Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """An arena: mapped memory with one owner."""

    @property
    def address(self) -> int:
        """The first byte, 2 MiB aligned."""
        ...

    @property
    def length(self) -> int:
        """Bytes mapped."""
        ...

    def prefault(self) -> Any:
        """Touch every page; blocking."""
        ...

    def view(self, offset: int, length: int) -> Any:
        """Return (length,) uint8 at ``offset``."""
        ...

    def close(self) -> None:
        """Unmap."""
        ...

    def leak(self) -> None:
        """Keep the mapping for ever: DMA may still be running (INV-139)."""
        ...


MemoryFactory = Callable[[int, int, int | None], Memory]


class Run(NamedTuple):
    """Slots ``first`` to ``first + slot_count`` of a pool, in one arena of their own."""

    first: int
    slot_count: int
    layout: HostLayout
    memory: Memory


def arena_geometry(slot_count: int, slot_bytes: int) -> tuple[int, int, int]:
    """Return (slots per slab, slab bytes, arena bytes) so that no slot crosses a slab."""
    if slot_bytes > SLAB_BYTES:
        raise CapacityError(f"a slot of {slot_bytes} bytes does not fit into a slab of 1 GiB")
    slots_per_slab = SLAB_BYTES // slot_bytes
    slabs, rest = divmod(slot_count, slots_per_slab)
    return slots_per_slab, SLAB_BYTES, slabs * SLAB_BYTES + rest * slot_bytes


@final
class HostPool:
    """The slots of one pool group in host memory, and who else knows that memory."""

    __slots__ = ("_device", "_engine", "_factory", "_numa_node", "page_bytes", "runs", "slot_bytes")

    def __init__(
        self,
        page_bytes: int,
        factory: MemoryFactory,
        engine: Engine | None,
        device: Device,
        numa_node: int | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self.slot_bytes = cfg.slot_bytes(page_bytes)
        self.runs: list[Run] = []
        self._factory = factory
        self._engine = engine
        self._device = device
        self._numa_node = numa_node

    @property
    def slot_count(self) -> int:
        """Slots mapped and registered."""
        return self.runs[-1].first + self.runs[-1].slot_count if self.runs else 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, slack at the ends of slabs included."""
        return sum(run.memory.length for run in self.runs)

    def map(self, slot_count: int) -> Run:
        """Map and touch ``slot_count`` further slots; blocking, to be run off the loop (INV-906).

        Ownership: the caller adds the run with `add` on the loop, or closes its memory.
        """
        slots_per_slab, slab_bytes, length = arena_geometry(slot_count, self.slot_bytes)
        try:
            memory = self._factory(length, slab_bytes, self._numa_node)
        except (MemoryError, OSError) as error:
            raise CapacityError(f"host memory: {length} bytes refused: {error}") from error
        try:
            memory.prefault()
        except BaseException:
            memory.close()
            raise
        layout = HostLayout(memory.address, self.slot_bytes, slots_per_slab, slab_bytes)
        return Run(-1, slot_count, layout, memory)

    def register(self, run: Run) -> None:
        """Register the slabs of a run with engine and device; undone in reverse on failure."""
        done: list[int] = []
        try:
            for address, length in _slabs(run):
                self._device.register_host(address, length)
                done.append(address)
                if self._engine is not None:
                    self._engine.register_memory(address, length)
        except BaseException:
            for address in reversed(done):
                self._device.unregister_host(address)
            raise

    def add(self, run: Run) -> None:
        """Append a mapped and registered run: its slots exist from now on."""
        self.runs.append(run._replace(first=self.slot_count))

    def cut(self, slot_count: int) -> list[Run]:
        """Forget the slots from ``slot_count`` up and return the runs that are no longer needed.

        A run that keeps some slots keeps its memory. Callers guarantee that the slots have drained.
        """
        freed = [run for run in self.runs if run.first >= slot_count]
        kept = [run for run in self.runs if run.first < slot_count]
        if kept:
            last = kept[-1]
            kept[-1] = last._replace(slot_count=min(last.slot_count, slot_count - last.first))
        self.runs = kept
        return freed

    def release(self, run: Run, *, leak: bool = False) -> None:
        """Unregister and unmap a run; blocking. ``leak`` keeps the memory (INV-139)."""
        if leak:
            run.memory.leak()
            return
        for address, _ in reversed(list(_slabs(run))):
            if self._engine is not None:
                self._engine.unregister_memory(address)
            self._device.unregister_host(address)
        run.memory.close()

    def address(self, slot_id: int) -> int:
        """Return the address of a slot's header."""
        run = self._run(slot_id)
        return run.layout.address(slot_id - run.first)

    def payload(self, slot_id: int) -> Bytes:
        """Return (page_bytes,) uint8: the payload of a slot."""
        run = self._run(slot_id)
        offset = run.layout.address(slot_id - run.first) - run.layout.base
        view = run.memory.view(offset + run.layout.payload_offset, self.page_bytes)
        return np.frombuffer(view, np.uint8)

    def split(self, slot_ids: Sequence[int]) -> Iterator[tuple[HostLayout, list[int], SlotIds]]:
        """Split a batch by run: yields (layout, positions in the batch, slot ids in the layout)."""
        if len(self.runs) == 1:
            yield self.runs[0].layout, list(range(len(slot_ids))), np.asarray(slot_ids, np.int32)
            return
        by_run: dict[int, list[int]] = {}
        for position, slot_id in enumerate(slot_ids):
            by_run.setdefault(self._run_index(slot_id), []).append(position)
        for index, positions in sorted(by_run.items()):
            run = self.runs[index]
            local = np.array([slot_ids[i] - run.first for i in positions], np.int32)
            yield run.layout, positions, local

    def _run_index(self, slot_id: int) -> int:
        """Return the number of a slot's run; a large tier has many, so this is a bisection."""
        if not 0 <= slot_id < self.slot_count:
            raise IndexError(f"host slot {slot_id} is outside 0..{self.slot_count}")
        if len(self.runs) == 1:
            return 0
        return bisect.bisect_right(self.runs, slot_id, key=_first_slot) - 1

    def _run(self, slot_id: int) -> Run:
        return self.runs[self._run_index(slot_id)]


def _first_slot(run: Run) -> int:
    return run.first


def _slabs(run: Run) -> Iterator[tuple[int, int]]:
    start, end = run.memory.address, run.memory.address + run.memory.length
    while start < end:
        length = min(run.layout.slab_bytes, end - start)
        yield start, length
        start += length


@final
class SlotLoans:
    """A few slots lent out one at a time, first come first served: staging and bounce slots.

    A page waits here for a landing slot, never a loop or a thread (INV-334). A taker returns False
    if it needs no slot any more. ``given_count`` shows whether slots come back at all.
    """

    __slots__ = ("_free", "_is_lent", "_waiting", "given_count", "pool", "slot_count", "wait_count")

    def __init__(self, pool: HostPool, slot_count: int) -> None:
        self.pool = pool
        self.slot_count = slot_count
        self._free: deque[int] = deque(range(slot_count))
        self._is_lent = bytearray(slot_count)
        self._waiting: deque[Callable[[int], bool]] = deque()
        self.wait_count = 0
        self.given_count = 0

    @property
    def free_count(self) -> int:
        """Slots not lent out."""
        return len(self._free)

    def take_nowait(self) -> int | None:
        """Return a slot, or None if none is free or somebody waits already."""
        if self._waiting or not self._free:
            return None
        slot_id = self._free.popleft()
        self._is_lent[slot_id] = True
        return slot_id

    def take(self, taker: Callable[[int], bool]) -> None:
        """Call ``taker`` with a slot, now or when one comes back, in order of asking."""
        slot_id = self.take_nowait()
        if slot_id is None:
            self.wait_count += 1
            self._waiting.append(taker)
        elif not taker(slot_id):
            self._is_lent[slot_id] = False
            self._free.append(slot_id)

    def give(self, slot_id: int) -> None:
        """Give a slot back; the oldest waiter gets it at once."""
        assert 0 <= slot_id < self.slot_count
        assert self._is_lent[slot_id], "a landing slot came back twice"
        self.given_count += 1
        while self._waiting:
            if self._waiting.popleft()(slot_id):
                return
        self._is_lent[slot_id] = False
        self._free.append(slot_id)


@final
class HostTier:
    """Level 1: one pool per pool group."""

    __slots__ = ("pools",)

    def __init__(self, pools: Sequence[HostPool]) -> None:
        self.pools = list(pools)

    def address(self, group: int, slot_id: int) -> int:
        """Return the address of a slot's header."""
        return self.pools[group].address(slot_id)

    @property
    def mapped_bytes(self) -> int:
        """The true number of bytes mapped."""
        return sum(pool.mapped_bytes for pool in self.pools)


def growth_parts(slot_count: int, slot_bytes: int) -> Iterator[int]:
    """Cut a growth into parts that become usable one after the other (INV-906)."""
    part = max(1, ARENA_BYTES_GROW_MAX // slot_bytes)
    while slot_count > 0:
        yield min(part, slot_count)
        slot_count -= part
