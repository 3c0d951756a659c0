"""``kvstore-bench io``: fio's job options and job files against the engines of the store."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from . import cli
from .fioformat import RunResult, header_text, run_json, run_text
from .iofiles import check_directory
from .ioloop import Lane
from .jobfile import parse_command_line
from .jobs import OPTIONS, JobError, JobSpec, groups_of

OUTPUT_FORMATS = ("normal", "json")
ETA_MODES = ("auto", "always", "never")
LOOPS = ("asyncio", "uvloop")


def bad_job(error: JobError) -> click.BadParameter:
    """Return the one-line error of a bad option or key."""
    return click.BadParameter(error.message, param_hint=error.field)


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the named event loop; ``simulated`` is virtual time.

    Raises: JobError: uvloop is not installed.
    """
    if name == "simulated":
        from kvstore.testing.loop import SimLoop

        return SimLoop
    if name == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        raise JobError("--loop", "uvloop is not installed") from None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


def _clock_of(jobs: list[JobSpec]) -> str:
    simulated = {job.ioengine == "simulated" for job in jobs}
    if len(simulated) > 1:
        raise JobError("--ioengine", "simulated jobs run on virtual time, alone")
    return "simulated" if simulated == {True} else ""


def output_formats(text: str) -> set[str]:
    """Return the wanted formats of ``--output-format``.

    Raises: JobError.
    """
    formats = {part.strip() for part in text.split(",")}
    unknown = sorted(formats - set(OUTPUT_FORMATS))
    if unknown:
        known = ", ".join(OUTPUT_FORMATS)
        raise JobError("--output-format", f"must be one or more of {known}, got {unknown[0]!r}")
    return formats


def _one_of(run: dict[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = run.get(name, choices[0])
    if value not in choices:
        raise JobError(f"--{name}", f"must be one of {', '.join(choices)}, got {value!r}")
    return value


class IoCommand(click.Command):
    """A command that takes fio's command line and prints fio's options as its help."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the job options, then click's own."""
        with formatter.section("Job options, on the command line and in job files"):
            formatter.write_dl([(f"--{name}", option.help) for name, option in OPTIONS.items()])
        with formatter.section("Run options"):
            formatter.write_dl(
                [
                    ("--output-format", "normal, json, or both with a comma between"),
                    ("--output", "write the result to this file instead of standard output"),
                    ("--eta", "auto | always | never: the live line on a terminal"),
                    ("--loop", "asyncio | uvloop"),
                ]
            )
        super().format_options(ctx, formatter)


@contextmanager
def live_progress(eta: str) -> Iterator[Callable[[list[Lane], float, float], None] | None]:
    """Show a line like fio's on standard error while jobs run, if it is a terminal."""
    if eta == "never" or (eta == "auto" and not sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    seen = [0, 0, 0, 0, 0.0]
    with Live("", console=console, transient=True, auto_refresh=False) as live:

        def show(lanes: list[Lane], elapsed: float, total: float) -> None:
            figures = [
                sum(lane.read.io_bytes for lane in lanes),
                sum(lane.read.total_ios for lane in lanes),
                sum(lane.write.io_bytes for lane in lanes),
                sum(lane.write.total_ios for lane in lanes),
            ]
            step = max(elapsed - seen[4], 1e-3)
            read_bw, read_iops, write_bw, write_iops = (
                max(now - before, 0) / step for now, before in zip(figures, seen[:4], strict=True)
            )
            seen[:] = [*figures, elapsed]
            running = sum(not lane.done.done() for lane in lanes)
            part = f"{min(elapsed / total, 1):.1%}" if total else "-.-%"
            left = f"{max(total - elapsed, 0):.0f}s" if total else "?"
            live.update(
                f"Jobs: {running} (f={running}): [{part}]"
                f"[r={read_bw / (1 << 20):.0f}MiB/s,w={write_bw / (1 << 20):.0f}MiB/s]"
                f"[r={read_iops:.0f},w={write_iops:.0f} IOPS][eta {left}]".replace("[", r"\["),
                refresh=True,
            )

        yield show


def write_result(run: RunResult, formats: set[str], output: str | None) -> None:
    """Print the result, or write it to ``output``."""
    parts = []
    if "normal" in formats:
        parts.append(run_text(run))
    if "json" in formats:
        parts.append(json.dumps(run_json(run), indent=2) + "\n")
    text = "".join(parts)
    if output is None:
        click.echo(text, nl=False)
    else:
        Path(output).write_text(text, encoding="utf-8")


def check_output(output: str | None) -> None:
    """Check that the result can be written before anything is measured.

    Raises: JobError.
    """
    if output is not None and not Path(output).parent.is_dir():
        raise JobError("--output", f"its directory does not exist: {output}")


def run_command(arguments: tuple[str, ...]) -> RunResult:
    """Parse, run and print; the body of the command.

    Raises: JobError.
    """
    jobs, options = parse_command_line(arguments)
    formats = output_formats(options.get("output-format", "normal"))
    eta, loop = _one_of(options, "eta", ETA_MODES), _one_of(options, "loop", LOOPS)
    factory = loop_factory(_clock_of(jobs) or loop)
    output = options.get("output")
    check_output(output)
    for job in jobs:
        check_directory(job.directory)
    from .iorun import run_jobs  # the native layer is needed from here on, not for --help

    say = _announcer(formats, output)
    _introduce(jobs, say)
    with live_progress(eta) as progress, asyncio.Runner(loop_factory=factory) as runner:
        run = runner.run(
            run_jobs(jobs, progress=progress, announce=say, version=cli.package_version())
        )
    write_result(run, formats, output)
    assert isinstance(run, RunResult)
    return run


def _announcer(formats: set[str], output: str | None) -> Callable[[str], None]:
    # the JSON alone belongs on standard output when it was asked for
    to_error = "normal" not in formats or output is not None
    return lambda line: click.echo(line, err=to_error)


def _introduce(jobs: list[JobSpec], say: Callable[[str], None]) -> None:
    for group_id, group in enumerate(groups_of(jobs)):
        for job in group:
            say(header_text(job, group_id))
    say(f"kvstore-bench-{cli.package_version()}")
    count = sum(job.numjobs for job in jobs)
    say(f"Starting {count} job{'s' if count > 1 else ''}")


@click.command(
    cls=IoCommand,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[JOB_FILE]...")
def command(arguments: tuple[str, ...]) -> None:
    """Run fio jobs on the disk engines of the store.

    Options, job files and results have fio's names and units. Nothing is written outside
    --directory.
    """
    try:
        run = run_command(arguments)
    except JobError as error:
        raise bad_job(error) from None
    if any(job.error for job in run.jobs):
        raise SystemExit(1)
