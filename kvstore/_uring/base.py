"""What an engine is: records that cross into C, verdicts, and the two protocols.

A *transfer* moves the bytes of one page; the engine cuts it into pieces, orders them by class
and reports once, or twice if the verdict comes before the last piece is back (INV-118, INV-119).
Everything an engine reports arrives through a `Completions` queue: on real loops a native ring
with one eventfd, on SimLoop a list. A caller takes a token for each thing it waits for.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from kvstore.stats import EngineStats

IDENTITY_BYTES = 192


class Opcode(IntEnum):
    """Direction of a transfer."""

    READ = 0
    WRITE = 1


class SubmitFlag(IntFlag):
    """What native code does around the I/O of a transfer.

    VERIFY: after a read compare the identity (the first bytes of the slot header, checksums
    excluded) and both checksums; a difference is MISMATCH. SEAL: before a write lay the identity
    down as the header and fill in payload and header checksum. NO_CHECKSUM: identity only.
    POISON: overwrite the destination with all bits one before a failure is published (INV-219).
    """

    VERIFY = 1
    SEAL = 2
    NO_CHECKSUM = 4
    POISON = 8


class CompletionFlag(IntFlag):
    """VERDICT: the status is final. END: no piece is in flight, memory and slot may be given up.

    A usual completion carries both. Deadline, cancel and close may deliver VERDICT first and END
    when the last piece is back.
    """

    VERDICT = 1
    END = 2


#: Statuses: 0 is good, negative errno otherwise; a bad header or checksum has a value of its own.
OK = 0
MISMATCH = -10_000
CANCELLED = -errno.ECANCELED
DEADLINE = -errno.ETIME
END_OF_FILE = -10_001

#: One transfer handed to ``Engine.submit``. Mirrors ``kvs_submission`` in ``uring.cdef.h``.
SUBMISSION_DTYPE = np.dtype(
    [
        ("handle", "<u8"),  # out: slot index and generation, for cancel and promote
        ("token", "<u8"),  # of the completion queue
        ("address", "<u8"),  # first byte of the slot in memory, 4 KiB aligned
        ("offset", "<u8"),  # in the file
        ("payload_bytes", "<u8"),
        ("deadline_ns", "<u8"),  # CLOCK_MONOTONIC; 0: the engine's default; all ones: none
        ("gate_generation", "<u8"),
        ("gate_word", "<i4"),  # -1: no gate
        ("file_id", "<u4"),
        ("header_bytes", "<u4"),  # 0 or 4096, directly before the payload
        ("io_class", "u1"),
        ("opcode", "u1"),
        ("flags", "<u2"),
        ("identity", "u1", (IDENTITY_BYTES,)),
    ],
    align=True,
)

Submissions = npt.NDArray[np.void]
#: Called on the loop with (status, flags, value); ``value`` is bytes for a transfer.
CompletionCallback = Callable[[int, int, int], Any]


class Completions(Protocol):
    """Where native threads report; one per event loop and store.

    Callers guarantee: all calls come from the loop's thread. Implementations must: call each
    callback on the loop, drop the token with the END flag, bound the work of one loop turn.
    """

    def token(self, callback: CompletionCallback) -> int:
        """Return a fresh token whose completion calls ``callback``."""
        ...

    def discard(self, token: int) -> None:
        """Forget a token; a late completion for it is ignored."""
        ...

    def close(self) -> None:
        """Stop watching the descriptor; pending records are dropped."""
        ...


class Engine(Protocol):
    """Schedules and performs disk I/O. Created running, stopped by its creator (INV-126)."""

    @property
    def name(self) -> str:
        """``io_uring``, ``threads``, ``serial`` or ``simulated``."""
        ...

    def register_file(self, direct_fd: int, buffered_fd: int) -> int:
        """Take a file into the engine and return its id; -1 for a mode that does not exist.

        Ownership: borrows both descriptors until `unregister_file`.
        """
        ...

    def unregister_file(self, file_id: int) -> None:
        """Forget a drained file. Raises: BusyError: pieces of it are in flight."""
        ...

    def register_memory(self, address: int, length: int) -> bool:
        """Register an arena slab for fixed-buffer I/O; False if the system refuses (INV-138)."""
        ...

    def unregister_memory(self, address: int) -> None:
        """Forget a slab; no transfer may use it."""
        ...

    def submit(self, queue: Completions, submissions: Submissions) -> None:
        """Hand over a batch with one native call; fills in ``handle``. Never blocks.

        Shapes: ``submissions`` is (count,) of `SUBMISSION_DTYPE`. Ownership: copies the records,
        borrows the memory behind ``address`` until the END completion of each.
        Raises: StoreClosed: the engine is stopping; nothing was taken.
        """
        ...

    def promote(self, handle: int) -> bool:
        """Raise a background transfer to required (INV-108); False if nothing changed (INV-110)."""
        ...

    def cancel(self, handle: int) -> bool:
        """Withdraw queued pieces; the transfer ends as cancelled (INV-118). False: already over."""
        ...

    def extend_deadline(self, handle: int, deadline_ns: int) -> bool:
        """Move a deadline to a later time, all ones for never (INV-336).

        False: that is not later, or the verdict is known already.
        """
        ...

    def background_room_bytes(self) -> int:
        """Return how many background bytes may still be issued under the cap (INV-111)."""
        ...

    async def drain(self, file_id: int, timeout: float) -> bool:
        """Wait until no piece of this file is queued or in flight (INV-121); False on timeout."""
        ...

    def stats(self) -> EngineStats:
        """Return a frozen snapshot."""
        ...

    async def aclose(self) -> None:
        """Stop: cancel queued pieces, wait for those in flight, publish open tickets, join."""
        ...


@final
class Ticket:
    """One promise that a gate word reaches ``generation`` (INV-203). Made by `GateWords.take`.

    ``status`` is None while unpublished, then 0 or the first failure; it stays on the ticket when
    the word is used again (INV-207).
    """

    __slots__ = ("_words", "generation", "slot", "word")

    def __init__(self, words: GateWords, word: int, generation: int, slot: int) -> None:
        self._words = words
        self.word = word
        self.generation = generation
        self.slot = slot

    @property
    def words(self) -> GateWords:
        """The ring of words this ticket belongs to."""
        return self._words

    @property
    def status(self) -> int | None:
        """The verdict, read only after the flag (INV-206)."""
        return self._words.ticket_status(self)


class GateWords(Protocol):
    """The ring of flag words in pinned memory and the free list of tickets."""

    def take(self, transfer_count: int) -> Ticket | None:
        """Return a ticket that covers ``transfer_count`` transfers, or None when exhausted."""
        ...

    def ticket_status(self, ticket: Ticket) -> int | None:
        """Return the ticket's status or None while unpublished. Never blocks."""
        ...

    def publish(self, ticket: Ticket, status: int) -> bool:
        """Publish once; False if it was published before."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Give up the status record of a published ticket."""
        ...

    def word_address(self, word: int) -> int:
        """Return the host address of a flag word (64-byte aligned)."""
        ...
