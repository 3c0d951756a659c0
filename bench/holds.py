"""``python -m kvstore_bench.holds``: what holds the loop longest in a whole store.

One session after another with ``--pages`` pages of 4 KiB goes through a store on the CPU device
whose device and host tier are too small for them: grow, commit, suspend, close, match and resume
from device, host and disk, a step with everything granted, and the close of the store. Every
callback of the event loop is timed by itself, and the longest of each phase is reported with its
name. A callback's time is CPU time of the loop's thread, as in `meta`: on a small machine the
native threads of engine and device take the processor away in the middle of a callback. Each phase
reports the median over ``--repeats`` of its longest callback, the maximum, and the wall-clock time
of the whole phase. What was there before the first session is frozen for the garbage collector,
which stays on.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import tempfile
import time
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import kvstore
from kvstore import compiled

PAGE_BYTES = 4096
SLOT_BYTES = 2 * PAGE_BYTES  # with its header
BLOCK = 32


class _Probe:
    """Times every callback of the loop while a phase is on."""

    def __init__(self) -> None:
        self.phase = ""
        self.longest: dict[str, list[tuple[float, str]]] = {}
        self.total: dict[str, list[float]] = {}
        self._current = (0.0, "")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Put the probe between the loop and its callbacks."""
        run = events.Handle._run  # noqa: SLF001  the loop has no hook of its own

        def timed(handle: Any) -> None:
            started = time.thread_time()
            run(handle)
            elapsed = time.thread_time() - started
            if elapsed > self._current[0]:
                self._current = (elapsed, repr(handle)[:160])

        events.Handle._run = timed  # type: ignore[method-assign,assignment]  # noqa: SLF001
        try:
            yield
        finally:
            events.Handle._run = run  # type: ignore[method-assign]  # noqa: SLF001

    async def measure(self, phase: str, step: Any) -> Any:
        """Await one step in a turn of its own, and keep its longest callback."""
        await asyncio.sleep(0)
        self._current = (0.0, "")
        started = time.perf_counter()
        result = await step
        await asyncio.sleep(0)
        self.longest.setdefault(phase, []).append(self._current)
        self.total.setdefault(phase, []).append(time.perf_counter() - started)
        return result


async def _call(function: Any, *args: Any) -> Any:
    return function(*args)


async def _serve(probe: _Probe, store: Any, number: int, pages: int) -> None:
    """Let one new session use the device; what was there moves down."""
    tokens = [number] * BLOCK + list(range((pages - 1) * BLOCK))
    session = await probe.measure("session", _call(store.session, tokens))
    async with session:
        await session.resume()
        await probe.measure("grow", session.grow(len(tokens)))
        await probe.measure("commit", _call(session.commit, tokens))
        await probe.measure("suspend", _call(session.suspend))
        await probe.measure("step", _call(store.step))
        await probe.measure("close session", session.aclose())
    await asyncio.sleep(0.2)


async def _resume(probe: _Probe, store: Any, number: int, pages: int) -> None:
    tokens = [number] * BLOCK + list(range((pages - 1) * BLOCK))
    session = await probe.measure("session", _call(store.session, tokens))
    async with session:
        level = max(
            session.cached_tokens_by_level, key=session.cached_tokens_by_level.get, default="-"
        )
        restore = await probe.measure(f"resume from {level}", session.resume())
        restore.raise_for_status()
        session.suspend()
        await probe.measure("close session", session.aclose())
    await asyncio.sleep(0.2)


async def measure(pages: int, repeats: int, engine: str) -> _Probe:
    """Run every phase ``repeats`` times."""
    probe = _Probe()
    with tempfile.TemporaryDirectory() as directory, probe.on():
        config = kvstore.StoreConfig(
            block_tokens=BLOCK,
            pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
            device=kvstore.DeviceTierConfig(gpu_cache_size=2 * pages * PAGE_BYTES),
            host=kvstore.HostTierConfig(host_cache_size=2 * pages * SLOT_BYTES),
            disk=kvstore.DiskTierConfig(
                disk_cache_size=2 * (repeats + 4) * pages * SLOT_BYTES, disk_cache_path=directory
            ),
            io=kvstore.IoConfig(io_engine=engine),
        )
        store = await kvstore.open_store(config).__aenter__()
        gc.collect()
        gc.freeze()  # as docs/operating.md advises
        for number in range(repeats + 6):
            await _serve(probe, store, number, pages)
        for number in (0, 1) * repeats:
            await _resume(probe, store, number, pages)
        await _resume(probe, store, 0, pages)
        await probe.measure("close store", store.aclose())
    return probe


@click.command()
@click.option("--pages", default=2_000, show_default=True, type=click.IntRange(min=1))
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--engine", default="auto", show_default=True)
def command(pages: int, repeats: int, engine: str) -> None:
    """Print the longest callback of each phase, in milliseconds, as JSON."""
    probe = asyncio.run(measure(pages, repeats, engine))
    phases = {
        name: {
            "longest_ms": round(statistics.median(one[0] for one in seen) * 1e3, 2),
            "max_ms": round(max(seen)[0] * 1e3, 2),
            "in_all_ms": round(statistics.median(probe.total[name]) * 1e3, 2),
            "callback": max(seen)[1],
        }
        for name, seen in probe.longest.items()
    }
    click.echo(
        json.dumps({"pages": pages, "core": compiled.describe(), "phases": phases}, indent=2)
    )


if __name__ == "__main__":
    command()
