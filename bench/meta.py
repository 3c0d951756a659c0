"""``kvstore-bench meta``: what the bookkeeping of a page costs, on the pure tables.

No I/O, no device, no event loop: the tables alone, at several numbers of resident pages. Every
figure is a median over repeats. ``longest_hold_s`` is the longest time for which one turn of the
loop is held for up to 2,000 pages, plan and apply together, whatever the pages have to do: plans
of two moves a page are part of it, and the garbage collector, unless ``--no-gc``. Evicting is
measured both ways: the pages leave no cycles of references, so a scheduler may collect when it is
idle instead (docs/operating.md).

``_plans`` are plans in stores of other shapes, each page of the wish making one to three moves.
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

from kvstore import compiled
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
    """Tables of one size, filled with prefixes of `PREFIX_PAGES` blocks.

    ``colder`` are the prefixes that fit into the host and the disk tier, ``slack`` those beyond
    ``page_count`` that fit on the device.
    """

    def __init__(self, page_count: int, colder: Sequence[int], *, slack: int = 2) -> None:
        self.prefix_pages = min(PREFIX_PAGES, page_count // 4)
        self.prefixes = page_count // self.prefix_pages
        self.page_count = self.prefixes * self.prefix_pages
        counts = (
            self.page_count + slack * self.prefix_pages,
            *(n * self.prefix_pages for n in colder),
        )
        tiers = (Tier.DEVICE, Tier.HOST, Tier.DISK)
        self.spec = TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=[
                LevelSpec(tier=tier, slot_counts=(count,), keep_copy=tier is Tier.DISK)
                for tier, count in zip(tiers, counts, strict=False)
            ],
            block_tokens=BLOCK_TOKENS,
        )
        self.tables = Tables(self.spec)
        self.holds_s: list[float] = []
        self.serial = 0

    def fill(self) -> list[list[BlockKey]]:
        """Make every prefix that is resident in the end; return their keys."""
        return [self.session()[0] for _ in range(self.prefixes)]

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

    def grow(self, count: int) -> tuple[float, list[Page]]:
        """Plan and apply new pages, and end the moves that make room for them."""
        tables = self.tables

        def plan_and_apply() -> list[Page]:
            plan = tables.plan_grow((count,))
            assert isinstance(plan, Plan)
            return tables.apply(plan).new_pages[0]

        grow_s, row = self.timed(plan_and_apply)
        self.end_moves()
        return grow_s, row

    def end_moves(self) -> None:
        """Report every move as done, as the executor would, batch by batch."""
        while outbox := self.tables.take_outbox():
            for move in outbox.start:
                self.tables.move_done(move)

    def restore(self, level: int, known: Sequence[Sequence[BlockKey]]) -> float:
        """Bring back the first prefix whose pages are all on ``level``; return the time."""
        tables = self.tables
        row = next(
            pages
            for pages in (tables.match(keys).pages[0] for keys in known)
            if len(pages) == self.prefix_pages
            and all(page is not None and page.level == level for page in pages)
        )
        tables.hold(row)

        def plan_and_apply() -> None:
            plan = tables.plan_restore((row,))
            assert isinstance(plan, Plan)
            assert not plan.is_empty
            tables.apply(plan)

        elapsed, _ = self.timed(plan_and_apply)
        self.end_moves()
        tables.lock(row)
        tables.unlock(row, PASSED)
        tables.unhold(row)
        return elapsed

    def discard(self) -> None:
        """Give the device one free prefix: pages that are never committed end when released."""
        row = self.grow(self.prefix_pages)[1]
        self.tables.unlock(row, PASSED)
        self.tables.unhold(row)

    def session(self) -> tuple[list[BlockKey], dict[str, float]]:
        """Grow, fill, commit, suspend and close one new prefix; return its keys and times."""
        tables, count = self.tables, self.prefix_pages
        tokens = self.tokens()
        grow_s, row = self.grow(count)
        chain = KeyChain(BLOCK_TOKENS, scope_key(b"bench"))

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
            "grow": grow_s,
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


def _plans(page_count: int, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Measure plans by kind, in tables with ``page_count`` pages on the device, which are full.

    Returns: seconds per wish of `PREFIX_PAGES` pages, and the longest of all holds.
    """
    kinds: dict[str, list[float]] = {}
    longest_s = 0.0

    def run(name: str, bench: _Bench, wish: Callable[[], float], *, counts: bool = True) -> None:
        nonlocal longest_s
        bench.holds_s.clear()
        elapsed = wish()
        if counts:
            kinds.setdefault(name, []).append(elapsed)
            longest_s = max(longest_s, *bench.holds_s)

    # Device, host and disk: the oldest pages fall, and are brought back.
    bench = _Bench(page_count, (2, repeats + 4), slack=0)
    known = bench.fill()
    known += [bench.session()[0] for _ in range(2)]  # the host is full
    gc.collect()
    gc.freeze()

    def session() -> float:
        keys, times = bench.session()
        known.append(keys)
        return times["grow"]

    for _ in range(repeats):
        run("evict_host_to_disk", bench, session)
    for _ in range(4):  # the disk is full
        session()
    for _ in range(repeats):
        run("evict_host_to_disk_disk_drops", bench, session)
    for _ in range(repeats):
        run("exchange_device_host", bench, lambda: bench.restore(1, known))
    for _ in range(repeats):
        run("restore_disk_all_full", bench, lambda: bench.restore(2, known))
    for _ in range(repeats):
        bench.discard()
        run("restore_disk_keeps_copy", bench, lambda: bench.restore(2, known))
    gc.unfreeze()
    # Device and host, then the device alone: the coldest tier drops.
    for name, colder in (("evict_host_drops", (2,)), ("device_drops", ())):
        bench = _Bench(page_count, colder, slack=0)
        known = bench.fill()
        known += [bench.session()[0] for _ in range(sum(colder))]
        gc.collect()
        gc.freeze()
        for _ in range(repeats):
            run(name, bench, session)
        gc.unfreeze()
    bench.holds_s.clear()
    close_s, _ = bench.timed(bench.tables.close)
    kinds["close_tables"] = [close_s * bench.prefix_pages / bench.page_count]
    return kinds, longest_s


def measure(page_count: int, repeats: int) -> dict[str, Any]:
    """Measure one size; return microseconds per page or block, bytes per page, longest call."""
    gc.collect()
    bench = _Bench(page_count, (2 * repeats + 1, 4))
    before = _resident_bytes()
    known = bench.fill()
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
    prefix_pages, page_count = bench.prefix_pages, bench.page_count
    del bench, known
    plans, longest_plan_s = _plans(page_count, repeats)

    def median(rows: list[dict[str, float]], name: str) -> float:
        return per_page([row[name] for row in rows])

    def per_page(seconds: list[float]) -> float:
        return round(statistics.median(seconds) / prefix_pages * 1e6, 4)

    return {
        "pages": page_count,
        "prefix_pages": prefix_pages,
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
        **{f"{name}_us_per_page": per_page(seconds) for name, seconds in plans.items()},
        "bytes_per_page": round(bytes_per_page, 1),
        "longest_hold_s": round(max(longest_s[True], longest_plan_s), 6),
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
        result = {
            **picked,
            "growth": growth,
            "repeats": repeats,
            "gc": not no_gc,
            "compiled": bool(compiled.DIGEST),
            "core": compiled.describe(),
            "rows": rows,
        }
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(f"core: {compiled.describe()}")
    for row in rows:
        click.echo(f"{row['pages']} resident pages, prefix of {row['prefix_pages']}")
        for name, value in row.items():
            if name not in ("pages", "prefix_pages"):
                click.echo(f"  {name:<24} {value:>12}")
    click.echo(f"growth from {rows[0]['pages']} to {rows[-1]['pages']} pages: {growth}")


if __name__ == "__main__":
    command()
