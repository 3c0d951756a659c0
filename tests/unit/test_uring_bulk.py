"""Bulk tokens of the completion queue."""

import asyncio

import pytest

pytest.importorskip("kvstore._uring._lib")

from kvstore._uring._ffi import lib
from kvstore._uring.native import CompletionQueue


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def post(queue, token, status):
    lib.kvs_cq_post(queue.handle, token, status, 3, 0)


def turn(loop):
    loop.run_until_complete(asyncio.sleep(0.001))


def test_bulk_records_come_in_one_call_and_tokens_stay_valid(loop):
    """A range gets all its records of a wake-up at once (INV-129), and END does not end it."""
    queue = CompletionQueue(loop)
    calls, single = [], []
    first = queue.bulk(4, lambda records, all_good: calls.append(records["status"].tolist()))
    other = queue.bulk(2, lambda records, all_good: calls.append(records["token"].tolist()))
    token = queue.token(lambda status, flags, value: single.append((status, flags, value)))
    for i in range(3):
        post(queue, first + i, i)
    post(queue, token, 7)
    post(queue, other, 0)
    turn(loop)
    assert [[0, 1, 2], [other]] == calls
    assert [(7, 3, 0)] == single
    post(queue, first, 9)
    turn(loop)
    assert [9] == calls[-1]
    queue.close()
    turn(loop)


def test_discarded_range_is_ignored(loop):
    """A late record of a forgotten range reaches nobody."""
    queue = CompletionQueue(loop)
    calls = []
    first = queue.bulk(1, lambda records, all_good: calls.append(len(records)))
    queue.discard_bulk(first)
    post(queue, first, 0)
    turn(loop)
    assert [] == calls
    queue.close()
    turn(loop)


def test_failing_handler_loses_no_neighbour(loop):
    """An exception in one handler reaches the loop's handler, the others run."""
    queue = CompletionQueue(loop)
    reports, calls = [], []
    loop.set_exception_handler(lambda _, context: reports.append(context["exception"]))

    def broken(records, all_good):
        raise ValueError("broken")

    first = queue.bulk(1, broken)
    second = queue.bulk(1, lambda records, all_good: calls.append(len(records)))
    post(queue, first, 0)
    post(queue, second, 0)
    turn(loop)
    assert [1] == calls
    assert 1 == len(reports)
    queue.close()
    turn(loop)


@pytest.mark.parametrize(
    ("status", "flags"), [(-5, 3), (0, 1), (0, 2)], ids=["failed", "no end yet", "told before"]
)
def test_a_batch_is_all_good_only_if_every_record_is_a_good_end(loop, status, flags):
    """INV-114: a handler that skips the look at each record skips no verdict but good ones."""
    queue = CompletionQueue(loop)
    calls = []
    first = queue.bulk(3, lambda records, all_good: calls.append((len(records), all_good)))
    for number in range(3):
        post(queue, first + number, 0)
    turn(loop)
    assert [(3, True)] == calls
    post(queue, first, 0)
    lib.kvs_cq_post(queue.handle, first + 1, status, flags, 0)
    turn(loop)
    assert [(3, True), (2, False)] == calls
    queue.close()
    turn(loop)
