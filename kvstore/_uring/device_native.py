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
        """Take piece arrays of one length and the fields of a host layout in their order."""
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


class CudaCaps(NamedTuple):
    """What the driver says about one GPU."""

    name: str
    driver_version: int
    device_count: int
    batch_copy: int
    attribute_memops64: int
    copy_engines: int
    host_numa: int
    uses_host_page_tables: int
    multiprocessors: int
    priority_low: int
    priority_high: int


class CudaCounters(NamedTuple):
    """What was enqueued so far, and by which kind of call."""

    batches: int
    driver_calls: int
    pages_to_device: int
    pages_to_host: int
    bytes_to_device: int
    bytes_to_host: int
    batch_calls: int
    loop_calls: int
    staged_calls: int


class CudaEventHandle:
    """One reference to a native event: of the device's pool, or a wrapped foreign one."""

    __slots__ = ("cdata",)

    def __init__(self, cdata: Any) -> None:
        self.cdata = ffi.gc(cdata, lib.kvs_cuda_event_free)

    def record(self, stream: int) -> int:
        """Record behind the stream's work so far."""
        return int(lib.kvs_cuda_event_record(self.cdata, stream))

    def query(self) -> int:
        """Return 1 when passed, 0 while pending, or the negated code."""
        return int(lib.kvs_cuda_event_query(self.cdata))

    def wait(self, stream: int) -> int:
        """Let the stream wait for the event."""
        return int(lib.kvs_cuda_wait_event(self.cdata, stream))


class OpenError(Exception):
    """The driver could not be opened: ``code`` as returned, ``call`` is what failed."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code
        self.call = call


class NativeCuda:
    """One GPU's primary context, reached through the driver's own symbols."""

    __slots__ = ("_out", "cdata")

    def __init__(self, library: str, ordinal: int) -> None:
        """Load the driver and open the device. Raises: OpenError."""
        out = ffi.new("kvs_cuda **")
        failed = ffi.new("char[64]")
        result = lib.kvs_cuda_open(library.encode(), ordinal, out, failed)
        if result:
            raise OpenError(int(result), ffi.string(failed).decode())
        self.cdata = out[0]
        self._out = ffi.new("uint64_t *")

    def close(self, *, is_lost: bool) -> None:
        """Give the device back; on a lost one the driver is left alone (INV-924)."""
        cdata, self.cdata = self.cdata, None
        lib.kvs_cuda_close(cdata, is_lost)

    def caps(self) -> CudaCaps:
        """Return what the driver says."""
        out = ffi.new("kvs_cuda_caps *")
        lib.kvs_cuda_get_caps(self.cdata, out)
        numbers = (int(getattr(out, name)) for name in CudaCaps._fields[1:])
        return CudaCaps(ffi.string(out.name).decode(), *numbers)

    def attribute(self, number: int) -> int:
        """Return a device attribute, or -1 if the driver does not know it."""
        out = ffi.new("int *")
        return int(out[0]) if not lib.kvs_cuda_attribute(self.cdata, number, out) else -1

    def error(self) -> int:
        """Return the sticky code or 0."""
        return int(lib.kvs_cuda_error(self.cdata))

    def counters(self) -> CudaCounters:
        """Return a snapshot of the counters."""
        out = ffi.new("kvs_cuda_counters *")
        lib.kvs_cuda_count(self.cdata, out)
        return CudaCounters(*(int(getattr(out, name)) for name in CudaCounters._fields))

    def set_batch(self, kind: int) -> int:
        """Choose the copy call: -1 best, 0 loop, 1 or 2 the ABI; returns what is in use."""
        return int(lib.kvs_cuda_set_batch(self.cdata, kind))

    def set_min_dma(self, length: int) -> None:
        """Use batches for pieces from this size on."""
        lib.kvs_cuda_set_min_dma(self.cdata, length)

    def set_source_order(self, order: int) -> None:
        """1 STREAM, 3 ANY: the latter is a race behind a gate, for tests alone."""
        lib.kvs_cuda_set_source_order(self.cdata, order)

    def stream_new(self, priority: int) -> tuple[int, int]:
        """Return (result, handle) of a new non-blocking stream."""
        result = int(lib.kvs_cuda_stream_new(self.cdata, priority, self._out))
        return result, int(self._out[0])

    def stream_free(self, stream: int) -> int:
        """Destroy a stream."""
        return int(lib.kvs_cuda_stream_free(self.cdata, stream))

    def stream_query(self, stream: int) -> int:
        """Return 0 when idle, 600 while busy, or an error."""
        return int(lib.kvs_cuda_stream_query(self.cdata, stream))

    def stream_synchronize(self, stream: int) -> int:
        """Block until the stream is idle."""
        return int(lib.kvs_cuda_stream_synchronize(self.cdata, stream))

    def stream_capturing(self, stream: int) -> tuple[int, bool]:
        """Return (result, whether a capture is open)."""
        out = ffi.new("int *")
        result = int(lib.kvs_cuda_stream_capturing(self.cdata, stream, out))
        return result, bool(out[0])

    def alloc(self, length: int) -> tuple[int, int]:
        """Return (result, address) of device memory."""
        result = int(lib.kvs_cuda_alloc(self.cdata, length, self._out))
        return result, int(self._out[0])

    def free(self, address: int) -> int:
        """Free device memory."""
        return int(lib.kvs_cuda_free(self.cdata, address))

    def memset(self, stream: int, address: int, value: int, length: int) -> int:
        """Enqueue a byte fill."""
        return int(lib.kvs_cuda_memset(self.cdata, stream, address, value, length))

    def memcpy(self, stream: int, target: int, source: int, length: int) -> int:
        """Enqueue one copy."""
        return int(lib.kvs_cuda_memcpy(self.cdata, stream, target, source, length))

    def register(self, address: int, length: int) -> int:
        """Pin host memory and map it."""
        return int(lib.kvs_cuda_register(self.cdata, address, length))

    def unregister(self, address: int) -> int:
        """Undo `register`."""
        return int(lib.kvs_cuda_unregister(self.cdata, address))

    def copy(
        self, stream: int, plan: PagePlan, device_slots: I32, host_slots: I32, *, to_device: bool
    ) -> tuple[int, int]:
        """Enqueue page copies; returns (result, runs enqueued)."""
        result = lib.kvs_cuda_copy(
            self.cdata,
            stream,
            plan.cdata,
            ffi.from_buffer("int32_t[]", device_slots),
            ffi.from_buffer("int32_t[]", host_slots),
            len(device_slots),
            to_device,
            self._out,
        )
        return int(result), int(self._out[0])

    def upload_pieces(self, plan: PagePlan) -> tuple[int, int]:
        """Return (result, device address) of the piece table for the staged path."""
        result = int(lib.kvs_cuda_upload_pieces(self.cdata, plan.cdata, self._out))
        return result, int(self._out[0])

    def copy_staged(
        self,
        stream: int,
        plan: PagePlan,
        pieces: int,
        staging: tuple[int, int],
        device_slots: I32,
        host_slots: I32,
        *,
        to_device: bool,
    ) -> tuple[int, int]:
        """Enqueue whole pages through a staging area and one kernel per group."""
        result = lib.kvs_cuda_copy_staged(
            self.cdata,
            stream,
            plan.cdata,
            pieces,
            *staging,
            ffi.from_buffer("int32_t[]", device_slots),
            ffi.from_buffer("int32_t[]", host_slots),
            len(device_slots),
            to_device,
            self._out,
        )
        return int(result), int(self._out[0])

    def wait_word(self, stream: int, address: int, value: int, bits: int = 64) -> int:
        """Let the stream wait until a word in registered memory reaches ``value``."""
        return int(lib.kvs_cuda_wait_word(self.cdata, stream, address, value, bits))

    def write_word(self, stream: int, address: int, value: int) -> int:
        """Let the stream store ``value`` behind its work so far."""
        return int(lib.kvs_cuda_write_word(self.cdata, stream, address, value))

    def probe_memops(self, bits: int, timeout_ns: int) -> int:
        """Wait for real on a private stream; 0 if a CPU store wakes it."""
        return int(lib.kvs_cuda_probe_memops(self.cdata, bits, timeout_ns))

    def event_new(self) -> tuple[int, CudaEventHandle | None]:
        """Return (result, event) from the pool."""
        error = ffi.new("int *")
        cdata = lib.kvs_cuda_event_new(self.cdata, error)
        return int(error[0]), None if cdata == ffi.NULL else CudaEventHandle(cdata)

    def event_wrap(self, handle: int) -> CudaEventHandle:
        """Return a foreign event; its owner keeps it alive."""
        return CudaEventHandle(lib.kvs_cuda_event_wrap(self.cdata, handle))

    def lane_word(self, lane: int) -> int:
        """Return the address of a completion word, 0 if there are not that many."""
        return int(lib.kvs_cuda_lane_word(self.cdata, lane))

    def launch(
        self, stream: int, kernel: str, blocks: int, threads: int, args: tuple[int, ...]
    ) -> int:
        """Launch one of the kernels of ``kernels.cu``."""
        values = ffi.new("uint64_t[]", list(args) or [0])
        return int(
            lib.kvs_cuda_launch(
                self.cdata, stream, kernel.encode(), blocks, threads, values, len(args)
            )
        )

    def host_post(self, stream: int, queue: Any, token: int) -> int:
        """Post through a host function, the fallback F2 and a row of the benchmarks."""
        return int(lib.kvs_cuda_host_post(self.cdata, stream, queue.handle, token))

    def gate_latency(
        self, stream: int, gate_word: int, done_word: int, first: int, count: int, hold_ns: int
    ) -> tuple[int, U64]:
        """Return (result, nanoseconds from CPU store to the stream's write), for measurements."""
        out = np.zeros(count, np.uint64)
        result = lib.kvs_cuda_gate_latency(
            self.cdata,
            stream,
            gate_word,
            done_word,
            first,
            count,
            hold_ns,
            ffi.from_buffer("uint64_t[]", out, require_writable=True),
        )
        return int(result), out

    def enqueue_cost(self, stream: int, call: int, a: int, b: int, count: int) -> tuple[int, int]:
        """Return (result, total nanoseconds) of ``count`` driver calls of one kind."""
        result = int(lib.kvs_cuda_enqueue_cost(self.cdata, stream, call, a, b, count, self._out))
        return result, int(self._out[0])


def spin_until(address: int, value: int, timeout_ns: int) -> int:
    """Spin on a word without the GIL; returns CLOCK_MONOTONIC when it was seen, 0 on timeout."""
    seen = ffi.new("uint64_t *")
    return 0 if lib.kvs_spin_until(address, value, timeout_ns, seen) else int(seen[0])


def spin_pair(first: tuple[int, int], second: tuple[int, int], timeout_ns: int) -> tuple[int, int]:
    """Spin on (address, value) pairs in turn without the GIL; zeros on timeout."""
    seen = ffi.new("uint64_t[2]")
    result = lib.kvs_spin_pair(*first, *second, timeout_ns, seen)
    return (0, 0) if result else (int(seen[0]), int(seen[1]))


class WatchCounters(NamedTuple):
    """What the device watch did; an idle watch adds nothing."""

    passes: int
    sleeps: int
    idle_waits: int
    completed: int
    failed: int
    pending: int


class NativeWatch:
    """The watching thread. Without a device it can watch words alone, which tests use."""

    __slots__ = ("_cdata", "_device")

    def __init__(
        self, device: NativeCuda | None, spin_ns: int, sleep_max_ns: int, error_probe_ns: int
    ) -> None:
        config = ffi.new(
            "kvs_watch_config *",
            {
                "spin_ns": spin_ns,
                "sleep_max_ns": sleep_max_ns,
                "error_probe_ns": error_probe_ns,
            },
        )
        self._device = device
        self._cdata = lib.kvs_watch_new(ffi.NULL if device is None else device.cdata, config)
        if self._cdata == ffi.NULL:
            raise OSError("cannot start the device watch")

    def word(self, lane: int, address: int, value: int, queue: Any, token: int) -> int:
        """Post ``token`` when the word reaches ``value``."""
        return int(lib.kvs_watch_word(self._cdata, lane, address, value, queue.handle, token))

    def event(self, lane: int, event: CudaEventHandle, queue: Any, token: int) -> int:
        """Post ``token`` when the event has passed."""
        return int(lib.kvs_watch_event(self._cdata, lane, event.cdata, queue.handle, token))

    def fail(self, code: int) -> None:
        """End every pending and later entry with ``code``."""
        lib.kvs_watch_fail(self._cdata, code)

    def counters(self) -> WatchCounters:
        """Return a snapshot of the counters."""
        out = ffi.new("kvs_watch_counters *")
        lib.kvs_watch_count(self._cdata, out)
        return WatchCounters(*(int(getattr(out, name)) for name in WatchCounters._fields))

    def close(self) -> None:
        """End what is pending and join the thread; a second call does nothing."""
        cdata, self._cdata = self._cdata, None
        if cdata is not None:
            lib.kvs_watch_close(cdata)
