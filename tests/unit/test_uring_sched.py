"""The scheduler under a fake clock: order, ageing, turns, bounds, promotion, accounting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvstore._uring.scheduler import DispatchedPiece, Scheduler
from kvstore.config import KIB, MIB, IoClass, IoConfig

READ, REQUIRED, BACKGROUND = IoClass.READ, IoClass.REQUIRED, IoClass.BACKGROUND
MS = 1_000_000
LETTERS = "RQB"


class Driver:
    """A scheduler, a clock and the device: pieces stay in the device until `finish`."""

    def __init__(
        self, config: IoConfig | None = None, *, depth: int = 256, policy: str = "kvstore"
    ):
        self.sched = Scheduler(config, depth=depth, policy=policy)
        self.now_ns = 0
        self.transfers = 0
        self.flying: list[DispatchedPiece] = []

    def add(
        self, io_class: IoClass, length: int = MIB, *, header: int = 0, ready: bool = True
    ) -> int:
        number, self.transfers = self.transfers, self.transfers + 1
        opcode = 0 if io_class is READ else 1
        assert self.sched.add(number, io_class, opcode, header, length)
        if ready:
            self.sched.ready(number, self.now_ns)
        return number

    def next(self) -> DispatchedPiece | None:
        peeked = self.sched.peek(self.now_ns)
        piece = self.sched.next(self.now_ns)
        assert peeked == (piece is not None)
        if piece is not None:
            self.flying.append(piece)
        return piece

    def finish(self, piece: DispatchedPiece | None = None, *, ok: bool = True) -> None:
        piece = piece or self.flying[0]
        self.flying.remove(piece)
        self.sched.done(piece.piece, self.now_ns, ok=ok)

    def again(self, piece: DispatchedPiece, done_bytes: int) -> None:
        self.flying.remove(piece)
        self.sched.again(piece.piece, done_bytes, self.now_ns)

    def order(self, count: int = 1000, *, step_ns: int = 1000) -> str:
        """Dispatch one piece at a time, each leaving before the next, and name the classes."""
        letters = ""
        while len(letters) < count and (piece := self.next()) is not None:
            letters += LETTERS[piece.io_class]
            self.finish(piece)
            self.now_ns += step_ns
        return letters

    def fill(self) -> list[DispatchedPiece]:
        """Dispatch until nothing more may go."""
        pieces = []
        while (piece := self.next()) is not None:
            pieces.append(piece)
        return pieces


def test_classes_go_in_order_of_urgency_and_arrival() -> None:
    """INV-101: read before required before background, in arrival order inside a class."""
    driver = Driver()
    for io_class in (BACKGROUND, REQUIRED, READ, BACKGROUND, REQUIRED, READ):
        driver.add(io_class)
    pieces = []
    while (piece := driver.next()) is not None:
        pieces.append((piece.io_class, piece.transfer))
        driver.finish(piece)
    assert pieces[:4] == [(READ, 2), (READ, 5), (REQUIRED, 1), (REQUIRED, 4)]
    assert pieces[4:] == [(BACKGROUND, 0), (BACKGROUND, 3)]


@pytest.mark.parametrize("io_class", [READ, REQUIRED])
@pytest.mark.parametrize("length", [4 * KIB, MIB, 4 * MIB + 4 * KIB, 9 * MIB + 12 * KIB])
def test_pieces_cover_the_transfer_exactly(io_class: IoClass, length: int) -> None:
    """INV-102: pieces keep to their limit, do not overlap and cover the transfer; INV-339: the
    limit counts payload, so the first piece may be a header longer.
    """
    driver = Driver(IoConfig(inflight_bytes=1 << 40, required_inflight_bytes=1 << 40))
    driver.add(io_class, 4 * KIB + length, header=4 * KIB)
    pieces = driver.fill()
    limit = 4 * MIB if io_class is READ else MIB
    ends = [0, *(piece.offset + piece.length for piece in pieces)]
    assert [piece.offset for piece in pieces] == ends[:-1]
    assert ends[-1] == 4 * KIB + length
    assert pieces[0].length == min(limit + 4 * KIB, 4 * KIB + length)
    assert all(piece.length == limit for piece in pieces[1:-1])
    assert all(piece.length <= limit for piece in pieces[1:])


@pytest.mark.parametrize(("io_class", "age_ns"), [(REQUIRED, 10 * MS), (BACKGROUND, 100 * MS)])
@pytest.mark.parametrize(("early_ns", "expected"), [(0, True), (1, False)])
def test_a_write_is_aged_at_its_limit(
    io_class: IoClass, age_ns: int, early_ns: int, expected: bool
) -> None:
    """INV-103: a piece that has waited exactly the limit is aged, one nanosecond less is not."""
    driver = Driver()
    driver.add(io_class)
    driver.now_ns = age_ns - early_ns
    piece = driver.next()
    assert piece is not None
    assert expected == piece.aged


def waiting(reads: int, required: int, background: int, config: IoConfig | None = None) -> Driver:
    """Everything queued at 0 and old by now."""
    driver = Driver(config)
    for io_class, count in ((READ, reads), (REQUIRED, required), (BACKGROUND, background)):
        for _ in range(count):
            driver.add(io_class)
    driver.now_ns = 200 * MS
    return driver


def test_an_aged_required_write_takes_every_other_piece() -> None:
    """INV-104: while reads wait, an aged required write goes only after a read."""
    assert waiting(6, 6, 0).order(12) == "RQ" * 6


def test_an_aged_background_write_takes_one_dispatch_in_eight() -> None:
    """INV-104: while reads wait, background takes at most one dispatch in eight."""
    order = waiting(40, 0, 10).order(40)
    turns = [index for index, letter in enumerate(order) if letter == "B"]
    assert all(later - earlier >= 8 for earlier, later in pairwise(turns))
    assert len(turns) == 5


@pytest.mark.parametrize("turn", [2, 3, 8, 16])
def test_two_aged_writes_never_follow_each_other(turn: int) -> None:
    """INV-104, INV-105: with both writes aged, reads keep at least half and both make progress."""
    order = waiting(60, 60, 60, IoConfig(background_turn=turn)).order(100)
    assert "QQ" not in order
    assert "QB" not in order
    assert "BQ" not in order
    assert order.count("R") >= 50
    assert order.count("Q") > 10
    assert order.count("B") >= 100 // (2 * turn)


def test_the_turn_of_background_comes_although_required_is_aged() -> None:
    """INV-105: required first, unless the turn of background is due; turns are never reset."""
    order = waiting(60, 60, 60).order(40)
    turns = [index for index, letter in enumerate(order) if letter == "B"]
    assert [later - earlier for earlier, later in pairwise(turns)] == [8] * 4


def test_turns_are_counted_over_bursts_of_reads() -> None:
    """INV-105: a read queue that runs empty in between does not start the count anew."""
    driver, order = waiting(0, 60, 60), ""
    for _ in range(12):
        driver.add(READ)
        driver.add(READ)
        order += driver.order(5)
    turns = [index for index, letter in enumerate(order) if letter == "B"]
    gaps = [later - earlier for earlier, later in pairwise(turns)]
    assert len(turns) >= 6
    assert all(8 <= gap <= 9 for gap in gaps)


def test_aged_background_passes_required_that_is_not_aged() -> None:
    """INV-106: the age limit holds without reads too."""
    driver = Driver()
    driver.add(BACKGROUND)
    driver.add(BACKGROUND)
    driver.now_ns = 100 * MS
    driver.add(REQUIRED)
    driver.add(REQUIRED)
    assert driver.order() == "BBQQ"


def test_without_reads_required_goes_before_fresh_background() -> None:
    """INV-106: required first while background is not aged."""
    driver = Driver()
    for _ in range(3):
        driver.add(BACKGROUND)
        driver.add(REQUIRED)
    assert driver.order() == "QQQBBB"


def test_without_reads_both_aged_follow_the_turns() -> None:
    """INV-106: if both are aged, INV-105 holds: required, and background every eighth."""
    order = waiting(0, 40, 10).order(24)
    assert [index for index, letter in enumerate(order) if letter == "B"] == [0, 8, 16]


@pytest.mark.parametrize("reads", [0, 100])
def test_aged_heads_leave_within_their_bound(reads: int) -> None:
    """INV-107: required within four dispatches, background within twice its turn."""
    order = waiting(reads, 40, 40).order(80)
    assert max(len(run) for run in order.split("Q")[:-1]) <= 3
    assert max(len(run) for run in order.split("B")[:-1]) <= 15


def transfers(pieces: Sequence[DispatchedPiece]) -> list[int]:
    return [piece.transfer for piece in pieces]


def test_promotion_moves_to_the_tail_of_required_in_order() -> None:
    """INV-108: queued pieces keep their order and go behind what waits in required."""
    driver = Driver()
    moved = driver.add(BACKGROUND, 3 * MIB)
    stays = driver.add(BACKGROUND)
    ahead = driver.add(REQUIRED)
    assert driver.sched.promote(moved, driver.now_ns)
    pieces = driver.fill()
    assert transfers(pieces) == [ahead, moved, moved, moved, stays]
    assert [piece.offset for piece in pieces[1:4]] == [0, MIB, 2 * MIB]
    assert [piece.io_class for piece in pieces] == [REQUIRED] * 4 + [BACKGROUND]


def test_promotion_of_a_transfer_not_queued_yet() -> None:
    """INV-108: pieces that are not queued yet enter the required queue directly."""
    driver = Driver()
    late = driver.add(BACKGROUND, ready=False)
    driver.add(BACKGROUND)
    assert driver.sched.promote(late, driver.now_ns)
    driver.sched.ready(late, driver.now_ns)
    assert driver.order() == "QB"


def test_promotion_moves_a_piece_that_waits_to_go_again() -> None:
    """INV-108, INV-116: a piece put back is moved with its transfer, before the rest of it."""
    driver = Driver()
    number = driver.add(BACKGROUND, 2 * MIB)
    piece = driver.next()
    assert piece is not None
    driver.again(piece, 256 * KIB)
    assert driver.sched.promote(number, driver.now_ns)
    pieces = driver.fill()
    assert [(piece.offset, piece.io_class) for piece in pieces] == [
        (256 * KIB, REQUIRED),
        (MIB, REQUIRED),
    ]


def test_ageing_restarts_at_promotion() -> None:
    """INV-110: a promoted write is as old as its promotion."""
    driver = Driver()
    number = driver.add(BACKGROUND)
    driver.now_ns = 99 * MS
    driver.sched.promote(number, driver.now_ns)
    driver.now_ns += 10 * MS - 1
    piece = driver.next()
    assert piece is not None
    assert not piece.aged


@pytest.mark.parametrize("io_class", [READ, REQUIRED])
def test_promoting_anything_but_background_changes_nothing(io_class: IoClass) -> None:
    """INV-110: reads and required writes are not promoted."""
    driver = Driver()
    assert not driver.sched.promote(driver.add(io_class), 0)


def test_promoting_twice_or_a_finished_transfer_changes_nothing() -> None:
    """INV-110: the second promotion and one after the end return False and move nothing."""
    driver = Driver()
    first, finished = driver.add(BACKGROUND), driver.add(BACKGROUND)
    assert driver.sched.promote(first, 0)
    driver.add(REQUIRED)
    assert not driver.sched.promote(first, 0)
    pieces = driver.fill()
    assert transfers(pieces)[0] == first
    for piece in pieces:
        driver.finish(piece)
    assert not driver.sched.promote(finished, 0)


def test_the_cap_refuses_what_would_exceed_it() -> None:
    """INV-111: above the cap a copy is skipped and counted, not delayed."""
    sched = Scheduler(IoConfig(background_bytes_max=2 * MIB))
    assert sched.add(0, BACKGROUND, 1, 0, MIB)
    assert not sched.add(1, BACKGROUND, 1, 0, MIB + 4 * KIB)
    assert sched.add(1, BACKGROUND, 1, 0, MIB)
    assert sched.background_room == 0
    assert sched.add(2, REQUIRED, 1, 0, MIB)
    assert sched.class_stats(BACKGROUND, {}).skipped == 1


def test_the_cap_is_repaid_per_piece_however_it_ends() -> None:
    """INV-112: written, failed and withdrawn pieces repay; promotion does not; idle shows zero."""
    driver = Driver()
    number = driver.add(BACKGROUND, 4 * MIB)
    written, failed = driver.next(), driver.next()
    assert written is not None
    assert failed is not None
    driver.finish(written)
    assert driver.sched.background_bytes == 3 * MIB
    assert driver.sched.promote(number, 0)
    assert driver.sched.background_bytes == 3 * MIB
    driver.finish(failed, ok=False)
    assert driver.sched.background_bytes == 2 * MIB
    assert driver.sched.withdraw(number) == 2 * MIB
    driver.sched.remove(number)
    assert driver.sched.background_bytes == 0


def test_a_short_piece_goes_on_from_the_head_with_its_age() -> None:
    """INV-116: the rest is dispatched before anything that arrived later, with its old time."""
    driver = Driver()
    first, second = driver.add(REQUIRED, MIB), driver.add(REQUIRED, MIB)
    piece = driver.next()
    assert piece is not None
    driver.now_ns = 10 * MS
    driver.again(piece, 12 * KIB)
    rest, after = driver.fill()
    assert (first, 12 * KIB, MIB - 12 * KIB) == (rest.transfer, rest.offset, rest.length)
    assert rest.aged
    assert rest.again
    assert after.transfer == second


def test_pieces_in_flight_never_exceed_the_depth() -> None:
    """INV-128: a full ring delays pieces; order and number stay."""
    driver = Driver(depth=4)
    for _ in range(10):
        driver.add(READ, 4 * KIB)
    assert transfers(driver.fill()) == [0, 1, 2, 3]
    driver.finish()
    assert transfers(driver.fill()) == [4]


def test_put_back_pieces_do_not_use_up_the_depth() -> None:
    """INV-128, INV-116: a piece that waits to go again is not in the device."""
    driver = Driver(depth=1)
    driver.add(BACKGROUND)
    piece = driver.next()
    assert piece is not None
    driver.again(piece, 0)
    driver.add(READ)
    assert driver.order() == "RB"


def test_a_read_passes_a_large_write_after_one_piece() -> None:
    """INV-131: a read behind a large eviction waits for at most one more write piece."""
    driver = Driver()
    driver.add(REQUIRED, 64 * MIB)
    assert driver.order(5) == "QQQQQ"
    driver.now_ns += 50 * MS
    driver.add(READ)
    assert "R" in driver.order(2)


def test_the_same_calls_give_the_same_order() -> None:
    """INV-135: order depends on calls and clock only."""
    orders = {waiting(20, 20, 20).order() for _ in range(3)}
    assert len(orders) == 1


def test_bytes_in_the_device_are_bounded_in_total() -> None:
    """INV-136: reads have no bound of their own; the total holds for all."""
    driver = Driver()
    for _ in range(10):
        driver.add(READ, 4 * MIB)
    assert len(driver.fill()) == 4


def test_required_has_its_own_bound_and_keeps_it_while_reads_wait() -> None:
    """INV-136: required writes stop at 8 MiB, and aged ones may still go while reads wait."""
    driver = Driver()
    for _ in range(12):
        driver.add(REQUIRED)
    assert len(driver.fill()) == 8


def test_background_bound_depends_on_reads() -> None:
    """INV-136: 4 MiB without reads, one piece while reads are in flight, none while they wait."""
    driver = Driver()
    for _ in range(10):
        driver.add(BACKGROUND)
    assert len(driver.fill()) == 4
    while driver.flying:
        driver.finish()
    driver.add(READ)
    read, write = driver.fill()
    assert (READ, BACKGROUND) == (read.io_class, write.io_class)
    driver.finish(write)
    blocked = Driver(IoConfig(inflight_bytes=4 * MIB))
    for _ in range(2):
        blocked.add(READ, 4 * MIB)
    blocked.add(BACKGROUND)
    assert [piece.io_class for piece in blocked.fill()] == [READ]


def test_a_finished_read_counts_for_two_milliseconds() -> None:
    """INV-136: background stays narrow for a while after the last read (ADR 0017: 2 ms)."""
    driver = Driver()
    driver.add(READ)
    driver.finish(driver.next())
    for _ in range(4):
        driver.add(BACKGROUND)
    driver.now_ns = 2 * MS - 1
    assert len(driver.fill()) == 1
    driver.now_ns = 2 * MS
    assert len(driver.fill()) == 3


def test_a_background_turn_stays_due_until_the_device_has_none() -> None:
    """INV-136: while a background piece is in the device its turn waits, and is not lost."""
    driver = Driver()
    driver.add(BACKGROUND)
    held = driver.next()
    driver.now_ns = 200 * MS
    driver.add(BACKGROUND)
    driver.now_ns = 400 * MS
    for _ in range(40):
        driver.add(READ, 4 * KIB)
    letters = ""
    for _ in range(12):
        piece = driver.next()
        assert piece is not None
        letters += LETTERS[piece.io_class]
        driver.finish(piece)
    assert letters == "R" * 12
    driver.finish(held)
    assert driver.order(1) == "B"


def test_a_class_without_room_lets_the_next_one_go() -> None:
    """INV-136: the class order is a preference; a full class does not block the others."""
    driver = Driver(IoConfig(required_inflight_bytes=MIB))
    driver.add(REQUIRED)
    driver.add(REQUIRED)
    driver.add(BACKGROUND)
    assert [piece.io_class for piece in driver.fill()] == [REQUIRED, BACKGROUND]


def test_no_room_in_total_dispatches_nothing() -> None:
    """INV-136: a small write may not slip past a read that has no room."""
    driver = Driver(IoConfig(inflight_bytes=6 * MIB))
    driver.add(READ, 4 * MIB)
    driver.add(READ, 4 * MIB)
    driver.add(REQUIRED, 4 * KIB)
    assert [piece.io_class for piece in driver.fill()] == [READ]


def test_a_piece_larger_than_its_bound_goes_alone() -> None:
    """INV-136: bounds below one piece do not stop the engine."""
    config = IoConfig(
        inflight_bytes=4 * KIB, required_inflight_bytes=4 * KIB, background_inflight_bytes=4 * KIB
    )
    driver = Driver(config)
    for io_class in (READ, REQUIRED, BACKGROUND):
        driver.add(io_class, 2 * MIB)
    assert driver.order() == "RQQBB"


def test_the_fifo_policy_knows_no_classes() -> None:
    """INV-125: the baseline takes everything in arrival order."""
    driver = Driver(policy="fifo")
    for io_class in (BACKGROUND, READ, REQUIRED, READ):
        driver.add(io_class)
    assert driver.order() == "BRQR"


def test_the_upstream_policy_has_no_byte_bounds() -> None:
    """The peer row: classes and ageing, no bounds, turns one in two for both writes."""
    driver = Driver(IoConfig(background_turn=2), policy="upstream")
    for _ in range(40):
        driver.add(BACKGROUND)
    assert len(driver.fill()) == 40


def test_bytes_balance_per_class() -> None:
    """INV-808: issued and promoted in equal everything they can have become."""
    driver = Driver()
    numbers = [driver.add(io_class, 3 * MIB) for io_class in (READ, REQUIRED, BACKGROUND)]
    numbers.append(driver.add(BACKGROUND, 2 * MIB))
    first = driver.next()
    assert first is not None
    driver.finish(first)
    driver.sched.promote(numbers[2], 0)
    for piece in driver.fill()[:2]:
        driver.again(piece, 8 * KIB)
    driver.sched.withdraw(numbers[1])
    for io_class in IoClass:
        stats = driver.sched.class_stats(io_class, {})
        ended = stats.done_bytes + stats.failed_bytes + stats.withdrawn_bytes
        there = stats.queued_bytes + stats.inflight_bytes + stats.promoted_out_bytes
        assert stats.issued_bytes + stats.promoted_in_bytes == ended + there


def test_waits_and_service_times_are_on_the_given_clock() -> None:
    """INV-809: queue wait and service time are taken from the clock that drives the scheduler."""
    driver = Driver()
    driver.add(REQUIRED)
    driver.now_ns = 3 * MS
    piece = driver.next()
    driver.now_ns = 5 * MS
    driver.finish(piece)
    stats = driver.sched.class_stats(REQUIRED, {})
    assert (1, 3 * MS) == (stats.queue_wait.total, stats.queue_wait.sum_ns)
    assert (1, 2 * MS) == (stats.service.total, stats.service.max_ns)
