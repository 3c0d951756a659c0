"""Writes that a real file calls good and that are not, below whole stores: each becomes a miss."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import anyio
import pytest

import kvstore
from kvstore._uring import open_engine
from kvstore._uring.base import Opcode
from kvstore._uring.engine import FaultRule
from kvstore.config import IoClass, slot_bytes
from kvstore.errors import UnsupportedError
from kvstore.testing import check_balances

from .serving import BLOCK, BLOCKS, PAGE_BYTES, serve  # noqa: TID252

SLOT_BYTES = slot_bytes(PAGE_BYTES)
REQUESTS = 8

SILENT = {
    "flip": ("flip", 8 * 30_000 + 5),
    "torn": ("torn", 32 << 10),
    "sectors": ("sectors", 0b1011_0111_0101),
    "lost": ("lost", 0),
    "misdirected": ("misdirected", 3 * SLOT_BYTES),
    "misdirected-back": ("misdirected", -SLOT_BYTES),
}


def config(path: Path, **disk: Any) -> kvstore.StoreConfig:
    """Return a small store with named files, two pieces to a page."""
    options = {"disk_cache_size": 64 * SLOT_BYTES, "disk_cache_path": str(path / "kv")} | disk
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=8 * SLOT_BYTES),
        disk=kvstore.DiskTierConfig(**options),
        io=kvstore.IoConfig(io_engine="threads", write_piece_bytes=48 << 10, disk_io_threads=4),
        fingerprint="model",
        check_invariants=True,
    )


async def serve_all(store: kvstore.KVStore) -> int:
    """Serve each request, a second time where a page was lost; returns how many lost one."""
    lost = 0
    with anyio.fail_after(30):
        for number in range(REQUESTS):
            try:
                await serve(store, number)
            except kvstore.PagesLost:
                lost += 1
                assert await serve(store, number) < BLOCKS
    return lost


@pytest.mark.parametrize("engine", ["io_uring", "threads", "serial"])
@pytest.mark.parametrize("through", [False, True], ids=["required", "background"])
@pytest.mark.parametrize("name", SILENT)
async def test_damaged_writes_are_misses_now_and_after_a_restart(
    tmp_path: Path, engine: str, through: bool, name: str
) -> None:
    """INV-910, INV-913, INV-914, INV-919: every byte served is compared; each damaged page is lost
    once, by a mismatch, and computed anew; a restart finds no wrong page either.
    """
    settings = config(tmp_path, disk_write_through=through)
    with contextlib.ExitStack() as stack:
        try:
            shared = open_engine(settings.io, kind=engine)
        except UnsupportedError as error:
            pytest.skip(str(error))
        stack.callback(shared.close)

        def damage(**where: Any) -> Any:
            action, argument = SILENT[name]
            return shared.inject(
                FaultRule(action=action, argument=argument, opcode=Opcode.WRITE, **where)
            )

        async with kvstore.open_store(settings, shared) as store:
            io_class = IoClass.BACKGROUND if through else IoClass.REQUIRED
            fault = damage(io_class=io_class, skip=3, count=9)
            await serve_all(store)
            lost = await serve_all(store)
            affected = fault.release()
            assert 9 == affected
            lost += await serve_all(store)
            stats = store.stats()
            check_balances(stats)
            assert 0 < lost <= stats.engine.mismatches <= 2 * affected
            fault = damage(count=6)
            await store.aclose(flush=True)
            assert 6 == fault.release()
    async with kvstore.open_store(config(tmp_path)) as store:
        await store.recovered()
        await serve_all(store)
        assert 0 == await serve_all(store)
