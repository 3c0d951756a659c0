"""Opening, closing and refusing: what is left behind is nothing, on every way out."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import kvstore
from kvstore.tiers.disk import OsSlotFiles

PAGE_BYTES = 16 << 10
SLOT_BYTES = PAGE_BYTES + 4096
BLOCK = 8


def config(path: Path, **options: Any) -> kvstore.StoreConfig:
    """Return a small store."""
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=4 * SLOT_BYTES),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=64 * SLOT_BYTES, disk_cache_path=str(path / "kv")
        ),
        io=kvstore.IoConfig(io_engine="threads", disk_io_threads=4),
        check_invariants=True,
        **options,
    )


async def put(store: kvstore.KVStore, number: int, blocks: int = 4) -> None:
    """Commit one request of its own."""
    tokens = np.arange(blocks * BLOCK) + number * 1000
    async with store.session(tokens) as session:
        await session.resume()
        await session.grow(len(tokens))
        session.commit(tokens[session.history_tokens :])


def held() -> tuple[int, int]:
    """Return the descriptors and threads of this process; anyio keeps idle workers for the loop."""
    ours = [one for one in threading.enumerate() if not one.name.startswith("AnyIO")]
    return len(os.listdir("/proc/self/fd")), len(ours)


async def test_closing_returns_threads_and_descriptors(tmp_path: Path) -> None:
    """C21: threads and descriptors are back to the count before `open`."""
    async with kvstore.open_store(config(tmp_path)) as store:
        await put(store, 1)  # whatever is made once per process is made now
    gc.collect()
    for _ in range(3):
        await asyncio.sleep(0.01)
    before = held()
    for number in range(3):
        async with kvstore.open_store(config(tmp_path)) as store:
            for request in range(6):
                await put(store, number * 10 + request)
    for _ in range(20):
        await asyncio.sleep(0.02)
        if held() == before:
            break
    assert before == held()


async def test_leaving_with_open_sessions_closes_and_says_so(tmp_path: Path) -> None:
    """INV-907: leaving always closes; a body that ended well gets LogicError with the number."""
    with pytest.raises(kvstore.LogicError, match="2 sessions"):
        async with kvstore.open_store(config(tmp_path)) as store:
            first, second = store.session([1] * 20), store.session([2] * 20)
    assert ["closed", "closed"] == [first.state, second.state]
    with pytest.raises(kvstore.StoreClosed):
        store.session([1])


async def test_leaving_by_an_exception_keeps_the_exception(tmp_path: Path) -> None:
    """INV-907: an exception of the body is not replaced or wrapped, and the store is closed."""
    with pytest.raises(KeyError, match="body"):
        async with kvstore.open_store(config(tmp_path)) as store:
            session = store.session([1] * 20)
            raise KeyError("body")
    assert "closed" == session.state


async def test_close_and_clear_refuse_while_sessions_are_open(tmp_path: Path) -> None:
    """INV-907: the error names the call and the number of sessions, and nothing changed."""
    async with kvstore.open_store(config(tmp_path)) as store:
        await put(store, 1)
        async with store.session(np.arange(4 * BLOCK) + 1000) as session:
            for call in ("aclose", "clear", "bump_epoch"):
                with pytest.raises(kvstore.LogicError, match=f"{call}: 1 sessions"):
                    await getattr(store, call)()
            assert 4 * BLOCK == session.cached_tokens
            (await session.resume()).raise_for_status()


async def test_a_second_close_does_nothing_and_calls_are_refused(tmp_path: Path) -> None:
    """INV-909."""
    async with kvstore.open_store(config(tmp_path)) as store:
        await store.aclose()
        await store.aclose()
        for call in (
            lambda: store.session([1]),
            lambda: store.probe([1]),
            store.step,
            store.available,
        ):
            with pytest.raises(kvstore.StoreClosed):
                call()
        with pytest.raises(kvstore.StoreClosed):
            await store.resize("host", 1 << 20)
        with pytest.raises(kvstore.StoreClosed):
            await store.clear()


async def test_closing_under_load_ends_every_waiter(tmp_path: Path) -> None:
    """C21, C22: restores in flight end with a typed error; nothing hangs, nothing is left."""
    outcomes: list[str] = []

    async def load(store: kvstore.KVStore, number: int) -> None:
        try:
            while True:
                async with store.session(np.arange(4 * BLOCK) + number * 1000) as session:
                    await session.resume()
        except kvstore.KVStoreError as error:
            outcomes.append(type(error).__name__)

    async with anyio.create_task_group() as group:
        with pytest.raises(kvstore.LogicError, match="sessions were still open"):
            async with kvstore.open_store(config(tmp_path)) as store:
                for number in range(10):
                    await put(store, number)
                for number in range(10):
                    group.start_soon(load, store, number)
                await asyncio.sleep(0.05)
    assert 10 == len(outcomes)
    assert set(outcomes) <= {"StoreClosed", "LogicError"}


async def test_cancelling_the_owner_again_and_again_still_closes(tmp_path: Path) -> None:
    """C21: a native cancel of the owner, repeated while closing, does not cut the closing short."""
    opened: asyncio.Future[kvstore.KVStore] = asyncio.get_running_loop().create_future()

    async def owner() -> None:
        async with kvstore.open_store(config(tmp_path)) as store:
            for number in range(8):
                await put(store, number)
            opened.set_result(store)
            await asyncio.sleep(3600)

    task = asyncio.get_running_loop().create_task(owner())
    store = await opened
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(kvstore.StoreClosed):
        store.session([1])
    async with kvstore.open_store(config(tmp_path)):
        pass  # the directory is free again


async def test_cancelling_the_opening_leaves_nothing(tmp_path: Path) -> None:
    """A cancel at any moment of the opening undoes what was made."""
    for delay in (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01):
        with anyio.move_on_after(delay):
            async with kvstore.open_store(config(tmp_path)):
                await asyncio.sleep(3600)
        async with kvstore.open_store(config(tmp_path)) as store:
            await put(store, 1)


@pytest.mark.parametrize("moment", ["open", "opening"])
async def test_a_process_forked_meanwhile_does_not_keep_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """INV-923: a child has a copy of each descriptor, for its life or until it executes a program;
    closing gives the directory up all the same, and so does an opening that is cancelled.
    """
    copies: list[int] = []
    real = OsSlotFiles.lock

    def lock(self: OsSlotFiles, directory: str) -> int:
        fd = real(self, directory)
        copies.append(os.dup(fd))  # as a fork does
        return fd

    monkeypatch.setattr(OsSlotFiles, "lock", lock)
    try:
        if moment == "opening":
            monkeypatch.setattr(OsSlotFiles, "open", _refuse)
            with pytest.raises(OSError, match="injected"):
                await kvstore.open_store(config(tmp_path)).__aenter__()
            monkeypatch.undo()
        else:
            async with kvstore.open_store(config(tmp_path)):
                with pytest.raises(kvstore.BusyError):
                    await kvstore.open_store(config(tmp_path)).__aenter__()
        assert copies
        async with kvstore.open_store(config(tmp_path)) as store:
            await put(store, 1)
    finally:
        for fd in copies:
            os.close(fd)


def _refuse(*_: Any) -> Any:
    raise OSError("injected")


async def test_a_call_from_another_thread_is_refused(tmp_path: Path) -> None:
    """INV-331: all tables belong to one loop."""
    async with kvstore.open_store(config(tmp_path)) as store:
        caught: list[BaseException] = []

        def call() -> None:
            try:
                store.session([1])
            except kvstore.LogicError as error:
                caught.append(error)

        await anyio.to_thread.run_sync(call)
        assert 1 == len(caught)
        assert "thread" in str(caught[0])


async def test_a_file_that_cannot_be_closed_does_not_spare_the_others(tmp_path: Path) -> None:
    """C28: a tier that raises while closing; the rest is closed, the error comes once, at last."""
    with pytest.raises(OSError, match="injected"):
        async with kvstore.open_store(config(tmp_path)) as store:
            disk = store._disk
            assert disk is not None
            real = disk._files.close

            def close(file: Any) -> None:
                real(file)
                raise OSError("injected")

            disk._files = type(
                "Files", (), {"close": staticmethod(close), "unlock": disk._files.unlock}
            )()
    async with kvstore.open_store(config(tmp_path)):
        pass  # lock, memory and engine were given back all the same


SCRIPT = """
import asyncio, os, signal, sys
import numpy as np
import kvstore
PAGE = 16 << 10
config = kvstore.StoreConfig(
    block_tokens=8, pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE),),
    device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE),
    host=kvstore.HostTierConfig(host_cache_size=4 * (PAGE + 4096)),
    disk=kvstore.DiskTierConfig(disk_cache_size=64 * (PAGE + 4096), disk_cache_path=sys.argv[1]),
    io=kvstore.IoConfig(io_engine="threads", disk_io_threads=4),
    fingerprint="model",
)
async def put(store, number):
    tokens = np.arange(32) + number * 1000
    async with store.session(tokens) as session:
        await session.resume()
        await session.grow(32)
        session.commit(tokens[session.history_tokens:])
"""


def run(body: str, path: Path, *flags: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script that opens a store of its own."""
    script = SCRIPT + textwrap.dedent(body)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONASYNCIODEBUG": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", script, str(path / "kv")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
        **options,
    )


def test_keyboard_interrupt_closes_the_store(tmp_path: Path) -> None:
    """C21: an interrupt in the middle of the load: no warning, no hang, the next start works."""
    body = """
    async def main():
        async with kvstore.open_store(config) as store:
            for number in range(6):
                await put(store, number)
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
            while True:
                for number in range(6):
                    await put(store, number)
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted")
    """
    result = run(body, tmp_path)
    assert "interrupted" == result.stdout.strip(), result.stderr
    # a busy machine makes asyncio's debug mode name slow callbacks; anything else is a fault
    faults = [line for line in result.stderr.splitlines() if not line.startswith("Executing <")]
    assert [] == faults
    assert 0 == result.returncode


def test_python_o_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    """Style rule 5: without asserts the store does not open, except on request."""
    body = """
    async def main(**options):
        async with kvstore.open_store(config, **options) as store:
            await put(store, 1)
        print("opened")
    try:
        asyncio.run(main())
    except kvstore.UnsupportedError as error:
        print(error)
    asyncio.run(main(allow_optimized=True))
    """
    result = run(body, tmp_path, "-O")
    lines = result.stdout.splitlines()
    assert "python -O" in lines[0], result.stderr
    assert "opened" == lines[1]


def test_a_forked_child_cannot_use_the_store(tmp_path: Path) -> None:
    """Style section 4: a ring does not survive a fork; the child's calls raise StoreFailed."""
    body = """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    async def main():
        async with kvstore.open_store(config) as store:
            await put(store, 1)
            child = os.fork()
            if child == 0:
                try:
                    store.session([1, 2, 3])
                except kvstore.StoreFailed:
                    os._exit(7)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            await put(store, 2)
        print("fine")
    asyncio.run(main())
    """
    result = run(body, tmp_path)
    assert "fine" == result.stdout.strip(), result.stderr


@pytest.mark.parametrize("delay", [0.05, 0.2, 0.4])
def test_c37_a_killed_process_leaves_a_store_that_opens(tmp_path: Path, delay: float) -> None:
    """INV-920, INV-923: kill -9 at any time: misses at most, no lock, no stray file."""
    body = f"""
    async def main():
        async with kvstore.open_store(config) as store:
            print("open", flush=True)
            asyncio.get_running_loop().call_later({delay}, os.kill, os.getpid(), signal.SIGKILL)
            number = 0
            while True:
                await put(store, number % 40)
                number += 1
    asyncio.run(main())
    """
    result = run(body, tmp_path)
    assert -signal.SIGKILL == result.returncode, result.stderr
    again = """
    async def main():
        async with kvstore.open_store(config) as store:
            report = await store.recovered()
            for number in range(40):
                async with store.session(np.arange(32) + number * 1000) as session:
                    await session.resume()
        print(sorted(os.listdir(sys.argv[1])))
    asyncio.run(main())
    """
    result = run(again, tmp_path)
    assert "['full.0.slots']" == result.stdout.strip(), result.stderr
