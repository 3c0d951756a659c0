"""Runs job groups: opens the engine, lays out files, starts the clones, takes the figures."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio

from . import machine
from .fioformat import GroupRun, JobResult, RunResult, Usage
from .iofiles import clone_path, region_bytes
from .ioloop import Clock, Lane
from .iostats import Direction, Latencies
from .iosystem import ENGINE_FIELDS, System, open_system
from .jobs import GIB, MIB, JobError, JobSpec, groups_of
from .looplag import LagProbe

SAMPLE_S = 0.5

#: Called every half second: lanes of the group, seconds since its start, seconds it will take.
Progress = Callable[[list[Lane], float, float], None]


def usage_now() -> Usage:
    """Return what this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        used.ru_utime,
        used.ru_stime,
        used.ru_nvcsw + used.ru_nivcsw,
        used.ru_majflt,
        used.ru_minflt,
        0.0,
    )


def usage_since(before: Usage, wall_s: float) -> Usage:
    """Return what the process used since ``before``."""
    now = usage_now()
    return Usage(
        now.user_s - before.user_s,
        now.system_s - before.system_s,
        now.context_switches - before.context_switches,
        now.major_faults - before.major_faults,
        now.minor_faults - before.minor_faults,
        wall_s,
    )


def _ignore(line: str) -> None:
    del line


async def run_jobs(
    jobs: list[JobSpec],
    *,
    progress: Progress | None = None,
    announce: Callable[[str], None] = _ignore,
    version: str = "",
) -> RunResult:
    """Run all groups in order and return their figures.

    Raises: JobError: a job cannot be run as written; nothing was measured.
    """
    result = RunResult(
        started_at=time.time(), version=version, host=machine.describe(jobs[0].directory)
    )
    loop = asyncio.get_running_loop()
    is_virtual = jobs[0].ioengine == "simulated"
    clock_ns: Clock = (lambda: round(loop.time() * 1e9)) if is_virtual else time.monotonic_ns
    groups = groups_of(jobs)
    for group in groups:
        _check_group(group)
    for group_id, group in enumerate(groups):
        run = _Group(group_id, group, clock_ns=clock_ns, announce=announce, progress=progress)
        await run.run(result)
    return result


def _check_group(group: list[JobSpec]) -> None:
    for job in group:
        for field in ENGINE_FIELDS:
            if getattr(job, field) != getattr(group[0], field):
                raise JobError(
                    f"--{field}", "differs between jobs that run together; use stonewall"
                )
        for clone in range(job.numjobs):
            region_bytes(job, clone_path(job, clone))
    total = sum(job.slots * job.numjobs * job.block_bytes_max for job in group)
    if total > 16 * GIB:
        raise JobError("--iodepth", f"needs {total / GIB:.0f} GiB of buffers")


class _Group:
    """One group from its engine's start to its end."""

    def __init__(
        self,
        group_id: int,
        jobs: list[JobSpec],
        *,
        clock_ns: Clock,
        announce: Callable[[str], None],
        progress: Progress | None,
    ) -> None:
        self._group_id = group_id
        self._jobs = jobs
        self._clock_ns = clock_ns
        self._announce = announce
        self._progress = progress
        self._lanes: list[tuple[int, Lane]] = []  # (job index, clone)
        self._seen: dict[Lane, tuple[int, int, int, int]] = {}
        self._measuring = False

    async def run(self, result: RunResult) -> None:
        jobs = self._jobs
        total = sum(job.slots * job.numjobs * job.block_bytes_max for job in jobs)
        system = open_system(jobs[0], total)
        try:
            await self._run(result, system)
        finally:
            with anyio.CancelScope(shield=True):
                for _, lane in self._lanes:
                    if lane.first_ns:
                        lane.stop()
                        await lane.done
                await system.aclose()

    def _lane(
        self,
        job: JobSpec,
        system: System,
        file_id: int,
        address: int,
        size: int,
        *,
        seed: int = 0,
        base: int = 0,
    ) -> Lane:
        return Lane(
            job,
            engine=system.engine,
            queue=system.queue,
            file_id=file_id,
            address=address,
            region_bytes=size,
            seed=seed,
            clock_ns=self._clock_ns,
            base=base,
        )

    async def _run(self, result: RunResult, system: System) -> None:
        address = system.memory.address
        mode = ""
        for index, job in enumerate(self._jobs):
            for clone in range(job.numjobs):
                path = clone_path(job, clone)
                size = region_bytes(job, path)
                file_id, mode = system.files.open(path, size, direct=job.direct)
                if job.reads and (job.verify != "none" or not system.files.is_written(path, size)):
                    self._announce(f"{job.name}: Laying out IO file (1 file / {size // MIB}MiB)")
                    await self._lay_out(job, system, file_id, address, size)
                seed = (self._group_id << 20) + (index << 10) + clone
                self._lanes.append(
                    (index, self._lane(job, system, file_id, address, size, seed=seed))
                )
                address += job.slots * job.block_bytes_max
        group = await self._measure(system)
        group.huge_pages = system.memory.huge_pages
        group.direct = mode
        await self._verify(system)
        result.groups.append(group)
        result.jobs += self._results(group)

    async def _lay_out(
        self, job: JobSpec, system: System, file_id: int, address: int, size: int
    ) -> None:
        """Write every block once, from the buffers of the job itself."""
        block = job.bs[0] if job.verify != "none" else job.block_bytes_max
        rest = 0 if job.verify != "none" else size % block // 4096 * 4096
        plain = replace(
            job,
            rw="write",
            bs=(block, block),
            bssplit=None,
            prio="auto",
            rate=(0, 0),
            rate_iops=(0, 0),
            time_based=False,
            ramp_time=0.0,
            deadline_ms=0.0,
        )
        body = size - size % block
        await self._finish(
            self._lane(replace(plain, size=body), system, file_id, address, body), "layout"
        )
        if rest:
            tail = replace(plain, bs=(4096, 4096), size=rest)
            await self._finish(
                self._lane(tail, system, file_id, address, rest, base=body), "layout"
            )

    async def _finish(self, lane: Lane, what: str) -> None:
        lane.start()
        try:
            await asyncio.shield(lane.done)
        finally:
            lane.stop()
            with anyio.CancelScope(shield=True):
                await lane.done
        if lane.error:
            raise JobError("--directory", f"{what} failed with errno {lane.error}")

    async def _measure(self, system: System) -> GroupRun:
        engine = system.engine
        start = self._clock_ns()
        ramp = max(job.ramp_time for job in self._jobs)
        for _, lane in self._lanes:
            lane.window_ns = start + int(lane.job.ramp_time * 1e9) if lane.job.ramp_time else 0
        group = GroupRun(engine.stats(), engine.stats(), usage_now(), Latencies(), huge_pages=False)
        probe = LagProbe()
        window_ns, used = start, usage_now()

        def begin_window() -> None:
            nonlocal window_ns, used
            group.stats_before = engine.stats()
            window_ns, used = self._clock_ns(), usage_now()
            probe.restart()
            self._measuring = True

        loop = asyncio.get_running_loop()
        timers = [loop.call_later(ramp, begin_window)] if ramp else []
        if not ramp:
            begin_window()
        for _, lane in self._lanes:
            if lane.job.runtime:
                timers.append(loop.call_later(lane.job.ramp_time + lane.job.runtime, lane.stop))
        probe.start()
        for _, lane in self._lanes:
            lane.start()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sample, start)
                for _, lane in self._lanes:
                    await asyncio.shield(lane.done)
                tasks.cancel_scope.cancel()
        finally:
            probe.stop()
            for timer in timers:
                timer.cancel()
        group.usage = usage_since(used, (self._clock_ns() - window_ns) / 1e9)
        group.stats_after = engine.stats()
        group.lag = probe.lag
        return group

    async def _sample(self, start_ns: int) -> None:
        """Every half second take a bandwidth sample of each clone and show progress."""
        total = max((job.ramp_time + job.runtime for job in self._jobs), default=0.0)
        last_ns = start_ns
        while True:
            await asyncio.sleep(SAMPLE_S)
            now = self._clock_ns()
            seconds, last_ns = (now - last_ns) / 1e9, now
            for _, lane in self._lanes:
                lane.flush()
                seen = self._seen.get(lane, (0, 0, 0, 0))
                self._seen[lane] = current = (
                    lane.read.io_bytes,
                    lane.read.total_ios,
                    lane.write.io_bytes,
                    lane.write.total_ios,
                )
                if not self._measuring or lane.done.done():
                    continue
                for side, at in ((lane.read, 0), (lane.write, 2)):
                    if current[at + 1] > seen[at + 1]:
                        side.bw_samples.append((current[at] - seen[at]) / seconds)
                        side.iops_samples.append((current[at + 1] - seen[at + 1]) / seconds)
            if self._progress is not None:
                self._progress([lane for _, lane in self._lanes], (now - start_ns) / 1e9, total)

    async def _verify(self, system: System) -> None:
        """Read back what the writing jobs sealed, as fio does after its write phase."""
        for index, lane in self._lanes:
            job = self._jobs[index]
            if job.verify == "none" or not job.writes or lane.error:
                continue
            written = min(lane.sealed_bytes, lane.region_bytes)
            if job.reads:
                written = lane.region_bytes  # laid out before, so every block has a seal
            elif job.is_random and written < lane.region_bytes:
                lane.notes.append("verify: the job did not cover its file, nothing read back")
                continue
            size = written // job.bs[0] * job.bs[0]
            if not size:
                continue
            again = replace(
                job,
                rw="read",
                size=size,
                time_based=False,
                rate=(0, 0),
                rate_iops=(0, 0),
                ramp_time=0.0,
                runtime=0.0,
                prio="auto",
                deadline_ms=0.0,
            )
            check = self._lane(again, system, lane.file_id, system.memory.address, size)
            check.start()
            await asyncio.shield(check.done)
            lane.verified += check.verified
            lane.error = check.error
            lane.read.failed_ios += check.read.failed_ios

    def _results(self, group: GroupRun) -> list[JobResult]:
        total = sum(lane.read.total_ios + lane.write.total_ios for _, lane in self._lanes) or 1
        results: dict[Any, JobResult] = {}
        for number, (index, lane) in enumerate(self._lanes):
            job = self._jobs[index]
            key = "group" if self._jobs[0].group_reporting else number
            mine = results.get(key)
            if mine is None:
                mine = results[key] = JobResult(job, self._group_id, clones=0)
                mine.read, mine.write = Direction(), Direction()
            mine.clones += 1
            mine.read.merge(lane.read)
            mine.write.merge(lane.write)
            mine.runtime_ns = max(
                mine.runtime_ns, lane.last_ns - max(lane.window_ns, lane.first_ns)
            )
            mine.error = mine.error or lane.error
            mine.skips += lane.skips
            mine.verified += lane.verified
            mine.notes += lane.notes
            for step, count in lane.depth_counts.items():
                mine.depth_counts[step] = mine.depth_counts.get(step, 0) + count
        for mine in results.values():
            mine.usage = group.usage.share((mine.read.total_ios + mine.write.total_ios) / total)
        return list(results.values())
