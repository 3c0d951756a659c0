"""A simulated disk engine: real order by sched.c, file contents in memory, seeded latency.

It implements `Engine` on loop time. A piece moves its bytes when it completes, not when it is
dispatched, as a disk does: memory or a slot given up too early shows as wrong bytes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast, final

import numpy as np

from kvstore._uring.base import (
    CANCELLED,
    DEADLINE,
    END_OF_FILE,
    OK,
    CompletionFlag,
    Completions,
    Opcode,
    Submissions,
    SubmitFlag,
)
from kvstore._uring.scheduler import DispatchedPiece, Scheduler
from kvstore.config import ALIGNMENT_BYTES, HEADER_BYTES, IoClass, IoConfig
from kvstore.errors import BusyError, EngineError, StoreClosed
from kvstore.stats import EngineStats
from kvstore.testing.completions import SimCompletions
from kvstore.testing.faults import Fault, FaultKind, FaultPlan
from kvstore.testing.files import SimDisk, SimFile
from kvstore.testing.gate import SimGateWords
from kvstore.testing.memory import Bytes, memory_view
from kvstore.testing.seal import seal, verify

RETRIES_MAX = 8  # INV-117
CHECKSUM_BYTES_PER_S = 10 << 30
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
    is_checking: bool = False
    moved: int = 0
    tries: dict[int, int] = field(default_factory=dict)  # by piece, without progress
    deadline_ns: int = NO_DEADLINE
    timer: asyncio.TimerHandle | None = None

    @property
    def length(self) -> int:
        """Header and padded payload, one contiguous range (INV-339)."""
        return self.header_bytes - (-self.payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

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
        self.is_crashed = False
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
        if not all(self._is_valid(record) for record in submissions):
            raise EngineError("submission refused: Invalid argument", errno=errno.EINVAL)
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
                record["handle"] = 0
                self._report(transfer)
                continue
            self._sched.ready(number, now_ns)
            deadline_ns = int(record["deadline_ns"]) or now_ns + round(self._config.deadline * 1e9)
            self._set_deadline(transfer, deadline_ns)
        self._dispatch()

    def _is_valid(self, record: np.void) -> bool:
        """Tell what the native engines refuse: nothing of a batch with a bad record is taken."""
        is_read = record["opcode"] == Opcode.READ
        flags, header = SubmitFlag(int(record["flags"])), int(record["header_bytes"])
        return bool(
            int(record["file_id"]) in self._files
            and int(record["io_class"]) <= IoClass.BACKGROUND
            and (record["io_class"] != IoClass.READ or is_read)
            and header in {0, HEADER_BYTES}
            and record["payload_bytes"] > 0
            and record["address"] > 0
            and record["address"] % ALIGNMENT_BYTES == 0
            and record["offset"] % ALIGNMENT_BYTES == 0
            and (not flags & SubmitFlag.VERIFY or (is_read and header))
            and (not flags & SubmitFlag.SEAL or (not is_read and header))
            and (record["gate_word"] < 0 or (self.gate is not None and is_read))
        )

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
        if transfer is None or not self._end_early(transfer, CANCELLED):
            return False
        self._counters["cancelled"] += 1
        return True

    def _set_deadline(self, transfer: _Transfer, deadline_ns: int) -> None:
        if transfer.timer is not None:
            transfer.timer.cancel()
            transfer.timer = None
        transfer.deadline_ns = deadline_ns
        if deadline_ns != NO_DEADLINE:
            transfer.timer = self._loop.call_at(deadline_ns / 1e9, self._deadline_passed, transfer)

    def extend_deadline(self, handle: int, deadline_ns: int) -> bool:
        """Move a deadline to a later time (INV-336); False: it is not later, or already over."""
        transfer = self._find(handle)
        if transfer is None or transfer.is_told or transfer.status != OK:
            return False
        if deadline_ns <= transfer.deadline_ns:
            return False
        self._set_deadline(transfer, deadline_ns)
        return True

    def _end_early(self, transfer: _Transfer, status: int) -> bool:
        """Withdraw what is queued; tell the waiter at once if pieces are still in flight."""
        if transfer.is_told:
            return False
        if transfer.status == OK:
            transfer.status = status
        self._sched.withdraw(transfer.number)
        if self._sched.inflight(transfer.number) or transfer.is_checking:
            self._tell_gate(transfer)
            transfer.is_told = True
            transfer.queue.post(
                transfer.token, transfer.status, CompletionFlag.VERDICT, transfer.moved
            )
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
        if kind is FaultKind.LOST:
            return length
        if kind is FaultKind.MISDIRECTED:
            offset += value
            if offset < 0:  # before the file: lost
                return length
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
        if kind is FaultKind.SECTORS:
            for at in range(0, length, ALIGNMENT_BYTES):
                if value >> at // ALIGNMENT_BYTES % 32 & 1:
                    file.write(offset + at, data[at : at + ALIGNMENT_BYTES])
            return length
        file.write(offset, data)
        return length

    def _complete(self, piece: DispatchedPiece, fault: Fault | None) -> None:
        if self.is_crashed:
            return
        transfer, now_ns = self._transfers[piece.transfer], self._now_ns()
        result = self._perform(transfer, piece, fault)
        if result == piece.length:
            transfer.moved += result
            self._sched.done(piece.piece, now_ns, ok=True)
        else:
            self._came_back_short(transfer, piece, result, now_ns)
        self._finish(transfer)
        self._dispatch()

    def _came_back_short(
        self, transfer: _Transfer, piece: DispatchedPiece, result: int, now_ns: int
    ) -> None:
        """Requeue the rest of a short or retried piece at the head, or fail its transfer."""
        is_retry = -result in (errno.EAGAIN, errno.EINTR)
        if transfer.status != OK:  # over already: nothing is tried again
            self._sched.done(piece.piece, now_ns, ok=False)
            if result < 0 and not is_retry:
                self._count_error(piece.io_class, result)
        elif result > 0 or is_retry:
            self._counters["short_transfers" if result > 0 else "retries"] += 1
            moved = max(0, result) // ALIGNMENT_BYTES * ALIGNMENT_BYTES  # INV-116
            tries = 0 if moved else transfer.tries.get(piece.piece, 0) + 1
            transfer.tries[piece.piece] = tries
            transfer.moved += moved
            if tries > RETRIES_MAX:
                self._fail_piece(transfer, piece, min(result, 0) or -errno.EIO, now_ns)
            else:
                self._sched.again(piece.piece, moved, now_ns)
        else:
            self._fail_piece(transfer, piece, result or END_OF_FILE, now_ns)

    def _count_error(self, io_class: int, status: int) -> None:
        errors = self._errors[io_class]
        errors[-status] = errors.get(-status, 0) + 1

    def _fail_piece(
        self, transfer: _Transfer, piece: DispatchedPiece, status: int, now_ns: int
    ) -> None:
        """The first failure decides; queued pieces are skipped (INV-113)."""
        self._sched.done(piece.piece, now_ns, ok=False)
        self._count_error(piece.io_class, status)
        transfer.status = status
        self._sched.withdraw(transfer.number)

    def _deadline_passed(self, transfer: _Transfer) -> None:
        self._counters["deadlines"] += self._end_early(transfer, DEADLINE)

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
        if transfer.is_checking:
            return
        if transfer.status == OK and transfer.flags & SubmitFlag.VERIFY:
            transfer.is_checking = True  # off the loop in the real engines: it takes time
            delay_ns = transfer.length * 10**9 // CHECKSUM_BYTES_PER_S
            self._loop.call_later(delay_ns / 1e9, self._verify, transfer)
            return
        self._report(transfer)

    def _verify(self, transfer: _Transfer) -> None:
        if self.is_crashed:
            return
        transfer.is_checking = False
        status = verify(
            transfer.memory(), transfer.identity, transfer.payload_bytes, transfer.flags
        )
        if status != OK and transfer.status == OK:
            transfer.status = status
            self._counters["mismatches"] += 1
            self._count_error(transfer.io_class, status)
        self._report(transfer)

    def _report(self, transfer: _Transfer) -> None:
        """Give the number back and report the end, exactly once."""
        if transfer.status != -errno.ENOBUFS:
            self._sched.remove(transfer.number)
        del self._transfers[transfer.number]
        self._numbers.append(transfer.number)
        if transfer.timer is not None:
            transfer.timer.cancel()
        is_read = transfer.opcode is Opcode.READ
        if transfer.status != OK and is_read and transfer.flags & SubmitFlag.POISON:
            transfer.memory()[:] = 0xFF
        self._tell_gate(transfer)
        flags = CompletionFlag.END if transfer.is_told else CompletionFlag(3)
        transfer.queue.post(transfer.token, transfer.status, flags, transfer.moved)
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
        self.is_crashed = self._is_closing = True
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
