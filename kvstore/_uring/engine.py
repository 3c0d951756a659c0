"""What the native engines share: records in, batches across, snapshots out.

`NativeEngine` is the thin, checked wrapper over ``engine.c``. The engines of `ring`, `threads`
and `serial` differ in one thing, who executes pieces; order, verification, gates and bookkeeping
are the same C code (`docs/io-path.md`). Nothing here polls, and nothing blocks the loop.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import resource
import threading
import warnings
from dataclasses import dataclass
from typing import Any, final

import anyio
import anyio.to_thread

from kvstore._uring._ffi import ffi, lib
from kvstore._uring.base import SUBMISSION_DTYPE, Completions, Opcode, Submissions
from kvstore._uring.native import CompletionQueue, GateRing
from kvstore._uring.scheduler import POLICIES, READ_LINGER_NS, class_stats
from kvstore.config import MIB, IoClass, IoConfig
from kvstore.errors import (
    BusyError,
    ConfigError,
    EngineError,
    KVStoreError,
    LogicError,
    StoreClosed,
)
from kvstore.stats import ClassStats, EngineStats

logger = logging.getLogger(__name__)

#: Checksums up to this many bytes are computed by the reactor between two rounds, larger ones by
#: the helper thread, so that no completion waits longer than about 20 us for another one's sum.
INLINE_CHECKSUM_BYTES = 256 << 10
#: Kernel workers for buffered pieces of a ring (INV-130).
KERNEL_WORKERS = 8
RING_ENTRIES_MAX = 16_384
UNBOUNDED = 1 << 62
#: A generation that grows in every forked child: an engine of the parent must not be used there.
_fork_count = [0]
os.register_at_fork(after_in_child=lambda: _fork_count.__setitem__(0, _fork_count[0] + 1))

FAULT_ACTIONS = {
    "errno": lib.KVS_FAULT_ERRNO,
    "short": lib.KVS_FAULT_SHORT,
    "zero": lib.KVS_FAULT_ZERO,
    "delay": lib.KVS_FAULT_DELAY,
    "hold": lib.KVS_FAULT_HOLD,
    "flip": lib.KVS_FAULT_FLIP,
    "torn": lib.KVS_FAULT_TORN,
    "sectors": lib.KVS_FAULT_SECTORS,
    "lost": lib.KVS_FAULT_LOST,
    "misdirected": lib.KVS_FAULT_MISDIRECT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """One rule of the fault shim: which pieces, and what happens to them. None selects all.

    ``argument``: errno for ``errno``, bytes for ``short`` and ``torn``, nanoseconds for ``delay``,
    the bit number for ``flip``, a mask of 4 KiB sectors that arrive for ``sectors`` (bit i % 32),
    the distance in bytes for ``misdirected``. ``torn``, ``sectors`` and ``lost`` apply to writes;
    they, ``flip`` and ``misdirected`` report success. The first ``skip`` matches go through, then
    ``count`` are affected (None: all). ``offset`` is a half-open range of the file that a piece
    overlaps.
    """

    action: str
    argument: int = 0
    io_class: IoClass | None = None
    opcode: Opcode | None = None
    skip: int = 0
    count: int | None = 1
    file_id: int | None = None
    offset: tuple[int, int] | None = None
    direct: bool | None = None


@final
class InjectedFault:
    """A rule in force; `release` ends it, lets go of what it holds and counts."""

    __slots__ = ("_engine", "_number")

    def __init__(self, engine: NativeEngine, number: int) -> None:
        self._engine = engine
        self._number = number

    def release(self) -> int:
        """End the rule and return how many pieces it affected."""
        return int(lib.kvs_engine_release(self._engine.handle, self._number))


class NativeEngine:
    """Implements `Engine` over ``engine.c``. Subclasses name the executor.

    Threads, rings and descriptors exist from construction on (INV-126). The creator closes it
    with `aclose` on a loop, or with `close` without one.
    """

    name = ""
    _kind: int = lib.KVS_KIND_WORKERS

    def __init__(
        self,
        config: IoConfig | None = None,
        *,
        gate: GateRing | None = None,
        policy: str = "kvstore",
        threads: int = 0,
        fallback_reason: str = "",
        without: int = 0,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"policy: must be one of {', '.join(POLICIES)}", field="policy")
        self.config = config or IoConfig()
        self.policy = policy
        self.fallback_reason = fallback_reason
        self.leaked = False
        self._warnings: list[str] = []
        self._fork_count = _fork_count[0]
        self._threads = threads
        self._last_stats: EngineStats | None = None
        self._is_closing = False
        self._closed: asyncio.Event | None = None
        self._join_lock = threading.Lock()
        self._is_joined: bool | None = None
        self._record = self._native_config(without)
        code = ffi.new("int *")
        handle = lib.kvs_engine_new(self._record, ffi.NULL if gate is None else gate.handle, code)
        if handle == ffi.NULL:
            raise self._start_error(-code[0])
        self._handle: Any = handle
        self._gate = gate

    def _native_config(self, without: int) -> Any:
        config, record = self.config, ffi.new("kvs_engine_config *")
        sched = record.sched
        bounded = self.policy == "kvstore"
        sched.total_bytes = config.inflight_bytes if bounded else UNBOUNDED
        sched.required_bytes = config.required_inflight_bytes if bounded else UNBOUNDED
        sched.background_bytes = config.background_inflight_bytes if bounded else UNBOUNDED
        sched.background_bytes_max = config.background_bytes_max
        sched.required_age_ns = round(config.required_age * 1e9)
        sched.background_age_ns = round(config.background_age * 1e9)
        sched.read_linger_ns = READ_LINGER_NS
        sched.read_piece_bytes = config.read_piece_bytes
        # upstream and the baseline write in pieces as large as their reads
        sched.write_piece_bytes = config.write_piece_bytes if bounded else 4 * MIB
        sched.background_turn = config.background_turn if self.policy != "upstream" else 2
        sched.policy = POLICIES[self.policy]
        is_ring = self._kind == lib.KVS_KIND_RING
        depth = min(config.ring_entries, RING_ENTRIES_MAX) if is_ring else max(1, self._threads)
        sched.depth = depth
        record.deadline_ns = round(config.deadline * 1e9)
        record.inline_bytes = INLINE_CHECKSUM_BYTES
        record.kind = self._kind
        record.threads = self._threads
        record.ring_entries = depth
        record.kernel_rings = config.kernel_rings if is_ring else 0
        record.iowq_workers = KERNEL_WORKERS
        record.without = without
        return record

    def _start_error(self, code: int) -> KVStoreError:
        return EngineError(f"{self.name} engine: cannot start: {os.strerror(code)}", errno=code)

    @property
    def gate(self) -> GateRing | None:
        """The gate words the reactor publishes; stores that share the engine share them."""
        return self._gate

    # -- the handle, and who may use it -------------------------------------------------------

    @property
    def handle(self) -> Any:
        """The C engine. Raises: StoreClosed: closed; LogicError: in a forked child."""
        if self._fork_count != _fork_count[0]:
            raise LogicError(
                "this disk engine was made before fork() and its threads stayed in the parent: "
                "open a store in the child, or start children with spawn or forkserver"
            )
        if self._handle is None:
            raise StoreClosed(f"the {self.name} engine is closed")
        return self._handle

    def __del__(self) -> None:
        """Warn about an engine nobody closed; its threads stay (no `__del__` changes anything)."""
        if getattr(self, "_handle", None) is not None and self._fork_count == _fork_count[0]:
            text = f"unclosed {self.name} engine"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    # -- files and memory ---------------------------------------------------------------------

    def register_file(self, direct_fd: int, buffered_fd: int) -> int:
        """Take a file into the engine and return its id; -1 for a mode that does not exist.

        Ownership: borrows both descriptors until `unregister_file`.
        """
        result = int(lib.kvs_engine_register_file(self.handle, direct_fd, buffered_fd))
        if result < 0:
            raise EngineError(f"cannot register a file: {os.strerror(-result)}", errno=-result)
        return result

    def unregister_file(self, file_id: int) -> None:
        """Forget a drained file. Raises: BusyError: pieces of it are in flight (INV-121)."""
        if self._handle is None and self._fork_count == _fork_count[0]:
            return  # a closed engine has let go of everything
        result = lib.kvs_engine_unregister_file(self.handle, file_id)
        if result == -errno.EBUSY:
            raise BusyError(f"file {file_id} has transfers in flight", file_id=file_id)
        if result < 0:
            raise LogicError(f"file {file_id} is not registered", file_id=file_id)

    def is_direct(self, file_id: int) -> bool:
        """Return whether direct I/O is in force for a file (INV-130)."""
        transfers, direct = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        if lib.kvs_engine_file(self.handle, file_id, transfers, direct) < 0:
            raise LogicError(f"file {file_id} is not registered", file_id=file_id)
        return bool(direct[0])

    def register_memory(self, address: int, length: int) -> bool:
        """Register an arena slab for fixed-buffer I/O; False if the system refuses (INV-138).

        Blocks for the time it takes to pin the pages, without the GIL: call it off the loop for
        large memory. Not needed for correctness; I/O on other memory is slower.
        """
        result = int(lib.kvs_engine_register_memory(self.handle, address, length))
        if result == 0:
            return True
        reason = os.strerror(-result)
        if result == -errno.ENOMEM:
            reason = _memlock_reason(length)
        self._warn(f"unregistered buffers: {reason}")
        return False

    def unregister_memory(self, address: int) -> None:
        """Forget a slab; no transfer may use it."""
        if self._handle is None and self._fork_count == _fork_count[0]:
            return
        lib.kvs_engine_unregister_memory(self.handle, address)

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)
            logger.warning("%s engine: %s", self.name, text)

    # -- transfers ------------------------------------------------------------------------------

    def submit(self, queue: Completions, submissions: Submissions) -> None:
        """Hand over a batch with one native call; fills in ``handle``. Never blocks.

        Shapes: ``submissions`` is (count,) of `SUBMISSION_DTYPE`, contiguous. Ownership: copies
        the records, borrows the memory behind ``address`` until the END completion of each.
        Raises: StoreClosed: the engine is stopping; EngineError: a record is malformed. Nothing
        was taken then.
        """
        assert isinstance(queue, CompletionQueue), "native engines report to native queues"
        assert submissions.dtype == SUBMISSION_DTYPE, "records must be SUBMISSION_DTYPE"
        records = ffi.from_buffer("kvs_submission[]", submissions, require_writable=True)
        result = lib.kvs_engine_submit(self.handle, queue.handle, records, len(submissions))
        if result == 0:
            return
        if result == -errno.ESHUTDOWN:
            raise StoreClosed(f"the {self.name} engine is stopping")
        raise EngineError(f"submission refused: {os.strerror(-result)}", errno=-result)

    def promote(self, handle: int) -> bool:
        """Raise a background transfer to required (INV-108); False if nothing changed (INV-110)."""
        return bool(lib.kvs_engine_promote(self.handle, handle))

    def cancel(self, handle: int) -> bool:
        """Withdraw queued pieces; the transfer ends as cancelled (INV-118). False: already over."""
        return bool(lib.kvs_engine_cancel(self.handle, handle))

    def extend_deadline(self, handle: int, deadline_ns: int) -> bool:
        """Move a deadline to a later time (INV-336); False: it is not later, or already over."""
        return bool(lib.kvs_engine_extend(self.handle, handle, deadline_ns))

    def background_room_bytes(self) -> int:
        """Return how many background bytes may still be issued under the cap (INV-111)."""
        return int(lib.kvs_engine_background_room(self.handle))

    def inject(self, rule: FaultRule) -> InjectedFault:
        """Put a rule of the fault shim into force. For tests and drills."""
        record = ffi.new("kvs_fault *")
        record.action = FAULT_ACTIONS[rule.action]
        record.argument = rule.argument
        record.class_mask = 0 if rule.io_class is None else 1 << rule.io_class
        record.opcode_mask = 0 if rule.opcode is None else 1 << rule.opcode
        record.direct_mask = 0 if rule.direct is None else 1 << rule.direct
        record.skip = rule.skip
        record.count = (1 << 64) - 1 if rule.count is None else rule.count
        record.file_id = -1 if rule.file_id is None else rule.file_id
        record.offset_low, record.offset_high = rule.offset or (0, (1 << 64) - 1)
        number = lib.kvs_engine_inject(self.handle, record)
        if number < 0:
            raise LogicError("too many fault rules are in force")
        return InjectedFault(self, number)

    # -- the end ----------------------------------------------------------------------------------

    async def drain(self, file_id: int, timeout: float) -> bool:
        """Wait until no transfer of this file is open (INV-121); False on timeout.

        Cancellation: stops the waiting only.
        """
        queue = CompletionQueue(asyncio.get_running_loop(), capacity=4)
        done: asyncio.Future[None] = queue.loop.create_future()
        token = queue.token(lambda *_: None if done.done() else done.set_result(None))
        try:
            if lib.kvs_engine_drain(self.handle, file_id, queue.handle, token) != 0:
                raise EngineError("no memory to wait for a file", errno=errno.ENOMEM)
            with anyio.move_on_after(timeout) as scope:
                await done
            return not scope.cancelled_caught
        finally:
            queue.close()

    async def aclose(self) -> None:
        """Stop: cancel queued pieces, wait for those in flight, publish open tickets, join.

        A second call does nothing. If pieces do not come back within ``drain_timeout``, the engine
        and its threads are left alive, ``leaked`` is set, and the memory of its transfers must
        never be reused (INV-139). Cancellation: shielded; a second cancel of the task makes the
        rest synchronous, with the same bound.
        """
        if self._handle is None:
            return
        if self._closed is not None:  # somebody is at it
            await self._closed.wait()
            return
        self._closed = asyncio.Event()
        self._stop()
        try:
            with anyio.CancelScope(shield=True):
                await self.drain(-1, self.config.drain_timeout)
                # nothing is in flight now: joining takes the time to end the threads
                await anyio.to_thread.run_sync(functools.partial(self._join, 0.0))
            self._finish()
        except BaseException:
            self.close()
            raise
        finally:
            self._closed.set()

    def _stop(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            lib.kvs_engine_stop(self.handle)

    def close(self, timeout: float | None = None) -> None:
        """Do what `aclose` does, blocking the caller for at most ``timeout`` without the GIL."""
        if self._handle is None:
            return
        self._stop()
        self._join(self.config.drain_timeout if timeout is None else timeout)
        self._finish()

    def _join(self, timeout: float) -> None:
        """Wait for the last piece and the threads; may run in another thread than the loop's."""
        with self._join_lock:
            if self._is_joined is None:
                result = lib.kvs_engine_join(self._handle, round(timeout * 1e9))
                self._is_joined = bool(result == 0)

    def _finish(self) -> None:
        """Free the engine, on the thread that makes all other calls, so that none can be inside."""
        handle = self._handle
        if handle is None:
            return
        self._last_stats = self._snapshot()
        self._handle = None
        if self._is_joined:
            lib.kvs_engine_free(handle)
            return
        self.leaked = True
        logger.error(
            "%s engine: transfers did not come back within %g s; memory and threads are left "
            "alone on purpose",
            self.name,
            self.config.drain_timeout,
        )

    # -- statistics -------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return a frozen snapshot; after closing, the last one."""
        if self._handle is None and self._last_stats is not None:
            return self._last_stats
        assert self.handle is not None
        return self._snapshot()

    def _snapshot(self) -> EngineStats:
        counts: Any = ffi.new("kvs_engine_counts *")
        lib.kvs_engine_count(self._handle, counts)
        sched, is_ring = self._record.sched, self._kind == lib.KVS_KIND_RING
        tickets = self._gate.counts if self._gate is not None and self._gate.is_open else {}
        return EngineStats(
            engine=self.name,
            fallback_reason=self.fallback_reason,
            warnings=tuple(self._warnings),
            kernel_rings=self._record.kernel_rings,
            ring_flags=_flag_names(counts.setup_flags),
            ring_entries=sched.depth if is_ring else 0,
            threads=counts.threads,
            registered_memory_bytes=counts.registered_bytes,
            registered_buffers=bool(counts.fixed_buffers),
            bounds={
                "total": sched.total_bytes,
                "required": sched.required_bytes,
                "background": sched.background_bytes,
                "background_issued": sched.background_bytes_max,
                "pieces": sched.depth,
                "read_piece": sched.read_piece_bytes,
                "write_piece": sched.write_piece_bytes,
                "background_turn": sched.background_turn,
            },
            direct_files=counts.direct_files,
            buffered_files=counts.buffered_files,
            background_bytes=counts.background_bytes,
            classes=(
                self._class_stats(IoClass.READ),
                self._class_stats(IoClass.REQUIRED),
                self._class_stats(IoClass.BACKGROUND),
            ),
            short_transfers=counts.short_transfers,
            retries=counts.retries,
            direct_fallbacks=counts.direct_fallbacks,
            mismatches=counts.mismatches,
            deadlines=counts.deadlines,
            cancelled=counts.cancelled,
            tickets_taken=tickets.get("taken", 0),
            tickets_good=tickets.get("good", 0),
            tickets_failed=tickets.get("failed", 0),
            wakeups=counts.wakeups,
            submit_calls=counts.submit_calls,
            submit_ns_max=counts.submit_ns_max,
        )

    def _class_stats(self, io_class: IoClass) -> ClassStats:
        counts: Any = ffi.new("kvs_class_counts *")
        wait: Any = ffi.new("kvs_histogram *")
        service: Any = ffi.new("kvs_histogram *")
        errors: Any = ffi.new("uint64_t[]", lib.KVS_ERRORS)
        lib.kvs_engine_class(self._handle, io_class, counts, wait, service, errors)
        return class_stats(
            counts,
            wait,
            service,
            {
                _ERROR_NAMES.get(code, code): count
                for code, count in enumerate(ffi.unpack(errors, lib.KVS_ERRORS))
                if count
            },
        )


#: Error counters that are not an errno carry the negated status of `base`.
_ERROR_NAMES = {
    lib.KVS_ERROR_END_OF_FILE: -lib.KVS_END_OF_FILE,
    lib.KVS_ERROR_MISMATCH: -lib.KVS_MISMATCH,
}
_RING_FLAGS = {
    1 << 3: "CQSIZE",
    1 << 4: "CLAMP",
    1 << 7: "SUBMIT_ALL",
    1 << 8: "COOP_TASKRUN",
    1 << 12: "SINGLE_ISSUER",
    1 << 13: "DEFER_TASKRUN",
}


def _flag_names(flags: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _RING_FLAGS.items() if flags & bit)


def _memlock_reason(length: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    present = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    return (
        f"RLIMIT_MEMLOCK is {present}, {length >> 10} KiB more are needed "
        f"(ulimit -l, or CAP_IPC_LOCK)"
    )
