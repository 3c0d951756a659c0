"""Native helpers: the arena, the completion queue, the gate words and the checksum.

Everything here is a thin, checked wrapper over C. C handles never leave the package: other
modules pass these objects on, and `_uring` takes the handle out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, final

import anyio.to_thread
import numpy as np
import numpy.typing as npt

from kvstore._uring._ffi import ffi, lib
from kvstore._uring.base import CompletionCallback, CompletionFlag, Ticket
from kvstore.config import GIB, MIB, check_int
from kvstore.errors import CapacityError, LogicError

logger = logging.getLogger(__name__)

#: Records handled in one turn of the loop (INV-129); the rest waits for the next turn.
REAP_RECORDS_MAX = 256
#: Mirrors ``kvs_record``; a test compares size and offsets.
RECORD_DTYPE = np.dtype(
    [("token", "<u8"), ("value", "<u8"), ("status", "<i4"), ("flags", "<u4")], align=True
)
HUGE_PAGE_BYTES = 2 * MIB
END = int(CompletionFlag.END)
#: Tokens from here on belong to `CompletionQueue.bulk` ranges.
BULK_TOKENS = 1 << 62
#: Called on the loop with all records of one wake-up, valid during the call, and with whether each
#: of them is a good end.
BulkHandler = Callable[[npt.NDArray[np.void], bool], Any]


def xxh3_64(buffer: Any) -> int:
    """Return the xxh3-64 of a contiguous buffer, computed in C without the GIL.

    Cost: tens of GiB/s; still too long for the loop above some hundred KiB.
    """
    view = ffi.from_buffer(buffer)
    return int(lib.kvs_xxh3_64(view, len(view)))


def now_ns() -> int:
    """Return CLOCK_MONOTONIC, the clock of every engine."""
    return int(lib.kvs_now_ns())


@final
class CompletionQueue:
    """The `Completions` of a real loop: a native queue, one eventfd, one reader callback.

    One per event loop and store. Native threads post to it at any time; a record is never lost.
    ``handle`` is what C code posts to; a native poster that outlives a call takes a reference.
    """

    __slots__ = (
        "__weakref__",
        "_batch",
        "_bulk",
        "_callbacks",
        "_handle",
        "_loop",
        "_next_bulk",
        "_next_token",
        "_records",
        "_view",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, *, capacity: int = 1024) -> None:
        handle = lib.kvs_cq_new(capacity)
        if handle == ffi.NULL:
            raise OSError(ffi.errno, f"completion queue: {os.strerror(ffi.errno)}")
        self._handle = handle
        self._loop = loop
        self._callbacks: dict[int, CompletionCallback] = {}
        self._next_token = 1
        self._bulk: dict[int, tuple[int, BulkHandler]] = {}
        self._next_bulk = BULK_TOKENS
        self._records = np.zeros(REAP_RECORDS_MAX, RECORD_DTYPE)
        self._view = ffi.from_buffer("kvs_record[]", self._records, require_writable=True)
        self._batch = ffi.new("kvs_batch *")
        loop.add_reader(lib.kvs_cq_fd(handle), self._on_readable)

    @property
    def handle(self) -> Any:
        """The C queue. Raises: LogicError: closed."""
        if self._handle is None:
            raise LogicError("the completion queue is closed")
        return self._handle

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop whose turns call the callbacks."""
        return self._loop

    @property
    def pending(self) -> int:
        """How many tokens have not ended."""
        return len(self._callbacks)

    @property
    def wakeups(self) -> int:
        """How often a native thread woke the loop."""
        return 0 if self._handle is None else int(lib.kvs_cq_wakeups(self._handle))

    def token(self, callback: CompletionCallback) -> int:
        """Return a fresh token whose completion calls ``callback(status, flags, value)``."""
        token = self._next_token
        self._next_token += 1
        self._callbacks[token] = callback
        return token

    def discard(self, token: int) -> None:
        """Forget a token; a late completion for it is ignored."""
        self._callbacks.pop(token, None)

    def bulk(self, count: int, handler: BulkHandler) -> int:
        """Reserve ``count`` consecutive tokens and return the first; END does not end them.

        Shapes: ``handler(records, all_good)`` gets (n,) of `RECORD_DTYPE`, all records of the range
        in one wake-up, valid during the call; ``all_good``: each is verdict and end, with status
        OK (it may be False when others of the wake-up are not). For callers that keep many
        transfers open and answer them in batches; a callback per record costs more than the
        transfer at 16 KiB.
        """
        check_int("count", count, 1)
        first = self._next_bulk
        self._next_bulk += count
        self._bulk[first] = (count, handler)
        return first

    def discard_bulk(self, first: int) -> None:
        """Forget a range; late completions for it are ignored."""
        self._bulk.pop(first, None)

    def close(self) -> None:
        """Stop watching the descriptor; pending records are dropped. Safe on a closed loop.

        Native memory lives until the last poster has let go of it.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return
        lib.kvs_cq_close(handle)
        self._callbacks.clear()
        self._bulk.clear()
        if self._loop.is_closed():
            lib.kvs_cq_release(handle)
            return
        self._loop.remove_reader(lib.kvs_cq_fd(handle))
        if self._loop.is_running():
            # uvloop takes the descriptor out one turn later; closing it now would break the turn
            self._loop.call_soon(lib.kvs_cq_release, handle)
        else:
            lib.kvs_cq_release(handle)

    def _on_readable(self) -> None:
        """Copy a bounded batch out first, act on it afterwards."""
        if self._handle is None:
            return
        count = lib.kvs_cq_reap(self._handle, self._view, REAP_RECORDS_MAX, self._batch)
        records = self._records[:count]
        if self._bulk:
            records = self._handle_bulk(records)
        callbacks = self._callbacks
        for token, value, status, flags in records.tolist():
            callback = callbacks.pop(token, None) if flags & END else callbacks.get(token)
            if callback is None:
                continue
            try:
                callback(status, flags, value)
            except Exception as error:  # noqa: BLE001 - one bad callback must not lose the others
                self._loop.call_exception_handler(
                    {"message": "a completion callback failed", "exception": error}
                )

    def _handle_bulk(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Hand each range its records and return those that have a callback of their own."""
        least, greatest = self._batch.least_token, self._batch.greatest_token
        if greatest < BULK_TOKENS:  # an empty batch too
            return records
        all_good = bool(self._batch.all_good)
        for first, (count, handler) in self._bulk.items():
            if first <= least and greatest < first + count:  # the usual case, without arrays
                self._call_bulk(handler, records, all_good=all_good)
                return records[:0]
        tokens = records["token"]
        for first, (count, handler) in list(self._bulk.items()):
            mine = (tokens >= first) & (tokens < first + count)
            if mine.any():
                self._call_bulk(handler, records[mine], all_good=all_good)
        return records[tokens < BULK_TOKENS]

    def _call_bulk(
        self, handler: BulkHandler, records: npt.NDArray[np.void], *, all_good: bool
    ) -> None:
        try:
            handler(records, all_good)
        except Exception as error:  # noqa: BLE001 - one bad handler must not lose the others
            self._loop.call_exception_handler(
                {"message": "a completion handler failed", "exception": error}
            )


class OldestTicket(NamedTuple):
    """The oldest unpublished ticket, for the watchdog (INV-223)."""

    word: int
    generation: int
    age_ns: int


@final
class GateRing:
    """The `GateWords` in native memory: words on cache lines of their own, tickets, statuses.

    ``address`` and ``length`` are what a device registers to wait on the words (INV-208).
    Publication happens in C, by the reactor or by `publish`, exactly once per ticket (INV-204).
    """

    __slots__ = ("__weakref__", "_counts", "_handle", "_status", "_ticket", "words")

    def __init__(self, words: int = 4096) -> None:
        check_int("words", words, 1, 1 << 20)
        handle = lib.kvs_gates_new(words)
        if handle == ffi.NULL:
            raise CapacityError(f"no memory for {words} gate words")
        self._handle = handle
        self._ticket = ffi.new("kvs_ticket *")
        self._status = ffi.new("int32_t *")
        self._counts = ffi.new("kvs_gate_counts *")
        self.words = words

    @property
    def handle(self) -> Any:
        """The C ring of words. Raises: LogicError: closed."""
        if self._handle is None:
            raise LogicError("the gate words are closed")
        return self._handle

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called."""
        return self._handle is not None

    @property
    def address(self) -> int:
        """Address of the first word; 4 KiB aligned."""
        return int(lib.kvs_gates_address(self.handle))

    @property
    def length(self) -> int:
        """Bytes of the words, a multiple of 4 KiB."""
        return int(lib.kvs_gates_length(self.handle))

    def take(self, transfer_count: int) -> Ticket | None:
        """Return a ticket over ``transfer_count`` transfers, or None when exhausted (INV-211)."""
        check_int("transfer_count", transfer_count, 1, (1 << 31) - 1)
        if lib.kvs_gate_take(self.handle, transfer_count, lib.kvs_now_ns(), self._ticket) != 0:
            return None
        taken = self._ticket
        return Ticket(self, int(taken.word), int(taken.generation), int(taken.slot))

    def ticket_status(self, ticket: Ticket) -> int | None:
        """Return the status, None while unpublished. Raises: LogicError: it was released."""
        state = lib.kvs_gate_status(self.handle, ticket.slot, ticket.generation, self._status)
        if state < 0:
            raise LogicError("the ticket was released", word=ticket.word)
        return int(self._status[0]) if state else None

    def publish(self, ticket: Ticket, status: int) -> bool:
        """Publish once; False if it was published before (INV-204, INV-215)."""
        return bool(lib.kvs_gate_publish(self.handle, ticket.word, ticket.generation, status))

    def release(self, ticket: Ticket) -> None:
        """Give up the status record. Raises: LogicError: unpublished, or released before."""
        if lib.kvs_gate_release(self.handle, ticket.slot, ticket.generation) != 0:
            raise LogicError("the ticket is open or was released", word=ticket.word)

    def publish_all(self, status: int) -> int:
        """Publish every open ticket as failed and return how many there were (INV-222)."""
        assert status != 0
        return int(lib.kvs_gates_publish_all(self.handle, status))

    def word_address(self, word: int) -> int:
        """Return the host address of a flag word (64-byte aligned)."""
        assert 0 <= word < self.words
        return self.address + 64 * word

    def passed(self, ticket: Ticket) -> bool:
        """Return whether a device that waits for this ticket may go on (INV-209)."""
        return bool(lib.kvs_gate_passed(self.handle, ticket.word, ticket.generation))

    def oldest_open(self) -> OldestTicket | None:
        """Return the oldest unpublished ticket; costs O(words), for the watchdog only."""
        taken_ns = ffi.new("uint64_t *")
        if not lib.kvs_gates_oldest(self.handle, self._ticket, taken_ns):
            return None
        age_ns = int(lib.kvs_now_ns() - taken_ns[0])
        return OldestTicket(int(self._ticket.word), int(self._ticket.generation), age_ns)

    @property
    def counts(self) -> dict[str, int]:
        """Tickets ``taken``, ``good``, ``failed`` and ``open``: taken is the sum (INV-811)."""
        lib.kvs_gates_count(self.handle, self._counts)
        return {
            name: int(getattr(self._counts, name)) for name in ("taken", "good", "failed", "open")
        }

    def close(self) -> None:
        """Publish what is open as failed, then give the words up; a second call does nothing.

        The memory lives until the last engine that publishes here has ended.
        """
        if self._handle is None:
            return
        self.publish_all(-125)  # ECANCELED
        handle, self._handle = self._handle, None
        lib.kvs_gates_release(handle)

    def leak(self) -> None:
        """Publish what is open as failed and keep the words: a stream may still read them."""
        if self._handle is not None:
            self.publish_all(-125)
            self._handle = None
            logger.error("leaking the gate words: device work never came to its end")


@final
class Arena:
    """Anonymous memory for I/O: 2 MiB aligned, huge pages if given, out of forks (INV-138).

    Ownership: the mapping lives until `close` *and* until the last numpy view of it is gone, so
    a forgotten view can never point at unmapped memory. Transfers and devices hold addresses, not
    views: the owner drains them first. `leak` gives the memory up on purpose (INV-139).
    """

    __slots__ = (
        "__weakref__",
        "_finalizer",
        "_huge_pages",
        "_root",
        "address",
        "length",
        "slab_bytes",
    )

    def __init__(
        self, length_bytes: int, *, slab_bytes: int = GIB, numa_node: int | None = None
    ) -> None:
        check_int("length_bytes", length_bytes, 1)
        check_int("slab_bytes", slab_bytes, 4096, GIB)
        if slab_bytes % 4096:
            raise CapacityError(f"slab_bytes: must be a multiple of 4096, got {slab_bytes}")
        length = -(-length_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        out = ffi.new("uint64_t *")
        result = lib.kvs_arena_map(length, -1 if numa_node is None else numa_node, out)
        if result < 0:
            raise CapacityError(f"cannot map {length} bytes: {os.strerror(-result)}", errno=-result)
        self.address = int(out[0])
        self.length = length
        self.slab_bytes = slab_bytes
        self._huge_pages: bool | None = None
        memory = ffi.buffer(ffi.cast("uint8_t *", self.address), length)
        self._root: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)
        # every slice of a numpy array keeps its root alive, so the finalizer runs after the last
        self._finalizer = weakref.finalize(self._root, lib.kvs_arena_unmap, self.address, length)
        self._finalizer.atexit = False  # the process gives it back; threads may still use it

    def slabs(self) -> list[tuple[int, int]]:
        """Return (address, length) of each part to register with ring and device."""
        return [
            (self.address + start, min(self.slab_bytes, self.length - start))
            for start in range(0, self.length, self.slab_bytes)
        ]

    def view(self, offset: int = 0, length: int | None = None) -> npt.NDArray[np.uint8]:
        """Return a writable (length,) uint8 view. Raises: LogicError: closed or out of range."""
        if self._root is None:
            raise LogicError("the arena is closed")
        end = self.length if length is None else offset + length
        if not 0 <= offset <= end <= self.length:
            raise LogicError(f"view {offset}..{end} is outside an arena of {self.length} bytes")
        return self._root[offset:end]

    def prefault(self, *, threads: int | None = None) -> None:
        """Fault every page in with native threads; blocks the caller without the GIL."""
        count = min(64, threads if threads is not None else os.cpu_count() or 1)
        if self._root is None:
            raise LogicError("the arena is closed")
        result = lib.kvs_arena_prefault(self.address, self.length, max(1, count))
        if result < 0:
            raise CapacityError(
                f"cannot fault {self.length} bytes in: {os.strerror(-result)}", errno=-result
            )

    async def prefault_off_loop(self, *, threads: int | None = None) -> None:
        """Fault every page in without blocking the loop (INV-906).

        Cancellation: waits for the native threads, which cannot be recalled.
        """
        run: Callable[[], None] = lambda: self.prefault(threads=threads)  # noqa: E731
        await anyio.to_thread.run_sync(run, abandon_on_cancel=False)

    @property
    def huge_pages(self) -> bool:
        """Whether most of the faulted memory is on huge pages; asked once, after `prefault`."""
        if self._huge_pages is None:
            self._huge_pages = 2 * _huge_bytes(self.address, self.length) >= self.length
        return self._huge_pages

    @property
    def is_open(self) -> bool:
        """Whether `close` or `leak` has not been called."""
        return self._root is not None

    def close(self) -> None:
        """Give the memory back as soon as no view is left; a second call does nothing."""
        self._root = None

    def leak(self) -> None:
        """Keep the mapping for ever: the kernel may still write to it (INV-139)."""
        if self._finalizer.alive:
            self._finalizer.detach()
            logger.error("leaking %d bytes of I/O memory: transfers never came back", self.length)
        self._root = None


def _huge_bytes(address: int, length: int) -> int:
    """Sum AnonHugePages over the mappings inside a range; 0 where the kernel does not say."""
    total, inside = 0, False
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start < address + length and end > address
        elif inside and head == "AnonHugePages:":
            total += int(line.split()[1]) * 1024
    return total
