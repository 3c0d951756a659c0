"""The device watch over plain words: order, back-off, errors, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvstore.devices.watch import ALONE, DeviceWatch, WatchConfig
from kvstore.errors import DeviceError, StoreClosed


def _words(count: int) -> Any:
    return np.zeros((count, 8), np.uint64)


def _address(words: Any, index: int) -> int:
    return int(words[index].ctypes.data)


def test_words_complete_when_they_reach_the_value(on_loop: Any) -> None:
    """A word is compared in signed cyclic arithmetic; entries of a lane pass in order."""
    words = _words(2)

    async def body(waiting: Any) -> None:
        watch = DeviceWatch(None)
        order: list[int] = []
        futures = []
        for value in (1, 2, 3):
            token, future = waiting.token()
            future.add_done_callback(lambda _done, value=value: order.append(value))
            watch.notify_word(0, _address(words, 0), value, waiting.queue, token)
            futures.append(future)
        token, other = waiting.token()
        watch.notify_word(1, _address(words, 1), 5, waiting.queue, token)
        words[1, 0] = 6
        assert await other == 0
        assert not any(future.done() for future in futures)
        words[0, 0] = 3
        for future in futures:
            assert await future == 0
        await asyncio.sleep(0)
        assert order == [1, 2, 3]
        watch.close()

    on_loop(body)


def test_back_off_grows_and_ends(on_loop: Any) -> None:
    """A long wait is looked at rarely; a new arrival is looked at at once."""
    words = _words(2)

    async def body(waiting: Any) -> None:
        watch = DeviceWatch(None, WatchConfig(spin_ns=0, sleep_max_ns=2_000_000))
        token, slow = waiting.token()
        watch.notify_word(0, _address(words, 0), 1, waiting.queue, token)
        await asyncio.sleep(0.2)
        assert watch.counters().passes < 400
        token, quick = waiting.token()
        words[1, 0] = 1
        watch.notify_word(1, _address(words, 1), 1, waiting.queue, token)
        begin = time.perf_counter()
        assert await quick == 0
        assert time.perf_counter() - begin < 0.1
        words[0, 0] = 1
        assert await slow == 0
        await asyncio.sleep(0.02)
        before = watch.counters()
        await asyncio.sleep(0.1)
        assert before == watch.counters()
        watch.close()

    on_loop(body)


def test_close_ends_what_is_pending(on_loop: Any) -> None:
    """INV-204 for notifications: closing completes them as deinitialized, and joins."""
    words = _words(1)

    async def body(waiting: Any) -> None:
        before = threading.active_count()
        watch = DeviceWatch(None)
        futures = []
        for lane in (0, 1, ALONE, ALONE):
            token, future = waiting.token()
            watch.notify_word(lane, _address(words, 0), 1, waiting.queue, token)
            futures.append(future)
        watch.close()
        watch.close()
        for future in futures:
            assert await future == -20_004
        assert before == threading.active_count()

    on_loop(body)


def test_failure_reaches_pending_and_later_waits(on_loop: Any) -> None:
    """INV-917: a sticky error ends every pending notification with its code."""
    words = _words(1)

    async def body(waiting: Any) -> None:
        watch = DeviceWatch(None)
        token, future = waiting.token()
        watch.notify_word(0, _address(words, 0), 1, waiting.queue, token)
        watch.fail(700)
        assert await future == -20_700
        with pytest.raises(DeviceError):
            watch.notify_word(0, _address(words, 0), 1, waiting.queue, token)
        assert watch.counters().pending == 0
        watch.close()
        with pytest.raises((DeviceError, StoreClosed)):
            watch._raise_for(-108)

    on_loop(body)


def test_many_completions_from_another_thread(on_loop: Any) -> None:
    """Ten thousand words finished by a native-like writer all arrive once."""
    words = _words(8)

    async def body(waiting: Any) -> None:
        watch = DeviceWatch(None)
        futures = []
        for turn in range(1, 501):
            for lane in range(8):
                token, future = waiting.token()
                watch.notify_word(lane, _address(words, lane), turn, waiting.queue, token)
                futures.append(future)

        def write() -> None:
            for turn in range(1, 501):
                words[:, 0] = turn

        await asyncio.to_thread(write)
        assert [0] * len(futures) == await asyncio.gather(*futures)
        assert watch.counters().completed == len(futures)
        watch.close()

    on_loop(body)
