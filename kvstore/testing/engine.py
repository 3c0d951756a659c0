"""A simulated disk engine: real transfers, real order, file contents in memory, seeded latency.

It implements `Engine` on loop time. A piece moves its bytes when it completes, not when it is
dispatched, as a disk does: memory or a slot given up too early shows as wrong bytes.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast, final

import numpy as np

from kvstore._uring.base import (
    CANCELLED,
    DEADLINE,
    END_OF_FILE,
    MISMATCH,
    OK,
    CompletionFlag,
    Completions,
    Opcode,
    Submissions,
    SubmitFlag,
)
from kvstore.config import ALIGNMENT_BYTES, IoClass, IoConfig
from kvstore.errors import BusyError, StoreClosed
from kvstore.stats import ClassStats, EngineStats, LatencyHistogram
from kvstore.testing.completions import SimCompletions
from kvstore.testing.faults import Fault, FaultKind, FaultPlan
from kvstore.testing.files import SimFile
from kvstore.testing.gate import SimGateWords
from kvstore.testing.memory import Bytes, memory_view
from kvstore.testing.seal import seal, verify

RETRIES_MAX = 8  # INV-117
NO_DEADLINE = (1 << 64) - 1
READ_TAIL_NS = 5_000_000  # INV-136: a read counts as in flight for 5 ms after it ends
WRITE_CLASSES = (IoClass.REQUIRED, IoClass.BACKGROUND)


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a transfer that is one request: ``start`` is the offset inside the transfer."""

    transfer: _Transfer
    start: int
    length: int
    entered_ns: int
    dispatched_ns: int = 0
    retry_count: int = 0


@dataclass(slots=True, eq=False)
class _Transfer:
    """One page on its way; owns its memory and slot until ``inflight`` is zero (INV-120)."""

    handle: int
    queue: SimCompletions
    token: int
    address: int
    offset: int
    payload_bytes: int
    header_bytes: int
    file_id: int
    io_class: IoClass
    opcode: Opcode
    flags: SubmitFlag
    identity: Bytes
    gate_word: int
    gate_generation: int
    queued: int = 0
    inflight: int = 0
    status: int = OK
    is_told: bool = False
    is_gate_told: bool = False
    is_sealed: bool = False
    is_charged: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def length(self) -> int:
        """Header and payload, one contiguous range."""
        return self.header_bytes + self.payload_bytes

    def memory(self) -> Bytes:
        """The bytes of the slot, as native code sees them."""
        return memory_view(self.address, self.length)


@dataclass(slots=True)
class _ClassState:
    """Queue and counters of one class; the field names are those of `ClassStats`."""

    queue: deque[_Piece] = field(default_factory=deque)
    issued_bytes: int = 0
    promoted_in_bytes: int = 0
    promoted_out_bytes: int = 0
    done_bytes: int = 0
    failed_bytes: int = 0
    withdrawn_bytes: int = 0
    queued_bytes: int = 0
    inflight_bytes: int = 0
    transfers: int = 0
    pieces: int = 0
    promotions: int = 0
    aged_dispatches: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    queue_wait: LatencyHistogram = field(default_factory=LatencyHistogram)
    service: LatencyHistogram = field(default_factory=LatencyHistogram)
    errors: dict[int, int] = field(default_factory=dict)

    def snapshot(self) -> ClassStats:
        """Freeze the counters."""
        names = [name for name in ClassStats.__dataclass_fields__ if name.endswith("_bytes")]
        numbers = {name: getattr(self, name) for name in names}
        for name in ("transfers", "pieces", "promotions", "aged_dispatches"):
            numbers[name] = getattr(self, name)
        return ClassStats(
            **numbers,
            queue_wait=self.queue_wait.snapshot(),
            service=self.service.snapshot(),
            errors=dict(self.errors),
        )


@final
class SimEngine:
    """Implements `Engine`. Create it on the loop it runs on; its time is the loop's.

    ``latency_ns`` is the range of the seeded latency of a piece, ``bytes_per_s`` the bandwidth of
    the one simulated device. ``faults`` may be changed while the engine runs. ``on_dispatch`` is
    called with (io_class, opcode, file_id, offset, length) of each dispatched piece.
    """

    name = "simulated"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        config: IoConfig | None = None,
        faults: FaultPlan | None = None,
        gate: SimGateWords | None = None,
        seed: int = 0,
        latency_ns: tuple[int, int] = (60_000, 400_000),
        bytes_per_s: int = 2 << 30,
        depth: int | None = None,
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._config = config or IoConfig()
        self.faults = faults or FaultPlan()
        self.gate = gate
        self._random = Random(seed)
        self._latency_ns = latency_ns
        self._bytes_per_s = bytes_per_s
        self._depth = depth or self._config.ring_entries
        self._files: dict[int, SimFile] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._classes = (_ClassState(), _ClassState(), _ClassState())
        self._handle_next = 1
        self._file_next = 0
        self._inflight_count = 0
        self._device_free_ns = 0
        self._dispatch_count = 0
        self._last_was_read = True
        self._background_turn_at = 0
        self._read_ended_ns = -READ_TAIL_NS
        self._background_bytes = 0
        self._drains: list[tuple[int, asyncio.Future[None]]] = []
        self._wake: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._is_crashed = False
        self._memory: dict[int, int] = {}
        self._counters = dict.fromkeys(
            ("short_transfers", "retries", "mismatches", "deadlines", "cancelled", "submit_calls"),
            0,
        )
        self.on_dispatch: Callable[[IoClass, Opcode, int, int, int], None] | None = None
        self.refuse_memory = False

    # -- files and memory ---------------------------------------------------------------------

    def register_file(self, direct_fd: int, buffered_fd: int) -> int:
        """Take a file; with no descriptor at all its contents live in memory only."""
        return self.add_file(SimFile(buffered_fd if buffered_fd >= 0 else direct_fd))

    def add_file(self, file: SimFile) -> int:
        """Take a simulated file, for instance one that an earlier engine wrote."""
        file_id, self._file_next = self._file_next, self._file_next + 1
        self._files[file_id] = file
        return file_id

    def file(self, file_id: int) -> SimFile:
        """Return the contents behind a file id."""
        return self._files[file_id]

    def unregister_file(self, file_id: int) -> None:
        """Forget a drained file. Raises: BusyError: pieces of it are queued or in flight."""
        if self._is_file_busy(file_id):
            raise BusyError(f"file {file_id}: pieces are in flight", file_id=file_id)
        del self._files[file_id]

    def _is_file_busy(self, file_id: int) -> bool:
        return any(transfer.file_id == file_id for transfer in self._transfers.values())

    def register_memory(self, address: int, length: int) -> bool:
        """Remember a slab; False if the test asked for a refusal."""
        if self.refuse_memory:
            return False
        self._memory[address] = length
        return True

    def unregister_memory(self, address: int) -> None:
        """Forget a slab."""
        self._memory.pop(address, None)

    # -- submission ---------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def submit(self, queue: Completions, submissions: Submissions) -> None:
        """Take a batch; dispatch happens in this call as far as the bounds allow."""
        if self._is_closing:
            raise StoreClosed("the engine is stopping")
        self._counters["submit_calls"] += 1
        now_ns = self._now_ns()
        for record in submissions:
            transfer = self._transfer(cast("SimCompletions", queue), record)
            record["handle"] = transfer.handle
            self._enqueue(transfer, now_ns)
            deadline_ns = int(record["deadline_ns"]) or now_ns + round(self._config.deadline * 1e9)
            if deadline_ns != NO_DEADLINE:
                transfer.timer = self._loop.call_at(
                    deadline_ns / 1e9, self._deadline_passed, transfer
                )
        self._dispatch()

    def _transfer(self, queue: SimCompletions, record: np.void) -> _Transfer:
        handle, self._handle_next = self._handle_next, self._handle_next + 1
        transfer = _Transfer(
            handle=handle,
            queue=queue,
            token=int(record["token"]),
            address=int(record["address"]),
            offset=int(record["offset"]),
            payload_bytes=int(record["payload_bytes"]),
            header_bytes=int(record["header_bytes"]),
            file_id=int(record["file_id"]),
            io_class=IoClass(int(record["io_class"])),
            opcode=Opcode(int(record["opcode"])),
            flags=SubmitFlag(int(record["flags"])),
            identity=record["identity"].copy(),
            gate_word=int(record["gate_word"]),
            gate_generation=int(record["gate_generation"]),
        )
        assert transfer.file_id in self._files, "a transfer names a registered file"
        assert transfer.address % ALIGNMENT_BYTES == 0, "slots are 4 KiB aligned"
        assert transfer.offset % ALIGNMENT_BYTES == 0, "slots are 4 KiB aligned in the file"
        self._transfers[handle] = transfer
        return transfer

    def _cut(self, transfer: _Transfer) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each piece; the first may be one header longer (INV-339)."""
        config = self._config
        is_read = transfer.opcode is Opcode.READ
        limit = config.read_piece_bytes if is_read else config.write_piece_bytes
        start, length = 0, min(transfer.length, limit + transfer.header_bytes)
        while start < transfer.length:
            yield start, length
            start += length
            length = min(limit, transfer.length - start)

    def _enqueue(self, transfer: _Transfer, now_ns: int) -> None:
        state = self._classes[transfer.io_class]
        state.transfers += 1
        state.issued_bytes += transfer.length
        if transfer.io_class is IoClass.BACKGROUND:
            transfer.is_charged = True
            self._background_bytes += transfer.length
        for start, length in self._cut(transfer):
            state.queue.append(_Piece(transfer, start, length, now_ns))
            state.queued_bytes += length
            transfer.queued += 1

    def promote(self, handle: int) -> bool:
        """Move the queued pieces of a background transfer to the tail of required (INV-108)."""
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.io_class is not IoClass.BACKGROUND or transfer.is_told:
            return False
        now_ns = self._now_ns()
        source, target = self._classes[IoClass.BACKGROUND], self._classes[IoClass.REQUIRED]
        transfer.io_class = IoClass.REQUIRED
        source.promotions += 1
        moved = [piece for piece in source.queue if piece.transfer is transfer]
        for piece in moved:
            source.queue.remove(piece)
            piece.entered_ns = now_ns  # ageing restarts (INV-110)
            target.queue.append(piece)
            source.queued_bytes -= piece.length
            source.promoted_out_bytes += piece.length
            target.queued_bytes += piece.length
            target.promoted_in_bytes += piece.length
        self._dispatch()
        return True

    def cancel(self, handle: int) -> bool:
        """Withdraw queued pieces; the end follows the last piece in flight (INV-118)."""
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.is_told or transfer.status != OK:
            return False
        self._counters["cancelled"] += 1
        transfer.status = CANCELLED
        self._withdraw(transfer)
        self._tell_gate(transfer)
        self._finish(transfer)
        self._dispatch()
        return True

    def background_room_bytes(self) -> int:
        """Bytes left under the cap of INV-111."""
        return max(0, self._config.background_bytes_max - self._background_bytes)

    # -- dispatch: the order of INV-101 to INV-107 and the bounds of INV-136 ---------------------

    def _dispatch(self) -> None:
        while self._inflight_count < self._depth:
            now_ns = self._now_ns()
            io_class = self._choose(now_ns)
            if io_class is None:
                break
            self._start(io_class, now_ns)
        self._arm()

    def _is_aged(self, io_class: IoClass, now_ns: int) -> bool:
        config, state = self._config, self._classes[io_class]
        if not state.queue:
            return False
        age = config.required_age if io_class is IoClass.REQUIRED else config.background_age
        return now_ns - state.queue[0].entered_ns >= round(age * 1e9)

    def _order(self, now_ns: int) -> list[IoClass]:
        read, required, background = IoClass.READ, IoClass.REQUIRED, IoClass.BACKGROUND
        aged_required = self._is_aged(required, now_ns)
        aged_background = self._is_aged(background, now_ns)
        is_turn = self._dispatch_count >= self._background_turn_at
        if aged_background and (not aged_required or is_turn):
            writes = [background, required]
        else:
            writes = [required, background]
        if not self._classes[read].queue:
            return writes
        order: list[IoClass] = [read]
        if self._last_was_read:
            if aged_background and is_turn:
                order.insert(0, background)
            elif aged_required:
                order.insert(0, required)
        return order + [item for item in writes if item not in order]

    def _room(self, io_class: IoClass, now_ns: int) -> int:
        config = self._config
        if io_class is IoClass.READ:
            return config.inflight_bytes
        state = self._classes[io_class]
        if io_class is IoClass.REQUIRED:
            return config.required_inflight_bytes - state.inflight_bytes
        reads = self._classes[IoClass.READ]
        if reads.queue:
            is_turn = self._dispatch_count >= self._background_turn_at
            bound = state.inflight_bytes + 1 if is_turn else 0
            return bound - state.inflight_bytes
        if reads.inflight_bytes or now_ns - self._read_ended_ns < READ_TAIL_NS:
            return 1 - state.inflight_bytes
        return config.background_inflight_bytes - state.inflight_bytes

    def _choose(self, now_ns: int) -> IoClass | None:
        inflight = sum(state.inflight_bytes for state in self._classes)
        for io_class in self._order(now_ns):
            queue = self._classes[io_class].queue
            if not queue or self._room(io_class, now_ns) <= 0:
                continue
            piece = queue[0]
            if inflight and inflight + piece.length > self._config.inflight_bytes:
                return None
            return io_class
        return None

    def _arm(self) -> None:
        """Wake up when the tail of the last read ends and writes wait for it."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        background = self._classes[IoClass.BACKGROUND]
        if background.queue and not self._inflight_count:
            at_ns = self._read_ended_ns + READ_TAIL_NS
            self._wake = self._loop.call_at(max(at_ns, self._now_ns()) / 1e9, self._dispatch)

    def _start(self, io_class: IoClass, now_ns: int) -> None:
        state = self._classes[io_class]
        piece = state.queue.popleft()
        transfer = piece.transfer
        state.aged_dispatches += io_class in WRITE_CLASSES and self._is_aged(io_class, now_ns)
        self._dispatch_count += 1
        self._last_was_read = io_class is IoClass.READ
        if io_class is IoClass.BACKGROUND:
            self._background_turn_at = self._dispatch_count + self._config.background_turn - 1
        if transfer.flags & SubmitFlag.SEAL and not transfer.is_sealed:
            seal(transfer.memory(), transfer.identity, transfer.payload_bytes, transfer.flags)
        transfer.is_sealed = True
        piece.dispatched_ns = now_ns
        state.pieces += 1
        state.queue_wait.record(now_ns - piece.entered_ns)
        state.queued_bytes -= piece.length
        state.inflight_bytes += piece.length
        transfer.queued -= 1
        transfer.inflight += 1
        self._inflight_count += 1
        offset = transfer.offset + piece.start
        if self.on_dispatch is not None:
            self.on_dispatch(io_class, transfer.opcode, transfer.file_id, offset, piece.length)
        fault = self.faults.decide(
            io_class, transfer.opcode, transfer.file_id, offset, piece.length
        )
        busy_ns = piece.length * 10**9 // self._bytes_per_s
        self._device_free_ns = max(now_ns, self._device_free_ns) + busy_ns
        end_ns = self._device_free_ns + self._random.randint(*self._latency_ns)
        if fault is not None and fault.kind is FaultKind.NEVER:
            self.faults.hold(lambda: self._complete(piece, io_class, None))
            return
        if fault is not None and fault.kind is FaultKind.LATE:
            end_ns += fault.value
        self._loop.call_at(end_ns / 1e9, self._complete, piece, io_class, fault)

    # -- completion -----------------------------------------------------------------------------

    def _perform(self, piece: _Piece, fault: Fault | None) -> int:
        """Move the bytes of a piece and return what the kernel would answer."""
        transfer = piece.transfer
        kind = fault.kind if fault is not None else None
        value = fault.value if fault is not None else 0
        if kind is FaultKind.ERRNO:
            return -value
        if kind is FaultKind.AGAIN:
            return -errno.EAGAIN
        if kind is FaultKind.ZERO:
            return 0
        length = min(piece.length, value) if kind is FaultKind.SHORT else piece.length
        offset = transfer.offset + piece.start
        if kind is FaultKind.MISDIRECTED:
            offset += value
        memory = transfer.memory()[piece.start : piece.start + length]
        file = self._files[transfer.file_id]
        if transfer.opcode is Opcode.READ:
            memory[:] = file.read(offset, length)
            if kind is FaultKind.FLIP:
                memory[self._random.randrange(length)] ^= 1 << self._random.randrange(8)
            return length
        data = memory.copy()
        if kind is FaultKind.FLIP:
            data[self._random.randrange(length)] ^= 1 << self._random.randrange(8)
        if kind is FaultKind.TORN:
            data = data[: min(value, length)]
        file.write(offset, data)
        return length

    def _complete(self, piece: _Piece, io_class: IoClass, fault: Fault | None) -> None:
        if self._is_crashed:
            return
        transfer, state, now_ns = piece.transfer, self._classes[io_class], self._now_ns()
        result = self._perform(piece, fault)
        state.service.record(now_ns - piece.dispatched_ns)
        state.inflight_bytes -= piece.length
        transfer.inflight -= 1
        self._inflight_count -= 1
        if io_class is IoClass.READ:
            self._read_ended_ns = now_ns
        moved = max(0, result)
        if moved < piece.length:
            moved -= moved % ALIGNMENT_BYTES  # INV-116: down to the alignment of the file
        self._account(transfer, piece, io_class, moved)
        if result != piece.length:
            self._continue(piece, io_class, result, moved)
        self._finish(transfer)
        self._dispatch()

    def _account(self, transfer: _Transfer, piece: _Piece, io_class: IoClass, moved: int) -> None:
        state = self._classes[io_class]
        state.done_bytes += moved
        if transfer.opcode is Opcode.READ:
            state.read_bytes += moved
        else:
            state.written_bytes += moved
        self._repay(piece, moved)

    def _repay(self, piece: _Piece, length: int) -> None:
        """Give bytes back to the cap: they are written, failed or withdrawn (INV-112)."""
        if piece.transfer.is_charged:
            self._background_bytes -= length

    def _continue(self, piece: _Piece, io_class: IoClass, result: int, moved: int) -> None:
        """Requeue the rest of a short or retried piece at the head, or fail its transfer."""
        transfer = piece.transfer
        piece.start += moved
        piece.length -= moved
        piece.retry_count = 0 if moved else piece.retry_count + 1
        status = OK
        if result == 0:
            status = END_OF_FILE
        elif result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
            status = result
        elif piece.retry_count > RETRIES_MAX:
            status = result if result < 0 else -errno.EIO
        if result > 0:
            self._counters["short_transfers"] += 1
        if result < 0:
            errors = self._classes[io_class].errors
            errors[-result] = errors.get(-result, 0) + 1
        if status != OK:
            self._drop_piece(piece, io_class, is_failed=True)
            self._fail(transfer, status)
        elif transfer.status != OK:
            self._drop_piece(piece, io_class, is_failed=False)
        else:
            self._counters["retries"] += moved == 0
            self._requeue(piece, io_class)

    def _requeue(self, piece: _Piece, io_class: IoClass) -> None:
        transfer = piece.transfer
        state = self._classes[io_class]
        if transfer.io_class is not io_class:  # promoted while in flight
            state.promoted_out_bytes += piece.length
            target = self._classes[transfer.io_class]
            target.promoted_in_bytes += piece.length
            piece.entered_ns = self._now_ns()
            target.queue.append(piece)
            target.queued_bytes += piece.length
        else:
            state.queue.appendleft(piece)
            state.queued_bytes += piece.length
        transfer.queued += 1

    def _drop_piece(self, piece: _Piece, io_class: IoClass, *, is_failed: bool) -> None:
        state = self._classes[io_class]
        if is_failed:
            state.failed_bytes += piece.length
        else:
            state.withdrawn_bytes += piece.length
        self._repay(piece, piece.length)

    def _withdraw(self, transfer: _Transfer) -> None:
        state = self._classes[transfer.io_class]
        for piece in [piece for piece in state.queue if piece.transfer is transfer]:
            state.queue.remove(piece)
            state.queued_bytes -= piece.length
            transfer.queued -= 1
            self._drop_piece(piece, transfer.io_class, is_failed=False)

    def _fail(self, transfer: _Transfer, status: int) -> None:
        if transfer.status == OK:
            transfer.status = status
            self._withdraw(transfer)

    def _deadline_passed(self, transfer: _Transfer) -> None:
        if transfer.status != OK or transfer.is_told:
            return
        self._counters["deadlines"] += 1
        transfer.status = DEADLINE
        self._withdraw(transfer)
        self._tell_gate(transfer)
        if transfer.inflight:
            transfer.is_told = True
            transfer.queue.post(transfer.token, DEADLINE, CompletionFlag.VERDICT, 0)
        self._finish(transfer)
        self._dispatch()

    def _tell_gate(self, transfer: _Transfer) -> None:
        if transfer.gate_word >= 0 and not transfer.is_gate_told:
            assert self.gate is not None, "a gated transfer needs gate words"
            transfer.is_gate_told = True
            self.gate.transfer_done(transfer.gate_word, transfer.gate_generation, transfer.status)

    def _finish(self, transfer: _Transfer) -> None:
        """Report the transfer when nothing of it is queued or in flight, exactly once."""
        if transfer.queued or transfer.inflight or transfer.handle not in self._transfers:
            return
        del self._transfers[transfer.handle]
        if transfer.timer is not None:
            transfer.timer.cancel()
        if transfer.status == OK and transfer.flags & SubmitFlag.VERIFY:
            transfer.status = verify(
                transfer.memory(), transfer.identity, transfer.payload_bytes, transfer.flags
            )
            self._counters["mismatches"] += transfer.status == MISMATCH
        if transfer.status != OK and transfer.flags & SubmitFlag.POISON:
            transfer.memory()[:] = 0xFF
        self._tell_gate(transfer)
        flags = CompletionFlag.END if transfer.is_told else CompletionFlag(3)
        value = transfer.length if transfer.status == OK else 0
        transfer.queue.post(transfer.token, transfer.status, flags, value)
        for file_id, future in self._drains:
            if not future.done() and not self._is_file_busy(file_id):
                future.set_result(None)

    # -- end ------------------------------------------------------------------------------------

    async def drain(self, file_id: int, timeout: float) -> bool:
        """Wait until no transfer of this file is open; False on timeout (INV-121)."""
        if not self._is_file_busy(file_id):
            return True
        future: asyncio.Future[None] = self._loop.create_future()
        self._drains.append((file_id, future))
        timer = self._loop.call_later(timeout, _set_done, future)
        try:
            await future
        finally:
            timer.cancel()
            self._drains.remove((file_id, future))
        return not self._is_file_busy(file_id)

    async def aclose(self) -> None:
        """Cancel what is queued, wait for what is in flight within the drain limit, publish."""
        self._is_closing = True
        for transfer in list(self._transfers.values()):
            self.cancel(transfer.handle)
        for file_id in list(self._files):
            await self.drain(file_id, self._config.drain_timeout)
        if self._wake is not None:
            self._wake.cancel()
        if self.gate is not None:
            self.gate.publish_all(CANCELLED)

    def crash(self) -> None:
        """Stop at once, as a killed process does: pieces in flight are written torn or not at all.

        Nothing is reported afterwards; the files hold what a restart would find.
        """
        for transfer in self._transfers.values():
            if transfer.opcode is Opcode.WRITE and transfer.inflight:
                cut = self._random.randrange(transfer.length + 1)
                cut -= cut % 512
                file = self._files[transfer.file_id]
                file.write(transfer.offset, transfer.memory()[:cut].copy())
            if transfer.timer is not None:
                transfer.timer.cancel()
        self._is_crashed = self._is_closing = True
        self._transfers.clear()
        for state in self._classes:
            state.queue.clear()

    @property
    def open_count(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def stats(self) -> EngineStats:
        """Return a frozen snapshot."""
        read, required, background = (state.snapshot() for state in self._classes)
        config = self._config
        gate = self.gate
        return EngineStats(
            engine=self.name,
            ring_entries=self._depth,
            registered_memory_bytes=sum(self._memory.values()),
            registered_buffers=bool(self._memory),
            bounds={
                "total": config.inflight_bytes,
                "required": config.required_inflight_bytes,
                "background": config.background_inflight_bytes,
            },
            buffered_files=len(self._files),
            background_bytes=self._background_bytes,
            classes=(read, required, background),
            tickets_taken=gate.tickets_taken if gate else 0,
            tickets_good=gate.tickets_good if gate else 0,
            tickets_failed=gate.tickets_failed if gate else 0,
            **cast("dict[str, Any]", self._counters),
        )


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
