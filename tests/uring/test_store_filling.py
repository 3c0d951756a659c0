"""Opening does not wait for the whole host tier: it arrives in parts while the store serves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

import kvstore
from kvstore._uring.native import Arena
from kvstore.config import slot_bytes
from kvstore.testing import check_balances
from kvstore.tiers import host

from .serving import BLOCK, BLOCKS, PAGE_BYTES, serve  # noqa: TID252

PART = 4  # slots


class Memory:
    """Arenas that arrive, once the store is open, when the test lets them; or are refused."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.refused_call = 0
        self.calls = 0
        self.is_open = False
        self.arenas: list[Arena] = []

    def let(self, count: int) -> None:
        """Let parts arrive."""
        for _ in range(count):
            self.gate.release()

    def __call__(self, length: int, slab_bytes: int, numa_node: int | None) -> Any:
        if self.is_open:
            assert self.gate.acquire(timeout=20)
            self.calls += 1
            if self.calls == self.refused_call:
                raise MemoryError("no more of it")
        arena = Arena(length, slab_bytes=slab_bytes, numa_node=numa_node)
        self.arenas.append(arena)
        return arena


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Parts of four slots."""
    monkeypatch.setattr(host, "ARENA_BYTES_GROW_MAX", PART * slot_bytes(PAGE_BYTES))
    return Memory()


def opened(path: Path, memory: Memory, group_count: int = 1) -> Any:
    """Open a store with a host tier of four parts per pool group."""
    groups = tuple(
        kvstore.PoolGroupConfig(name, page_bytes=PAGE_BYTES, window=window)
        for name, window in (("full", None), ("local", 2 * BLOCK))[:group_count]
    )
    config = kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=groups,
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES * group_count),
        host=kvstore.HostTierConfig(host_cache_size=16 * slot_bytes(PAGE_BYTES) * group_count),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=128 * slot_bytes(PAGE_BYTES), disk_cache_path=str(path / "kv")
        ),
        io=kvstore.IoConfig(io_engine="threads", disk_io_threads=4),
        check_invariants=True,
    )
    return kvstore.open_store(config, memory=memory)


def total(store: kvstore.KVStore, group: str = "full") -> int:
    """Return the host slots that exist now."""
    return store.stats().pools["host", group].total


async def until(store: kvstore.KVStore, count: int, group: str = "full") -> None:
    """Wait until that many host slots exist."""
    with anyio.fail_after(20):
        while total(store, group) < count:
            await anyio.sleep(0.001)


async def test_the_store_serves_with_the_first_part_and_grows(
    tmp_path: Path, memory: Memory
) -> None:
    """INV-906, C48: opening waits for one part; each further one is usable as it arrives."""
    async with opened(tmp_path, memory) as store:
        memory.is_open = True
        assert total(store) == PART
        assert store.stats().open_seconds > 0
        mapped = store.stats().host_mapped_bytes
        assert [await serve(store, number) for number in range(8)] == [0] * 8
        for count in (8, 12, 16):
            memory.let(1)
            await until(store, count)
            assert store.stats().host_mapped_bytes > mapped
            mapped = store.stats().host_mapped_bytes
            assert [await serve(store, number) for number in range(8)] == [BLOCKS] * 8
            used = store.stats().pools["host", "full"]
            assert used.primaries + used.draining > count - PART, "the new slots are in use"
        await store.filled()
        assert store.health() == "ok"
        assert store.stats().host_parts_failed == 0
        check_balances(store.stats())
    assert memory.calls == 3


async def test_a_later_part_that_is_refused_degrades_the_store(
    tmp_path: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    """INV-906: logged, counted, shown by `health`; the store goes on with what it has."""
    memory.refused_call = 2
    memory.let(2)
    async with opened(tmp_path, memory) as store:
        memory.is_open = True
        await store.filled()
        assert total(store) == 2 * PART
        assert store.stats().host_parts_failed == 1
        health = store.health()
        assert health == "degraded"
        assert "host tier stays smaller" in health.reasons[0]
        for cached in (0, BLOCKS):
            assert [await serve(store, number) for number in range(8)] == [cached] * 8
        memory.let(2)
        await store.resize("host", 16 * slot_bytes(PAGE_BYTES))
        assert total(store) == 4 * PART
        assert store.health() == "ok"
    assert any("host tier stays smaller" in record.message for record in caplog.records)


async def test_closing_while_parts_arrive_leaves_nothing(tmp_path: Path, memory: Memory) -> None:
    """INV-908, INV-906: the part under way ends first, and its memory goes like the rest."""
    async with opened(tmp_path, memory) as store:
        memory.is_open = True
        await serve(store, 1)
        timer = threading.Timer(0.1, memory.let, (1,))
        timer.start()
    timer.join()
    assert memory.calls == 1
    assert not any(arena.is_open for arena in memory.arenas)


async def test_a_resize_comes_after_the_rest_has_arrived(tmp_path: Path, memory: Memory) -> None:
    """INV-901, INV-906: a shrink asked for meanwhile is what counts in the end."""
    async with opened(tmp_path, memory) as store:
        memory.is_open = True
        memory.let(3)
        await store.resize("host", 6 * slot_bytes(PAGE_BYTES))
        assert total(store) == 6
        assert memory.calls == 3
        check_balances(store.stats())


async def test_pool_groups_arrive_side_by_side(tmp_path: Path, memory: Memory) -> None:
    """INV-906: no pool group waits for the whole of another."""
    async with opened(tmp_path, memory, group_count=2) as store:
        memory.is_open = True
        memory.let(2)
        await until(store, 2 * PART, "full")
        await until(store, 2 * PART, "local")
        memory.let(10)
        await store.filled()
        assert total(store, "full") == total(store, "local") == 4 * PART


async def test_a_tier_larger_than_the_machine_is_refused_at_once() -> None:
    """INV-906: what can never arrive is an error of opening, not of later."""
    config = kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=1 << 50),
    )
    with pytest.raises(kvstore.CapacityError, match="host_cache_size"):
        async with kvstore.open_store(config):
            pass
