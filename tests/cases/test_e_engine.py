"""Cases C43 and C45 on the real scheduler order: reads keep their latency beside writers."""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np
import pytest

from kvstore._uring.base import SUBMISSION_DTYPE, Opcode
from kvstore.config import HEADER_BYTES, MIB, IoClass, IoConfig
from kvstore.testing import SimCompletions, SimEngine, SimMemory

PAGE = 256 << 10
SLOT = HEADER_BYTES + PAGE
READS = 300


class _Load:
    """Reads at random times, and optionally writers that never let a queue run dry."""

    def __init__(self, policy: str) -> None:
        self.engine = SimEngine(
            config=IoConfig(), policy=policy, bytes_per_s=2 << 30, latency_ns=(150_000, 300_000)
        )
        self.queue = SimCompletions()
        self.memory = SimMemory(256 * SLOT)
        self.file_id = self.engine.register_file(-1, -1)
        self.latencies: list[float] = []
        self.written = 0
        self.is_writing = True

    def submit(self, slot: int, opcode: Opcode, io_class: IoClass, pages: int, done) -> None:
        record = np.zeros(1, SUBMISSION_DTYPE)
        record["gate_word"] = -1
        record["token"] = self.queue.token(done)
        record["address"] = self.memory.address + slot * SLOT
        record["offset"] = HEADER_BYTES + slot * SLOT
        record["payload_bytes"] = pages * SLOT - HEADER_BYTES
        record["header_bytes"] = HEADER_BYTES
        record["file_id"] = self.file_id
        record["io_class"] = io_class
        record["opcode"] = opcode
        self.engine.submit(self.queue, record)

    def write(self, slot: int, io_class: IoClass) -> None:
        def done(status: int, _flags: int, value: int) -> None:
            assert status == 0
            self.written += value
            if self.is_writing:
                self.write(slot, io_class)

        self.submit(slot, Opcode.WRITE, io_class, 16, done)

    async def run(self, *, with_writers: bool) -> list[float]:
        loop, random = asyncio.get_running_loop(), Random(1)
        if with_writers:
            for slot in range(0, 96, 16):
                self.write(slot, IoClass.REQUIRED)
                self.write(128 + slot, IoClass.BACKGROUND)
            await asyncio.sleep(0.05)
        for _ in range(READS):
            start = loop.time()
            self.submit(
                random.randrange(250),
                Opcode.READ,
                IoClass.READ,
                1,
                lambda status, _f, _v, s=start: self.latencies.append(loop.time() - s),
            )
            await asyncio.sleep(random.random() * 4e-3)
        self.is_writing = False
        await asyncio.sleep(10)
        assert READS == len(self.latencies)
        return sorted(self.latencies)


async def test_c43_reads_do_not_starve_behind_writes():
    """With endless required and background writes the read p99 stays bounded, and writes go on.

    Order is fixed once a piece is in the device, so a read may meet the bytes that INV-136 lets in:
    its p99 is at most the idle p99 plus the time that the device needs for them.
    """
    idle = await _Load("kvstore").run(with_writers=False)
    load = _Load("kvstore")
    busy = await load.run(with_writers=True)
    p99 = READS * 99 // 100
    bound = IoConfig().inflight_bytes / (2 << 30)
    assert busy[p99] <= max(3 * idle[p99], idle[p99] + bound)
    assert load.written > 100 * MIB


async def test_c43_without_classes_reads_starve():
    """The check above can fail: one queue without bounds makes reads wait for all writes."""
    idle = await _Load("fifo").run(with_writers=False)
    busy = await _Load("fifo").run(with_writers=True)
    p99 = READS * 99 // 100
    assert busy[p99] > idle[p99] + IoConfig().inflight_bytes / (2 << 30)


@pytest.mark.parametrize("slow_count", [1, 64])
async def test_c45_operations_in_flight_cost_nothing_until_they_complete(slow_count):
    """No wake-up of the loop on behalf of an operation in flight before its completion."""
    load = _Load("kvstore")
    load.engine.faults.add("never", count=None)
    for slot in range(slow_count):
        load.submit(slot, Opcode.READ, IoClass.READ, 1, lambda *_: None)
    await asyncio.sleep(0)
    before = load.queue.wakeup_count
    await asyncio.sleep(20)
    assert before == load.queue.wakeup_count
    assert load.engine.open_count == slow_count
    load.engine.faults.clear()
    load.engine.faults.release()
    await asyncio.sleep(1)
    assert load.engine.open_count == 0
