"""Random requests against a whole store, each served page checked against the reference model.

A request matches, resumes, decodes, suspends, prefetches and closes as a scheduler's would, in an
order that its seed decides. The fake model's kernels run in stream order on the device, as a
step's would; so do the checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, final

import anyio
import numpy as np

from kvstore.config import StoreConfig
from kvstore.errors import (
    BusyError,
    CapacityError,
    DeadlineError,
    LogicError,
    OutOfPages,
    PagesLost,
    TransferError,
)
from kvstore.testing.client import SimClient
from kvstore.testing.store import SimRig, check_balances

#: What a request may meet and survive; anything else is a bug.
EXPECTED = (OutOfPages, PagesLost, DeadlineError, TransferError, CapacityError, BusyError)
STEP_S = 5e-4
SALTS = (b"", b"", b"", b"tenant")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSpec:
    """How a run looks: ``requests`` in all, ``concurrency`` at once, rates from 0 to 1.

    ``gated_rate`` resumes behind the gate, ``fork_rate`` forks a session, ``resize_rate`` and
    ``device_fault_rate`` change a tier's size and let a device call fail once in a while.
    """

    requests: int = 20
    concurrency: int = 6
    documents: int = 3
    document_blocks: int = 6
    tail_tokens: int = 24
    turns: int = 4
    cancel_rate: float = 0.15
    prefetch_rate: float = 0.3
    suspend_rate: float = 0.5
    gated_rate: float = 0.0
    fork_rate: float = 0.1
    resize_rate: float = 0.0
    device_fault_rate: float = 0.0
    again_rate: float = 0.5


@final
class Traffic:
    """One run: call `run` inside an open store. ``seed`` decides everything.

    ``served_pages`` counts pages compared with the model, ``hits`` matched tokens: a sweep that
    compares nothing has tested nothing.
    """

    def __init__(
        self, store: Any, rig: SimRig, config: StoreConfig, spec: TrafficSpec, seed: int
    ) -> None:
        self.store = store
        self.rig = rig
        self.config = config
        self.spec = spec
        self.client = SimClient(store, rig, config)
        self._random = Random(seed)
        self.activity = 0
        self.gated = 0
        self.hits = 0
        self.refused = 0
        self.expected: dict[str, int] = {}
        self._finished: list[tuple[bytes, list[int]]] = []
        block = config.block_tokens
        self._documents = [
            [self._random.randrange(1 << 16) for _ in range(spec.document_blocks * block)]
            for _ in range(spec.documents)
        ]

    @property
    def served_pages(self) -> int:
        """Pages that were compared with the model."""
        return self.client.model.checked_pages

    async def run(self) -> None:
        """Run all requests and the scheduler's steps; raises the first mismatch or bug."""
        limiter = anyio.CapacityLimiter(self.spec.concurrency)
        async with anyio.create_task_group() as group:
            group.start_soon(self._step_for_ever)
            group.start_soon(self._disturb)
            async with anyio.create_task_group() as requests:
                for number in range(self.spec.requests):
                    seed = self._random.getrandbits(63)
                    requests.start_soon(self._limited, limiter, seed, name=f"request {number}")
                    await anyio.sleep(self._random.random() * 2e-3)
            group.cancel_scope.cancel()
        self.client.raise_errors()
        self.check()

    async def _limited(self, limiter: anyio.CapacityLimiter, seed: int) -> None:
        async with limiter:
            await _Request(self, Random(seed)).run()

    async def _step_for_ever(self) -> None:
        """Be the scheduler: one fence a step, and the balances looked at.

        Steps become rarer while no request does anything, so that a hang is found in few of them.
        """
        interval, seen = STEP_S, self.activity
        while True:
            await anyio.sleep(interval)
            interval = STEP_S if seen != self.activity else min(1.0, interval * 1.3)
            seen = self.activity
            self._step()
            self.check()

    def _step(self) -> None:
        try:
            self.client.step()
        except EXPECTED as error:
            self.note(error)

    async def _disturb(self) -> None:
        """Change sizes and let device calls fail, as often as the spec says."""
        spec, random = self.spec, self._random
        if not spec.resize_rate and not spec.device_fault_rate:
            return
        while True:
            await anyio.sleep(random.random() * 2e-2)
            if random.random() < spec.device_fault_rate:
                call = random.choice(["copy_pages", "wait_event", "notify_event", "wait_ticket"])
                self.rig.device.inject(call, 1, nth=random.randrange(1, 4))
            if random.random() < spec.resize_rate:
                await self._resize(random)

    async def _resize(self, random: Random) -> None:
        config = self.config
        sizes = {}
        if config.host is not None:
            sizes["host"] = config.host.host_cache_size
        if config.disk is not None:
            sizes["disk"] = config.disk.disk_cache_size
        level = random.choice(list(sizes))
        size = int(sizes[level] * random.choice([0.5, 0.75, 1.0, 1.5]))
        try:
            with anyio.move_on_after(1.0):
                await self.store.resize(level, size)
        except (*EXPECTED, ValueError) as error:
            self.note(error)
        except LogicError as error:
            if "is being resized already" not in str(error):  # the last one may still run
                raise
            self.note(error)

    def check(self) -> None:
        """Check what must hold between any two turns of the loop."""
        check_balances(self.store.stats())
        tables = getattr(self.store, "tables", None)
        if tables is not None:
            from kvstore.core.invariants import check_state

            check_state(tables)

    def note(self, error: BaseException) -> None:
        """Count an error that a request may meet."""
        name = type(error).__name__
        self.expected[name] = self.expected.get(name, 0) + 1

    def prompt(self, random: Random) -> tuple[bytes, list[int]]:
        """Return a salt and tokens: a finished request again, or a document, with a tail."""
        own = [random.randrange(1 << 16) for _ in range(random.randrange(1, self.spec.tail_tokens))]
        longest = self.client.config.block_tokens * self.spec.document_blocks
        if self._finished and random.random() < self.spec.again_rate:
            salt, tokens = random.choice(self._finished)
            return salt, tokens[: longest + random.randrange(longest)] + own
        document = random.choice(self._documents)
        return random.choice(SALTS), document[: random.randrange(len(document) + 1)] + own

    def finished(self, salt: bytes, tokens: list[int]) -> None:
        """Remember a request that others may repeat, as a next turn of it would."""
        self._finished.append((salt, tokens))


@final
class _Request:
    """One request: a prompt, some turns of decoding, and the ways in which clients misbehave."""

    def __init__(self, traffic: Traffic, random: Random) -> None:
        self.traffic = traffic
        self.random = random
        self.salt, tokens = traffic.prompt(random)
        self.history = traffic.client.model.history(self.salt)
        self.history.extend(tokens)

    async def run(self) -> None:
        """Run to the end, or to an error that a request may meet."""
        traffic, random = self.traffic, self.random
        with anyio.move_on_after(self._patience()):
            async with traffic.store.session(
                np.array(self.history.tokens),
                salt=self.salt,
                priority=random.choice([10, 35, 35, 60]),
            ) as session:
                traffic.hits += session.cached_tokens
                try:
                    await self._turns(session)
                except EXPECTED as error:
                    traffic.note(error)

    def _patience(self) -> float:
        """Return when the client hangs up."""
        spec, random = self.traffic.spec, self.random
        return random.random() * 5e-3 if random.random() < spec.cancel_rate else 600.0

    async def _turns(self, session: Any) -> None:
        spec, random = self.traffic.spec, self.random
        computed = await self.resume(session)
        computed = await self.advance(session, computed, len(self.history.tokens))
        for _ in range(random.randrange(spec.turns)):
            if random.random() < spec.suspend_rate:
                session.suspend(self.traffic.client.stream.record())
                await anyio.sleep(random.random() * 5e-3)
                if random.random() < spec.prefetch_rate:
                    await self._prefetch(session)
                computed = await self.resume(session)
            more = [random.randrange(1 << 16) for _ in range(random.randrange(1, 24))]
            self.history.extend(more)
            computed = await self.advance(session, computed, len(self.history.tokens))
            if random.random() < spec.fork_rate:
                await self._fork_beside(session)
            elif random.random() < spec.fork_rate:
                session.suspend(self.traffic.client.stream.record())  # no holding while waiting
                await self._fork(session)
                computed = await self.resume(session)
        await self.traffic.client.settle()
        self.traffic.finished(self.salt, self.history.tokens.copy())

    async def _fork(self, session: Any) -> None:
        """Let a fork of the session go its own way for a while."""
        twin = _Request.__new__(_Request)
        twin.traffic, twin.random, twin.salt = self.traffic, self.random, self.salt
        twin.history = self.history.copy()
        async with session.fork() as fork:
            twin.history.truncate(fork.history_tokens)
            computed = await twin.resume(fork)
            twin.history.extend([self.random.randrange(1 << 16) for _ in range(10)])
            await twin.advance(fork, computed, len(twin.history.tokens))
            fork.suspend(self.traffic.client.stream.record())

    async def _fork_beside(self, session: Any) -> None:
        """Let a fork run while the session stays active: it may be refused, but never waits."""
        client = self.traffic.client
        history = self.history.copy()
        async with session.fork() as fork:
            history.truncate(fork.history_tokens)
            try:
                valid = await client.resume(fork, history, wait=False)
            except OutOfPages as error:
                self.traffic.note(error)
                return
            history.truncate(valid)
            history.extend([self.random.randrange(1 << 16) for _ in range(10)])
            if not await client.grow(fork, len(history.tokens)):
                return
            client.compute(fork, history, valid)
            fork.commit(np.array(history.tokens[valid:]))
            client.verify(fork, history, len(history.tokens))
            fork.suspend(client.stream.record())

    async def resume(self, session: Any) -> int:
        """Resume and check everything that came back; returns the tokens that are valid."""
        traffic, random = self.traffic, self.random
        traffic.activity += 1
        if random.random() < traffic.spec.gated_rate:
            return await self._resume_gated(session)
        wait = random.random() < 0.9
        deadline = random.choice([None, None, None, 0.5])
        restore = await session.resume(traffic.client.stream, wait=wait, deadline=deadline)
        valid = int(restore.valid_tokens)
        assert 0 <= valid <= len(self.history.tokens)
        traffic.client.verify(session, self.history, valid)
        await traffic.client.settle()
        return valid

    async def _resume_gated(self, session: Any) -> int:
        """Resume behind the gate: the check is enqueued before anything has arrived."""
        client = self.traffic.client
        restore = await session.resume(client.stream, gated=True)
        self.traffic.gated += restore.is_gated
        found: list[BaseException] = []
        client.verify(session, self.history, int(restore.valid_tokens), into=found)
        try:
            await restore.ready()
        except PagesLost as error:
            self.traffic.note(error)
            await client.settle()
            found.clear()  # what was computed from poison is void (INV-221)
        valid = int(restore.valid_tokens)
        client.verify(session, self.history, valid)
        await client.settle()
        if found:
            raise found[0]
        return valid

    async def advance(self, session: Any, computed: int, total: int) -> int:
        """Grow, compute and commit up to ``total`` tokens; waits while the store is full."""
        traffic = self.traffic
        traffic.activity += 1
        for _ in range(20):
            if await traffic.client.grow(session, total):
                break
            traffic.refused += 1
            session.suspend(traffic.client.stream.record())
            await anyio.sleep(self.random.random() * 2e-2)
            computed = await self.resume(session)
        else:
            raise OutOfPages("the request gave up")
        if computed < total:
            traffic.client.compute(session, self.history, computed)
            session.commit(np.array(self.history.tokens[computed:total]))
        await anyio.sleep(self.random.random() * 1e-3)
        traffic.client.verify(session, self.history, total)
        return total

    async def _prefetch(self, session: Any) -> None:
        levels: Sequence[Any] = ["host"] if self.traffic.config.host else []
        for level in levels:
            handle = session.prefetch(level)
            if self.random.random() < 0.3:
                handle.cancel()
            with anyio.move_on_after(self.random.random() * 1e-2):
                await handle
