"""``kvstore-bench meta``: what the bookkeeping of a page costs, on the pure tables.

No I/O, no device, no event loop: the tables alone, at several numbers of resident pages. Every
figure is a median over repeats; ``longest_hold_s`` is the longest single call up to 2,000 pages,
garbage collection included unless ``--no-gc``. Evicting is measured both ways: the pages leave no
cycles of references, so a scheduler may collect when it is idle instead (docs/operating.md).
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvstore.config import Tier
from kvstore.core.page import Page
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Plan, Tables
from kvstore.keys import BlockKey, KeyChain, scope_key

PREFIX_PAGES = 2_000
BLOCK_TOKENS = 32
DEFAULT_PAGES = (10_000, 100_000, 500_000, 1_000_000)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


class _Bench:
    """Tables of one size, filled with prefixes of `PREFIX_PAGES` blocks."""

    def __init__(self, page_count: int, host_prefixes: int) -> None:
        self.prefix_pages = min(PREFIX_PAGES, page_count // 4)
        self.page_count = page_count // self.prefix_pages * self.prefix_pages
        slack = 2 * self.prefix_pages
        self.spec = TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=(
                LevelSpec(tier=Tier.DEVICE, slot_counts=(self.page_count + slack,)),
                LevelSpec(tier=Tier.HOST, slot_counts=(host_prefixes * self.prefix_pages,)),
                LevelSpec(tier=Tier.DISK, slot_counts=(4 * self.prefix_pages,)),
            ),
            block_tokens=BLOCK_TOKENS,
        )
        self.tables = Tables(self.spec)
        self.holds_s: list[float] = []
        self.serial = 0

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Run one call that holds the loop, and remember how long."""
        started = time.thread_time()
        result = call()
        elapsed = time.thread_time() - started
        self.holds_s.append(elapsed)
        return elapsed, result

    def tokens(self) -> list[int]:
        """Return the tokens of a prefix nobody else has."""
        self.serial += 1
        return [self.serial] * BLOCK_TOKENS + list(range((self.prefix_pages - 1) * BLOCK_TOKENS))

    def session(self) -> tuple[list[BlockKey], dict[str, float]]:
        """Grow, fill, commit, suspend and close one new prefix; return its keys and times."""
        tables, count = self.tables, self.prefix_pages
        tokens = self.tokens()
        plan_s, plan = self.timed(lambda: tables.plan_grow((count,)))
        assert isinstance(plan, Plan)
        apply_s, applied = self.timed(lambda: tables.apply(plan))
        for move in tables.take_outbox().start:
            tables.move_done(move)
        while outbox := tables.take_outbox():
            for move in outbox.start:
                tables.move_done(move)
        chain = KeyChain(BLOCK_TOKENS, scope_key(b"bench"))
        row: list[Page] = applied.new_pages[0]

        def commit() -> list[Page]:
            chain.extend(tokens)
            parent: Page | None = None
            committed: list[Page] = []
            commit_page, keys = tables.commit, chain.keys
            for index, page in enumerate(row):
                parent = commit_page(page, keys[index], parent, index)
                committed.append(parent)
            return committed

        commit_s, pages = self.timed(commit)
        suspend_s, _ = self.timed(lambda: tables.unlock(pages, PASSED))
        close_s, _ = self.timed(lambda: tables.unhold(pages))
        times = {
            "grow": plan_s + apply_s,
            "commit": commit_s,
            "suspend": suspend_s,
            "close": close_s,
        }
        return chain.keys, times

    def resume(self, keys: Sequence[BlockKey]) -> dict[str, float]:
        """Match, hold, plan, apply and lock a resident prefix; then let it go again."""
        tables = self.tables
        match_s, match = self.timed(lambda: tables.match(keys))
        assert match.block_count == self.prefix_pages
        row = match.pages[0]
        hold_s, _ = self.timed(lambda: tables.hold(row))

        def plan_and_apply() -> None:
            plan = tables.plan_restore((row,))
            assert isinstance(plan, Plan)
            assert plan.is_empty
            tables.apply(plan)
            tables.lock(row)

        plan_s, _ = self.timed(plan_and_apply)
        suspend_s, _ = self.timed(lambda: tables.unlock(row, PASSED))
        close_s, _ = self.timed(lambda: tables.unhold(row))
        return {
            "match": match_s,
            "hold": hold_s,
            "plan_apply": plan_s,
            "resume": match_s + hold_s + plan_s,
            "suspend": suspend_s,
            "close": close_s,
        }


def measure(page_count: int, repeats: int) -> dict[str, Any]:
    """Measure one size; return microseconds per page or block, bytes per page, longest call."""
    gc.collect()
    bench = _Bench(page_count, 2 * repeats + 1)
    before = _resident_bytes()
    prefixes = bench.page_count // bench.prefix_pages
    known: list[list[BlockKey]] = [bench.session()[0] for _ in range(prefixes)]
    del_keys = sum(sys.getsizeof(keys) for keys in known)
    bytes_per_page = (_resident_bytes() - before - del_keys) / bench.page_count
    bench.holds_s.clear()
    gc.collect()
    gc.freeze()
    resumes = [bench.resume(known[index % len(known)]) for index in range(repeats)]
    fresh = [bench.session()[1] for _ in range(min(2, repeats))]  # fills the slack
    evicting: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    longest_s = {True: max(bench.holds_s), False: 0.0}
    was_collecting = gc.isenabled()
    for index in range(2 * repeats):  # now each block evicts one; interleaved
        is_collecting = index % 2 == 0
        if not is_collecting:
            gc.disable()
        bench.holds_s.clear()
        evicting[is_collecting].append(bench.session()[1])
        longest_s[is_collecting] = max(longest_s[is_collecting], *bench.holds_s)
        if was_collecting:
            gc.enable()
    gc.unfreeze()

    def median(rows: list[dict[str, float]], name: str) -> float:
        per_page = [row[name] / bench.prefix_pages * 1e6 for row in rows]
        return round(statistics.median(per_page), 4)

    return {
        "pages": bench.page_count,
        "prefix_pages": bench.prefix_pages,
        "match_us_per_page": median(resumes, "match"),
        "hold_us_per_page": median(resumes, "hold"),
        "plan_apply_us_per_page": median(resumes, "plan_apply"),
        "resume_us_per_page": median(resumes, "resume"),
        "suspend_us_per_page": median(resumes, "suspend"),
        "close_us_per_page": median(resumes, "close"),
        "commit_us_per_block": median(fresh + evicting[True], "commit"),
        "grow_us_per_page": median(fresh, "grow"),
        "evict_us_per_page": median(evicting[True], "grow"),
        "evict_no_gc_us_per_page": median(evicting[False], "grow"),
        "bytes_per_page": round(bytes_per_page, 1),
        "longest_hold_s": round(longest_s[True], 6),
        "longest_evict_no_gc_s": round(longest_s[False], 6),
    }


@click.command()
@click.option(
    "--pages",
    multiple=True,
    type=click.IntRange(min=1_000),
    help="Resident pages; may be given several times. Default: 10000 100000 500000 1000000.",
)
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(min=1))
@click.option("--no-gc", is_flag=True, help="Switch garbage collection off while measuring.")
@click.option(
    "--output-format", type=click.Choice(["normal", "json"]), default="normal", show_default=True
)
def command(pages: tuple[int, ...], repeats: int, no_gc: bool, output_format: str) -> None:
    """Measure what match, plan, apply, commit, suspend and evict cost per page."""
    if no_gc:
        gc.disable()
    sizes = sorted(set(pages or DEFAULT_PAGES))
    rows = [measure(size, repeats) for size in sizes]
    growth = {
        name: round(rows[-1][name] / rows[0][name], 3)
        for name in ("resume_us_per_page", "commit_us_per_block")
        if rows[0][name]
    }
    if output_format == "json":
        names = ("resume_us_per_page", "commit_us_per_block", "bytes_per_page", "longest_hold_s")
        picked = {name: {str(row["pages"]): row[name] for row in rows} for name in names}
        result = {**picked, "growth": growth, "repeats": repeats, "gc": not no_gc, "rows": rows}
        click.echo(json.dumps(result, indent=2))
        return
    for row in rows:
        click.echo(f"{row['pages']} resident pages, prefix of {row['prefix_pages']}")
        for name, value in row.items():
            if name not in ("pages", "prefix_pages"):
                click.echo(f"  {name:<24} {value:>12}")
    click.echo(f"growth from {rows[0]['pages']} to {rows[-1]['pages']} pages: {growth}")


if __name__ == "__main__":
    command()
