"""Random transfers, cancels, faults, promotions, drains and shutdowns, checked byte by byte.

``python tests/uring/stress.py --transfers 1000000`` runs until that many transfers have ended, over
all engines in turn; each engine lives for some thousand transfers and is closed with work in
flight. With an extension built by ``KVSTORE_SANITIZE=1`` and libasan preloaded, this is the memory
check of the engine (``make sanitize`` runs a short one).

Every page carries its slot number and a version; a read that says ok must show a version that was
written whole. Every transfer ends exactly once, cap and gates are back at zero at each end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvstore._uring import open_engine
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
        self.version = 0
        self.versions: set[int] = set()  # what the disk may hold; empty: anything
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
        record["identity"][0][0] = number
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
            "version": self.slots[number].version,
        }
        return record

    # -- completions

    def on_event(self, token: int, status: int, flags: int, value: int) -> None:
        transfer = self.open[token]
        transfer["events"].append((status, flags, value))
        if flags & 2:
            del self.open[token]
            self.check_end(transfer, status)
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
            if status == GOOD:
                slot.versions = {transfer["version"]}
            elif status != -errno.ENOBUFS:
                slot.versions = set()  # torn, or not begun: the checksum tells at the next read
            return
        slot.readers -= 1
        self.places.append(place)
        memory = self.memory[place * self.slot_bytes :][: self.slot_bytes]
        if status == GOOD:
            words = memory[4096:].view(np.uint64)
            assert (words == words[0]).all(), "a torn page was called good"
            version, holder = int(words[0]) >> 16, int(words[0]) & 0xFFFF
            assert holder == number, "a page of another slot was called good"
            assert not slot.versions or version in slot.versions, "a stale page was called good"
        elif transfer["flags"] & SubmitFlag.POISON and told == [3]:
            assert (memory == 0xFF).all(), "a failed page was not poisoned"
        ticket = transfer["ticket"]
        if ticket is not None:
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
            self.faults.pop(self.random.randrange(len(self.faults))).release()

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
        while self.ended < count:
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
                        self.faults.pop().release()
            else:
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Close with work in flight; everything must end, once."""
        held = list(self.faults)
        closing = asyncio.ensure_future(self.engine.aclose())
        await asyncio.sleep(0.001)
        for fault in held:  # a hung mount that comes back during the close
            with contextlib.suppress(StoreClosed):
                fault.release()
        await closing
        assert not self.engine.leaked
        for _ in range(1000):
            if not self.open:
                break
            await asyncio.sleep(0.001)
        assert not self.open, "a transfer never ended"
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
    transfers: int, seed: int, kinds: tuple[str, ...] = KINDS, *, report: bool = False
) -> dict[str, int]:
    """Run sessions until ``transfers`` have ended; returns what happened."""
    ended = good = sessions = 0
    random = Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvstore-stress-") as folder:
        while ended < transfers:
            session = Session(kinds[sessions % len(kinds)], Path(folder), random.randrange(1 << 30))
            try:
                await session.run(min(random.choice((50, 2000, 8000)), transfers - ended))
            finally:
                await session.aclose()
            ended, good, sessions = ended + session.ended, good + session.good, sessions + 1
            if report:
                print(f"{sessions} sessions, {ended} transfers, {good} good", flush=True)
    return {"transfers": ended, "good": good, "sessions": sessions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transfers", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.perf_counter()
    result = asyncio.run(stress(options.transfers, options.seed, report=True))
    result["seconds"] = round(time.perf_counter() - started)
    print(result)
    sys.exit(0)


if __name__ == "__main__":
    main()
