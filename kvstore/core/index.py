"""The prefix index: (group, block key) to page, and the longest servable run of blocks.

A key is a whole 256-bit digest that carries position and history, so the walk is one dictionary
look-up per block and group (INV-318, INV-319, INV-337).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from kvstore.core.page import Page
    from kvstore.core.spec import GroupSpec
    from kvstore.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Match:
    """The longest servable run. ``pages[group][block]`` is None where a window needs no page."""

    block_count: int
    pages: list[list[Page | None]]

    def blocks_by_level(self) -> dict[int, int]:
        """Return how many blocks each level serves; a block counts where its coldest page is.

        The parts add up to ``block_count`` (INV-812).
        """
        found: dict[int, int] = {}
        for block in range(self.block_count):
            level = 0
            for row in self.pages:
                page = row[block]
                if page is not None and page.level > level:
                    level = page.level
            found[level] = found.get(level, 0) + 1
        return found


@final
class PrefixIndex:
    """All committed, matchable pages."""

    __slots__ = ("_block_tokens", "_groups", "_specs")

    def __init__(self, specs: Sequence[GroupSpec], block_tokens: int) -> None:
        self._specs = tuple(specs)
        self._block_tokens = block_tokens
        self._groups: list[dict[BlockKey, Page]] = [{} for _ in specs]

    def __len__(self) -> int:
        """Return the number of pages in the index."""
        return sum(map(len, self._groups))

    def group(self, group: int) -> dict[BlockKey, Page]:
        """Return the table of one group; the caller only reads it."""
        return self._groups[group]

    def get(self, group: int, key: BlockKey) -> Page | None:
        """Return the page of a key, or None."""
        return self._groups[group].get(key)

    def add(self, page: Page) -> None:
        """Take in a committed page whose key is not there yet."""
        assert page.key is not None
        table = self._groups[page.group]
        assert page.key not in table
        table[page.key] = page

    def remove(self, page: Page) -> None:
        """Take out a page."""
        removed = self._groups[page.group].pop(page.key, None)  # type: ignore[arg-type]
        assert removed is page, "INV-319: the page was not in the index"

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Return the longest run of full blocks that every group can serve (INV-319, INV-320).

        Pure. Cost: one look-up per block and full-attention group; a window group looks at its
        sinks and at the blocks back to the first servable window.
        """
        count = len(keys)
        rows: list[list[Page | None]] = []
        for spec, table in zip(self._specs, self._groups, strict=True):
            row: list[Page | None] = []
            if spec.window is None:
                row = list(map(table.get, keys[:count]))
                if None in row:
                    count = row.index(None)
            rows.append(row)
        count = self._windowed_count(keys, count)
        for group, (spec, table) in enumerate(zip(self._specs, self._groups, strict=True)):
            if spec.window is None:
                if len(rows[group]) > count:
                    del rows[group][count:]
            else:
                sinks = min(spec.sink_blocks(self._block_tokens), count)
                first = max(sinks, spec.first_window_block(count, self._block_tokens))
                rows[group] = [
                    *map(table.get, keys[:sinks]),
                    *[None] * (first - sinks),
                    *map(table.get, keys[first:count]),
                ]
        return Match(count, rows)

    def _windowed_count(self, keys: Sequence[BlockKey], count: int) -> int:
        """Shorten a run until each window group has its sinks and the blocks of its window."""
        windowed = [
            (spec, table)
            for spec, table in zip(self._specs, self._groups, strict=True)
            if spec.window is not None
        ]
        settled = not windowed
        while not settled:
            settled = True
            for spec, table in windowed:
                shorter = self._servable(spec, table, keys, count)
                if shorter < count:
                    count, settled = shorter, False
        return count

    def _servable(
        self, spec: GroupSpec, table: dict[BlockKey, Page], keys: Sequence[BlockKey], count: int
    ) -> int:
        sinks = spec.sink_blocks(self._block_tokens)
        for block in range(min(sinks, count)):
            if keys[block] not in table:
                count = block  # without this sink only a shorter history can be served
                break
        end, block = count, count - 1
        while end > 0:
            first = max(spec.first_window_block(end, self._block_tokens), min(sinks, end))
            while block >= first and keys[block] in table:
                block -= 1
            if block < first:
                return end
            end, block = block, block - 1
        return 0
