"""A simulated device: numpy memory, streams stepped by loop time, events, gates, sticky errors.

Work of a stream runs in order, and streams that share a hardware queue wait for each other, as
on a device with few queues. A copy moves the first half of each page when it starts and the
second half when it ends: memory or a slot given up in between shows as wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from kvstore._uring.base import Completions, Ticket
from kvstore.devices.base import (
    CODE_CAPTURE_UNSUPPORTED,
    CODE_LAUNCH_FAILED,
    CODE_OUT_OF_MEMORY,
    DEVICE_STATUS,
    STICKY_CODES,
    CopyDirection,
    DeviceCaps,
    DevicePool,
    Event,
    HostLayout,
    SlotIds,
    Stream,
    device_error,
)
from kvstore.devices.pools import PagePool, pool_shape
from kvstore.errors import CapacityError, DeviceError, LogicError, StoreClosed, UnsupportedError
from kvstore.testing.completions import SimCompletions
from kvstore.testing.gate import SimGateWords
from kvstore.testing.loop import SimDeadlock
from kvstore.testing.memory import memory_view

Bytes = npt.NDArray[np.uint8]


@final
class SimEvent:
    """A point in a stream; an event that was never recorded counts as complete."""

    __slots__ = ("_device", "_waiters", "is_passed")

    def __init__(self, device: SimDevice | None = None, *, is_passed: bool = True) -> None:
        self._device = device
        self.is_passed = is_passed
        self._waiters: list[Callable[[], None]] = []

    def query(self) -> bool:
        """Return whether the point has passed. Raises: DeviceError: the device is lost."""
        if self._device is not None:
            self._device.check()
        return self.is_passed

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the event passes, at once if it has."""
        if self.is_passed:
            callback()
        else:
            self._waiters.append(callback)

    def pass_(self) -> None:
        """Mark the point as passed and wake who waits."""
        self.is_passed = True
        waiters, self._waiters = self._waiters, []
        for callback in waiters:
            callback()


@dataclass(slots=True, eq=False)
class _Work:
    """One entry of a hardware queue. ``begin`` and ``end`` move bytes; ``ready`` subscribes."""

    kind: str
    duration_ns: int = 0
    begin: Callable[[], None] | None = None
    end: Callable[[], None] | None = None
    blocked_on: Callable[[Callable[[], None]], None] | None = None
    is_started: bool = False


@dataclass(slots=True, eq=False)
class _HardwareQueue:
    works: deque[_Work] = field(default_factory=deque)
    is_waiting: bool = False


@final
class SimStream:
    """An ordered queue of device work; made by `SimDevice`."""

    def __init__(self, device: SimDevice, name: str, queue: _HardwareQueue) -> None:
        self.device = device
        self.name = name
        self._queue = queue
        self._is_capturing = False

    @property
    def depth(self) -> int:
        """Entries in the hardware queue behind this stream."""
        return len(self._queue.works)

    def enqueue(self, work: _Work) -> None:
        """Append work; on a full queue the call blocks, that is, time inside it moves on."""
        self.device.enqueue(self._queue, work)

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait for ``event``."""
        self.device.check("wait_event")
        event = self.device.wrap_event(event)
        if event.is_passed:
            return
        self.enqueue(_Work("wait_event", blocked_on=event.on_passed))

    def wait_ticket(self, ticket: Ticket) -> None:
        """Let later work wait for ``word >= generation``. Raises: UnsupportedError, DeviceError."""
        self.device.check("wait_ticket", self)
        gate = self.device.gate
        if gate is None or not self.device.caps.memops64:
            raise UnsupportedError("the simulated device has no gate words")
        word, generation = ticket.word, ticket.generation
        if not gate.is_passed(word, generation):
            self.device.gated_streams.add(self.name)

            def subscribe(wake: Callable[[], None]) -> None:
                gate.on_passed(word, generation, wake)

            self.enqueue(
                _Work(
                    "wait_ticket",
                    blocked_on=subscribe,
                    end=lambda: self.device.gated_streams.discard(self.name),
                )
            )

    def launch(
        self, kernel: Callable[[], None], duration_ns: int = 0, *, begin: Any = None
    ) -> None:
        """Enqueue a fake kernel: ``kernel`` runs when it ends, ``duration_ns`` after its start."""
        self.device.check()
        self.enqueue(_Work("kernel", duration_ns, begin=begin, end=kernel))

    def record(self) -> SimEvent:
        """Return an event behind everything enqueued so far."""
        self.device.check("record")
        event = SimEvent(self.device, is_passed=not self._queue.works)
        if not event.is_passed:
            self.enqueue(_Work("record", end=event.pass_))
        return event

    def begin_capture(self) -> None:
        """Open a graph capture: gates and batches are refused until `end_capture`."""
        self._is_capturing = True

    def end_capture(self) -> None:
        """Close the graph capture."""
        self._is_capturing = False

    def is_capturing(self) -> bool:
        """Return whether a graph capture is open."""
        return self._is_capturing


def read_page(pool: PagePool, slot_id: int) -> Bytes:
    """Return a copy of the bytes of a slot, pieces joined: (page_bytes,) uint8."""
    return np.concatenate([view for view, _ in _pieces(pool, slot_id)])


def write_page(pool: PagePool, slot_id: int, data: Bytes, start: int = 0) -> None:
    """Overwrite ``data.size`` bytes of a slot from ``start`` on, as a finished kernel would."""
    done = 0
    for view, at in _pieces(pool, slot_id):
        low, high = max(start, at), min(start + data.size, at + view.size)
        if low < high:
            view[low - at : high - at] = data[low - start : high - start]
            done += high - low
    assert done == data.size


def _pieces(pool: PagePool, slot_id: int) -> Iterator[tuple[Bytes, int]]:
    """Yield (view, position in the page) of each piece of a slot."""
    assert 0 <= slot_id < pool.slot_count
    at = 0
    for base, stride, size in zip(pool.bases, pool.strides, pool.sizes, strict=True):
        yield memory_view(int(base) + slot_id * int(stride), int(size)), at
        at += int(size)


@final
class SimDevice:
    """Implements `Device` on loop time.

    ``queue_depth`` bounds the entries of a hardware queue, ``hardware_queues`` their number:
    streams beyond it share one, so that head-of-line blocking can be reproduced. `inject` lets a
    call fail, `fail` makes a sticky error. Every option is for tests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        gate: SimGateWords | None = None,
        seed: int = 0,
        latency_ns: tuple[int, int] = (5_000, 60_000),
        bytes_per_s: int = 20 << 30,
        queue_depth: int = 1024,
        hardware_queues: int = 8,
        memops: bool = True,
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self.gate = gate
        self.caps = DeviceCaps(
            kind="simulated",
            memops64=memops and gate is not None,
            max_connections_hint=hardware_queues,
        )
        self._random = Random(seed)
        self._latency_ns = latency_ns
        self._bytes_per_s = bytes_per_s
        self._queue_depth = queue_depth
        self._queues = [_HardwareQueue() for _ in range(hardware_queues)]
        self._streams: dict[Any, SimStream] = {}
        self._error = 0
        self._injected: dict[str, list[tuple[int, int]]] = {}
        self._stream_count = 0
        self._pending: dict[int, tuple[SimCompletions, int]] = {}
        self._pending_next = 0
        self._registered: dict[int, int] = {}
        self.gated_streams: set[str] = set()
        self.full_count = 0
        self.copied_bytes = dict.fromkeys(CopyDirection, 0)
        self.copy_calls = dict.fromkeys(CopyDirection, 0)
        self.is_closed = False
        self.none_fence_has_passed = False
        self.holds_memory = False

    # -- errors ---------------------------------------------------------------------------------

    @property
    def error(self) -> int:
        """The sticky code, or 0 (INV-917)."""
        return self._error

    def check(self, call: str = "call", stream: SimStream | None = None) -> None:
        """Raise what a call meets before it reaches a queue: closed, lost, injected, capturing."""
        if self.is_closed:
            raise StoreClosed("the simulated device is closed")
        if self._error:
            raise device_error(self._error, call)
        pending = self._injected.pop(call, [])
        later = [(nth - 1, code) for nth, code in pending if nth > 1]
        if later:
            self._injected[call] = later
        for nth, code in pending:
            if nth == 1:
                if code in STICKY_CODES:
                    self.fail(code)
                raise device_error(code, call)
        if stream is not None and stream.is_capturing():
            raise device_error(CODE_CAPTURE_UNSUPPORTED, f"{call} on a capturing stream")

    def inject(self, call: str, code: int, *, nth: int = 1) -> None:
        """Let the ``nth`` call of a method from now on fail.

        A sticky code loses the device; any other fails that call alone. ``execute`` fails a batch
        that was accepted: the device is lost when it gets there.
        """
        self._injected.setdefault(call, []).append((nth, code))

    def clear_injected(self) -> bool:
        """Forget what was injected and not reached; tells whether there was any."""
        left = bool(self._injected)
        self._injected.clear()
        return left

    def fail(self, code: int = CODE_LAUNCH_FAILED) -> None:
        """Lose the device: later calls raise, and pending notifications complete with it."""
        if code not in STICKY_CODES:
            raise LogicError(f"code {code} is not sticky")
        self._error = code
        for queue in self._queues:
            queue.works.clear()
        pending, self._pending = self._pending, {}
        for completions, token in pending.values():
            completions.post(token, DEVICE_STATUS - code)

    # -- pools and memory -----------------------------------------------------------------------

    def create_pool(self, name: str, slot_count: int, page_bytes: int) -> PagePool:
        """Allocate a pool of zeroed pages. Raises: CapacityError: injected."""
        try:
            self.check("create_pool")
        except DeviceError as error:
            if error.code == CODE_OUT_OF_MEMORY:  # type: ignore[attr-defined]
                raise CapacityError("device: out of memory (injected)") from error
            raise
        array = np.zeros(slot_count * page_bytes, np.uint8)

        def view(dtype: Any, shape: Sequence[int] | None) -> Any:
            kind = np.dtype(dtype or np.uint8)
            sizes = pool_shape(slot_count, page_bytes, kind.itemsize, shape)
            return array.view(kind).reshape(sizes)

        address = int(array.ctypes.data)
        return PagePool.contiguous(name, slot_count, page_bytes, address, array, view)

    def adopt_pool(
        self, name: str, tensors: Sequence[Any], block_dim: int, page_bytes: int
    ) -> PagePool:
        """Use the caller's arrays, one piece each and per index before ``block_dim``."""
        self.check("adopt_pool")
        return PagePool.adopted(name, tensors, block_dim, page_bytes)

    def register_host(self, address: int, length: int) -> None:
        """Remember a slab; copies may use registered memory only."""
        self.check("register_host")
        self._registered[address] = length

    def unregister_host(self, address: int) -> None:
        """Forget a slab."""
        self._registered.pop(address, None)

    @property
    def registered_count(self) -> int:
        """Slabs registered and not given back."""
        return len(self._registered)

    # -- streams and events -----------------------------------------------------------------------

    def stream(self, role: str) -> SimStream:
        """Return the stream of a role, always the same one."""
        stream = self._streams.get(role)
        if stream is None:
            stream = self._streams[role] = self.new_stream(role)
        return stream

    def new_stream(self, name: str = "") -> SimStream:
        """Return a fresh stream on the next hardware queue."""
        number, self._stream_count = self._stream_count, self._stream_count + 1
        return SimStream(self, name or f"stream{number}", self._queues[number % len(self._queues)])

    def wrap_stream(self, stream: Any) -> SimStream:
        """Return a stream of ours; None is the default stream."""
        if stream is None:
            return self.stream("default")
        if isinstance(stream, SimStream) and stream.device is self:
            return stream
        raise LogicError(f"the simulated device cannot use {type(stream).__name__} as a stream")

    def wrap_event(self, event: Any) -> SimEvent:
        """Return an event of ours; None has passed (INV-338)."""
        if event is None:
            return SimEvent(self)
        if isinstance(event, SimEvent):
            return event
        raise LogicError(f"the simulated device cannot use {type(event).__name__} as an event")

    # -- work -------------------------------------------------------------------------------------

    def enqueue(self, queue: _HardwareQueue, work: _Work) -> None:
        """Append to a hardware queue and step it."""
        if len(queue.works) >= self._queue_depth:
            self.full_count += 1
            self._block_until_room(queue)
        queue.works.append(work)
        self._step(queue)

    def _block_until_room(self, queue: _HardwareQueue) -> None:
        """Run the device inside the call, as a real launch blocks; behind a gate it cannot."""
        while len(queue.works) >= self._queue_depth:
            if not self._run_one(queue) and not any(map(self._run_one, self._queues)):
                kind = queue.works[0].kind
                raise SimDeadlock(f"a launch blocks the loop behind a {kind} that cannot end")

    def _run_one(self, queue: _HardwareQueue) -> bool:
        """End the head of a queue ahead of its time; False if it is empty or has to wait."""
        if not queue.works or queue.is_waiting:
            return False
        self._end(queue, queue.works[0])
        return True

    def _step(self, queue: _HardwareQueue) -> None:
        while queue.works and not queue.is_waiting:
            work = queue.works[0]
            if work.is_started:
                return
            work.is_started = True
            if work.blocked_on is not None:
                self._wait(queue, work)
                continue
            if work.begin is not None:
                work.begin()
            if work.duration_ns:
                self._loop.call_later(work.duration_ns / 1e9, self._end, queue, work)
                return
            self._end(queue, work, is_stepping=True)

    def _wait(self, queue: _HardwareQueue, work: _Work) -> None:
        queue.is_waiting = True

        def wake() -> None:
            if queue.works and queue.works[0] is work:
                queue.is_waiting = False
                self._end(queue, work, is_stepping=True)
                # Later work starts from the loop: whoever wakes us is in the middle of a call.
                self._loop.call_soon(self._step, queue)

        assert work.blocked_on is not None
        work.blocked_on(wake)

    def _end(self, queue: _HardwareQueue, work: _Work, *, is_stepping: bool = False) -> None:
        if not queue.works or queue.works[0] is not work:
            return  # ended inside a blocking launch, or lost with the device
        queue.works.popleft()
        if not work.is_started and work.begin is not None:
            work.begin()
        if work.end is not None:
            work.end()
        if not is_stepping:
            self._step(queue)

    def copy_pages(
        self,
        stream: Stream,
        pool: DevicePool,
        device_slots: SlotIds,
        host: HostLayout,
        host_slots: SlotIds,
        direction: CopyDirection,
    ) -> None:
        """Enqueue page copies; page ``i`` pairs ``device_slots[i]`` with ``host_slots[i]``."""
        stream, pages = cast("SimStream", stream), cast("PagePool", pool)
        self.check("copy_pages", stream)
        device_slots, host_slots = pages.check_slots(device_slots, host_slots)
        if len(device_slots) == 0:  # INV-711
            return
        pairs = list(zip(device_slots.tolist(), host_slots.tolist(), strict=True))
        for _, host_slot in pairs:
            self._check_registered(host.address(host_slot), host.payload_offset + pool.page_bytes)
        fails = self._fails_later("execute")
        self.copy_calls[direction] += 1
        page_bytes = pool.page_bytes
        half = page_bytes // 2

        def move(start: int, end: int) -> None:
            for device_slot, host_slot in pairs:
                address = host.address(host_slot) + host.payload_offset
                memory = memory_view(address, page_bytes)
                if direction is CopyDirection.TO_DEVICE:
                    write_page(pages, device_slot, memory[start:end], start)
                else:
                    memory[start:end] = read_page(pages, device_slot)[start:end]

        def finish() -> None:
            if fails:
                self.fail(fails)
                return
            move(half, page_bytes)
            self.copied_bytes[direction] += page_bytes * len(pairs)

        latency_ns = self._random.randint(*self._latency_ns)
        duration_ns = latency_ns + page_bytes * len(pairs) * 10**9 // self._bytes_per_s
        stream.enqueue(_Work("copy", max(1, duration_ns), lambda: move(0, half), finish))

    def _fails_later(self, call: str) -> int:
        try:
            self.check(call)
        except DeviceError as error:
            self._error = 0
            return int(error.code)  # type: ignore[attr-defined]
        return 0

    def _check_registered(self, address: int, length: int) -> None:
        for start, size in self._registered.items():
            if start <= address and address + length <= start + size:
                return
        raise LogicError(f"host memory at {address:#x} is not registered with the device")

    def _notification(self, queue: Completions, token: int) -> Callable[[], None]:
        key, self._pending_next = self._pending_next, self._pending_next + 1
        completions = cast("SimCompletions", queue)
        self._pending[key] = (completions, token)

        def post() -> None:
            if self._pending.pop(key, None) is not None:
                completions.post(token, 0)

        return post

    def notify(self, stream: Stream, queue: Completions, token: int) -> None:
        """Complete ``token`` when the stream gets here."""
        stream = cast("SimStream", stream)
        self.check("notify", stream)
        stream.enqueue(_Work("notify", end=self._notification(queue, token)))

    def notify_event(self, event: Event, queue: Completions, token: int) -> None:
        """Complete ``token`` when ``event`` has passed."""
        self.check("notify_event")
        cast("SimEvent", event).on_passed(self._notification(queue, token))

    @property
    def pending_count(self) -> int:
        """Notifications that have not completed."""
        return len(self._pending)

    def synchronize(self) -> None:
        """Run every stream to its end inside the call. Raises: SimDeadlock: a gate is closed."""
        self.check()
        while any(map(self._run_one, self._queues)):
            pass
        if any(queue.works for queue in self._queues):
            raise SimDeadlock("synchronize waits behind a gate or an event that never passes")

    def quiesce(self) -> bool:
        """Return whether memory may go: what is enqueued is dropped by `close`."""
        return not self.holds_memory

    def close(self) -> None:
        """Drop what is enqueued; a second call does nothing."""
        self.is_closed = True
        for queue in self._queues:
            queue.works.clear()
