"""The gate as a public primitive: a device stream waits until an awaited disk read has resolved.

A ticket is a promise that one flag word reaches one generation. `Gate.take` enqueues the wait on
a stream and returns the ticket; whoever reads the data publishes it, exactly once, on every path:
the engine's reactor for transfers that carry the ticket, or `GateTicket.cover` for any other
awaitable read. `Gate.reserve` takes several tickets at once, one per layer group, so that compute
can start when the first groups have arrived.

The default of the store is to await; a gate is for callers that know why (INV-201, INV-202). While
one is closed, allocating device memory in any thread does not return: see ``docs/gpu.md``.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

from kvstore._uring.base import GateWords, Ticket
from kvstore.errors import DeviceError, GateBusy, LogicError, UnsupportedError

GATED_STREAMS_MAX = 4
CANCELLED = -errno.ECANCELED
FAILED = -errno.EIO

T = TypeVar("T")


class GateStream(Protocol):
    """What the gate needs of a stream."""

    def wait_ticket(self, ticket: Ticket) -> None:
        """Let later work wait until the ticket is published."""
        ...

    def is_capturing(self) -> bool:
        """Return whether a graph capture is open; a gate is refused then."""
        ...


class GateDevice(Protocol):
    """What the gate needs of a device."""

    @property
    def caps(self) -> Any:
        """``caps.memops64`` says whether streams can wait on words, for this device alone."""
        ...

    def wrap_stream(self, stream: Any) -> Any:
        """Wrap a caller's stream; the result compares equal for one stream (``key``)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStats:
    """INV-811: taken = published_good + published_failed + open."""

    taken: int = 0
    published_good: int = 0
    published_failed: int = 0
    open: int = 0  # gauge
    busy: int = 0
    await_fallbacks: int = 0
    parked_streams: int = 0  # gauge


@final
class GateTicket:
    """One promise of a gate. Made by `Gate.take` and `Gate.reserve`.

    Ownership: whoever took it sees to its publication; `release` gives up the status record.
    """

    __slots__ = ("_gate", "stream", "ticket")

    def __init__(self, gate: Gate, ticket: Ticket, stream: Any) -> None:
        self._gate = gate
        self.ticket = ticket
        self.stream = stream

    @property
    def word(self) -> int:
        """Index of the flag word, for ``gate_word`` of a submission."""
        return self.ticket.word

    @property
    def generation(self) -> int:
        """The value the word reaches, for ``gate_generation`` of a submission."""
        return self.ticket.generation

    @property
    def status(self) -> int | None:
        """None while unpublished, then 0 or the first failure. Never blocks (INV-207)."""
        return self.ticket.status

    def publish(self, status: int = 0) -> bool:
        """Open the gate with a verdict; False if it was published before (INV-204)."""
        return self._gate.publish(self, status)

    async def cover(self, read: Awaitable[T]) -> T:
        """Await a read and publish its outcome: good if it returns, failed if it raises.

        Cancellation publishes ECANCELED before it propagates; the destination is the caller's to
        quarantine until its I/O has ended (INV-205).
        """
        status = CANCELLED
        try:
            result = await read
            status = 0
        except Exception as error:
            status = -int(getattr(error, "errno", 0) or errno.EIO)
            raise
        finally:
            self.publish(status)
        return result

    def enqueue_wait(self) -> None:
        """Let later work of the ticket's stream wait for it.

        Raises: DeviceError, UnsupportedError: the ticket was published as failed before this was
        raised (INV-215); use await mode.
        """
        self._gate.enqueue_wait(self)

    def release(self) -> None:
        """Give up the status record of a published ticket; not doing so leaks one record."""
        self._gate.release(self)


@final
class Gate:
    """Takes tickets and keeps the cap on parked streams of one device (INV-211).

    Cost: `take` is O(open tickets of this gate), at most a handful.
    """

    def __init__(self, device: GateDevice, words: GateWords, *, streams_max: int = 2) -> None:
        """Serve ``device`` with ``words``; at most ``streams_max`` streams are parked at once."""
        if not 0 <= streams_max <= GATED_STREAMS_MAX:
            raise LogicError(f"streams_max must be in 0..{GATED_STREAMS_MAX}, got {streams_max}")
        self._device = device
        self._words = words
        self._streams_max = streams_max
        #: Unpublished tickets with the keys of the streams parked behind each.
        self._open: list[tuple[GateTicket, frozenset[Any]]] = []
        self._taken = self._good = self._failed = self._busy = self._fallbacks = 0

    def take(self, stream: Any, *, transfers: int = 1, behind: Sequence[Any] = ()) -> GateTicket:
        """Take a ticket and enqueue the wait on ``stream``; returns at once.

        ``behind`` names other streams that will wait for this one: they are parked too, and count.
        Raises: GateBusy: no word is free or the cap is reached; UnsupportedError: the device cannot
        wait; DeviceError: the call failed. In each case nothing is parked: await instead.
        """
        ticket = self.reserve(stream, (transfers,), behind=behind)[0]
        ticket.enqueue_wait()
        return ticket

    def reserve(
        self, stream: Any, transfers: Sequence[int], *, behind: Sequence[Any] = ()
    ) -> list[GateTicket]:
        """Take one ticket per entry of ``transfers`` (layer groups), all or none.

        The waits are enqueued by `GateTicket.enqueue_wait`, in the order the caller wants them
        between its copies; all share one stream, which is parked once.
        """
        wrapped = self._device.wrap_stream(stream)
        self._check_capability()
        if wrapped.is_capturing():
            raise UnsupportedError("a capturing stream cannot wait: use gates between replays")
        keys = frozenset(_key(self._device.wrap_stream(one)) for one in (stream, *behind))
        if len(self._parked() | keys) > self._streams_max:
            self._busy += 1
            raise GateBusy(f"{self._streams_max} streams of the device are parked already")
        taken: list[GateTicket] = []
        for count in transfers:
            ticket = self._words.take(count)
            if ticket is None:
                for earlier in taken:
                    self.publish(earlier, CANCELLED)
                    self.release(earlier)
                self._busy += 1
                raise GateBusy("no gate word is free")
            self._taken += 1
            taken.append(GateTicket(self, ticket, wrapped))
            self._open.append((taken[-1], keys))
        return taken

    def enqueue_wait(self, ticket: GateTicket) -> None:
        """See `GateTicket.enqueue_wait`."""
        try:
            ticket.stream.wait_ticket(ticket.ticket)
        except (DeviceError, UnsupportedError):
            self._fallbacks += 1
            self.publish(ticket, FAILED)  # INV-215: before the error is raised
            raise

    def publish(self, ticket: GateTicket, status: int) -> bool:
        """See `GateTicket.publish`."""
        published = self._words.publish(ticket.ticket, status)
        self._sweep()
        return published

    def fail(self, tickets: Sequence[GateTicket], status: int = CANCELLED) -> int:
        """Publish every open ticket of a restore as failed; returns how many there were."""
        return sum(self.publish(ticket, status) for ticket in tickets)

    def release(self, ticket: GateTicket) -> None:
        """See `GateTicket.release`. Raises: LogicError: the ticket is not published."""
        if ticket.status is None:
            raise LogicError("an open ticket cannot be released")
        self._sweep()
        self._words.release(ticket.ticket)

    def count_fallback(self) -> None:
        """Count a batch that used await mode although a gate was asked for."""
        self._fallbacks += 1

    def room(self) -> int:
        """Return how many more streams may be parked now."""
        return max(0, self._streams_max - len(self._parked()))

    def close(self, status: int = CANCELLED) -> int:
        """Publish all open tickets, before device memory or context go away (INV-222)."""
        return self.fail([ticket for ticket, _ in list(self._open)], status)

    def stats(self) -> GateStats:
        """Return a frozen snapshot (INV-811)."""
        parked = self._parked()
        return GateStats(
            taken=self._taken,
            published_good=self._good,
            published_failed=self._failed,
            open=len(self._open),
            busy=self._busy,
            await_fallbacks=self._fallbacks,
            parked_streams=len(parked),
        )

    def _check_capability(self) -> None:
        if platform.machine() in {"aarch64", "arm64"} and not hasattr(self._words, "address"):
            # INV-218: only native words come with the store barrier of INV-217
            raise UnsupportedError("gates need the native extension on aarch64: use await mode")
        if not self._device.caps.memops64:
            raise UnsupportedError("the device cannot wait on words: use await mode")

    def _parked(self) -> frozenset[Any]:
        self._sweep()
        return frozenset(key for _, keys in self._open for key in keys)

    def _sweep(self) -> None:
        """Take out what has been published meanwhile, by the reactor or anybody else."""
        still = []
        for entry in self._open:
            status = entry[0].status
            if status is None:
                still.append(entry)
            elif status == 0:
                self._good += 1
            else:
                self._failed += 1
        self._open = still


def _key(stream: Any) -> Any:
    return getattr(stream, "key", stream)
