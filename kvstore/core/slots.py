"""Slots, the fences that end their uses, and the pool that hands them out.

A slot is a page-sized place: (level, pool group, id, generation). The handle is move-only: each
allocation makes a new one with a higher generation, and a handle whose slot went to somebody else
is stale for ever (INV-304). A pool keeps its free slots as *ready* and *draining*: a draining slot
has no owner, but uses of it have not ended yet. Each use has a fence of its own; the write and
the readers are recorded apart (INV-305).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, final

from kvstore.core import mypyc_attr
from kvstore.errors import InvariantError, LogicError, StaleSlot

if TYPE_CHECKING:
    from kvstore.core.copies import CopyQueue
    from kvstore.core.eviction.base import EvictionPolicy
    from kvstore.core.page import Move, Page


class SlotState(IntEnum):
    """What a handle stands for. ``RELEASED``: the slot is free, or belongs to a later handle."""

    RELEASED = 0
    WRITING = 1
    VALID = 2
    DRAINING = 3


#: The one table of the slot's life (INV-303). A draining slot may return to its page when a
#: demotion is recalled or fails (INV-330, INV-911).
SLOT_TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.WRITING: frozenset((SlotState.VALID, SlotState.DRAINING, SlotState.RELEASED)),
    SlotState.VALID: frozenset((SlotState.DRAINING, SlotState.RELEASED)),
    SlotState.DRAINING: frozenset((SlotState.RELEASED, SlotState.WRITING, SlotState.VALID)),
    SlotState.RELEASED: frozenset(),
}

#: The same table as a tuple by state: looked up for every slot that changes hands.
_ALLOWED: Final = tuple(SLOT_TRANSITIONS[state] for state in SlotState)

#: Members by plain names: reaching one through its class costs more than a page's dictionary entry.
_RELEASED: Final = SlotState.RELEASED
_WRITING: Final = SlotState.WRITING
_VALID: Final = SlotState.VALID
_DRAINING: Final = SlotState.DRAINING


@mypyc_attr(acyclic=True)
class Fence:
    """The end of one use of one or more slots.

    ``is_kernel`` marks work of a scheduler's step, which may write as well as read. ``event`` is
    the opaque device event once the work is enqueued, None before; a device stream can wait for
    it, so device copies need not wait for ``passed``. ``is_stalled``: the use may never end, so its
    slot is not handed out before it has (INV-119). ``dependents`` have to hear of the end: None,
    one, or a list. A move is the fence of its own reading, see `kvstore.core.page.Move`.
    """

    __slots__ = ("dependents", "event", "is_kernel", "is_stalled", "passed")

    def __init__(self, *, is_kernel: bool = False) -> None:
        self.passed = False
        self.event: Any = None
        self.is_kernel = is_kernel
        self.is_stalled = False
        self.dependents: Slot | Move | list[Slot | Move] | None = None

    def add_dependent(self, dependent: Slot | Move) -> None:
        """Remember who has to hear of the end."""
        known = self.dependents
        if known is None:
            self.dependents = dependent
        elif isinstance(known, list):
            known.append(dependent)
        elif isinstance(known, Slot) and known.state is _RELEASED:
            self.dependents = dependent  # a later handle has inherited the use
        else:
            self.dependents = [known, dependent]

    def dependent_list(self) -> list[Slot | Move]:
        """Return those who have to hear of the end, in the order in which they came."""
        known = self.dependents
        if known is None:
            return []
        return known.copy() if isinstance(known, list) else [known]


@mypyc_attr(acyclic=True)
class Link:
    """What a lane is made of: its slots, and itself as the two ends.

    Who links and unlinks asserts first that a neighbour is there: the compiled core would look up
    an attribute of what may be None by name.
    """

    __slots__ = ("next", "prev")

    next: Link | None
    prev: Link | None


@final
class Lane(Link):
    """A doubly linked list of slots, oldest first, that is its own sentinel.

    A slot is in at most one lane; the links live in the slot, so a page costs no extra object.
    """

    __slots__ = ("count", "is_held", "owner", "priority")

    def __init__(self, owner: Any = None, *, priority: int = 0, is_held: bool = False) -> None:
        self.next = self
        self.prev = self
        self.count = 0
        self.owner = owner
        self.priority = priority
        self.is_held = is_held

    def append(self, slot: Slot) -> None:
        """Link a slot as the newest."""
        last = self.prev
        assert last is not None
        last.next = slot
        slot.prev = last
        slot.next = self
        self.prev = slot
        slot.lane = self
        self.count += 1

    def insert_oldest(self, slot: Slot) -> None:
        """Link a slot as the oldest."""
        self.insert_before(slot, self.next)  # type: ignore[arg-type]

    def insert_before(self, slot: Slot, successor: Link) -> None:
        """Link a slot as the next older neighbour of ``successor``."""
        before = successor.prev
        assert before is not None
        before.next = slot
        slot.prev = before
        slot.next = successor
        successor.prev = slot
        slot.lane = self
        self.count += 1

    def remove(self, slot: Slot) -> None:
        """Unlink a slot of this lane."""
        before, after = slot.prev, slot.next
        assert before is not None
        assert after is not None
        before.next = after
        after.prev = before
        slot.prev = slot.next = slot.lane = None
        self.count -= 1

    def replace(self, old: Slot, new: Slot) -> None:
        """Put a slot into the place of another one."""
        before, after = old.prev, old.next
        assert before is not None
        assert after is not None
        before.next = after.prev = new
        new.prev, new.next, new.lane, new.stamp = before, after, self, old.stamp
        old.prev = old.next = old.lane = None

    def __len__(self) -> int:
        """Return the number of slots."""
        return self.count

    def __bool__(self) -> bool:
        """Tell whether there are slots."""
        return self.count > 0

    def __iter__(self) -> Iterator[Slot]:
        """Yield the slots, oldest first; the lane must not change meanwhile."""
        node = self.next
        while isinstance(node, Slot):
            yield node
            node = node.next

    def newest_first(self) -> Iterator[Slot]:
        """Yield the slots, newest first; the lane must not change meanwhile."""
        node = self.prev
        while isinstance(node, Slot):
            yield node
            node = node.prev


@final
@mypyc_attr(acyclic=True)
class Slot(Link):
    """The handle of one slot, from its allocation until it is free again.

    ``page`` is the owner, or, while draining, the page whose data the slot still holds.
    ``write`` is the move that writes it (its target fence is the end of the write); ``readers``
    are the fences of other uses: None, one fence, or a list. ``colder`` links the slots of a page
    from its primary down. ``lane``, ``prev``, ``next`` and ``stamp`` place the slot in the
    eviction queue of its pool (a primary) or in the queue of copies (a copy). Only its pool makes
    handles, in `Pool.allocate_many`.
    """

    __slots__ = (
        "colder",
        "generation",
        "lane",
        "level",
        "page",
        "pool",
        "readers",
        "slot_id",
        "stamp",
        "state",
        "write",
    )

    pool: Pool
    level: int
    slot_id: int
    generation: int
    state: SlotState
    page: Page | None
    colder: Slot | None
    write: Move | None
    readers: Fence | list[Fence] | None
    lane: Lane | None
    stamp: int

    def __repr__(self) -> str:
        """Name the place and the state."""
        return (
            f"<Slot L{self.level} g{self.pool.group} #{self.slot_id}"
            f" gen {self.generation} {self.state.name}>"
        )

    @property
    def group(self) -> int:
        """The pool group."""
        return self.pool.group

    @property
    def is_pending(self) -> bool:
        """Tell whether the bytes are still being written."""
        return self.state is _WRITING

    def verify(self) -> None:
        """Raise StaleSlot unless this handle still stands for its slot (INV-304)."""
        if self.pool.handles[self.slot_id] is not self:
            raise StaleSlot(
                f"slot {self.slot_id}, generation {self.generation}, went to a later owner",
                level=self.level,
                pool_group=self.pool.group,
                slot_id=self.slot_id,
            )

    def outstanding(self) -> list[Fence]:
        """Return the fences of all uses that have not ended, the write included."""
        fences = self.outstanding_readers()
        if self.write is not None and not self.write.target_fence.passed:
            fences.append(self.write.target_fence)
        return fences

    def outstanding_readers(self) -> list[Fence]:
        """Return the fences of the uses beside the present write that have not ended."""
        readers = self.readers
        if readers is None:
            return []
        if isinstance(readers, list):
            return [fence for fence in readers if not fence.passed]
        return [] if readers.passed else [readers]

    def add_reader(self, fence: Fence) -> None:
        """Record one more use; ended ones are forgotten on the way."""
        readers = self.readers
        if readers is None or readers is fence:
            self.readers = fence
        elif isinstance(readers, list):
            kept = [known for known in readers if not known.passed and known is not fence]
            kept.append(fence)
            self.readers = kept
        elif readers.passed:
            self.readers = fence
        else:
            self.readers = [readers, fence]

    def forget_reader(self, fence: Fence) -> None:
        """Let go of a use that has ended, so that nothing old is kept alive by it."""
        readers = self.readers
        if readers is fence:
            self.readers = None
        elif isinstance(readers, list) and fence in readers:
            readers.remove(fence)

    def set_state(self, state: SlotState) -> None:
        """Change the state along the table. Raises: InvariantError: a transition not in it."""
        if state not in _ALLOWED[self.state]:
            raise InvariantError(f"{self!r} cannot become {state.name}")
        self.state = state


_TAKEN: Final = Slot()  # stands in until the handle is made


@final
class Pool:
    """The slots of one pool group on one level, its queues and its counters.

    ``total`` is the size in force; after a shrink, ids from ``total`` on are never handed out and
    those still in use wait in ``retiring`` until they have drained (INV-904). ``reserved_ids``
    are never handed out either and are not counted in ``total``.
    """

    __slots__ = (
        "closed_count",
        "copies",
        "copy_failed",
        "died",
        "draining",
        "dropped",
        "evicted",
        "generations",
        "group",
        "handles",
        "kept",
        "level",
        "pending_sources",
        "policy",
        "primaries",
        "ready",
        "ready_count",
        "reclaimed",
        "refused",
        "released_by_close",
        "released_by_resize",
        "retiring",
        "stalled",
        "reused",
        "reused_pending",
        "total",
        "written_through",
    )

    def __init__(
        self, level: int, group: int, total: int, policy: EvictionPolicy, copies: CopyQueue
    ) -> None:
        self.level = level
        self.group = group
        self.total = total
        self.policy = policy
        self.copies = copies
        self.ready = list(range(total - 1, -1, -1))
        self.ready_count = total
        self.generations = [0] * total
        self.handles: list[Slot | None] = [None] * total
        self.draining = Lane(self)  # oldest first
        self.retiring: dict[Slot, None] = {}
        self.stalled: dict[Slot, None] = {}  # draining, but perhaps for ever: not handed out
        self.closed_count = 0  # slots that `Tables.close_some` has been through
        self.primaries = 0
        self.pending_sources = 0  # slots here that a background write is reading (INV-605)
        self.kept = self.written_through = self.reused = self.reused_pending = 0
        self.reclaimed = self.died = self.copy_failed = 0
        self.released_by_resize = self.released_by_close = 0
        self.evicted = self.dropped = self.refused = 0

    @property
    def free_count(self) -> int:
        """Ready and draining slots: what a required move may take (INV-406)."""
        return self.ready_count + self.draining.count

    def allocate_ready(self) -> Slot:
        """Take a ready slot. Raises: LogicError: none is ready."""
        ready, handles, total = self.ready, self.handles, self.total
        while ready:
            slot_id = ready.pop()
            if slot_id < total and handles[slot_id] is None:
                self.ready_count -= 1
                return self._new_handles((slot_id,))[0]
        raise LogicError(f"no ready slot on level {self.level}, pool group {self.group}")

    def allocate(self) -> tuple[Slot, Slot | None]:
        """Take a ready slot, else the one that drains the longest (INV-306).

        Returns: the new handle, and the draining one it takes over. The new handle inherits the
        outstanding fences; nothing may be written before they have passed (INV-522).
        """
        slots, owners = self.allocate_many(1)
        return slots[0], owners[0]

    def allocate_many(self, count: int) -> tuple[list[Slot], list[Slot | None]]:
        """Take slots one after the other, each as `allocate` would; return handles and owners."""
        left = min(count, self.ready_count)
        if count - left > self.draining.count:
            raise LogicError(f"no free slot on level {self.level}, pool group {self.group}")
        ready, handles, total = self.ready, self.handles, self.total
        self.ready_count -= left
        slot_ids: list[int] = []
        owners: list[Slot | None] = [None] * left
        while left:
            slot_id = ready.pop()
            if slot_id < total and handles[slot_id] is None:
                left -= 1
                handles[slot_id] = _TAKEN  # an adopted slot that was freed is listed twice
                slot_ids.append(slot_id)
        if len(slot_ids) == count:
            return self._new_handles(slot_ids), owners
        first = len(slot_ids)
        uses: list[Fence | list[Fence] | None] = []
        draining = self.draining
        for _ in range(count - first):
            old = draining.next
            assert isinstance(old, Slot)
            draining.remove(old)
            readers = old.readers
            if old.write is not None or isinstance(readers, list):
                fences = old.outstanding()
                readers = fences[0] if len(fences) == 1 else fences or None
            old.state = _RELEASED
            old.page = old.readers = None
            slot_ids.append(old.slot_id)
            owners.append(old)
            uses.append(readers)
        slots = self._new_handles(slot_ids)
        for index, readers in enumerate(uses, first):
            slots[index].readers = readers
        return slots, owners

    def adopt(self, slot_id: int, generation: int) -> Slot | None:
        """Take a given ready slot, for recovery; None if it is out of range or in use."""
        if not 0 <= slot_id < self.total or self.handles[slot_id] is not None:
            return None
        self.ready_count -= 1  # its entry in the ready list is skipped when it comes up
        self.generations[slot_id] = max(self.generations[slot_id], generation - 1)
        return self._new_handles((slot_id,))[0]

    def release(self, slot: Slot) -> None:
        """Give a slot up: ready at once, or draining until its last use has ended (INV-522)."""
        slot_id = slot.slot_id
        if self.handles[slot_id] is not slot:
            slot.verify()
        readers = slot.readers
        if slot.write is not None or isinstance(readers, list):
            fences = slot.outstanding()
            if not fences:
                self._free(slot)
                return
            slot.readers = fences
            is_stalled = False
            for fence in fences:
                fence.add_dependent(slot)
                is_stalled = is_stalled or fence.is_stalled
        elif readers is None or readers.passed:
            self._free(slot)
            return
        else:
            readers.add_dependent(slot)
            is_stalled = readers.is_stalled
        state = slot.state
        if state is not _VALID and state is not _WRITING:
            slot.set_state(_DRAINING)  # raises
        slot.state = _DRAINING
        if slot_id >= self.total:
            self.retiring[slot] = None
        elif is_stalled:
            self.stalled[slot] = None
        else:
            self.draining.append(slot)

    def stall(self, slot: Slot) -> None:
        """Hand a draining slot out no more until its last use has ended (INV-119, INV-205)."""
        if slot.lane is self.draining:
            self.draining.remove(slot)
            self.stalled[slot] = None

    def take_back(self, slot: Slot) -> None:
        """Return a draining slot to the page whose data it still holds (INV-330, INV-911)."""
        if slot.lane is self.draining:
            self.draining.remove(slot)
        else:
            del self.stalled[slot]
        is_written = slot.write is not None
        slot.set_state(_WRITING if is_written else _VALID)

    def fence_passed(self, slot: Slot, fence: Fence) -> None:
        """Hear that one use of a draining slot has ended."""
        if slot.state is not _DRAINING:
            return
        readers = slot.readers
        if isinstance(readers, list):
            if fence in readers:
                readers.remove(fence)
            if readers:
                return
        elif readers is not fence:
            return
        if slot.lane is self.draining:
            self.draining.remove(slot)
        else:
            self.retiring.pop(slot, None)
            self.stalled.pop(slot, None)
        self._free(slot)

    def grow(self, total: int) -> None:
        """Add slots at the end; they are ready at once (INV-906)."""
        old_total, self.total = self.total, total
        missing = total - len(self.handles)
        if missing > 0:
            self.handles.extend([None] * missing)
            self.generations.extend([0] * missing)
        for slot in [slot for slot in self.retiring if slot.slot_id < total]:
            del self.retiring[slot]
            if any(fence.is_stalled for fence in slot.outstanding()):
                self.stalled[slot] = None
            else:
                self.draining.append(slot)
        fresh = range(total - 1, old_total - 1, -1)
        added = [slot_id for slot_id in fresh if self.handles[slot_id] is None]
        self.ready[:0] = added
        self.ready_count += len(added)

    def begin_shrink(self, total: int) -> None:
        """Hand out no slot from the new end on; those in use retire when they drain (INV-904)."""
        self.total = total
        for slot in [slot for slot in self.draining if slot.slot_id >= total]:
            self.draining.remove(slot)
            self.retiring[slot] = None
        for slot in [slot for slot in self.stalled if slot.slot_id >= total]:
            del self.stalled[slot]
            self.retiring[slot] = None
        free = dict.fromkeys(
            slot_id for slot_id in self.ready if slot_id < total and self.handles[slot_id] is None
        )
        self.ready = list(free)
        self.ready_count = len(free)

    def _new_handles(self, slot_ids: Iterable[int]) -> list[Slot]:
        """Make a handle per slot, with the next generation of each (INV-304).

        The class has no constructor: in Python it would cost as much again as all the fields.
        """
        handles, generations, level = self.handles, self.generations, self.level
        made: list[Slot] = []
        for slot_id in slot_ids:
            slot = Slot()
            slot.pool = self
            slot.level = level
            slot.slot_id = slot_id
            generation = generations[slot_id] + 1
            generations[slot_id] = slot.generation = generation
            slot.state = _VALID
            slot.page = slot.colder = slot.write = slot.readers = None
            slot.lane = slot.prev = slot.next = None
            slot.stamp = 0
            handles[slot_id] = slot
            made.append(slot)
        return made

    def _free(self, slot: Slot) -> None:
        slot_id = slot.slot_id
        if slot.state is _RELEASED:
            slot.set_state(_RELEASED)  # raises: a slot is given up once
        slot.state = _RELEASED
        slot.page = slot.readers = None
        self.handles[slot_id] = None
        if slot_id < self.total:
            self.ready.append(slot_id)
            self.ready_count += 1
