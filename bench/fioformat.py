"""The result of an I/O run in fio's shapes: JSON with fio's keys, and fio's text.

Times in the JSON are nanoseconds where the key says ``_ns``, milliseconds in ``runtime`` and
``job_runtime``, bandwidth is bytes per second in ``bw_bytes`` and KiB per second in ``bw``.
What fio does not know (classes, CPU per GiB, loop lag) is in keys of its own under ``kvstore``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.config import IoClass
from kvstore.stats import ClassStats, EngineStats, LatencySnapshot

from .iostats import PERCENTILES, Direction, Latencies, snapshot_since
from .jobs import JobSpec, job_options, size_text

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(slots=True)
class Usage:
    """What the process used in the measured window: seconds and counts."""

    user_s: float = 0.0
    system_s: float = 0.0
    context_switches: int = 0
    major_faults: int = 0
    minor_faults: int = 0
    wall_s: float = 0.0

    def share(self, part: float) -> Usage:
        """Return this usage scaled to one job's part of the transfers."""
        return Usage(
            self.user_s * part,
            self.system_s * part,
            round(self.context_switches * part),
            round(self.major_faults * part),
            round(self.minor_faults * part),
            self.wall_s,
        )


@dataclass(slots=True)
class JobResult:
    """One reported job: a clone, or all clones of a group under ``group_reporting``."""

    spec: JobSpec
    group_id: int
    clones: int = 1
    read: Direction = field(default_factory=Direction)
    write: Direction = field(default_factory=Direction)
    runtime_ns: int = 0
    usage: Usage = field(default_factory=Usage)
    error: int = 0
    skips: int = 0
    depth_counts: dict[int, int] = field(default_factory=dict)
    verified: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GroupRun:
    """What the jobs of one group shared: the engine, its counters and the loop's lag."""

    stats_before: EngineStats
    stats_after: EngineStats
    usage: Usage
    lag: Latencies
    huge_pages: bool
    direct: str = ""


@dataclass(slots=True)
class RunResult:
    """All of a run, in order."""

    jobs: list[JobResult] = field(default_factory=list)
    groups: list[GroupRun] = field(default_factory=list)
    started_at: float = 0.0
    version: str = ""
    host: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def latency_json(values: Latencies, *, percentiles: bool) -> dict[str, Any]:
    """Return fio's ``clat_ns`` object."""
    result: dict[str, Any] = {
        "min": values.min_ns,
        "max": values.max_ns,
        "mean": values.mean_ns,
        "stddev": values.stddev_ns,
        "N": values.total,
    }
    if percentiles and values.total:
        result["percentile"] = {f"{p:.6f}": values.percentile_ns(p) for p in PERCENTILES}
    return result


def snapshot_json(values: LatencySnapshot) -> dict[str, Any]:
    """Return an engine histogram with fio's keys."""
    mean = values.sum_ns / values.total if values.total else 0.0
    return {
        "N": values.total,
        "mean": mean,
        "max": values.max_ns,
        "percentile": {f"{p:.6f}": values.percentile_ns(p) for p in (50, 90, 95, 99, 99.9)},
    }


def _samples_json(samples: list[float], scale: float) -> dict[str, float]:
    if not samples:
        return {"min": 0, "max": 0, "mean": 0.0, "dev": 0.0, "samples": 0}
    array = np.asarray(samples) / scale
    deviation = float(array.std(ddof=1)) if len(array) > 1 else 0.0
    return {
        "min": int(array.min()),
        "max": int(array.max()),
        "mean": float(array.mean()),
        "dev": deviation,
        "samples": len(samples),
    }


def direction_json(side: Direction, runtime_ns: int) -> dict[str, Any]:
    """Return fio's ``read`` or ``write`` object."""
    seconds = runtime_ns / 1e9
    rate = side.io_bytes / seconds if side.total_ios and seconds else 0.0
    bw, iops = _samples_json(side.bw_samples, KIB), _samples_json(side.iops_samples, 1.0)
    return {
        "io_bytes": side.io_bytes,
        "io_kbytes": side.io_bytes // KIB,
        "bw_bytes": int(rate),
        "bw": int(rate / KIB),
        "iops": side.total_ios / seconds if seconds else 0.0,
        "runtime": int(runtime_ns / 1e6) if side.total_ios else 0,
        "total_ios": side.total_ios,
        "short_ios": 0,
        "drop_ios": side.failed_ios,
        "slat_ns": latency_json(side.slat, percentiles=False),
        "clat_ns": latency_json(side.clat, percentiles=True),
        "lat_ns": latency_json(side.lat, percentiles=False),
        "bw_min": bw["min"],
        "bw_max": bw["max"],
        "bw_agg": 100.0 if side.total_ios else 0.0,
        "bw_mean": bw["mean"],
        "bw_dev": bw["dev"],
        "bw_samples": bw["samples"],
        "iops_min": iops["min"],
        "iops_max": iops["max"],
        "iops_mean": iops["mean"],
        "iops_stddev": iops["dev"],
        "iops_samples": iops["samples"],
    }


def class_json(now: ClassStats, before: ClassStats) -> dict[str, Any]:
    """Return one I/O class: what it moved, how long it waited and how long the device took."""

    def delta(name: str) -> int:
        return int(getattr(now, name) - getattr(before, name))

    return {
        "transfers": delta("transfers"),
        "pieces": delta("pieces"),
        "io_bytes": delta("done_bytes"),
        "queue_wait_ns": snapshot_json(snapshot_since(now.queue_wait, before.queue_wait)),
        "service_ns": snapshot_json(snapshot_since(now.service, before.service)),
        "promotions": delta("promotions"),
        "aged_dispatches": delta("aged_dispatches"),
        "withdrawn_bytes": delta("withdrawn_bytes"),
        "failed_bytes": delta("failed_bytes"),
        "errors": {
            str(code): count - before.errors.get(code, 0)
            for code, count in now.errors.items()
            if count - before.errors.get(code, 0)
        },
    }


def classes_json(group: GroupRun, skips: int) -> dict[str, Any]:
    """Return the classes that did anything; ``skips`` are background transfers not issued."""
    result = {}
    for io_class in IoClass:
        now = group.stats_after.classes[io_class]
        entry = class_json(now, group.stats_before.classes[io_class])
        entry["skips"] = skips if io_class is IoClass.BACKGROUND else 0
        if entry["transfers"] or entry["pieces"] or entry["skips"]:
            result[io_class.name.lower()] = entry
    return result


def cpu_seconds_per_gib(usage: Usage, io_bytes: int) -> float:
    """Return CPU seconds of the whole process, kernel threads of its rings included, per GiB."""
    return (usage.user_s + usage.system_s) / (io_bytes / GIB) if io_bytes else 0.0


def job_json(job: JobResult, group: GroupRun) -> dict[str, Any]:
    """Return one entry of ``jobs``."""
    wall = job.usage.wall_s or 1.0
    issued = sum(job.depth_counts.values()) or 1
    moved = job.read.io_bytes + job.write.io_bytes
    after = group.stats_after
    return {
        "jobname": job.spec.name,
        "groupid": job.group_id,
        "error": job.error,
        "eta": 0,
        "elapsed": max(1, round(wall)),
        "job options": job_options(job.spec),
        "read": direction_json(job.read, job.runtime_ns),
        "write": direction_json(job.write, job.runtime_ns),
        "job_runtime": int(job.runtime_ns / 1e6),
        "usr_cpu": job.usage.user_s / wall * 100,
        "sys_cpu": job.usage.system_s / wall * 100,
        "ctx": job.usage.context_switches,
        "majf": job.usage.major_faults,
        "minf": job.usage.minor_faults,
        "iodepth_level": {
            _depth_key(step): 100.0 * job.depth_counts.get(step, 0) / issued
            for step in (1, 2, 4, 8, 16, 32, 64)
        },
        "kvstore": {
            "engine": after.engine,
            "fallback_reason": after.fallback_reason,
            "ring_flags": list(after.ring_flags),
            "kernel_rings": after.kernel_rings,
            "threads": after.threads,
            "registered_buffers": after.registered_buffers,
            "huge_pages": group.huge_pages,
            "direct": group.direct,
            "bounds": dict(after.bounds),
            "classes": classes_json(group, job.skips),
            "cpu_s_per_gib": cpu_seconds_per_gib(job.usage, moved),
            "loop_lag_ns": latency_json(group.lag, percentiles=True),
            "retries": after.retries - group.stats_before.retries,
            "deadlines": after.deadlines - group.stats_before.deadlines,
            "mismatches": after.mismatches - group.stats_before.mismatches,
            "verified_ios": job.verified,
            "warnings": list(after.warnings),
            "notes": job.notes,
        },
    }


def _depth_key(step: int) -> str:
    return ">=64" if step == 64 else str(step)


def run_json(run: RunResult) -> dict[str, Any]:
    """Return the whole result with fio's top-level keys."""
    return {
        "fio version": f"kvstore-bench-{run.version}",
        "timestamp": int(run.started_at),
        "timestamp_ms": int(run.started_at * 1000),
        "time": time.strftime("%a %b %d %H:%M:%S %Y", time.gmtime(run.started_at)),
        "jobs": [job_json(job, run.groups[job.group_id]) for job in run.jobs],
        "disk_util": [],
        "kvstore": {"host": run.host, "notes": run.notes},
    }


# ---- text ---------------------------------------------------------------------------------------


def _unit(value_ns: float) -> tuple[str, float]:
    if value_ns >= 10e6:
        return "msec", 1e6
    if value_ns >= 10e3:
        return "usec", 1e3
    return "nsec", 1.0


def rate_text(rate: float) -> str:
    """Return ``1234MiB/s (1294MB/s)``."""
    return f"{_binary(rate)}/s ({_decimal(rate)}/s)"


def _binary(count: float) -> str:
    for unit, factor in (("GiB", 10 * GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            scale = GIB if unit == "GiB" else factor
            return (
                f"{count / scale:.4g}{unit}"
                if count / scale < 1000
                else f"{count / scale:.0f}{unit}"
            )
    return f"{count:.0f}B"


def _decimal(count: float) -> str:
    for unit, factor in (("GB", 1e10), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            scale = 1e9 if unit == "GB" else factor
            return (
                f"{count / scale:.4g}{unit}"
                if count / scale < 1000
                else f"{count / scale:.0f}{unit}"
            )
    return f"{count:.0f}B"


def _count(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def _latency_line(label: str, values: Latencies) -> str:
    unit, scale = _unit(values.mean_ns)
    return (
        f"    {label} ({unit}): min={values.min_ns / scale:.4g}, max={values.max_ns / scale:.5g}, "
        f"avg={values.mean_ns / scale:.2f}, stdev={values.stddev_ns / scale:.2f}"
    )


def _percentile_lines(values: Latencies) -> list[str]:
    unit, scale = _unit(values.percentile_ns(50))
    cells = [f"{p:5.2f}th=[{values.percentile_ns(p) / scale:6.0f}]" for p in PERCENTILES]
    rows = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    last = len(rows) - 1
    return [f"    clat percentiles ({unit}):"] + [
        "     | " + ", ".join(row) + ("" if i == last else ",") for i, row in enumerate(rows)
    ]


def _direction_text(label: str, side: Direction, runtime_ns: int) -> list[str]:
    seconds = runtime_ns / 1e9 or 1.0
    rate = side.io_bytes / seconds
    lines = [
        f"  {label}: IOPS={_count(side.total_ios / seconds)}, BW={rate_text(rate)}"
        f"({_binary(side.io_bytes)}/{runtime_ns / 1e6:.0f}msec)"
        + (f"; {side.failed_ios} failed" if side.failed_ios else ""),
        _latency_line("slat", side.slat),
        _latency_line("clat", side.clat),
        _latency_line(" lat", side.lat),
        *_percentile_lines(side.clat),
    ]
    if side.bw_samples:
        bw = _samples_json(side.bw_samples, MIB)
        lines.append(
            f"   bw (  MiB/s): min={bw['min']}, max={bw['max']}, avg={bw['mean']:.2f}, "
            f"stdev={bw['dev']:.2f}, samples={bw['samples']}"
        )
        iops = _samples_json(side.iops_samples, 1.0)
        lines.append(
            f"   iops        : min={iops['min']}, max={iops['max']}, avg={iops['mean']:.2f}, "
            f"stdev={iops['dev']:.2f}, samples={iops['samples']}"
        )
    return lines


def _micro(value_ns: float) -> str:
    return f"{value_ns / 1e3:.0f}"


def _job_text(job: JobResult, group: GroupRun) -> list[str]:
    lines = [
        f"{job.spec.name}: (groupid={job.group_id}, jobs={job.clones}): err={job.error:2d}",
        *(f"  note        : {note}" for note in job.notes),
    ]
    for label, side in ((" read", job.read), ("write", job.write)):
        if side.total_ios or side.failed_ios:
            lines += _direction_text(label, side, job.runtime_ns)
    wall = job.usage.wall_s or 1.0
    lines.append(
        f"  cpu         : usr={job.usage.user_s / wall:.2%}, sys={job.usage.system_s / wall:.2%}, "
        f"ctx={job.usage.context_switches}, majf={job.usage.major_faults}, "
        f"minf={job.usage.minor_faults}"
    )
    issued = sum(job.depth_counts.values()) or 1
    levels = (1, 2, 4, 8, 16, 32, 64)
    depths = ", ".join(
        f"{_depth_key(step)}={100 * job.depth_counts.get(step, 0) / issued:.1f}%" for step in levels
    )
    lines.append(f"  IO depths   : {depths}")
    moved = job.read.io_bytes + job.write.io_bytes
    lines.append(f"  cpu per GiB : {cpu_seconds_per_gib(job.usage, moved):.3f} s")
    lag = group.lag
    lines.append(
        f"  loop lag    : p50={_micro(lag.percentile_ns(50))}, "
        f"p99={_micro(lag.percentile_ns(99))}, max={_micro(lag.max_ns)} usec"
    )
    for name, entry in classes_json(group, job.skips).items():
        wait, service = entry["queue_wait_ns"]["percentile"], entry["service_ns"]["percentile"]
        lines.append(
            f"  class       : {name}: wait p50={_micro(wait['50.000000'])}, "
            f"p99={_micro(wait['99.000000'])}; service p50={_micro(service['50.000000'])}, "
            f"p99={_micro(service['99.000000'])} usec; pieces={entry['pieces']}, "
            f"promoted={entry['promotions']}, aged={entry['aged_dispatches']}, "
            f"skips={entry['skips']}"
        )
    if job.verified:
        lines.append(f"  verify      : {job.verified} blocks good")
    return lines


def run_text(run: RunResult) -> str:
    """Return the result as fio would print it."""
    lines: list[str] = []
    for job in run.jobs:
        lines += ["", *_job_text(job, run.groups[job.group_id])]
    for group_id in range(len(run.groups)):
        members = [job for job in run.jobs if job.group_id == group_id]
        lines += ["", f"Run status group {group_id} (all jobs):"]
        for label, name in (("   READ", "read"), ("  WRITE", "write")):
            sides = [(getattr(job, name), job.runtime_ns) for job in members]
            sides = [(side, ns) for side, ns in sides if side.total_ios]
            if not sides:
                continue
            rates = [side.io_bytes / (ns / 1e9 or 1.0) for side, ns in sides]
            total = sum(side.io_bytes for side, _ in sides)
            times = [ns / 1e6 for _, ns in sides]
            lines.append(
                f"{label}: bw={rate_text(sum(rates))}, {_binary(min(rates))}/s-"
                f"{_binary(max(rates))}/s, io={_binary(total)}, "
                f"run={min(times):.0f}-{max(times):.0f}msec"
            )
    return "\n".join(lines) + "\n"


def header_text(job: JobSpec, group_id: int) -> str:
    """Return fio's line about a job before it starts."""
    read, write = job.bs
    sizes = f"bs=(R) {size_text(read)}, (W) {size_text(write)}"
    if job.bssplit is not None:
        sizes = f"bssplit={job_options(job)['bssplit']}"
    return (
        f"{job.name}: (g={group_id}): rw={job.rw}, {sizes}, ioengine={job.ioengine}, "
        f"iodepth={job.iodepth}, numjobs={job.numjobs}"
    )
