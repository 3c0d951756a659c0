"""What native code does around the I/O of a page: seal before a write, verify after a read.

The layout is that of the slot header in ``docs/disk-format.md``; the values equal those of the C
side, because both are xxh3-64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore._uring.base import IDENTITY_BYTES, MISMATCH, OK, SubmitFlag
from kvstore.config import HEADER_BYTES

PAYLOAD_CHECKSUM_AT = 192
HEADER_CHECKSUM_AT = 200
Bytes = npt.NDArray[np.uint8]


def _put_u64(header: Bytes, at: int, value: int) -> None:
    header[at : at + 8] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)


def _get_u64(header: Bytes, at: int) -> int:
    return int.from_bytes(header[at : at + 8].tobytes(), "little")


def _digest(data: Bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data.data))


def seal(slot: Bytes, identity: Bytes, payload_bytes: int, flags: SubmitFlag) -> None:
    """Lay the identity down as the header of ``slot`` and fill in both checksums.

    Shapes: ``slot`` is (header + padded payload,) uint8, ``identity`` (192,) uint8.
    """
    header = slot[:HEADER_BYTES]
    header[:] = 0
    slot[HEADER_BYTES + payload_bytes :] = 0  # the padding: no stale memory is stored
    header[:IDENTITY_BYTES] = identity
    if flags & SubmitFlag.NO_CHECKSUM:
        checksum = 0
    else:
        payload = slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]
        checksum = _digest(payload)
    _put_u64(header, PAYLOAD_CHECKSUM_AT, checksum)
    _put_u64(
        header,
        HEADER_CHECKSUM_AT,
        _digest(header[:HEADER_CHECKSUM_AT]),
    )


def verify(slot: Bytes, identity: Bytes, payload_bytes: int, flags: SubmitFlag) -> int:
    """Return OK, or MISMATCH if identity, header checksum or payload checksum differ."""
    header = slot[:HEADER_BYTES]
    if not np.array_equal(header[:IDENTITY_BYTES], identity):
        return MISMATCH
    if flags & SubmitFlag.NO_CHECKSUM:
        return OK
    expected = _digest(header[:HEADER_CHECKSUM_AT])
    if _get_u64(header, HEADER_CHECKSUM_AT) != expected:
        return MISMATCH
    payload = slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]
    if _get_u64(header, PAYLOAD_CHECKSUM_AT) != _digest(payload):
        return MISMATCH
    return OK
