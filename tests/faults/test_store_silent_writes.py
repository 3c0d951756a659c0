"""Writes that the disk calls good and that are not: each is found at its next read, as a miss.

A bit flipped on the way, a torn, lost or misdirected write cannot be seen when it happens. The slot
header names its page and carries the checksums (``docs/disk-format.md``), so what is served is
right or absent, while the store runs and after a restart.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from kvstore._uring.base import Opcode
from kvstore.config import HEADER_BYTES, IoClass
from kvstore.testing import FaultPlan, SimClient, SimDisk, SimRig, check_balances, sim_config

BLOCK = 8
BLOCKS = 4
PAGE_BYTES = 16_384
SLOT_BYTES = HEADER_BYTES + PAGE_BYTES
TOKENS = list(range(BLOCKS * BLOCK))
REQUESTS = [list(range(base, base + BLOCKS * BLOCK)) for base in range(0, 8000, 1000)]

SILENT = {
    "flip": ("flip", 0),
    "torn-header": ("torn", HEADER_BYTES),
    "torn-payload": ("torn", HEADER_BYTES + 8192),
    "no-header": ("sectors", 0b11110),
    "holes": ("sectors", 0b10101),
    "lost": ("lost", 0),
    "next-slot": ("misdirected", SLOT_BYTES),
    "slot-before": ("misdirected", -SLOT_BYTES),
    "far-slot": ("misdirected", 5 * SLOT_BYTES),
    "inside": ("misdirected", 4096),
}


@contextlib.asynccontextmanager
async def opened(
    disk: SimDisk | None = None, **options: Any
) -> AsyncIterator[tuple[Any, SimClient, SimRig]]:
    """Open a small store; what must not be left behind is checked at the end."""
    sizes = {"device_pages": 8, "host_pages": 8, "disk_pages": 96, "page_bytes": PAGE_BYTES}
    config = sim_config(block_tokens=BLOCK, fingerprint="model", **(sizes | options))
    rig = SimRig.create(config, faults=FaultPlan(), disk=disk)
    async with rig.open(config) as store:
        yield store, SimClient(store, rig, config), rig
        check_balances(store.stats())
    rig.check_closed()


@pytest.mark.parametrize("nth", range(BLOCKS))
@pytest.mark.parametrize("name", SILENT)
async def test_an_eviction_that_was_damaged_is_a_miss(name: str, nth: int) -> None:
    """INV-910, INV-913, INV-914: blocks before the bad one are served, nothing behind it is; the
    bad page leaves the index at its first read, and its block can be computed anew.
    """
    kind, value = SILENT[name]
    async with opened() as (store, client, rig):
        await client.put(TOKENS)
        fault = rig.faults.add(kind, value, io_class=IoClass.REQUIRED, nth=nth)
        await client.flood(24)
        assert 1 == fault.hit_count
        assert {"disk": len(TOKENS)} == store.probe(TOKENS).by_level
        assert 0 == store.stats().engine.mismatches  # nobody can know yet
        with anyio.fail_after(10):
            valid = await client.get(TOKENS)
        assert valid < len(TOKENS)
        assert store.stats().engine.mismatches in {1, 2}  # a slot hit in its place is another
        assert valid == store.probe(TOKENS) == await client.get(TOKENS)
        await client.put(TOKENS)
        await client.flood(24)
        assert len(TOKENS) == await client.get(TOKENS)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "plain"])
@pytest.mark.parametrize("name", SILENT)
async def test_a_damaged_copy_is_never_served(name: str, keep: bool) -> None:
    """INV-910, INV-914, INV-516: a copy that was written in the background, taken back by the
    eviction without a second write, and is wrong: a miss when it is read.
    """
    kind, value = SILENT[name]
    async with opened(write_through=True, keep_disk=keep) as (store, client, rig):
        fault = rig.faults.add(kind, value, io_class=IoClass.BACKGROUND, count=3)
        for tokens in REQUESTS[:2]:
            await client.put(tokens)
        await client.flood(24)
        assert 3 == fault.hit_count
        with anyio.fail_after(10):
            found = [await client.get(tokens) for tokens in REQUESTS[:2]]
        assert sum(found) < 2 * len(TOKENS)
        assert store.stats().engine.mismatches >= 1
        for _ in range(2):
            for tokens in REQUESTS[:2]:
                await client.put(tokens)
            await client.flood(24)
            assert [len(TOKENS)] * 2 == [await client.get(tokens) for tokens in REQUESTS[:2]]


async def restarted(*faults: tuple[str, int], skip: int = 0) -> list[int]:
    """Fill a small disk three times, some writes damaged, restart, and return what is found."""
    async with opened(disk_pages=24) as (_store, client, rig):
        for tokens in REQUESTS:
            await client.put(tokens)
        hits = [rig.faults.add(*fault, opcode=Opcode.WRITE, nth=skip, count=8) for fault in faults]
        for tokens in REQUESTS:
            await client.put([token + 100_000 for token in tokens])
        await client.flood(12)
        assert [8] * len(faults) == [fault.hit_count for fault in hits]
        disk = rig.disk
    async with opened(disk, disk_pages=24) as (store, client, _rig):
        report = await store.recovered()
        wanted = [[token + base for token in one] for base in (0, 100_000) for one in REQUESTS]
        with anyio.fail_after(10):
            found = [await client.get(tokens) for tokens in wanted]  # every byte is compared
        assert sum(found) <= report.taken * BLOCK
        for tokens in wanted:
            await client.put(tokens)
            assert len(tokens) == await client.get(tokens)
    return found


@pytest.mark.parametrize("skip", [16, 24])
@pytest.mark.parametrize("name", SILENT)
async def test_after_a_restart_damaged_slots_are_misses(name: str, skip: int) -> None:
    """INV-919, INV-920, INV-927: recovery reads headers; a slot whose write was lost holds an older
    page or none, one that was hit in the place of another holds that one whole or not at all.
    """
    assert await restarted() != await restarted(SILENT[name], skip=skip)


async def test_a_write_into_the_superblock_ends_the_warm_start_only() -> None:
    """INV-918, INV-925: a page that landed on block 0 makes the file a foreign one: the next store
    starts empty and serves.
    """
    async with opened() as (store, client, rig):
        await client.put(TOKENS)
        fault = rig.faults.add("misdirected", -4096, io_class=IoClass.REQUIRED, offset_max=8192)
        await client.flood(24)
        assert 1 == fault.hit_count
        with anyio.fail_after(10):
            await client.get(TOKENS)
        disk = rig.disk
    async with opened(disk) as (store, client, _rig):
        await store.recovered()
        assert 0 == store.probe(TOKENS)
        await client.put(TOKENS)
        await client.flood(24)
        assert len(TOKENS) == await client.get(TOKENS)
