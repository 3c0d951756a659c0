"""What a GPU has to show: each target with the figure measured and whether it is met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: id of the measurement, path inside it, at least (+1) or at most (-1), limit, what it is.
TARGETS: tuple[tuple[str, tuple[str, ...], int, float, str], ...] = (
    ("B4", ("h2d 1024 KiB batch", "of_contiguous"), 1, 0.95, "H2D pages of 1 MiB / contiguous"),
    ("B4", ("h2d 256 KiB batch", "of_contiguous"), 1, 0.90, "H2D pieces of 256 KiB / contiguous"),
    ("B4", ("h2d 64 KiB batch", "of_contiguous"), 1, 0.70, "H2D pieces of 64 KiB / contiguous"),
    ("B3", ("pages_of_contiguous",), 1, 0.90, "both directions / bidirectional limit"),
    ("B7", ("idle_us", "p99"), -1, 30.0, "gate to stream, idle, p99 in us"),
    ("B7", ("busy_us", "p99"), -1, 60.0, "gate to stream, SMs and both directions busy, p99 in us"),
    ("B7", ("gil_hog_us", "p99"), -1, 60.0, "gate to stream, GIL held for 200 ms, p99 in us"),
    *(
        (
            "B10",
            (f"{loop} {kind} {load} beyond_us", point),
            -1,
            limit,
            f"{loop}, {kind}, {load}: {point}",
        )
        for loop in ("asyncio", "uvloop")
        for kind in ("words", "events")
        for load in ("idle", "loaded")
        for point, limit in (("p50", 60.0), ("p99", 200.0))
    ),
    ("B10", ("idle_watch_passes_in_0.5_s",), -1, 0.0, "wake-ups with nothing pending"),
    *(
        (
            "B12",
            (f"{mode}_{groups}_groups", "of_disk_median"),
            1,
            0.95,
            f"restore / disk alone, {mode}, {groups} groups",
        )
        for mode in ("await", "gated")
        for groups in (1, 8)
    ),
    ("B12", ("gated_8_groups", "first_group_of_all_median"), -1, 0.25, "first of 8 groups / all"),
)


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one line per target; ``met`` is None where nothing was measured."""
    return list(_lines(results))


def _lines(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, path, sign, limit, text in TARGETS:
        value: Any = results.get(name, {})
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        met = None if value is None else sign * (value - limit) >= 0
        yield {
            "id": name,
            "target": text,
            "limit": limit,
            "kind": "at least" if sign > 0 else "at most",
            "value": value,
            "met": met,
        }
