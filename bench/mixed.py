"""``kvstore-bench mixed``: what priorities are worth, as JSON rows and a table.

Restores arrive at a share of the disk's own read rate while required writes come steadily and
background writes are always backlogged; the same load runs under our scheduler, under strict
priority, in one FIFO ring and on the threads engine. Further experiments: small reads against
saturating writers, a blocked event loop, the loop lag of full-speed I/O, and an idle store.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import click
import numpy as np

from kvstore._uring.base import OK, SUBMISSION_DTYPE, CompletionFlag, Opcode
from kvstore.config import IoClass

from . import cli, machine
from .fioformat import snapshot_json
from .io import bad_job, check_output, output_formats
from .iofiles import check_directory
from .ioloop import Lane
from .iorun import run_jobs, usage_now, usage_since
from .iostats import Latencies, median, snapshot_since
from .iosystem import System, io_config, open_system
from .jobs import GIB, KIB, MIB, JobError, JobSpec, parse_size, parse_time
from .looplag import LagProbe

READ_FILE, WRITE_FILE = "kvstore-bench-mixed-read.dat", "kvstore-bench-mixed-write.dat"
RESTORE_BYTES, PAGE_BYTES = 16 * MIB, 4 * MIB
RESTORES_OPEN_MAX = 48
REQUIRED_PER_S, REQUIRED_DEPTH = 20, 32
BACKGROUND_DEPTH = 32
NEVER_S = 1e6
EXPERIMENTS = ("restore60", "restore90", "small", "blocked", "lag", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a load: engine, policy, and the job fields that differ."""

    name: str
    ioengine: str = "io_uring"
    policy: str = "kvstore"
    kernel_rings: int = 1
    is_strict: bool = False  # no turns: a class waits until those above are empty
    inflight_bytes: int = 0

    def job(self, **values: Any) -> JobSpec:
        """Return a job of this variant."""
        return JobSpec(
            ioengine=self.ioengine,
            policy=self.policy,
            kernel_rings=self.kernel_rings,
            inflight_bytes=self.inflight_bytes,
            time_based=True,
            **values,
        )


OURS = Variant(name="io_uring")
VARIANTS = (
    OURS,
    Variant(name="io_uring, three rings", kernel_rings=3),
    Variant(name="io_uring, strict priority", is_strict=True),
    Variant(name="io_uring, one FIFO ring", policy="fifo"),
    Variant(name="threads", ioengine="threads"),
    Variant(name="threads, upstream policy", ioengine="threads", policy="upstream"),
)


def spread_json(values: Latencies) -> dict[str, float]:
    """Return the percentiles that the tables show."""
    return {
        "N": values.total,
        "mean": values.mean_ns,
        "p50": values.percentile_ns(50),
        "p90": values.percentile_ns(90),
        "p99": values.percentile_ns(99),
        "max": values.max_ns,
    }


class Restores:
    """Restores of 16 MiB, four pages each, arriving at random times whatever the disk does.

    The latency counts from the arrival to the last page, the wait for a buffer included.
    """

    def __init__(
        self,
        system: System,
        file_id: int,
        address: int,
        region_bytes: int,
        per_second: float,
        rng: np.random.Generator,
    ) -> None:
        self.lat = Latencies()
        self.window_ns = 0
        self.moved_bytes = 0
        self.failed = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._system = system
        self._region_blocks = region_bytes // RESTORE_BYTES
        self._gap_s = 1.0 / per_second
        self._rng = rng
        self._stopping = False
        self._waiting: deque[int] = deque()
        self._free = list(range(RESTORES_OPEN_MAX))
        self._pages = RESTORE_BYTES // PAGE_BYTES
        records = np.zeros((RESTORES_OPEN_MAX, self._pages), SUBMISSION_DTYPE)
        count = RESTORES_OPEN_MAX * self._pages
        records["address"] = address + (
            np.arange(count, dtype=np.uint64) * np.uint64(PAGE_BYTES)
        ).reshape(records.shape)
        records["payload_bytes"] = PAGE_BYTES
        records["file_id"] = file_id
        records["gate_word"] = -1
        records["opcode"] = Opcode.READ
        records["io_class"] = IoClass.READ
        self._records = records

    async def run(self) -> None:
        """Let restores arrive until `stop`."""
        due = time.monotonic_ns()
        while not self._stopping:
            due += int(self._rng.exponential(self._gap_s) * 1e9)
            delay = (due - time.monotonic_ns()) / 1e9
            if delay > 0:
                await asyncio.sleep(delay)
            self._waiting.append(due)
            self._start()

    def stop(self) -> None:
        """Let nothing arrive any more and forget what has no buffer yet."""
        self._stopping = True
        self._waiting.clear()

    def _start(self) -> None:
        while self._waiting and self._free:
            arrived_ns, slot = self._waiting.popleft(), self._free.pop()
            self.idle.clear()
            left = [self._pages, OK]
            records = self._records[slot].copy()
            base = int(self._rng.integers(0, self._region_blocks)) * RESTORE_BYTES
            records["offset"] = base + np.arange(self._pages, dtype=np.uint64) * np.uint64(
                PAGE_BYTES
            )
            records["token"] = [
                self._system.queue.token(self._page(slot, arrived_ns, left))
                for _ in range(self._pages)
            ]
            self._system.engine.submit(self._system.queue, records)

    def _page(self, slot: int, arrived_ns: int, left: list[int]) -> Callable[[int, int, int], None]:
        def completed(status: int, flags: int, value: int) -> None:
            del value
            left[1] = left[1] or status
            if not flags & CompletionFlag.END:
                return
            left[0] -= 1
            if left[0]:
                return
            self._free.append(slot)
            now = time.monotonic_ns()
            if left[1] != OK:
                self.failed += 1
            elif arrived_ns >= self.window_ns:
                self.moved_bytes += RESTORE_BYTES
                self.lat.add(np.array([now - arrived_ns], np.int64))
            self._start()
            if len(self._free) == RESTORES_OPEN_MAX:
                self.idle.set()

        return completed


@dataclass(slots=True, kw_only=True)
class Settings:
    """What all experiments share."""

    directory: Path
    size: int
    runtime: float
    ramp_time: float
    repeats: int
    variants: list[Variant]
    say: Callable[[str], None]

    def job(self, variant: Variant, **values: Any) -> JobSpec:
        """Return a job in the directory that runs for the run time."""
        return variant.job(
            directory=str(self.directory),
            size=self.size,
            runtime=self.runtime,
            memory="huge",
            ramp_time=self.ramp_time,
            **values,
        )


def _open(variant: Variant, job: JobSpec, memory_bytes: int) -> System:
    config = io_config(job)
    if variant.is_strict:
        config = replace(config, required_age=NEVER_S, background_age=NEVER_S)
    return open_system(job, memory_bytes, config=config)


async def _load(
    settings: Settings,
    variant: Variant,
    *,
    restores_per_s: float = 0.0,
    small_reads: int = 0,
    small_bytes: int = 256 * KIB,
    required: str = "",
    has_background: bool = False,
    block_loop: bool = False,
    seed: int = 1,
) -> dict[str, Any]:
    """Run one load for the run time and return its row."""
    jobs: list[tuple[str, JobSpec, str]] = []
    if small_reads:
        jobs.append(
            (
                "small",
                settings.job(
                    variant,
                    name="small",
                    rw="randread",
                    bs=(small_bytes, small_bytes),
                    iodepth=small_reads,
                    randseed=seed,
                ),
                READ_FILE,
            )
        )
    if required:
        rate = (
            {"rate_iops": (REQUIRED_PER_S,) * 2, "rate_process": "poisson"}
            if required == "steady"
            else {}
        )
        jobs.append(
            (
                "required",
                settings.job(
                    variant,
                    name="required",
                    rw="randwrite",
                    bs=(PAGE_BYTES, PAGE_BYTES),
                    iodepth=REQUIRED_DEPTH,
                    prio="required",
                    randseed=seed + 1,
                    **rate,
                ),
                WRITE_FILE,
            )
        )
    if has_background:
        jobs.append(
            (
                "background",
                settings.job(
                    variant,
                    name="background",
                    rw="randwrite",
                    bs=(PAGE_BYTES, PAGE_BYTES),
                    iodepth=BACKGROUND_DEPTH,
                    prio="background",
                    randseed=seed + 2,
                ),
                WRITE_FILE,
            )
        )
    first = (
        jobs[0][1] if jobs else settings.job(variant, name="restore", bs=(PAGE_BYTES, PAGE_BYTES))
    )
    restore_bytes = RESTORES_OPEN_MAX * RESTORE_BYTES if restores_per_s else 0
    total = restore_bytes + sum(job.iodepth * job.block_bytes_max for _, job, _ in jobs)
    system = _open(variant, first, total or MIB)
    try:
        return await _run_load(
            settings,
            variant,
            system,
            jobs,
            restores_per_s=restores_per_s,
            restore_bytes=restore_bytes,
            block_loop=block_loop,
            seed=seed,
        )
    finally:
        await system.aclose()


async def _run_load(
    settings: Settings,
    variant: Variant,
    system: System,
    jobs: list[tuple[str, JobSpec, str]],
    *,
    restores_per_s: float,
    restore_bytes: int,
    block_loop: bool,
    seed: int,
) -> dict[str, Any]:
    address = system.memory.address + restore_bytes
    lanes: dict[str, Lane] = {}
    for name, job, file_name in jobs:
        file_id, _ = system.files.open(settings.directory / file_name, settings.size, direct=True)
        lanes[name] = Lane(
            job,
            engine=system.engine,
            queue=system.queue,
            file_id=file_id,
            address=address,
            region_bytes=settings.size,
            seed=seed,
            clock_ns=time.monotonic_ns,
        )
        address += job.iodepth * job.block_bytes_max
    restores = None
    if restores_per_s:
        file_id, _ = system.files.open(settings.directory / READ_FILE, settings.size, direct=True)
        restores = Restores(
            system,
            file_id,
            system.memory.address,
            settings.size,
            restores_per_s,
            np.random.default_rng(seed),
        )
    start = time.monotonic_ns()
    window_ns = start + int(settings.ramp_time * 1e9)
    for lane in lanes.values():
        lane.window_ns = window_ns
        lane.start()
    probe = LagProbe()
    async with anyio.create_task_group() as tasks:
        if restores is not None:
            restores.window_ns = window_ns
            tasks.start_soon(restores.run)
        blocker = anyio.CancelScope()
        if block_loop:
            tasks.start_soon(_block, blocker)
        await asyncio.sleep(settings.ramp_time)
        before, usage, window = system.engine.stats(), usage_now(), time.monotonic_ns()
        probe.start()
        await asyncio.sleep(settings.runtime)
        end = time.monotonic_ns()
        after, used = system.engine.stats(), usage_since(usage, (end - window) / 1e9)
        probe.stop()
        for lane in lanes.values():
            lane.flush()
        moved = {name: lane.read.io_bytes + lane.write.io_bytes for name, lane in lanes.items()}
        restored = restores.moved_bytes if restores is not None else 0
        blocker.cancel()
        for lane in lanes.values():
            lane.stop()
        if restores is not None:
            restores.stop()
            tasks.cancel_scope.cancel()
    for lane in lanes.values():
        await lane.done
    if restores is not None:
        await restores.idle.wait()
    seconds = (end - window) / 1e9
    total = sum(moved.values()) + restored
    row: dict[str, Any] = {
        "variant": variant.name,
        "engine": system.engine.name,
        "policy": "strict" if variant.is_strict else variant.policy,
        "cpu_s_per_gib": (used.user_s + used.system_s) / (total / GIB) if total else 0.0,
        "loop_lag_ns": spread_json(probe.lag),
        "service_ns": {
            io_class.name.lower(): snapshot_json(
                snapshot_since(after.classes[io_class].service, before.classes[io_class].service)
            )
            for io_class in IoClass
            if after.classes[io_class].pieces
        },
    }
    if restores is not None:
        row["restore_ns"] = spread_json(restores.lat)
        row["restore_bw_bytes"] = restored / seconds
        row["restores_offered_per_s"] = restores_per_s
        row["failed"] = restores.failed
    for name, lane in lanes.items():
        side = lane.read if lane.job.reads else lane.write
        row[f"{name}_ns"] = spread_json(side.lat)
        row[f"{name}_bw_bytes"] = moved[name] / seconds
        row["failed"] = row.get("failed", 0) + side.failed_ios
    return row


async def _block(scope: anyio.CancelScope) -> None:
    """Keep the loop busy 50 ms of every 55, as a long scheduler step does."""
    with scope:
        while True:
            time.sleep(0.050)  # noqa: ASYNC251  (blocking is the point)
            await asyncio.sleep(0.005)


# ---- experiments --------------------------------------------------------------------------------


def read_rate(settings: Settings) -> float:
    """Return the disk's read rate in bytes per second: 4 MiB reads, 16 MiB in flight."""
    job = replace(
        settings.job(
            OURS, name="rate", filename=READ_FILE, rw="randread", bs=(PAGE_BYTES,) * 2, iodepth=4
        ),
        runtime=min(3.0, settings.runtime),
    )
    result = asyncio.run(run_jobs([job]))
    figures = result.jobs[0]
    return figures.read.io_bytes / (figures.runtime_ns / 1e9)


def restore_rows(settings: Settings, share: float) -> Iterator[dict[str, Any]]:
    """Restores at ``share`` of the read rate: alone, then with writers on every variant."""
    for number in range(settings.repeats):
        rate = read_rate(settings)
        per_second = share * rate / RESTORE_BYTES
        settings.say(f"read rate {rate / MIB:.0f} MiB/s, {per_second:.1f} restores/s")
        common = {"experiment": f"restore{round(share * 100)}", "repeat": number, "read_rate": rate}
        seed = 10 * number + 1
        alone = asyncio.run(_load(settings, OURS, restores_per_s=per_second, seed=seed))
        yield {**common, **alone, "variant": "io_uring, no writers"}
        shift = number % len(settings.variants)
        for variant in settings.variants[shift:] + settings.variants[:shift]:
            row = asyncio.run(
                _load(
                    settings,
                    variant,
                    restores_per_s=per_second,
                    required="steady",
                    has_background=True,
                    seed=seed,
                )
            )
            yield {**common, **row}


def small_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """256 KiB reads at depth 1: alone, against background and against required writers."""
    loads: list[tuple[str, dict[str, Any]]] = [
        ("alone", {}),
        ("background", {"has_background": True}),
        ("required", {"required": "flood"}),
    ]
    for number in range(settings.repeats):
        for variant in settings.variants:
            for writers, load in loads:
                row = asyncio.run(_load(settings, variant, small_reads=1, seed=number + 1, **load))
                yield {"experiment": "small", "repeat": number, "writers": writers, **row}


def blocked_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """A loop blocked 50 ms of every 55: 256 KiB pieces, four in the device, many accepted."""
    narrow = [
        replace(variant, inflight_bytes=MIB)
        for variant in settings.variants
        if variant.policy == "kvstore" and not variant.is_strict
    ]
    for number in range(settings.repeats):
        for variant in narrow:
            for block_loop in (False, True):
                row = asyncio.run(
                    _load(
                        settings, variant, small_reads=512, block_loop=block_loop, seed=number + 1
                    )
                )
                yield {"experiment": "blocked", "repeat": number, "loop_blocked": block_loop, **row}


def lag_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """The loop's lag with nothing to do, and with 64 KiB reads at full speed."""
    for number in range(settings.repeats):
        for variant in settings.variants:
            if variant.policy != "kvstore" or variant.is_strict:
                continue
            idle = asyncio.run(_load(settings, variant, seed=number + 1))
            yield {"experiment": "lag", "repeat": number, "load": "idle", **idle}
            busy = asyncio.run(
                _load(settings, variant, small_reads=32, small_bytes=64 * KIB, seed=number + 1)
            )
            yield {"experiment": "lag", "repeat": number, "load": "64 KiB reads", **busy}


def _switches() -> dict[str, int]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for line in (task / "status").read_text(encoding="utf-8").splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    found[task.name] = int(line.split()[1])
    return found


async def _idle(settings: Settings, variant: Variant, seconds: float) -> dict[str, Any]:
    """Count the voluntary context switches of every thread while the engine has nothing to do.

    A pipe that nobody writes to and one long timer keep the loop in its selector the whole time.
    """
    system = _open(variant, settings.job(variant, name="idle"), MIB)
    try:
        file_id, _ = system.files.open(settings.directory / READ_FILE, settings.size, direct=True)
        job = replace(
            settings.job(variant, name="idle", rw="randread", bs=(64 * KIB,) * 2, iodepth=8),
            runtime=0.0,
            time_based=False,
            size=8 * MIB,
            ramp_time=0.0,
        )
        lane = Lane(
            job,
            engine=system.engine,
            queue=system.queue,
            file_id=file_id,
            address=system.memory.address,
            region_bytes=settings.size,
            seed=1,
            clock_ns=time.monotonic_ns,
        )
        lane.start()
        await lane.done
        await asyncio.sleep(0.5)
        before = _switches()
        await asyncio.sleep(seconds)  # one switch of this thread: its own timer
        after = _switches()
    finally:
        await system.aclose()
    own = str(threading.get_native_id())
    changes = {task: count - before.get(task, 0) for task, count in after.items()}
    changes[own] = changes.get(own, 0) - 1
    return {
        "variant": variant.name,
        "engine": system.engine.name,
        "seconds": seconds,
        "threads": len(after),
        "switches": sum(changes.values()),
        "switches_by_thread": sorted(changes.values(), reverse=True),
    }


def idle_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """An idle engine wakes nobody (INV-129)."""
    for variant in settings.variants:
        if variant.policy == "kvstore" and not variant.is_strict:
            yield {
                "experiment": "idle",
                "repeat": 0,
                **asyncio.run(_idle(settings, variant, min(5.0, settings.runtime))),
            }


def rows_of(settings: Settings, names: list[str]) -> Iterator[dict[str, Any]]:
    """Run the experiments and yield their rows as they come."""
    makers: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "restore60": lambda: restore_rows(settings, 0.6),
        "restore90": lambda: restore_rows(settings, 0.9),
        "small": lambda: small_rows(settings),
        "blocked": lambda: blocked_rows(settings),
        "lag": lambda: lag_rows(settings),
        "idle": lambda: idle_rows(settings),
    }
    for name in names:
        for row in makers[name]():
            settings.say(describe_row(row))
            yield row


# ---- summary ------------------------------------------------------------------------------------


def _load_text(row: dict[str, Any]) -> str:
    """Return what the row's load was, beyond its experiment."""
    if "loop_blocked" in row:
        return "loop blocked" if row["loop_blocked"] else "loop free"
    return str(row.get("writers") or row.get("load") or "")


def describe_row(row: dict[str, Any]) -> str:
    """Return one line about a row."""
    parts = [f"{row['experiment']}: {row['variant']}"]
    if load := _load_text(row):
        parts.append(load)
    parts += [
        f"{name} p50 / p99 {_ms(row, f'{name}_ns')} ms"
        for name in ("restore", "small", "required")
        if f"{name}_ns" in row
    ]
    parts += [
        f"{name} {row[f'{name}_bw_bytes'] / MIB:.0f} MiB/s"
        for name in ("restore", "small", "background")
        if f"{name}_bw_bytes" in row
    ]
    if "switches" in row:
        parts.append(f"{row['switches']} switches of {row['threads']} threads")
    elif row.get("cpu_s_per_gib"):
        parts.append(f"cpu {row['cpu_s_per_gib']:.3f} s/GiB")
    return ", ".join(parts)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        row["experiment"],
        row["variant"],
        row.get("writers"),
        row.get("loop_blocked"),
        row.get("load"),
    )


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per load and variant: medians over the repeats, and the range of p99."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return [_summary(group) for group in groups.values()]


def _summary(group: list[dict[str, Any]]) -> dict[str, Any]:
    first = group[0]
    keep = ("experiment", "variant", "writers", "loop_blocked", "load", "engine", "policy")
    out: dict[str, Any] = {key: first[key] for key in keep if key in first}
    out["repeats"] = len(group)
    for key, value in first.items():
        if key.endswith("_ns") and isinstance(value, dict) and "p50" in value:
            out[key] = {
                name: median([row[key][name] for row in group])
                for name in ("mean", "p50", "p90", "p99", "max")
            }
            out[key]["p99_range"] = [
                min(row[key]["p99"] for row in group),
                max(row[key]["p99"] for row in group),
            ]
        elif key.endswith("_bw_bytes") or key in (
            "cpu_s_per_gib",
            "switches",
            "read_rate",
            "failed",
        ):
            out[key] = median([row[key] for row in group])
    service = [row.get("service_ns", {}).get("read") for row in group]
    if all(service):
        out["read_service_ns"] = {
            "p50": median([entry["percentile"]["50.000000"] for entry in service if entry]),
            "p99": median([entry["percentile"]["99.000000"] for entry in service if entry]),
        }
    return out


def _ms(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return "-"
    return f"{row[key]['p50'] / 1e6:.2f} / {row[key]['p99'] / 1e6:.2f}"


def _rate(row: dict[str, Any], key: str) -> str:
    return f"{row[key] / MIB:.0f}" if key in row else "-"


def table_text(rows: list[dict[str, Any]]) -> str:
    """Return the summary as Markdown tables, one per experiment."""
    parts = []
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        mine = [row for row in rows if row["experiment"] == experiment]
        parts += [f"**{experiment}**", ""]
        if experiment == "idle":
            parts += ["| variant | context switches |", "|---|---|"]
            parts += [f"| {row['variant']} | {row['switches']:.0f} |" for row in mine]
        else:
            parts += [
                "| variant | load | restore p50 / p99 ms | small read p50 / p99 ms "
                "| required p50 / p99 ms | read MiB/s | background MiB/s "
                "| read service p50 / p99 ms | loop lag p99 ms | CPU s/GiB |",
                "|---|---|---|---|---|---|---|---|---|---|",
            ]
            for row in mine:
                read = "restore_bw_bytes" if "restore_bw_bytes" in row else "small_bw_bytes"
                parts.append(
                    f"| {row['variant']} | {_load_text(row) or '-'} "
                    f"| {_ms(row, 'restore_ns')} | {_ms(row, 'small_ns')} "
                    f"| {_ms(row, 'required_ns')} | {_rate(row, read)} "
                    f"| {_rate(row, 'background_bw_bytes')} "
                    f"| {_ms(row, 'read_service_ns')} | {row['loop_lag_ns']['p99'] / 1e6:.2f} | "
                    f"{row['cpu_s_per_gib']:.3f} |"
                )
        parts.append("")
    return "\n".join(parts)


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in EXPERIMENTS:
            raise JobError("--experiments", f"must be among {', '.join(EXPERIMENTS)}, got {name!r}")
    return names or list(EXPERIMENTS)


def _variants(text: str) -> list[Variant]:
    known = {variant.name: variant for variant in VARIANTS}
    names = [part.strip() for part in text.split(";") if part.strip()]
    for name in names:
        if name not in known:
            raise JobError("--variants", f"must be among {'; '.join(known)}, got {name!r}")
    return [known[name] for name in names] or list(VARIANTS)


def run_mixed(options: dict[str, Any]) -> dict[str, Any]:
    """Check the options, run, and return the result; the body of the command.

    Raises: JobError.
    """

    def say(line: str) -> None:
        click.echo(line, err=True)

    formats = output_formats(options["output_format"])
    check_output(options["output"])
    directory = check_directory(options["directory"])
    names, variants = _names(options["experiments"]), _variants(options["variants"])
    numbers = {}
    for name, parse in (("size", parse_size), ("runtime", parse_time), ("ramp_time", parse_time)):
        try:
            numbers[name] = parse(options[name])
        except ValueError as error:
            raise JobError(f"--{name}", str(error)) from None
    size = int(numbers["size"])
    if size < 64 * MIB or size % RESTORE_BYTES:
        raise JobError("--size", "must be a multiple of 16m and at least 64m")
    settings = Settings(
        directory=directory,
        size=size,
        runtime=numbers["runtime"],
        ramp_time=numbers["ramp_time"],
        repeats=options["repeats"],
        variants=variants,
        say=say,
    )
    try:
        _lay_out(settings)
        rows = list(rows_of(settings, names))
    finally:
        if not options["keep"]:
            for name in (READ_FILE, WRITE_FILE):
                (directory / name).unlink(missing_ok=True)
    result: dict[str, Any] = {
        "kind": "mixed",
        "version": cli.package_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": machine.describe(directory),
        "options": {key: value for key, value in options.items() if key != "output"},
        "rows": rows,
        "summary": summarize(rows),
    }
    if "normal" in formats:
        click.echo(machine.describe_text(result["host"]))
        click.echo(table_text(result["summary"]), nl=False)
    text = json.dumps(result, indent=2) + "\n"
    if options["output"] is not None:
        Path(options["output"]).write_text(text, encoding="utf-8")
    elif "json" in formats:
        click.echo(text, nl=False)
    return result


def _lay_out(settings: Settings) -> None:
    for name in (READ_FILE, WRITE_FILE):
        settings.say(f"laying out {name}")
        job = replace(
            settings.job(
                OURS, name="layout", filename=name, rw="read", bs=(PAGE_BYTES,) * 2, iodepth=4
            ),
            runtime=0.01,
            ramp_time=0.0,
            time_based=True,
        )
        asyncio.run(run_jobs([job]))


@click.command()
@click.option("--directory", required=True, help="the only place where files are made")
@click.option(
    "--experiments", default="", help=f"a list of {', '.join(EXPERIMENTS)} (default: all)"
)
@click.option("--variants", default="", help="engines and policies, ';' between (default: all)")
@click.option("--size", default="4g", show_default=True, help="bytes of each of the two files")
@click.option("--runtime", default="10", show_default=True, help="measured seconds per run")
@click.option("--ramp_time", default="1", show_default=True, help="seconds before measuring")
@click.option("--repeats", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option("--keep", is_flag=True, help="leave the files for another run")
@click.option(
    "--output-format",
    "output_format",
    default="normal",
    show_default=True,
    help="normal, json, or both with a comma between",
)
@click.option("--output", help="write the JSON to this file")
def command(**options: Any) -> None:
    """Measure restores, small reads and the loop while writers saturate the disk.

    The same loads under our scheduler, under strict priority, in one FIFO ring and on threads.
    """
    try:
        run_mixed(options)
    except JobError as error:
        raise bad_job(error) from None
