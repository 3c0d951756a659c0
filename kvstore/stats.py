"""Counters, a latency histogram and the frozen snapshots a store hands out.

Counters start at zero and only rise (INV-801); gauges are named as such. A snapshot costs
O(levels x pool groups) and is taken without awaiting (INV-813).
"""

from __future__ import annotations

from dataclasses import dataclass, field


class LatencyHistogram:
    """A log-linear histogram of nanoseconds: 16 steps per power of two, under 7 % error."""

    __slots__ = ("counts", "max_ns", "sum_ns", "total")

    STEPS = 16
    BUCKETS = 64 * STEPS

    def __init__(self) -> None:
        self.counts = [0] * self.BUCKETS
        self.total = 0
        self.sum_ns = 0
        self.max_ns = 0

    @classmethod
    def bucket(cls, value_ns: int) -> int:
        """Return the bucket of a value; values below 16 ns have a bucket each."""
        if value_ns < cls.STEPS:
            return max(0, value_ns)
        shift = value_ns.bit_length() - 5
        return (shift + 1) * cls.STEPS + (value_ns >> shift) - cls.STEPS

    @classmethod
    def bucket_floor_ns(cls, bucket: int) -> int:
        """Return the smallest value of a bucket."""
        power, step = divmod(bucket, cls.STEPS)
        return step if power == 0 else (cls.STEPS + step) << (power - 1)

    def record(self, value_ns: int) -> None:
        """Count one value."""
        self.counts[self.bucket(value_ns)] += 1
        self.total += 1
        self.sum_ns += value_ns
        self.max_ns = max(self.max_ns, value_ns)

    def snapshot(self) -> LatencySnapshot:
        """Freeze the non-empty buckets."""
        pairs = tuple((self.bucket_floor_ns(i), n) for i, n in enumerate(self.counts) if n)
        return LatencySnapshot(pairs, self.total, self.sum_ns, self.max_ns)


@dataclass(frozen=True, slots=True)
class LatencySnapshot:
    """Frozen histogram: (bucket floor in ns, count) pairs in order."""

    buckets: tuple[tuple[int, int], ...] = ()
    total: int = 0
    sum_ns: int = 0
    max_ns: int = 0

    def percentile_ns(self, percent: float) -> int:
        """Return the value at ``percent`` (0..100), 0 for an empty histogram."""
        rank, seen = percent / 100 * self.total, 0
        for floor_ns, count in self.buckets:
            seen += count
            if seen >= rank and seen:
                return floor_ns
        return self.max_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStats:
    """One I/O class. INV-808: issued + promoted_in = done + failed + withdrawn + promoted_out
    + queued + in flight, all in bytes.
    """

    issued_bytes: int = 0
    promoted_in_bytes: int = 0
    promoted_out_bytes: int = 0
    done_bytes: int = 0
    failed_bytes: int = 0
    withdrawn_bytes: int = 0
    queued_bytes: int = 0  # gauge
    inflight_bytes: int = 0  # gauge
    transfers: int = 0
    pieces: int = 0
    promotions: int = 0
    aged_dispatches: int = 0
    skipped: int = 0  # transfers refused above the background cap (INV-111)
    read_bytes: int = 0  # payload plus header that moved from the device
    written_bytes: int = 0
    queue_wait: LatencySnapshot = field(default_factory=LatencySnapshot)
    service: LatencySnapshot = field(default_factory=LatencySnapshot)
    errors: dict[int, int] = field(default_factory=dict)  # errno -> count


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine in use, why, and what it did."""

    engine: str = ""
    fallback_reason: str = ""
    warnings: tuple[str, ...] = ()
    kernel_rings: int = 0
    ring_flags: tuple[str, ...] = ()
    ring_entries: int = 0
    threads: int = 0
    registered_memory_bytes: int = 0
    registered_buffers: bool = False
    huge_pages: bool = False
    bounds: dict[str, int] = field(default_factory=dict)
    direct_files: int = 0
    buffered_files: int = 0
    background_bytes: int = 0  # gauge: issued but not yet written (INV-112)
    classes: tuple[ClassStats, ClassStats, ClassStats] = field(
        default_factory=lambda: (ClassStats(), ClassStats(), ClassStats())
    )
    short_transfers: int = 0
    retries: int = 0
    direct_fallbacks: int = 0
    mismatches: int = 0
    deadlines: int = 0
    cancelled: int = 0
    tickets_taken: int = 0
    tickets_good: int = 0
    tickets_failed: int = 0
    wakeups: int = 0
    submit_calls: int = 0
    submit_ns_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One pool group on one level. INV-804: total = ready + draining + primaries + copies."""

    total: int = 0
    ready: int = 0  # gauge
    draining: int = 0  # gauge
    primaries: int = 0  # gauge
    copies: int = 0  # gauge: retained copies and shadows, pending ones included
    evictable: int = 0  # gauge: real pages only (INV-802)
    available: int = 0  # gauge: free + evictable + unreserved copies (INV-803)
    retained_copies: int = 0  # gauge
    kept: int = 0
    written_through: int = 0
    reused: int = 0
    reused_pending: int = 0
    reclaimed: int = 0
    died: int = 0
    copy_failed: int = 0
    released_by_resize: int = 0
    released_by_close: int = 0
    evicted: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Everything a store counts. ``pools[(level, group)]``; ``moved_bytes["d2h"]`` and kin are
    payload bytes per pair of tiers, ``h2disk:required`` and kin split writes by class (INV-807).
    """

    levels: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    pools: dict[tuple[str, str], PoolStats] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    matched_tokens: int = 0
    matched_tokens_by_level: dict[str, int] = field(default_factory=dict)
    write_through_issued: int = 0
    write_through_skipped: int = 0
    write_through_skipped_by: dict[str, int] = field(default_factory=dict)
    lost_pages: int = 0
    plans_refused: int = 0
    restores: int = 0
    restores_waited: int = 0
    gate_busy: int = 0
    gate_await_fallbacks: int = 0
    sessions_open: int = 0  # gauge
    pages: int = 0  # gauge
    persistent_pages: int = 0  # written and synced (persist_mode="strict", INV-927)
    recovered_pages: int = 0
    recovery_free_slots: dict[str, int] = field(default_factory=dict)  # by reason (INV-920)
    host_numa_node: int | None = None  # None: wherever the system put it
    host_mapped_bytes: int = 0  # gauge: host tier, staging and bounce slots, slack included
    host_parts_failed: int = 0  # parts of the host tier that were refused after opening (INV-906)
    open_seconds: float = 0.0  # how long opening took; the rest of the host tier arrives later
    disk_modes: dict[str, str] = field(default_factory=dict)  # per file (INV-130)
    core: str = ""  # whether the core runs compiled or from its Python source, and why
    health: str = "ok"
    engine: EngineStats = field(default_factory=EngineStats)
