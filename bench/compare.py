"""``kvstore-bench compare``: fio and other engines beside ours, interleaved, on one file.

Every round runs every engine once on every cell, in an order that rotates, so that a slow minute
of the disk hits all of them. The ratio to fio is taken inside a round, then the median of ratios.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from . import cli, machine
from .io import bad_job, check_output, output_formats
from .iofiles import check_directory
from .iorun import run_jobs
from .iostats import median
from .jobs import MIB, JobError, JobSpec, parse_size, parse_time, size_text
from .peers import Measurement, Rival, Unavailable, Workload, all_rivals

FILE_NAME = "kvstore-bench-compare.dat"
REFERENCE = "fio-io_uring"
RW = {"read": "randread", "write": "randwrite", "randread": "randread", "randwrite": "randwrite"}
#: Bytes in flight that our engine allows by default; the automatic depth fills no more than that.
READ_INFLIGHT_BYTES = 16 * MIB
WRITE_INFLIGHT_BYTES = 8 * MIB
DEPTH_MAX = 32
OTHER_CPUS_QUIET = 0.1


def auto_depth(rw: str, block_bytes: int) -> int:
    """Return the depth that fills our default bound, and at most 32."""
    bound = READ_INFLIGHT_BYTES if rw.endswith("read") else WRITE_INFLIGHT_BYTES
    return max(1, min(DEPTH_MAX, bound // block_bytes))


def choose_memory(kind: str, thp: str) -> tuple[str, str]:
    """Return (huge or small, what to say about it): fio and we must stand on the same pages.

    Raises: JobError: the system cannot give both sides what was asked for.
    """
    if kind == "huge" and thp != "always":
        raise JobError(
            "--memory", f"huge needs transparent_hugepage=always for fio, it is {thp or 'missing'}"
        )
    if kind == "small" and thp == "always":
        raise JobError("--memory", "small needs transparent_hugepage=madvise or never")
    if thp == "always":
        return "huge", "2 MiB pages under the buffers of fio and of our engines"
    return "small", (
        f"4 KiB pages under the buffers of all: transparent_hugepage={thp or 'missing'} gives fio "
        "no huge pages, so ours are switched off; the store itself uses huge pages"
    )


@dataclass(slots=True)
class Cell:
    """One engine on one workload over all rounds."""

    engine: str
    caching: str
    rw: str
    bs: int
    iodepth: int
    rounds: dict[int, Measurement] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a comparison will run."""

    directory: Path
    size: int
    block_sizes: list[int]
    modes: list[str]
    iodepth: int
    repeats: int
    runtime: float
    ramp_time: float
    memory: str
    rivals: list[Rival]

    def workloads(self, round_number: int) -> list[Workload]:
        """Return the cells of one round; each round has its own offsets."""
        return [
            Workload(
                path=self.directory / FILE_NAME,
                size=self.size,
                rw=rw,
                bs=bs,
                iodepth=self.iodepth or auto_depth(rw, bs),
                runtime=self.runtime,
                ramp_time=self.ramp_time,
                memory=self.memory,
                seed=round_number + 1,
            )
            for bs in self.block_sizes
            for rw in self.modes
        ]


def run_plan(plan: Plan, say: Callable[[str], None]) -> list[Cell]:
    """Run all rounds and return the cells; a rival that fails once is dropped with a line."""
    cells: dict[tuple[str, str, int], Cell] = {}
    rivals = list(plan.rivals)
    for round_number in range(plan.repeats):
        for work in plan.workloads(round_number):
            shift = round_number % len(rivals)
            for rival in rivals[shift:] + rivals[:shift]:
                others = machine.OtherLoad()
                try:
                    measured = rival.run(work)
                except Unavailable as error:
                    say(f"skipped {rival.name}: {error}")
                    rivals.remove(rival)
                    continue
                key = (rival.name, work.rw, work.bs)
                cell = cells.setdefault(
                    key, Cell(rival.name, rival.caching, work.rw, work.bs, work.iodepth)
                )
                measured.other_cpus = others.cpus()
                cell.rounds[round_number] = measured
                say(
                    f"[{round_number + 1}/{plan.repeats}] {work.rw} {size_text(work.bs)} "
                    f"x{work.iodepth} {rival.name}: {measured.bw_bytes / MIB:.0f} MiB/s, "
                    f"p99 {measured.clat_ns['p99'] / 1e6:.2f} ms, "
                    f"cpu {measured.cpu_s_per_gib:.3f} s/GiB"
                )
    order = {rival.name: i for i, rival in enumerate(plan.rivals)}
    return sorted(cells.values(), key=lambda cell: (cell.bs, cell.rw, order[cell.engine]))


def ratios(cell: Cell, reference: Cell | None) -> list[float]:
    """Return the ratios of bandwidth to the reference, one per round that has both."""
    if reference is None:
        return []
    return [
        measured.bw_bytes / reference.rounds[number].bw_bytes
        for number, measured in sorted(cell.rounds.items())
        if number in reference.rounds and reference.rounds[number].bw_bytes
    ]


def row_of(cell: Cell, reference: Cell | None) -> dict[str, Any]:
    """Return one row of the result: medians, and the range of what varies most."""
    rounds = [measured for _, measured in sorted(cell.rounds.items())]
    rates = [measured.bw_bytes for measured in rounds]
    against = ratios(cell, reference)
    row: dict[str, Any] = {
        "engine": cell.engine,
        "caching": cell.caching,
        "rw": cell.rw,
        "bs": cell.bs,
        "iodepth": cell.iodepth,
        "repeats": len(rounds),
        "bw_bytes": median(rates),
        "bw_bytes_range": [min(rates), max(rates)],
        "iops": median([measured.iops for measured in rounds]),
        "ratio_to_fio": median(against) if against else None,
        "ratio_to_fio_range": [min(against), max(against)] if against else None,
        "clat_ns": {
            name: median([measured.clat_ns.get(name, 0.0) for measured in rounds])
            for name in ("mean", "p50", "p99", "p99.9")
        },
        "cpu_s_per_gib": median([measured.cpu_s_per_gib for measured in rounds]),
        "other_cpus": median([measured.other_cpus for measured in rounds]),
    }
    for name in ("loop_lag_ns", "service_ns"):
        if any(getattr(measured, name) for measured in rounds):
            row[name] = {
                part: median([getattr(measured, name).get(part, 0.0) for measured in rounds])
                for part in ("p50", "p99")
            }
    notes = sorted({note for measured in rounds for note in measured.notes})
    if notes:
        row["notes"] = notes
    return row


def rows_of(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return the rows of all cells against fio on io_uring."""
    references = {(cell.rw, cell.bs): cell for cell in cells if cell.engine == REFERENCE}
    return [row_of(cell, references.get((cell.rw, cell.bs))) for cell in cells]


def table_text(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| rw | bs | depth | engine | MiB/s (range) | ratio to fio (range) "
        "| p50 ms | p99 ms | CPU s/GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = (value / MIB for value in row["bw_bytes_range"])
        name = row["engine"] + (" (buffered)" if row["caching"] == "buffered" else "")
        ratio = "-"
        if row["ratio_to_fio"] is not None:
            least, most = row["ratio_to_fio_range"]
            ratio = f"{row['ratio_to_fio']:.2f} ({least:.2f}-{most:.2f})"
        lines.append(
            f"| {row['rw']} | {size_text(row['bs'])} | {row['iodepth']} | {name} | "
            f"{row['bw_bytes'] / MIB:.0f} ({low:.0f}-{high:.0f}) | {ratio} | "
            f"{row['clat_ns']['p50'] / 1e6:.2f} | {row['clat_ns']['p99'] / 1e6:.2f} | "
            f"{row['cpu_s_per_gib']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def lay_out(directory: Path, size: int) -> None:
    """Write the whole file once, so that no engine reads holes or allocates blocks.

    Raises: JobError: the file cannot be made.
    """
    job = JobSpec(
        name="layout",
        directory=str(directory),
        filename=FILE_NAME,
        size=size,
        rw="read",
        bs=(4 * MIB, 4 * MIB),
        iodepth=4,
        runtime=0.01,
        ioengine="serial",
        memory="small",
    )
    asyncio.run(run_jobs([job]))


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parsed(option: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise JobError(option, str(error)) from None


def _block_sizes(text: str) -> list[int]:
    sizes = [_parsed("--bs", parse_size, part) for part in _list(text)]
    for size in sizes:
        if size < 4096 or size % 4096:
            raise JobError("--bs", f"must be multiples of 4096, got {size}")
    if not sizes:
        raise JobError("--bs", "names no size")
    return sizes


def _modes(text: str) -> list[str]:
    modes = []
    for word in _list(text):
        if word not in RW:
            raise JobError("--rw", f"must be read, write or both, got {word!r}")
        modes.append(RW[word])
    if not modes:
        raise JobError("--rw", "must be read, write or both")
    return list(dict.fromkeys(modes))


def choose_rivals(wanted: str, fio: str, say: Callable[[str], None]) -> list[Rival]:
    """Return the rivals that can run, with one line for each that cannot.

    Raises: JobError: an unknown name.
    """
    rivals = all_rivals(fio)
    names = [rival.name for rival in rivals]
    if wanted:
        unknown = [name for name in _list(wanted) if name not in names]
        if unknown:
            raise JobError("--engines", f"must be among {', '.join(names)}, got {unknown[0]!r}")
        rivals = [rival for rival in rivals if rival.name in _list(wanted)]
    chosen = []
    for rival in rivals:
        try:
            rival.check()
        except Unavailable as error:
            say(f"skipped {rival.name}: {error}")
        else:
            chosen.append(rival)
    return chosen


def run_compare(options: dict[str, Any]) -> dict[str, Any]:
    """Check the options, run, and return the result; the body of the command.

    Raises: JobError.
    """

    def say(line: str) -> None:
        click.echo(line, err=True)

    formats = output_formats(options["output_format"])
    check_output(options["output"])
    directory = check_directory(options["directory"])
    size = _parsed("--size", parse_size, options["size"])
    block_sizes = _block_sizes(options["bs"])
    if size < max(block_sizes) * DEPTH_MAX or size % 4096:
        raise JobError(
            "--size", f"must be a multiple of 4096 and hold {DEPTH_MAX} of the largest blocks"
        )
    host = machine.describe(directory)
    memory, about_memory = choose_memory(options["memory"], host["transparent_hugepage"])
    rivals = choose_rivals(options["engines"], options["fio"], say)
    if not rivals:
        raise JobError("--engines", "none of them can run here")
    plan = Plan(
        directory=directory,
        size=size,
        block_sizes=block_sizes,
        modes=_modes(options["rw"]),
        iodepth=options["iodepth"],
        repeats=options["repeats"],
        runtime=_parsed("--runtime", parse_time, options["runtime"]),
        ramp_time=_parsed("--ramp_time", parse_time, options["ramp_time"]),
        memory=memory,
        rivals=rivals,
    )
    path = directory / FILE_NAME
    try:
        lay_out(directory, size)
        say(about_memory)
        cells = run_plan(plan, say)
    finally:
        if not options["keep"]:
            path.unlink(missing_ok=True)
    rows = rows_of(cells)
    notes = [about_memory]
    if busy := [row["other_cpus"] for row in rows if row["other_cpus"] > OTHER_CPUS_QUIET]:
        notes.append(
            f"other processes kept up to {max(busy):.1f} CPUs busy: repeat this on an idle machine"
        )
    result: dict[str, Any] = {
        "kind": "compare",
        "version": cli.package_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": {**host, "fio": machine.fio_version(options["fio"])},
        "options": {key: value for key, value in options.items() if key not in ("output", "fio")},
        "memory": memory,
        "notes": notes,
        "rows": rows,
    }
    write(result, formats, options["output"])
    return result


def write(result: dict[str, Any], formats: set[str], output: str | None) -> None:
    """Print the table, the JSON, or both; JSON goes to ``output`` if that is given."""
    if "normal" in formats:
        click.echo(machine.describe_text(result["host"]))
        for note in result["notes"]:
            click.echo(note)
        click.echo(table_text(result["rows"]), nl=False)
    text = json.dumps(result, indent=2) + "\n"
    if output is not None:
        Path(output).write_text(text, encoding="utf-8")
    elif "json" in formats:
        click.echo(text, nl=False)


@click.command()
@click.option("--directory", required=True, help="the only place where a file is made")
@click.option("--bs", default="16k,64k,256k,1m,4m", show_default=True, help="block sizes, a list")
@click.option("--rw", default="read,write", show_default=True, help="read, write or both (random)")
@click.option(
    "--iodepth",
    type=click.IntRange(0, 4096),
    default=0,
    help="transfers in flight; 0: as many as our default bounds allow, at most 32",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--runtime", default="3", show_default=True, help="measured seconds per run")
@click.option("--ramp_time", default="0.5", show_default=True, help="seconds before measuring")
@click.option("--size", default="4g", show_default=True, help="bytes of the file")
@click.option("--engines", default="", help="only these, a list of names from the table")
@click.option(
    "--memory",
    type=click.Choice(("auto", "huge", "small")),
    default="auto",
    show_default=True,
    help="pages under the buffers, the same for all",
)
@click.option("--fio", default="fio", show_default=True, help="the fio program")
@click.option("--keep", is_flag=True, help="leave the file for another run")
@click.option(
    "--output-format",
    "output_format",
    default="normal",
    show_default=True,
    help="normal, json, or both with a comma between",
)
@click.option("--output", help="write the JSON to this file")
def command(**options: Any) -> None:
    """Compare fio and other engines with ours on the same file, interleaved.

    Equal block size, equal bytes in flight, equal pages under the buffers; medians and ranges of
    --repeats rounds, and the ratio to fio's io_uring taken round by round.
    """
    try:
        run_compare(options)
    except JobError as error:
        raise bad_job(error) from None
