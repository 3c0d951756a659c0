"""Known kinds of fault that need a real kernel: C10, C17, C31, C50 to C52, C55, C56."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore._uring import open_engine, probe
from kvstore._uring.base import Opcode
from kvstore._uring.engine import KERNEL_WORKERS, FaultRule
from kvstore._uring.ring import RingEngine
from kvstore.config import IoClass
from kvstore.errors import UnsupportedError
from kvstore.testing import pattern

PAGE, BLOCK, BLOCKS = 64 << 10, 16, 4
SLOT = PAGE + 4096


def _config(path: Path, engine: str = "auto", **io: Any) -> kvstore.StoreConfig:
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE),
        disk=kvstore.DiskTierConfig(disk_cache_size=64 * SLOT, disk_cache_path=str(path / "kv")),
        io=kvstore.IoConfig(io_engine=engine, **io),
    )


async def _serve(store: Any, number: int) -> int:
    """Run one request: check what is cached, write the rest; returns the cached blocks."""
    pool = np.asarray(store.device_pool("full").as_tensor()).reshape(-1, PAGE)
    tokens = list(range(number * 1000, number * 1000 + BLOCK * BLOCKS))
    async with store.session(tokens) as session:
        restore = await session.resume()
        cached = restore.valid_tokens // BLOCK
        table = session.page_table("full")
        for block in range(cached):
            assert np.array_equal(pattern(f"{number}.{block}", PAGE), pool[table[block]])
        while not session.try_grow(len(tokens)):
            await asyncio.sleep(0)
        await store.step()
        table = session.page_table("full")
        for block in range(cached, BLOCKS):
            pool[table[block]] = pattern(f"{number}.{block}", PAGE)
        session.commit(tokens[session.history_tokens :])
        session.suspend()
    return cached


async def _round_trip(store: Any) -> None:
    """Six requests that do not fit the device, twice: the second time all of them are hits."""
    async with asyncio.timeout(30):
        assert [0] * 6 == [await _serve(store, number) for number in range(6)]
        assert [BLOCKS] * 6 == [await _serve(store, number) for number in range(6)]


def _refuse_open(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refuse(path: Any, flags: int, *rest: Any, **names: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest, **names)

    monkeypatch.setattr(os, "open", refuse)


def _refuse_write(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwritev", "pwrite"):
        original = getattr(os, name)

        def refuse(fd: int, *rest: Any, call: Any = original) -> int:
            if os.get_blocking(fd) and _is_direct(fd):
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(fd, *rest)

        monkeypatch.setattr(os, name, refuse)


def _is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize(
    "refuse", [pytest.param(_refuse_open, id="c17"), pytest.param(_refuse_write, id="c31")]
)
async def test_c17_c31_a_file_system_without_direct_io_is_noticed_at_the_start(
    refuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused at open, or accepted there and refused at the first write: the store falls back,
    says so in its statistics and in one log line, and a round trip finishes.
    """
    refuse(monkeypatch)
    with caplog.at_level(logging.INFO):
        async with kvstore.open_store(_config(tmp_path)) as store:
            modes = store.stats().disk_modes
            await _round_trip(store)
    assert modes
    assert all("buffered" in str(mode) for mode in modes.values())
    file = probe.open_slot_file(tmp_path / "again.slots", 1 << 20)
    assert (-1, "buffered") == (file.direct_fd, file.mode)
    assert "O_DIRECT" in file.reason
    file.close()


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
async def test_c10_writes_without_space_are_never_taken_for_complete(
    kind: str, tmp_path: Path
) -> None:
    """ENOSPC and EFBIG from the fault layer of a real engine: misses, and no slot in use."""
    try:
        context = kvstore.open_store(_config(tmp_path, kind))
        store = await context.__aenter__()
    except UnsupportedError as error:
        pytest.skip(str(error))
    try:
        for code in (errno.ENOSPC, errno.EFBIG):
            rule = store.engine.inject(
                FaultRule(action="errno", argument=code, io_class=IoClass.REQUIRED, count=None)
            )
            for number in range(4):
                await _serve(store, number)
            await asyncio.sleep(0.1)
            assert rule.release() > 0
            assert code in store.stats().engine.classes[IoClass.REQUIRED].errors
            assert 0 == store.stats().pools["disk", "full"].primaries
        await asyncio.sleep(0)
    finally:
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
async def test_c50_the_engine_is_selectable_and_visible(kind: str, tmp_path: Path) -> None:
    """A named engine is the one in the statistics, and pages travel on it."""
    try:
        async with kvstore.open_store(_config(tmp_path, kind)) as store:
            assert kind == store.stats().engine.engine
            await _round_trip(store)
    except UnsupportedError as error:
        pytest.skip(str(error))


def _tasks(prefix: str) -> set[str]:
    """Ids of the threads of this process whose names begin so."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text(encoding="ascii").startswith(prefix):
                found.add(task.name)
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.uring
async def test_c51_kernel_workers_for_buffered_pieces_are_bounded(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffered writes on a ring use no more kernel workers than the engine allows (INV-130).

    A worker is named after the thread whose ring it serves: those of other tests, which end when
    the kernel likes, do not count.
    """
    before = _tasks("kvs-reactor")
    async with open_rig("io_uring", direct="off", slots=64) as rig:
        (reactor,) = _tasks("kvs-reactor") - before
        for slot in range(64):
            rig.fill(slot)
        transfers = [rig.write(slot) for slot in range(64)]
        most = 0
        for transfer in transfers:
            most = max(most, len(_tasks(f"iou-wrk-{reactor}")))
            assert await transfer.end() == 0
    assert 0 < most <= KERNEL_WORKERS + 1, most  # one may be about to end


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
async def test_c52_cached_buffered_reads_never_hold_the_submit_call(
    kind: str, open_rig: Any
) -> None:
    """The file is in the page cache: handing 64 reads over takes the loop less than 2 ms.

    The best of five batches counts: the machine may be busy, the call must not be.
    """
    async with open_rig(kind, direct="off", slots=64, payload_bytes=256 << 10) as rig:
        for slot in range(64):
            rig.fill(slot)
            assert await rig.write(slot).end() == 0
        loop, best = asyncio.get_running_loop(), 1.0
        for _ in range(5):
            records = [
                rig.record(Opcode.READ, slot, memory=rig.slot_count + slot) for slot in range(64)
            ]
            start = loop.time()
            transfers = rig.submit(records)
            best = min(best, loop.time() - start)
            for transfer in transfers:
                assert await transfer.end() == 0
        assert best < 2e-3


def test_c55_the_message_about_locked_memory_names_limit_value_and_need() -> None:
    """What is said when registration is refused: the limit, its present value, what is needed."""
    from kvstore._uring import engine

    text = engine._memlock_reason(64 << 20)
    assert "RLIMIT_MEMLOCK" in text
    assert "65536 KiB more" in text
    assert "ulimit -l" in text


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
async def test_c56_a_container_without_io_uring_gets_threads_without_help(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The set-up call is refused: threads are chosen, the statistics say so, pages travel."""

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        raise UnsupportedError("io_uring is not permitted", errno=code)

    monkeypatch.setattr(RingEngine, "__init__", refuse)
    with pytest.raises(UnsupportedError):
        open_engine(kind="io_uring")
    with caplog.at_level(logging.WARNING):
        async with kvstore.open_store(_config(tmp_path)) as store:
            stats = store.stats().engine
            await _round_trip(store)
    assert ("threads", "io_uring is not permitted") == (stats.engine, stats.fallback_reason)
    assert 1 == sum("falling back" in record.getMessage() for record in caplog.records)
