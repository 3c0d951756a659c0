"""Page patterns: bytes derived from a key, so that a stale, mixed-up or lost page is found.

Each 64-bit word of a page depends on the key and on its own position; a page of another key, a
page shifted by one word and a page torn at any word all differ.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def pattern(key: bytes | str | int, page_bytes: int) -> Bytes:
    """Return the ``page_bytes`` bytes that belong to ``key``.

    Shapes: (page_bytes,) uint8. ``key`` is a block key, or any text or number in a test.
    """
    if not isinstance(key, bytes):
        key = str(key).encode()
    seed = np.frombuffer(hashlib.sha256(key).digest()[:8], "<u8")[0]
    word_count = -(-page_bytes // 8)
    with np.errstate(over="ignore"):
        words = np.arange(1, word_count + 1, dtype=np.uint64) * _STEP + seed
        words ^= words >> np.uint64(31)
        words *= _MIX
        words ^= words >> np.uint64(29)
    page: Bytes = words.astype("<u8").view(np.uint8)[:page_bytes].copy()
    return page


def check_pattern(key: bytes | str | int, data: Any) -> None:
    """Raise AssertionError naming the first wrong byte unless ``data`` is the page of ``key``."""
    found = np.asarray(data).view(np.uint8).reshape(-1)
    expected = pattern(key, found.size)
    if np.array_equal(expected, found):
        return
    wrong = np.flatnonzero(expected != found)
    first = int(wrong[0])
    name = key.hex()[:16] if isinstance(key, bytes) else str(key)
    raise AssertionError(
        f"page {name}: byte {first} is {found[first]:#04x}, not {expected[first]:#04x}"
        f" ({wrong.size} of {found.size} bytes differ)"
    )
