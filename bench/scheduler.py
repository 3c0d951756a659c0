"""A small continuous-batching scheduler over the public API of the store.

Each request is a coroutine: it waits for admission, opens a session (match and hold), awaits
``resume`` (every reused page is on the device and locked), checks the bytes it was given, and then
joins one scheduler step after the other until its prompt is computed and its output decoded. One
driver coroutine forms the steps: it grows each member with ``try_grow``, suspends the youngest
request when the device is out of pages, closes the step with ``store.step``, writes the bytes of
the new tokens and waits out the cost of the step.

The device is CPU memory: "computing" a token is writing its bytes into the page that the page
table names, with the pattern of the block's key, so that a wrong, stale or torn page is found when
anybody is served from it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from kvstore.errors import OutOfPages
from kvstore.keys import KeyChain, scope_key, token_bytes

from .costs import CostModel
from .pages import PagePattern, tail_key
from .workload import Request, Tokens, Workload

GROUP = "full"
CHECK_BATCH = 8  # pages checked between two chances for the loop
LATE_MAX_S = 0.002  # how far a step may catch up after a late wake-up
STUCK_POLL_S = 0.001
SLEEP_MIN_S = 0.0002


@dataclass(slots=True)
class Outcome:
    """What the requests of one run saw."""

    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    verified_pages: int = 0
    mismatches: int = 0
    preemptions: int = 0
    truncations: int = 0
    refused: int = 0
    steps: int = 0
    restore_wait_s: list[float] = field(default_factory=list)
    first_mismatch: str = ""


class Admission:
    """Hands out device pages by age, so that a large request is not passed for ever.

    A request asks for its prompt and one page more; output that grows beyond that is what
    preemption is for.
    """

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self.free = page_count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def acquire(self, age: int, pages: int) -> None:
        """Wait until ``pages`` are free and nobody older waits.

        Cancellation: leaves the queue, or gives the pages back if they were just granted.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (age, pages, future))
        self._serve()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(pages)
            else:
                self._serve()
            raise

    @property
    def waiting(self) -> int:
        """Return how many requests wait."""
        return sum(not future.done() for _, _, future in self._waiting)

    def release(self, pages: int) -> None:
        """Give pages back and serve those who wait."""
        self.free += pages
        assert self.free <= self.page_count
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            _, pages, future = self._waiting[0]
            if future.done():
                heapq.heappop(self._waiting)
                continue
            if pages > self.free:
                return
            heapq.heappop(self._waiting)
            self.free -= pages
            future.set_result(None)


@dataclass(slots=True, eq=False)
class Flow:
    """One request on its way through the batch."""

    age: int
    request: Request
    tokens: Tokens
    keys: Sequence[bytes]
    session: Any = None
    pages: int = 0  # granted by the admission
    position: int = 0  # tokens whose bytes are on the device
    has_first: bool = False  # the first token is out
    wake: asyncio.Future[int | None] | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether the next step decodes; after a loss the prompt may have to be computed again."""
        return self.has_first and self.position >= self.request.prompt_tokens


def chain_keys(tokens: Tokens, block_tokens: int, salt: bytes = b"") -> list[bytes]:
    """Return the block keys of a request and a private one for its unfinished tail."""
    chain = KeyChain(block_tokens, scope_key(salt))
    chain.extend(tokens)
    keys: list[bytes] = list(chain.keys)
    rest = tokens[len(keys) * block_tokens :]
    if len(rest):
        keys.append(tail_key(keys[-1] if keys else chain.root, token_bytes(rest)))
    return keys


class PageMemory:
    """The device pool as the scheduler's kernels would see it.

    Shapes: ``words`` is (slot_count, page_bytes // 8) uint64, a view of the pool.
    """

    def __init__(self, pool: Any, page_bytes: int, pattern: PagePattern) -> None:
        data = np.asarray(pool.as_tensor())
        flat: npt.NDArray[np.uint8] = data.view(np.uint8).reshape(-1)
        self.words = flat.view(np.uint64).reshape(-1, page_bytes // 8)
        assert np.shares_memory(self.words, data)
        self.pattern = pattern

    def fill(self, flow: Flow, first_token: int, end_token: int) -> None:
        """Compute tokens ``[first_token, end_token)``: write their bytes."""
        block_tokens = self.pattern.block_tokens
        table = flow.session.page_table(GROUP)
        while first_token < end_token:
            block, offset = divmod(first_token, block_tokens)
            end = min(block_tokens, offset + end_token - first_token)
            slot_id = int(table[block])
            assert slot_id >= 0
            self.pattern.fill(self.words[slot_id], flow.keys[block], offset, end)
            first_token += end - offset

    async def check(self, flow: Flow, end_token: int, outcome: Outcome) -> None:
        """Check every byte of the first ``end_token`` tokens, a few pages at a time."""
        block_tokens = self.pattern.block_tokens
        table = flow.session.page_table(GROUP)
        block_count = -(-end_token // block_tokens)
        for block in range(block_count):
            slot_id = int(table[block])
            tokens = min(block_tokens, end_token - block * block_tokens)
            outcome.verified_pages += 1
            good = slot_id >= 0 and self.pattern.check(
                self.words[slot_id], flow.keys[block], tokens
            )
            if not good:
                outcome.mismatches += 1
                if not outcome.first_mismatch:
                    outcome.first_mismatch = (
                        f"request {flow.request.index}, block {block}, slot {slot_id}"
                    )
            if block % CHECK_BATCH == CHECK_BATCH - 1:
                await asyncio.sleep(0)


class Scheduler:
    """Runs a workload in a closed loop of ``sessions`` clients over one store."""

    def __init__(
        self,
        store: Any,
        *,
        page_bytes: int,
        block_tokens: int,
        cost: CostModel,
        time_scale: float,
        on_request: Callable[[], object] = lambda: None,
    ) -> None:
        self.store = store
        self.block_tokens = block_tokens
        self.cost = cost
        self.time_scale = time_scale
        self.outcome = Outcome()
        self.memory = PageMemory(
            store.device_pool(GROUP), page_bytes, PagePattern(page_bytes, block_tokens)
        )
        self.admission = Admission(len(self.memory.words))
        self.stream = store.stream()
        self._on_request = on_request
        self._ages = itertools.count()
        self._ready: list[Flow] = []
        self._changed = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._free_at_s = 0.0

    def describe(self) -> str:
        """Return one line about where the requests are, for a report of a stall."""
        waiting = [flow.request.index for flow in self._ready]
        return (
            f"{self.outcome.steps} steps, {len(self.outcome.latency_s)} requests done,"
            f" {self.admission.free} of {self.admission.page_count} pages not admitted,"
            f" {self.admission.waiting} requests wait for admission, {waiting} for a step"
        )

    # -------------------------------------------------------------------------- the clients

    async def run(self, workload: Workload, sessions: int) -> Outcome:
        """Replay the workload and return what its requests saw.

        Cancellation: closes every session before it leaves.
        """
        conversations = iter(workload.conversations)
        async with anyio.create_task_group() as group:
            group.start_soon(self._drive)
            async with anyio.create_task_group() as clients:
                for _ in range(sessions):
                    clients.start_soon(self._client, conversations)
            group.cancel_scope.cancel()
        return self.outcome

    async def _client(self, conversations: Any) -> None:
        for conversation in conversations:
            for request in conversation:
                if request.think_s:
                    await asyncio.sleep(request.think_s * self.time_scale)
                await self.serve(request)
                self._on_request()

    async def serve(self, request: Request) -> None:
        """Serve one request from arrival to its last token."""
        arrived_s, outcome = self._clock(), self.outcome
        tokens = request.tokens()
        flow = Flow(next(self._ages), request, tokens, chain_keys(tokens, self.block_tokens))
        try:
            await self._admit(flow, request.prompt_tokens)
            async with self.store.session(tokens[: request.prompt_tokens]) as session:
                flow.session = session
                if not await self._first_restore(flow):
                    return
                while not flow.has_first or flow.position < request.total_tokens:
                    count = await self._join(flow)
                    if count is None:
                        await self._come_back(flow)
                        continue
                    if count:
                        session.commit(tokens[flow.position : flow.position + count])
                        flow.position += count
                    if not flow.has_first and flow.position >= request.prompt_tokens:
                        outcome.ttft_s.append(self._clock() - arrived_s)
                        flow.has_first = True
        finally:
            self.admission.release(flow.pages)
        outcome.latency_s.append(self._clock() - arrived_s)
        outcome.prompt_tokens += request.prompt_tokens
        outcome.output_tokens += request.output_tokens

    async def _admit(self, flow: Flow, tokens: int) -> None:
        self.admission.release(flow.pages)
        flow.pages = 0
        pages = min(-(-tokens // self.block_tokens) + 1, self.admission.page_count)
        await self.admission.acquire(flow.age, pages)
        flow.pages = pages

    async def _first_restore(self, flow: Flow) -> bool:
        outcome = self.outcome
        cached, by_level = flow.session.cached_tokens, flow.session.cached_tokens_by_level
        began_s = self._clock()
        try:
            restore = await flow.session.resume(self.stream)
        except OutOfPages:
            outcome.refused += 1
            return False
        if cached:
            outcome.restore_wait_s.append(self._clock() - began_s)
        valid = min(int(restore.valid_tokens), cached)
        outcome.truncations += valid < cached
        for level, count in by_level.items():
            outcome.hit_tokens[level] = outcome.hit_tokens.get(level, 0) + int(count)
        flow.position = min(valid, flow.request.prompt_tokens)
        await self.memory.check(flow, flow.position, outcome)
        return True

    async def _come_back(self, flow: Flow) -> None:
        """Return after a suspension: wait for room, restore, check, recompute what was lost."""
        outcome = self.outcome
        await self._admit(flow, flow.position + 1)
        restore = await flow.session.resume(self.stream)
        valid = min(int(restore.valid_tokens), flow.position)
        if valid < flow.position:
            outcome.truncations += 1
            outcome.recomputed_tokens += flow.position - valid
        flow.position = valid
        await self.memory.check(flow, valid, outcome)

    async def _join(self, flow: Flow) -> int | None:
        """Take part in a step; returns the tokens computed, None after a preemption."""
        flow.wake = asyncio.get_running_loop().create_future()
        self._ready.append(flow)
        self._changed.set()
        try:
            return await flow.wake
        finally:
            if flow in self._ready:
                self._ready.remove(flow)

    # --------------------------------------------------------------------------- the driver

    async def _drive(self) -> None:
        while True:
            self._changed.clear()
            batch, prefill, decoding, burst = self._form_batch()
            if not batch:
                # Nothing to do, or growth is waiting for slots to drain or pages to be restored.
                if any(flow.session.is_growing for flow in self._ready):
                    await self.store.step(None)
                elif self._ready:
                    await asyncio.sleep(STUCK_POLL_S)
                else:
                    await self._changed.wait()
                continue
            drained = self.store.step(None)
            if isinstance(drained, Awaitable):
                await drained
            for flow, count in batch:
                self.memory.fill(flow, flow.position, flow.position + count)
                self._grow_ahead(flow, count)
            await self._spend(self.cost.step_cost_s(prefill, decoding, burst) * self.time_scale)
            self.outcome.steps += 1
            self.outcome.computed_tokens += sum(count for _, count in batch)
            for flow, count in batch:
                _resolve(flow, count)
            await asyncio.sleep(0)  # those that go on join again before the next step is formed

    def _form_batch(self) -> tuple[list[tuple[Flow, int]], int, int, int]:
        """Grow the oldest first; suspend the youngest when the device has no page left."""
        batch: list[tuple[Flow, int]] = []
        budget, decoding, burst = self.cost.chunk_tokens, 0, 0
        for flow in sorted(self._ready, key=lambda flow: flow.age):
            if flow not in self._ready:
                continue  # was suspended for an older one
            request = flow.request
            if flow.is_decoding:
                count = min(self.cost.burst_tokens, request.total_tokens - flow.position)
            elif budget > 0:
                count = min(budget, request.prompt_tokens - flow.position)
            else:
                continue
            if not self._grow(flow, flow.position + count):
                if flow.session.is_growing:
                    continue  # its slots are being drained
                break
            if flow.is_decoding:
                decoding, burst = decoding + 1, max(burst, count)
            else:
                budget -= max(1, count)
            batch.append((flow, count))
        for flow, _ in batch:
            self._ready.remove(flow)
        return batch, self.cost.chunk_tokens - budget, decoding, burst

    def _grow_ahead(self, flow: Flow, count: int) -> None:
        """Ask for the pages of the next step now, so that they drain while this one computes.

        Within what the admission granted: nobody is suspended for it; a refusal changes nothing.
        """
        done = flow.position + count
        wanted = done + (self.cost.burst_tokens if flow.is_decoding else count)
        granted = flow.pages * self.block_tokens
        flow.session.try_grow(max(done, min(wanted, granted, flow.request.total_tokens)))

    def _grow(self, flow: Flow, tokens_total: int) -> bool:
        while not flow.session.try_grow(tokens_total):
            if flow.session.is_growing:
                return False
            younger = [other for other in self._ready if other.age > flow.age]
            if not younger:
                return False
            victim = max(younger, key=lambda other: other.age)
            self._ready.remove(victim)
            victim.session.suspend(None)
            self.outcome.preemptions += 1
            _resolve(victim, None)
        return True

    async def _spend(self, seconds: float) -> None:
        """Wait for the device to finish: steps follow each other on one time line."""
        now_s = self._clock()
        self._free_at_s = max(self._free_at_s, now_s - LATE_MAX_S) + seconds
        rest_s = self._free_at_s - now_s
        await asyncio.sleep(rest_s if rest_s > SLEEP_MIN_S else 0)


def _resolve(flow: Flow, count: int | None) -> None:
    assert flow.wake is not None
    if not flow.wake.done():
        flow.wake.set_result(count)
