"""The CUDA device: streams, events, pools and page copies on one GPU's primary context.

All driver calls are made by native code through the driver's own symbols, with the GIL released;
no CUDA package is imported. torch is used only to view pools and to take its streams and events.
`reference` for every limit below: docs/gpu.md.
"""

from __future__ import annotations

import atexit
import errno
import importlib.util
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from kvstore._uring.base import Completions, GateWords, Ticket
from kvstore._uring.device_native import (
    CudaCounters,
    CudaEventHandle,
    NativeCuda,
    OpenError,
    WatchCounters,
)
from kvstore._uring.native import Arena, now_ns
from kvstore.devices.base import (
    CODE_CAPTURE_UNSUPPORTED,
    CODE_NOT_SUPPORTED,
    CODE_OUT_OF_MEMORY,
    STICKY_CODES,
    CopyDirection,
    DeviceCaps,
    HostLayout,
    SlotIds,
    device_error,
)
from kvstore.devices.pools import PagePool, pool_shape
from kvstore.devices.regions import HostRegions, split_registration
from kvstore.devices.watch import ALONE, DeviceWatch, WatchConfig
from kvstore.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    LogicError,
    StoreClosed,
    UnsupportedError,
)

logger = logging.getLogger(__name__)

NOT_READY = 600
PROBE_TIMEOUT_NS = 1_000_000_000
CLOSE_TIMEOUT_S = 5.0
STAGING_BYTES = 16 << 20
STAGED_PIECES_MIN = 16
MIN_DMA_DEFAULT = 32 << 10
#: Roles and priorities: host to device goes first when both wait for an engine.
ROLES = {"default": 0, "h2d": -1, "d2h": 0, "gated0": -1, "gated1": -1, "aux": 0}


@final
class CudaEvent:
    """A point in a stream of the GPU. ``owner`` keeps a foreign event alive."""

    __slots__ = ("handle", "owner")

    def __init__(self, handle: CudaEventHandle | None, owner: Any = None) -> None:
        self.handle = handle
        self.owner = owner

    def query(self) -> bool:
        """Return whether the point has passed. Raises: DeviceError: the device is lost."""
        if self.handle is None:  # never recorded
            return True
        state = self.handle.query()
        if state < 0:
            raise device_error(-state, "event query")
        return state == 1


@final
class CudaStream:
    """A stream of ours or of the caller. ``key`` is its handle; one lane of completion words."""

    __slots__ = ("device", "key", "lane", "name", "owner", "sequence")

    def __init__(
        self, device: CudaDevice, handle: int, lane: int, name: str, owner: Any = None
    ) -> None:
        self.device = device
        self.key = handle
        self.lane = lane
        self.name = name
        self.owner = owner
        self.sequence = 0

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait for ``event``."""
        if event.handle is not None:
            self.device.raise_for(event.handle.wait(self.key), "cuStreamWaitEvent")

    def wait_ticket(self, ticket: Ticket) -> None:
        """Let later work wait until the ticket is published.

        Order: 64-bit memory operation, 32-bit on the same word, else UnsupportedError. Only the
        answer "not supported" marks the device (INV-213).
        """
        self.device.wait_ticket(self, ticket)

    def record(self) -> CudaEvent:
        """Return an event behind everything enqueued so far."""
        device = self.device
        result, handle = device.native.event_new()
        device.raise_for(result, "cuEventCreate")
        assert handle is not None
        device.raise_for(handle.record(self.key), "cuEventRecord")
        return CudaEvent(handle)

    def is_capturing(self) -> bool:
        """Return whether a graph capture is open on this stream."""
        result, capturing = self.device.native.stream_capturing(self.key)
        self.device.raise_for(result, "cuStreamIsCapturing")
        return capturing

    def __cuda_stream__(self) -> tuple[int, int]:
        """Let torch, CuPy and others use this stream."""
        return 0, self.key


class _Memory:
    """Device memory as ``__cuda_array_interface__``; keeps the allocation's owner alive."""

    def __init__(self, device: CudaDevice, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.device = device
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": kind,
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


@final
class CudaDevice:
    """One GPU as device tier.

    ``completion`` is ``words``, ``events`` or ``auto`` (words where the stream can write them).
    ``batch_copy``: -1 the best call of the driver, 0 a loop, 1 and 2 the two ABIs.
    """

    none_fence_has_passed = False

    def __init__(
        self,
        ordinal: int = 0,
        gate_words: GateWords | None = None,
        *,
        library: str | None = None,
        completion: str = "auto",
        watch: WatchConfig | None = None,
        batch_copy: int = -1,
        calibrate: bool = True,
        close_timeout: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """Open the device, probe what it can do, make and warm every stream.

        Raises: UnsupportedError: no driver or no such GPU; the message names what to do.
        """
        self.native = _open(library, ordinal)
        self.ordinal = ordinal
        self.gate_words = gate_words
        self.regions = HostRegions()
        self._close_timeout = close_timeout
        self._closed = False
        #: After a close that left work outstanding: leak gate words and arenas, do not unmap them.
        self.holds_memory = False
        self._streams: dict[int, CudaStream] = {}
        self._roles: dict[str, CudaStream] = {}
        self._allocations: list[int] = []
        self._parts: dict[int, list[int]] = {}
        self._pieces: dict[PagePool, int] = {}
        self._staging: dict[int, tuple[int, int]] = {}
        self._foreign: list[CudaEvent] = []
        self.min_dma = MIN_DMA_DEFAULT
        self.gate_fallbacks = {"memop32": 0, "unsupported": 0, "failed": 0}
        self.watch = DeviceWatch(self.native, watch)
        try:
            address = getattr(gate_words, "address", None)
            if address is not None:
                length = getattr(gate_words, "length", 0)
                self.raise_for(self.native.register(address, length), "register the gate words")
            self.driver = self.native.caps()
            self.native.set_batch(batch_copy)
            self._make_streams()
            self.caps = self._probe()
            self._words = completion == "words" or (completion == "auto" and self.caps.memops64)
            if calibrate:
                self.min_dma = self._calibrate()
            self.native.set_min_dma(self.min_dma)
        except BaseException:
            self.close()
            raise
        # P19: gates are opened and streams awaited before the driver is torn down
        self._at_exit = _exit_handler(weakref.ref(self))
        atexit.register(self._at_exit)

    # -- opening --------------------------------------------------------------------------------

    def _make_streams(self) -> None:
        low, high = self.driver.priority_low, self.driver.priority_high
        for role, priority in ROLES.items():
            self._roles[role] = self.new_stream(role, priority=min(low, max(high, priority)))

    def _probe(self) -> DeviceCaps:
        """Ask this device, and nobody else, what it can do (INV-212)."""
        driver = self.driver
        works = {64: False, 32: False}
        for bits in (64, 32):
            if driver.attribute_memops64 or bits == 32:
                works[bits] = self.native.probe_memops(bits, PROBE_TIMEOUT_NS) == 0
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        hint = int(connections) if connections.isdigit() else 8
        if hint == 1:
            logger.warning("CUDA_DEVICE_MAX_CONNECTIONS=1: one closed gate blocks every stream")
        if not works[64]:
            logger.warning("%s cannot wait on 64-bit words: gates fall back", driver.name)
        return DeviceCaps(
            kind="cuda",
            memops64=works[64],
            memops32=works[32],
            batch_copy=driver.batch_copy,
            copy_engines=driver.copy_engines,
            host_numa=driver.host_numa,
            uses_host_page_tables=bool(driver.uses_host_page_tables),
            max_connections_hint=hint,
        )

    def _calibrate(self) -> int:
        """Return the piece size from which one batch beats a loop of single copies."""
        length, low, high = 4 << 20, 8 << 10, 256 << 10
        if self.caps.batch_copy == 0:
            return low
        result, target = self.native.alloc(length)
        if result:
            return MIN_DMA_DEFAULT
        arena = Arena(length)
        arena.prefault(threads=1)
        registered = self.native.register(arena.address, arena.length) == 0
        best = MIN_DMA_DEFAULT
        if registered:
            piece = low
            while piece < high and self._loop_wins(arena.address, target, length, piece):
                piece *= 2
            best = piece
            self.native.unregister(arena.address)
        self.native.free(target)
        arena.close()
        return best

    def _loop_wins(self, source: int, target: int, length: int, piece: int) -> bool:
        count = length // piece
        pool = PagePool.contiguous("calibration", count, piece, target, None, _no_view)
        plan = pool.plan(HostLayout(source, piece, count, length, payload_offset=0))
        slots = np.arange(count, dtype=np.int32)
        stream = self._roles["h2d"].key
        took: dict[int, float] = {}
        for min_dma in (0, 1 << 40):  # batch, loop
            self.native.set_min_dma(min_dma)
            best: float = float("inf")
            for _ in range(4):
                begin = now_ns()
                result, _ = self.native.copy(
                    stream, plan, slots, slots[::-1].copy(), to_device=True
                )
                result = result or self.native.stream_synchronize(stream)
                self.raise_for(result, "calibration")
                best = min(best, now_ns() - begin)
            took[min_dma] = best
        return took[1 << 40] < took[0]

    # -- pools and memory -------------------------------------------------------------------------

    def create_pool(self, name: str, slot_count: int, page_bytes: int) -> PagePool:
        """Allocate a pool of zeroed pages. Raises: CapacityError: the GPU has no memory."""
        self._check_open()
        length = slot_count * page_bytes
        address = self._allocate(length)
        aux = self._roles["aux"].key
        self.raise_for(self.native.memset(aux, address, 0, length), "cuMemsetD8Async")
        self.raise_for(self.native.stream_synchronize(aux), "cuStreamSynchronize")

        def view(dtype: Any, shape: Sequence[int] | None) -> Any:
            return self._view(address, slot_count, page_bytes, dtype, shape)

        return PagePool.contiguous(name, slot_count, page_bytes, address, self, view)

    def adopt_pool(
        self, name: str, tensors: Sequence[Any], block_dim: int, page_bytes: int
    ) -> PagePool:
        """Use the scheduler's tensors. Small pieces get staging areas, allocated now."""
        self._check_open()
        for tensor in tensors:
            place = getattr(tensor, "device", None)
            if getattr(place, "type", "cuda") != "cuda":
                raise ConfigError(
                    f"tensors: group {name!r} has a tensor on {place}", field="tensors"
                )
        pool = PagePool.adopted(name, tensors, block_dim, page_bytes)
        if int(pool.sizes.max()) < self.min_dma and len(pool.sizes) > 1:
            self._prepare_staging(pool)
        return pool

    def _prepare_staging(self, pool: PagePool) -> None:
        layout = HostLayout(0, pool.page_bytes, 1 << 30, 1 << 62, payload_offset=0)
        result, pieces = self.native.upload_pieces(pool.plan(layout))
        if result == CODE_NOT_SUPPORTED:
            return
        self.raise_for(result, "piece table")
        self._allocations.append(pieces)
        for role in ("h2d", "d2h", "gated0", "gated1"):
            key = self._roles[role].key
            if key not in self._staging:
                length = max(STAGING_BYTES, pool.page_bytes)
                self._staging[key] = (self._allocate(length), length)
        self._pieces[pool] = pieces

    def _allocate(self, length: int) -> int:
        result, address = self.native.alloc(length)
        if result == CODE_OUT_OF_MEMORY:
            raise CapacityError(f"device: cannot allocate {length} bytes", code=result)
        self.raise_for(result, "cuMemAlloc")
        self._allocations.append(address)
        return address

    def _view(
        self,
        address: int,
        slot_count: int,
        page_bytes: int,
        dtype: Any,
        shape: Sequence[int] | None,
    ) -> Any:
        if importlib.util.find_spec("torch") is None:
            kind = np.dtype(dtype or np.uint8)
            sizes = pool_shape(slot_count, page_bytes, kind.itemsize, shape)
            return _Memory(self, address, sizes, kind.str)
        import torch

        flat = _Memory(self, address, (slot_count * page_bytes,), "|u1")
        tensor = torch.as_tensor(flat, device=f"cuda:{self.ordinal}")
        kind = dtype or torch.uint8
        return tensor.view(kind).view(pool_shape(slot_count, page_bytes, kind.itemsize, shape))

    def register_host(self, address: int, length: int) -> None:
        """Pin and map host memory in parts of at most 1 GiB; a part that fails undoes the others.

        Blocks for about 0.04 s per GiB on 2 MiB pages, longer on 4 KiB ones: call it at start-up or
        off the loop (C53, P18).
        """
        self._check_open()
        done: list[int] = []
        try:
            for start, part in split_registration(address, length):
                self.regions.add(start, part)
                done.append(start)
                result = self.native.register(start, part)
                if result:
                    self.regions.remove(done.pop())
                    if result == CODE_OUT_OF_MEMORY:
                        raise CapacityError(f"cannot pin {part} bytes of host memory", code=result)
                    self.raise_for(result, "cuMemHostRegister")
        except BaseException:
            for start in reversed(done):
                self.regions.remove(start)
                self.native.unregister(start)
            raise
        self._parts[address] = done

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`, after the last copy that uses it; works on a lost device."""
        parts = self._parts.pop(address, None)
        if parts is None:
            raise LogicError(f"host range {address:#x} is not registered")
        for start in reversed(parts):
            self.regions.remove(start)
            if not self._closed and not self.error:  # INV-924
                self.raise_for(self.native.unregister(start), "cuMemHostUnregister")

    # -- streams and events -----------------------------------------------------------------------

    def new_stream(self, name: str = "", *, priority: int = 0) -> CudaStream:
        """Return a fresh non-blocking stream, warmed: make it before the first gate closes.

        The first use of a stream hangs behind any closed gate, so it happens here.
        """
        self._check_open()
        result, handle = self.native.stream_new(priority)
        self.raise_for(result, "cuStreamCreate")
        lane = sum(stream.owner is None for stream in self._streams.values())
        stream = CudaStream(self, handle, lane, name or f"stream{lane}")
        self._streams[handle] = stream
        result = self.native.launch(handle, "kvs_spin", 1, 1, (0,))
        if result != CODE_NOT_SUPPORTED:
            self.raise_for(result, "cuLaunchKernel")
        self.raise_for(self.native.stream_synchronize(handle), "cuStreamSynchronize")
        return stream

    def stream(self, role: str) -> CudaStream:
        """Return the stream of a role; the usual ones exist since the device was opened."""
        stream = self._roles.get(role)
        if stream is None:
            stream = self._roles[role] = self.new_stream(role)
        return stream

    def wrap_stream(self, stream: Any) -> CudaStream:
        """Wrap ours, an int handle, a torch stream or ``__cuda_stream__``; None: torch's current
        stream where torch is loaded, else our default one.
        """
        if isinstance(stream, CudaStream):
            if stream.device is not self:
                raise LogicError("the stream belongs to another device")
            return stream
        if stream is None:
            torch = _loaded_torch()
            if torch is None or not torch.cuda.is_initialized():
                return self._roles["default"]
            stream = torch.cuda.current_stream(self.ordinal)
        handle = _stream_handle(stream)
        known = self._streams.get(handle)
        if known is None:
            known = CudaStream(self, handle, ALONE, f"foreign {handle:#x}", owner=stream)
            self._streams[handle] = known
        return known

    def wrap_event(self, event: Any) -> CudaEvent:
        """Wrap ours, an int handle or a torch event. Raises: LogicError: None, which means the
        next step on this device (INV-338) and is for the store to settle.
        """
        if isinstance(event, CudaEvent):
            return event
        if event is None:
            raise LogicError("on CUDA a fence of None means the next step")
        handle = event if isinstance(event, int) else getattr(event, "cuda_event", None)
        if handle is None and not hasattr(event, "cuda_event"):
            raise LogicError(f"cannot use a {type(event).__name__} as an event")
        if not handle:  # torch creates the event at its first recording
            return CudaEvent(None, event)
        return CudaEvent(self.native.event_wrap(int(handle)), event)

    def wait_ticket(self, stream: CudaStream, ticket: Ticket) -> None:
        """See `CudaStream.wait_ticket`."""
        self._check_open()
        words = self.gate_words
        if words is None or ticket.words is not words:
            raise LogicError("the ticket belongs to gate words that the device does not know")
        self._refuse_capture(stream, "gate")
        address = words.word_address(ticket.word)
        for bits, can in ((64, self.caps.memops64), (32, self.caps.memops32)):
            if not can:
                continue
            result = self.native.wait_word(stream.key, address, ticket.generation, bits)
            if result == 0:
                self.gate_fallbacks["memop32"] += bits == 32
                return
            if result != CODE_NOT_SUPPORTED:
                self.gate_fallbacks["failed"] += 1
                self.raise_for(result, "cuStreamWaitValue")
            if bits == 64:
                self.caps = self.caps._replace(memops64=False)
            else:
                self.caps = self.caps._replace(memops32=False)
            logger.warning("stream waits on %d-bit words are not supported here", bits)
        self.gate_fallbacks["unsupported"] += 1
        raise UnsupportedError("the device cannot wait on words: use await mode")

    # -- work -------------------------------------------------------------------------------------

    def copy_pages(
        self,
        stream: Any,
        pool: Any,
        device_slots: SlotIds,
        host: HostLayout,
        host_slots: SlotIds,
        direction: CopyDirection,
    ) -> None:
        """Enqueue page copies; see `kvstore.devices.base.Device`. An empty batch does nothing.

        Raises: DeviceError: with ``enqueued`` above 0 a part was enqueued before a later call
        failed; its memory stays borrowed until the stream has passed.
        """
        self._check_open()
        device, hosts = pool.check_slots(device_slots, host_slots)
        if not len(device):  # INV-711
            return
        self.regions.check(host, hosts)
        if stream.owner is not None:
            self._refuse_capture(stream, "batch")
        to_device = direction is CopyDirection.TO_DEVICE
        plan = pool.plan(host)
        pieces = self._pieces.get(pool)
        staging = self._staging.get(stream.key)
        if pieces and staging and len(device) * len(pool.sizes) >= STAGED_PIECES_MIN:
            result, enqueued = self.native.copy_staged(
                stream.key, plan, pieces, staging, device, hosts, to_device=to_device
            )
        else:
            result, enqueued = self.native.copy(
                stream.key, plan, device, hosts, to_device=to_device
            )
        self.raise_for(result, "copy_pages", enqueued=enqueued)

    def notify(self, stream: Any, queue: Completions, token: int) -> None:
        """Complete ``token`` (status 0 or the device's error) when the stream gets here."""
        self._check_open()
        if self._words and stream.owner is None:
            word = self.native.lane_word(stream.lane)
            if word:
                value = stream.sequence + 1
                result = self.native.write_word(stream.key, word, value)
                if result == 0:
                    stream.sequence = value
                    self.watch.notify_word(stream.lane, word, value, queue, token)
                    return
                if result != CODE_NOT_SUPPORTED:
                    self.raise_for(result, "cuStreamWriteValue64")
                self._words = False
        self._refuse_capture(stream, "notification")
        event = stream.record()
        assert event.handle is not None
        self.watch.notify_event(stream.lane, event.handle, queue, token)

    def notify_event(self, event: Any, queue: Completions, token: int) -> None:
        """Complete ``token`` when ``event`` has passed; keeps a foreign event alive until then."""
        self._check_open()
        handle = event.handle
        if handle is None:
            result, handle = self.native.event_new()  # never recorded: passes at the first look
            self.raise_for(result, "cuEventCreate")
            assert handle is not None
        if event.owner is not None:
            self._foreign = [one for one in self._foreign if not _has_passed(one)]
            self._foreign.append(event)
        self.watch.notify_event(ALONE, handle, queue, token)

    def synchronize(self, timeout: float = 10.0) -> None:
        """Block until our streams are idle. Raises: DeviceError: lost, or over ``timeout``."""
        if self._closed:
            return
        end_ns = now_ns() + int(timeout * 1e9)
        for stream in self._streams.values():
            if stream.owner is not None:
                continue
            while (result := self.native.stream_query(stream.key)) == NOT_READY:
                if now_ns() > end_ns:
                    raise DeviceError(
                        "synchronize: work is still outstanding", code=NOT_READY, is_sticky=False
                    )
                time.sleep(0.0002)
            self.raise_for(result, "cuStreamQuery")

    def counters(self) -> CudaCounters:
        """Return what was enqueued, and by which call."""
        return self.native.counters()

    def watch_counters(self) -> WatchCounters:
        """Return what the device watch did."""
        return self.watch.counters()

    # -- failures and the end ---------------------------------------------------------------------

    @property
    def error(self) -> int:
        """The sticky code, or 0 (INV-917)."""
        return 0 if self._closed else self.native.error()

    def fail(self, code: int = 719) -> None:
        """End every pending notification as if the context had been lost."""
        if code not in STICKY_CODES:
            raise LogicError(f"code {code} is not sticky")
        self.watch.fail(code)

    def quiesce(self) -> bool:
        """Block until our streams are idle, for a bounded time, before memory is unmapped.

        Returns: whether they are; if not, and the device is not lost, `holds_memory` is true.
        """
        if self.holds_memory:
            return False
        try:
            self.synchronize(self._close_timeout)
        except DeviceError as error:
            self.holds_memory = not error.is_sticky  # type: ignore[attr-defined]
            logger.error("closing a device that is not idle: %s", error)
            return False
        return True

    def close(self) -> None:
        """Wait for our streams within a bound, stop the watch, give everything back.

        Tickets must be published before (INV-222). If work does not end, or the device is lost,
        device memory is left to the end of the process: freeing it would block (INV-924).
        """
        if self._closed:
            return
        usable = self.quiesce()
        self._closed = True
        self.watch.close()
        if usable:
            for address in reversed(self._allocations):
                self.native.free(address)
            for stream in self._streams.values():
                if stream.owner is None:
                    self.native.stream_free(stream.key)
        self.native.close(is_lost=not usable)
        if hasattr(self, "_at_exit"):
            atexit.unregister(self._at_exit)

    def raise_for(self, result: int, call: str, **context: Any) -> None:
        """Turn a native result into an exception."""
        if result == 0:
            return
        if result > 0:
            error = device_error(result, call)
            for name, value in context.items():
                setattr(error, name, value)
                error.context[name] = value
            raise error
        if result == -errno.ESHUTDOWN:
            raise StoreClosed("the CUDA device is closed")
        raise DeviceError(f"{call}: errno {-result}", code=0, is_sticky=False, errno=-result)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the CUDA device is closed")

    def _refuse_capture(self, stream: CudaStream, what: str) -> None:
        if stream.is_capturing():  # T7, P15: a clean refusal leaves the capture intact
            raise device_error(CODE_CAPTURE_UNSUPPORTED, f"{what} on a capturing stream")


def open_cuda_device(name: str, gate_words: GateWords | None, **options: Any) -> CudaDevice:
    """Return the device of ``cuda`` or ``cuda:N``. Raises: ConfigError, UnsupportedError."""
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(f"device: must be cpu or cuda[:N], got {name!r}", field="device")
    return CudaDevice(int(match.group(1) or 0), gate_words, **options)


def _open(library: str | None, ordinal: int) -> NativeCuda:
    name = library or os.environ.get("KVSTORE_LIBCUDA") or "libcuda.so.1"
    try:
        return NativeCuda(name, ordinal)
    except OpenError as error:
        if error.code == -errno.ELIBACC:
            raise UnsupportedError(
                f"device: cannot load {error.call} from the NVIDIA driver (12.0 or newer is "
                'needed); install it, or use device="cpu"'
            ) from None
        if error.code in (100, 101):
            raise UnsupportedError(
                f"device: no GPU number {ordinal} ({error.call}: {error.code})"
            ) from None
        if error.code < 0:
            raise CapacityError(f"device: {error.call}: errno {-error.code}") from None
        raise device_error(error.code, error.call) from None


def _stream_handle(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    handle = getattr(stream, "cuda_stream", None)  # torch; stream_id is not the handle
    if isinstance(handle, int):
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise LogicError(f"cannot use a {type(stream).__name__} as a stream")
    version, handle = protocol() if callable(protocol) else protocol
    if version != 0:
        raise LogicError(f"unknown version {version} of __cuda_stream__")
    return int(handle)


def _loaded_torch() -> Any:
    import sys

    return sys.modules.get("torch")


def _has_passed(event: CudaEvent) -> bool:
    try:
        return event.query()
    except DeviceError:
        return True


def _no_view(_dtype: Any, _shape: Any) -> Any:
    raise LogicError("this pool has no view")


def _exit_handler(reference: weakref.ref[CudaDevice]) -> Callable[[], None]:
    """Return what closes a forgotten device when the process ends: gates first (P19)."""

    def at_exit() -> None:
        device = reference()
        if device is not None:
            publish_all = getattr(device.gate_words, "publish_all", None)
            if publish_all is not None:
                try:
                    publish_all(-errno.ESHUTDOWN)
                except LogicError:
                    logger.debug("the gate words were closed before the device")
            device.close()

    return at_exit
