"""What the disk files look like: encode and decode, nothing else.

A slot file is a superblock of 4 KiB followed by equal slots. A slot is a 4 KiB header directly
before the payload, one contiguous transfer. The first 192 bytes of the header are the *identity*:
everything that says which page of which store this is, without any checksum. A submission carries
the identity expected; native code lays it down and seals it on a write (both checksums), and
compares it on a read, so a torn, stale or misdirected write is a miss and never wrong data
(INV-914, INV-919, INV-927). The offset tables and the crash argument are in
``docs/disk-format.md``. This module is pure: it does no I/O and knows no clock.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.config import ALIGNMENT_BYTES, HEADER_BYTES
from kvstore.errors import FormatError

VERSION: Final = 1
SLOT_MAGIC: Final = b"KVSTSLOT"
SUPERBLOCK_MAGIC: Final = b"KVSTSUPR"
IDENTITY_BYTES: Final = 192
HEADER_USED_BYTES: Final = 208
SUPERBLOCK_BYTES: Final = 4096
CHECKSUM_NONE: Final = 0
CHECKSUM_XXH3_64: Final = 1
NO_KEY: Final = bytes(32)  # a partial tail has no key, a first block has no parent

#: The header as one record; 208 bytes are used, the rest of the 4 KiB is zero.
HEADER_DTYPE: Final = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "checksum_algorithm",
            "fingerprint",
            "key",
            "parent_key",
            "block_index",
            "epoch",
            "pool_group",
            "flags",
            "generation",
            "sequence",
            "payload_bytes",
            "payload_checksum",
            "header_checksum",
        ],
        "formats": [
            ("u1", (8,)),
            "<u4",
            "<u4",
            ("u1", (32,)),
            ("u1", (32,)),
            ("u1", (32,)),
            "<u8",
            "<u8",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
        ],
        "offsets": [0, 8, 12, 16, 48, 80, 112, 120, 128, 132, 136, 144, 152, 192, 200],
        "itemsize": HEADER_BYTES,
    }
)
_HEADER_CHECKSUM_OFFSET: Final = 200
_IDENTITY: Final = struct.Struct("<8sII32s32s32sQQIIQQQ32x")
_CHECKSUMS: Final = struct.Struct("<QQ")
_SUPERBLOCK: Final = struct.Struct("<8sII32sQQQQIIII")
_SUPERBLOCK_CHECKSUM_OFFSET: Final = 4088

Identities = npt.NDArray[np.uint8]

assert _IDENTITY.size == IDENTITY_BYTES


def fingerprint_digest(fingerprint: str | None) -> bytes:
    """Return the SHA-256 of a model fingerprint; 32 zero bytes without one (anonymous files)."""
    if fingerprint is None:
        return bytes(32)
    return hashlib.sha256(fingerprint.encode("utf-8")).digest()


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """Which page of which store a slot holds: the part of the header before the checksums."""

    fingerprint: bytes
    key: bytes
    parent_key: bytes
    block_index: int
    epoch: int
    pool_group: int
    generation: int
    sequence: int
    payload_bytes: int
    checksum_algorithm: int = CHECKSUM_XXH3_64

    def encode(self) -> bytes:
        """Return the 192 identity bytes a submission carries."""
        return _IDENTITY.pack(
            SLOT_MAGIC,
            VERSION,
            self.checksum_algorithm,
            self.fingerprint,
            self.key,
            self.parent_key,
            self.block_index,
            self.epoch,
            self.pool_group,
            0,
            self.generation,
            self.sequence,
            self.payload_bytes,
        )


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """A decoded header whose own checksum is good; the payload is not proved yet (INV-919)."""

    identity: SlotIdentity
    payload_checksum: int

    @property
    def is_partial(self) -> bool:
        """A page without a key was a partial tail, which no restart takes in (INV-921)."""
        return self.identity.key == NO_KEY


def seal_header(identity: bytes, payload_checksum: int) -> bytes:
    """Return the whole 4 KiB header as native code writes it on SEAL."""
    assert len(identity) == IDENTITY_BYTES
    used = identity + payload_checksum.to_bytes(8, "little")
    used += xxhash.xxh3_64_intdigest(used).to_bytes(8, "little")
    return used.ljust(HEADER_BYTES, b"\0")


def decode_header(header: bytes | memoryview) -> SlotHeader:
    """Decode and check one slot header.

    Raises: FormatError: short, foreign, of another version, or its checksum differs. Whether
    fingerprint, epoch and group are the caller's is the caller's question.
    """
    raw = bytes(header[: _HEADER_CHECKSUM_OFFSET + 8])
    if len(raw) < _HEADER_CHECKSUM_OFFSET + 8:
        raise FormatError(f"slot header is short: {len(raw)} bytes")
    payload_checksum, header_checksum = _CHECKSUMS.unpack_from(raw, IDENTITY_BYTES)
    magic, version, algorithm, fingerprint, key, parent_key, *numbers = _IDENTITY.unpack_from(raw)
    if magic != SLOT_MAGIC:
        raise FormatError("slot header has a foreign magic")
    if version != VERSION:
        raise FormatError(f"slot header version is {version}, this release reads {VERSION}")
    if xxhash.xxh3_64_intdigest(raw[:_HEADER_CHECKSUM_OFFSET]) != header_checksum:
        raise FormatError("slot header checksum differs")
    block_index, epoch, pool_group, flags, generation, sequence, payload_bytes = numbers
    if flags:
        raise FormatError(f"slot header has unknown flags {flags:#x}")
    identity = SlotIdentity(
        fingerprint=fingerprint,
        key=key,
        parent_key=parent_key,
        block_index=block_index,
        epoch=epoch,
        pool_group=pool_group,
        generation=generation,
        sequence=sequence,
        payload_bytes=payload_bytes,
        checksum_algorithm=algorithm,
    )
    return SlotHeader(identity, payload_checksum)


class IdentityTemplate:
    """Writes identities into submission records with a handful of numpy stores, not one by one.

    The constant part (magic, version, fingerprint, epoch, group, payload length) is laid down
    once; a batch adds keys, block indices, generations and sequence numbers.
    """

    __slots__ = ("_identity",)

    def __init__(
        self,
        *,
        fingerprint: bytes,
        epoch: int,
        pool_group: int,
        payload_bytes: int,
        checksum: bool = True,
    ) -> None:
        algorithm = CHECKSUM_XXH3_64 if checksum else CHECKSUM_NONE
        self._identity = np.frombuffer(
            SlotIdentity(
                fingerprint=fingerprint,
                key=NO_KEY,
                parent_key=NO_KEY,
                block_index=0,
                epoch=epoch,
                pool_group=pool_group,
                generation=0,
                sequence=0,
                payload_bytes=payload_bytes,
                checksum_algorithm=algorithm,
            ).encode(),
            dtype=np.uint8,
        )

    def fill(
        self,
        into: Identities,
        keys: Sequence[bytes],
        parent_keys: Sequence[bytes],
        numbers: Sequence[tuple[int, int, int]],
    ) -> None:
        """Fill ``into`` with one identity per page.

        Shapes: ``into`` is (page_count, 192) uint8 and may be strided; ``numbers`` holds
        (block_index, generation, sequence) per page. Cost: O(page_count), six numpy stores.
        """
        count = len(keys)
        assert into.shape == (count, IDENTITY_BYTES)
        assert len(parent_keys) == len(numbers) == count
        into[:] = self._identity
        into[:, 48:80] = np.frombuffer(b"".join(keys), np.uint8).reshape(count, 32)
        into[:, 80:112] = np.frombuffer(b"".join(parent_keys), np.uint8).reshape(count, 32)
        wide = np.array(numbers, dtype="<u8").reshape(count, 3)
        as_bytes = wide.view(np.uint8).reshape(count, 24)
        into[:, 112:120] = as_bytes[:, 0:8]
        into[:, 136:152] = as_bytes[:, 8:24]


@dataclass(frozen=True, slots=True)
class Superblock:
    """Block 0 of a slot file: whose slots follow, in which geometry, of which epoch (INV-925)."""

    fingerprint: bytes
    slot_bytes: int
    slot_count: int
    page_bytes: int
    epoch: int
    pool_group: int
    path_index: int = 0
    path_count: int = 1

    def encode(self) -> bytes:
        """Return the 4 KiB of block 0."""
        used = _SUPERBLOCK.pack(
            SUPERBLOCK_MAGIC,
            VERSION,
            0,
            self.fingerprint,
            self.slot_bytes,
            self.slot_count,
            self.page_bytes,
            self.epoch,
            self.pool_group,
            0,
            self.path_index,
            self.path_count,
        )
        body = used.ljust(_SUPERBLOCK_CHECKSUM_OFFSET, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @classmethod
    def decode(cls, block: bytes | memoryview) -> Superblock:
        """Decode and check block 0.

        Raises: FormatError: short, foreign, of another version, or its checksum differs.
        """
        raw = bytes(block[:SUPERBLOCK_BYTES])
        if len(raw) < SUPERBLOCK_BYTES:
            raise FormatError(f"superblock is short: {len(raw)} bytes")
        body = raw[:_SUPERBLOCK_CHECKSUM_OFFSET]
        magic, version, _, fingerprint, *numbers = _SUPERBLOCK.unpack_from(raw)
        if magic != SUPERBLOCK_MAGIC:
            raise FormatError("superblock has a foreign magic")
        if version != VERSION:
            raise FormatError(f"superblock version is {version}, this release reads {VERSION}")
        checksum = int.from_bytes(raw[_SUPERBLOCK_CHECKSUM_OFFSET:], "little")
        if xxhash.xxh3_64_intdigest(body) != checksum:
            raise FormatError("superblock checksum differs")
        slot_bytes, slot_count, page_bytes, epoch, pool_group, _, path_index, path_count = numbers
        return cls(
            fingerprint=fingerprint,
            slot_bytes=slot_bytes,
            slot_count=slot_count,
            page_bytes=page_bytes,
            epoch=epoch,
            pool_group=pool_group,
            path_index=path_index,
            path_count=path_count,
        )

    def has_geometry_of(self, other: Superblock) -> bool:
        """Return whether slots of ``other`` can be read in place: all but count and epoch agree."""
        return (
            self.fingerprint == other.fingerprint
            and self.slot_bytes == other.slot_bytes
            and self.page_bytes == other.page_bytes
            and self.pool_group == other.pool_group
            and self.path_index == other.path_index
            and self.path_count == other.path_count
        )


def slot_offset(slot_index: int, slot_bytes: int) -> int:
    """Return the file offset of a slot's header; slots follow the superblock."""
    return SUPERBLOCK_BYTES + slot_index * slot_bytes


def file_bytes(slot_count: int, slot_bytes: int) -> int:
    """Return the size of a slot file."""
    assert slot_bytes % ALIGNMENT_BYTES == 0
    return slot_offset(slot_count, slot_bytes)


def fits_slot(header: SlotHeader, expected: Superblock, page_bytes: int) -> bool:
    """Return whether recovery may take a slot in: key, version, epoch, fingerprint (INV-919)."""
    identity = header.identity
    return (
        not header.is_partial
        and identity.fingerprint == expected.fingerprint
        and identity.epoch == expected.epoch
        and identity.pool_group == expected.pool_group
        and identity.payload_bytes == page_bytes
        and identity.checksum_algorithm == CHECKSUM_XXH3_64
    )
