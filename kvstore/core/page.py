"""Pages and moves: one block's bytes as a thing with state, and one change of its place.

A page is locked, held or droppable: that follows from its counters and is stored nowhere
(INV-308). Its slots form a chain from the primary, the hottest, to its coldest copy (INV-301,
INV-302). A move exists while bytes are on their way to a slot; the target of a move that brings
the primary *is* the primary while it runs (INV-303).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, final

from kvstore.config import IoClass
from kvstore.core import mypyc_attr
from kvstore.core.slots import Fence, Slot, SlotState
from kvstore.errors import InvariantError

if TYPE_CHECKING:
    from kvstore.keys import BlockKey


class PageState(IntEnum):
    """FILLING: private and mutable. COMMITTED: immutable and in the index. ORPHAN: immutable, but
    an ancestor is gone, so nobody can match it any more (INV-325). DEAD: owns nothing.
    """

    FILLING = 0
    COMMITTED = 1
    ORPHAN = 2
    DEAD = 3


PAGE_TRANSITIONS: dict[PageState, frozenset[PageState]] = {
    PageState.FILLING: frozenset((PageState.COMMITTED, PageState.ORPHAN, PageState.DEAD)),
    PageState.COMMITTED: frozenset((PageState.ORPHAN, PageState.DEAD)),
    PageState.ORPHAN: frozenset((PageState.DEAD,)),
    PageState.DEAD: frozenset(),
}

#: By a plain name: reaching a member through its class costs a third of making a page.
_FILLING: Final = PageState.FILLING

#: The status that follows from the counters (INV-308).
LOCKED: Final = "locked"
HELD: Final = "held"
DROPPABLE: Final = "droppable"


@final
@mypyc_attr(acyclic=True)
class Page:
    """One block of one layer group. Made by the tables only; callers read it.

    ``children`` are the indexed pages of the next block: None, one page, or several in a dict.
    ``uses`` counts commits and holds for write admission and scan-resistant eviction.
    """

    __slots__ = (
        "block_index",
        "children",
        "group",
        "hold_count",
        "key",
        "lock_count",
        "parent",
        "parent_key",
        "primary",
        "priority",
        "state",
        "uses",
    )

    group: int
    priority: int
    state: PageState
    key: BlockKey | None
    parent_key: BlockKey | None
    parent: Page | None
    children: Page | dict[Page, None] | None
    block_index: int
    hold_count: int
    lock_count: int
    uses: int
    primary: Slot | None

    @staticmethod
    def make(group: int, priority: int, count: int) -> list[Page]:
        """Make pages that own nothing yet.

        The class has no constructor: in Python it would cost as much again as all the fields.
        """
        pages: list[Page] = []
        for _ in range(count):
            page = Page()
            page.group = group
            page.priority = priority
            page.state = _FILLING
            page.key = page.parent_key = page.parent = page.children = page.primary = None
            page.block_index = -1
            page.hold_count = page.lock_count = page.uses = 0
            pages.append(page)
        return pages

    def __repr__(self) -> str:
        """Name state, counters and place."""
        key = self.key.hex()[:8] if self.key else "-"
        return (
            f"<Page g{self.group} #{self.block_index} {key} {self.state.name}"
            f" holds {self.hold_count} locks {self.lock_count} at {self.primary!r}>"
        )

    @property
    def status(self) -> str:
        """``locked``, ``held`` or ``droppable`` (INV-308)."""
        if self.lock_count:
            return LOCKED
        return HELD if self.hold_count else DROPPABLE

    @property
    def level(self) -> int:
        """The level of the primary; -1 for a dead page."""
        return -1 if self.primary is None else self.primary.level

    @property
    def move(self) -> Move | None:
        """The move that brings the primary, None when its bytes are there."""
        return None if self.primary is None else self.primary.write

    @property
    def is_ready(self) -> bool:
        """Tell whether the bytes of the primary are valid now."""
        return self.primary is not None and self.primary.state is SlotState.VALID

    @property
    def is_restoring(self) -> bool:
        """Tell whether the page is on its way to the device tier (INV-328)."""
        primary = self.primary
        return primary is not None and primary.level == 0 and primary.write is not None

    @property
    def slots(self) -> list[Slot]:
        """All slots of the page, hottest first."""
        chain: list[Slot] = []
        slot = self.primary
        while slot is not None:
            chain.append(slot)
            slot = slot.colder
        return chain

    def slot_at(self, level: int) -> Slot | None:
        """Return the slot on a level, or None."""
        slot = self.primary
        while slot is not None and slot.level < level:
            slot = slot.colder
        return slot if slot is not None and slot.level == level else None

    def attach(self, slot: Slot) -> None:
        """Link a slot into the chain; the page owns it from now on."""
        slot.page = self
        first = self.primary
        if first is None or first.level > slot.level:
            slot.colder = first
            self.primary = slot
            return
        while first.colder is not None and first.colder.level < slot.level:
            first = first.colder
        assert first.level < slot.level
        slot.colder = first.colder
        first.colder = slot

    def detach(self, slot: Slot) -> None:
        """Unlink a slot from the chain; ``slot.page`` is left for a later return."""
        if self.primary is slot:
            self.primary = slot.colder
        else:
            hotter = self.primary
            while hotter is not None and hotter.colder is not slot:
                hotter = hotter.colder
            assert hotter is not None, "INV-301: the slot is not of this page"
            hotter.colder = slot.colder
        slot.colder = None

    def set_state(self, state: PageState) -> None:
        """Change the state along the table. Raises: InvariantError: a transition not in it."""
        if state not in PAGE_TRANSITIONS[self.state]:
            raise InvariantError(f"{self!r} cannot become {state.name}")
        self.state = state

    def add_child(self, child: Page) -> None:
        """Remember a page of the next block that depends on this one."""
        children = self.children
        if children is None:
            self.children = child
        elif isinstance(children, dict):
            children[child] = None
        else:
            self.children = {children: None, child: None}

    def remove_child(self, child: Page) -> None:
        """Forget a page of the next block."""
        children = self.children
        if isinstance(children, dict):
            children.pop(child, None)
        elif children is child:
            self.children = None

    def child_list(self) -> list[Page]:
        """Return the pages of the next block that depend on this one."""
        children = self.children
        if children is None:
            return []
        return list(children) if isinstance(children, dict) else [children]


class MoveKind(IntEnum):
    """Why bytes move. RELOCATE stays on its level; WRITE_THROUGH writes a copy."""

    RESTORE = 0
    EVICT = 1
    PREFETCH = 2
    WRITE_THROUGH = 3
    RELOCATE = 4


class MoveState(IntEnum):
    """PLANNED: waits for fences. BOUNCING: on its way into the bounce buffer. BOUNCED: there, and
    waiting for its target. STARTED: with the executor. ENDED: no piece is in flight.
    """

    PLANNED = 0
    BOUNCING = 1
    BOUNCED = 2
    STARTED = 3
    ENDED = 4


MOVE_TRANSITIONS: dict[MoveState, frozenset[MoveState]] = {
    MoveState.PLANNED: frozenset((MoveState.STARTED, MoveState.BOUNCING, MoveState.ENDED)),
    MoveState.BOUNCING: frozenset((MoveState.BOUNCED, MoveState.ENDED)),
    MoveState.BOUNCED: frozenset((MoveState.STARTED, MoveState.ENDED)),
    MoveState.STARTED: frozenset((MoveState.ENDED,)),
    MoveState.ENDED: frozenset(),
}


_MOVE_PLANNED: Final = MoveState.PLANNED


@final
@mypyc_attr(acyclic=True)
class Move(Fence):
    """One page's change of level in an applied plan, owned by the tables until it has ended.

    A move is itself the fence of its reading, ``source_fence``: passed when the source is no
    longer read (data verified elsewhere, INV-329). ``target_fence`` passes when the target is
    written; it is made when somebody first asks for it. ``waits`` are the fences that had not
    passed when the move was applied; a device copy that starts early has to make its stream wait
    for the events of those. ``via_bounce``: the first start copies source to bounce page only, then
    `Tables.move_source_released`, and the second start, with state STARTED, copies the bounce
    page to the target (INV-407). ``is_detached``: the page no longer cares for the outcome.
    """

    __slots__ = (
        "background_bytes",
        "blocked",
        "io_class",
        "is_detached",
        "is_device_copy",
        "is_source_released",
        "kind",
        "page",
        "sequence",
        "source",
        "state",
        "target",
        "target_waits",
        "via_bounce",
        "waits",
        "write_fence",
    )

    page: Page
    kind: MoveKind
    source: Slot
    target: Slot  # the source, until the plan is applied
    io_class: IoClass
    sequence: int
    via_bounce: bool
    state: MoveState
    is_detached: bool
    is_source_released: bool
    is_device_copy: bool
    waits: Sequence[Fence]
    target_waits: Sequence[Fence]  # of a via-bounce move, for its second start
    blocked: int
    background_bytes: int
    write_fence: Fence | None

    def __init__(self) -> None:
        """Leave everything to `make`: passing the fields would cost as much as setting them."""

    @staticmethod
    def make(
        pages: Sequence[Page],
        sources: Sequence[Slot],
        kind: MoveKind,
        io_class: IoClass,
        sequence: int,
    ) -> list[Move]:
        """Make a move of each page from its source, numbered from ``sequence`` on."""
        moves: list[Move] = []
        for page, source in zip(pages, sources, strict=True):
            move = Move()
            move.page = page
            move.source = move.target = source
            move.sequence = sequence
            sequence += 1
            move.kind = kind
            move.io_class = io_class
            move.state = _MOVE_PLANNED
            move.passed = move.is_kernel = move.is_stalled = move.via_bounce = False
            move.is_detached = move.is_source_released = move.is_device_copy = False
            move.event = move.dependents = move.write_fence = None
            move.waits = move.target_waits = ()
            move.blocked = move.background_bytes = 0
            moves.append(move)
        return moves

    @property
    def source_fence(self) -> Fence:
        """The end of the reading: the move itself."""
        return self

    @property
    def target_fence(self) -> Fence:
        """The end of the writing, made on first use."""
        fence = self.write_fence
        if fence is None:
            fence = self.write_fence = Fence()
            fence.passed = self.state is MoveState.ENDED
            fence.is_stalled = self.is_stalled
        return fence

    def __repr__(self) -> str:
        """Name kind, state and way."""
        return f"<Move {self.kind.name} {self.state.name} {self.source!r} -> {self.target!r}>"

    @property
    def is_started(self) -> bool:
        """Tell whether the executor has, or had, the move."""
        return self.state is not MoveState.PLANNED

    def set_state(self, state: MoveState) -> None:
        """Change the state along the table. Raises: InvariantError: a transition not in it."""
        if state not in MOVE_TRANSITIONS[self.state]:
            raise InvariantError(f"{self!r} cannot become {state.name}")
        self.state = state
