"""What the tables are built from: groups, levels and the few limits the planner knows.

The records check themselves, so tables of an impossible shape cannot exist (INV-905). Sizes in
slots are counts per pool group; only the background cap is in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from kvstore.config import GIB, Tier, check_choice, check_int, share_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One pool group is one layer group is one page per block (INV-337).

    ``window`` and ``sinks`` are tokens; ``window=None`` is full attention. ``page_bytes`` weighs
    a page against the background cap and nothing else.
    """

    name: str
    page_bytes: int = 1
    window: int | None = None
    sinks: int = 0
    eviction_policy: str = "lru"

    def __post_init__(self) -> None:
        """Check every field by itself."""
        check_int("page_bytes", self.page_bytes, 1)
        check_int("sinks", self.sinks, 0)
        if self.window is not None:
            check_int("window", self.window, 1)
        check_choice("eviction_policy", self.eviction_policy, ("lru", "s3fifo"))

    def sink_blocks(self, block_tokens: int) -> int:
        """Return how many leading blocks hold sinks."""
        return -(-self.sinks // block_tokens)

    def first_window_block(self, block_count: int, block_tokens: int) -> int:
        """Return the first block that intersects ``[L - window, L)`` for L in whole blocks."""
        if self.window is None:
            return 0
        return max(0, (block_count * block_tokens - self.window) // block_tokens)

    def needs_block(self, block: int, block_count: int, block_tokens: int) -> bool:
        """Tell whether a history of ``block_count`` blocks needs ``block`` in this group."""
        return block < self.sink_blocks(block_tokens) or block >= self.first_window_block(
            block_count, block_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSpec:
    """One level: its tier, its slots per group, and how it treats copies.

    ``share_fraction`` is ``protected_copy_fraction``: 1.0 protects all copies (disk default),
    0.0 none (host default); the share is taken from its decimal text (INV-507).
    """

    tier: Tier
    slot_counts: Sequence[int]
    keep_copy: bool = False
    share_fraction: float | str | Decimal = 1.0

    def __post_init__(self) -> None:
        """Refuse a level that could not serve one page of each group (INV-905)."""
        for count in self.slot_counts:
            check_int("slot_counts", count, 1)

    def share(self, slot_count: int) -> int:
        """Return how many copies of a pool group of this size are protected."""
        return share_slots(self.share_fraction, slot_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesSpec:
    """Everything the tables know about the store they belong to.

    ``selective_uses`` turns write admission `selective` on (INV-409); ``write_through`` needs a
    host level directly above the disk level and is ignored otherwise (INV-613): read
    `is_write_through` for what is in force. ``events`` turns the event list of the outbox on.
    """

    groups: Sequence[GroupSpec]
    levels: Sequence[LevelSpec]
    block_tokens: int
    write_through: bool = False
    selective_uses: int | None = None
    bounce_pages: int = 2
    background_bytes_max: int = GIB
    events: bool = False

    def __post_init__(self) -> None:
        """Check order and shape of the levels (INV-132)."""
        check_int("block_tokens", self.block_tokens, 1)
        check_int("bounce_pages", self.bounce_pages, 1)
        tiers = [level.tier for level in self.levels]
        if not tiers or tiers[0] is not Tier.DEVICE or sorted(set(tiers)) != tiers:
            raise ValueError("levels: must be device, host, disk in this order, each at most once")
        for level in self.levels:
            if len(level.slot_counts) != len(self.groups):
                raise ValueError("slot_counts: one number per pool group is needed")

    @property
    def is_write_through(self) -> bool:
        """Tell whether write-through is on and possible (INV-613)."""
        return self.write_through and self.write_through_level is not None

    @property
    def write_through_level(self) -> int | None:
        """Return the host level directly above the disk level, if there is one."""
        for level in range(1, len(self.levels) - 1):
            if self.levels[level].tier is Tier.HOST and self.levels[level + 1].tier is Tier.DISK:
                return level
        return None
