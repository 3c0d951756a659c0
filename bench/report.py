"""``kvstore-bench report``: one HTML page from saved JSON, plots and tables included.

The page stands alone: drawings are inline SVG, no script, nothing is fetched.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import click

from . import compare, machine, mixed
from .cli import bad_option
from .plots import Plot, plots_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 70em; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { border-top: 1px solid #ccc; padding-top: 1em; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
td, th { border: 1px solid #ddd; padding: .25em .6em; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
figure { margin: 1.5em 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: 13px; }
.scroll { overflow-x: auto; } .about { color: #555; font-size: 13px; }
"""


def _bad_file(path: Path, message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint=str(path))


def read_result(path: Path) -> dict[str, Any]:
    """Read one saved result.

    Raises: click.BadParameter: not readable, or not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise _bad_file(path, f"cannot be read: {reason}") from None
    start = text.find("{")  # fio may print a line before its JSON
    try:
        result = json.loads(text[start:] if start >= 0 else text)
    except ValueError as error:
        raise _bad_file(path, f"is not JSON: {error}") from None
    if not isinstance(result, dict):
        raise _bad_file(path, "holds no result")
    return result


def markdown_tables(text: str) -> str:
    """Return the Markdown tables of a text as HTML; a line in ** becomes a heading."""
    parts: list[str] = []
    rows: list[list[str]] = []

    def flush() -> None:
        if rows:
            head, *body = rows
            cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
            lines = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in body
            )
            parts.append(f'<div class="scroll"><table><tr>{cells}</tr>{lines}</table></div>')
            rows.clear()

    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not all(set(cell) <= {"-", ":"} for cell in cells):
                rows.append(cells)
            continue
        flush()
        if line.startswith("**"):
            parts.append(f"<h3>{html.escape(line.strip('*'))}</h3>")
    flush()
    return "".join(parts)


def generic_table(rows: list[Any]) -> str:
    """Return any list of flat rows as Markdown."""
    flat = [row for row in rows if isinstance(row, dict)]
    columns = [
        key
        for key in dict.fromkeys(key for row in flat for key in row)
        if all(not isinstance(row.get(key), dict | list) for row in flat)
    ]
    if not columns:
        return ""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in flat
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def io_table(result: dict[str, Any]) -> str:
    """Return the jobs of an I/O run as Markdown."""
    lines = [
        "| job | side | MiB/s | IOPS | clat p50 ms | p99 ms | p99.9 ms | CPU s/GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for job in result["jobs"]:
        for side in ("read", "write"):
            figures = job.get(side, {})
            if not figures.get("total_ios"):
                continue
            percentile = figures["clat_ns"].get("percentile", {})
            p50, p99, p999 = (
                f"{percentile.get(name, 0) / 1e6:.2f}"
                for name in ("50.000000", "99.000000", "99.900000")
            )
            cpu = job.get("kvstore", {}).get("cpu_s_per_gib")
            lines.append(
                f"| {job['jobname']} | {side} | {figures['bw_bytes'] / (1 << 20):.0f} "
                f"| {figures['iops']:.0f} | {p50} | {p99} | {p999} "
                f"| {'-' if cpu is None else f'{cpu:.3f}'} |"
            )
    return "\n".join(lines)


def calibration_table(found: dict[str, Any]) -> str:
    """Return the curve of ``kvstore doctor --calibrate --json`` as Markdown."""
    lines = ["| MiB in the device | MiB/s | p50 ms | p99 ms |", "|---|---|---|---|"]
    lines += [
        f"| {point['inflight_bytes'] / (1 << 20):g} | {point['read_bytes_per_s'] / (1 << 20):.0f} "
        f"| {point['read_ns_p50'] / 1e6:.2f} | {point['read_ns_p99'] / 1e6:.2f} |"
        for point in found["reads"]
    ]
    return "\n".join(lines)


def table_of(result: dict[str, Any]) -> str:
    """Return the tables that fit a result, as Markdown."""
    kind = result.get("kind")
    if kind == "compare":
        return compare.table_text(result["rows"])
    if kind == "mixed":
        return mixed.table_text(result["summary"])
    if isinstance(result.get("jobs"), list) and result["jobs"] and "jobname" in result["jobs"][0]:
        return io_table(result)
    if isinstance(result.get("calibration"), dict):
        return calibration_table(result["calibration"])
    rows = result.get("rows")
    return generic_table(rows) if isinstance(rows, list) else ""


def _plot_html(plot: Plot) -> str:
    return (
        f"<figure><h3>{html.escape(plot.title)}</h3>{plot.svg}"
        f"<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
    )


def section(path: Path, result: dict[str, Any]) -> str:
    """Return the part of the page about one file."""
    host = result.get("host") or result.get("kvstore", {}).get("host") or {}
    about = [
        part
        for part in (machine.describe_text(host) if host else "", str(result.get("time", "")))
        if part
    ]
    notes = "".join(f"<p>{html.escape(str(note))}</p>" for note in result.get("notes", []))
    return (
        f"<h2>{html.escape(path.name)}</h2>"
        f"<p class='about'>{html.escape('; '.join(about))}</p>{notes}"
        + "".join(_plot_html(plot) for plot in plots_of(result))
        + markdown_tables(table_of(result))
    )


def page(title: str, sections: list[str]) -> str:
    """Return the whole page."""
    return (
        f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE..."
)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="the HTML page"
)
@click.option("--title", default="kvstore-bench", show_default=True)
@click.option(
    "--svg", type=click.Path(path_type=Path), help="also write each plot into this directory"
)
def command(files: tuple[Path, ...], output: Path, title: str, svg: Path | None) -> None:
    """Make one HTML page with plots and tables from saved JSON results.

    Takes the JSON of io, compare, mixed and replay, of kvstore doctor --calibrate, and fio's own.
    """
    results = [(path, read_result(path)) for path in files]
    if not output.parent.is_dir():
        raise bad_option("--output", f"its directory does not exist: {output}")
    if svg is not None and not svg.is_dir():
        raise bad_option("--svg", f"is not a directory: {svg}")
    output.write_text(
        page(title, [section(path, result) for path, result in results]), encoding="utf-8"
    )
    if svg is not None:
        for path, result in results:
            for number, plot in enumerate(plots_of(result)):
                (svg / f"{path.stem}-{number}.svg").write_text(plot.svg, encoding="utf-8")
