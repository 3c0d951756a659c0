"""Statistics over repeated runs, the JSON of a replay, and its table.

A row holds the median of every measure, the smallest and largest value beside it, and all runs
(INV-815). Differences inside the range are ties.
"""

from __future__ import annotations

import datetime as dt
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
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
    if value == 0:
        return "0"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(row: Measures, name: str, show: Any = _number) -> str:
    spread = row["range"][name]
    low, high = show(spread["min"]), show(spread["max"])
    middle = str(show(spread["median"]))
    return middle if low == high else f"{middle}\n{low} - {high}"


def _size(value: float) -> str:
    return format_size(round(value)) if value else "0"


def _tokens(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e5 else f"{value / 1e3:.1f}k"


def _tiers(row: Measures) -> str:
    parts = [f"{name} {_tokens(value)}" for name, value in row["hit_tokens"].items()]
    return "\n".join(parts) or "none"


def table(report: Mapping[str, Any]) -> Table:
    """Return the rows in the shape of the table of TensorRT-LLM PR #21822."""
    grid = Table(box=box.SIMPLE_HEAVY, title=_title(report), title_justify="left")
    for name in ("options", "engine"):
        grid.add_column(name)
    for name in (
        "req/s", "TTFT p50 (s)", "TTFT p90 (s)", "hit tokens\nby tier", "SSD\nwritten",
        "required\nwrites", "D2H\nbytes", "verified\npages", "wrong\npages", "loop lag\nmax (ms)",
    ):  # fmt: skip
        grid.add_column(name, justify="right")
    for row in report["rows"]:
        grid.add_row(
            row["options"],
            row["engine"],
            _cell(row, "requests_per_s"),
            _cell(row, "ttft_p50_s"),
            _cell(row, "ttft_p90_s"),
            _tiers(row),
            _cell(row, "ssd_bytes_written", _size),
            _cell(row, "required_writes"),
            _cell(row, "d2h_bytes", _size),
            _cell(row, "verified_pages"),
            _cell(row, "mismatches"),
            _cell(row, "loop_lag_max_s", lambda value: _number(value * 1e3)),
        )
    return grid


def _title(report: Mapping[str, Any]) -> str:
    work = report["workload"]
    sizes = ", ".join(f"{k} {format_size(v)}" for k, v in report["tiers"].items())
    return (
        f"{work['name']}: {work['requests']} requests, {report['sessions']} sessions; {sizes};"
        f" time scale {report['time_scale']:g}; median and range of {report['repeats']} runs"
    )


def print_table(report: Mapping[str, Any], *, to_stderr: bool) -> None:
    """Print the table; plain text where the stream is no terminal."""
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else 170
    console = Console(file=stream, width=width, highlight=False)
    console.print(table(report))
    for skipped in report.get("skipped", ()):
        console.print(f"skipped: {skipped['options']}: {skipped['reason']}")
