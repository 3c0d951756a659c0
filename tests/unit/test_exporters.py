"""The ways out for statistics: the Prometheus collector and the JSON file."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import prometheus_client
import pytest
from prometheus_client.registry import CollectorRegistry

from kvstore import stats as stats_module
from kvstore.exporters import jsonfile, prometheus
from kvstore.stats import (
    ClassStats,
    EngineStats,
    LatencyHistogram,
    LatencySnapshot,
    PoolStats,
    StoreStats,
)

ROOT = Path(__file__).resolve().parents[2]


class FakeStore:
    """Hands out one snapshot and remembers which thread asked."""

    def __init__(self, stats: StoreStats) -> None:
        self.snapshot = stats
        self.threads: list[int] = []

    def stats(self) -> StoreStats:
        self.threads.append(threading.get_ident())
        return self.snapshot


def full_stats() -> StoreStats:
    """Return a snapshot in which every field carries something."""
    histogram = LatencyHistogram()
    for value_ns in (20_000, 300_000, 300_001, 5_000_000_000):
        histogram.record(value_ns)
    numbers = {field.name: index + 1 for index, field in enumerate(dataclasses.fields(PoolStats))}
    read = ClassStats(
        issued_bytes=11, transfers=2, read_bytes=12, queue_wait=histogram.snapshot(), errors={5: 3}
    )
    return StoreStats(
        levels=("device", "disk"),
        groups=("full",),
        pools={("device", "full"): PoolStats(**numbers), ("disk", "full"): PoolStats(total=9)},
        moved_bytes={"d2h": 7, "h2disk:required": 8},
        device_bytes={"h2d": 1},
        matched_tokens=5,
        matched_tokens_by_level={"device": 2, "disk": 3},
        write_through_skipped_by={"cap": 4},
        recovery_free_slots={"no_ancestor": 6},
        engine=EngineStats(
            engine="threads",
            fallback_reason="io_uring: EPERM",
            bounds={"total": 16},
            classes=(read, ClassStats(), ClassStats()),
        ),
    )


def scrape(registry: CollectorRegistry) -> str:
    return prometheus_client.generate_latest(registry).decode()


def test_every_metric_is_exported_and_carries_its_labels() -> None:
    """A snapshot with all fields set produces a sample for each documented metric."""
    registry = CollectorRegistry()
    prometheus.register(FakeStore(full_stats()), registry, labels={"rank": "3"})
    text = scrape(registry)
    for name, (kind, labels, _) in prometheus.METRICS.items():
        suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[kind]
        line = re.search(rf"^{name}{suffix}{{(.*)}} ", text, re.MULTILINE)
        assert line, name
        for label in ("rank", *labels):
            assert f'{label}="' in line[1], name
    assert 'kvstore_io_errors_total{errno="5",io_class="read",rank="3"} 3.0' in text
    assert 'kvstore_slots{group="full",level="device",rank="3",state="ready"} 2.0' in text


#: Fields that no metric carries, and why.
NOT_EXPORTED = {
    (StoreStats, "levels"): "the labels of the pools",
    (StoreStats, "groups"): "the labels of the pools",
    (StoreStats, "matched_tokens"): "the sum over the levels (INV-812)",
    (StoreStats, "write_through_skipped"): "the sum over the reasons (INV-615)",
    (StoreStats, "disk_modes"): "a name per file; kvstore_io_files counts them by mode",
    (EngineStats, "ring_flags"): "fixed from the start; kvstore doctor and stats() name them",
    (LatencySnapshot, "max_ns"): "a histogram has no maximum",
}


def other_value(value: Any) -> Any:
    """Return a value of the same type that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1000
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, dict):
        key = next(iter(value), "added")
        return value | {key: other_value(value.get(key, 0))}
    if value is None:
        return 7
    return (*value, "x")


def one_of_each() -> dict[type, Callable[[Any], StoreStats]]:
    """For each record: put one like it into a whole snapshot."""
    stats, where = full_stats(), ("device", "full")

    def engine(one: EngineStats) -> StoreStats:
        return dataclasses.replace(stats, engine=one)

    def io_class(one: ClassStats) -> StoreStats:
        others = stats.engine.classes[1:]
        return engine(dataclasses.replace(stats.engine, classes=(one, *others)))

    def latency(one: LatencySnapshot) -> StoreStats:
        return io_class(dataclasses.replace(stats.engine.classes[0], service=one))

    return {
        StoreStats: lambda one: one,
        PoolStats: lambda one: dataclasses.replace(stats, pools=stats.pools | {where: one}),
        EngineStats: engine,
        ClassStats: io_class,
        LatencySnapshot: latency,
    }


def test_every_field_of_every_record_leaves_the_process() -> None:
    """INV-801: changing any field of the statistics changes the scrape, or is listed with a reason:
    a new field cannot be forgotten.
    """
    stats = full_stats()
    before = {
        StoreStats: stats,
        PoolStats: stats.pools["device", "full"],
        EngineStats: stats.engine,
        ClassStats: stats.engine.classes[0],
        LatencySnapshot: stats.engine.classes[0].queue_wait,
    }
    records = {name for name, kind in vars(stats_module).items() if dataclasses.is_dataclass(kind)}
    assert records == {kind.__name__ for kind in before}
    silent = set()
    for kind, put in one_of_each().items():
        plain = text_of(put(before[kind]))
        for field in dataclasses.fields(kind):
            value = getattr(before[kind], field.name)
            if any(dataclasses.is_dataclass(part) for part in (value, *_parts(value))):
                continue  # a record of its own
            changed = dataclasses.replace(before[kind], **{field.name: changed_value(kind, value)})
            if text_of(put(changed)) == plain:
                silent.add((kind, field.name))
    assert set(NOT_EXPORTED) == silent


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return tuple(value.values())
    return value if isinstance(value, tuple) else ()


def changed_value(kind: type, value: Any) -> Any:
    """Return another value; the buckets of a histogram are pairs."""
    if kind is LatencySnapshot and isinstance(value, tuple):
        return (*value[:-1], (value[-1][0], value[-1][1] + 1))
    return other_value(value)


def text_of(stats: StoreStats) -> str:
    """Return what a scrape of this snapshot shows."""
    registry = CollectorRegistry()
    prometheus.register(FakeStore(stats), registry)
    return scrape(registry)


def test_histogram_edges_count_exactly() -> None:
    """Cumulative counts at the exported edges are those of the values, not of rounded buckets."""
    histogram = LatencyHistogram()
    values = [1 << power for power in range(10, 36)] + [(1 << 20) - 1, (1 << 20) + 1]
    for value_ns in values:
        histogram.record(value_ns)
    for edge, count in prometheus.histogram_buckets(histogram.snapshot())[:-1]:
        edge_ns = round(float(edge) * 1e9)
        assert count == sum(value < edge_ns for value in values)


def test_documentation_lists_every_metric() -> None:
    """The table in docs/operating.md names exactly the metrics there are."""
    text = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(kvstore_\w+)` ", text, re.MULTILINE))
    exported = {
        name + ("_total" if kind == "counter" else "")
        for name, (kind, _, _) in prometheus.METRICS.items()
    }
    assert listed == exported


def test_scrape_on_another_thread_takes_the_snapshot_on_the_loop() -> None:
    """The store's tables are read by its own thread, whoever scrapes."""
    store = FakeStore(full_stats())
    registry = CollectorRegistry()

    async def main() -> str:
        prometheus.register(store, registry)
        store.threads.clear()
        return await asyncio.to_thread(scrape, registry)

    assert "kvstore_stale 0.0" in asyncio.run(main())
    assert store.threads == [threading.get_ident()]


def test_busy_loop_shows_the_last_snapshot_as_stale() -> None:
    """A scrape never waits longer than its time limit for a loop that does not answer."""
    store = FakeStore(full_stats())

    async def hold() -> None:
        registry = CollectorRegistry()
        registry.register(prometheus.StoreCollector(store, timeout=0.05))
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(scrape(registry)))
        thread.start()
        thread.join()  # the loop is blocked here on purpose
        assert "kvstore_stale 1.0" in texts[0]
        assert "kvstore_pages 0.0" in texts[0]

    asyncio.run(hold())


def test_json_form_is_plain_and_complete() -> None:
    """The dict of a snapshot survives JSON and keeps every field."""
    plain = jsonfile.as_dict(full_stats())
    assert plain == json.loads(json.dumps(plain)) | {
        "levels": ("device", "disk"),
        "groups": ("full",),
        "engine": plain["engine"],
    }
    assert {field.name for field in dataclasses.fields(StoreStats)} == set(plain)
    assert plain["pools"]["device/full"]["total"] == 1
    assert plain["engine"]["classes"]["read"]["queue_wait"]["total"] == 4


def test_stats_file_is_replaced_whole_and_removed_at_the_end(tmp_path: Path) -> None:
    """Readers see a complete file while the writer runs and none afterwards."""
    path = tmp_path / "stats.json"

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(jsonfile.write_stats, FakeStore(full_stats()), path)
            with anyio.fail_after(10):
                while not path.exists():
                    await anyio.sleep(0.005)
            assert json.loads(path.read_text())["matched_tokens"] == 5
            group.cancel_scope.cancel()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_second_store_in_one_registry_is_refused() -> None:
    """Two stores cannot export under the same names by accident."""
    registry = CollectorRegistry()
    prometheus.register(FakeStore(full_stats()), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus.register(FakeStore(full_stats()), registry)
