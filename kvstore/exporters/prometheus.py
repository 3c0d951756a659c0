"""A Prometheus collector over ``stats()``; needs the extra ``prometheus``.

Nothing hooks into the hot path: a scrape takes one frozen snapshot and turns it into metric
families. The names are part of the contract with dashboards; ``METRICS`` is the whole list, and
``docs/operating.md`` prints it.

    from kvstore.exporters.prometheus import register
    register(store)                                  # in the coroutine that opened the store
    prometheus_client.start_http_server(9200, addr="127.0.0.1")
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector, CollectorRegistry

from kvstore.config import IoClass
from kvstore.stats import LatencySnapshot, PoolStats, StoreStats

#: Name without the suffix Prometheus adds, kind, labels, help. Order is that of the scrape.
METRICS: Final[dict[str, tuple[str, tuple[str, ...], str]]] = {
    "kvstore_up": ("gauge", (), "1 while the store is healthy."),
    "kvstore_stale": ("gauge", (), "1 if the loop did not answer and older values are shown."),
    "kvstore_engine_info": (
        "gauge",
        ("engine", "fallback_reason"),
        "1; the labels name the disk engine in use and why it is not the first choice.",
    ),
    "kvstore_io_warnings": (
        "gauge",
        (),
        "What the engine does without; stats().engine.warnings says what.",
    ),
    "kvstore_io_threads": ("gauge", (), "Native threads of the engine."),
    "kvstore_io_kernel_rings": ("gauge", (), "io_uring instances; 0 without any."),
    "kvstore_io_ring_entries": ("gauge", (), "Pieces that may be in flight at once."),
    "kvstore_sessions": ("gauge", (), "Open sessions."),
    "kvstore_pages": ("gauge", (), "Pages the store knows."),
    "kvstore_persistent_pages": (
        "counter",
        (),
        "Pages written and synced, with persist_mode strict.",
    ),
    "kvstore_recovered_pages": ("counter", (), "Pages that the restart took in."),
    "kvstore_recovery_free_slots": (
        "counter",
        ("reason",),
        "Slots that the restart found free, by reason.",
    ),
    "kvstore_core_info": ("gauge", ("core",), "1; the label says whether the core runs compiled."),
    "kvstore_open_seconds": ("gauge", (), "How long opening took; the host tier may arrive later."),
    "kvstore_host_mapped_bytes": (
        "gauge",
        (),
        "Host memory mapped: tier, staging, bounce slots, slack.",
    ),
    "kvstore_host_parts_failed": (
        "counter",
        (),
        "Parts of the host tier that were refused after opening.",
    ),
    "kvstore_host_numa_node": ("gauge", (), "The node the host tier is bound to, -1 without one."),
    "kvstore_matched_tokens": ("counter", ("level",), "Tokens found in the cache, by level."),
    "kvstore_restores": ("counter", (), "Restores started."),
    "kvstore_restores_waited": ("counter", (), "Restores that waited for room."),
    "kvstore_lost_pages": ("counter", (), "Pages that were dropped although a session held them."),
    "kvstore_plans_refused": ("counter", (), "Plans refused because a level had no room."),
    "kvstore_pool_slots": ("gauge", ("level", "group"), "Slots of a pool group on a level."),
    "kvstore_slots": (
        "gauge",
        ("level", "group", "state"),
        "Slots by state: ready, draining, primary, copy; they add up to kvstore_pool_slots.",
    ),
    "kvstore_evictable_slots": ("gauge", ("level", "group"), "Slots of pages that may move down."),
    "kvstore_available_slots": (
        "gauge",
        ("level", "group"),
        "Slots a new plan could have: free, evictable, and copies that are not reserved.",
    ),
    "kvstore_retained_copies": ("gauge", ("level", "group"), "Copies kept below a primary."),
    "kvstore_copies": (
        "counter",
        ("level", "group", "event"),
        "What became of copies: kept, written_through, reused, reused_pending, reclaimed, died, "
        "failed, released_by_resize, released_by_close.",
    ),
    "kvstore_evicted_pages": ("counter", ("level", "group"), "Pages moved down from a level."),
    "kvstore_dropped_pages": ("counter", ("level", "group"), "Pages forgotten for want of room."),
    "kvstore_refused": ("counter", ("level", "group"), "Requests for slots that were refused."),
    "kvstore_moved_bytes": (
        "counter",
        ("path",),
        "Payload bytes moved between tiers; writes to disk also by class (h2disk:required).",
    ),
    "kvstore_device_bytes": (
        "counter",
        ("direction",),
        "Bytes that went over the bus to or from a device, headers and padding included.",
    ),
    "kvstore_write_through": ("counter", (), "Background disk writes issued behind an eviction."),
    "kvstore_write_through_skipped": (
        "counter",
        ("reason",),
        "Evictions that were not written through, by reason.",
    ),
    "kvstore_gate_busy": ("counter", (), "Gated restores refused: no word, stream or ready slot."),
    "kvstore_gate_await_fallbacks": ("counter", (), "Gated restores that were awaited instead."),
    "kvstore_gate_tickets": (
        "counter",
        ("outcome",),
        "Gate tickets: taken, good, failed.",
    ),
    "kvstore_io_bytes": (
        "counter",
        ("io_class", "outcome"),
        "Transfer bytes by class: issued, promoted_in, promoted_out, done, failed, withdrawn.",
    ),
    "kvstore_io_device_bytes": (
        "counter",
        ("io_class", "direction"),
        "Bytes that moved to or from the disk, headers and padding included.",
    ),
    "kvstore_io_queued_bytes": ("gauge", ("io_class",), "Bytes that wait for dispatch."),
    "kvstore_io_inflight_bytes": ("gauge", ("io_class",), "Bytes in the kernel or the disk."),
    "kvstore_io_background_bytes": ("gauge", (), "Background bytes issued but not yet written."),
    "kvstore_io_bound": (
        "gauge",
        ("bound",),
        "The bounds in force, in bytes; pieces and background_turn are counts.",
    ),
    "kvstore_io_transfers": ("counter", ("io_class",), "Transfers: one per page."),
    "kvstore_io_pieces": ("counter", ("io_class",), "Pieces: what the disk sees."),
    "kvstore_io_promotions": ("counter", ("io_class",), "Background transfers made required."),
    "kvstore_io_aged_dispatches": ("counter", ("io_class",), "Pieces that left by their age."),
    "kvstore_io_skipped": ("counter", ("io_class",), "Transfers refused above the background cap."),
    "kvstore_io_errors": ("counter", ("io_class", "errno"), "Transfers failed, by errno."),
    "kvstore_io_queue_wait_seconds": ("histogram", ("io_class",), "Issue to first dispatch."),
    "kvstore_io_service_seconds": ("histogram", ("io_class",), "First dispatch to last piece."),
    "kvstore_io_short_transfers": ("counter", (), "Pieces the kernel cut short; they continue."),
    "kvstore_io_retries": ("counter", (), "Pieces tried again after EINTR or EAGAIN."),
    "kvstore_io_direct_fallbacks": ("counter", (), "Files that had to give up direct I/O."),
    "kvstore_io_checksum_mismatches": (
        "counter",
        (),
        "Reads whose header or checksum was not the expected one; each was a miss.",
    ),
    "kvstore_io_deadlines": ("counter", (), "Transfers whose deadline passed."),
    "kvstore_io_cancelled": ("counter", (), "Transfers withdrawn."),
    "kvstore_io_files": ("gauge", ("mode",), "Open slot files: direct, buffered."),
    "kvstore_io_registered_memory_bytes": ("gauge", (), "Memory registered with the ring."),
    "kvstore_io_huge_pages": ("gauge", (), "1 if the I/O memory lies on huge pages."),
    "kvstore_io_registered_buffers": (
        "gauge",
        (),
        "1 if the ring knows the I/O memory beforehand.",
    ),
    "kvstore_io_wakeups": ("counter", (), "Wake-ups of the loop by completions."),
    "kvstore_io_submit_calls": ("counter", (), "Native submit calls, one per batch."),
    "kvstore_io_submit_seconds_max": ("gauge", (), "The longest single submit call so far."),
}

#: Edges of the exported histograms: powers of two from 16 us to 17 s, which are edges of the
#: store's own log-linear histogram too, so no count lands in a wrong bucket.
EDGES_NS: Final = tuple(1 << power for power in range(14, 35))

#: Field of `PoolStats` -> value of the label ``event``.
_COPY_EVENTS: Final = {
    "kept": "kept",
    "written_through": "written_through",
    "reused": "reused",
    "reused_pending": "reused_pending",
    "reclaimed": "reclaimed",
    "died": "died",
    "copy_failed": "failed",
    "released_by_resize": "released_by_resize",
    "released_by_close": "released_by_close",
}
_CLASS_OUTCOMES: Final = ("issued", "promoted_in", "promoted_out", "done", "failed", "withdrawn")

_FAMILIES: Final[dict[str, Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

Sample = tuple[str, tuple[str, ...], float]


class HasStats(Protocol):
    """What is exported: a store, or anything that hands out the same snapshot."""

    def stats(self) -> StoreStats:
        """Return a frozen snapshot; called on the loop."""
        ...


def _pool_samples(level: str, group: str, pool: PoolStats) -> Iterator[Sample]:
    where = (level, group)
    yield "kvstore_pool_slots", where, pool.total
    yield "kvstore_slots", (*where, "ready"), pool.ready
    yield "kvstore_slots", (*where, "draining"), pool.draining
    yield "kvstore_slots", (*where, "primary"), pool.primaries
    yield "kvstore_slots", (*where, "copy"), pool.copies
    yield "kvstore_evictable_slots", where, pool.evictable
    yield "kvstore_available_slots", where, pool.available
    yield "kvstore_retained_copies", where, pool.retained_copies
    for field, event in _COPY_EVENTS.items():
        yield "kvstore_copies", (*where, event), getattr(pool, field)
    yield "kvstore_evicted_pages", where, pool.evicted
    yield "kvstore_dropped_pages", where, pool.dropped
    yield "kvstore_refused", where, pool.refused


def _engine_samples(stats: StoreStats) -> Iterator[Sample]:
    engine = stats.engine
    yield "kvstore_engine_info", (engine.engine, engine.fallback_reason), 1
    yield "kvstore_io_warnings", (), len(engine.warnings)
    yield "kvstore_io_threads", (), engine.threads
    yield "kvstore_io_kernel_rings", (), engine.kernel_rings
    yield "kvstore_io_ring_entries", (), engine.ring_entries
    yield "kvstore_gate_tickets", ("taken",), engine.tickets_taken
    yield "kvstore_gate_tickets", ("good",), engine.tickets_good
    yield "kvstore_gate_tickets", ("failed",), engine.tickets_failed
    for io_class, counts in zip(IoClass, engine.classes, strict=True):
        name = io_class.name.lower()
        for outcome in _CLASS_OUTCOMES:
            yield "kvstore_io_bytes", (name, outcome), getattr(counts, f"{outcome}_bytes")
        yield "kvstore_io_device_bytes", (name, "read"), counts.read_bytes
        yield "kvstore_io_device_bytes", (name, "write"), counts.written_bytes
        yield "kvstore_io_queued_bytes", (name,), counts.queued_bytes
        yield "kvstore_io_inflight_bytes", (name,), counts.inflight_bytes
        yield "kvstore_io_transfers", (name,), counts.transfers
        yield "kvstore_io_pieces", (name,), counts.pieces
        yield "kvstore_io_promotions", (name,), counts.promotions
        yield "kvstore_io_aged_dispatches", (name,), counts.aged_dispatches
        yield "kvstore_io_skipped", (name,), counts.skipped
        for errno, count in counts.errors.items():
            yield "kvstore_io_errors", (name, str(errno)), count
    yield "kvstore_io_background_bytes", (), engine.background_bytes
    for bound, value in engine.bounds.items():
        yield "kvstore_io_bound", (bound,), value
    yield "kvstore_io_short_transfers", (), engine.short_transfers
    yield "kvstore_io_retries", (), engine.retries
    yield "kvstore_io_direct_fallbacks", (), engine.direct_fallbacks
    yield "kvstore_io_checksum_mismatches", (), engine.mismatches
    yield "kvstore_io_deadlines", (), engine.deadlines
    yield "kvstore_io_cancelled", (), engine.cancelled
    yield "kvstore_io_files", ("direct",), engine.direct_files
    yield "kvstore_io_files", ("buffered",), engine.buffered_files
    yield "kvstore_io_registered_memory_bytes", (), engine.registered_memory_bytes
    yield "kvstore_io_huge_pages", (), engine.huge_pages
    yield "kvstore_io_registered_buffers", (), engine.registered_buffers
    yield "kvstore_io_wakeups", (), engine.wakeups
    yield "kvstore_io_submit_calls", (), engine.submit_calls
    yield "kvstore_io_submit_seconds_max", (), engine.submit_ns_max / 1e9


def samples(stats: StoreStats) -> Iterator[Sample]:
    """Turn a snapshot into (metric, label values, value); histograms are left out."""
    yield "kvstore_up", (), stats.health == "ok"
    yield "kvstore_sessions", (), stats.sessions_open
    yield "kvstore_pages", (), stats.pages
    yield "kvstore_persistent_pages", (), stats.persistent_pages
    yield "kvstore_recovered_pages", (), stats.recovered_pages
    for reason, count in stats.recovery_free_slots.items():
        yield "kvstore_recovery_free_slots", (reason,), count
    yield "kvstore_core_info", (stats.core,), 1
    yield "kvstore_open_seconds", (), stats.open_seconds
    yield "kvstore_host_mapped_bytes", (), stats.host_mapped_bytes
    yield "kvstore_host_parts_failed", (), stats.host_parts_failed
    node = stats.host_numa_node
    yield "kvstore_host_numa_node", (), -1 if node is None else node
    for level, count in stats.matched_tokens_by_level.items():
        yield "kvstore_matched_tokens", (level,), count
    yield "kvstore_restores", (), stats.restores
    yield "kvstore_restores_waited", (), stats.restores_waited
    yield "kvstore_lost_pages", (), stats.lost_pages
    yield "kvstore_plans_refused", (), stats.plans_refused
    for (level, group), pool in stats.pools.items():
        yield from _pool_samples(level, group, pool)
    for path, count in stats.moved_bytes.items():
        yield "kvstore_moved_bytes", (path,), count
    for direction, count in stats.device_bytes.items():
        yield "kvstore_device_bytes", (direction,), count
    yield "kvstore_write_through", (), stats.write_through_issued
    for reason, count in stats.write_through_skipped_by.items():
        yield "kvstore_write_through_skipped", (reason,), count
    yield "kvstore_gate_busy", (), stats.gate_busy
    yield "kvstore_gate_await_fallbacks", (), stats.gate_await_fallbacks
    yield from _engine_samples(stats)


def histogram_buckets(latency: LatencySnapshot) -> list[tuple[str, float]]:
    """Return cumulative (edge in seconds, count) pairs, the last one at infinity."""
    pairs, seen, position = [], 0, 0
    for edge_ns in EDGES_NS:
        while position < len(latency.buckets) and latency.buckets[position][0] < edge_ns:
            seen += latency.buckets[position][1]
            position += 1
        pairs.append((repr(edge_ns / 1e9), float(seen)))
    pairs.append(("+Inf", float(latency.total)))
    return pairs


class StoreCollector(Collector):
    """Collects one store; several stores differ by ``labels``.

    A scrape usually runs in a thread of the HTTP server, while the store belongs to its loop. So
    the snapshot is taken on the loop, and the scrape waits for it, ``timeout`` seconds at most:
    if the loop is busy longer, the last snapshot is shown and ``kvstore_stale`` is 1.
    """

    def __init__(
        self,
        store: HasStats,
        *,
        labels: Mapping[str, str] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        timeout: float = 1.0,
    ) -> None:
        self._store = store
        self._labels = dict(labels or {})
        self._timeout = timeout
        self._loop = loop or _running_loop()
        self._last = StoreStats()

    def describe(self) -> Iterable[Any]:
        """Return the empty families, so that a registry refuses a second store of these names."""
        return self._families().values()

    def _families(self) -> dict[str, Any]:
        names = tuple(self._labels)
        return {
            name: _FAMILIES[kind](name, text, labels=(*names, *labels))
            for name, (kind, labels, text) in METRICS.items()
        }

    def collect(self) -> Iterable[Any]:
        """Return the metric families of one snapshot."""
        is_stale = not self._refresh()
        stats = self._last
        families, values = self._families(), tuple(self._labels.values())
        families["kvstore_stale"].add_metric(values, float(is_stale))
        for name, labels, value in samples(stats):
            families[name].add_metric((*values, *labels), float(value))
        for io_class, counts in zip(IoClass, stats.engine.classes, strict=True):
            for name, latency in (
                ("kvstore_io_queue_wait_seconds", counts.queue_wait),
                ("kvstore_io_service_seconds", counts.service),
            ):
                families[name].add_metric(
                    (*values, io_class.name.lower()),
                    histogram_buckets(latency),
                    latency.sum_ns / 1e9,
                )
        return families.values()

    def _refresh(self) -> bool:
        if self._loop is None or self._loop is _running_loop() or not self._loop.is_running():
            self._last = self._store.stats()
            return True
        answer: concurrent.futures.Future[StoreStats] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(_answer, answer, self._store.stats)
            self._last = answer.result(self._timeout)
        except (RuntimeError, TimeoutError, concurrent.futures.CancelledError):
            answer.cancel()
            return False
        return True


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _answer(answer: concurrent.futures.Future[StoreStats], stats: Callable[[], StoreStats]) -> None:
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(stats())
        except Exception as error:  # noqa: BLE001  carried to the scrape, which raises it
            answer.set_exception(error)


def register(
    store: HasStats,
    registry: CollectorRegistry = prometheus_client.REGISTRY,
    *,
    labels: Mapping[str, str] | None = None,
) -> StoreCollector:
    """Add a store to a registry and return its collector, for ``registry.unregister`` later.

    Call it in a coroutine of the store's loop. Raises: ValueError: a store with these metric names
    is registered already; several stores of one process share a collector registry per store.
    """
    collector = StoreCollector(store, labels=labels)
    registry.register(collector)
    return collector
