"""Latency and bandwidth statistics of an I/O run, taken in batches.

A histogram like fio's: log-linear, 64 steps per power of two (under 1.6 % error), exact minimum,
maximum, mean and deviation. Values arrive as arrays, so the cost per transfer is a fraction of a
microsecond and the memory does not grow with the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.stats import LatencySnapshot

Ns = npt.NDArray[np.int64]

PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)
_STEP_BITS = 6
_STEPS = 1 << _STEP_BITS
_BUCKETS = (64 - _STEP_BITS) * _STEPS


def bucket_of(values: Ns) -> Ns:
    """Return the bucket of each value: (count,) int64, values below 64 ns have one each."""
    exponent = np.frexp(values.astype(np.float64))[1].astype(np.int64)  # bit length
    shift = np.maximum(exponent - (_STEP_BITS + 1), 0)
    return np.where(shift == 0, values, shift * _STEPS + (values >> shift))


def bucket_middle_ns(bucket: int) -> int:
    """Return the middle of a bucket, as fio reports it."""
    if bucket < 2 * _STEPS:
        return bucket
    shift = bucket // _STEPS - 1
    floor = (bucket - shift * _STEPS) << shift
    return floor + (1 << shift) // 2


class Latencies:
    """A histogram that is fed arrays of nanoseconds."""

    __slots__ = (
        "_counts",
        "_pending",
        "_pending_count",
        "_square_sum",
        "_sum",
        "_max_ns",
        "_min_ns",
        "_total",
    )

    FLUSH_AT = 1 << 15

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self._pending: list[Ns] = []
        self._pending_count = 0
        self._sum = 0.0
        self._square_sum = 0.0
        self._total = 0
        self._min_ns = 0
        self._max_ns = 0

    def add(self, values: Ns) -> None:
        """Take (count,) int64 nanoseconds. Ownership: keeps the array until the next flush."""
        self._pending.append(values)
        self._pending_count += len(values)
        if self._pending_count >= self.FLUSH_AT or len(self._pending) >= self.FLUSH_AT // 8:
            self.flush()

    def flush(self) -> None:
        """Count what was added since the last flush."""
        if not self._pending_count:
            self._pending.clear()
            return
        values = np.maximum(np.concatenate(self._pending), 0)
        self._pending.clear()
        self._pending_count = 0
        self._counts += np.bincount(bucket_of(values), minlength=_BUCKETS)
        as_float = values.astype(np.float64)
        self._sum += float(as_float.sum())
        self._square_sum += float((as_float * as_float).sum())
        low, high = int(values.min()), int(values.max())
        self._min_ns = low if not self._total else min(self._min_ns, low)
        self._max_ns = max(self._max_ns, high)
        self._total += len(values)

    def merge(self, other: Latencies) -> None:
        """Add the counts of another histogram."""
        self.flush()
        if not other.total:
            return
        self._counts += other._counts
        self._sum += other._sum
        self._square_sum += other._square_sum
        self._min_ns = other._min_ns if not self._total else min(self._min_ns, other._min_ns)
        self._max_ns = max(self._max_ns, other._max_ns)
        self._total += other._total

    @property
    def total(self) -> int:
        """How many values there are."""
        self.flush()
        return self._total

    @property
    def min_ns(self) -> int:
        """The smallest value, 0 without values."""
        self.flush()
        return self._min_ns

    @property
    def max_ns(self) -> int:
        """The largest value, 0 without values."""
        self.flush()
        return self._max_ns

    @property
    def mean_ns(self) -> float:
        """The mean, 0 without values."""
        return self._sum / self.total if self.total else 0.0

    @property
    def stddev_ns(self) -> float:
        """The standard deviation of the sample, 0 below two values."""
        if self.total < 2:
            return 0.0
        spread = self._square_sum - self._sum * self._sum / self.total
        return math.sqrt(max(spread, 0.0) / (self.total - 1))

    def percentile_ns(self, percent: float) -> int:
        """Return the value at ``percent`` (0..100), 0 without values."""
        if not self.total:
            return 0
        rank = max(1, math.ceil(percent / 100 * self.total - 1e-9))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(max(bucket_middle_ns(bucket), self.min_ns), self.max_ns)


@dataclass(slots=True)
class Direction:
    """What one direction (read or write) of a job did inside the measured window."""

    io_bytes: int = 0
    total_ios: int = 0
    failed_ios: int = 0
    errors: dict[int, int] = field(default_factory=dict)
    slat: Latencies = field(default_factory=Latencies)
    clat: Latencies = field(default_factory=Latencies)
    lat: Latencies = field(default_factory=Latencies)
    bw_samples: list[float] = field(default_factory=list)  # bytes per second
    iops_samples: list[float] = field(default_factory=list)

    def merge(self, other: Direction) -> None:
        """Add another clone's figures; samples of one moment are added up."""
        self.io_bytes += other.io_bytes
        self.total_ios += other.total_ios
        self.failed_ios += other.failed_ios
        for status, count in other.errors.items():
            self.errors[status] = self.errors.get(status, 0) + count
        for name in ("slat", "clat", "lat"):
            getattr(self, name).merge(getattr(other, name))
        self.bw_samples = _added(self.bw_samples, other.bw_samples)
        self.iops_samples = _added(self.iops_samples, other.iops_samples)


def _added(left: list[float], right: list[float]) -> list[float]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return [value + (shorter[i] if i < len(shorter) else 0.0) for i, value in enumerate(longer)]


def snapshot_since(now: LatencySnapshot, before: LatencySnapshot) -> LatencySnapshot:
    """Return the part of a growing histogram that was recorded after ``before``.

    The maximum of the part is not known; it is the floor of its highest bucket.
    """
    old = dict(before.buckets)
    pairs = tuple((floor, count - old.get(floor, 0)) for floor, count in now.buckets)
    left = tuple((floor, count) for floor, count in pairs if count > 0)
    highest = left[-1][0] if left else 0
    maximum = now.max_ns if now.max_ns > before.max_ns else highest
    return LatencySnapshot(left, now.total - before.total, now.sum_ns - before.sum_ns, maximum)


def median(values: list[float]) -> float:
    """Return the median, 0.0 of nothing."""
    return float(np.median(values)) if values else 0.0
