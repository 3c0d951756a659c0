"""The serial engine: one worker, first in first out, no classes. The baseline of the benchmarks."""

from __future__ import annotations

from typing import final

from kvstore._uring.engine import NativeEngine
from kvstore._uring.native import GateRing
from kvstore.config import IoConfig


@final
class SerialEngine(NativeEngine):
    """What upstream did before parallel I/O, made fair: it never blocks the loop (INV-125)."""

    name = "serial"

    def __init__(self, config: IoConfig | None = None, *, gate: GateRing | None = None) -> None:
        super().__init__(config, gate=gate, policy="fifo", threads=1)
