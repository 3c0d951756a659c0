"""The arithmetic of results: histograms, fio's JSON keys, patterns."""

import numpy as np
import pytest
from kvstore_bench.fioformat import GroupRun, JobResult, RunResult, Usage, run_json, run_text
from kvstore_bench.iostats import Latencies, bucket_middle_ns, bucket_of, snapshot_since
from kvstore_bench.jobs import job_from
from kvstore_bench.pattern import Pattern

from kvstore.stats import ClassStats, EngineStats, LatencyHistogram


def test_percentiles_are_within_two_percent():
    """The histogram keeps fio's resolution over six decades."""
    values = np.random.default_rng(1).lognormal(12, 2, 100_000).astype(np.int64)
    histogram = Latencies()
    for part in np.array_split(values, 37):
        histogram.add(part)
    for percent in (1, 50, 90, 99, 99.9):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert exact == pytest.approx(histogram.percentile_ns(percent), rel=0.02)
    assert (values.min(), values.max()) == (histogram.min_ns, histogram.max_ns)
    assert values.mean() == pytest.approx(histogram.mean_ns)
    assert values.std(ddof=1) == pytest.approx(histogram.stddev_ns, rel=1e-6)


def test_buckets_are_monotonic_and_hold_their_middle():
    """Every bucket's middle falls into the bucket."""
    values = np.unique(np.logspace(0, 12, 5000).astype(np.int64))
    buckets = bucket_of(values)
    assert (np.diff(buckets) >= 0).all()
    middles = np.array([bucket_middle_ns(int(bucket)) for bucket in buckets])
    assert (bucket_of(middles) == buckets).all()


def test_merge_adds_histograms():
    """Two halves give the whole."""
    whole, left, right = Latencies(), Latencies(), Latencies()
    values = np.arange(1, 1001)
    whole.add(values)
    left.add(values[:400])
    right.add(values[400:])
    left.merge(right)
    assert whole.total == left.total
    assert whole.percentile_ns(50) == left.percentile_ns(50)
    assert whole.stddev_ns == pytest.approx(left.stddev_ns)


def test_snapshot_since_is_the_window():
    """A growing histogram minus its past is what happened in between."""
    histogram = LatencyHistogram()
    histogram.record(100)
    before = histogram.snapshot()
    for value in (1000, 2000, 3000):
        histogram.record(value)
    window = snapshot_since(histogram.snapshot(), before)
    assert 3 == window.total
    assert 6000 == window.sum_ns
    assert 1000 == pytest.approx(window.percentile_ns(1), rel=0.07)


def job(**values):
    return job_from({"directory": "/d", "size": 1 << 20, **values})


def take(pattern, count):
    parts = []
    while count > 0:
        parts.append(pattern.take(count))
        count -= len(parts[-1][0])
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def test_sequential_pattern_wraps():
    """A sequential job goes over its file from the start again."""
    offsets, sizes, is_read = take(Pattern(job(rw="read", bs=(65536, 65536)), 1 << 20, 0), 33)
    assert [i % 16 * 65536 for i in range(33)] == offsets.tolist()
    assert {65536} == set(sizes.tolist())
    assert is_read.all()


def test_random_pattern_visits_each_block_once_per_round():
    """Fio's random map: no block twice before all had their turn."""
    pattern = Pattern(job(rw="randwrite", bs=(4096, 4096)), 1 << 20, 0)
    offsets, _, is_read = take(pattern, 512)
    assert sorted(range(0, 1 << 20, 4096)) == sorted(offsets[:256].tolist())
    assert sorted(range(0, 1 << 20, 4096)) == sorted(offsets[256:].tolist())
    assert not is_read.any()


def test_equal_seeds_give_equal_patterns():
    """A run can be repeated."""
    spec = job(rw="randrw", bssplit=(((4096, 50.0), (8192, 50.0)),) * 2, rwmixread=70)
    one, two, other = (take(Pattern(spec, 1 << 20, seed), 5000) for seed in (1, 1, 2))
    assert all((left == right).all() for left, right in zip(one, two, strict=True))
    assert not (one[0] == other[0]).all()
    assert one[2].mean() == pytest.approx(0.7, abs=0.03)
    assert (one[0] + one[1].astype(np.uint64) <= 1 << 20).all()


def result():
    spec = job(name="a", rw="randrw", bs=(4096, 4096), iodepth=4, rwmixread=75)
    mine = JobResult(
        spec, 0, clones=1, runtime_ns=2_000_000_000, usage=Usage(0.5, 0.25, 100, 0, 1, 2.0)
    )
    for side, count in ((mine.read, 3000), (mine.write, 1000)):
        side.total_ios, side.io_bytes = count, count * 4096
        side.clat.add(np.full(count, 50_000))
        side.lat.add(np.full(count, 60_000))
        side.slat.add(np.full(count, 10_000))
        side.bw_samples = [1e6, 2e6]
        side.iops_samples = [100.0, 200.0]
    mine.depth_counts = {4: 4000}
    histogram = LatencyHistogram()
    histogram.record(20_000)
    stats = EngineStats(
        engine="io_uring",
        classes=(
            ClassStats(transfers=3000, pieces=3000, service=histogram.snapshot()),
            ClassStats(),
            ClassStats(),
        ),
    )
    group = GroupRun(
        EngineStats(), stats, mine.usage, Latencies(), huge_pages=True, direct="direct"
    )
    return RunResult([mine], [group], started_at=1_700_000_000.0, version="1")


def test_json_has_fio_keys():
    """The keys, units and percentile names are fio's."""
    (entry,) = run_json(result())["jobs"]
    assert "a" == entry["jobname"]
    assert 3000 * 4096 / 2 == entry["read"]["bw_bytes"]
    assert 1500.0 == entry["read"]["iops"]
    assert 500.0 == entry["write"]["iops"]
    assert 50_000 == pytest.approx(entry["read"]["clat_ns"]["percentile"]["50.000000"], rel=0.02)
    assert {"min", "max", "mean", "stddev", "N"} <= set(entry["write"]["slat_ns"])
    assert (25.0, 12.5, 100) == (entry["usr_cpu"], entry["sys_cpu"], entry["ctx"])
    assert 100.0 == entry["iodepth_level"]["4"]
    assert {"name": "a", "rw": "randrw", "iodepth": "4"}.items() <= entry["job options"].items()


def test_json_has_our_keys():
    """Classes, CPU per GiB and loop lag stand under a key of their own."""
    (entry,) = run_json(result())["jobs"]
    ours = entry["kvstore"]
    assert ["read"] == list(ours["classes"])
    assert {"queue_wait_ns", "service_ns", "promotions", "skips"} <= set(ours["classes"]["read"])
    assert 0.75 / (4000 * 4096 / (1 << 30)) == pytest.approx(ours["cpu_s_per_gib"])
    assert "loop_lag_ns" in ours


def test_text_reads_like_fio():
    """A fio user finds the lines at their places."""
    text = run_text(result())
    for part in (
        "read: IOPS=1500, BW=5.859MiB/s (6.144MB/s)",
        "clat percentiles",
        "99.00th=[",
        "Run status group 0 (all jobs):",
        "   READ: bw=",
        "  WRITE: bw=",
        "cpu per GiB",
    ):
        assert part in text
