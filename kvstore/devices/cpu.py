"""The CPU device: host memory as level 0, with the ordering, limits and failures of a GPU.

Streams run on native worker threads that stand for hardware queues, mapped round robin, so
head-of-line blocking behind a closed gate happens here as it does on a GPU. Gates wait on the
same flag words, a queue has a finite depth, errors are sticky, and a capturing stream refuses
gates, batches and notifications. So every rule of the gate is testable without a GPU (INV-225).
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from kvstore._uring.base import Completions, GateWords, Ticket
from kvstore._uring.device_native import (
    GATE_SLEEPERS_OFFSET,
    CpuCounters,
    CpuEventHandle,
    CpuQueueConfig,
    CpuQueues,
)
from kvstore.devices.base import (
    CODE_CAPTURE_INVALIDATED,
    CODE_CAPTURE_UNSUPPORTED,
    CODE_OUT_OF_MEMORY,
    STICKY_CODES,
    CopyDirection,
    DeviceCaps,
    HostLayout,
    SlotIds,
    device_error,
)
from kvstore.devices.pools import PagePool, pool_shape
from kvstore.devices.regions import HostRegions
from kvstore.errors import CapacityError, DeviceError, LogicError, StoreClosed, UnsupportedError

CLOSE_TIMEOUT_NS = 5_000_000_000


@final
class CpuEvent:
    """A point in a stream of the CPU device; without a recording it counts as complete."""

    __slots__ = ("_device", "handle")

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self.handle = CpuEventHandle()

    def query(self) -> bool:
        """Return whether the point has passed. Raises: DeviceError: the device is lost."""
        self._device.check_query()
        state = self.handle.query()
        if state < 0:
            raise device_error(-state, "event query")
        return state == 1


@final
class CpuStream:
    """An ordered queue of work; ``number`` modulo the queue count names its hardware queue."""

    __slots__ = ("capture", "device", "name", "number")

    def __init__(self, device: CpuDevice, number: int, name: str) -> None:
        self.device = device
        self.number = number
        self.name = name
        self.capture = ""

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait for ``event``."""
        device = self.device
        device.check_call("wait_event")
        device.raise_for(device.queues.wait_event(self.number, event.handle), "wait_event")

    def wait_ticket(self, ticket: Ticket) -> None:
        """Let later work wait until the ticket is published; a later generation passes too."""
        device = self.device
        device.check_call("wait_ticket", self)
        words = device.gate_words
        if words is None or not device.caps.memops64:
            raise UnsupportedError("the CPU device was made without gates: use await mode")
        if ticket.words is not words:
            raise LogicError("the ticket belongs to gate words that the device does not know")
        address = words.word_address(ticket.word)
        result = device.queues.wait_word(
            self.number, address, ticket.generation, sleepers=address + GATE_SLEEPERS_OFFSET
        )
        device.raise_for(result, "wait_ticket")

    def wait_word(self, address: int, value: int, bits: int = 64) -> None:
        """Wait until a word reaches ``value`` in signed cyclic arithmetic (INV-209).

        The word must be one that `write_word` writes; a gate word needs `wait_ticket`.
        """
        result = self.device.queues.wait_word(self.number, address, value & (1 << 64) - 1, bits)
        self.device.raise_for(result, "wait_word")

    def write_word(self, address: int, value: int) -> None:
        """Store ``value`` at ``address`` in stream order."""
        result = self.device.queues.write_word(self.number, address, value & (1 << 64) - 1)
        self.device.raise_for(result, "write_word")

    def work(self, duration_ns: int, address: int = 0, length: int = 0, value: int = 0) -> None:
        """Enqueue a stand-in for a kernel: take a while, then fill ``length`` bytes."""
        result = self.device.queues.work(self.number, address, length, value, duration_ns)
        self.device.raise_for(result, "work")

    def record(self) -> CpuEvent:
        """Return an event behind everything enqueued so far."""
        device = self.device
        device.check_call("record")
        event = CpuEvent(device)
        device.raise_for(device.queues.record(self.number, event.handle), "record")
        return event

    def is_capturing(self) -> bool:
        """Return whether a graph capture is open on this stream."""
        return bool(self.capture)

    def begin_capture(self, mode: str = "global") -> None:
        """Open a capture. ``global`` also forbids queries of any event, as torch's default does."""
        if self.capture:
            raise LogicError(f"stream {self.name!r} is capturing already")
        self.capture = mode

    def end_capture(self) -> None:
        """Close the capture. Raises: DeviceError: something invalidated it."""
        mode, self.capture = self.capture, ""
        if not mode:
            raise LogicError(f"stream {self.name!r} is not capturing")
        if mode == "invalid":
            raise device_error(CODE_CAPTURE_INVALIDATED, "end of capture")


@final
class CpuDevice:
    """CPU memory as device tier. Every option beyond the gate words is for tests.

    ``queues`` hardware queues of ``queue_depth`` entries; ``bytes_per_s`` and ``latency_ns`` slow
    each batch down; ``shuffle_seed`` runs the pieces of a batch in random order; ``early_reads``
    reads the source of a batch when it is enqueued, the race that stream order forbids (P11);
    ``gates=False`` is a device without stream memory operations (INV-212).
    """

    none_fence_has_passed = True
    #: Closing joins the workers, so host memory is never in use afterwards.
    holds_memory = False

    def __init__(
        self,
        gate_words: GateWords | None = None,
        *,
        queues: CpuQueueConfig | None = None,
        gates: bool = True,
    ) -> None:
        self.gate_words = gate_words
        self.queues = CpuQueues(queues or CpuQueueConfig())
        self.caps = DeviceCaps(
            kind="cpu", memops64=gates and gate_words is not None, memops32=gates, batch_copy=2
        )
        self.regions = HostRegions()
        self._roles: dict[str, CpuStream] = {}
        self._streams: list[CpuStream] = []
        self._pools: list[PagePool] = []
        self._injected: dict[str, list[tuple[int, int]]] = {}
        self._closed = False
        self.stream("default")

    # -- pools and memory ---------------------------------------------------------------------

    def create_pool(self, name: str, slot_count: int, page_bytes: int) -> PagePool:
        """Allocate a pool of zeroed pages. Raises: CapacityError: no memory."""
        self.check_call("create_pool")
        length = slot_count * page_bytes
        try:
            memory = mmap.mmap(-1, length)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(f"device: cannot map {length} bytes: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise(memory, mmap.MADV_HUGEPAGE)
        _advise(memory, mmap.MADV_DONTFORK)
        array = np.frombuffer(memory, np.uint8)

        def view(dtype: Any, shape: Sequence[int] | None) -> Any:
            return _as_array(array, slot_count, page_bytes, dtype, shape)

        address = int(array.ctypes.data)
        pool = PagePool.contiguous(name, slot_count, page_bytes, address, array, view)
        self._pools.append(pool)
        return pool

    def adopt_pool(
        self, name: str, tensors: Sequence[Any], block_dim: int, page_bytes: int
    ) -> PagePool:
        """Use the caller's arrays or CPU tensors, one piece each."""
        self.check_call("adopt_pool")
        pool = PagePool.adopted(name, tensors, block_dim, page_bytes)
        self._pools.append(pool)
        return pool

    def register_host(self, address: int, length: int) -> None:
        """Make host memory reachable for copies and gate waits."""
        self.check_call("register_host")
        self.regions.add(address, length)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`; works on a lost or closed device too (INV-924)."""
        self.regions.remove(address)

    # -- streams and events -------------------------------------------------------------------

    def stream(self, role: str) -> CpuStream:
        """Return the stream of a role, made at first use."""
        stream = self._roles.get(role)
        if stream is None:
            stream = self._roles[role] = self.new_stream(role)
        return stream

    def new_stream(self, name: str = "") -> CpuStream:
        """Return a fresh stream on the next hardware queue."""
        number = len(self._streams)
        stream = CpuStream(self, number, name or f"stream{number}")
        self._streams.append(stream)
        return stream

    def wrap_stream(self, stream: Any) -> CpuStream:
        """Return our own stream; None is the default stream, a number one made before."""
        if stream is None:
            return self._roles["default"]
        if isinstance(stream, CpuStream):
            if stream.device is not self:
                raise LogicError("the stream belongs to another device")
            return stream
        if isinstance(stream, int) and 0 <= stream < len(self._streams):
            return self._streams[stream]
        raise LogicError(f"the CPU device cannot use a {type(stream).__name__} as a stream")

    def wrap_event(self, event: Any) -> CpuEvent:
        """Return our own event; None has passed on this device (INV-338)."""
        if event is None:
            return CpuEvent(self)
        if isinstance(event, CpuEvent):
            return event
        raise LogicError(f"the CPU device cannot use a {type(event).__name__} as an event")

    # -- work ---------------------------------------------------------------------------------

    def copy_pages(
        self,
        stream: Any,
        pool: Any,
        device_slots: SlotIds,
        host: HostLayout,
        host_slots: SlotIds,
        direction: CopyDirection,
    ) -> None:
        """Enqueue page copies; see `kvstore.devices.base.Device`. An empty batch does nothing."""
        self.check_call("copy_pages", stream)
        device, hosts = pool.check_slots(device_slots, host_slots)
        if not len(device):  # INV-711
            return
        self.regions.check(host, hosts)
        to_device = direction is CopyDirection.TO_DEVICE
        result = self.queues.copy(
            stream.number, pool.plan(host), device, hosts, to_device=to_device
        )
        self.raise_for(result, "copy_pages")

    def notify(self, stream: Any, queue: Completions, token: int) -> None:
        """Complete ``token`` (status 0 or the device's error) when the stream gets here."""
        self.check_call("notify", stream)
        self.raise_for(self.queues.notify(stream.number, queue, token), "notify")

    def notify_event(self, event: Any, queue: Completions, token: int) -> None:
        """Complete ``token`` when ``event`` has passed."""
        self.check_call("notify_event")
        self.raise_for(self.queues.notify_event(event.handle, queue, token), "notify_event")

    def synchronize(self, timeout: float = 10.0) -> None:
        """Block until all streams are idle. Raises: DeviceError: lost, or over ``timeout``."""
        if not self._closed:
            self.raise_for(self.queues.synchronize(int(timeout * 1e9)), "synchronize")

    def quiesce(self) -> bool:
        """Return True: `close` joins the workers whatever they wait for, so no memory is held."""
        return True

    def counters(self) -> CpuCounters:
        """Return what the workers did so far."""
        return self.queues.counters()

    def close(self) -> None:
        """Finish or break off the work, join the workers, give the pools back."""
        if self._closed:
            return
        self._closed = True
        self.queues.close(CLOSE_TIMEOUT_NS)
        self._pools.clear()

    # -- failures -----------------------------------------------------------------------------

    @property
    def error(self) -> int:
        """The sticky code, or 0 (INV-917)."""
        return 0 if self._closed else self.queues.error()

    def fail(self, code: int = 719) -> None:
        """Lose the device: every call and every pending notification ends with ``code``."""
        if code not in STICKY_CODES:
            raise LogicError(f"code {code} is not sticky")
        self.queues.fail(code)

    def inject(self, call: str, code: int, *, nth: int = 1) -> None:
        """Let the ``nth`` call of a method from now on fail; ``execute`` fails a batch later.

        A sticky code loses the device; any other fails that call alone.
        """
        if call == "execute":
            self.queues.inject(nth, code)
        else:
            self._injected.setdefault(call, []).append((nth, code))

    def check_call(self, call: str, stream: CpuStream | None = None) -> None:
        """Raise what a call meets before it reaches the queue: closed, injected, capturing."""
        if self._closed:
            raise StoreClosed("the CPU device is closed")
        pending = self._injected.pop(call, None)
        if pending:
            later = [(nth - 1, code) for nth, code in pending if nth > 1]
            if later:
                self._injected[call] = later
            for nth, code in pending:
                if nth == 1:
                    if code in STICKY_CODES:
                        self.queues.fail(code)
                    if code == CODE_OUT_OF_MEMORY and call == "create_pool":
                        raise CapacityError("device: out of memory (injected)")
                    raise device_error(code, call)
        if stream is not None and stream.capture:
            stream.capture = "invalid"
            raise device_error(CODE_CAPTURE_UNSUPPORTED, f"{call} on a capturing stream")

    def check_query(self) -> None:
        """Raise and invalidate if any stream captures globally (P13)."""
        self.check_call("event_query")
        for stream in self._streams:
            if stream.capture == "global":
                stream.capture = "invalid"
                raise device_error(CODE_CAPTURE_UNSUPPORTED, "event query while capturing")

    def raise_for(self, result: int, call: str) -> None:
        """Turn a native result into an exception."""
        if result == 0:
            return
        if result > 0:
            raise device_error(result, call)
        if result == -errno.ESHUTDOWN:
            raise StoreClosed("the CPU device is closed")
        if result == -errno.EAGAIN:
            raise DeviceError(f"{call}: the hardware queue stayed full", code=0, is_sticky=False)
        if result == -errno.ETIME:
            raise DeviceError(f"{call}: work is still outstanding", code=0, is_sticky=False)
        raise DeviceError(f"{call}: errno {-result}", code=0, is_sticky=False, errno=-result)


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:  # an old kernel or a container without it: slower, not wrong
        return


def _as_array(
    array: Any, slot_count: int, page_bytes: int, dtype: Any, shape: Sequence[int] | None
) -> Any:
    """Return a numpy view, or a torch one when ``dtype`` is a torch dtype."""
    if type(dtype).__module__ == "torch":
        import torch

        sizes = pool_shape(slot_count, page_bytes, dtype.itemsize, shape)
        return torch.from_numpy(array).view(dtype).view(sizes)
    kind = np.dtype(dtype or np.uint8)
    return array.view(kind).reshape(pool_shape(slot_count, page_bytes, kind.itemsize, shape))
