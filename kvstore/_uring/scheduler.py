"""The scheduler of ``sched.c`` by itself, on explicit time: for simulation and for tests.

Engines call the C functions from their own threads; here Python drives the same code, so what is
learnt in virtual time holds for the real order (INV-135).
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

from kvstore._uring._ffi import ffi, lib
from kvstore.config import IoClass, IoConfig
from kvstore.stats import ClassStats, LatencyHistogram, LatencySnapshot

READ_LINGER_NS = 2_000_000  # INV-136: how long a finished read counts as in flight (ADR 0017)
POLICIES = {"kvstore": 0, "upstream": 1, "fifo": 2}
ENOBUFS, ENOMEM = -105, -12


class DispatchedPiece(NamedTuple):
    """A piece that is now in the device; ``offset`` is inside its transfer, header included."""

    piece: int
    transfer: int
    offset: int
    length: int
    io_class: int
    opcode: int
    aged: bool
    again: bool


@final
class Scheduler:
    """A thin, checked wrapper; transfers are small numbers that the caller hands out.

    Ownership: the C object lives as long as this one.
    """

    __slots__ = ("_handle", "_piece")

    def __init__(
        self, config: IoConfig | None = None, *, depth: int | None = None, policy: str = "kvstore"
    ) -> None:
        config = config or IoConfig()
        record = ffi.new("kvs_sched_config *")
        record.total_bytes = config.inflight_bytes
        record.required_bytes = config.required_inflight_bytes
        record.background_bytes = config.background_inflight_bytes
        record.background_bytes_max = config.background_bytes_max
        record.required_age_ns = round(config.required_age * 1e9)
        record.background_age_ns = round(config.background_age * 1e9)
        record.read_linger_ns = READ_LINGER_NS
        record.read_piece_bytes = config.read_piece_bytes
        record.write_piece_bytes = config.write_piece_bytes
        record.background_turn = config.background_turn
        record.depth = depth or config.ring_entries
        record.policy = POLICIES[policy]
        handle = lib.kvs_sched_new(record)
        if handle == ffi.NULL:
            raise MemoryError("no memory for a scheduler")
        self._handle: Any = ffi.gc(handle, lib.kvs_sched_free)
        self._piece: Any = ffi.new("kvs_piece *")

    def add(self, transfer: int, io_class: int, opcode: int, header: int, length: int) -> bool:
        """Announce a transfer; False above the background cap (INV-111)."""
        result = lib.kvs_sched_add(self._handle, transfer, io_class, opcode, header, length)
        if result == ENOMEM:
            raise MemoryError("no memory for a transfer")
        return bool(result == 0)

    def ready(self, transfer: int, now_ns: int) -> None:
        """Queue the pieces of an announced transfer."""
        lib.kvs_sched_ready(self._handle, transfer, now_ns)

    def promote(self, transfer: int, now_ns: int) -> bool:
        """Raise a background transfer to required; False if nothing changed (INV-110)."""
        return bool(lib.kvs_sched_promote(self._handle, transfer, now_ns))

    def withdraw(self, transfer: int) -> int:
        """Take all queued pieces out; returns their bytes."""
        return int(lib.kvs_sched_withdraw(self._handle, transfer))

    def next(self, now_ns: int) -> DispatchedPiece | None:
        """Return the next piece, which is in the device from now on, or None."""
        if not lib.kvs_sched_next(self._handle, now_ns, self._piece):
            return None
        piece = self._piece
        return DispatchedPiece(
            piece=piece.piece,
            transfer=piece.transfer,
            offset=piece.offset,
            length=piece.length,
            io_class=piece.io_class,
            opcode=piece.opcode,
            aged=bool(piece.aged),
            again=bool(piece.again),
        )

    def peek(self, now_ns: int) -> bool:
        """Tell whether `next` would return a piece."""
        return bool(lib.kvs_sched_peek(self._handle, now_ns))

    def done(self, piece: int, now_ns: int, *, ok: bool) -> None:
        """A piece left the device for good."""
        lib.kvs_sched_done(self._handle, piece, ok, now_ns)

    def again(self, piece: int, done_bytes: int, now_ns: int) -> None:
        """A piece came back short; its rest goes to the head of its queue (INV-116)."""
        lib.kvs_sched_again(self._handle, piece, done_bytes, now_ns)

    def queued_bytes(self, transfer: int) -> int:
        """Bytes of a transfer that are not in the device and not done."""
        return int(lib.kvs_sched_queued(self._handle, transfer))

    def inflight(self, transfer: int) -> int:
        """Pieces of a transfer in the device."""
        return int(lib.kvs_sched_inflight(self._handle, transfer))

    def remove(self, transfer: int) -> None:
        """Forget a transfer with nothing queued and nothing in the device."""
        lib.kvs_sched_remove(self._handle, transfer)

    @property
    def background_bytes(self) -> int:
        """Bytes charged against the cap."""
        return int(lib.kvs_sched_background_bytes(self._handle))

    @property
    def background_room(self) -> int:
        """Bytes left under the cap."""
        return int(lib.kvs_sched_background_room(self._handle))

    def class_stats(self, io_class: IoClass, errors: dict[int, int]) -> ClassStats:
        """Return the counters of one class; ``errors`` is what the caller counted."""
        counts: Any = ffi.new("kvs_class_counts *")
        wait: Any = ffi.new("kvs_histogram *")
        service: Any = ffi.new("kvs_histogram *")
        lib.kvs_sched_count(self._handle, io_class, counts)
        lib.kvs_sched_histogram(self._handle, io_class, lib.KVS_WAIT, wait)
        lib.kvs_sched_histogram(self._handle, io_class, lib.KVS_SERVICE, service)
        return class_stats(counts, wait, service, dict(errors))


def class_stats(counts: Any, wait: Any, service: Any, errors: dict[int, int]) -> ClassStats:
    """Turn the C records of one class into a snapshot."""
    return ClassStats(
        issued_bytes=counts.issued_bytes,
        promoted_in_bytes=counts.promoted_in_bytes,
        promoted_out_bytes=counts.promoted_out_bytes,
        done_bytes=counts.done_bytes,
        failed_bytes=counts.failed_bytes,
        withdrawn_bytes=counts.withdrawn_bytes,
        queued_bytes=counts.queued_bytes,
        inflight_bytes=counts.inflight_bytes,
        transfers=counts.transfers,
        pieces=counts.pieces,
        promotions=counts.promotions,
        aged_dispatches=counts.aged,
        skipped=counts.skipped,
        read_bytes=counts.read_bytes,
        written_bytes=counts.written_bytes,
        queue_wait=_latency(wait),
        service=_latency(service),
        errors=errors,
    )


def _latency(record: Any) -> LatencySnapshot:
    pairs = tuple(
        (LatencyHistogram.bucket_floor_ns(bucket), count)
        for bucket, count in enumerate(ffi.unpack(record.counts, LatencyHistogram.BUCKETS))
        if count
    )
    return LatencySnapshot(pairs, record.total, record.sum_ns, record.max_ns)
