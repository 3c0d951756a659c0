"""The asyncio disk engine over io_uring, its fallbacks, and the native helpers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.config import IoConfig, check_choice
from kvstore.errors import UnsupportedError

if TYPE_CHECKING:
    from kvstore._uring.engine import NativeEngine
    from kvstore._uring.native import GateRing

logger = logging.getLogger(__name__)

ENGINES = ("auto", "io_uring", "threads", "serial")


def open_engine(
    config: IoConfig | None = None,
    *,
    kind: str | None = None,
    gate: GateRing | None = None,
    policy: str = "kvstore",
) -> NativeEngine:
    """Start an engine; its creator closes it (INV-122, INV-123).

    ``kind`` is ``auto``, ``io_uring``, ``threads`` or ``serial``; by default what the
    configuration names. ``auto`` falls back from io_uring to threads, with a warning and with the
    reason in ``stats()``; an engine named explicitly raises instead (INV-127). ``policy`` is
    ``kvstore``, or ``upstream`` or ``fifo`` for the rows of the benchmarks.

    Raises: UnsupportedError: io_uring was named and the system refuses it; ConfigError.
    """
    from kvstore._uring.ring import RingEngine
    from kvstore._uring.serial import SerialEngine
    from kvstore._uring.threads import ThreadsEngine

    config = config or IoConfig()
    kind = kind or config.io_engine
    check_choice("io_engine", kind, ENGINES)
    if kind == "serial":
        return SerialEngine(config, gate=gate)
    if kind == "threads":
        return ThreadsEngine(config, gate=gate, policy=policy)
    try:
        return RingEngine(config, gate=gate, policy=policy)
    except UnsupportedError as error:
        if kind == "io_uring":
            raise
        logger.warning("falling back to the threads engine: %s", error)
        return ThreadsEngine(config, gate=gate, policy=policy, fallback_reason=str(error))
