"""Gate words of a simulation: same rules as the native ring, waiters are callbacks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from kvstore._uring.base import CANCELLED, DEADLINE, OK, Ticket
from kvstore.testing.memory import SimMemory

WORD_BYTES = 64
OPEN_FOR_EVER = (1 << 63) - 1  # INV-209: the largest signed value

#: These verdicts come while pieces may still be in flight and publish failure at once (INV-205).
EARLY_STATUSES = (CANCELLED, DEADLINE)


@dataclass(slots=True)
class _Record:
    """What the words know about one open or published ticket."""

    word: int
    generation: int
    remaining: int
    status: int | None = None
    failure: int = OK
    is_released: bool = False


@final
class SimGateWords:
    """Implements `GateWords`; generations only grow, each ticket is published once (INV-203, 204).

    ``publish_count`` of a word's generation beyond one would be a bug: `publish` answers False.
    """

    def __init__(self, words: int = 4096) -> None:
        self._memory = SimMemory(words * WORD_BYTES, alignment=WORD_BYTES)
        self._flags = self._memory.array.view(np.int64)[:: WORD_BYTES // 8]
        self._generations = [0] * words
        self._free: deque[int] = deque(range(words))
        self._records: dict[int, _Record] = {}
        self._by_ticket: dict[tuple[int, int], int] = {}
        self._slot_next = 0
        self._waiters: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        self.tickets_taken = 0
        self.tickets_good = 0
        self.tickets_failed = 0
        self.is_open_for_ever = False

    @property
    def address(self) -> int:
        """Address of the first word, for device registration."""
        return self._memory.address

    @property
    def length(self) -> int:
        """Bytes from ``address`` on."""
        return self._memory.length

    @property
    def open_count(self) -> int:
        """Tickets taken and not published (INV-811)."""
        return self.tickets_taken - self.tickets_good - self.tickets_failed

    def take(self, transfer_count: int) -> Ticket | None:
        """Return a ticket published by ``transfer_count`` verdicts; None without a free word."""
        if not self._free or self.is_open_for_ever:
            return None
        word = self._free.popleft()
        self._generations[word] += 1
        generation, slot = self._generations[word], self._slot_next
        self._slot_next += 1
        self._records[slot] = _Record(word, generation, transfer_count)
        self._by_ticket[word, generation] = slot
        self.tickets_taken += 1
        return Ticket(self, word, generation, slot)

    def ticket_status(self, ticket: Ticket) -> int | None:
        """Return the status kept on the ticket's record (INV-207)."""
        record = self._records.get(ticket.slot)
        return None if record is None else record.status

    def publish(self, ticket: Ticket, status: int) -> bool:
        """Publish once; False if it was published before."""
        return self._publish(ticket.slot, status)

    def transfer_done(self, word: int, generation: int, status: int) -> None:
        """Count one verdict of the ticket's batch; the last one, or an early one, publishes."""
        slot = self._by_ticket.get((word, generation))
        if slot is None:
            return
        record = self._records[slot]
        if record.status is not None:
            return
        record.remaining -= 1
        if status != OK and record.failure == OK:
            record.failure = status
        if record.remaining <= 0 or status in EARLY_STATUSES:
            self._publish(slot, record.failure)

    def _publish(self, slot: int, status: int) -> bool:
        record = self._records.get(slot)
        if record is None or record.status is not None:
            return False
        status = record.failure or status  # the first failure stays, whoever publishes (INV-207)
        record.status = status  # before the flag (INV-206)
        self.tickets_good += status == OK
        self.tickets_failed += status != OK
        word = record.word
        assert self._flags[word] < record.generation, "INV-208: a word only grows"
        if not self.is_open_for_ever:
            self._flags[word] = record.generation
            self._free.append(word)  # only after the publication (INV-210)
        self._by_ticket.pop((word, record.generation), None)
        if record.is_released:
            del self._records[slot]
        self._wake(word)
        return True

    def release(self, ticket: Ticket) -> None:
        """Give up the status record of a published ticket."""
        record = self._records.get(ticket.slot)
        if record is None:
            return
        if record.status is None:
            record.is_released = True
        else:
            del self._records[ticket.slot]

    def word_address(self, word: int) -> int:
        """Return the host address of a flag word."""
        return self._memory.address + word * WORD_BYTES

    def passed(self, ticket: Ticket) -> bool:
        """Return whether a device that waits for this ticket may go on."""
        return self.is_passed(ticket.word, ticket.generation)

    @property
    def counts(self) -> dict[str, int]:
        """Tickets ``taken``, ``good``, ``failed`` and ``open``: taken is the sum (INV-811)."""
        return {
            "taken": self.tickets_taken,
            "good": self.tickets_good,
            "failed": self.tickets_failed,
            "open": self.open_count,
        }

    def close(self) -> None:
        """Publish what is open as failed; a second call does nothing."""
        self.publish_all(CANCELLED)

    def is_passed(self, word: int, generation: int) -> bool:
        """Return whether a stream that waits for ``word >= generation`` would go on (INV-209)."""
        return bool(self._flags[word] >= generation)

    def on_passed(self, word: int, generation: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the word reaches ``generation``; no polling (INV-214)."""
        self._waiters.setdefault(word, []).append((generation, callback))
        self._wake(word)

    def _wake(self, word: int) -> None:
        waiters = self._waiters.pop(word, [])
        ready = [entry for entry in waiters if self.is_passed(word, entry[0])]
        rest = [entry for entry in waiters if not self.is_passed(word, entry[0])]
        if rest:
            self._waiters[word] = rest
        for _, callback in ready:
            callback()

    def publish_all(self, status: int) -> int:
        """Publish every open ticket as failed and leave all words open for ever (INV-222)."""
        count = 0
        for slot, record in list(self._records.items()):
            if record.status is None:
                count += self._publish(slot, status)
        self.is_open_for_ever = True
        self._flags[:] = OPEN_FOR_EVER
        for word in list(self._waiters):
            self._wake(word)
        return count
