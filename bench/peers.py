"""The rivals of ``compare``: fio, our engines, and other engines where they are installed.

Each runs the same `Workload` on the same file and returns a `Measurement`. Optional ones say why
they cannot run; nothing is installed or downloaded.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from .fioformat import run_json
from .iorun import run_jobs, usage_now, usage_since
from .iostats import Latencies
from .jobs import GIB, JobSpec
from .memory import open_memory

PSYNC_JOBS = 16
#: What waits in our engines behind the bytes in the device: the disk's work of one turn of a loop.
QUEUED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One cell of the comparison. Sizes are bytes, times seconds."""

    path: Path
    size: int
    rw: str
    bs: int
    iodepth: int
    runtime: float
    ramp_time: float
    memory: str
    seed: int = 1

    @property
    def is_read(self) -> bool:
        """Whether the cell reads."""
        return self.rw.endswith("read")


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What one engine did with one workload."""

    bw_bytes: float
    iops: float
    clat_ns: dict[str, float]
    cpu_s_per_gib: float
    loop_lag_ns: dict[str, float] = field(default_factory=dict)
    service_ns: dict[str, float] = field(default_factory=dict)  # in the device, without waiting
    notes: list[str] = field(default_factory=list)
    other_cpus: float = 0.0  # kept busy by other processes meanwhile


class Unavailable(Exception):
    """A rival cannot run here; the text is the line that says why."""


Runner = Callable[[Workload], Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """An engine of the table: how it is named, how it caches, how it is run."""

    name: str
    caching: str  # direct or buffered
    check: Callable[[], None]
    run: Runner


def _nothing() -> None:
    """Need nothing beyond this package."""


def _need_module(name: str) -> Callable[[], None]:
    def check() -> None:
        try:
            importlib.import_module(name)
        except ImportError:
            raise Unavailable(f"{name} is not installed") from None

    return check


# ---- fio ----------------------------------------------------------------------------------------


def fio_arguments(work: Workload, ioengine: str) -> list[str]:
    """Return fio's options for a workload: its best settings on the same kind of memory."""
    arguments = [
        "--name=compare",
        f"--filename={work.path}",
        f"--size={work.size}",
        f"--rw={work.rw}",
        f"--bs={work.bs}",
        "--direct=1",
        f"--ioengine={ioengine}",
        f"--runtime={work.runtime:g}s",
        "--time_based",
        f"--ramp_time={work.ramp_time:g}s",
        f"--randseed={work.seed}",
        "--group_reporting",
        "--output-format=json",
        "--fallocate=none",
        "--allow_file_create=0",
        "--iomem=mmap",
        "--iomem_align=2m",  # or small totals miss the huge pages that ours get
    ]
    if ioengine == "io_uring":
        arguments += [
            f"--iodepth={work.iodepth}",
            "--fixedbufs=1",
            "--registerfiles=1",
            "--nonvectored=1",
        ]
    else:
        arguments += [f"--numjobs={PSYNC_JOBS}", "--thread"]
    return arguments


def parse_fio(text: str, side: str) -> Measurement:
    """Return the figures of one fio result. Raises: Unavailable: fio reported an error."""
    start = text.find("{")
    try:
        job = json.loads(text[start:])["jobs"][0]
    except (ValueError, KeyError, IndexError):
        raise Unavailable(f"fio gave no result: {text.strip()[:200]}") from None
    if job["error"]:
        raise Unavailable(f"fio reported error {job['error']}")
    figures = job[side]
    percentiles = figures["clat_ns"].get("percentile", {})
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    moved = figures["io_bytes"] / GIB
    return Measurement(
        bw_bytes=float(figures["bw_bytes"]),
        iops=float(figures["iops"]),
        clat_ns=_percentiles(percentiles, figures["clat_ns"]["mean"]),
        cpu_s_per_gib=cpu_s / moved if moved else 0.0,
    )


def _percentiles(percentiles: dict[str, float], mean: float) -> dict[str, float]:
    return {
        "mean": mean,
        "p50": float(percentiles.get("50.000000", 0)),
        "p99": float(percentiles.get("99.000000", 0)),
        "p99.9": float(percentiles.get("99.900000", 0)),
    }


def fio_rival(program: str, ioengine: str) -> Rival:
    """Return fio with one of its engines."""

    def check() -> None:
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed")

    def run(work: Workload) -> Measurement:
        found = shutil.which(program)
        assert found is not None
        done = subprocess.run(  # noqa: S603  (the program the caller named)
            [found, *fio_arguments(work, ioengine)],
            capture_output=True,
            text=True,
            check=False,
            cwd=work.path.parent,
            timeout=work.runtime + work.ramp_time + 120,
        )
        if done.returncode:
            raise Unavailable(f"fio failed: {(done.stderr or done.stdout).strip()[:200]}")
        return parse_fio(done.stdout, "read" if work.is_read else "write")

    suffix = f"-x{PSYNC_JOBS}" if ioengine == "psync" else ""
    return Rival(name=f"fio-{ioengine}{suffix}", caching="direct", check=check, run=run)


# ---- our engines --------------------------------------------------------------------------------


def job_of(work: Workload, ioengine: str, **changes: Any) -> JobSpec:
    """Return the job of `kvstore-bench io` that is this workload."""
    return JobSpec(
        name="compare",
        directory=str(work.path.parent),
        filename=work.path.name,
        size=work.size,
        rw=work.rw,
        bs=(work.bs, work.bs),
        iodepth=work.iodepth,
        runtime=work.runtime,
        time_based=True,
        ramp_time=work.ramp_time,
        ioengine=ioengine,
        memory=work.memory,
        randseed=work.seed,
        **changes,
    )


def queued(work: Workload) -> dict[str, Any]:
    """Return the job fields that keep fio's depth in the device and a little waiting behind it.

    The bound is in bytes, so the bytes in the device are those of fio; what waits in the engine
    is taken by the reactor without a turn of the loop, as the pages of a restore are. It is as
    much as the disk moves during such a turn, and no more: waiting transfers have memory too, and
    memory beyond fio's costs cache.
    """
    bound = work.iodepth * work.bs
    return {
        "queue_ahead": max(2, min(work.iodepth // 2, QUEUED_BYTES // work.bs)),
        "inflight_bytes": bound,
        "required_inflight_bytes": bound,
    }


def own_rival(ioengine: str, *, is_closed: bool = False) -> Rival:
    """Return one of the engines of this package, with work waiting or in fio's closed loop."""

    def run(work: Workload) -> Measurement:
        changes = {} if is_closed else queued(work)
        result = asyncio.run(run_jobs([job_of(work, ioengine, **changes)]))
        entry = run_json(result)["jobs"][0]
        if entry["error"]:
            raise Unavailable(f"{ioengine} ended with errno {entry['error']}")
        figures = entry["read" if work.is_read else "write"]
        lag = entry["kvstore"]["loop_lag_ns"]
        (group,) = entry["kvstore"]["classes"].values()
        service = group["service_ns"]
        return Measurement(
            bw_bytes=float(figures["bw_bytes"]),
            iops=float(figures["iops"]),
            clat_ns=_percentiles(
                figures["clat_ns"].get("percentile", {}), figures["clat_ns"]["mean"]
            ),
            cpu_s_per_gib=entry["kvstore"]["cpu_s_per_gib"],
            loop_lag_ns=_percentiles(lag.get("percentile", {}), lag["mean"]),
            service_ns=_percentiles(service["percentile"], service["mean"]),
            notes=list(entry["kvstore"]["warnings"]),
        )

    name = f"kvstore-{ioengine}{'-closed' if is_closed else ''}"
    return Rival(name=name, caching="direct", check=_nothing, run=run)


# ---- baselines in Python ------------------------------------------------------------------------


class _Tally:
    """Counts transfers of a baseline after its ramp."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.lat = Latencies()
        self.count = 0
        self.first_ns = time.monotonic_ns() + int(work.ramp_time * 1e9)
        self.end_ns = self.first_ns + int(work.runtime * 1e9)
        self.last_ns = self.first_ns
        self._values: list[int] = []
        self._usage = usage_now()
        self._counting = False

    @property
    def is_over(self) -> bool:
        return time.monotonic_ns() >= self.end_ns

    def done(self, started_ns: int) -> None:
        now = time.monotonic_ns()
        if now < self.first_ns:
            return
        if not self._counting:
            self._counting, self._usage = True, usage_now()
        self.count += 1
        self.last_ns = now
        self._values.append(now - started_ns)

    def measurement(self) -> Measurement:
        seconds = max(self.last_ns - self.first_ns, 1) / 1e9
        used = usage_since(self._usage, seconds)
        moved = self.count * self.work.bs
        self.lat.add(np.array(self._values, np.int64))
        return Measurement(
            bw_bytes=moved / seconds,
            iops=self.count / seconds,
            clat_ns={
                "mean": self.lat.mean_ns,
                "p50": float(self.lat.percentile_ns(50)),
                "p99": float(self.lat.percentile_ns(99)),
                "p99.9": float(self.lat.percentile_ns(99.9)),
            },
            cpu_s_per_gib=(used.user_s + used.system_s) / (moved / GIB) if moved else 0.0,
        )


def _offsets(work: Workload, part: int) -> Callable[[], int]:
    rng = np.random.default_rng([work.seed, part])
    blocks = work.size // work.bs
    drawn: list[int] = []

    def take() -> int:
        if not drawn:
            drawn.extend((rng.integers(0, blocks, 4096) * work.bs).tolist())
        return drawn.pop()

    return take


def _drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _run_tasks(work: Workload, body: Callable[[_Tally, int], Any]) -> Measurement:
    """Run ``iodepth`` tasks of ``body(tally, number)`` until the time is over.

    What it left in the page cache is written out before the next engine's turn.
    """
    _drop_cache(work.path)

    async def main() -> Measurement:
        tally = _Tally(work)
        async with anyio.create_task_group() as tasks:
            for number in range(work.iodepth):
                tasks.start_soon(body, tally, number)
        return tally.measurement()

    try:
        return asyncio.run(main())
    finally:
        _drop_cache(work.path)


def _executor_run(work: Workload) -> Measurement:
    """Buffered pread and pwrite in the loop's thread pool, and a copy: what most code does."""
    memory = open_memory(work.iodepth * work.bs, work.memory)
    view = memory.view()
    fd = os.open(work.path, os.O_RDWR | os.O_CLOEXEC)
    pool = ThreadPoolExecutor(PSYNC_JOBS)

    async def body(tally: _Tally, number: int) -> None:
        loop = asyncio.get_running_loop()
        take = _offsets(work, number)
        buffer = view[number * work.bs : (number + 1) * work.bs].data
        while not tally.is_over:
            started = time.monotonic_ns()
            if work.is_read:
                buffer[:] = await loop.run_in_executor(pool, os.pread, fd, work.bs, take())
            else:
                await loop.run_in_executor(pool, os.pwrite, fd, buffer, take())
            tally.done(started)

    try:
        return _run_tasks(work, body)
    finally:
        pool.shutdown()
        os.close(fd)


def _aiofiles_run(work: Workload) -> Measurement:
    """The aiofiles package, one handle per task."""
    aiofiles = importlib.import_module("aiofiles")
    data = os.urandom(work.bs)

    async def body(tally: _Tally, number: int) -> None:
        take = _offsets(work, number)
        async with aiofiles.open(work.path, "r+b", buffering=0) as handle:
            while not tally.is_over:
                started = time.monotonic_ns()
                await handle.seek(take())
                if work.is_read:
                    await handle.read(work.bs)
                else:
                    await handle.write(data)
                tally.done(started)

    return _run_tasks(work, body)


def _caio_run(work: Workload) -> Measurement:
    """The caio package with the backend it chooses."""
    caio = importlib.import_module("caio")
    data = os.urandom(work.bs)
    _drop_cache(work.path)
    fd = os.open(work.path, os.O_RDWR | os.O_CLOEXEC)

    async def main() -> Measurement:
        async with caio.AsyncioContext(max_requests=max(work.iodepth, 16)) as context:
            tally = _Tally(work)

            async def body(number: int) -> None:
                take = _offsets(work, number)
                while not tally.is_over:
                    started = time.monotonic_ns()
                    if work.is_read:
                        await context.read(work.bs, fd, take())
                    else:
                        await context.write(data, fd, take())
                    tally.done(started)

            async with anyio.create_task_group() as tasks:
                for number in range(work.iodepth):
                    tasks.start_soon(body, number)
            return tally.measurement()

    try:
        return asyncio.run(main())
    finally:
        os.close(fd)
        _drop_cache(work.path)


def _raw_block_run(work: Workload) -> Measurement:
    """LMCache's raw block engine on io_uring: two batches of half the depth, always one waiting."""
    module = importlib.import_module("lmcache_rust_raw_block_io")
    depth = max(2, work.iodepth)
    memory = open_memory(depth * work.bs, work.memory)
    view = memory.view()
    device = module.RawBlockDevice(
        str(work.path),
        True,
        use_odirect=True,
        alignment=4096,
        io_engine="io_uring",
        iouring_queue_depth=max(depth, 16),
    )
    notes = []
    try:
        device.register_fixed_buffers([memory.address], [memory.length])
    except (OSError, RuntimeError, ValueError) as error:
        notes.append(f"buffers not registered: {error}")
    tally = _Tally(work)
    lock = threading.Lock()
    failures: list[str] = []

    def body(half: int) -> None:
        take = _offsets(work, half)
        count = depth // 2
        first = half * count
        buffers = [
            view[(first + i) * work.bs : (first + i + 1) * work.bs].data for i in range(count)
        ]
        move = device.batched_read if work.is_read else device.batched_write
        while not tally.is_over and not failures:
            started = time.monotonic_ns()
            batch = move([take() for _ in range(count)], buffers, [work.bs] * count)
            _, errors = device.wait_iouring(batch)
            if errors:
                failures.append(str(errors[0]))
            with lock:
                for _ in range(count):
                    tally.done(started)

    threads = [threading.Thread(target=body, args=(half,)) for half in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.close()
    if failures:
        raise Unavailable(f"lmcache_rust_raw_block_io failed: {failures[0]}")
    result = tally.measurement()
    result.notes = notes
    return result


def _need_nixl() -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARNING")  # or each agent prints what it does
    try:
        importlib.import_module("nixl._api")
    except ImportError as error:
        raise Unavailable(f"nixl is not installed: {error}") from None


def _nixl_run(work: Workload, queue: str) -> Measurement:
    """NVIDIA's nixl, POSIX plugin on direct I/O: two requests of half the depth, one always open.

    Its requests are batches, and progress needs polling: one thread polls both without a pause.
    """
    api = importlib.import_module("nixl._api")
    name, backends = "kvstore-bench", ["POSIX"]
    count = max(1, work.iodepth // 2)
    memory = open_memory(2 * count * work.bs, work.memory)
    blocks = work.size // work.bs
    fd = os.open(work.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
        if "POSIX" not in agent.get_plugin_list():
            raise Unavailable("nixl has no POSIX plugin here")
        agent.create_backend("POSIX", {queue: "true"})
        registered = [
            agent.register_memory(
                [(memory.address, 2 * count * work.bs, 0, "")], "DRAM", backends=backends
            ),
            agent.register_memory([(0, work.size, fd, "")], "FILE", backends=backends),
        ]
        local = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT",
            [(memory.address + i * work.bs, work.bs, 0) for i in range(2 * count)],
            "DRAM",
            backends=backends,
        )
        remote = agent.prep_xfer_dlist(
            name,
            [(i * work.bs, work.bs, fd) for i in range(blocks)],
            "FILE",
            backends=backends,
        )
        tally, take = _Tally(work), _offsets(work, 0)

        def post(half: int) -> tuple[int, Any, str, int]:
            started = time.monotonic_ns()
            request = agent.make_prepped_xfer(
                "READ" if work.is_read else "WRITE",
                local,
                list(range(half * count, (half + 1) * count)),
                remote,
                [take() // work.bs for _ in range(count)],
                backends=backends,
                skip_desc_merge=True,
            )
            return half, request, agent.transfer(request), started

        open_requests = [post(0), post(1)]
        while open_requests:
            half, request, status, started = open_requests.pop(0)
            if status == "PROC":
                status = agent.check_xfer_state(request)
            if status == "PROC":
                open_requests.append((half, request, status, started))
                continue
            agent.release_xfer_handle(request)
            if status != "DONE":
                raise Unavailable(f"nixl ended a transfer with {status}")
            for _ in range(count):
                tally.done(started)
            if not tally.is_over:
                open_requests.append(post(half))
        for handle in (local, remote):
            agent.release_dlist_handle(handle)
        for descriptors in registered:
            agent.deregister_memory(descriptors, backends=backends)
    finally:
        os.close(fd)
    result = tally.measurement()
    result.notes = ["one thread polls all the time"]
    return result


def all_rivals(fio: str) -> list[Rival]:
    """Return the rivals in the order of the table."""
    return [
        fio_rival(fio, "io_uring"),
        own_rival("io_uring"),
        own_rival("io_uring", is_closed=True),
        own_rival("threads"),
        own_rival("threads", is_closed=True),
        own_rival("serial"),
        fio_rival(fio, "psync"),
        Rival(name="executor", caching="buffered", check=_nothing, run=_executor_run),
        Rival(
            name="aiofiles", caching="buffered", check=_need_module("aiofiles"), run=_aiofiles_run
        ),
        Rival(name="caio", caching="buffered", check=_need_module("caio"), run=_caio_run),
        Rival(
            name="lmcache-raw-block",
            caching="direct",
            check=_need_module("lmcache_rust_raw_block_io"),
            run=_raw_block_run,
        ),
        *(
            Rival(
                name=f"nixl-posix-{queue}",
                caching="direct",
                check=_need_nixl,
                run=functools.partial(_nixl_run, queue=f"use_{queue}"),
            )
            for queue in ("aio", "uring")
        ),
    ]
