"""The disk format: what is encoded is decoded again, and any damage is noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import FormatError
from kvstore.tiers import disk_format as fmt

digest = st.binary(min_size=32, max_size=32)
u64 = st.integers(0, 2**64 - 1)
identities = st.builds(
    fmt.SlotIdentity,
    fingerprint=digest,
    key=digest,
    parent_key=digest,
    block_index=u64,
    epoch=u64,
    pool_group=st.integers(0, 2**32 - 1),
    generation=u64,
    sequence=u64,
    payload_bytes=u64,
    checksum_algorithm=st.sampled_from([fmt.CHECKSUM_NONE, fmt.CHECKSUM_XXH3_64]),
)
superblocks = st.builds(
    fmt.Superblock,
    fingerprint=digest,
    slot_bytes=u64,
    slot_count=u64,
    page_bytes=u64,
    epoch=u64,
    pool_group=st.integers(0, 2**32 - 1),
    path_index=st.integers(0, 2**32 - 1),
    path_count=st.integers(0, 2**32 - 1),
)


@given(identities, u64)
def test_header_round_trips(identity: fmt.SlotIdentity, checksum: int) -> None:
    """A sealed header decodes to what was encoded (INV-919)."""
    header = fmt.seal_header(identity.encode(), checksum)
    assert len(header) == fmt.HEADER_BYTES
    assert fmt.decode_header(header) == fmt.SlotHeader(identity, checksum)


@given(identities, st.integers(0, 207 * 8 + 7))
def test_any_flipped_bit_of_a_header_is_noticed(identity: fmt.SlotIdentity, bit: int) -> None:
    """No single flipped bit in the used part of a header passes (INV-920)."""
    header = bytearray(fmt.seal_header(identity.encode(), 7))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        fmt.decode_header(bytes(header))


@given(superblocks)
def test_superblock_round_trips(superblock: fmt.Superblock) -> None:
    """Block 0 decodes to what was encoded (INV-925)."""
    block = superblock.encode()
    assert len(block) == fmt.SUPERBLOCK_BYTES
    assert fmt.Superblock.decode(block) == superblock


@given(superblocks, st.integers(0, 4096 * 8 - 1))
def test_any_flipped_bit_of_a_superblock_is_noticed(superblock: fmt.Superblock, bit: int) -> None:
    """The superblock checksum covers the whole block (INV-925)."""
    block = bytearray(superblock.encode())
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        fmt.Superblock.decode(bytes(block))


def test_header_layout_is_fixed() -> None:
    """The offsets are those of docs/disk-format.md; a change needs a new version."""
    identity = fmt.SlotIdentity(
        fingerprint=b"f" * 32,
        key=b"k" * 32,
        parent_key=b"p" * 32,
        block_index=0x0102,
        epoch=3,
        pool_group=4,
        generation=5,
        sequence=6,
        payload_bytes=4096,
    )
    raw = fmt.seal_header(identity.encode(), 0x11223344)
    record = np.frombuffer(raw, fmt.HEADER_DTYPE)[0]
    assert b"KVSTSLOT" == raw[0:8] == record["magic"].tobytes()
    assert 1 == int.from_bytes(raw[8:12], "little") == record["version"]
    assert 1 == int.from_bytes(raw[12:16], "little") == record["checksum_algorithm"]
    assert b"f" * 32 == raw[16:48] == record["fingerprint"].tobytes()
    assert b"k" * 32 == raw[48:80] == record["key"].tobytes()
    assert b"p" * 32 == raw[80:112] == record["parent_key"].tobytes()
    assert 0x0102 == int.from_bytes(raw[112:120], "little") == record["block_index"]
    assert 3 == int.from_bytes(raw[120:128], "little") == record["epoch"]
    assert 4 == int.from_bytes(raw[128:132], "little") == record["pool_group"]
    assert 0 == int.from_bytes(raw[132:136], "little") == record["flags"]
    assert 5 == int.from_bytes(raw[136:144], "little") == record["generation"]
    assert 6 == int.from_bytes(raw[144:152], "little") == record["sequence"]
    assert 4096 == int.from_bytes(raw[152:160], "little") == record["payload_bytes"]
    assert bytes(32) == raw[160:192]
    assert 0x11223344 == int.from_bytes(raw[192:200], "little") == record["payload_checksum"]
    assert xxhash.xxh3_64_intdigest(raw[:200]) == int.from_bytes(raw[200:208], "little")
    assert not any(raw[208:])


@given(st.lists(st.tuples(digest, digest, st.tuples(u64, u64, u64)), min_size=1, max_size=5))
def test_template_fills_the_identities_it_was_asked_for(
    pages: list[tuple[bytes, bytes, tuple[int, int, int]]],
) -> None:
    """The batch writer and the one-by-one encoder agree, also on strided records."""
    template = fmt.IdentityTemplate(
        fingerprint=b"f" * 32, epoch=9, pool_group=1, payload_bytes=8192
    )
    records = np.zeros(len(pages), dtype=[("x", "<u8"), ("identity", "u1", (192,))])
    keys, parents, numbers = zip(*pages, strict=True)
    template.fill(records["identity"], keys, parents, numbers)
    for row, (key, parent, (block_index, generation, sequence)) in zip(
        records["identity"], pages, strict=True
    ):
        expected = fmt.SlotIdentity(
            fingerprint=b"f" * 32,
            key=key,
            parent_key=parent,
            block_index=block_index,
            epoch=9,
            pool_group=1,
            generation=generation,
            sequence=sequence,
            payload_bytes=8192,
        )
        assert expected.encode() == row.tobytes()


def test_recovery_refuses_each_foreign_field() -> None:
    """Fingerprint, epoch, group, page size, partial tails and missing checksums: all refused."""
    identity = fmt.SlotIdentity(
        fingerprint=b"f" * 32,
        key=b"k" * 32,
        parent_key=b"p" * 32,
        block_index=1,
        epoch=3,
        pool_group=0,
        generation=1,
        sequence=1,
        payload_bytes=8192,
    )
    superblock = fmt.Superblock(
        fingerprint=b"f" * 32,
        slot_bytes=12288,
        slot_count=10,
        page_bytes=8192,
        epoch=3,
        pool_group=0,
    )

    def fits(**change: object) -> bool:
        changed = dataclasses.replace(identity, **change)  # type: ignore[arg-type]
        return fmt.fits_slot(fmt.SlotHeader(changed, 0), superblock, 8192)

    assert fits()
    assert not fits(fingerprint=b"g" * 32)
    assert not fits(epoch=4)
    assert not fits(pool_group=1)
    assert not fits(payload_bytes=4096)
    assert not fits(key=fmt.NO_KEY)
    assert not fits(checksum_algorithm=fmt.CHECKSUM_NONE)


def test_geometry_compares_all_but_count_and_epoch() -> None:
    """A file that was resized or cleared is still ours; any other difference makes it foreign."""
    one = fmt.Superblock(
        fingerprint=b"f" * 32, slot_bytes=8192, slot_count=4, page_bytes=4096, epoch=1, pool_group=0
    )
    assert one.has_geometry_of(dataclasses.replace(one, slot_count=9, epoch=5))
    for field in ("slot_bytes", "page_bytes", "pool_group", "path_index", "path_count"):
        assert not one.has_geometry_of(dataclasses.replace(one, **{field: 77}))
    assert not one.has_geometry_of(dataclasses.replace(one, fingerprint=b"g" * 32))
    assert 4096 + 4 * 8192 == fmt.file_bytes(4, 8192)
