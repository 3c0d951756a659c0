"""The simulated engine: the contract of `Engine`, byte by byte, with faults on demand."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from kvstore._uring.base import (
    CANCELLED,
    DEADLINE,
    END_OF_FILE,
    IDENTITY_BYTES,
    MISMATCH,
    OK,
    SUBMISSION_DTYPE,
    Opcode,
    SubmitFlag,
)
from kvstore.config import HEADER_BYTES, IoClass, IoConfig
from kvstore.errors import BusyError, CapacityError, StoreClosed
from kvstore.testing import (
    FaultKind,
    FaultPlan,
    SimCompletions,
    SimDisk,
    SimEngine,
    SimFile,
    SimGateWords,
    SimMemory,
    check_pattern,
    pattern,
)

PAGE = 64 << 10
SLOT = HEADER_BYTES + PAGE
READ, WRITE = Opcode.READ, Opcode.WRITE
SEAL, VERIFY = SubmitFlag.SEAL, SubmitFlag.VERIFY
NO_FLAGS = SubmitFlag(0)


class Rig:
    """An engine with one file and ``slots`` slots of memory; records every completion."""

    def __init__(self, *, slots: int = 16, page: int = PAGE, **options) -> None:
        self.config = options.pop("config", None) or IoConfig()
        self.engine = SimEngine(config=self.config, **options)
        self.queue = SimCompletions()
        self.page = page
        self.slot = HEADER_BYTES + page
        self.memory = SimMemory(slots * self.slot)
        self.file_id = self.engine.register_file(-1, -1)
        self.seen: dict[int, list[tuple[int, int]]] = {}
        self.handles = [1 << 60]

    def fill(self, slot: int, key: object) -> None:
        self.memory.view(slot * self.slot + HEADER_BYTES, self.page)[:] = pattern(key, self.page)

    def payload(self, slot: int) -> np.ndarray:
        return self.memory.view(slot * self.slot + HEADER_BYTES, self.page)

    def submit(
        self,
        slots: Sequence[int],
        opcode: Opcode,
        io_class: IoClass = IoClass.READ,
        flags: SubmitFlag = NO_FLAGS,
        **fields,
    ) -> list[int]:
        batch = np.zeros(len(slots), SUBMISSION_DTYPE)
        batch["gate_word"] = -1
        for record, slot in zip(batch, slots, strict=True):
            seen: list[tuple[int, int]] = []
            token = self.queue.token(lambda status, flag, _value, s=seen: s.append((status, flag)))
            record["token"] = token
            record["address"] = self.memory.address + slot * self.slot
            record["offset"] = HEADER_BYTES + slot * self.slot
            record["payload_bytes"] = self.page
            record["header_bytes"] = HEADER_BYTES
            record["file_id"] = self.file_id
            record["io_class"] = io_class
            record["opcode"] = opcode
            record["flags"] = flags
            record["identity"][:] = slot + 1
            for name, value in fields.items():
                record[name] = value
            self.seen[token] = seen
            record["token"] = token
        self.engine.submit(self.queue, batch)
        self.handles = [int(handle) for handle in batch["handle"]]
        return [int(token) for token in batch["token"]]

    async def settle(self) -> None:
        await asyncio.sleep(100)

    def statuses(self, tokens: Sequence[int]) -> list[int]:
        """The one verdict of each token; two verdicts or none would fail here."""
        found = []
        for token in tokens:
            verdicts = [status for status, flag in self.seen[token] if flag & 1]
            assert 1 == len(verdicts), self.seen[token]
            assert 1 == sum(1 for _, flag in self.seen[token] if flag & 2)
            found.append(verdicts[0])
        return found

    async def round_trip(self, slots: Sequence[int]) -> list[int]:
        """Write, wipe the memory, read back; return the verdicts of the reads."""
        for slot in slots:
            self.fill(slot, slot)
        writes = self.submit(slots, WRITE, IoClass.REQUIRED, SEAL)
        await self.settle()
        assert [OK] * len(slots) == self.statuses(writes)
        self.memory.array[:] = 0xEE
        reads = self.submit(slots, READ, IoClass.READ, VERIFY)
        await self.settle()
        return self.statuses(reads)

    def balance(self) -> None:
        """INV-808, and INV-112: an idle engine shows zero background bytes."""
        stats = self.engine.stats()
        for state in stats.classes:
            assert state.issued_bytes + state.promoted_in_bytes == (
                state.done_bytes
                + state.failed_bytes
                + state.withdrawn_bytes
                + state.promoted_out_bytes
                + state.queued_bytes
                + state.inflight_bytes
            ), state
            if self.engine.open_count == 0:
                assert 0 == state.queued_bytes == state.inflight_bytes
        if self.engine.open_count == 0:
            assert 0 == stats.background_bytes


async def test_round_trip_is_exact_with_header_and_checksums():
    """SEAL lays the header down, VERIFY accepts it, the payload comes back byte for byte."""
    rig = Rig()
    assert [OK] * 8 == await rig.round_trip(range(8))
    for slot in range(8):
        check_pattern(slot, rig.payload(slot))
        header = rig.memory.view(slot * SLOT, HEADER_BYTES)
        assert (header[:IDENTITY_BYTES] == slot + 1).all()
        assert not header[208:].any()
    rig.balance()


@pytest.mark.parametrize("length", [1, 511, 4096, SLOT - 1])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("opcode", [READ, WRITE])
async def test_short_io_continues_to_the_exact_bytes(length, count, opcode):
    """Short results continue at the byte reached, down to the alignment (INV-116)."""
    rig = Rig()
    rig.engine.faults.add("short", length, opcode=opcode, count=count)
    assert [OK] == await rig.round_trip([3])
    check_pattern(3, rig.payload(3))
    assert 1 <= rig.engine.faults.hit_count <= count
    rig.balance()


async def test_zero_bytes_is_an_unexpected_end_of_file():
    """A read that moves nothing fails (INV-116)."""
    rig = Rig()
    rig.engine.faults.add("zero", opcode=READ)
    assert [END_OF_FILE, OK] == await rig.round_trip([0, 1])
    rig.balance()


@pytest.mark.parametrize(("times", "expected"), [(8, OK), (9, -errno.EAGAIN)])
async def test_retries_are_bounded(times, expected):
    """EAGAIN is retried at most eight times without progress (INV-117)."""
    rig = Rig()
    rig.engine.faults.add("again", opcode=READ, count=times)
    assert [expected] == await rig.round_trip([0])
    rig.balance()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL])
async def test_a_failing_piece_fails_its_transfer_alone(code):
    """The neighbours of a failed transfer are unharmed, and its queued pieces are skipped."""
    rig = Rig(page=256 << 10, config=IoConfig(write_piece_bytes=4096), depth=2)
    rig.engine.faults.add("errno", code, opcode=WRITE, nth=1)
    for slot in range(3):
        rig.fill(slot, slot)
    tokens = rig.submit(range(3), WRITE, IoClass.REQUIRED, SEAL)
    await rig.settle()
    assert [-code, OK, OK] == rig.statuses(tokens)
    assert rig.engine.stats().classes[IoClass.REQUIRED].withdrawn_bytes > 0
    assert {code: 1} == rig.engine.stats().classes[IoClass.REQUIRED].errors
    rig.balance()


SILENT_KINDS = [
    FaultKind.FLIP,
    FaultKind.TORN,
    FaultKind.SECTORS,
    FaultKind.LOST,
    FaultKind.MISDIRECTED,
]


@pytest.mark.parametrize("kind", SILENT_KINDS)
async def test_silent_damage_of_a_write_is_a_mismatch(kind):
    """Flipped, torn, lost and misdirected writes report success and fail verification."""
    rig = Rig(slots=4)
    value = {FaultKind.TORN: 8192, FaultKind.MISDIRECTED: SLOT, FaultKind.SECTORS: 1}.get(kind, 0)
    rig.engine.faults.add(kind, value, opcode=WRITE)
    assert [MISMATCH] == await rig.round_trip([1])
    assert 1 == rig.engine.stats().mismatches
    rig.balance()


async def test_flip_of_a_read_is_a_mismatch_and_poison_covers_it():
    """The destination of a failed read is all ones before anybody hears of it (INV-219)."""
    rig = Rig()
    rig.engine.faults.add("flip", opcode=READ)
    rig.fill(0, 0)
    rig.submit([0], WRITE, IoClass.REQUIRED, SEAL)
    await rig.settle()
    tokens = rig.submit([0], READ, IoClass.READ, VERIFY | SubmitFlag.POISON)
    await rig.settle()
    assert [MISMATCH] == rig.statuses(tokens)
    assert (rig.payload(0) == 0xFF).all()


async def test_a_foreign_identity_is_a_mismatch():
    """A slot that holds another page's bytes is a miss, whatever its checksums say."""
    rig = Rig()
    rig.fill(0, 0)
    rig.submit([0], WRITE, IoClass.REQUIRED, SEAL)
    await rig.settle()
    tokens = rig.submit([0], READ, IoClass.READ, VERIFY, identity=77)
    await rig.settle()
    assert [MISMATCH] == rig.statuses(tokens)


async def test_cancel_withdraws_and_ends_after_the_piece_in_flight():
    """A cancelled transfer ends once, as cancelled, when its last piece is back (INV-118)."""
    rig = Rig(page=1 << 20, config=IoConfig(read_piece_bytes=4096), depth=1)
    tokens = rig.submit([0], READ)
    assert rig.engine.cancel(rig.handles[0])
    assert not rig.engine.cancel(rig.handles[0])
    await asyncio.sleep(0)
    assert [(CANCELLED, 1)] == rig.seen[tokens[0]]
    with pytest.raises(BusyError):
        rig.engine.unregister_file(rig.file_id)
    await rig.settle()
    assert [CANCELLED] == rig.statuses(tokens)
    assert not rig.engine.cancel(rig.handles[0])
    rig.engine.unregister_file(rig.file_id)
    rig.balance()


async def test_deadline_tells_the_waiter_at_once_and_quarantines_the_memory():
    """VERDICT comes on time, END only with the piece that hung (INV-119, INV-120)."""
    rig = Rig()
    rig.engine.faults.add("never", opcode=READ)
    start = asyncio.get_running_loop().time()
    deadline_ns = round((start + 2.0) * 1e9)
    hung = rig.submit([0], READ, deadline_ns=deadline_ns)
    fine = rig.submit([1], READ)
    await asyncio.sleep(2.1)
    assert [(DEADLINE, 1)] == rig.seen[hung[0]]
    assert [OK] == rig.statuses(fine)
    assert not await rig.engine.drain(rig.file_id, 5.0)
    rig.memory.view(0, rig.slot)[:] = 0x11
    assert 1 == rig.engine.faults.release()
    await rig.settle()
    assert [(DEADLINE, 1), (DEADLINE, 2)] == rig.seen[hung[0]]
    assert await rig.engine.drain(rig.file_id, 5.0)
    assert 1 == rig.engine.stats().deadlines
    rig.balance()


async def test_late_completion_still_counts():
    """A piece that completes late completes with its data."""
    rig = Rig()
    rig.engine.faults.add("late", 10**9, opcode=READ)
    assert [OK] == await rig.round_trip([0])
    check_pattern(0, rig.payload(0))


async def test_promotion_moves_bytes_and_repays_nothing():
    """A promoted write leaves with the required ones; the cap stays charged (INV-112)."""
    rig = Rig(page=256 << 10, depth=1)
    for slot in range(4):
        rig.fill(slot, slot)
    order: list[IoClass] = []
    rig.engine.on_dispatch = lambda io_class, *_: order.append(io_class)
    rig.submit([0], WRITE, IoClass.REQUIRED, SEAL)
    tokens = rig.submit([1, 2], WRITE, IoClass.BACKGROUND, SEAL)
    charged = rig.engine.stats().background_bytes
    assert 2 * rig.slot == charged
    assert rig.engine.promote(rig.handles[1])
    assert not rig.engine.promote(rig.handles[1])
    assert charged == rig.engine.stats().background_bytes
    await rig.settle()
    assert [IoClass.REQUIRED, IoClass.REQUIRED, IoClass.BACKGROUND] == order
    assert [OK, OK] == rig.statuses(tokens)
    assert not rig.engine.promote(rig.handles[1])
    rig.balance()


async def test_reads_go_first():
    """With one piece in flight, later reads pass earlier writes (INV-101)."""
    rig = Rig(depth=1)
    order: list[IoClass] = []
    rig.engine.on_dispatch = lambda io_class, *_: order.append(io_class)
    rig.submit([0, 1, 2], WRITE, IoClass.REQUIRED)
    rig.submit([3, 4], READ)
    await rig.settle()
    assert [IoClass.REQUIRED, IoClass.READ, IoClass.READ] == order[:3]


async def test_gate_is_published_once_after_the_last_verdict():
    """A ticket covers its batch: good after the last read, failed if any failed (INV-205)."""
    gate = SimGateWords(8)
    rig = Rig(gate=gate)
    await rig.round_trip([0, 1, 2])
    ticket = gate.take(3)
    assert ticket is not None
    fields = {"gate_word": ticket.word, "gate_generation": ticket.generation}
    rig.submit([0, 1, 2], READ, IoClass.READ, VERIFY, **fields)
    assert ticket.status is None
    await rig.settle()
    assert OK == ticket.status
    assert not gate.publish(ticket, -1)
    failed = gate.take(2)
    assert failed is not None
    rig.engine.faults.add("errno", errno.EIO, opcode=READ)
    fields = {"gate_word": failed.word, "gate_generation": failed.generation}
    rig.submit([0, 1], READ, IoClass.READ, VERIFY, **fields)
    await rig.settle()
    assert -errno.EIO == failed.status
    assert (2, 1, 1) == (gate.tickets_taken, gate.tickets_good, gate.tickets_failed)
    half = gate.take(2)
    assert half is not None
    rig.engine.faults.add("errno", errno.EIO, opcode=READ)
    rig.submit(
        [0], READ, IoClass.READ, VERIFY, gate_word=half.word, gate_generation=half.generation
    )
    await rig.settle()
    assert half.status is None
    assert gate.publish(half, OK)  # whoever opens it, its first failure stays (INV-207)
    assert -errno.EIO == half.status


async def test_gate_words_reuse_keeps_the_status_of_the_old_ticket():
    """The status stays on the ticket when the word serves the next one (INV-207, INV-210)."""
    gate = SimGateWords(1)
    first = gate.take(1)
    assert first is not None
    assert gate.take(1) is None
    assert gate.publish(first, -5)
    second = gate.take(1)
    assert second is not None
    assert (first.word, first.generation + 1) == (second.word, second.generation)
    assert -5 == first.status
    assert second.status is None
    assert gate.is_passed(first.word, first.generation)
    assert not gate.is_passed(second.word, second.generation)
    gate.publish_all(CANCELLED)
    assert CANCELLED == second.status
    assert gate.is_passed(second.word, second.generation + 1000)


async def test_closing_engine_refuses_and_ends_everything():
    """Closing cancels what is queued, waits for the rest, publishes gates (INV-204)."""
    gate = SimGateWords(8)
    rig = Rig(gate=gate, depth=1)
    ticket = gate.take(3)
    assert ticket is not None
    fields = {"gate_word": ticket.word, "gate_generation": ticket.generation}
    tokens = rig.submit([0, 1, 2], READ, **fields)
    await rig.engine.aclose()
    assert ticket.status is not None
    assert ticket.status != OK
    await rig.settle()
    assert [CANCELLED] * 3 == rig.statuses(tokens)
    with pytest.raises(StoreClosed):
        rig.submit([0], READ)


async def test_contents_survive_in_a_shared_file_and_a_crash_tears_what_is_in_flight(tmp_path):
    """A second engine on the same descriptor reads what the first one wrote; torn is a mismatch."""
    rig = Rig(seed=3)
    with (tmp_path / "slots").open("w+b") as file:
        rig.file_id = rig.engine.register_file(-1, file.fileno())
        assert [OK] * 2 == await rig.round_trip([0, 1])
        rig.fill(0, "new")
        tokens = rig.submit([0], WRITE, IoClass.REQUIRED, SEAL)
        rig.engine.crash()
        await rig.settle()
        assert [] == rig.seen[tokens[0]]
        second = Rig()
        second.file_id = second.engine.add_file(SimFile(file.fileno()))
        reads = second.submit([0, 1], READ, IoClass.READ, VERIFY)
        await second.settle()
        assert OK == second.statuses(reads)[1]
        if second.statuses(reads)[0] == OK:
            check_pattern("new", second.payload(0))


async def test_a_disk_in_memory_outlives_its_engine():
    """Named files keep their contents, anonymous ones end at close, locks exclude (INV-923)."""
    disk = SimDisk(capacity_bytes=8 * SLOT)
    lock = disk.lock("/kv")
    with pytest.raises(BusyError):
        disk.lock("/kv")
    named, nameless = (
        disk.open("/kv", "full.0.slots", 4 * SLOT, "auto"),
        disk.open("/kv", None, 2 * SLOT, "auto"),
    )
    with pytest.raises(CapacityError):
        disk.open("/kv", "more", 4 * SLOT, "auto")
    assert 6 * SLOT == disk.used_bytes
    rig = Rig(disk=disk)
    rig.file_id = rig.engine.register_file(named.direct_fd, named.buffered_fd)
    assert [OK] * 2 == await rig.round_trip([0, 1])
    survivor = disk.copy()
    disk.close(nameless)
    disk.close(named)
    disk.unlock(lock)
    assert (0, 0, 4 * SLOT) == (disk.open_count, disk.lock_count, disk.used_bytes)
    again = survivor.open("/kv", "full.0.slots", 4 * SLOT, "auto")
    second = Rig(disk=survivor)
    second.file_id = second.engine.register_file(again.direct_fd, again.buffered_fd)
    reads = second.submit([0, 1], READ, IoClass.READ, VERIFY)
    await second.settle()
    assert [OK, OK] == second.statuses(reads)
    survivor.resize(again, SLOT)
    assert b"" == survivor.read(again, SLOT, 10)
    assert SLOT == survivor.used_bytes


async def test_random_traffic_keeps_every_balance(seed):
    """Random submissions, faults, promotions and cancels: one verdict each, no byte unaccounted."""
    rng = Random(seed)
    plan = FaultPlan.random(rng, rate=6)
    rig = Rig(
        slots=32,
        faults=plan,
        seed=seed,
        depth=rng.randrange(1, 9),
        config=IoConfig(write_piece_bytes=16384, read_piece_bytes=32768, deadline=1.0),
    )
    tokens: list[int] = []
    free = list(range(32))
    for _ in range(60):
        if free and rng.random() < 0.6:
            slot = free.pop(rng.randrange(len(free)))
            rig.fill(slot, slot)
            io_class = rng.choice([IoClass.REQUIRED, IoClass.BACKGROUND])
            tokens += rig.submit([slot], WRITE, io_class, SEAL)
        elif rng.random() < 0.3:
            rig.engine.cancel(rng.choice(rig.handles))
        else:
            rig.engine.promote(rng.choice(rig.handles))
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 1e-3)
        rig.balance()
    await rig.settle()
    verdicts = rig.statuses(tokens)
    assert len(tokens) == len(verdicts)
    plan.clear()
    assert 0 == rig.engine.open_count
    rig.balance()


SEEDS = 20


async def test_background_above_the_cap_is_skipped_not_delayed():
    """INV-111: the copy that exceeds the cap comes back at once, the others are written."""
    rig = Rig(config=IoConfig(background_bytes_max=2 * SLOT))
    assert 2 * SLOT == rig.engine.background_room_bytes()
    tokens = rig.submit([0, 1, 2], WRITE, IoClass.BACKGROUND, SEAL)
    assert 0 == rig.engine.background_room_bytes()
    await rig.settle()
    assert [OK, OK, -errno.ENOBUFS] == rig.statuses(tokens)
    assert 2 * SLOT == rig.engine.background_room_bytes()
    rig.balance()


async def test_background_waits_while_reads_wait_and_gets_its_turn():
    """Of eight dispatches with reads waiting at most one is an aged background write (INV-104)."""
    rig = Rig(slots=64, depth=1, config=IoConfig(background_age=1e-6))
    order: list[IoClass] = []
    rig.engine.on_dispatch = lambda io_class, *_: order.append(io_class)
    rig.submit(range(10), WRITE, IoClass.BACKGROUND, SEAL)
    rig.submit(range(10, 60), READ)
    await rig.settle()
    last_read = len(order) - 1 - order[::-1].index(IoClass.READ)
    during = order[1:last_read]
    assert 5 <= during.count(IoClass.BACKGROUND) <= len(during) // 8 + 1


async def test_same_seed_same_order():
    """Equal calls on an equal clock dispatch in the same order at the same times (INV-135)."""
    orders = []
    for _ in range(2):
        start = asyncio.get_running_loop().time()
        rig, order = Rig(slots=32, seed=9, depth=3), []
        rig.engine.on_dispatch = lambda c, o, f, offset, n, order=order, start=start: order.append(
            (c, offset, n, round((asyncio.get_running_loop().time() - start) * 1e6))
        )
        for slot in range(0, 32, 4):
            rig.submit([slot], WRITE, IoClass.BACKGROUND, SEAL)
            rig.submit([slot + 1, slot + 2], READ)
            rig.submit([slot + 3], WRITE, IoClass.REQUIRED, SEAL)
            await asyncio.sleep(3e-4)
        await rig.settle()
        orders.append(order)
    assert orders[0] == orders[1]
