"""Drive the tables with random steps from a seed: ``fuzz_tables.py --seed 1 --steps 1000000``.

Each round draws a new store of a few slots. A failure prints the seed of its round and the last
steps; the same seed replays it. Not a test by itself: the suite runs it with few steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from table_model import TableModel

from kvstore import compiled


def run_round(
    seed: int, steps: int, check_every: int, *, with_recovery: bool = False
) -> TableModel:
    """Run one store; raise with the last steps if a rule breaks."""
    generator = random.Random(seed)
    draw = generator.randrange
    model = TableModel(draw, with_faults=draw(4) != 0, with_recovery=with_recovery)
    names: list[str] = []
    try:
        for index in range(steps):
            names.append(model.step())
            if index % check_every == 0:
                model.check()
            if index % 211 == 210:
                model.drain()
        model.drain()
        model.finish()
    except Exception:
        print(f"round with seed {seed} failed after {len(names)} steps: {names[-12:]}")
        raise
    return model


def main() -> int:
    """Run rounds until the steps are used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--round", type=int, default=500, help="steps of one store")
    parser.add_argument("--check-every", type=int, default=1)
    options = parser.parse_args()
    started, done, served, refused, seed = time.monotonic(), 0, 0, 0, options.seed
    prefetches = recovered = 0
    while done < options.steps:
        try:
            is_odd = seed % 2 == 1  # these begin with the disk of an earlier life
            model = run_round(seed, options.round, options.check_every, with_recovery=is_odd)
        except KeyboardInterrupt:
            break
        except Exception:
            traceback.print_exc()
            return 1
        done += options.round
        served += model.served_pages
        refused += model.refusals
        prefetches += model.prefetch_refusals
        recovered += model.recovered_pages
        seed += 1
    seconds = time.monotonic() - started
    print(
        f"{done} steps, seeds {options.seed}..{seed - 1}, check every {options.check_every}:"
        f" no violation; {served} pages verified, {refused} refusals compared, {prefetches} of them"
        f" of prefetches, {recovered} pages recovered, {done / seconds:.0f} steps/s;"
        f" core: {compiled.describe()}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
