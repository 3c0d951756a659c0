"""Plots of saved results: each function takes parsed JSON and returns figures with a caption."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from .jobs import MIB, size_text

COLOURS = ("#30638e", "#d1495b", "#edae49", "#00798c", "#6a4c93", "#7d8597", "#2a9d8f", "#bc6c25")


@dataclass(frozen=True, slots=True)
class Plot:
    """One drawing as SVG text, and what it shows."""

    title: str
    caption: str
    svg: str


def _figure(width: float = 8.0, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    # no date inside, so that equal results give equal files
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _bars(
    axes: Any,
    names: list[str],
    groups: list[tuple[str, list[float], list[tuple[float, float]] | None]],
) -> None:
    width = 0.8 / max(len(groups), 1)
    for number, (label, values, ranges) in enumerate(groups):
        places = [i + (number - (len(groups) - 1) / 2) * width for i in range(len(names))]
        errors = None
        if ranges is not None:
            errors = [
                [max(value - low, 0) for value, (low, _) in zip(values, ranges, strict=True)],
                [max(high - value, 0) for value, (_, high) in zip(values, ranges, strict=True)],
            ]
        axes.bar(
            places,
            values,
            width * 0.92,
            label=label,
            color=COLOURS[number % len(COLOURS)],
            yerr=errors,
            error_kw={"elinewidth": 0.8, "ecolor": "#444444", "capsize": 1.5},
        )
    axes.set_xticks(range(len(names)), names)


def compare_plots(result: dict[str, Any]) -> list[Plot]:
    """Return the ratio to fio, the bandwidth and the CPU cost of a comparison."""
    rows = result["rows"]
    plots = []
    for rw in dict.fromkeys(row["rw"] for row in rows):
        mine = [row for row in rows if row["rw"] == rw]
        sizes = sorted({row["bs"] for row in mine})
        engines = list(dict.fromkeys(row["engine"] for row in mine))
        table = {(row["engine"], row["bs"]): row for row in mine}
        plots += [
            _compare_plot(rw, sizes, engines, table, "ratio"),
            _compare_plot(rw, sizes, engines, table, "bandwidth"),
            _compare_plot(rw, sizes, engines, table, "cpu"),
        ]
    return plots


def _compare_plot(
    rw: str,
    sizes: list[int],
    engines: list[str],
    table: dict[tuple[str, int], dict[str, Any]],
    what: str,
) -> Plot:
    figure, axes = _figure()
    groups: list[tuple[str, list[float], list[tuple[float, float]] | None]] = []
    for engine in engines:
        values: list[float] = []
        ranges: list[tuple[float, float]] = []
        for size in sizes:
            row = table.get((engine, size))
            value, low, high = _compare_value(row, what)
            values.append(value)
            ranges.append((low, high))
        if any(values):
            groups.append((engine, values, None if what == "cpu" else ranges))
    _bars(axes, [size_text(size) for size in sizes], groups)
    labels = {
        "ratio": ("bandwidth / fio io_uring", "Ratio to fio, median and range of the rounds."),
        "bandwidth": ("MiB/s", "Bandwidth, median and range of the rounds."),
        "cpu": ("CPU seconds per GiB", "CPU of the whole process per GiB moved, median."),
    }
    axes.set_ylabel(labels[what][0])
    if what == "ratio":
        axes.axhline(1.0, color="#222222", linewidth=0.8)
    if what == "cpu":
        axes.set_yscale("log")
    axes.set_xlabel("block size")
    axes.legend(fontsize=7, ncols=3, frameon=False)
    return Plot(f"{rw}: {labels[what][0]}", labels[what][1], _svg(figure))


def _compare_value(row: dict[str, Any] | None, what: str) -> tuple[float, float, float]:
    if row is None:
        return 0.0, 0.0, 0.0
    if what == "cpu":
        return row["cpu_s_per_gib"], 0.0, 0.0
    if what == "bandwidth":
        low, high = row["bw_bytes_range"]
        return row["bw_bytes"] / MIB, low / MIB, high / MIB
    if row["ratio_to_fio"] is None:
        return 0.0, 0.0, 0.0
    low, high = row["ratio_to_fio_range"]
    return row["ratio_to_fio"], low, high


def mixed_plots(result: dict[str, Any]) -> list[Plot]:
    """Return latencies under writers, per experiment."""
    summary = result["summary"]
    plots = []
    for experiment in ("restore60", "restore90"):
        rows = [row for row in summary if row["experiment"] == experiment]
        if rows:
            plots.append(_restore_plot(experiment, rows))
    rows = [row for row in summary if row["experiment"] == "small"]
    if rows:
        plots.append(_small_plot(rows))
    return plots


def _restore_plot(experiment: str, rows: list[dict[str, Any]]) -> Plot:
    figure, axes = _figure(9.0, 4.0)
    names = [row["variant"].replace(", ", ",\n") for row in rows]
    groups: list[tuple[str, list[float], list[tuple[float, float]] | None]] = [
        (f"restore {name}", [row["restore_ns"][name] / 1e6 for row in rows], None)
        for name in ("p50", "p99")
    ]
    groups.append(
        ("required p99", [row.get("required_ns", {}).get("p99", 0) / 1e6 for row in rows], None)
    )
    _bars(axes, names, groups)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.tick_params(axis="x", labelsize=7)
    right = axes.twinx()
    right.plot(
        range(len(rows)),
        [row.get("background_bw_bytes", 0) / MIB for row in rows],
        "k_",
        markersize=14,
        label="background MiB/s",
    )
    right.set_ylabel("background MiB/s")
    right.set_ylim(bottom=0)
    handles = [part for axis in (axes, right) for part in axis.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=7, frameon=False, ncols=4)
    share = experiment.removeprefix("restore")
    return Plot(
        f"Restores at {share} % of the read rate, with writers",
        "16 MiB restores at random times, 4 MiB required writes 20/s, background backlogged.",
        _svg(figure),
    )


def _small_plot(rows: list[dict[str, Any]]) -> Plot:
    figure, axes = _figure(9.0, 3.6)
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    table = {(row["variant"], row["writers"]): row for row in rows}
    groups: list[tuple[str, list[float], list[tuple[float, float]] | None]] = []
    for writers in ("alone", "background", "required"):
        values = [
            table[variant, writers]["small_ns"]["p99"] / 1e6 if (variant, writers) in table else 0.0
            for variant in variants
        ]
        groups.append((f"p99, {writers}", values, None))
    _bars(axes, [variant.replace(", ", ",\n") for variant in variants], groups)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=7, frameon=False)
    return Plot(
        "256 KiB reads at depth 1",
        "p99 alone, and while writers of one class saturate the disk.",
        _svg(figure),
    )


def io_plots(result: dict[str, Any]) -> list[Plot]:
    """Return the latency distribution of each job of an I/O run (ours or fio's own JSON)."""
    figure, axes = _figure()
    drawn = False
    for job in result["jobs"]:
        for side in ("read", "write"):
            percentiles = job.get(side, {}).get("clat_ns", {}).get("percentile")
            if not percentiles or not job[side]["total_ios"]:
                continue
            points = sorted((float(name), value / 1e6) for name, value in percentiles.items())
            axes.plot(
                [1 / (1 - percent / 100) for percent, _ in points if percent < 100],
                [value for percent, value in points if percent < 100],
                marker=".",
                linewidth=1.2,
                label=f"{job['jobname']} {side}",
            )
            drawn = True
    if not drawn:
        _svg(figure)
        return []
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = (2, 10, 100, 1000, 10000)
    axes.set_xticks(ticks, ["50 %", "90 %", "99 %", "99.9 %", "99.99 %"])
    axes.set_xlabel("share of the transfers that are at least as fast")
    axes.set_ylabel("clat ms")
    axes.legend(fontsize=7, frameon=False)
    return [Plot("Completion latency", "Percentiles of clat per job and direction.", _svg(figure))]


def calibration_plots(result: dict[str, Any]) -> list[Plot]:
    """Return bandwidth and latency of reads against the bytes in flight (``kvstore doctor``)."""
    points = result["calibration"]["reads"]
    places = [point["inflight_bytes"] / MIB for point in points]
    figure, axes = _figure()
    for name, colour in (("p50", COLOURS[0]), ("p99", COLOURS[1])):
        values = [point[f"read_ns_{name}"] / 1e6 for point in points]
        axes.plot(places, values, marker=".", color=colour, label=f"latency {name}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_yscale("log")
    axes.set_xlabel("MiB of reads in the device, 1 MiB each")
    axes.set_ylabel("ms")
    right = axes.twinx()
    right.plot(
        places,
        [point["read_bytes_per_s"] / MIB for point in points],
        color=COLOURS[3],
        marker=".",
        linestyle="--",
        label="bandwidth",
    )
    right.set_ylabel("MiB/s")
    right.set_ylim(bottom=0)
    handles = [part for axis in (axes, right) for part in axis.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=7, frameon=False)
    caption = "Where the bandwidth is flat, more bytes in the device only make each read slower."
    return [Plot("Reads against bytes in flight", caption, _svg(figure))]


def rows_plots(result: dict[str, Any]) -> list[Plot]:
    """Return one bar chart per numeric column of any result that has named rows."""
    rows = [row for row in result.get("rows", []) if isinstance(row, dict)]
    label = next(
        (key for key in ("name", "row", "engine", "variant", "case") if rows and key in rows[0]), ""
    )
    if not label:
        return []
    plots = []
    columns = [
        key
        for key, value in rows[0].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    for column in columns[:8]:
        values = [float(row.get(column) or 0.0) for row in rows]
        if len(set(values)) < 2:
            continue
        figure, axes = _figure(8.0, 2.6)
        _bars(axes, [str(row[label])[:28] for row in rows], [(column, values, None)])
        axes.set_ylabel(column, fontsize=8)
        axes.tick_params(axis="x", labelsize=7, rotation=20)
        plots.append(Plot(column, f"{column} per {label}.", _svg(figure)))
    return plots


def plots_of(result: dict[str, Any]) -> list[Plot]:
    """Return the plots that fit a result, by what it holds."""
    kind = result.get("kind")
    if kind == "compare":
        return compare_plots(result)
    if kind == "mixed":
        return mixed_plots(result)
    if isinstance(result.get("jobs"), list) and result["jobs"] and "jobname" in result["jobs"][0]:
        return io_plots(result)
    if isinstance(result.get("calibration"), dict):
        return calibration_plots(result)
    return rows_plots(result)
