"""The completion queue of a simulation: a list, delivered by the loop within a budget per turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, final

from kvstore._uring.base import CompletionCallback, CompletionFlag


@final
class SimCompletions:
    """Implements `Completions` for simulated engines and devices, on any loop.

    ``budget`` bounds the records of one loop turn (INV-129). A token is dropped with its END
    record; a record for a dropped token is counted in ``late_count`` and ignored.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, *, budget: int = 64) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._budget = budget
        self._callbacks: dict[int, CompletionCallback] = {}
        self._records: deque[tuple[int, int, int, int]] = deque()
        self._token_next = 1
        self._is_scheduled = False
        self._is_closed = False
        self.late_count = 0
        self.wakeup_count = 0
        self.delivered_count = 0

    @property
    def pending_count(self) -> int:
        """Records posted and not delivered."""
        return len(self._records)

    @property
    def token_count(self) -> int:
        """Tokens taken and not yet ended: zero when nothing is outstanding."""
        return len(self._callbacks)

    def token(self, callback: CompletionCallback) -> int:
        """Return a fresh token; its completion calls ``callback(status, flags, value)``."""
        token = self._token_next
        self._token_next += 1
        self._callbacks[token] = callback
        return token

    def discard(self, token: int) -> None:
        """Forget a token; a late record for it is ignored."""
        self._callbacks.pop(token, None)

    def post(self, token: int, status: int, flags: int | None = None, value: int = 0) -> None:
        """Append a record; the loop delivers it in a later callback, never inside this call."""
        if self._is_closed:
            return
        if flags is None:
            flags = CompletionFlag.VERDICT | CompletionFlag.END
        self._records.append((token, status, int(flags), value))
        self._schedule()

    def _schedule(self) -> None:
        if self._records and not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        if self._is_closed:
            return
        self.wakeup_count += 1
        calls: list[tuple[Callable[[int, int, int], Any], int, int, int]] = []
        for _ in range(min(self._budget, len(self._records))):
            token, status, flags, value = self._records.popleft()
            if flags & CompletionFlag.END:
                callback = self._callbacks.pop(token, None)
            else:
                callback = self._callbacks.get(token)
            if callback is None:
                self.late_count += 1
                continue
            calls.append((callback, status, flags, value))
        self._schedule()
        for callback, status, flags, value in calls:
            self.delivered_count += 1
            callback(status, flags, value)

    def close(self) -> None:
        """Drop what is pending; a second call does nothing."""
        self._is_closed = True
        self._records.clear()
        self._callbacks.clear()
