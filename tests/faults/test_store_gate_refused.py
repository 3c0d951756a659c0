"""A device that refuses one call of a gated restore: nobody computes on pages not yet there."""

from __future__ import annotations

import anyio
import pytest

import kvstore
from kvstore.config import PoolGroupConfig
from kvstore.devices.base import CODE_INVALID_VALUE
from kvstore.testing import SimClient, SimRig, check_balances, sim_config

BLOCK = 8
TOKENS = list(range(4 * BLOCK))


async def push_down(client: SimClient, level: str, floods: int) -> None:
    """Commit TOKENS, push all of them down to a level, and leave the device slots free.

    A gate needs free slots: the filler grows into every one and gives its room back.
    """
    await client.put(TOKENS)
    await client.flood(floods)
    async with client.session(range(9000, 9000 + 8 * BLOCK)) as filler:
        await filler.resume(client.stream)
        await client.grow(filler, 8 * BLOCK)
    await client.step()
    await anyio.sleep(0.1)
    assert {level: len(TOKENS)} == client.store.probe(TOKENS).by_level


@pytest.mark.parametrize("with_host", [True, False], ids=["recalls", "reads"])
@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("call", ["wait_ticket", "copy_pages", "record", "notify", "wait_event"])
async def test_a_refused_call_of_a_gated_restore(call: str, nth: int, with_host: bool) -> None:
    """INV-120, INV-213, INV-215: what cannot be enqueued is awaited or fails; the verdict a session
    is given is true for work enqueued right behind `resume`, and landing slots come back once.
    """
    groups = (PoolGroupConfig("a", 8192), PoolGroupConfig("b", 8192))
    config = sim_config(
        device_pages=8, host_pages=12 if with_host else 2, disk_pages=96, groups=groups
    )
    rig = SimRig.create(config, seed=nth)
    async with rig.open(config) as store:
        client = SimClient(store, rig, config)
        await push_down(client, "host" if with_host else "disk", floods=4 if with_host else 24)
        history = client.history(TOKENS)
        wrong: list[BaseException] = []
        async with client.session(TOKENS) as session:
            rig.device.inject(call, CODE_INVALID_VALUE, nth=nth)
            with anyio.fail_after(60):
                try:
                    restore = await session.resume(client.stream, gated=True)
                except kvstore.DeviceError:
                    rig.device.clear_injected()
                    restore = await session.resume(client.stream)
                rig.device.clear_injected()
                valid = restore.valid_tokens
                client.verify(session, history, valid, into=wrong)
                await client.settle()
                try:
                    await restore.ready()
                except kvstore.PagesLost:
                    assert restore.valid_tokens < len(TOKENS)
                else:
                    assert valid == restore.valid_tokens
                    assert not wrong
                session.suspend(client.stream.record())
        store.step(client.stream.record())
        await anyio.sleep(5)
        assert "ok" == store.health()
        check_balances(store.stats())
        for loans in (*store._staging, *store._bounce):
            assert loans.slot_count == loans.free_count
        valid = await client.get(TOKENS)
        await client.put(TOKENS)
        assert len(TOKENS) == await client.get(TOKENS)
    rig.check_closed()


@pytest.mark.parametrize("with_host", [True, False], ids=["recalls", "reads"])
@pytest.mark.parametrize("slices", [1, 4])
async def test_a_refused_copy_behind_a_gate_is_awaited(
    slices: int, with_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-213, INV-329, INV-419: a device that refuses the copy says nothing about the page. It
    keeps the slot it was read from, and the restore goes on in await mode: nothing is lost.
    """
    monkeypatch.setattr("kvstore.executor.SLICE_BYTES", 8192 * len(TOKENS) // BLOCK // slices)
    config = sim_config(device_pages=8, host_pages=12 if with_host else 2, disk_pages=96)
    rig = SimRig.create(config)
    async with rig.open(config) as store:
        client = SimClient(store, rig, config)
        await push_down(client, "host" if with_host else "disk", floods=8 if with_host else 24)
        async with client.session(TOKENS) as session:
            rig.device.inject("copy_pages", CODE_INVALID_VALUE, nth=1)
            with anyio.fail_after(60):
                restore = await session.resume(client.stream, gated=True)
            assert not rig.device.clear_injected()
            assert not restore.is_gated
            assert len(TOKENS) == restore.valid_tokens
            restore.raise_for_status()
            client.verify(session, client.history(TOKENS), len(TOKENS))
            await client.settle()
            session.suspend(client.stream.record())
        await client.step()
        stats = store.stats()
        assert 0 == stats.lost_pages
        assert 1 == stats.gate_await_fallbacks
        check_balances(stats)
        assert len(TOKENS) == await client.get(TOKENS)
    rig.check_closed()
