"""Random calls against the scheduler, with every rule that is visible from outside checked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore._uring.scheduler import DispatchedPiece, Scheduler
from kvstore.config import KIB, MIB, IoClass, IoConfig

READ, REQUIRED, BACKGROUND = IoClass.READ, IoClass.REQUIRED, IoClass.BACKGROUND
MS = 1_000_000
HEADER = 4 * KIB

CONFIGS = st.builds(
    IoConfig,
    read_piece_bytes=st.sampled_from([64 * KIB, MIB, 4 * MIB]),
    write_piece_bytes=st.sampled_from([64 * KIB, MIB]),
    inflight_bytes=st.sampled_from([MIB, 4 * MIB, 16 * MIB]),
    required_inflight_bytes=st.sampled_from([64 * KIB, 8 * MIB]),
    background_inflight_bytes=st.sampled_from([64 * KIB, 4 * MIB]),
    background_turn=st.sampled_from([2, 3, 8]),
    background_bytes_max=st.sampled_from([8 * MIB, 1 << 30]),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "next", "next", "next", "done", "again", "promote", "cut"]),
        st.integers(0, 1 << 30),
        st.sampled_from([0, 1000, MS, 11 * MS, 101 * MS]),
    ),
    max_size=120,
)


class Model:
    """What the rules say, kept beside the scheduler in the plainest way."""

    def __init__(self, config: IoConfig, depth: int) -> None:
        self.config = config
        self.depth = depth
        self.sched = Scheduler(config, depth=depth)
        self.now_ns = 0
        self.classes: dict[int, IoClass] = {}
        self.lengths: dict[int, int] = {}
        self.charged: dict[int, int] = {}
        self.over: set[int] = set()
        self.flying: dict[int, DispatchedPiece] = {}
        self.covered: dict[int, set[int]] = {}
        self.history: list[DispatchedPiece] = []
        self.reads_waited: list[bool] = []

    def add(self, value: int) -> None:
        number = len(self.lengths)
        io_class = IoClass(value % 3)
        length = HEADER + (1 + value // 3 % 40) * 64 * KIB
        opcode = 0 if io_class is READ else 1
        room = self.sched.background_room
        taken = self.sched.add(number, io_class, opcode, HEADER, length)
        assert taken == (io_class is not BACKGROUND or length <= room)
        self.lengths[number] = length
        self.classes[number] = io_class
        self.covered[number] = set()
        if not taken:
            self.over.add(number)
            return
        if io_class is BACKGROUND:
            self.charged[number] = length
        self.sched.ready(number, self.now_ns)

    def next(self) -> None:
        waiting = self.sched.class_stats(READ, {}).queued_bytes > 0
        piece = self.sched.next(self.now_ns)
        if piece is None:
            return
        assert piece.piece not in self.flying
        assert self.classes[piece.transfer] == piece.io_class
        limit = self.config.read_piece_bytes if piece.opcode == 0 else self.config.write_piece_bytes
        assert piece.length <= limit + (HEADER if piece.offset == 0 else 0)
        self.flying[piece.piece] = piece
        self.history.append(piece)
        self.reads_waited.append(waiting)

    def finish(self, piece: DispatchedPiece, done_bytes: int) -> None:
        units = range(piece.offset // 4096, (piece.offset + done_bytes) // 4096)
        assert not self.covered[piece.transfer] & set(units), "a byte was moved twice"
        self.covered[piece.transfer] |= set(units)
        if piece.transfer in self.charged:
            self.charged[piece.transfer] -= done_bytes
        del self.flying[piece.piece]

    def step(self, action: str, value: int) -> None:
        if action == "add":
            self.add(value)
        elif action == "next":
            self.next()
        elif action in {"done", "again"} and self.flying:
            piece = list(self.flying.values())[value % len(self.flying)]
            short = value // 7 % (piece.length // 4096) * 4096
            if action == "again" and piece.transfer not in self.over:
                self.finish(piece, short)
                self.sched.again(piece.piece, short, self.now_ns)
            else:
                self.finish(piece, piece.length)
                self.sched.done(piece.piece, self.now_ns, ok=True)
        elif action == "promote" and self.lengths:
            number = value % len(self.lengths)
            if number in self.over:
                return
            there = self.sched.queued_bytes(number) or self.sched.inflight(number)
            changed = self.sched.promote(number, self.now_ns)
            assert changed == (self.classes[number] is BACKGROUND and there > 0)
            if changed:
                self.classes[number] = REQUIRED
                assert not self.sched.promote(number, self.now_ns)
        elif action == "cut" and self.lengths:
            number = value % len(self.lengths)
            if number in self.over:
                return
            cut = self.sched.withdraw(number)
            if number in self.charged:
                self.charged[number] -= cut
            self.over.add(number)

    def check(self) -> None:
        """The rules that hold after every step."""
        assert len(self.flying) <= self.depth  # INV-128
        total = sum(piece.length for piece in self.flying.values())
        assert total <= self.config.inflight_bytes or len(self.flying) == 1  # INV-136
        by_class: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for piece in self.flying.values():
            by_class[piece.io_class].append(piece.length)
        required, background = by_class[1], by_class[2]
        assert sum(required) <= self.config.required_inflight_bytes or len(required) == 1
        assert sum(background) <= self.config.background_inflight_bytes or len(background) == 1
        assert self.sched.background_bytes == sum(self.charged.values())  # INV-112
        assert self.sched.background_bytes <= self.config.background_bytes_max  # INV-111
        for io_class in IoClass:  # INV-808
            stats = self.sched.class_stats(io_class, {})
            ended = stats.done_bytes + stats.failed_bytes + stats.withdrawn_bytes
            there = stats.queued_bytes + stats.inflight_bytes + stats.promoted_out_bytes
            assert stats.issued_bytes + stats.promoted_in_bytes == ended + there
        if len(self.history) >= 2 and self.reads_waited[-1]:  # INV-104
            before, last = self.history[-2:]
            assert READ in {last.io_class, before.io_class}


@settings(max_examples=150, deadline=None)
@given(config=CONFIGS, depth=st.sampled_from([1, 2, 8, 64]), steps=STEPS)
def test_rules_hold_under_random_calls(
    config: IoConfig, depth: int, steps: list[tuple[str, int, int]]
) -> None:
    """INV-102, INV-104, INV-108, INV-110 to INV-112, INV-116, INV-128, INV-136, INV-808 after
    every step; at the end everything drains, each byte of a whole transfer moved exactly once.
    """
    model = Model(config, depth)
    for action, value, passed_ns in steps:
        model.now_ns += passed_ns
        model.step(action, value)
        model.check()
    for _ in range(100_000):
        model.now_ns += MS
        model.next()
        if model.flying:
            model.step("done", 0)
        elif not model.sched.peek(model.now_ns):
            break
    model.check()
    assert not model.flying
    for number, length in model.lengths.items():
        if number not in model.over:
            assert len(model.covered[number]) == length // 4096
    if not model.over:
        assert model.sched.background_bytes == 0


@settings(max_examples=100, deadline=None)
@given(
    turn=st.sampled_from([2, 3, 4, 8, 12]),
    arrivals=st.lists(st.sampled_from([0, 0, 0, 1, 2, None]), min_size=1, max_size=200),
)
def test_no_class_starves(turn: int, arrivals: list[int | None]) -> None:
    """INV-104, INV-107: reads keep half of the dispatches made while they wait; an aged required
    head leaves within four dispatches, an aged background head within twice its turn.
    """
    sched = Scheduler(IoConfig(background_turn=turn))
    now_ns, number = 0, 0
    heads: dict[int, tuple[int, int]] = {}  # class -> (transfer at the head, dispatches seen)
    queues: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    ages = {1: 10 * MS, 2: 100 * MS}
    reads, while_waiting = 0, 0
    for _ in range(30):
        for io_class in (1, 2):
            assert sched.add(number, IoClass(io_class), 1, 0, MIB)
            sched.ready(number, now_ns)
            queues[io_class].append((number, now_ns))
            number += 1
    now_ns = 150 * MS
    for arrival in arrivals + [None] * 60:
        if arrival is not None:
            assert sched.add(number, IoClass(arrival), 0 if arrival == 0 else 1, 0, MIB)
            sched.ready(number, now_ns)
            queues[arrival].append((number, now_ns))
            number += 1
        waited = bool(queues[0])
        for io_class, age in ages.items():
            if queues[io_class] and now_ns - queues[io_class][0][1] >= age:
                head = queues[io_class][0][0]
                seen = heads.get(io_class, (head, 0))
                heads[io_class] = (head, seen[1] + 1 if seen[0] == head else 1)
        piece = sched.next(now_ns)
        if piece is None:
            break
        assert queues[piece.io_class].pop(0)[0] == piece.transfer  # INV-101
        sched.done(piece.piece, now_ns, ok=True)
        sched.remove(piece.transfer)
        heads.pop(piece.io_class, None)
        assert heads.get(1, (0, 0))[1] < 4
        assert heads.get(2, (0, 0))[1] < 2 * turn
        while_waiting += waited
        reads += waited and piece.io_class == 0
        now_ns += MS // 10
    assert 2 * reads >= while_waiting - 1
