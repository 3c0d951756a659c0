"""The store over the CUDA device and a stand-in driver: fences of None, and memory at close."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import kvstore

PAGE_BYTES = 16384
BLOCK = 16


def _config(path: Path) -> kvstore.StoreConfig:
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=4 * PAGE_BYTES, device="cuda:0"),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=64 * (PAGE_BYTES + 4096), disk_cache_path=str(path / "kv")
        ),
    )


async def _put(store: Any, number: int, stream: Any) -> None:
    tokens = [1000 * number + index for index in range(4 * BLOCK)]
    async with store.session(tokens) as session:
        await session.resume(stream)
        await session.grow(len(tokens))
        session.commit(tokens[session.history_tokens :])


@pytest.fixture
def driver(fake: Any, monkeypatch: Any) -> Any:
    """Let the store load the stand-in."""
    monkeypatch.setenv("KVSTORE_LIBCUDA", fake.path)
    return fake


def test_sessions_that_end_without_a_fence_free_their_slots(
    on_loop: Any, driver: Any, tmp_path: Path
) -> None:
    """INV-338, ADR 0006: nobody steps, yet the next session gets the slots of the last one."""

    async def body(_waiting: Any) -> None:
        async with kvstore.open_store(_config(tmp_path)) as store:
            stream = store.stream()
            for number in range(4):
                await asyncio.wait_for(_put(store, number, stream), 10)
            async with store.session(range(4 * BLOCK)) as session:
                await asyncio.wait_for(session.resume(stream), 10)
                assert session.history_tokens == 4 * BLOCK

    on_loop(body)


def test_without_a_stream_the_next_step_counts(on_loop: Any, driver: Any, tmp_path: Path) -> None:
    """INV-224, INV-338: without stream and fence nobody takes the slots before the step ends."""

    async def body(_waiting: Any) -> None:
        async with kvstore.open_store(_config(tmp_path)) as store:
            await _put(store, 0, None)
            waiting = asyncio.ensure_future(_put(store, 1, store.stream()))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            store.step(store.stream().record())
            await asyncio.wait_for(waiting, 10)

    on_loop(body)


def test_memory_that_a_stream_may_read_outlives_the_store(
    on_loop: Any, driver: Any, tmp_path: Path, caplog: Any
) -> None:
    """INV-222: a stream that never ends keeps arenas and gate words mapped; close is bounded."""

    async def body(_waiting: Any) -> None:
        with caplog.at_level(logging.ERROR):
            async with kvstore.open_store(_config(tmp_path)) as store:
                device: Any = store.device
                device._close_timeout = 0.1
                device.native.launch(store.stream().key, "kvs_spin", 1, 1, (1_000_000_000,))
        assert device.holds_memory
        assert "gate words" in caplog.text
        assert "I/O memory" in caplog.text
        await asyncio.sleep(1)  # the stand-in's stream ends before its driver is unloaded

    on_loop(body)
