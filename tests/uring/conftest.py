"""The rig of the engine contract: an engine, one slot file, one arena, and transfers to await."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvstore._uring._lib")

from kvstore._uring import open_engine
from kvstore._uring.base import SUBMISSION_DTYPE, Opcode, SubmitFlag
from kvstore._uring.engine import FaultRule
from kvstore._uring.native import Arena, CompletionQueue, GateRing
from kvstore._uring.probe import open_slot_file
from kvstore.config import KIB, IoClass, IoConfig
from kvstore.errors import UnsupportedError
from kvstore.testing.completions import SimCompletions
from kvstore.testing.engine import SimEngine
from kvstore.testing.faults import FaultKind


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    """Loops differ in how they watch a descriptor and how they end: the tests of that run on all
    of them, the rest on the plain one.
    """
    del config
    if item.path.name in {"test_ends.py", "test_native.py", "test_store_lifecycle.py"}:
        return None  # every real loop, as the conftest above says
    return {"plain": asyncio.SelectorEventLoop}


HEADER_BYTES = 4096
NATIVE = ("io_uring", "threads", "serial")
KINDS = (*NATIVE, "simulated")


def identity(number: int) -> np.ndarray[Any, Any]:
    """192 bytes that tell one slot from another."""
    value = np.zeros(192, np.uint8)
    value[:8] = np.frombuffer(b"KVSTSLOT", np.uint8)
    value[48:56] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return value


class Transfer:
    """What the queue reported for one submission, in order."""

    def __init__(self) -> None:
        self.handle = 0
        self.events: list[tuple[int, int, int]] = []
        self._changed = asyncio.Event()

    def on_completion(self, status: int, flags: int, value: int) -> None:
        self.events.append((status, flags, value))
        self._changed.set()

    @property
    def flags(self) -> list[int]:
        return [flags for _, flags, _ in self.events]

    async def _until(self, bit: int) -> int:
        while not any(flags & bit for flags in self.flags):
            self._changed.clear()
            async with asyncio.timeout(20):
                await self._changed.wait()
        return next(status for status, flags, _ in self.events if flags & bit)

    async def verdict(self) -> int:
        """The status told first; the memory may still be in use."""
        return await self._until(1)

    async def end(self) -> int:
        """The status of the end, after which nothing touches the memory."""
        status = await self._until(2)
        assert sum(flag & 1 for flag in self.flags) == 1, "one verdict (INV-114)"
        assert sum(flag >> 1 & 1 for flag in self.flags) == 1, "one end (INV-113)"
        assert self.flags[-1] & 2, "nothing after the end"
        return status


class Hold:
    """Pieces that never complete until `release`."""

    def __init__(self, release: Callable[[], int]) -> None:
        self.release = release


class Rig:
    """See the module. Slot ``i`` of memory is at ``i * slot_bytes``, in the file likewise."""

    def __init__(self, kind: str, path: Path, config: IoConfig | None, **options: Any) -> None:
        self.kind = kind
        self.config = config or IoConfig()
        self.payload_bytes = options.pop("payload_bytes", 128 * KIB)
        self.slot_count = options.pop("slots", 16)
        self.slot_bytes = HEADER_BYTES + -(-self.payload_bytes // 4096) * 4096
        loop = asyncio.get_running_loop()
        self.engine: Any
        self.queue: Any
        self.gate: Any = None
        self.arena = Arena(2 * self.slot_count * self.slot_bytes)
        self.arena.prefault()
        self.slot_file: Any = None
        direct = options.pop("direct", "auto")
        if kind == "simulated":
            self.engine = SimEngine(loop, config=self.config)
            self.queue = SimCompletions(loop)
            self.file_id = self.engine.register_file(-1, -1)
        else:
            self.gate = GateRing(64)
            self.engine = open_engine(self.config, kind=kind, gate=self.gate, **options)
            self.queue = CompletionQueue(loop)
            self.slot_file_path = path / "rig.slots"
            self.slot_file = open_slot_file(
                self.slot_file_path, self.slot_count * self.slot_bytes, direct=direct
            )
            self.file_id = self.engine.register_file(
                self.slot_file.direct_fd, self.slot_file.buffered_fd
            )
            self.engine.register_memory(self.arena.address, self.arena.length)
        self.memory = self.arena.view()
        self.random = np.random.default_rng(7)

    @property
    def is_direct(self) -> bool:
        return self.slot_file is not None and self.slot_file.mode == "direct"

    def slot(self, number: int) -> np.ndarray[Any, Any]:
        """The memory of a slot, header included."""
        return self.memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def payload(self, number: int) -> np.ndarray[Any, Any]:
        return self.slot(number)[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]

    def fill(self, number: int) -> np.ndarray[Any, Any]:
        """Put random bytes into a payload and return a copy of them."""
        data = self.random.integers(0, 256, self.payload_bytes, np.uint8)
        self.payload(number)[:] = data
        return data

    def record(
        self,
        opcode: Opcode,
        slot: int,
        *,
        memory: int | None = None,
        io_class: IoClass | None = None,
        flags: SubmitFlag | None = None,
        deadline_ns: int = 0,
        ticket: Any = None,
        file_id: int | None = None,
    ) -> np.ndarray[Any, Any]:
        """One submission of a whole slot, sealed or verified by default."""
        is_read = opcode == Opcode.READ
        record = np.zeros(1, SUBMISSION_DTYPE)
        record["address"] = (
            self.arena.address + (slot if memory is None else memory) * self.slot_bytes
        )
        record["offset"] = slot * self.slot_bytes
        record["payload_bytes"] = self.payload_bytes
        record["header_bytes"] = HEADER_BYTES
        record["deadline_ns"] = deadline_ns
        record["gate_word"] = -1 if ticket is None else ticket.word
        record["gate_generation"] = 0 if ticket is None else ticket.generation
        record["file_id"] = self.file_id if file_id is None else file_id
        record["io_class"] = io_class if io_class is not None else IoClass(0 if is_read else 1)
        record["opcode"] = opcode
        usual = SubmitFlag.VERIFY if is_read else SubmitFlag.SEAL
        record["flags"] = usual if flags is None else flags
        record["identity"][0] = identity(slot)
        return record

    def submit(self, records: Sequence[np.ndarray[Any, Any]], queue: Any = None) -> list[Transfer]:
        """Hand a batch over in one call."""
        batch = np.concatenate(records)
        queue = queue or self.queue
        transfers = [Transfer() for _ in records]
        for row, transfer in zip(batch, transfers, strict=True):
            row["token"] = queue.token(transfer.on_completion)
        self.engine.submit(queue, batch)
        for row, transfer in zip(batch, transfers, strict=True):
            transfer.handle = int(row["handle"])
        return transfers

    def write(self, slot: int, **options: Any) -> Transfer:
        return self.submit([self.record(Opcode.WRITE, slot, **options)])[0]

    def read(self, slot: int, **options: Any) -> Transfer:
        """Read slot ``slot`` into the memory slot ``slot_count + slot`` unless told otherwise."""
        options.setdefault("memory", self.slot_count + slot)
        return self.submit([self.record(Opcode.READ, slot, **options)])[0]

    def inject(self, action: str, argument: int = 0, **where: Any) -> Hold:
        """Put a fault into force on any engine; `release` returns how many pieces it took."""
        if self.kind != "simulated":
            rule = self.engine.inject(FaultRule(action=action, argument=argument, **where))
            return Hold(rule.release)
        kind = {"hold": FaultKind.NEVER, "delay": FaultKind.LATE}.get(action) or FaultKind(action)
        where["nth"] = where.pop("skip", 0)
        where.setdefault("count", 1)
        fault = self.engine.faults.add(kind, argument, **where)

        def release() -> int:
            self.engine.faults.faults.remove(fault)
            self.engine.faults.release()
            return int(fault.hit_count)

        return Hold(release)

    async def hold_one(self, slot: int = 0) -> tuple[Hold, Transfer]:
        """Put one write into the device that stays there; with `NARROW` all else is queued."""
        hold = self.inject("hold")
        transfer = self.write(slot, flags=SubmitFlag(0))
        await self.until_in_device(IoClass.REQUIRED)
        return hold, transfer

    async def until_in_device(self, io_class: IoClass, pieces: int = 1) -> None:
        """Wait until that many pieces of a class have been dispatched and one is in the device."""
        for _ in range(5000):
            counts = self.engine.stats().classes[io_class]
            if counts.inflight_bytes and counts.pieces >= pieces:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("nothing reached the device")

    async def aclose(self) -> None:
        await self.engine.aclose()
        self.queue.close()
        if self.gate is not None:
            self.gate.close()
        if self.slot_file is not None:
            self.slot_file.close()
        if getattr(self.engine, "leaked", False):
            self.arena.leak()
        del self.memory
        self.arena.close()


OpenRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def open_rig(tmp_path: Path) -> OpenRig:
    """Return a factory of rigs, to be used with ``async with``."""

    @contextlib.asynccontextmanager
    async def factory(
        kind: str, config: IoConfig | None = None, **options: Any
    ) -> AsyncIterator[Rig]:
        try:
            rig = Rig(kind, tmp_path, config, **options)
        except UnsupportedError as error:
            pytest.skip(str(error))
        try:
            yield rig
        finally:
            await rig.aclose()

    return factory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every engine, the simulated one too."""
    return str(request.param)


@pytest.fixture(params=NATIVE)
def native_kind(request: pytest.FixtureRequest) -> str:
    """The engines that do real I/O."""
    return str(request.param)


@pytest.fixture
def kind_is_available() -> Callable[[str], None]:
    """Skip with the reason where the system refuses an engine."""

    def check(name: str) -> None:
        try:
            open_engine(kind=name).close()
        except UnsupportedError as error:
            pytest.skip(str(error))

    return check


#: One piece at a time, so that a held piece keeps everything behind it in its queue.
NARROW = IoConfig(inflight_bytes=4096, write_piece_bytes=64 * KIB, read_piece_bytes=64 * KIB)


@pytest.fixture
def narrow() -> IoConfig:
    """See `NARROW`."""
    return NARROW
