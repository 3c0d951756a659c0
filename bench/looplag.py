"""How late the loop is: a kernel timer becomes readable every 5 ms, and the loop is asked when.

`loop.call_later` will not do: asyncio rounds its waits up to whole milliseconds, which shows as
lag in a loop that is busy with short callbacks. A timer descriptor is ready at its time exactly,
so what is measured is how long a ready callback waits for its turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

import numpy as np

from .iostats import Latencies

PERIOD_NS = 5_000_000
_TIMER_ABSTIME = 1


def _open_timer(first_ns: int) -> int:
    """Return a descriptor that becomes readable at ``first_ns`` and every period after it."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    # struct itimerspec: interval, then first time, each as seconds and nanoseconds
    spec = (ctypes.c_long * 4)(0, PERIOD_NS, first_ns // 10**9, first_ns % 10**9)
    if libc.timerfd_settime(fd, _TIMER_ABSTIME, ctypes.byref(spec), None) < 0:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "timerfd_settime")
    return fd


class LagProbe:
    """Measures between `start` and `stop`; a blocked loop counts once per missed period.

    On a loop of virtual time, where no descriptor ever becomes readable, nothing is measured.
    """

    def __init__(self) -> None:
        self.lag = Latencies()
        self._fd = -1
        self._due_ns = 0
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Begin to measure."""
        self._due_ns = time.monotonic_ns() + PERIOD_NS
        self._fd = _open_timer(self._due_ns)
        self._loop.add_reader(self._fd, self._tick)

    def stop(self) -> None:
        """Stop measuring; a second call does nothing."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            fd, self._fd = self._fd, -1
            # uvloop takes the descriptor out one turn later
            self._loop.call_soon(os.close, fd)

    def restart(self) -> None:
        """Forget what was seen and go on."""
        self.lag = Latencies()

    def _tick(self) -> None:
        if self._fd < 0:
            return
        try:
            count = int.from_bytes(os.read(self._fd, 8), "little")
        except BlockingIOError:
            return
        late = time.monotonic_ns() - self._due_ns - PERIOD_NS * np.arange(count, dtype=np.int64)
        self.lag.add(late)
        self._due_ns += PERIOD_NS * count
