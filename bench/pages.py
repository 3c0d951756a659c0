"""What a page holds in a replay: words that follow from its block key and their position.

Every 64-bit word is a fixed, well mixed word of its position, exclusive-ored with the first word
of the key. A page of another key differs in every word, a shifted or torn page in every word that
is not in its place; writing and checking a page cost one pass each. A token owns the words
``[token * words / block_tokens, (token + 1) * words / block_tokens)``, so a page that is filled
step by step is whole when its block is.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


class PagePattern:
    """Writes and checks pages of one size.

    Shapes: pages are (page_bytes // 8,) uint64, C-contiguous. Cost: one pass, nothing allocated.
    """

    def __init__(self, page_bytes: int, block_tokens: int) -> None:
        assert page_bytes > 0
        assert page_bytes % 8 == 0
        self.word_count = page_bytes // 8
        self.block_tokens = block_tokens
        words = np.arange(1, self.word_count + 1, dtype=np.uint64)
        words *= np.uint64(0x9E3779B97F4A7C15)  # array arithmetic wraps silently
        words ^= words >> np.uint64(31)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(29)
        self._words: Words = words
        self._scratch: Words = np.empty_like(words)

    def _range(self, first_token: int, end_token: int) -> slice:
        assert 0 <= first_token <= end_token <= self.block_tokens
        return slice(
            first_token * self.word_count // self.block_tokens,
            end_token * self.word_count // self.block_tokens,
        )

    def fill(self, page: Words, key: bytes, first_token: int, end_token: int) -> None:
        """Write the words of tokens ``[first_token, end_token)`` of the block with this key."""
        part = self._range(first_token, end_token)
        np.bitwise_xor(self._words[part], _seed(key), out=page[part])

    def check(self, page: Words, key: bytes, end_token: int) -> bool:
        """Return whether every byte of the first ``end_token`` tokens is that of this key."""
        part = self._range(0, end_token)
        scratch = self._scratch[part]
        np.bitwise_xor(page[part], self._words[part], out=scratch)
        return bool((scratch == _seed(key)).all())


def _seed(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key[:8], "little"))


def tail_key(parent: bytes, tokens: bytes) -> bytes:
    """Return a key for a block that never fills: it has none in the store, but holds data."""
    return hashlib.sha256(b"kvstore.bench.tail" + parent + tokens).digest()
