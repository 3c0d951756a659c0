"""The scheduler over a fake store: bytes are checked, the youngest is preempted, nothing leaks."""

from __future__ import annotations

import asyncio

import anyio
import numpy as np
import pytest
from kvstore_bench.costs import CostModel
from kvstore_bench.pages import PagePattern
from kvstore_bench.run import watch_for_stall
from kvstore_bench.scheduler import Admission, Scheduler, chain_keys
from kvstore_bench.workload import AgenticSpec, Request, Workload, agentic_workload

from .replay_fake import FakeStore  # noqa: TID252

SPEC = AgenticSpec(
    system_tokens=64, task_tokens=64, tool_tokens=24, output_tokens=12, prompt_max=500, think_s=0.01
)
BLOCK_TOKENS = 16
PAGE_BYTES = 4096


def scheduler(store, **changes):
    options = {
        "page_bytes": PAGE_BYTES,
        "block_tokens": BLOCK_TOKENS,
        "cost": CostModel(chunk_tokens=100, burst_tokens=5),
        "time_scale": 1e-4,
    }
    return Scheduler(store, **(options | changes))


async def test_every_request_is_served_and_every_hit_checked():
    """All turns end, later turns hit what earlier ones committed, and no byte differs."""
    workload = agentic_workload(40, BLOCK_TOKENS, 7, SPEC)
    store = FakeStore(400, PAGE_BYTES, BLOCK_TOKENS)
    outcome = await scheduler(store).run(workload, 4)
    assert len(outcome.ttft_s) == 40
    assert outcome.mismatches == 0
    assert outcome.verified_pages * BLOCK_TOKENS == outcome.hit_tokens["device"]
    assert outcome.hit_tokens["device"] > outcome.prompt_tokens // 2
    assert outcome.prompt_tokens + outcome.output_tokens == sum(
        request.total_tokens for request in workload.requests
    )
    assert store.open_sessions == 0


async def test_computed_and_hit_tokens_add_up():
    """Without preemption, hit plus computed tokens are prompt plus output."""
    workload = agentic_workload(30, BLOCK_TOKENS, 3, SPEC)
    outcome = await scheduler(FakeStore(600, PAGE_BYTES, BLOCK_TOKENS)).run(workload, 3)
    assert outcome.preemptions == 0
    hit = outcome.hit_tokens["device"]
    assert outcome.prompt_tokens + outcome.output_tokens == hit + outcome.computed_tokens


async def test_out_of_pages_preempts_the_youngest_and_recomputes():
    """With too few pages the youngest is suspended; what it lost is computed again, all verify."""
    requests = [
        Request(i, 40, 60, np.arange(i * 1000, i * 1000 + 100, dtype=np.uint32)) for i in range(6)
    ]
    workload = Workload("x", BLOCK_TOKENS, [(r,) for r in requests], 42, {})
    store = FakeStore(11, PAGE_BYTES, BLOCK_TOKENS)  # admits two prompts, cannot grow both outputs
    outcome = await scheduler(store).run(workload, 3)
    assert outcome.preemptions > 0
    assert outcome.preemptions == store.suspends
    assert outcome.recomputed_tokens > 0
    assert len(outcome.latency_s) == 6
    assert outcome.mismatches == 0


async def test_wrong_bytes_are_found():
    """A flipped bit in a served page is a mismatch with a place."""

    def flip(page):
        page[100] ^= 1

    workload = agentic_workload(10, BLOCK_TOKENS, 7, SPEC)
    outcome = await scheduler(FakeStore(400, PAGE_BYTES, BLOCK_TOKENS, flip)).run(workload, 2)
    assert outcome.mismatches > 0
    assert outcome.first_mismatch.startswith("request ")


async def test_whole_prompt_cached_still_takes_a_step():
    """A prompt that is cached to its last token still has a first token to compute."""
    request = Request(0, 32, 0, np.arange(32, dtype=np.uint32))
    workload = Workload("x", BLOCK_TOKENS, [(request,), (request,)], 2, {})
    outcome = await scheduler(FakeStore(8, PAGE_BYTES, BLOCK_TOKENS)).run(workload, 1)
    assert len(outcome.ttft_s) == 2
    assert outcome.hit_tokens["device"] == 32
    assert outcome.steps == 2


async def test_cancelling_the_run_closes_all_sessions():
    """A cancelled run leaves no session open."""
    workload = agentic_workload(40, BLOCK_TOKENS, 7, SPEC)
    store = FakeStore(400, PAGE_BYTES, BLOCK_TOKENS)
    one = scheduler(store, time_scale=1.0)
    task = asyncio.ensure_future(one.run(workload, 4))
    await asyncio.sleep(0.05)
    assert store.open_sessions
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.open_sessions == 0
    assert one.admission.free == one.admission.page_count


async def test_a_stall_is_reported():
    """When nothing moves the watch says where the requests are, instead of waiting for ever."""

    class Stuck(FakeStore):
        def step(self, fence):
            return asyncio.get_running_loop().create_future()

    one = scheduler(Stuck(400, PAGE_BYTES, BLOCK_TOKENS))
    workload = agentic_workload(4, BLOCK_TOKENS, 7, SPEC)
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(watch_for_stall, one, 1.0)
            await one.run(workload, 2)
    assert "0 requests done" in str(caught.value.exceptions[0])


async def test_admission_serves_by_age():
    """A small younger request does not pass a large older one; pages come back."""
    admission = Admission(10)
    await admission.acquire(0, 8)
    order = []

    async def want(age, pages):
        await admission.acquire(age, pages)
        order.append(age)

    tasks = [asyncio.ensure_future(want(2, 1)), asyncio.ensure_future(want(1, 9))]
    await asyncio.sleep(0)
    assert order == [2]  # it was alone when it came
    admission.release(1)
    tasks.append(asyncio.ensure_future(want(3, 1)))
    await asyncio.sleep(0)
    assert order == [2]  # the older one waits for 9 pages, so this one waits as well
    admission.release(8)
    await asyncio.gather(*tasks)
    assert order == [2, 1, 3]
    admission.release(10)
    assert admission.free == 10


async def test_cancelled_admission_gives_its_pages_back():
    """Leaving the queue lets the next one in."""
    admission = Admission(4)
    await admission.acquire(0, 4)
    waiting = asyncio.ensure_future(admission.acquire(1, 4))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    admission.release(4)
    await admission.acquire(2, 4)
    assert admission.free == 0


def test_pattern_follows_key_and_position():
    """A pattern written in parts is whole; another key, a flipped bit and a shift are found."""
    pattern = PagePattern(PAGE_BYTES, BLOCK_TOKENS)
    page = np.zeros(PAGE_BYTES // 8, dtype=np.uint64)
    key, other = bytes(range(32)), bytes(range(1, 33))
    for first, end in ((0, 3), (3, 4), (4, 16)):
        pattern.fill(page, key, first, end)
        assert pattern.check(page, key, end)
    assert not pattern.check(page, other, 16)
    assert not pattern.check(page, other, 1)
    assert not pattern.check(np.roll(page, 1), key, 16)
    page.view(np.uint8)[-1] ^= 1
    assert not pattern.check(page, key, 16)
    assert pattern.check(page, key, 15)


def test_chain_keys_give_the_tail_a_key_of_its_own():
    """Full blocks have the store's keys; an unfinished tail has a private one."""
    tokens = np.arange(40, dtype=np.uint32)
    keys = chain_keys(tokens, BLOCK_TOKENS)
    assert len(keys) == 3
    assert keys[:2] == chain_keys(tokens[:32], BLOCK_TOKENS)
    assert keys[2] not in chain_keys(np.arange(48, dtype=np.uint32), BLOCK_TOKENS)
