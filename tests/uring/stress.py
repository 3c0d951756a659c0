"""Random transfers, cancels, faults, promotions, drains and shutdowns, checked byte by byte.

``python tests/uring/stress.py --transfers 1000000`` runs until that many transfers have ended, over
all engines in turn; each engine lives for some thousand transfers and is closed with work in
flight. With an extension built by ``KVSTORE_SANITIZE=1`` and libasan preloaded, this is the memory
check of the engine (``make sanitize`` runs a short one). With ``ASAN_OPTIONS=detect_leaks=1`` and
``PYTHONMALLOC=malloc`` it ends with a leak check as well: what is lost and was allocated by the
extension or liburing fails the run, what the interpreter keeps is counted and left alone. The check
first has to find a queue that was lost on purpose.

Every page carries its slot number and a version, in its identity and in each word; a read that says
ok must show the version it asked for, whole, whatever the disk did to the writes. Every transfer
ends exactly once, cap and gates are back at zero at each end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvstore._uring import open_engine
from kvstore._uring._ffi import lib
from kvstore._uring.base import SUBMISSION_DTYPE, Opcode, SubmitFlag
from kvstore._uring.engine import FaultRule
from kvstore._uring.native import Arena, CompletionQueue, GateRing, now_ns
from kvstore._uring.probe import open_slot_file
from kvstore.config import KIB, IoClass, IoConfig
from kvstore.errors import StoreClosed

PAYLOADS = (4 * KIB, 60 * KIB, 300 * KIB)
SLOTS = 24
GOOD, MISMATCH = 0, -10_000
IN_FLIGHT = 200
KINDS = ("io_uring", "io_uring-3", "threads", "serial")


class Slot:
    """A place on disk and in memory; one write, or any number of reads into memory of their own."""

    def __init__(self) -> None:
        self.version = 0  # of the memory
        self.written = 0  # the version that the disk should hold, and that a read asks for
        self.writers = 0
        self.readers = 0


class Session:
    """One engine from start to close."""

    def __init__(self, kind: str, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.payload_bytes = self.random.choice(PAYLOADS)
        self.slot_bytes = 4096 + self.payload_bytes
        name, _, rings = kind.partition("-")
        narrow = self.random.random() < 0.3
        config = IoConfig(
            kernel_rings=int(rings or 1),
            disk_io_threads=self.random.choice((1, 4)),
            ring_entries=self.random.choice((2, 64)),
            write_piece_bytes=self.random.choice((16 * KIB, 1024 * KIB)),
            read_piece_bytes=self.random.choice((16 * KIB, 1024 * KIB)),
            inflight_bytes=64 * KIB if narrow else 16384 * KIB,
            background_bytes_max=self.random.choice((20, 2000)) * self.slot_bytes,
            drain_timeout=60.0,
        )
        self.gate = GateRing(32)
        self.engine = open_engine(config, kind=name, gate=self.gate)
        self.file = open_slot_file(folder / "stress.slots", SLOTS * self.slot_bytes)
        self.file_id = self.engine.register_file(self.file.direct_fd, self.file.buffered_fd)
        self.arena = Arena((SLOTS + IN_FLIGHT) * self.slot_bytes)
        if self.random.random() < 0.7:
            self.engine.register_memory(self.arena.address, self.arena.length)
        self.memory = self.arena.view()
        self.queue = CompletionQueue(asyncio.get_running_loop())
        self.slots = [Slot() for _ in range(SLOTS)]
        self.places = list(range(SLOTS, SLOTS + IN_FLIGHT))  # landing places of reads
        self.open: dict[int, dict[str, Any]] = {}  # token -> what is known
        self.faults: list[Any] = []
        self.tickets: list[Any] = []
        self.changed = asyncio.Event()
        self.ended = 0
        self.good = 0
        self.disturbed = 0  # pieces that met a fault
        self.failures: list[AssertionError] = []

    # -- submissions

    def write(self, number: int) -> np.ndarray[Any, Any] | None:
        slot = self.slots[number]
        if slot.writers or slot.readers:
            return None
        slot.writers += 1
        slot.version += 1
        view = self.memory[number * self.slot_bytes :][4096 : self.slot_bytes].view(np.uint64)
        view[:] = slot.version << 16 | number
        io_class = self.random.choice((IoClass.REQUIRED, IoClass.BACKGROUND))
        return self.record(Opcode.WRITE, number, number, io_class, SubmitFlag.SEAL, None)

    def read(self, number: int) -> np.ndarray[Any, Any] | None:
        slot = self.slots[number]
        if slot.writers or not self.places:
            return None
        slot.readers += 1
        ticket = self.gate.take(1) if self.random.random() < 0.2 else None
        flags = SubmitFlag.VERIFY | (SubmitFlag.POISON if self.random.random() < 0.5 else 0)
        return self.record(Opcode.READ, number, self.places.pop(), IoClass.READ, flags, ticket)

    def record(
        self, opcode: Opcode, number: int, place: int, io_class: IoClass, flags: int, ticket: Any
    ) -> np.ndarray[Any, Any]:
        record = np.zeros(1, SUBMISSION_DTYPE)
        record["address"] = self.arena.address + place * self.slot_bytes
        record["offset"] = number * self.slot_bytes
        record["payload_bytes"], record["header_bytes"] = self.payload_bytes, 4096
        record["file_id"], record["io_class"], record["opcode"] = self.file_id, io_class, opcode
        record["flags"], record["gate_word"] = flags, -1
        slot = self.slots[number]
        version = slot.version if opcode is Opcode.WRITE else slot.written
        record["identity"][0][:4] = np.array([number, version], "<u2").view(np.uint8)
        if ticket is not None:
            record["gate_word"], record["gate_generation"] = ticket.word, ticket.generation
        if self.random.random() < 0.05:
            record["deadline_ns"] = now_ns() + self.random.randrange(20_000_000)
        token = self.queue.token(lambda *event: self.on_event(token, *event))
        record["token"] = token
        self.open[token] = {
            "opcode": opcode,
            "slot": number,
            "place": place,
            "events": [],
            "ticket": ticket,
            "flags": flags,
            "version": version,
        }
        return record

    # -- completions

    def on_event(self, token: int, status: int, flags: int, value: int) -> None:
        transfer = self.open[token]
        transfer["events"].append((status, flags, value))
        if flags & 2:
            del self.open[token]
            try:
                self.check_end(transfer, status)
            except AssertionError as error:  # a queue only logs what its callbacks raise
                self.failures.append(error)
            self.ended += 1
            self.changed.set()

    def check_end(self, transfer: dict[str, Any], status: int) -> None:
        told = [flags for _, flags, _ in transfer["events"]]
        assert told in ([3], [1, 2]), told
        number, place = transfer["slot"], transfer["place"]
        slot = self.slots[number]
        self.good += status == GOOD
        if transfer["opcode"] is Opcode.WRITE:
            slot.writers -= 1
            if status != -errno.ENOBUFS:
                slot.written = transfer["version"]  # or torn, lost, elsewhere: its next read tells
            return
        slot.readers -= 1
        self.places.append(place)
        memory = self.memory[place * self.slot_bytes :][: self.slot_bytes]
        if status == GOOD:
            words = memory[4096:].view(np.uint64)
            assert (words == words[0]).all(), "a torn page was called good"
            version, holder = int(words[0]) >> 16, int(words[0]) & 0xFFFF
            assert holder == number, "a page of another slot was called good"
            assert version == transfer["version"], "a stale page was called good"
        elif transfer["flags"] & SubmitFlag.POISON and told == [3]:
            assert (memory == 0xFF).all(), "a failed page was not poisoned"
        ticket = transfer["ticket"]
        if ticket is not None:
            assert ticket.status is not None
            assert ticket.status == status, "the gate and the verdict differ"
            self.gate.release(ticket)

    # -- the life of it

    def disturb(self) -> None:
        choice, handle = self.random.random(), None
        if self.open and choice < 0.5:
            transfer = self.random.choice(list(self.open.values()))
            handle = transfer.get("handle")
        if handle:
            (self.engine.cancel if choice < 0.3 else self.engine.promote)(handle)
        elif choice > 0.97 and len(self.faults) < 8:
            action, argument = self.random.choice(
                (
                    ("errno", errno.EIO),
                    ("errno", errno.ENOSPC),
                    ("errno", errno.EAGAIN),
                    ("errno", errno.EINTR),
                    ("short", 4096),
                    ("short", 5000),
                    ("zero", 0),
                    ("delay", 3_000_000),
                    ("hold", 0),
                    ("flip", 70_000),
                    ("torn", 4096 * self.random.randrange(4)),
                    ("sectors", self.random.getrandbits(32)),
                    ("lost", 0),
                    ("misdirected", self.random.choice((-1, 1, 3)) * self.slot_bytes),
                    ("misdirected", 4096),
                )
            )
            rule = FaultRule(
                action=action,
                argument=argument,
                skip=self.random.randrange(20),
                count=self.random.randrange(1, 6),
            )
            self.faults.append(self.engine.inject(rule))
        elif choice > 0.94 and self.faults:
            fault = self.faults.pop(self.random.randrange(len(self.faults)))
            self.disturbed += fault.release()

    def submit_some(self) -> None:
        room = IN_FLIGHT - len(self.open)
        records = []
        for _ in range(self.random.randrange(1, 1 + max(1, min(room, 40)))):
            make = self.write if self.random.random() < 0.4 else self.read
            record = make(self.random.randrange(SLOTS))
            if record is not None:
                records.append(record)
        if not records:
            return
        batch = np.concatenate(records)
        self.engine.submit(self.queue, batch)
        for row in batch:
            self.open[int(row["token"])]["handle"] = int(row["handle"])

    async def run(self, count: int) -> None:
        while self.ended < count and not self.failures:
            self.submit_some()
            for _ in range(self.random.randrange(6)):
                self.disturb()
            if len(self.open) > IN_FLIGHT // 2:
                self.changed.clear()
                try:
                    async with asyncio.timeout(0.05):
                        await self.changed.wait()
                except TimeoutError:  # everything is held
                    while self.faults:
                        self.disturbed += self.faults.pop().release()
            else:
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Close with work in flight; everything must end, once."""
        held = list(self.faults)
        closing = asyncio.ensure_future(self.engine.aclose())
        await asyncio.sleep(0.001)
        for fault in held:  # a hung mount that comes back during the close
            with contextlib.suppress(StoreClosed):
                self.disturbed += fault.release()
        await closing
        assert not self.engine.leaked
        for _ in range(1000):
            if not self.open:
                break
            await asyncio.sleep(0.001)
        assert not self.open, "a transfer never ended"
        if self.failures:
            raise self.failures[0]
        stats = self.engine.stats()
        assert stats.background_bytes == 0
        for counts in stats.classes:
            assert counts.queued_bytes == counts.inflight_bytes == 0
            assert counts.issued_bytes + counts.promoted_in_bytes == (
                counts.done_bytes
                + counts.failed_bytes
                + counts.withdrawn_bytes
                + counts.promoted_out_bytes
            )
        assert self.gate.counts["open"] == 0
        self.queue.close()
        self.gate.close()
        self.file.close()
        del self.memory
        self.arena.close()


async def stress(
    transfers: int,
    seed: int,
    kinds: tuple[str, ...] = KINDS,
    *,
    seconds: float = 1e9,
    report: bool = False,
) -> dict[str, int]:
    """Run sessions until ``transfers`` have ended or the time is over; returns what happened."""
    until = time.perf_counter() + seconds
    ended = good = disturbed = sessions = 0
    random = Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvstore-stress-") as folder:
        while ended < transfers and time.perf_counter() < until:
            session = Session(kinds[sessions % len(kinds)], Path(folder), random.randrange(1 << 30))
            try:
                await session.run(min(random.choice((50, 2000, 8000)), transfers - ended))
            finally:
                await session.aclose()
            ended, good, sessions = ended + session.ended, good + session.good, sessions + 1
            disturbed += session.disturbed
            if report:
                print(f"{sessions} sessions, {ended} transfers, {good} good", flush=True)
    return {"transfers": ended, "good": good, "disturbed": disturbed, "sessions": sessions}


# -- leaks ---------------------------------------------------------------------------------------


def find_leaks() -> tuple[int, int, str] | None:
    """Ask LeakSanitizer now: lost blocks of native code of ours, of others, and the first report
    of ours. None where it is not loaded or switched off.
    """
    if "detect_leaks=1" not in os.environ.get("ASAN_OPTIONS", ""):
        return None
    check = getattr(ctypes.CDLL(None), "__lsan_do_recoverable_leak_check", None)
    if check is None:
        return None
    gc.collect()
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as report:
        os.dup2(report.fileno(), 2)
        try:
            check()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        report.seek(0)
        text = report.read().decode()
    assert "fatal error" not in text, text
    ours, others, first = 0, 0, ""
    for leak in re.split(r"\n(?=(?:Direct|Indirect) leak of )", text)[1:]:
        found = re.match(r"\w+ leak of \d+ byte\(s\) in (\d+) object", leak)
        assert found, leak
        frames = re.findall(r"^ +#\d+ 0x[0-9a-f]+ +(.*)$", leak, re.MULTILINE)
        caller = next((one for one in frames if "libasan" not in one and "interc" not in one), "")
        if re.search(r"_lib\.abi3\.so|liburing|kvstore/_uring/|\bkvs_", caller):
            ours, first = ours + int(found[1]), first or leak
        else:
            others += int(found[1])
    return ours, others, first


def lose_queues(count: int) -> None:
    """Leak some native queues: a check that misses them proves nothing."""
    for _ in range(count):
        pointer = lib.kvs_cq_new(64)
        os.close(lib.kvs_cq_fd(pointer))


def allocated_bytes() -> int:
    """Bytes in use, interpreter included, as the sanitizer counts them; 0 without one."""
    count = getattr(ctypes.CDLL(None), "__sanitizer_get_current_allocated_bytes", None)
    if count is None:
        return 0
    gc.collect()
    count.restype = ctypes.c_size_t
    return int(count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transfers", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no engine after that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", default=",".join(KINDS))
    options = parser.parse_args()
    started = time.perf_counter()
    kinds = tuple(options.engines.split(","))
    asyncio.run(stress(len(kinds) * 2000, options.seed + 1, kinds))  # caches fill
    before = allocated_bytes()
    result = asyncio.run(
        stress(options.transfers, options.seed, kinds, seconds=options.seconds, report=True)
    )
    result["seed"], result["seconds"] = options.seed, round(time.perf_counter() - started)
    result["grown_bytes"] = allocated_bytes() - before
    leaks = find_leaks()
    if leaks is not None:
        lose_queues(3)
        proved = find_leaks()
        assert proved is not None
        assert proved[0] > leaks[0], "the leak check finds nothing"
        result["leaked"], result["leaked_by_others"] = leaks[:2]
        if leaks[0]:
            print(leaks[2])
    print(result)
    sys.exit(1 if leaks is not None and leaks[0] else 0)


if __name__ == "__main__":
    main()
