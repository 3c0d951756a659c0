"""The threads engine: the same scheduler, executed by N workers. The fallback, and the peer."""

from __future__ import annotations

from typing import final

from kvstore._uring._ffi import lib
from kvstore._uring.engine import NativeEngine
from kvstore._uring.native import GateRing
from kvstore.config import IoConfig, check_io_threads


@final
class ThreadsEngine(NativeEngine):
    """``disk_io_threads`` workers, each with one piece at a time.

    With 0 threads the caller of `submit` does the I/O itself, one piece at a time; for tests only,
    it blocks the loop (INV-125).
    """

    name = "threads"

    def __init__(
        self,
        config: IoConfig | None = None,
        *,
        gate: GateRing | None = None,
        policy: str = "kvstore",
        fallback_reason: str = "",
        threads: int | None = None,
    ) -> None:
        config = config or IoConfig()
        count = config.disk_io_threads if threads is None else threads
        check_io_threads(count)  # INV-124: the one validator
        self._kind = lib.KVS_KIND_WORKERS if count else lib.KVS_KIND_INLINE
        super().__init__(
            config, gate=gate, policy=policy, threads=count, fallback_reason=fallback_reason
        )
