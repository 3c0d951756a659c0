"""``kvstore-bench replay``: a trace or a seeded workload through the whole store.

Request coroutines of a small continuous-batching scheduler restore and evict pages through
device (CPU memory), host and disk; every byte that a request is served is checked. ``--ablation``
prints one row per option, ``--oracle`` compares hits with an exact LRU reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.config import slot_bytes
from kvstore.errors import CapacityError, ConfigError, UnsupportedError

from .ablation import REPEATS_MIN, Variant, choose_rows, interleave
from .cli import PROGRAM, bad_option, option_name
from .costs import CostModel, default_time_scale
from .options import PAGE_SIZE, SIZE, FiniteRange, format_size
from .oracle import lru_hits
from .results import Measures, header, print_table, summarize, write_json
from .run import PAGE_BYTES, ReplayOptions, ReplayStalled, oracle_report, run_once, run_oracle
from .scratch import scratch_directory
from .trace import TraceError, read_trace
from .workload import Workload, agentic_workload, trace_workload

T = TypeVar("T")

AGENTIC_REQUESTS = 480
TRACE_REQUESTS = 2000
TRACE_SESSIONS = 16
AGENTIC_SESSIONS = 48
TRACE_HOST_BYTES = 128 << 20
AGENTIC_HOST_BYTES = 104 << 20
AGENTIC_DEVICE_BYTES = 32 << 20
TRACE_DEVICE_BYTES = 48 << 20
ORACLE_PAGE_BYTES = 4096
FULL_DIVISOR = 8  # ``--disk full`` holds this part of the distinct pages
TERMINATED = 128 + signal.SIGTERM

DISK_FIELDS = (
    "disk_cache_size", "disk_cache_path", "disk", "keep_copy", "write_through",
    "protected_copy_fraction", "write_policy", "io_threads", "engine", "ablation",
)  # fmt: skip
ROW_FIELDS = ("engine", "keep_copy", "write_through", "inclusive_host")
ORACLE_FIELDS = (
    "host_cache_size", *(name for name in DISK_FIELDS if name != "ablation"),
    "inclusive_host", "sessions", "repeats", "time_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The options as given; ``given`` names those that were on the command line."""

    trace: Path | None
    workload: str | None
    requests: int | None
    sessions: int | None
    block_tokens: int
    page_bytes: int | None
    gpu_cache_size: int | None
    host_cache_size: int | None
    disk_cache_size: int | None
    disk_cache_path: Path | None
    no_host: bool
    no_disk: bool
    disk: str
    engine: str
    io_threads: int
    keep_copy: bool
    write_through: bool
    inclusive_host: bool
    protected_copy_fraction: float
    write_policy: str
    eviction_policy: str
    time_scale: float | None
    repeats: int | None
    seed: int
    oracle: bool
    ablation: bool
    rows: str
    output_format: str
    output: Path | None
    given: frozenset[str]


def check(args: Arguments) -> None:
    """Refuse options that contradict each other, naming the one that cannot stand."""

    def refuse(names: tuple[str, ...], reason: str) -> None:
        for name in names:
            if name in args.given:
                raise bad_option(name, reason)

    if args.trace and args.workload:
        raise bad_option("workload", "cannot be combined with --trace")
    if args.oracle:
        refuse(("ablation",), "cannot be combined with --oracle")
        refuse(ORACLE_FIELDS, "not with --oracle, which replays one request at a time on one tier")
        refuse(("eviction_policy",), "not with --oracle, whose reference is LRU")
        if not args.trace:
            raise bad_option("oracle", "needs --trace")
    if args.no_disk:
        refuse(DISK_FIELDS, "needs a disk tier, which --no-disk leaves out")
    if args.no_host:
        refuse(("host_cache_size",), "cannot be combined with --no-host")
        refuse(("inclusive_host", "write_through"), "needs a host tier, which --no-host leaves out")
        refuse(("ablation",), "needs a host tier, which --no-host leaves out")
    if not args.ablation:
        refuse(("rows",), "needs --ablation")
    if args.ablation:
        refuse(ROW_FIELDS, "set by each row of --ablation")
        if args.repeats is not None and args.repeats < REPEATS_MIN:
            raise bad_option(
                "repeats", f"must be at least {REPEATS_MIN} with --ablation, got {args.repeats}"
            )
    if args.output and not args.output.resolve().parent.is_dir():
        raise bad_option("output", f"no such directory: {args.output.parent}")


def load_workload(args: Arguments) -> Workload:
    """Return the requests to replay. Raises: BadParameter: the trace cannot be read."""
    if args.trace is None:
        return agentic_workload(args.requests or AGENTIC_REQUESTS, args.block_tokens, args.seed)
    limit = args.requests or (None if args.oracle else TRACE_REQUESTS)
    try:
        rows = read_trace(args.trace, args.block_tokens, limit)
    except TraceError as error:
        raise bad_option("trace", str(error)) from None
    return trace_workload(args.trace.name, rows, args.block_tokens)


def make_options(args: Arguments, workload: Workload) -> ReplayOptions:
    """Return what all rows share. Raises: BadParameter: the device cannot hold a request."""
    page_bytes = args.page_bytes or (ORACLE_PAGE_BYTES if args.oracle else PAGE_BYTES)
    sessions = args.sessions or (TRACE_SESSIONS if args.trace else AGENTIC_SESSIONS)
    cost = CostModel()
    scale = args.time_scale
    if scale is None:
        scale = default_time_scale(workload, cost, sessions)
    device_bytes = args.gpu_cache_size or (
        TRACE_DEVICE_BYTES if args.trace else AGENTIC_DEVICE_BYTES
    )
    pages = device_bytes // page_bytes
    longest = 1 if args.oracle else workload.longest_blocks + 1
    if pages < longest:
        raise bad_option(
            "--device-cache-size / --gpu-cache-size",
            f"holds {pages} pages of {page_bytes} bytes; the longest request needs {longest}",
        )
    host_bytes = disk_bytes = 0
    if not args.no_host and not args.oracle:
        host_bytes = args.host_cache_size or (
            TRACE_HOST_BYTES if args.trace else AGENTIC_HOST_BYTES
        )
    if not args.no_disk and not args.oracle:
        slots = workload.distinct_blocks + workload.distinct_blocks // 16 + 64
        if args.disk == "full":
            slots = max(16, workload.distinct_blocks // FULL_DIVISOR)
        disk_bytes = args.disk_cache_size or slots * slot_bytes(page_bytes)
    return ReplayOptions(
        block_tokens=args.block_tokens,
        page_bytes=page_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        io_threads=args.io_threads,
        protected_copy_fraction=args.protected_copy_fraction,
        write_policy=args.write_policy,
        eviction_policy=args.eviction_policy,
        sessions=sessions,
        time_scale=scale,
        cost=cost,
    )


def single_variant(args: Arguments) -> Variant:
    """Return the row of a replay without ablation."""
    names = [
        name.replace("_", " ")
        for name in ("keep_copy", "write_through", "inclusive_host")
        if getattr(args, name)
    ]
    return Variant(
        " + ".join(("replay", *names)),
        args.engine,
        args.keep_copy,
        args.write_through,
        args.inclusive_host,
    )


def uring_refusal() -> str:
    """Return why io_uring cannot be used here, an empty string if it can."""

    async def attempt() -> None:
        await open_engine(IoConfig(io_engine="io_uring"), kind="io_uring").aclose()

    from kvstore._uring import open_engine
    from kvstore.config import IoConfig

    try:
        asyncio.run(attempt())
    except UnsupportedError as error:
        return str(error)
    return ""


def choose_variants(args: Arguments) -> tuple[list[Variant], list[dict[str, str]]]:
    """Return the rows to run and those left out, each with its reason."""
    if not args.ablation:
        return [single_variant(args)], []
    reason = uring_refusal()
    if not reason:
        return choose_rows(args.rows), []
    skipped = [{"options": "parallel I/O (io_uring)", "reason": reason}]
    return choose_rows(args.rows, "threads"), skipped


def run_until_done(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGINT and SIGTERM cancel it, so that everything is closed and removed."""
    terminated = False

    async def body() -> T:
        nonlocal terminated
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, stop)
        return await main

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        if terminated:
            raise click.exceptions.Exit(TERMINATED) from None
        raise
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]  # a task group wraps what one child raised
        raise error from None


@contextlib.contextmanager
def progress_bar(total: int, label: str) -> Iterator[Callable[[str], Callable[[], object]]]:
    """Yield a function that names the current run and returns its tick; silent off a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: lambda: None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(label, total=total)

        def start(name: str) -> Callable[[], object]:
            progress.update(task, description=name)
            return lambda: progress.advance(task)

        yield start


def run_rows(
    args: Arguments, options: ReplayOptions, workload: Workload, variants: list[Variant]
) -> list[Measures]:
    """Run every row ``repeats`` times, interleaved, and return the rows of the report."""
    repeats = args.repeats or REPEATS_MIN
    runs: list[list[Measures]] = [[] for _ in variants]
    total = len(variants) * repeats * len(workload.requests)
    with scratch_directory(args.disk_cache_path) as directory, progress_bar(total, "") as start:
        for repeat, row, variant in interleave(variants, repeats):
            tick = start(f"run {repeat + 1}/{repeats}: {variant.options}")
            place = directory / f"run-{repeat}-{row}"
            place.mkdir(mode=0o700)
            runs[row].append(run_until_done(run_once(options, variant, workload, str(place), tick)))
    rows = []
    for variant, measured in zip(variants, runs, strict=True):
        medians, ranges = summarize(measured)
        switches = {name: getattr(variant, name) for name in ROW_FIELDS[1:]}
        rows.append(
            {"options": variant.options, **medians, "settings": switches, "range": ranges}
            | {"mismatches": sum(run["mismatches"] for run in measured), "runs": measured}
        )
    return rows


def run_replay(args: Arguments) -> int:
    """Run the rows and report; returns the exit status."""
    workload = load_workload(args)
    options = make_options(args, workload)
    variants, skipped = choose_variants(args)
    for variant in variants:
        options.store_config(variant, ".")  # a wrong field is found before the first run
    rows = run_rows(args, options, workload, variants)
    tiers = {
        "device": options.device_bytes, "host": options.host_bytes, "disk": options.disk_bytes
    }  # fmt: skip
    report = header("replay", sys.argv[1:], args.disk_cache_path or Path.cwd()) | {
        "workload": workload.describe() | {"disk": args.disk},
        "tiers": {name: size for name, size in tiers.items() if size},
        "sessions": options.sessions,
        "repeats": args.repeats or REPEATS_MIN,
        "time_scale": options.time_scale,
        "cost_model": options.cost.describe(),
        "config": {
            "block_tokens": options.block_tokens,
            "page_bytes": options.page_bytes,
            "device_cache_size": options.device_bytes,
            "host_cache_size": options.host_bytes,
            "disk_cache_size": options.disk_bytes,
            "disk_io_threads": options.io_threads,
            "disk_protected_copy_fraction": options.protected_copy_fraction,
            "write_policy": options.write_policy,
            "eviction_policy": options.eviction_policy,
        },
        "rows": rows,
        "skipped": skipped,
    }
    emit(args, report)
    wrong = sum(row["mismatches"] for row in rows)
    if wrong:
        first = next(
            run["first_mismatch"] for row in rows for run in row["runs"] if run["mismatches"]
        )
        click.echo(f"{PROGRAM}: {wrong} pages were served with wrong bytes: {first}", err=True)
    return 1 if wrong else 0


def emit(args: Arguments, report: dict[str, Any]) -> None:
    """Write JSON where it was asked for, and the table for people."""
    if args.output or args.output_format == "json":
        write_json(report, args.output)
    if args.output_format == "normal":
        print_table(report, to_stderr=False)
    elif sys.stderr.isatty():
        print_table(report, to_stderr=True)


def run_compare_with_oracle(args: Arguments) -> int:
    """Replay one request at a time and compare its hits with the reference."""
    workload = load_workload(args)
    options = make_options(args, workload)
    requests = workload.requests
    ids = [tuple(int(number) for number in request.source) for request in requests]
    capacity = options.device_bytes // options.page_bytes
    with progress_bar(len(requests), "oracle") as start:
        found, outcome = run_until_done(run_oracle(options, requests, start("oracle")))
    result = oracle_report(found, lru_hits(ids, capacity), sum(len(row) for row in ids))
    report = header("replay", sys.argv[1:], args.disk_cache_path or Path.cwd()) | {
        "workload": workload.describe(),
        "oracle": {
            "capacity_blocks": capacity,
            **result,
            "verified_pages": outcome.verified_pages,
            "mismatches": outcome.mismatches,
        },
        "rows": [],
    }
    if args.output or args.output_format == "json":
        write_json(report, args.output)
    if args.output_format == "normal":
        verdict = "equal" if result["is_equal"] else "DIFFERENT"
        click.echo(
            f"oracle: {capacity} blocks of {format_size(options.page_bytes)}: "
            f"{result['hits']} hits of {result['block_references']} block references"
            f" ({100 * result['hit_rate']:.2f} %), reference {result['hits_reference']}: {verdict};"
            f" {outcome.verified_pages} pages verified, {outcome.mismatches} wrong"
        )
    return 0 if result["is_equal"] and not outcome.mismatches else 1


def _flag(name: str, text: str) -> Callable[[Any], Any]:
    return click.option(name, is_flag=True, help=text)


@click.command("replay")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Trace of JSON lines, Mooncake or Qwen-Bailian rows.",
)
@click.option(
    "--workload",
    type=click.Choice(["agentic"]),
    default=None,
    help="Built-in seeded workload; the default without --trace.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    help=f"Requests to replay [{AGENTIC_REQUESTS}, of a trace {TRACE_REQUESTS}].",
)
@click.option(
    "--sessions",
    type=click.IntRange(1),
    help=f"Closed-loop clients [{AGENTIC_SESSIONS}, with a trace {TRACE_SESSIONS}].",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens per block; a trace has one id per block.",
)
@click.option(
    "--page-bytes",
    type=PAGE_SIZE,
    help="Bytes per page, a multiple of 4096 [64k, with --oracle 4k].",
)
@click.option(
    "--device-cache-size",
    "--gpu-cache-size",
    "gpu_cache_size",
    type=SIZE,
    help="Device tier (CPU memory), in page bytes [32m, with a trace 48m].",
)
@click.option("--host-cache-size", type=SIZE, help="Host tier [104m, with a trace 128m].")
@click.option("--disk-cache-size", type=SIZE, help="Disk tier [sized by --disk].")
@click.option(
    "--disk-cache-path",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Existing directory for slot files [a temporary one here].",
)
@click.option(
    "--disk",
    type=click.Choice(["large", "full"]),
    default="large",
    show_default=True,
    help=f"A disk that never fills, or one for 1/{FULL_DIVISOR} of the distinct pages.",
)
@_flag("--no-host", "Leave the host tier out.")
@_flag("--no-disk", "Leave the disk tier out.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "io_uring", "threads", "serial"]),
    default="auto",
    show_default=True,
    help="I/O engine.",
)
@click.option(
    "--io-threads",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="Workers of the threads engine.",
)
@_flag("--keep-copy", "Keep the disk copy of a page after its restore.")
@_flag("--write-through", "Write pages to disk when they reach the host tier.")
@_flag("--inclusive-host", "Keep the host copy of a page after its restore.")
@click.option(
    "--protected-copy-fraction",
    type=FiniteRange(0, 1),
    default=1.0,
    show_default=True,
    help="Part of the disk inside which kept copies are protected.",
)
@click.option(
    "--write-policy",
    type=click.Choice(["all", "selective"]),
    default="all",
    show_default=True,
    help="Which pages are worth a write.",
)
@click.option(
    "--eviction-policy",
    type=click.Choice(["lru", "s3fifo"]),
    default="lru",
    show_default=True,
    help="Which page goes first.",
)
@click.option(
    "--time-scale",
    type=FiniteRange(0),
    help="Real seconds per second of the cost model [a run ends within 25 s].",
)
@click.option(
    "--repeats", type=click.IntRange(1), help=f"Runs per row, interleaved [{REPEATS_MIN}]."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Seed of the built-in workload.",
)
@_flag("--oracle", "One request at a time on the device tier; compare hits with exact LRU.")
@_flag("--ablation", "One row per engine and option.")
@click.option(
    "--rows",
    type=click.Choice(["stacked", "each", "fractions", "policies"]),
    default="stacked",
    show_default=True,
    help="What --ablation compares: options stacked, each alone, copy shares, or policies.",
)
@click.option(
    "--output-format",
    type=click.Choice(["normal", "json"]),
    default="normal",
    show_default=True,
    help="A table, or JSON on standard output.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON to this file."
)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Replay a trace or a seeded workload through device, host and disk.

    Every byte that a request is served from the cache is checked; the exit status is 1 if one was
    wrong.
    """
    given = frozenset(
        name
        for name in values
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )  # fmt: skip
    args = Arguments(**values, given=given)
    check(args)
    try:
        status = run_compare_with_oracle(args) if args.oracle else run_replay(args)
    except ConfigError as error:
        raise bad_option(_option_of(error), _message_of(error)) from error
    except ReplayStalled as error:
        click.echo(f"{PROGRAM}: {error}", err=True)
        status = 1
    except (CapacityError, UnsupportedError) as error:
        raise click.ClickException(str(error)) from error
    ctx.exit(status)


_OPTION_OF_FIELD = {
    "disk_keep_copy_after_restore": "keep_copy",
    "disk_write_through": "write_through",
    "disk_protected_copy_fraction": "protected_copy_fraction",
    "disk_io_threads": "io_threads",
    "io_engine": "engine",
}


def _option_of(error: ConfigError) -> str:
    field = str(getattr(error, "field", "")) or "config"
    return option_name(_OPTION_OF_FIELD.get(field, field))


def _message_of(error: ConfigError) -> str:
    return str(error).removeprefix(f"{getattr(error, 'field', '')}: ")
