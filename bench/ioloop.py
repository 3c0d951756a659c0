"""Jobs in flight: each clone keeps ``iodepth`` transfers open, in batches both ways.

A clone (`Lane`) owns its buffers and its arrays. Completions come as arrays, one call per wake-up
of the loop, and are answered by one submission of as many transfers: no Python runs per transfer.
What every plain job needs (one direction, one size, no limits) has a short way of its own, and
figures are only noted during the run and counted in larger lots.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore._uring.base import (
    DEADLINE,
    END_OF_FILE,
    MISMATCH,
    OK,
    SUBMISSION_DTYPE,
    CompletionFlag,
    Engine,
    Opcode,
    SubmitFlag,
)
from kvstore.config import HEADER_BYTES, IoClass

from .iostats import Direction
from .jobs import JobSpec
from .pattern import Pattern

Clock = Callable[[], int]

_FINAL = int(CompletionFlag.VERDICT | CompletionFlag.END)
#: The tokens of completion records as signed numbers, which index arrays.
_TOKEN_DTYPE = np.dtype({"names": ["token"], "formats": ["<i8"], "itemsize": 24})
#: Transfers of the first and of each later call to the engine when a turn answers many: the first
#: call wakes the engine, which hands them over while the others are being prepared.
FIRST_PART, PART = 4, 16
#: Turns whose figures are counted together.
_LOG_TURNS = 512
_DEPTH_STEPS = (64, 32, 16, 8, 4, 2, 1)


def identity_base(job: JobSpec) -> npt.NDArray[np.uint8]:
    """Return the identity that ``verify`` lays into each header: (192,) uint8, offset left zero."""
    identity = np.zeros(192, np.uint8)
    identity[:8] = np.frombuffer(b"KVSTSLOT", np.uint8)
    identity[8:16] = np.array([1, 1], "<u4").view(np.uint8)
    digest = hashlib.sha256(f"kvstore-bench verify {job.bs[0]}".encode()).digest()
    identity[16:48] = np.frombuffer(digest, np.uint8)
    identity[152:160] = np.array([job.bs[0] - HEADER_BYTES], "<u8").view(np.uint8)
    return identity


def error_number(status: int) -> int:
    """Return the errno that fio would report for a verdict."""
    return {MISMATCH: errno.EILSEQ, END_OF_FILE: errno.EIO}.get(status, -status)


#: What one turn noted: times, now, and for mixed or sized jobs direction and size of each.
_Turn = tuple[
    npt.NDArray[np.int64], int, npt.NDArray[np.bool_] | None, npt.NDArray[np.int64] | None
]


def _count(
    side: Direction,
    times: npt.NDArray[np.int64],
    now: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> None:
    side.total_ios += len(times)
    side.io_bytes += int(sizes.sum())
    issue, sent = times[:, 0], times[:, 1]
    side.slat.add(sent - issue)
    side.clat.add(now - sent)
    side.lat.add(now - issue)


class Lane:
    """One clone of a job.

    Ownership: borrows ``iodepth`` blocks of memory from ``address`` on until `done` is resolved,
    which is after the last completion.
    """

    def __init__(
        self,
        job: JobSpec,
        *,
        engine: Engine,
        queue: Any,
        file_id: int,
        address: int,
        region_bytes: int,
        seed: int,
        clock_ns: Clock,
        base: int = 0,
    ) -> None:
        self.job = job
        self.read = Direction()
        self.write = Direction()
        self.error = 0
        self.skips = 0
        self.verified = 0
        self.sealed_bytes = 0
        self.notes: list[str] = []
        self.file_id = file_id
        self.region_bytes = region_bytes
        self.depth_counts: dict[int, int] = {}
        self.first_ns = self.last_ns = 0
        self.window_ns = 0  # completions before it are not counted (ramp_time)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._queue = queue
        self._clock_ns = clock_ns
        self._pattern = Pattern(job, region_bytes, seed, base)
        self._limit_bytes = 0 if job.time_based else (job.size or region_bytes)
        self._issued_bytes = 0
        self._stopping = False
        self._open = 0  # transfers without END
        self._timer: asyncio.TimerHandle | None = None
        self._rng = np.random.default_rng([job.randseed, seed, 1])
        self._due_ns = [0, 0]
        self._held: tuple[int, int, bool] | None = None
        self._setup(file_id, address)

    def _setup(self, file_id: int, address: int) -> None:
        job, depth = self.job, self.job.slots
        stride = job.block_bytes_max
        records = np.zeros(depth, SUBMISSION_DTYPE)
        records["address"] = address + np.arange(depth, dtype=np.uint64) * np.uint64(stride)
        records["file_id"] = file_id
        records["gate_word"] = -1
        self._is_mixed = job.reads and job.writes
        self._is_sized = job.bssplit is not None or job.bs[0] != job.bs[1]
        self._has_header = job.verify != "none"
        self._classes = np.array(
            [job.io_class(is_read=False), job.io_class(is_read=True)], np.uint8
        )
        self._is_paced = any(job.rate) or any(job.rate_iops)
        self._is_background = IoClass.BACKGROUND in self._classes
        if self._has_header:
            records["header_bytes"] = HEADER_BYTES
            records["identity"] = identity_base(job)
        records["payload_bytes"] = job.bs[0 if job.reads else 1] - int(records["header_bytes"][0])
        self._fill_direction(records, np.full(depth, job.reads))
        bulk = getattr(self._queue, "bulk", None)
        self._first_token = -1
        if bulk is not None:
            self._first_token = bulk(depth, self._on_records)
            records["token"] = self._first_token + np.arange(depth, dtype=np.uint64)
        self._records = records
        self._free = np.arange(depth, dtype=np.intp)
        self._times = np.zeros((depth, 2), np.int64)  # handed to submit, back from it
        self._log: list[_Turn] = []
        self._is_simple = self._first_token >= 0 and not (
            self._is_mixed
            or self._is_sized
            or self._has_header
            or self._is_background
            or self._is_paced
            or job.deadline_ms
        )
        self._sizes = np.full(depth, job.bs[0 if job.reads else 1], np.int64)
        self._is_read = np.full(depth, job.reads)
        self._arrived: list[tuple[int, int, int]] = []  # (slot, status, flags)

    def _fill_direction(
        self, records: npt.NDArray[np.void], is_read: npt.NDArray[np.bool_]
    ) -> None:
        records["opcode"] = np.where(is_read, np.uint8(Opcode.READ), np.uint8(Opcode.WRITE))
        records["io_class"] = self._classes[is_read.astype(np.intp)]
        if self._has_header:
            records["flags"] = np.where(
                is_read, np.uint16(SubmitFlag.VERIFY), np.uint16(SubmitFlag.SEAL)
            )

    # ---- issue ----

    def start(self) -> None:
        """Begin to issue; `done` tells the end."""
        self.first_ns = self.last_ns = self._clock_ns()
        self._due_ns = [self.first_ns, self.first_ns]
        if not self.window_ns:
            self.window_ns = self.first_ns
        self._pump()

    def stop(self) -> None:
        """Issue nothing more; what is open runs to its end."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._settle()

    def _settle(self) -> None:
        if self._stopping and not self._open and not self.done.done():
            self.flush()
            if self._first_token >= 0:
                self._queue.discard_bulk(self._first_token)
                self._first_token = -1
            self.done.set_result(None)

    def _pump(self) -> None:
        if self._is_paced:
            self._pump_paced()
        else:
            while not self._stopping and len(self._free):
                if not self._issue(*self._pattern.take(len(self._free))):
                    break
        self._settle()

    def _issue(
        self,
        offsets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.int64],
        is_read: npt.NDArray[np.bool_],
    ) -> bool:
        count = len(offsets)
        if self._limit_bytes and self._issued_bytes + int(sizes.sum()) >= self._limit_bytes:
            keep = (
                int(np.searchsorted(np.cumsum(sizes), self._limit_bytes - self._issued_bytes)) + 1
            )
            count = min(count, keep)
            if not self._is_paced:
                self._pattern.put_back(len(offsets) - count)
            offsets, sizes, is_read = offsets[:count], sizes[:count], is_read[:count]
            self._stopping = True
        total = int(sizes.sum())
        if self._is_background and total > (room := self._engine.background_room_bytes()):
            # a copy above the cap is not issued (INV-111): it is counted and tried again later
            fits = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
            self.skips += count - fits
            self._stopping = False
            if not self._is_paced:
                self._pattern.put_back(count - fits)
            if not fits:
                if not self._open:
                    self._retry_later()
                return False
            count = fits
            offsets, sizes, is_read = offsets[:count], sizes[:count], is_read[:count]
            total = int(sizes.sum())
        slots, self._free = self._free[:count], self._free[count:]
        records = self._records[slots]
        records["offset"] = offsets
        if self._is_sized:
            records["payload_bytes"] = sizes
            self._sizes[slots] = sizes
        if self._is_mixed:
            self._fill_direction(records, is_read)
            self._is_read[slots] = is_read
        if self._has_header:
            records["identity"][:, 112:120] = offsets.astype("<u8").view(np.uint8).reshape(-1, 8)
        if self._first_token < 0:
            for i, slot in enumerate(slots.tolist()):
                records["token"][i] = self._queue.token(self._one(slot))
        self._issued_bytes += total
        self._open += count
        now = self._clock_ns()
        if self.job.deadline_ms:
            records["deadline_ns"] = now + int(self.job.deadline_ms * 1e6)
        self._engine.submit(self._queue, records)
        self._times[slots] = (now, self._clock_ns())
        self._count_depth(count)
        return True

    def _count_depth(self, count: int) -> None:
        step = next(step for step in _DEPTH_STEPS if self._open >= step)
        self.depth_counts[step] = self.depth_counts.get(step, 0) + count

    def _retry_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(0.001, self._pump)

    def _pump_paced(self) -> None:
        """Issue what is due; the held transfer is the next one and keeps its place."""
        batch: list[tuple[int, int, bool]] = []
        now = self._clock_ns()
        while not self._stopping and len(batch) < len(self._free):
            if self._held is None:
                offsets, sizes, is_read = self._pattern.take(1)
                self._held = (int(offsets[0]), int(sizes[0]), bool(is_read[0]))
            side = 0 if self._held[2] else 1
            if self._due_ns[side] > now:
                self._wake_at(self._due_ns[side] - now)
                break
            self._due_ns[side] += self._gap_ns(side, self._held[1])
            batch.append(self._held)
            self._held = None
        if batch:
            offsets_list, sizes_list, reads_list = zip(*batch, strict=True)
            self._issue(
                np.array(offsets_list, np.uint64),
                np.array(sizes_list, np.int64),
                np.array(reads_list),
            )

    def _gap_ns(self, side: int, size: int) -> int:
        rate, rate_iops = self.job.rate[side], self.job.rate_iops[side]
        gap = max(size / rate if rate else 0.0, 1.0 / rate_iops if rate_iops else 0.0) * 1e9
        if self.job.rate_process == "poisson":
            gap = float(self._rng.exponential(gap)) if gap else 0.0
        return int(gap)

    def _wake_at(self, delay_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self._pump)

    # ---- completions ----

    def _one(self, slot: int) -> Callable[[int, int, int], None]:
        def completed(status: int, flags: int, value: int) -> None:
            del value
            if not self._arrived:
                asyncio.get_running_loop().call_soon(self._turn)
            self._arrived.append((slot, status, flags))

        return completed

    def _turn(self) -> None:
        arrived = np.array(self._arrived, np.int64)
        self._arrived.clear()
        self._complete(arrived[:, 0].astype(np.intp), arrived[:, 1], arrived[:, 2])

    def _on_records(self, records: npt.NDArray[np.void], all_good: bool) -> None:
        slots = records.view(_TOKEN_DTYPE)["token"] - self._first_token
        if all_good and self._is_simple and self._answer(slots):
            return
        self._complete(slots, records["status"].astype(np.int64), records["flags"].astype(np.int64))

    def _answer(self, slots: npt.NDArray[np.int64]) -> bool:
        """Note a plain turn and issue as many transfers again; False if it is not that simple.

        A large turn is issued in parts, so that the engine starts on the first while the rest is
        being prepared.
        """
        count = len(slots)
        if self._stopping or len(self._free) or self._limit_bytes:
            return False
        offsets = self._pattern.offsets(count)
        if offsets is None:
            return False
        now = self._clock_ns()
        start, end = 0, FIRST_PART
        sent = []
        while start < count:
            records = self._records[slots[start:end]]
            records["offset"] = offsets[start:end]
            self._engine.submit(self._queue, records)
            sent.append((start, self._clock_ns()))
            start, end = end, end + PART
        times = self._times[slots]
        again = np.full((count, 2), now, np.int64)
        for start, sent_ns in sent:
            again[start:, 1] = sent_ns
        self._times[slots] = again
        self._count_depth(count)
        if now >= self.window_ns:
            self.last_ns = now
            self._log.append((times, now, None, None))
            if len(self._log) >= _LOG_TURNS:
                self.flush()
        return True

    def _complete(
        self,
        slots: npt.NDArray[np.intp],
        statuses: npt.NDArray[np.int64],
        flags: npt.NDArray[np.int64],
    ) -> None:
        now = self._clock_ns()
        plain = bool((flags & _FINAL == _FINAL).all())
        told = slots if plain else slots[flags & int(CompletionFlag.VERDICT) != 0]
        if len(told):
            self._account(
                told, statuses if plain else statuses[flags & int(CompletionFlag.VERDICT) != 0], now
            )
        ended = slots if plain else slots[flags & int(CompletionFlag.END) != 0]
        self._open -= len(ended)
        self._free = np.concatenate((self._free, ended)) if len(self._free) else ended
        self._pump()

    def _account(
        self, slots: npt.NDArray[np.intp], statuses: npt.NDArray[np.int64], now: int
    ) -> None:
        if not (statuses == OK).all():
            self._account_failures(slots, statuses)
            slots = slots[statuses == OK]
            if not len(slots):
                return
        if self._has_header:
            checked = self._is_read[slots]
            self.verified += int(checked.sum())
            self.sealed_bytes += int(self._sizes[slots][~checked].sum())
        if now < self.window_ns:
            return
        self.last_ns = now
        is_read = self._is_read[slots] if self._is_mixed else None
        sizes = self._sizes[slots] if self._is_sized else None
        self._log.append((self._times[slots], now, is_read, sizes))
        if len(self._log) >= _LOG_TURNS:
            self.flush()

    def flush(self) -> None:
        """Count what was noted since the last time; figures are complete only after this."""
        if not self._log:
            return
        turns, self._log = self._log, []
        times = np.concatenate([turn[0] for turn in turns])
        now = np.repeat([turn[1] for turn in turns], [len(turn[0]) for turn in turns])
        size = self.job.bs[0 if self.job.reads else 1]
        sizes = (
            np.concatenate([turn[3] for turn in turns if turn[3] is not None])
            if self._is_sized
            else np.full(len(times), size, np.int64)
        )
        if not self._is_mixed:
            _count(self.read if self.job.reads else self.write, times, now, sizes)
            return
        is_read = np.concatenate([turn[2] for turn in turns if turn[2] is not None])
        for side, mask in ((self.read, is_read), (self.write, ~is_read)):
            if mask.any():
                _count(side, times[mask], now[mask], sizes[mask])

    def _account_failures(
        self, slots: npt.NDArray[np.intp], statuses: npt.NDArray[np.int64]
    ) -> None:
        for slot, status in zip(slots.tolist(), statuses.tolist(), strict=True):
            if status == OK:
                continue
            side = self.read if self._is_read[slot] else self.write
            side.failed_ios += 1
            side.errors[status] = side.errors.get(status, 0) + 1
            if status != DEADLINE:  # a missed deadline is a figure, everything else ends the job
                self.error = self.error or error_number(status)
                self._stopping = True
