"""A crash at each write, then a restart: pages may be missing, none is ever wrong (INV-920)."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import pytest

import kvstore
from kvstore._uring.base import Opcode
from kvstore.testing import SimClient, SimRig, sim_config

BLOCK = 8
REQUESTS = [list(range(base, base + 4 * BLOCK)) for base in range(0, 12_000, 1000)]


@pytest.mark.parametrize("write_through", [False, True], ids=["required", "background"])
@pytest.mark.parametrize("nth", range(0, 60, 3))
async def test_cut_after_each_write(nth: int, write_through: bool) -> None:
    """INV-920, INV-921, INV-927: torn writes and old generations are misses after a restart."""
    config = sim_config(
        device_pages=8,
        host_pages=8,
        disk_pages=40,
        block_tokens=BLOCK,
        page_bytes=16_384,
        fingerprint="model",
        write_through=write_through,
        io={"write_piece_bytes": 4096, "deadline": 0.5, "drain_timeout": 0.5},
    )
    rig = SimRig.create(config, seed=nth)
    writes = 0

    def count(_io_class: Any, opcode: Opcode, *_: Any) -> None:
        nonlocal writes
        writes += opcode is Opcode.WRITE
        if writes == 5 * nth + 1:
            rig.loop.call_soon(crash)

    def crash() -> None:
        if not rig.engine.is_crashed:
            rig.engine.crash()
            disks.append(rig.disk.copy())

    disks: list[Any] = []
    rig.engine.on_dispatch = count
    with contextlib.suppress(kvstore.KVStoreError, TimeoutError):
        async with rig.open(config) as store:
            client = SimClient(store, rig, config)
            with anyio.move_on_after(2):
                for tokens in REQUESTS:
                    await client.put(tokens)
                    store.step()
            crash()
    assert 1 == len(disks)
    again = SimRig.create(config, disk=disks[0])
    async with again.open(config) as store:
        report = await store.recovered()
        client = SimClient(store, again, config)
        found = [await client.get(tokens) for tokens in REQUESTS]  # every byte is compared
        assert sum(found) <= report.taken * BLOCK
        for tokens in REQUESTS:
            await client.put(tokens)
            assert len(tokens) == await client.get(tokens)
    again.check_closed()
