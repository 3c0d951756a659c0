"""``kvstore-bench device``: copies, gate and event bridge of a GPU, B1 to B14, as JSON or table."""

from __future__ import annotations

import datetime as dt
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvstore._uring.native import Arena, GateRing
from kvstore.errors import KVStoreError

from . import machine
from .cli import bad_option, package_version
from .devicegpu import ALL, GIB, MIB, Bench
from .gputargets import judge

ARENA_BYTES = 1 * GIB + 64 * MIB
#: Attributes of the driver that explain a figure: memops, flush, engines, NUMA, page tables.
ATTRIBUTES = (122, 123, 92, 93, 94, 98, 91, 88, 100, 40, 134, 86, 117, 16, 75, 76)


def describe(device: Any) -> dict[str, Any]:
    """Return name, driver, attributes and what the probe found."""
    driver = device.driver
    return {
        "name": driver.name,
        "driver_version": driver.driver_version,
        "device_count": driver.device_count,
        "attributes": {str(number): device.native.attribute(number) for number in ATTRIBUTES},
        "caps": device.caps._asdict(),
        "min_dma": device.min_dma,
    }


def measure(
    device: Any,
    ring: GateRing,
    directory: Path,
    *,
    names: tuple[str, ...],
    quick: bool,
    limit_s: float,
    save: Any,
) -> dict[str, Any]:
    """Run the measurements in order until the time is up; ``save`` is called after each."""
    arena = Arena(ARENA_BYTES if not quick else 320 * MIB)
    arena.prefault()
    for address, length in arena.slabs():
        device.register_host(address, length)
    bench = Bench(device, ring, arena, directory, quick, device.ordinal)
    console = Console(stderr=True)
    begin = time.perf_counter()
    for name in names:
        if time.perf_counter() - begin > limit_s:
            bench.results[name] = {"skipped": "time is up"}
            continue
        start = time.perf_counter()
        try:
            bench.results[name] = ALL[name](bench)
        except Exception as error:  # noqa: BLE001  (one broken measurement must not cost the others)
            bench.results[name] = {"error": f"{type(error).__name__}: {error}"}
            ring.publish_all(-5)
        bench.results[name]["took_s"] = round(time.perf_counter() - start, 2)
        save(bench.results)
        console.print(f"{name}: {bench.results[name]['took_s']} s")
        if device.error:
            break
    device.synchronize(30.0)
    for address, _ in arena.slabs():
        device.unregister_host(address)
    arena.close()
    return bench.results


def show(results: dict[str, Any]) -> Table:
    """Return a table of every number, one line each."""
    table = Table(box=box.SIMPLE)
    for column in ("id", "measure", "value"):
        table.add_column(column)
    for name, numbers in results.items():
        for key, value in numbers.items():
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            table.add_row(name, key, text)
    return table


def show_targets(lines: list[dict[str, Any]]) -> Table:
    """Return a table of the targets."""
    table = Table(box=box.SIMPLE)
    for column in ("id", "target", "", "limit", "value", "met"):
        table.add_column(column)
    words = {True: "yes", False: "NO", None: "not measured"}
    for line in lines:
        value = "" if line["value"] is None else str(line["value"])
        table.add_row(
            line["id"], line["target"], line["kind"], str(line["limit"]), value, words[line["met"]]
        )
    return table


@click.command("device")
@click.option("--device", "name", default="cuda:0", show_default=True, help="cuda or cuda:N.")
@click.option("--only", default="", help="Comma-separated ids, such as B1,B7; default: all.")
@click.option("--quick", is_flag=True, help="Fewer repetitions and smaller areas.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where B12 makes its slot files; default: a temporary folder.",
)
@click.option("--time-limit", default=600.0, show_default=True, help="Seconds for all of it.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write the JSON here after each measurement.",
)
@click.option("--output-format", type=click.Choice(["normal", "json"]), default="normal")
def command(
    name: str,
    only: str,
    directory: Path | None,
    time_limit: float,
    output: Path | None,
    output_format: str,
    *,
    quick: bool,
) -> None:
    """Measure copies, gates and the event bridge of a GPU (B1 to B14)."""
    names = tuple(only.split(",")) if only else tuple(ALL)
    for one in names:
        if one not in ALL:
            raise bad_option("only", f"unknown id {one!r}; one of {', '.join(ALL)}")
    if not name.startswith("cuda"):
        raise bad_option("device", f"must be cuda or cuda:N, got {name!r}")
    from kvstore.devices.cuda import open_cuda_device

    ring = GateRing(256)
    try:
        device = open_cuda_device(name, ring)
    except KVStoreError as error:
        raise bad_option("device", str(error).removeprefix("device: ")) from None
    report: dict[str, Any] = {
        "kvstore": package_version(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(directory or Path.cwd()),
        "device": describe(device),
        "quick": quick,
    }

    def save(results: dict[str, Any]) -> None:
        report["results"] = results
        report["targets"] = judge(results)
        if output is not None:
            output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(dir=directory) as folder:
        try:
            results = measure(
                device, ring, Path(folder), names=names, quick=quick, limit_s=time_limit, save=save
            )
        finally:
            ring.publish_all(-125)
            device.close()
            ring.close()
    save(results)
    if output_format == "json":
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        Console().print(show(results))
        Console().print(show_targets(judge(results)))
    if any("error" in numbers for numbers in results.values()):
        raise SystemExit(1)
