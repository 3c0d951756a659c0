"""Statistics over repeated runs, the JSON of a replay, and its table.

A row holds the median of every measure, the smallest and largest value beside it, and all runs
(INV-815). Differences inside the range are ties.
"""

from __future__ import annotations

import datetime as dt
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from . import machine
from .cli import package_version
from .options import format_size

Measures = dict[str, Any]

AS_IS = frozenset({"engine_settings"})  # a mapping that is no measure


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value at ``percent`` by nearest rank, 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[min(len(ordered), int(rank)) - 1]


def summarize(runs: Sequence[Measures]) -> tuple[Measures, Measures]:
    """Return (medians, ranges) of runs with the same keys.

    A range is ``{"min", "median", "max"}``. Numbers are summarized, mappings of numbers key by key
    (a missing key counts 0), everything else is taken from the first run, `AS_IS` too.
    """
    assert runs
    medians: Measures = {}
    ranges: Measures = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(first, Mapping) and name not in AS_IS:
            keys = list(dict.fromkeys(key for value in values for key in value))
            parts = {key: _spread([value.get(key, 0) for value in values]) for key in keys}
            medians[name] = {key: part["median"] for key, part in parts.items()}
            ranges[name] = parts
        elif isinstance(first, int | float) and not isinstance(first, bool):
            ranges[name] = _spread(values)
            medians[name] = ranges[name]["median"]
        else:
            medians[name] = first
    return medians, ranges


def _spread(values: Sequence[float]) -> dict[str, float]:
    middle = statistics.median(values)
    if all(isinstance(value, int) for value in values):
        middle = round(middle)
    return {"min": min(values), "median": middle, "max": max(values)}


def header(benchmark: str, arguments: Sequence[str], directory: Path) -> dict[str, Any]:
    """Return the fields that every report begins with."""
    return {
        "benchmark": benchmark,
        "kvstore_version": package_version(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": ["kvstore-bench", *arguments],
        "machine": machine.describe(directory),
    }


def write_json(report: Mapping[str, Any], path: Path | None) -> None:
    """Write a report to ``path``, or to standard output."""
    text = json.dumps(report, indent=2) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f}"


#: heading, measure, how a value is shown, and whether a narrow terminal shows it
COLUMNS: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
    ("req/s", "requests_per_s", _number, True),
    ("TTFT\np50 s", "ttft_p50_s", _number, True),
    ("TTFT\np90 s", "ttft_p90_s", _number, True),
    ("", "hit_tokens", _number, True),
    ("SSD\nMiB", "ssd_bytes_written", _mebibytes, True),
    ("required\nwrites", "required_writes", _number, True),
    ("D2H\nMiB", "d2h_bytes", _mebibytes, True),
    ("verified\npages", "verified_pages", _number, False),
    ("loop lag\nmax ms", "loop_lag_max_s", _milliseconds, False),
)
WIDE = 140  # columns of text that the whole table needs


def _cell(row: Measures, name: str, show: Callable[[float], str], *, with_range: bool) -> str:
    if name == "hit_tokens":
        width = 6 if with_range else 4
        return " ".join(f"{value / 1e6:{width}.1f}" for value in row[name].values())
    spread = row["range"][name]
    low, middle, high = (show(spread[part]) for part in ("min", "median", "max"))
    return f"{middle}\n[dim]{low}-{high}[/]" if with_range and low != high else middle


def table(report: Mapping[str, Any], *, is_wide: bool = True) -> Table:
    """Return the rows in the shape of the table of TensorRT-LLM PR #21822.

    Below each median stands the range; a narrow table leaves the ranges and two columns out.
    """
    shown = [column for column in COLUMNS if is_wide or column[3]]
    grid = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        title=_title(report),
        title_justify="left",
        padding=(0, 0, 0, 1),
    )
    grid.add_column("options", no_wrap=is_wide, min_width=14)
    names = report["rows"][0]["hit_tokens"]
    tiers = " ".join(f"{name:>6}" if is_wide else f"{name[:4]:>4}" for name in names)
    for heading, *_ in shown:
        grid.add_column(heading or f"hit tokens (M)\n{tiers}", justify="right", no_wrap=True)
    for row in report["rows"]:
        cells = (_cell(row, name, show, with_range=is_wide) for _, name, show, _ in shown)
        grid.add_row(row["options"], *cells)
    return grid


def _title(report: Mapping[str, Any]) -> str:
    work = report["workload"]
    sizes = ", ".join(f"{k} {format_size(v)}" for k, v in report["tiers"].items())
    return (
        f"{work['name']}: {work['requests']} requests, {report['sessions']} sessions; {sizes};"
        f" time scale {report['time_scale']:g}; median and range of {report['repeats']} runs"
    )


def _footer(report: Mapping[str, Any]) -> list[str]:
    rows = report["rows"]
    wrong = sum(row["mismatches"] for row in rows)
    pages = sum(run["verified_pages"] for row in rows for run in row["runs"])
    lines = [f"{pages:,} pages checked byte by byte in all runs, {wrong:,} wrong"]
    engines = [f"{row['options']}: {row['engine']}" for row in rows]
    lines.append(f"engines: {'; '.join(engines)}")
    lines += [f"skipped: {one['options']}: {one['reason']}" for one in report.get("skipped", ())]
    return lines


def print_table(report: Mapping[str, Any], *, to_stderr: bool) -> None:
    """Print the table; plain text where the stream is no terminal."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False)
    console.print(table(report, is_wide=console.width >= WIDE))
    for line in _footer(report):
        console.print(line, markup=False)
