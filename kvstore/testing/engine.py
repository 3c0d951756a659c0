"""A simulated disk engine: real order by sched.c, file contents in memory, seeded latency.

It implements `Engine` on loop time. A piece moves its bytes when it completes, not when it is
dispatched, as a disk does: memory or a slot given up too early shows as wrong bytes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass
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
from kvstore._uring.scheduler import DispatchedPiece, Scheduler
from kvstore.config import ALIGNMENT_BYTES, IoClass, IoConfig
from kvstore.errors import BusyError, StoreClosed
from kvstore.stats import EngineStats
from kvstore.testing.completions import SimCompletions
from kvstore.testing.faults import Fault, FaultKind, FaultPlan
from kvstore.testing.files import SimDisk, SimFile
from kvstore.testing.gate import SimGateWords
from kvstore.testing.memory import Bytes, memory_view
from kvstore.testing.seal import seal, verify

RETRIES_MAX = 8  # INV-117
NO_DEADLINE = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class _Transfer:
    """One page on its way; owns its memory and slot until ``inflight`` is zero (INV-120)."""

    number: int
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
    status: int = OK
    is_told: bool = False
    is_gate_told: bool = False
    is_sealed: bool = False
    retry_count: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def length(self) -> int:
        """Header and payload, one contiguous range."""
        return self.header_bytes + self.payload_bytes

    def memory(self) -> Bytes:
        """The bytes of the slot, as native code sees them."""
        return memory_view(self.address, self.length)


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
        disk: SimDisk | None = None,
        seed: int = 0,
        latency_ns: tuple[int, int] = (60_000, 400_000),
        bytes_per_s: int = 2 << 30,
        depth: int | None = None,
        policy: str = "kvstore",
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._config = config or IoConfig()
        self.faults = faults or FaultPlan()
        self.gate = gate
        self._disk = disk
        self._random = Random(seed)
        self._latency_ns = latency_ns
        self._bytes_per_s = bytes_per_s
        self._depth = depth or self._config.ring_entries
        self._sched = Scheduler(self._config, depth=self._depth, policy=policy)
        self._files: dict[int, SimFile] = {}
        self._transfers: dict[int, _Transfer] = {}  # by number
        self._numbers: list[int] = []
        self._generations: list[int] = []
        self._file_next = 0
        self._device_free_ns = 0
        self._errors: tuple[dict[int, int], ...] = ({}, {}, {})
        self._drains: list[tuple[int, asyncio.Future[None]]] = []
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
        """Take a file of the disk, a real one, or with no descriptor one in memory only."""
        fd = buffered_fd if buffered_fd >= 0 else direct_fd
        file = self._disk.find(fd) if self._disk is not None else None
        return self.add_file(file or SimFile(fd))

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
            number, io_class = transfer.number, transfer.io_class
            if not self._sched.add(
                number, io_class, transfer.opcode, transfer.header_bytes, transfer.length
            ):
                transfer.status = -errno.ENOBUFS  # above the cap: skipped, not delayed (INV-111)
                self._report(transfer)
                continue
            self._sched.ready(number, now_ns)
            deadline_ns = int(record["deadline_ns"]) or now_ns + round(self._config.deadline * 1e9)
            if deadline_ns != NO_DEADLINE:
                transfer.timer = self._loop.call_at(
                    deadline_ns / 1e9, self._deadline_passed, transfer
                )
        self._dispatch()

    def _transfer(self, queue: SimCompletions, record: np.void) -> _Transfer:
        if self._numbers:
            number = self._numbers.pop()
        else:
            number = len(self._generations)
            self._generations.append(0)
        self._generations[number] += 1
        transfer = _Transfer(
            number=number,
            handle=self._generations[number] << 32 | number,
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
        self._transfers[number] = transfer
        return transfer

    def _find(self, handle: int) -> _Transfer | None:
        transfer = self._transfers.get(handle & 0xFFFFFFFF)
        return transfer if transfer is not None and transfer.handle == handle else None

    def promote(self, handle: int) -> bool:
        """Move the queued pieces of a background transfer to the tail of required (INV-108)."""
        transfer = self._find(handle)
        if transfer is None or not self._sched.promote(transfer.number, self._now_ns()):
            return False
        transfer.io_class = IoClass.REQUIRED
        self._dispatch()
        return True

    def cancel(self, handle: int) -> bool:
        """Withdraw queued pieces; the end follows the last piece in flight (INV-118)."""
        transfer = self._find(handle)
        if transfer is None or transfer.is_told or transfer.status != OK:
            return False
        self._counters["cancelled"] += 1
        transfer.status = CANCELLED
        self._sched.withdraw(transfer.number)
        self._tell_gate(transfer)
        self._finish(transfer)
        self._dispatch()
        return True

    def background_room_bytes(self) -> int:
        """Bytes left under the cap of INV-111."""
        return self._sched.background_room

    # -- dispatch: sched.c decides --------------------------------------------------------------

    def _dispatch(self) -> None:
        now_ns = self._now_ns()
        while (piece := self._sched.next(now_ns)) is not None:
            self._start(piece, now_ns)

    def _start(self, piece: DispatchedPiece, now_ns: int) -> None:
        transfer = self._transfers[piece.transfer]
        if transfer.flags & SubmitFlag.SEAL and not transfer.is_sealed:
            seal(transfer.memory(), transfer.identity, transfer.payload_bytes, transfer.flags)
        transfer.is_sealed = True
        io_class, offset = IoClass(piece.io_class), transfer.offset + piece.offset
        if self.on_dispatch is not None:
            self.on_dispatch(io_class, transfer.opcode, transfer.file_id, offset, piece.length)
        fault = self.faults.decide(
            io_class, transfer.opcode, transfer.file_id, offset, piece.length
        )
        busy_ns = piece.length * 10**9 // self._bytes_per_s
        self._device_free_ns = max(now_ns, self._device_free_ns) + busy_ns
        end_ns = self._device_free_ns + self._random.randint(*self._latency_ns)
        if fault is not None and fault.kind is FaultKind.NEVER:
            self.faults.hold(lambda: self._complete(piece, None))
            return
        if fault is not None and fault.kind is FaultKind.LATE:
            end_ns += fault.value
        self._loop.call_at(end_ns / 1e9, self._complete, piece, fault)

    # -- completion -----------------------------------------------------------------------------

    def _perform(self, transfer: _Transfer, piece: DispatchedPiece, fault: Fault | None) -> int:
        """Move the bytes of a piece and return what the kernel would answer."""
        kind = fault.kind if fault is not None else None
        value = fault.value if fault is not None else 0
        if kind is FaultKind.ERRNO:
            return -value
        if kind is FaultKind.AGAIN:
            return -errno.EAGAIN
        if kind is FaultKind.ZERO:
            return 0
        length = min(piece.length, value) if kind is FaultKind.SHORT else piece.length
        offset = transfer.offset + piece.offset
        if kind is FaultKind.MISDIRECTED:
            offset += value
        memory = transfer.memory()[piece.offset : piece.offset + length]
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

    def _complete(self, piece: DispatchedPiece, fault: Fault | None) -> None:
        if self._is_crashed:
            return
        transfer, now_ns = self._transfers[piece.transfer], self._now_ns()
        result = self._perform(transfer, piece, fault)
        if result == piece.length:
            transfer.retry_count = 0
            self._sched.done(piece.piece, now_ns, ok=True)
        else:
            self._came_back_short(transfer, piece, result, now_ns)
        self._finish(transfer)
        self._dispatch()

    def _came_back_short(
        self, transfer: _Transfer, piece: DispatchedPiece, result: int, now_ns: int
    ) -> None:
        """Requeue the rest of a short or retried piece at the head, or fail its transfer."""
        if result < 0:
            errors = self._errors[piece.io_class]
            errors[-result] = errors.get(-result, 0) + 1
        else:
            self._counters["short_transfers"] += 1
        moved = max(0, result) // ALIGNMENT_BYTES * ALIGNMENT_BYTES  # INV-116
        transfer.retry_count = 0 if moved else transfer.retry_count + 1
        status = OK
        if result == 0:
            status = END_OF_FILE
        elif result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
            status = result
        elif transfer.retry_count > RETRIES_MAX:
            status = result if result < 0 else -errno.EIO
        if status != OK:
            self._sched.done(piece.piece, now_ns, ok=False)
            self._fail(transfer, status)
            return
        self._counters["retries"] += moved == 0
        self._sched.again(piece.piece, moved, now_ns)
        if transfer.status != OK:  # cancelled or failed meanwhile
            self._sched.withdraw(transfer.number)

    def _fail(self, transfer: _Transfer, status: int) -> None:
        if transfer.status == OK:
            transfer.status = status
            self._sched.withdraw(transfer.number)

    def _deadline_passed(self, transfer: _Transfer) -> None:
        if transfer.status != OK or transfer.is_told:
            return
        self._counters["deadlines"] += 1
        transfer.status = DEADLINE
        self._sched.withdraw(transfer.number)
        self._tell_gate(transfer)
        if self._sched.inflight(transfer.number):
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
        """End the transfer when nothing of it is queued or in flight."""
        sched, number = self._sched, transfer.number
        if self._transfers.get(number) is not transfer:
            return
        if sched.inflight(number) or sched.queued_bytes(number):
            return
        sched.remove(number)
        if transfer.status == OK and transfer.flags & SubmitFlag.VERIFY:
            transfer.status = verify(
                transfer.memory(), transfer.identity, transfer.payload_bytes, transfer.flags
            )
            self._counters["mismatches"] += transfer.status == MISMATCH
        self._report(transfer)

    def _report(self, transfer: _Transfer) -> None:
        """Give the number back and report the end, exactly once."""
        del self._transfers[transfer.number]
        self._numbers.append(transfer.number)
        if transfer.timer is not None:
            transfer.timer.cancel()
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
        if self.gate is not None:
            self.gate.publish_all(CANCELLED)

    def crash(self) -> None:
        """Stop at once, as a killed process does: pieces in flight are written torn or not at all.

        Nothing is reported afterwards; the files hold what a restart would find.
        """
        for transfer in self._transfers.values():
            if transfer.opcode is Opcode.WRITE and self._sched.inflight(transfer.number):
                cut = self._random.randrange(transfer.length + 1)
                cut -= cut % 512
                file = self._files[transfer.file_id]
                file.write(transfer.offset, transfer.memory()[:cut].copy())
            if transfer.timer is not None:
                transfer.timer.cancel()
        self._is_crashed = self._is_closing = True
        self._transfers.clear()

    @property
    def open_count(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def stats(self) -> EngineStats:
        """Return a frozen snapshot."""
        read, required, background = (
            self._sched.class_stats(io_class, self._errors[io_class]) for io_class in IoClass
        )
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
            background_bytes=self._sched.background_bytes,
            classes=(read, required, background),
            tickets_taken=gate.tickets_taken if gate else 0,
            tickets_good=gate.tickets_good if gate else 0,
            tickets_failed=gate.tickets_failed if gate else 0,
            **cast("dict[str, Any]", self._counters),
        )


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
