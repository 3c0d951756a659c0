"""The whole store on a GPU: every byte through all tiers, awaited and gated."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore._uring.base import Opcode
from kvstore._uring.engine import FaultRule
from kvstore.testing import pattern

pytestmark = pytest.mark.gpu

PAGE_BYTES = 256 << 10
BLOCK, BLOCKS = 16, 4


def _config(path: Path, *, tensors: Any = None, host: bool = True) -> kvstore.StoreConfig:
    device = {"tensors": tensors} if tensors else {"gpu_cache_size": 16 * PAGE_BYTES}
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(device="cuda:0", **device),
        host=kvstore.HostTierConfig(host_cache_size=8 * (PAGE_BYTES + 4096)) if host else None,
        disk=kvstore.DiskTierConfig(
            disk_cache_size=128 * (PAGE_BYTES + 4096),
            disk_cache_path=str(path / "kv"),
            disk_keep_copy_after_restore=True,
        ),
    )


async def _serve(store: Any, torch: Any, number: int, *, gated: bool) -> int:
    """Run one request: check what was cached, compute the rest; returns the cached blocks."""
    pool = store.device_pool("full").as_tensor()
    tokens = list(range(number * 1000, number * 1000 + BLOCK * BLOCKS))
    stream = torch.cuda.current_stream()
    async with store.session(tokens) as session:
        restore = await session.resume(stream, gated=gated)
        cached = session.cached_tokens // BLOCK
        table = session.page_table("full")
        pages = [pool[int(table[block])].reshape(-1).clone() for block in range(cached)]
        torch.cuda.current_stream().synchronize()
        if gated:
            await restore.ready()
        restore.raise_for_status()
        for block, page in enumerate(pages):
            want = pattern(f"{number}.{block}", PAGE_BYTES)
            assert np.array_equal(want, page.cpu().numpy())
        await session.grow(len(tokens))
        table = session.page_table("full")
        for block in range(cached, BLOCKS):
            source = torch.from_numpy(np.array(pattern(f"{number}.{block}", PAGE_BYTES)))
            pool[int(table[block])].reshape(-1).copy_(source)
        event = torch.cuda.Event()
        event.record()
        store.step(event)
        session.commit(tokens[session.history_tokens :])
        session.suspend(event)
    return cached


@pytest.mark.parametrize("gated", [False, True], ids=["await", "gate"])
def test_every_byte_survives(
    cuda: Any, torch_cuda: Any, on_loop: Any, tmp_path: Path, record: Any, *, gated: bool
) -> None:
    """INV-201, INV-202, INV-220: three rounds over requests that fit nowhere, on the GPU."""
    cuda.close()

    async def body(_waiting: Any) -> None:
        async with kvstore.open_store(_config(tmp_path)) as store:
            cached = [
                await _serve(store, torch_cuda, number, gated=gated)
                for _ in range(3)
                for number in range(12)
            ]
            stats = store.stats()
        record(
            gated=gated,
            cached=sum(cached),
            gate_busy=stats.gate_busy,
            fallbacks=stats.gate_await_fallbacks,
        )
        assert [0] * 12 + [BLOCKS] * 24 == cached

    on_loop(body)


def test_a_failed_read_behind_the_gate_is_poison_and_voids_the_step(
    cuda: Any, torch_cuda: Any, on_loop: Any, tmp_path: Path
) -> None:
    """INV-219 to INV-221: the stream goes on, the bytes are all ones, and nothing is committed."""
    cuda.close()

    async def body(_waiting: Any) -> None:
        async with kvstore.open_store(_config(tmp_path, host=False)) as store:
            for number in range(12):
                await _serve(store, torch_cuda, number, gated=False)
            tokens = list(range(BLOCK * BLOCKS))
            stream = torch_cuda.cuda.current_stream()
            pool = store.device_pool("full").as_tensor()
            for _ in range(20):  # a gate that is busy awaits instead, and then there is no gate
                rule = store.engine.inject(
                    FaultRule(action="errno", argument=5, opcode=Opcode.READ)
                )
                async with store.session(tokens) as session:
                    restore = await session.resume(stream, gated=True)
                    if not restore.is_gated:
                        rule.release()
                        continue
                    table = session.page_table("full")
                    pages = [pool[int(slot)].reshape(-1).clone() for slot in table]
                    stream.synchronize()
                    with pytest.raises(kvstore.PagesLost):
                        await restore
                    rule.release()
                    (failed,) = {block for _group, block in restore.failed_pages}
                    assert restore.first_failed_token == failed * BLOCK
                    assert bool((pages[failed] == 255).all())
                    with pytest.raises(kvstore.PagesLost):
                        session.commit([1] * BLOCK)
                    assert session.history_tokens == failed * BLOCK
                break
            else:
                pytest.fail("the gate was never used")
            assert store.probe(tokens) <= failed * BLOCK

    on_loop(body)


FAULTS, STORES = 10_000, 10
FAULT_PAGE_BYTES, FAULT_BLOCKS = 16 << 10, 8
KINDS = ("errno", "zero", "deadline", "cancel")


@pytest.mark.timeout(150)
def test_ten_thousand_faults_behind_the_gate(
    cuda: Any, torch_cuda: Any, on_loop: Any, tmp_path: Path, record: Any
) -> None:
    """INV-204, INV-219, INV-220: no stream hangs, no other session sees a page that failed.

    Each round computes a request, which pushes older ones to disk, and restores one of those
    behind the gate while its reads from some block on fail, end early, pass their deadline, or
    lose their session.
    """
    cuda.close()
    config = kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=FAULT_PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(
            device="cuda:0", gpu_cache_size=2 * FAULT_BLOCKS * FAULT_PAGE_BYTES
        ),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=1024 * (FAULT_PAGE_BYTES + 4096), disk_cache_path=str(tmp_path / "kv")
        ),
    )
    seen = dict.fromkeys(KINDS, 0)
    counts = {"rounds": 0, "gated": 0, "poisoned": 0, "longest_s": 0.0}

    def tokens_of(number: int) -> list[int]:
        return list(range(number * 1000, number * 1000 + BLOCK * FAULT_BLOCKS))

    async def body(_waiting: Any) -> None:
        torch = torch_cuda
        stream = torch.cuda.current_stream()
        async with kvstore.open_store(config) as store:
            pool = store.device_pool("full").as_tensor().reshape(-1, FAULT_PAGE_BYTES)

            def values(number: int) -> Any:
                blocks = torch.arange(FAULT_BLOCKS, device="cuda")
                return ((number * FAULT_BLOCKS + blocks) % 251).to(torch.uint8)[:, None]

            async def compute(number: int) -> None:
                tokens = tokens_of(number)
                async with store.session(tokens) as session:
                    await session.resume(stream)
                    await session.grow(len(tokens))
                    slots = torch.from_numpy(session.page_table("full")).long().cuda()
                    pool[slots] = values(number).expand(-1, FAULT_PAGE_BYTES)
                    session.commit(tokens)
                    event = torch.cuda.Event()
                    event.record()
                    session.suspend(event)
                await store.step(event)

            async def break_restore(number: int, kind: str, first: int) -> None:
                tokens, count = tokens_of(number), FAULT_BLOCKS - first
                action = kind if kind in {"errno", "zero"} else "hold"
                rule = store.engine.inject(
                    FaultRule(
                        action=action, argument=5, opcode=Opcode.READ, skip=first, count=count
                    )
                )
                begin = time.perf_counter()
                session = await store.session(tokens).__aenter__()
                try:
                    deadline = {"deadline": 0.02, "cancel": 0.05}.get(kind)
                    restore = await session.resume(stream, gated=True, deadline=deadline)
                    if not restore.is_gated:
                        return
                    table = session.page_table("full")
                    if kind == "cancel":
                        await asyncio.sleep(0.002)
                        await session.aclose()
                    slots = torch.from_numpy(table).long().cuda()
                    pages = pool[slots]
                    stream.synchronize()  # behind the gate: returns, whatever became of the read
                    counts["longest_s"] = max(counts["longest_s"], time.perf_counter() - begin)
                    counts["gated"] += 1
                    seen[kind] += count
                    if kind == "cancel":
                        return
                    with pytest.raises(kvstore.PagesLost):
                        await restore
                    failed = {block for _group, block in restore.failed_pages}
                    assert failed
                    assert min(failed) * BLOCK == restore.first_failed_token
                    if kind != "deadline":  # poison is best effort there (INV-205)
                        assert set(range(first, FAULT_BLOCKS)) == failed
                        good = (pages == values(number)).all(dim=1).cpu()
                        poison = (pages == 255).all(dim=1).cpu()
                        assert bool(good[:first].all())
                        # a read that failed before `resume` returned has no slot in the table
                        named = torch.from_numpy(table >= 0)
                        assert bool(named[:first].all())
                        assert bool(poison[named][first:].all())
                        counts["poisoned"] += int(named[first:].sum())
                except kvstore.DeadlineError:
                    assert kind in {"deadline", "cancel"}  # the gate was busy: it was awaited
                finally:
                    rule.release()
                    await session.aclose()
                if kind in {"errno", "zero"}:
                    assert store.probe(tokens) <= first * BLOCK

            number, goal = 0, sum(seen.values()) + FAULTS // STORES
            while sum(seen.values()) < goal:
                await compute(number)
                old = number - 6
                if old >= 0 and store.probe(tokens_of(old)) == BLOCK * FAULT_BLOCKS:
                    kind = KINDS[number % 2] if number % 16 else KINDS[2 + number // 16 % 2]
                    await break_restore(old, kind, number % FAULT_BLOCKS)
                    async with store.session(tokens_of(old)) as session:  # what others are given
                        restore = await session.resume(stream)
                        count = restore.valid_tokens // BLOCK
                        slots = torch.from_numpy(session.page_table("full")[:count]).long().cuda()
                        assert bool((pool[slots] == values(old)[:count]).all())
                number += 1
                counts["rounds"] += 1
            assert store.health() in {"ok", "degraded"}

    for _ in range(STORES):  # each within the watchdog
        on_loop(body)
    record(**counts, faults=seen)
    assert sum(seen.values()) >= FAULTS
