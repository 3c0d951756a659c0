"""Eviction policy and write admission on a trace, counted on the pure tables.

``python -m kvstore_bench.policies --trace FILE`` replays the requests one at a time through a
device tier and a disk tier, with moves that end at once, and prints for each policy the hit rate,
the blocks written to disk and the blocks written per block read back. The counts are exact, so a
run has no spread; nothing is timed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvstore.config import Tier
from kvstore.core.page import MoveKind, MoveState, Page
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Plan, Tables
from kvstore.keys import BlockKey

POLICIES = ("lru", "s3fifo")
ADMISSIONS: tuple[tuple[str, int | None], ...] = (("all", None), ("selective", 2))


def replay(
    rows: Sequence[Sequence[int]],
    device: int,
    disk: int,
    *,
    policy: str,
    uses: int | None,
    keep_copy: bool,
) -> dict[str, Any]:
    """Return the exact counts of one configuration; sizes are blocks."""
    tables = Tables(
        TablesSpec(
            groups=(GroupSpec(name="full", eviction_policy=policy),),
            levels=(
                LevelSpec(tier=Tier.DEVICE, slot_counts=(device,)),
                LevelSpec(tier=Tier.DISK, slot_counts=(disk,), keep_copy=keep_copy),
            ),
            block_tokens=512,
            selective_uses=uses,
        )
    )
    hits = references = written = read = 0
    for ids in rows:
        keys = [BlockKey(block.to_bytes(32, "little")) for block in ids]
        match = tables.match(keys)
        row: list[Page | None] = list(match.pages[0])
        tables.hold(row)
        plan = tables.plan_restore((row,), (len(keys) - len(row),))
        if not isinstance(plan, Plan):
            message = f"{device} blocks, but a request has {len(keys)}"
            raise click.BadParameter(message, param_hint="--device")
        hits, references = hits + len(row), references + len(keys)
        new = tables.apply(plan).new_pages[0]
        while outbox := tables.take_outbox():
            for move in outbox.start:
                if move.state is MoveState.BOUNCING:
                    tables.move_source_released(move)
                    continue
                written += move.kind is MoveKind.EVICT
                read += move.kind is MoveKind.RESTORE
                tables.move_done(move)
        tables.lock(row)
        for page in new:
            parent = row[-1] if row else None
            row.append(tables.commit(page, keys[len(row)], parent, len(row)))
        tables.unlock(row, PASSED)
        tables.unhold(row)
    return {
        "policy": policy,
        "admission": "all" if uses is None else f"use {uses}",
        "keep_copy": keep_copy,
        "device_blocks": device,
        "disk_blocks": disk,
        "hit_percent": round(100 * hits / references, 2),
        "disk_blocks_written": written,
        "disk_blocks_read": read,
        "written_per_read": round(written / read, 2) if read else None,
        "taken_back": tables.pools[1][0].reused,
    }


@click.command()
@click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--device", default=1_000, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--disk",
    multiple=True,
    default=(5_000, 20_000, 120_000),
    show_default=True,
    type=click.IntRange(min=1),
)
@click.option("--requests", default=None, type=click.IntRange(min=1))
@click.option("--output-format", type=click.Choice(["normal", "json"]), default="normal")
def command(
    trace: str, device: int, disk: tuple[int, ...], requests: int | None, output_format: str
) -> None:
    """Compare eviction policies and write admission on a trace in Mooncake format."""
    lines = Path(trace).read_text(encoding="utf-8").splitlines()[:requests]
    rows = [json.loads(line)["hash_ids"] for line in lines]
    results = [
        replay(rows, device, size, policy=policy, uses=uses, keep_copy=True)
        for size, policy, (_name, uses) in itertools.product(disk, POLICIES, ADMISSIONS)
    ]
    if output_format == "json":
        click.echo(json.dumps({"trace": Path(trace).name, "rows": results}, indent=2))
        return
    click.echo(
        "| disk blocks | policy | admission | hit % | written | read back | written / read |"
    )
    click.echo("|---|---|---|---|---|---|---|")
    for row in results:
        click.echo(
            f"| {row['disk_blocks']} | {row['policy']} | {row['admission']} | {row['hit_percent']}"
            f" | {row['disk_blocks_written']} | {row['disk_blocks_read']}"
            f" | {row['written_per_read']} |"
        )


if __name__ == "__main__":
    command()
