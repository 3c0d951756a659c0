"""A simulated device: numpy memory, streams stepped by loop time, events, gates, sticky errors.

Work of a stream runs in order, and streams that share a hardware queue wait for each other, as
on a device with few queues. A copy moves the first half of each page when it starts and the
second half when it ends: memory or a slot given up in between shows as wrong bytes.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from kvstore._uring.base import Completions, Ticket
from kvstore.devices.base import (
    CopyDirection,
    DeviceCaps,
    DevicePool,
    Event,
    HostLayout,
    SlotIds,
    Stream,
)
from kvstore.errors import CapacityError, ConfigError, DeviceError, LogicError, UnsupportedError
from kvstore.testing.completions import SimCompletions
from kvstore.testing.gate import SimGateWords
from kvstore.testing.loop import SimDeadlock
from kvstore.testing.memory import memory_view

Bytes = npt.NDArray[np.uint8]
ILLEGAL_ADDRESS = 700  # the driver's code for the usual sticky error


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
        self._device = device
        self.name = name
        self._queue = queue
        self._is_capturing = False

    @property
    def depth(self) -> int:
        """Entries in the hardware queue behind this stream."""
        return len(self._queue.works)

    def enqueue(self, work: _Work) -> None:
        """Append work; on a full queue the call blocks, that is, time inside it moves on."""
        self._device.enqueue(self._queue, work)

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait for ``event``."""
        self._device.check()
        event = self._device.wrap_event(event)
        if event.is_passed:
            return
        self.enqueue(_Work("wait_event", blocked_on=event.on_passed))

    def wait_ticket(self, ticket: Ticket) -> None:
        """Let later work wait for ``word >= generation``. Raises: UnsupportedError, DeviceError."""
        self._device.check()
        self._device.refuse_capture(self, "a gate wait")
        gate = self._device.gate
        if gate is None or not self._device.caps.memops64:
            raise UnsupportedError("the simulated device has no gate words")
        self._device.fail_if_asked("wait_ticket")
        word, generation = ticket.word, ticket.generation
        if not gate.is_passed(word, generation):
            self._device.gated_streams.add(self.name)

            def subscribe(wake: Callable[[], None]) -> None:
                gate.on_passed(word, generation, wake)

            self.enqueue(
                _Work(
                    "wait_ticket",
                    blocked_on=subscribe,
                    end=lambda: self._device.gated_streams.discard(self.name),
                )
            )

    def launch(
        self, kernel: Callable[[], None], duration_ns: int = 0, *, begin: Any = None
    ) -> None:
        """Enqueue a fake kernel: ``kernel`` runs when it ends, ``duration_ns`` after its start."""
        self._device.check()
        self.enqueue(_Work("kernel", duration_ns, begin=begin, end=kernel))

    def record(self) -> SimEvent:
        """Return an event behind everything enqueued so far."""
        self._device.check()
        event = SimEvent(self._device, is_passed=not self._queue.works)
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


@final
class SimPool:
    """Page slots of one pool group in numpy memory, or adopted arrays, one piece per array."""

    def __init__(
        self, name: str, slot_count: int, page_bytes: int, pieces: Sequence[Bytes]
    ) -> None:
        self.name = name
        self.slot_count = slot_count
        self.page_bytes = page_bytes
        self._pieces = list(pieces)  # each (slot_count, piece_bytes) uint8

    def as_tensor(self, dtype: Any = None, shape: Sequence[int] | None = None) -> Any:
        """Return the pool as (slot_count, ...) numpy array."""
        if len(self._pieces) != 1:
            raise LogicError("an adopted pool has one tensor per piece; use yours")
        array: npt.NDArray[Any] = self._pieces[0]
        if dtype is not None:
            array = array.view(dtype)
        return array if shape is None else array.reshape((self.slot_count, *shape))

    def page(self, slot_id: int) -> Bytes:
        """Return a copy of the bytes of a slot, pieces joined: (page_bytes,) uint8."""
        return np.concatenate([piece[slot_id] for piece in self._pieces])

    def write_page(self, slot_id: int, data: Bytes) -> None:
        """Overwrite a slot, as a kernel that has finished would."""
        self.write_range(slot_id, 0, data)

    def write_range(self, slot_id: int, start: int, data: Bytes) -> None:
        """Overwrite ``data.size`` bytes of a slot from ``start`` on."""
        at, done = 0, 0
        for piece in self._pieces:
            size = piece.shape[1]
            low, high = max(start, at), min(start + data.size, at + size)
            if low < high:
                piece[slot_id, low - at : high - at] = data[low - start : high - start]
                done += high - low
            at += size
        assert done == data.size


@final
class SimDevice:
    """Implements `Device` on loop time.

    ``queue_depth`` bounds the entries of a hardware queue, ``hardware_queues`` their number:
    streams beyond it share one, so that head-of-line blocking can be reproduced. ``refuse`` maps a
    call (``copy_pages``, ``wait_ticket``, ``create_pool``, ``register_host``) to how many of its
    next calls fail. `fail` makes a sticky error.
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
        self._error: DeviceError | None = None
        self._pending: dict[int, tuple[SimCompletions, int]] = {}
        self._pending_next = 0
        self._registered: dict[int, int] = {}
        self.refuse: dict[str, int] = {}
        self.gated_streams: set[str] = set()
        self.full_count = 0
        self.copied_bytes = dict.fromkeys(CopyDirection, 0)
        self.copy_calls = dict.fromkeys(CopyDirection, 0)
        self.is_closed = False

    # -- errors ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the sticky error, if the device is lost."""
        if self._error is not None:
            raise self._error

    def fail(self, message: str = "an illegal address was used", code: int = 700) -> None:
        """Lose the device: later calls raise, and pending notifications complete with it."""
        self._error = DeviceError(message, code=code, is_sticky=True)
        for queue in self._queues:
            queue.works.clear()
        pending, self._pending = self._pending, {}
        for completions, token in pending.values():
            completions.post(token, -errno.EIO)

    def fail_if_asked(self, call: str) -> None:
        """Raise a passing DeviceError if the test asked for it in ``refuse``."""
        if self.refuse.get(call, 0) > 0:
            self.refuse[call] -= 1
            raise DeviceError(f"{call}: refused by the test", code=1, is_sticky=False)

    def refuse_capture(self, stream: SimStream, what: str) -> None:
        """Raise if a graph capture is open on ``stream``."""
        if stream.is_capturing():
            raise UnsupportedError(f"{what} cannot be captured into a graph")

    # -- pools and memory -----------------------------------------------------------------------

    def create_pool(self, name: str, slot_count: int, page_bytes: int) -> SimPool:
        """Allocate a pool. Raises: CapacityError: asked for in ``refuse``."""
        self.check()
        if self.refuse.get("create_pool", 0) > 0:
            self.refuse["create_pool"] -= 1
            raise CapacityError(f"{name}: the device has no memory", pool_group=name)
        piece = np.zeros((slot_count, page_bytes), np.uint8)
        return SimPool(name, slot_count, page_bytes, [piece])

    def adopt_pool(
        self, name: str, tensors: Sequence[Any], block_dim: int, page_bytes: int
    ) -> SimPool:
        """Use the caller's numpy arrays, cut along ``block_dim`` (only 0 here)."""
        self.check()
        if block_dim != 0:
            raise ConfigError("block_dim: the simulated device cuts along 0", field="block_dim")
        pieces = [np.asarray(tensor).view(np.uint8).reshape(len(tensor), -1) for tensor in tensors]
        total = sum(piece.shape[1] for piece in pieces)
        if total != page_bytes:
            raise ConfigError(
                f"tensors: {name} has {total} bytes per block, not {page_bytes}", field="tensors"
            )
        return SimPool(name, len(pieces[0]), page_bytes, pieces)

    def register_host(self, address: int, length: int) -> None:
        """Remember a slab."""
        self.check()
        self.fail_if_asked("register_host")
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
            queue = self._queues[len(self._streams) % len(self._queues)]
            stream = self._streams[role] = SimStream(self, role, queue)
        return stream

    def wrap_stream(self, stream: Any) -> SimStream:
        """Return a stream for ours, a number, or None for the default stream."""
        if isinstance(stream, SimStream):
            return stream
        return self.stream("default" if stream is None else f"caller {stream}")

    def wrap_event(self, event: Any) -> SimEvent:
        """Return an event of ours; None has passed."""
        if event is None:
            return SimEvent(self)
        if not isinstance(event, SimEvent):
            raise TypeError(f"not an event of the simulated device: {event!r}")
        return event

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
        stream, pool = cast("SimStream", stream), cast("SimPool", pool)
        self.check()
        self.refuse_capture(stream, "a page copy")
        assert len(device_slots) == len(host_slots), "slots come in pairs"
        if len(device_slots) == 0:
            return
        self.fail_if_asked("copy_pages")
        pairs = [(int(a), int(b)) for a, b in zip(device_slots, host_slots, strict=True)]
        assert all(0 <= slot < pool.slot_count for slot, _ in pairs), "slots are of the pool"
        self.copy_calls[direction] += 1
        page_bytes = pool.page_bytes
        half = page_bytes // 2

        def move(start: int, end: int) -> None:
            for device_slot, host_slot in pairs:
                address = host.address(host_slot) + host.payload_offset
                memory = memory_view(address, page_bytes)
                if direction is CopyDirection.TO_DEVICE:
                    pool.write_range(device_slot, start, memory[start:end])
                else:
                    memory[start:end] = pool.page(device_slot)[start:end]

        def finish() -> None:
            move(half, page_bytes)
            self.copied_bytes[direction] += page_bytes * len(pairs)

        latency_ns = self._random.randint(*self._latency_ns)
        duration_ns = latency_ns + page_bytes * len(pairs) * 10**9 // self._bytes_per_s
        stream.enqueue(_Work("copy", max(1, duration_ns), lambda: move(0, half), finish))

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
        self.check()
        self.refuse_capture(stream, "a notification")
        stream.enqueue(_Work("notify", end=self._notification(queue, token)))

    def notify_event(self, event: Event, queue: Completions, token: int) -> None:
        """Complete ``token`` when ``event`` has passed."""
        self.check()
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

    def close(self) -> None:
        """Drop what is enqueued; a second call does nothing."""
        self.is_closed = True
        for queue in self._queues:
            queue.works.clear()
