"""The device side of the native layer: thin, checked wrappers that keep CData inside ``_uring``.

Every call here releases the GIL while it is in C. Results keep the native convention: 0, a
positive device code, or ``-errno``; the devices turn them into exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore._uring._ffi import ffi, lib

#: The publisher of a gate word looks at the count of native sleepers, this far behind the flag.
GATE_SLEEPERS_OFFSET = 8
#: A completion with a device error carries ``DEVICE_STATUS - code``.
DEVICE_STATUS: int = lib.KVS_DEVICE_STATUS

U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]


class PagePlan:
    """The addresses of one pool and one host area, laid down once as ``kvs_pages``."""

    __slots__ = ("_keep", "cdata", "piece_count")

    def __init__(
        self,
        bases: U64,
        strides: U64,
        sizes: U64,
        host: tuple[int, int, int, int, int],
    ) -> None:
        """Take piece arrays of one length and (base, slot, slots per slab, slab, payload offset)."""
        assert len(bases) == len(strides) == len(sizes) > 0
        pages = ffi.new("kvs_pages *")
        self._keep = tuple(
            ffi.from_buffer("uint64_t[]", np.ascontiguousarray(array, np.uint64))
            for array in (bases, strides, sizes)
        )
        pages.piece_bases, pages.piece_strides, pages.piece_bytes = self._keep
        pages.piece_count = len(bases)
        (
            pages.host_base,
            pages.slot_bytes,
            pages.slots_per_slab,
            pages.slab_bytes,
            pages.payload_offset,
        ) = host
        self.piece_count = len(bases)
        self.cdata = pages

    def expand(self, device_slots: I32, host_slots: I32, *, to_device: bool) -> U64:
        """Return the runs as (count, 3) uint64: target, source, bytes. For tests and planning."""
        count = len(device_slots)
        runs = np.empty((count * self.piece_count + 1, 3), np.uint64)
        used = lib.kvs_pages_expand(
            self.cdata,
            ffi.from_buffer("int32_t[]", device_slots),
            ffi.from_buffer("int32_t[]", host_slots),
            count,
            to_device,
            ffi.from_buffer("kvs_run[]", runs, require_writable=True),
        )
        return runs[:used]


class CpuCounters(NamedTuple):
    """What the workers did so far."""

    batches: int
    pages_to_device: int
    pages_to_host: int
    bytes_to_device: int
    bytes_to_host: int
    notified: int
    gates_waited: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQueueConfig:
    """Shape and pace of the CPU device's hardware queues."""

    queue_count: int = 8
    queue_depth: int = 1024
    bytes_per_s: int = 0
    latency_ns: int = 0
    shuffle_seed: int = 0
    full_timeout_ns: int = 10_000_000_000
    early_reads: bool = False


class CpuEventHandle:
    """One reference to a native event, dropped with the object."""

    __slots__ = ("cdata",)

    def __init__(self) -> None:
        """Allocate an event that was never recorded: it counts as complete."""
        cdata = lib.kvs_cpu_event_new()
        if cdata == ffi.NULL:
            raise MemoryError
        self.cdata = ffi.gc(cdata, lib.kvs_cpu_event_free)

    def query(self) -> int:
        """Return 0 while pending, 1 when passed, or the negated device code."""
        return int(lib.kvs_cpu_event_query(self.cdata))


class CpuQueues:
    """The worker threads of a CPU device."""

    __slots__ = ("_cdata",)

    def __init__(self, config: CpuQueueConfig) -> None:
        """Start all workers, or none (INV-126)."""
        native = ffi.new(
            "kvs_cpu_config *",
            {
                "queue_count": config.queue_count,
                "queue_depth": config.queue_depth,
                "bytes_per_s": config.bytes_per_s,
                "latency_ns": config.latency_ns,
                "shuffle_seed": config.shuffle_seed,
                "full_timeout_ns": config.full_timeout_ns,
                "early_reads": config.early_reads,
            },
        )
        self._cdata = lib.kvs_cpu_new(native)
        if self._cdata == ffi.NULL:
            raise OSError("cannot start the worker threads of the CPU device")

    @property
    def is_open(self) -> bool:
        """False after `close`."""
        return self._cdata is not None

    def close(self, timeout_ns: int) -> int:
        """Stop and join; -ETIME if work had to be broken off."""
        cdata, self._cdata = self._cdata, None
        return int(lib.kvs_cpu_close(cdata, timeout_ns))

    def fail(self, code: int) -> None:
        """Make the device fail with ``code`` for ever."""
        lib.kvs_cpu_fail(self._cdata, code)

    def error(self) -> int:
        """Return the sticky code or 0."""
        return int(lib.kvs_cpu_error(self._cdata))

    def inject(self, nth_copy: int, code: int) -> None:
        """Let the ``nth_copy``-th batch executed from now on fail the device."""
        lib.kvs_cpu_inject(self._cdata, nth_copy, code)

    def copy(
        self, stream: int, plan: PagePlan, device_slots: I32, host_slots: I32, *, to_device: bool
    ) -> int:
        """Enqueue one batch of page copies; the slot arrays are copied."""
        return int(
            lib.kvs_cpu_copy(
                self._cdata,
                stream,
                plan.cdata,
                ffi.from_buffer("int32_t[]", device_slots),
                ffi.from_buffer("int32_t[]", host_slots),
                len(device_slots),
                to_device,
            )
        )

    def wait_event(self, stream: int, event: CpuEventHandle) -> int:
        """Let later work of the queue wait for the event."""
        return int(lib.kvs_cpu_wait_event(self._cdata, stream, event.cdata))

    def wait_word(
        self, stream: int, address: int, value: int, bits: int = 64, sleepers: int = 0
    ) -> int:
        """Let later work wait until the word at ``address`` reaches ``value``."""
        return int(lib.kvs_cpu_wait_word(self._cdata, stream, address, value, bits, sleepers))

    def write_word(self, stream: int, address: int, value: int) -> int:
        """Store ``value`` at ``address`` in stream order."""
        return int(lib.kvs_cpu_write_word(self._cdata, stream, address, value))

    def work(self, stream: int, address: int, length: int, value: int, duration_ns: int) -> int:
        """Enqueue a stand-in for a kernel: take ``duration_ns``, then fill bytes with ``value``."""
        return int(lib.kvs_cpu_work(self._cdata, stream, address, length, value, duration_ns))

    def record(self, stream: int, event: CpuEventHandle) -> int:
        """Let the event pass when the stream gets here."""
        return int(lib.kvs_cpu_record(self._cdata, stream, event.cdata))

    def notify(self, stream: int, queue: Any, token: int) -> int:
        """Post ``token`` to the completion queue when the stream gets here."""
        return int(lib.kvs_cpu_notify(self._cdata, stream, queue.handle, token))

    def notify_event(self, event: CpuEventHandle, queue: Any, token: int) -> int:
        """Post ``token`` when the event has passed, at once if it has."""
        return int(lib.kvs_cpu_notify_event(self._cdata, event.cdata, queue.handle, token))

    def synchronize(self, timeout_ns: int) -> int:
        """Block until every queue is idle."""
        return int(lib.kvs_cpu_synchronize(self._cdata, timeout_ns))

    def pending(self, stream: int) -> int:
        """Return the operations not yet done on the queue of this stream."""
        return int(lib.kvs_cpu_pending(self._cdata, stream))

    def counters(self) -> CpuCounters:
        """Return a snapshot of the counters."""
        out = ffi.new("kvs_cpu_counters *")
        lib.kvs_cpu_count(self._cdata, out)
        return CpuCounters(*(int(getattr(out, name)) for name in CpuCounters._fields))
