"""Block keys and the index types of the domain.

A block key is the SHA-256 of the parent's digest and the block's tokens as 32-bit little-endian
numbers; the root is the SHA-256 of the encoded scope (INV-316). Position and history are thereby
part of the key, and equal tokens under another salt or adapter never match (INV-317). Keys are
compared as whole digests: the match trusts the digest alone (INV-318).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

SlotId = NewType("SlotId", int)
PoolGroupIndex = NewType("PoolGroupIndex", int)
LevelIndex = NewType("LevelIndex", int)
BlockKey = NewType("BlockKey", bytes)

Tokens = Sequence[int] | npt.NDArray[np.integer]

_SCOPE_TAG = b"kvstore.scope.1"


def scope_key(salt: bytes = b"", adapter: bytes = b"") -> BlockKey:
    """Return the root of a prefix chain: the digest of the encoded scope (INV-316).

    Raises: TypeError: salt or adapter is not bytes.
    """
    for name, value in (("salt", salt), ("adapter", adapter)):
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"{name} must be bytes, got {type(value).__name__}")
    encoded = b"".join(
        (
            _SCOPE_TAG,
            len(salt).to_bytes(4, "little"),
            salt,
            len(adapter).to_bytes(4, "little"),
            adapter,
        )
    )
    return BlockKey(hashlib.sha256(encoded).digest())


def token_bytes(tokens: Tokens) -> bytes:
    """Encode tokens as 32-bit little-endian numbers.

    Raises: ValueError: a token does not fit into 32 unsigned bits (INV-318), or ``tokens`` is not
    one row of integers.
    """
    if isinstance(tokens, (list, tuple)):  # several times faster than by way of a numpy array
        try:
            packed = array("I", tokens)
        except OverflowError:
            raise ValueError("tokens: a token does not fit into 32 bits") from None
        except TypeError:
            raise ValueError("tokens must be one row of integers") from None
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()
    wide = np.asarray(tokens)
    if wide.ndim != 1:
        raise ValueError(f"tokens must be one row of integers, got {wide.ndim} dimensions")
    if wide.size == 0:
        return b""
    if wide.dtype.kind not in "iu":
        raise ValueError("tokens must be integers")
    if int(wide.min()) < 0 or int(wide.max()) > 0xFFFFFFFF:
        raise ValueError("tokens: a token does not fit into 32 bits")
    return wide.astype("<u4", copy=False).tobytes()


class KeyChain:
    """The keys of one token history, computed once and extended per block (INV-323).

    ``keys[i]`` is the key of block ``i``; only full blocks have one. ``hash_count`` counts the
    digests made, so that a test can prove that repeated probes hash nothing again.
    """

    __slots__ = ("_pending", "block_tokens", "hash_count", "keys", "root")

    def __init__(self, block_tokens: int, root: BlockKey) -> None:
        self.block_tokens = block_tokens
        self.root = root
        self.keys: list[BlockKey] = []
        self.hash_count = 0
        self._pending = b""

    @property
    def token_count(self) -> int:
        """Tokens fed so far, the partial tail included."""
        return len(self.keys) * self.block_tokens + len(self._pending) // 4

    def extend(self, tokens: Tokens) -> int:
        """Append tokens and return how many block keys that completed.

        Cost: one digest per completed block. Raises: ValueError: a token outside 32 bits; nothing
        is changed then.
        """
        data = self._pending + token_bytes(tokens)
        block_bytes = self.block_tokens * 4
        count = len(data) // block_bytes
        parent: bytes = self.keys[-1] if self.keys else self.root
        append, sha256 = self.keys.append, hashlib.sha256
        for start in range(0, count * block_bytes, block_bytes):
            parent = sha256(parent + data[start : start + block_bytes]).digest()
            append(BlockKey(parent))
        self.hash_count += count
        self._pending = data[count * block_bytes :]
        return count

    def fork(self) -> KeyChain:
        """Return an independent chain with the same history; no digest is made again."""
        twin = KeyChain(self.block_tokens, self.root)
        twin.keys = self.keys.copy()
        twin._pending = self._pending
        return twin
