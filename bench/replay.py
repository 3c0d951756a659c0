"""``kvstore-bench replay``."""

from __future__ import annotations

import click


@click.command("replay")
@click.option("--seed", type=click.IntRange(0), default=1, help="Seed of the built-in workload.")
def command(seed: int) -> None:
    """Replay a trace or a seeded workload through the whole store."""
    raise click.UsageError(f"not finished yet (seed {seed})")
