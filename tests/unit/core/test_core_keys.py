"""Block keys (INV-316 to INV-318, INV-323)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvstore.keys import KeyChain, scope_key, token_bytes

EMPTY_SCOPE = "ef73778752b8b1136edcf9b13832e772333d6e2ac32a76a3b620dbad10d81f17"
FIRST_BLOCKS = [
    "203626cf78ff18b2247c7787c047058d92eb372237fa207e3afc3869a6e711d8",
    "c951394f73fce009ea709919666a72f2fded085a8f9e1cffed94d7c73fdce2cb",
]


def test_root_is_the_digest_of_the_encoded_scope() -> None:
    """INV-316: lengths are part of the encoding, so salt and adapter cannot be confused."""
    encoded = (
        b"kvstore.scope.1" + (2).to_bytes(4, "little") + b"ab" + (1).to_bytes(4, "little") + b"c"
    )
    assert scope_key(b"ab", b"c") == hashlib.sha256(encoded).digest()
    assert scope_key(b"ab", b"c") != scope_key(b"a", b"bc")


def test_fixed_vectors() -> None:
    """INV-316: digests that must never change, or a warm restart finds nothing."""
    assert scope_key().hex() == EMPTY_SCOPE
    chain = KeyChain(4, scope_key())
    chain.extend([1, 2, 3, 4, 5, 6, 7, 8])
    assert [key.hex() for key in chain.keys] == FIRST_BLOCKS


def test_each_block_chains_on_its_parent() -> None:
    """INV-316: position and history are part of the key."""
    chain = KeyChain(2, scope_key())
    chain.extend([7, 7, 7, 7])
    first = hashlib.sha256(scope_key() + token_bytes([7, 7])).digest()
    assert chain.keys == [first, hashlib.sha256(first + token_bytes([7, 7])).digest()]
    assert chain.keys[0] != chain.keys[1]


def test_scopes_never_share_a_key() -> None:
    """INV-317: equal tokens under another salt or adapter."""
    keys = set()
    for scope in (scope_key(), scope_key(b"a"), scope_key(b"", b"a"), scope_key(b"a", b"a")):
        chain = KeyChain(2, scope)
        chain.extend(range(8))
        keys.update(chain.keys)
    assert len(keys) == 16


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [0.5], np.array([2**40])])
def test_a_token_outside_32_bits_raises_and_changes_nothing(tokens: object) -> None:
    """INV-318: digests are whole, 256 bits, and tokens are 32 bits."""
    chain = KeyChain(1, scope_key())
    with pytest.raises(ValueError, match="token"):
        chain.extend(tokens)  # type: ignore[arg-type]
    assert (chain.keys, chain.token_count) == ([], 0)
    chain.extend([0, (1 << 32) - 1])
    assert [len(key) for key in chain.keys] == [32, 32]


def test_the_chain_is_computed_once_and_extended_per_block() -> None:
    """INV-323: the number of digests equals the number of blocks."""
    chain = KeyChain(4, scope_key())
    assert chain.extend(range(10)) == 2
    assert (chain.hash_count, chain.token_count) == (2, 10)
    assert chain.extend([10, 11]) == 1
    assert chain.hash_count == 3
    twin = chain.fork()
    assert twin.hash_count == 0
    twin.extend([1, 2, 3, 4])
    chain.extend([1, 2, 3, 4])
    assert twin.keys == chain.keys
    assert chain.hash_count == 4


def test_pieces_of_any_size_give_the_same_chain() -> None:
    """INV-323: the partial tail waits for its block."""
    whole = KeyChain(3, scope_key())
    whole.extend(range(20))
    pieces = KeyChain(3, scope_key())
    for start, end in ((0, 1), (1, 1), (1, 8), (8, 9), (9, 20)):
        pieces.extend(np.arange(start, end, dtype=np.int64))
    assert pieces.keys == whole.keys
