"""The device watch: one native thread per store that turns finished device work into completions.

Two kinds of entry. A *completion word* is host memory that the stream itself writes behind its
work: looking at it is a plain load, takes no driver lock and cannot disturb a graph capture, but
says nothing about errors, so the context is asked every ``error_probe_ns``. An *event* is queried
through the driver, on a thread whose capture mode is relaxed. Entries of one lane pass in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from kvstore._uring.base import Completions
from kvstore._uring.device_native import CudaEventHandle, NativeCuda, NativeWatch, WatchCounters
from kvstore.devices.base import device_error
from kvstore.errors import StoreClosed

#: The lane of an entry that has no stream of ours: it is looked at by itself.
ALONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Back-off of the watching thread: spin, then sleep an eighth of the wait so far."""

    spin_ns: int = 20_000
    sleep_max_ns: int = 100_000
    error_probe_ns: int = 20_000_000


@final
class DeviceWatch:
    """Completes tokens when words reach values or events pass.

    Cost: one lock and, if the thread sleeps, one wake-up per call; a pass over the pending work
    looks at the oldest entry of each lane. With nothing pending the thread does not run at all.
    """

    def __init__(self, device: NativeCuda | None, config: WatchConfig | None = None) -> None:
        """Start the thread."""
        config = config or WatchConfig()
        self._native = NativeWatch(
            device, config.spin_ns, config.sleep_max_ns, config.error_probe_ns
        )
        self._closed = False

    def notify_word(
        self, lane: int, address: int, value: int, queue: Completions, token: int
    ) -> None:
        """Complete ``token`` when the word at ``address`` reaches ``value`` (signed, cyclic)."""
        self._raise_for(self._native.word(lane, address, value, queue, token))

    def notify_event(
        self, lane: int, event: CudaEventHandle, queue: Completions, token: int
    ) -> None:
        """Complete ``token`` when the event has passed; keeps a reference to it until then."""
        self._raise_for(self._native.event(lane, event, queue, token))

    def fail(self, code: int) -> None:
        """End every pending notification with a device error, and every later one at once."""
        self._native.fail(code)

    def counters(self) -> WatchCounters:
        """Return what the thread did so far."""
        return self._native.counters()

    def close(self) -> None:
        """End what is pending with CUDA_ERROR_DEINITIALIZED and join the thread."""
        if not self._closed:
            self._closed = True
            self._native.close()

    def _raise_for(self, result: int) -> None:
        if result > 0:
            raise device_error(result, "notify")
        if result < 0:
            raise StoreClosed("the device watch is closed")
