"""The completion queue, the gate words, arenas and the checksum, on every real loop."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore._uring._ffi import ffi, lib
from kvstore._uring.base import SUBMISSION_DTYPE
from kvstore._uring.native import (
    REAP_RECORDS_MAX,
    RECORD_DTYPE,
    Arena,
    CompletionQueue,
    GateRing,
    xxh3_64,
)
from kvstore.config import GIB, KIB, MIB
from kvstore.errors import CapacityError, ConfigError, LogicError

FOREVER = (1 << 64) - 1


def descriptors() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("name", "dtype"), [("kvs_record", RECORD_DTYPE), ("kvs_submission", SUBMISSION_DTYPE)]
)
def test_records_have_the_layout_of_c(name: str, dtype: np.dtype) -> None:
    """A struct that crosses has one numpy dtype beside it; size and offsets agree."""
    assert ffi.sizeof(name) == dtype.itemsize
    for field in dtype.names or ():
        assert ffi.offsetof(name, field) == dtype.fields[field][1]


async def test_records_from_many_threads_arrive_once_each() -> None:
    """INV-129: many producers, nothing lost, nothing twice, few wake-ups, bounded turns."""
    queue = CompletionQueue(asyncio.get_running_loop(), capacity=4)
    got: list[int] = []
    tokens = [queue.token(lambda status, *_: got.append(status)) for _ in range(8000)]

    def post(part: int) -> None:
        for index in range(part, 8000, 4):
            lib.kvs_cq_post(queue.handle, tokens[index], index, 3, 0)

    threads = [threading.Thread(target=post, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    sizes = [0]
    async with asyncio.timeout(20):
        while len(got) < 8000:
            await asyncio.sleep(0)
            sizes.append(len(got))
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(8000))
    assert max(np.diff(sizes)) <= 2 * REAP_RECORDS_MAX
    assert queue.pending == 0
    queue.close()


async def test_a_failing_callback_does_not_lose_the_others() -> None:
    """Each record reaches its callback; the exception goes to the loop's handler."""
    loop, seen, errors = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    queue = CompletionQueue(loop)

    def bad(*_: int) -> None:
        raise ValueError("mine")

    for callback in (bad, lambda *_: seen.append(1)):
        lib.kvs_cq_post(queue.handle, queue.token(callback), 0, 3, 0)
    await asyncio.sleep(0.05)
    assert [1] == seen
    assert isinstance(errors[0], ValueError)
    queue.close()


async def test_a_token_lives_until_its_end() -> None:
    """VERDICT leaves the token, END drops it, and discarded ones are ignored."""
    queue, seen = CompletionQueue(asyncio.get_running_loop()), []
    token = queue.token(lambda *record: seen.append(record))
    gone = queue.token(lambda *record: seen.append(record))
    queue.discard(gone)
    for flags in (1, 2, 2):
        lib.kvs_cq_post(queue.handle, token, -5, flags, 7)
    lib.kvs_cq_post(queue.handle, gone, 0, 3, 0)
    await asyncio.sleep(0.05)
    assert [(-5, 1, 7), (-5, 2, 7)] == seen
    queue.close()


async def test_closing_a_queue_with_records_pending() -> None:
    """After close nothing is called, the handle raises, and a poster's reference keeps it alive."""
    before = descriptors()
    queue = CompletionQueue(asyncio.get_running_loop())
    handle, called = queue.handle, []
    lib.kvs_cq_retain(handle)
    lib.kvs_cq_post(handle, queue.token(called.append), 0, 3, 0)
    queue.close()
    queue.close()
    lib.kvs_cq_post(handle, 1, 0, 3, 0)
    await asyncio.sleep(0.02)
    assert not called
    with pytest.raises(LogicError):
        _ = queue.handle
    lib.kvs_cq_release(handle)
    await asyncio.sleep(0)
    assert before == descriptors()


def test_tickets_are_published_once_and_words_reused() -> None:
    """INV-203, INV-204, INV-207, INV-210, INV-211: generations grow, statuses outlive the word."""
    gate = GateRing(2)
    first, second = gate.take(1), gate.take(2)
    assert first is not None
    assert second is not None
    assert gate.take(1) is None
    assert gate.publish(first, -errno.EIO)
    assert not gate.publish(first, 0)
    again = gate.take(1)
    assert again is not None
    assert (first.word, first.generation + 1) == (again.word, again.generation)
    assert first.status == -errno.EIO
    assert again.status is None
    with pytest.raises(LogicError):
        gate.release(again)
    gate.release(first)
    with pytest.raises(LogicError):
        _ = first.status
    assert gate.publish_all(-errno.ECANCELED) == 2
    assert (again.status, second.status) == (-errno.ECANCELED,) * 2
    gate.close()


def test_status_records_are_bounded() -> None:
    """INV-211: unreleased tickets run out as a value, not as memory."""
    gate, tickets = GateRing(1), []
    while (ticket := gate.take(1)) is not None:
        gate.publish(ticket, 0)
        tickets.append(ticket)
    assert len(tickets) == 4
    gate.release(tickets[0])
    assert gate.take(1) is not None
    gate.close()


def test_words_lie_on_cache_lines_of_their_own() -> None:
    """INV-208, INV-217: 64 bytes apart, zero at first, then the last published generation."""
    gate = GateRing(8)
    words = np.frombuffer(
        ffi.buffer(ffi.cast("uint8_t *", gate.address), gate.length), np.uint64
    ).reshape(-1, 8)
    assert gate.address % 4096 == 0
    assert not words.any()
    ticket = gate.take(1)
    assert ticket is not None
    assert gate.word_address(ticket.word) == gate.address + 64 * ticket.word
    gate.publish(ticket, 0)
    assert words[ticket.word, 0] == ticket.generation
    assert lib.kvs_gate_has_barrier()
    del words
    gate.close()


def test_a_native_waiter_sees_the_status_behind_the_flag() -> None:
    """INV-206, INV-209, INV-214: woken by the publication, and the status is there by then."""
    gate = GateRing(4)
    for round_ in range(200):
        ticket = gate.take(1)
        assert ticket is not None
        seen: list[int | None] = []

        def wait(ticket=ticket, seen=seen) -> None:
            lib.kvs_gate_wait(gate.handle, ticket.word, ticket.generation, FOREVER)
            seen.append(ticket.status)

        thread = threading.Thread(target=wait)
        thread.start()
        if round_ % 2:
            time.sleep(0.0005)
        gate.publish(ticket, -round_)
        thread.join()
        assert [-round_] == seen
        gate.release(ticket)
    late = lib.kvs_now_ns() + 5_000_000
    ticket = gate.take(1)
    assert ticket is not None
    assert lib.kvs_gate_wait(gate.handle, ticket.word, ticket.generation, late) == -errno.ETIMEDOUT
    oldest = gate.oldest_open()
    assert oldest is not None
    assert oldest.age_ns >= 4_000_000
    gate.close()


def test_an_arena_has_the_memory_io_needs() -> None:
    """INV-138: 2 MiB aligned, huge pages where the system gives them, parts of at most 1 GiB."""
    arena = Arena(5 * MIB, slab_bytes=2 * MIB)
    arena.prefault(threads=3)
    assert arena.address % (2 * MIB) == 0
    assert arena.length == 6 * MIB
    assert [2 * MIB] * 3 == [length for _, length in arena.slabs()]
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    assert arena.huge_pages == ("[never]" not in setting)
    view = arena.view(MIB, 10)
    view[:] = range(10)
    assert arena.view()[MIB + 9] == 9
    for bad in ((-1, 5), (0, arena.length + 1), (arena.length, 1)):
        with pytest.raises(LogicError):
            arena.view(*bad)
    arena.close()
    with pytest.raises(LogicError):
        arena.view()
    for bad_length in (0, -1, 1.5):
        with pytest.raises(ConfigError):
            Arena(bad_length)
    with pytest.raises(ConfigError):
        Arena(MIB, slab_bytes=2 * GIB)
    with pytest.raises(CapacityError):
        Arena(1 << 60)


def mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines]
    return any(start <= address < end for start, end in ranges)


def test_an_arena_is_unmapped_behind_its_last_view() -> None:
    """A forgotten view can never point at unmapped memory; leaked memory stays (INV-139)."""
    arena = Arena(2 * MIB)
    arena.prefault()
    view = arena.view(4096, 100)[10:20]
    address = arena.address
    arena.close()
    view[:] = 3
    assert mapped(address)
    del view
    gc.collect()
    assert not mapped(address)
    leaked = Arena(2 * MIB)
    leaked.leak()
    gc.collect()
    assert mapped(leaked.address)
    lib.kvs_arena_unmap(leaked.address, leaked.length)


async def test_prefaulting_does_not_block_the_loop() -> None:
    """INV-906: native threads fault the pages in while the loop turns."""
    arena = Arena(64 * MIB)
    turns = 0
    task = asyncio.ensure_future(arena.prefault_off_loop(threads=2))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    await task
    assert turns > 1
    arena.close()


@pytest.mark.parametrize("length", [0, 1, 16, 128, 240, 241, 4096, 64 * KIB, 3 * MIB + 5])
def test_the_checksum_is_that_of_the_package(length: int) -> None:
    """C and Python compute the same xxh3-64."""
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    assert xxh3_64(data) == xxhash.xxh3_64_intdigest(data)
