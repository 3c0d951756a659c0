"""A fake model: it writes a pattern for each layer group, block and token, and checks all of it.

The bytes of a token depend on the group, on everything before its block (the parent key), on its
position in the block and on the token itself. A page that is stale, mixed up, torn, of another
tenant or of another history therefore differs, and a tail that was decoded into after a restore
is checked token by token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kvstore.config import StoreConfig
from kvstore.keys import BlockKey, KeyChain, scope_key

Bytes = npt.NDArray[np.uint8]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def token_rows(
    group: str, parent: bytes, start: int, tokens: Sequence[int], row_bytes: int
) -> Bytes:
    """Return the bytes of ``tokens`` at positions ``start`` onwards of the block after ``parent``.

    Shapes: (len(tokens), row_bytes) uint8.
    """
    seed = np.frombuffer(hashlib.sha256(group.encode() + parent).digest()[:8], "<u8")[0]
    word_count = -(-row_bytes // 8)
    with np.errstate(over="ignore"):
        rows = np.asarray(tokens, np.uint64) * _MIX
        rows = rows + np.arange(start + 1, start + len(tokens) + 1, dtype=np.uint64) * _STEP + seed
        rows ^= rows >> np.uint64(29)
        words = rows[:, None] * _STEP + np.arange(1, word_count + 1, dtype=np.uint64) * _MIX
        words ^= words >> np.uint64(31)
    data: Bytes = np.ascontiguousarray(words.astype("<u8")).view(np.uint8)
    return data.reshape(len(tokens), word_count * 8)[:, :row_bytes]


@final
class History:
    """The tokens of one request and the keys of its blocks, as the fake model sees them."""

    def __init__(self, block_tokens: int, salt: bytes = b"", adapter: bytes = b"") -> None:
        self.block_tokens = block_tokens
        self.salt = salt
        self.adapter = adapter
        self.tokens: list[int] = []
        self._chain = KeyChain(block_tokens, scope_key(salt, adapter))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.tokens.extend(int(token) for token in tokens)
        self._chain.extend(np.asarray(tokens, np.int64))

    def truncate(self, token_count: int) -> None:
        """Forget everything from ``token_count`` on."""
        kept = self.tokens[:token_count]
        self.tokens = []
        self._chain = KeyChain(self.block_tokens, scope_key(self.salt, self.adapter))
        self.extend(kept)

    def copy(self) -> History:
        """Return an independent history of the same tokens."""
        twin = History(self.block_tokens, self.salt, self.adapter)
        twin.tokens = self.tokens.copy()
        twin._chain = self._chain.fork()
        return twin

    @property
    def block_count(self) -> int:
        """Blocks, the partial tail included."""
        return -(-len(self.tokens) // self.block_tokens)

    def key(self, block: int) -> BlockKey:
        """Return the key of a full block."""
        return self._chain.keys[block]

    def parent(self, block: int) -> BlockKey:
        """Return what the bytes of a block depend on: its parent's key or the scope."""
        return self._chain.keys[block - 1] if block else self._chain.root

    def block(self, index: int) -> list[int]:
        """Return the tokens of a block, fewer than ``block_tokens`` for the tail."""
        return self.tokens[index * self.block_tokens : (index + 1) * self.block_tokens]


@final
class ReferenceModel:
    """What every page of every session must hold.

    It knows no tier and no eviction: a page is right if each token's bytes are the pattern of that
    token in that history. ``checked_pages`` and ``checked_tokens`` count what was compared, so a
    test can prove that it looked at something.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.block_tokens = config.block_tokens
        self.page_bytes = {group.name: group.page_bytes for group in config.pool_groups}
        self.checked_pages = 0
        self.checked_tokens = 0

    def row_bytes(self, group: str) -> int:
        """Bytes of one token in a page of ``group``; the rest of the page is padding."""
        return self.page_bytes[group] // self.block_tokens

    def history(self, salt: bytes = b"", adapter: bytes = b"") -> History:
        """Return an empty history of one tenant."""
        return History(self.block_tokens, salt, adapter)

    def pages(self, pool: Any, group: str) -> Bytes:
        """Return the device pool of ``group`` as (slot_count, page_bytes) uint8, a view."""
        tensor = pool.as_tensor()
        if hasattr(tensor, "numpy"):
            tensor = tensor.numpy()
        array: Bytes = np.asarray(tensor)
        return array.view(np.uint8).reshape(-1, self.page_bytes[group])

    def write(
        self, pool: Any, group: str, table: npt.NDArray[np.int32], history: History, start: int
    ) -> int:
        """Write the tokens from ``start`` on into the slots of ``table``; return pages touched.

        This is the kernel of a step: run it in stream order on a device with streams.
        """
        pages, row_bytes, touched = self.pages(pool, group), self.row_bytes(group), 0
        for block in range(start // self.block_tokens, history.block_count):
            slot = int(table[block])
            if slot < 0:
                continue
            first = max(0, start - block * self.block_tokens)
            tokens = history.block(block)
            rows = token_rows(group, history.parent(block), first, tokens[first:], row_bytes)
            view = pages[slot, first * row_bytes : len(tokens) * row_bytes]
            view[:] = rows.reshape(-1)
            touched += 1
        return touched

    def check(
        self,
        pool: Any,
        group: str,
        table: npt.NDArray[np.int32],
        history: History,
        token_count: int | None = None,
    ) -> int:
        """Compare the first ``token_count`` tokens (default: all) with the device pool.

        Blocks that left a sliding window (-1 in the table) are skipped. Returns pages compared.
        Raises AssertionError naming group, block, slot and token of the first wrong byte.
        """
        pages, row_bytes, compared = self.pages(pool, group), self.row_bytes(group), 0
        count = len(history.tokens) if token_count is None else token_count
        for block in range(-(-count // self.block_tokens)):
            slot = int(table[block])
            if slot < 0:
                continue
            tokens = history.block(block)[: count - block * self.block_tokens]
            expected = token_rows(group, history.parent(block), 0, tokens, row_bytes).reshape(-1)
            self._compare(expected, pages[slot, : expected.size], group, block, slot)
            compared += 1
            self.checked_tokens += len(tokens)
        self.checked_pages += compared
        return compared

    def _compare(self, expected: Bytes, found: Bytes, group: str, block: int, slot: int) -> None:
        if np.array_equal(expected, found):
            return
        wrong = np.flatnonzero(expected != found)
        token = int(wrong[0]) // self.row_bytes(group)
        raise AssertionError(
            f"{group}: block {block} in device slot {slot} is wrong from token {token} on"
            f" ({wrong.size} of {expected.size} bytes differ)"
        )
