"""The cost model, the statistics and the exact LRU reference."""

from __future__ import annotations

import io
import random

import pytest
from kvstore_bench.ablation import ablation_variants, choose_rows, interleave
from kvstore_bench.costs import CostModel, default_time_scale
from kvstore_bench.oracle import lru_hit_rate, lru_hits
from kvstore_bench.results import WIDE, percentile, summarize, table
from kvstore_bench.run import ReplayOptions
from kvstore_bench.workload import agentic_workload
from rich.console import Console


def test_step_cost_is_linear():
    """Prefill costs per token, decode per burst token and sequence, each step once."""
    cost = CostModel(
        step_s=1.0, prefill_token_s=0.5, decode_step_s=2.0, decode_sequence_s=0.25, burst_tokens=4
    )
    assert cost.step_cost_s(0, 0, 0) == 1.0
    assert cost.step_cost_s(10, 0, 0) == 6.0
    assert cost.step_cost_s(0, 3, 4) == 1.0 + 4 * (2.0 + 0.75)
    assert cost.step_cost_s(10, 3, 4) == 6.0 + 4 * (2.0 + 0.75)


def test_time_scale_depends_on_the_workload_alone():
    """The default scale keeps the compute of a run short and never stretches it."""
    cost = CostModel()
    workload = agentic_workload(100, 512, 1)
    scale = default_time_scale(workload, cost, 16)
    assert 0 < scale < 1
    assert scale == default_time_scale(workload, cost, 16)
    assert scale * cost.estimate_s(workload, 16) < 10.5
    tiny = CostModel(step_s=0, prefill_token_s=1e-12, decode_step_s=0, decode_sequence_s=0)
    assert default_time_scale(workload, tiny, 16) == 1.0


def test_percentile_is_nearest_rank():
    """The p-th percentile is a value that was measured."""
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (0, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([], 50) == 0.0


def test_summarize_gives_median_and_range():
    """INV-815: minimum, median and maximum of each measure, tiers one by one."""
    runs = [
        {"a": 1, "t": {"host": 4}, "engine": "x"},
        {"a": 3, "t": {"host": 2, "disk": 9}, "engine": "x"},
        {"a": 2, "t": {"host": 3}, "engine": "x"},
    ]
    medians, ranges = summarize(runs)
    assert medians == {"a": 2, "t": {"host": 3, "disk": 0}, "engine": "x"}
    assert ranges["a"] == {"min": 1, "median": 2, "max": 3}
    assert ranges["t"]["disk"] == {"min": 0, "median": 0, "max": 9}


def test_ablation_rows_and_their_order():
    """Each row adds one option; repeats are interleaved; without io_uring threads carry on."""
    rows = ablation_variants()
    assert [row.options for row in rows] == [
        "serial baseline", "parallel I/O (threads)", "parallel I/O (io_uring)",
        "+ keep copy", "+ write-through", "+ inclusive host",
    ]  # fmt: skip
    switches = [(row.keep_copy, row.write_through, row.inclusive_host) for row in rows]
    assert switches[2:] == [
        (False, False, False), (True, False, False), (True, True, False), (True, True, True)
    ]  # fmt: skip
    assert [row for _, row, _ in interleave(rows, 3)] == list(range(6)) * 3
    fallback = ablation_variants("threads")
    assert {row.engine for row in fallback} == {"serial", "threads"}
    assert len(fallback) == 5


def test_table_fits_and_names_the_rows():
    """The wide table has medians and ranges in whole words, the narrow one fits 80 columns."""
    middle = {
        "requests_per_s": 49.61, "ttft_p50_s": 0.8523, "ttft_p90_s": 1.731, "hit_tokens": 0,
        "ssd_bytes_written": 1427 << 20, "required_writes": 21494, "d2h_bytes": 1750 << 20,
        "verified_pages": 33178, "loop_lag_max_s": 0.1754,
    }  # fmt: skip
    spread = {
        name: {"min": value * 3 // 4, "median": value, "max": value * 5 // 4}
        if isinstance(value, int)
        else {"min": value * 0.75, "median": value, "max": value * 1.25}
        for name, value in middle.items()
    }
    rows = [
        {
            "options": variant.options, "engine": variant.engine, "mismatches": 0,
            "hit_tokens": {"device": 4.4e6, "host": 2.8e6, "disk": 9.7e6},
            "range": spread,
            "runs": [{"verified_pages": 7}] * 3,
        }
        for variant in ablation_variants()
    ]  # fmt: skip
    report = {
        "rows": rows, "workload": {"name": "x", "requests": 9}, "sessions": 3, "repeats": 3,
        "tiers": {"device": 1 << 20}, "time_scale": 0.5, "skipped": [],
    }  # fmt: skip
    wide, narrow = io.StringIO(), io.StringIO()
    Console(file=wide, width=WIDE).print(table(report))
    Console(file=narrow, width=80).print(table(report, is_wide=False))
    assert "parallel I/O (io_uring)" in wide.getvalue()
    assert "1070-1784" in wide.getvalue()
    for name in ("device   host   disk", "verified", "loop lag", "required"):
        assert name in wide.getvalue()
    assert max(map(len, narrow.getvalue().splitlines())) <= 80
    assert "+ inclusive" in narrow.getvalue()


def test_lru_reference_by_hand():
    """The reference trims after the request, leaves before roots."""
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [5, 6, 7, 8], [5, 6, 7, 8], [1]]
    assert lru_hits(rows, 3) == [0, 2, 2, 0, 3, 0]
    assert lru_hits(rows, 100) == [0, 2, 3, 0, 4, 1]
    assert lru_hit_rate(rows, 3).refs == 18


@pytest.mark.parametrize("capacity", [1, 3, 7, 20, 60])
def test_truncated_requests_give_the_reference_the_same_answer(capacity):
    """Entering only the first ``capacity`` ids of a longer request changes no hit."""
    generator = random.Random(4)
    names: dict[tuple[int, ...], int] = {}
    rows = []
    for _ in range(400):
        path: tuple[int, ...] = ()
        for _ in range(generator.randint(1, 12)):
            path = (*path, generator.choice((0, 0, 0, 1, 2)))
        rows.append([names.setdefault(path[: i + 1], len(names)) for i in range(len(path))])
    whole = lru_hits(rows, capacity)
    assert whole == lru_hits([row[:capacity] for row in rows], capacity)


@pytest.mark.parametrize(
    ("rows", "field", "values"),
    [
        ("fractions", "protected_copy_fraction", [0.0, 0.25, 1.0]),
        ("policies", "eviction_policy", ["lru", "lru", "s3fifo", "s3fifo"]),
        ("policies", "write_policy", ["all", "selective", "all", "selective"]),
        ("each", "keep_copy", [False, True, False, False, True]),
        ("each", "write_through", [False, False, True, False, True]),
        ("each", "inclusive_host", [False, False, False, True, True]),
    ],
)
def test_rows_reach_the_configuration(rows, field, values):
    """INV-814, INV-815: what a row says is what its store is configured with."""
    names = {
        "protected_copy_fraction": lambda c: float(c.disk.disk_protected_copy_fraction),
        "eviction_policy": lambda c: c.pool_groups[0].eviction_policy,
        "write_policy": lambda c: c.disk.write_policy,
        "keep_copy": lambda c: c.disk.disk_keep_copy_after_restore,
        "write_through": lambda c: c.disk.disk_write_through,
        "inclusive_host": lambda c: c.host.keep_copy_after_restore,
    }
    options = ReplayOptions(disk_bytes=1 << 30)
    configs = [options.store_config(variant, "kv") for variant in choose_rows(rows)]
    assert values == [names[field](config) for config in configs]
