"""An asyncio loop on virtual time.

The selector never blocks: a positive timeout moves the clock, and no timeout at all means that
nothing can ever happen, which is a deadlock and raises. Latencies and faults of the simulated
parts are seeded; the ready queue is not, because FIFO `call_soon` is a promise of asyncio. anyio
task groups and cancel scopes run on it unchanged. Threads have no place in virtual time: what is
given to `asyncio.to_thread`, `run_in_executor` or `anyio.to_thread.run_sync` runs inline.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any, cast, final

import anyio.lowlevel
import anyio.to_thread


class SimDeadlock(RuntimeError):
    """Nothing is scheduled and nothing is ready: no callback can ever run again."""


@final
class SimClock:
    """The injected clock of a simulation: ``now_ns`` is read and moved, calling it reads it."""

    __slots__ = ("now_ns",)

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return the virtual time in nanoseconds."""
        return self.now_ns


class _SimSelector(selectors.BaseSelector):
    """Keeps what the loop registers (its self-pipe) and never waits for any of it."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self._keys: dict[int, selectors.SelectorKey] = {}

    @staticmethod
    def _fd(fileobj: Any) -> int:
        return fileobj if isinstance(fileobj, int) else cast("int", fileobj.fileno())

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = self._fd(fileobj)
        if fd in self._keys:
            raise KeyError(f"{fileobj!r} is already registered")
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._keys[fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(self._fd(fileobj))

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[self._fd(fileobj)]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise SimDeadlock("nothing is scheduled and nothing is ready")
        if timeout > 0:
            self._clock.now_ns += max(1, round(timeout * 1e9))
        return []

    def close(self) -> None:
        self._keys.clear()


class SimLoop(asyncio.SelectorEventLoop):
    """Virtual time: a day of waiting costs nothing, and a hang raises `SimDeadlock`.

    ``clock`` is the store's clock and the loop's. After a `SimDeadlock` the loop is still usable:
    the pending tasks can be cancelled, as `asyncio.Runner` does at its end.
    """

    def __init__(self) -> None:
        self.clock = SimClock()
        super().__init__(_SimSelector(self.clock))
        self._clock_resolution = 1e-9  # the one private name; own test per Python version

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.clock.now_ns / 1e9

    def run_forever(self) -> None:
        """Run until stopped; meanwhile `anyio.to_thread.run_sync` runs inline on this loop."""
        threaded = anyio.to_thread.run_sync

        async def run_sync(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if not isinstance(asyncio.get_running_loop(), SimLoop):
                return await threaded(func, *args, **options)
            await anyio.lowlevel.checkpoint()
            return func(*args)

        anyio.to_thread.run_sync = run_sync  # type: ignore[assignment]
        try:
            super().run_forever()
        finally:
            anyio.to_thread.run_sync = threaded

    def run_in_executor(  # type: ignore[override]  # no thread, so no Executor either
        self,
        executor: Any,  # noqa: ARG002 - asyncio's signature
        func: Callable[..., Any],
        *args: Any,
    ) -> asyncio.Future[Any]:
        """Run ``func`` inline: threads have no place in virtual time, and order stays seeded."""
        future: asyncio.Future[Any] = self.create_future()
        try:
            result = func(*args)
        except BaseException as error:
            if isinstance(error, StopIteration):
                raise
            future.set_exception(error)
        else:
            future.set_result(result)
        return future
