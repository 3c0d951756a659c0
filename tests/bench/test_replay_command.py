"""``kvstore-bench replay``: bad input, the shape of its report, and its exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner
from kvstore_bench import replay, run
from kvstore_bench.cli import cli
from kvstore_bench.scratch import PREFIX, remove_stale, scratch_directory

from kvstore.stats import ClassStats, EngineStats, PoolStats, StoreStats

from .replay_fake import FakeStore  # noqa: TID252

SMALL = ("--requests", "12", "--sessions", "3", "--block-tokens", "512", "--page-bytes", "4096",
         "--gpu-cache-size", "1m", "--time-scale", "0.0001", "--repeats", "3")  # fmt: skip
ROW = {"timestamp": 0, "input_length": 1000, "output_length": 4, "hash_ids": [1, 2]}


def fails(*args: str) -> str:
    result = CliRunner().invoke(cli, ["replay", *args])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--trace", "no/such/file"], "--trace"),
        (["--disk-cache-path", "no/such/directory"], "--disk-cache-path"),
        (["--output", "no/such/directory/x.json"], "--output"),
        (["--page-bytes", "1000"], "--page-bytes"),
        (["--page-bytes", "0"], "--page-bytes"),
        (["--gpu-cache-size", "0"], "--device-cache-size / --gpu-cache-size"),
        (["--host-cache-size", "0"], "--host-cache-size"),
        (["--disk-cache-size", "0"], "--disk-cache-size"),
        (["--disk-cache-size", "1x"], "--disk-cache-size"),
        (["--requests", "0"], "--requests"),
        (["--block-tokens", "0"], "--block-tokens"),
        (["--sessions", "0"], "--sessions"),
        (["--repeats", "0"], "--repeats"),
        (["--io-threads", "300"], "--io-threads"),
        (["--engine", "aio"], "--engine"),
        (["--workload", "chat"], "--workload"),
        (["--time-scale", "-1"], "--time-scale"),
        (["--time-scale", "nan"], "--time-scale"),
        (["--protected-copy-fraction", "1.5"], "--protected-copy-fraction"),
        (
            ["--gpu-cache-size", "64k", "--page-bytes", "64k"],
            "--device-cache-size / --gpu-cache-size",
        ),
        (["--no-disk", "--keep-copy"], "--keep-copy"),
        (["--no-disk", "--write-through"], "--write-through"),
        (["--no-disk", "--disk-cache-size", "1g"], "--disk-cache-size"),
        (["--no-disk", "--disk", "full"], "--disk"),
        (["--no-disk", "--ablation"], "--ablation"),
        (["--no-disk", "--protected-copy-fraction", "0.5"], "--protected-copy-fraction"),
        (["--no-disk", "--write-policy", "selective"], "--write-policy"),
        (["--no-host", "--inclusive-host"], "--inclusive-host"),
        (["--no-host", "--write-through"], "--write-through"),
        (["--no-host", "--ablation"], "--ablation"),
        (["--ablation", "--keep-copy"], "--keep-copy"),
        (["--ablation", "--engine", "threads"], "--engine"),
        (["--ablation", "--repeats", "2"], "--repeats"),
        (["--oracle"], "--oracle"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_input_names_the_option(args, option):
    """One line on stderr, nothing on stdout, exit status 2."""
    assert fails(*args).startswith(f"kvstore-bench: error: {option}: ")


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--workload", "agentic"], "--workload"),
        (["--oracle", "--host-cache-size", "1g"], "--host-cache-size"),
        (["--oracle", "--keep-copy"], "--keep-copy"),
        (["--oracle", "--ablation"], "--ablation"),
        (["--oracle", "--eviction-policy", "s3fifo"], "--eviction-policy"),
    ],
)
def test_options_that_exclude_each_other(tmp_path, args, option):
    """The option that cannot stand is named."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    assert fails("--trace", str(path), *args).startswith(f"kvstore-bench: error: {option}: ")


def test_unreadable_trace_line_names_line_and_field(tmp_path):
    """A bad row is reported with its line number and its field."""
    path = tmp_path / "t.jsonl"
    bad = {key: value for key, value in ROW.items() if key != "input_length"}
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(bad)}\n", encoding="utf-8")
    line = fails("--trace", str(path))
    assert line.startswith("kvstore-bench: error: --trace: ")
    assert line.endswith("t.jsonl: line 2: input_length: missing")


class CountingStore(FakeStore):
    """The fake with a snapshot, as the command reads it."""

    def stats(self):
        classes = tuple(
            ClassStats(written_bytes=bytes_, read_bytes=0, transfers=count)
            for bytes_, count in ((0, 0), (4096, 1), (8192, 2))
        )
        return StoreStats(
            levels=("device", "host", "disk"),
            groups=("full",),
            pools={("disk", "full"): PoolStats(total=9, ready=4)},
            moved_bytes={"d2h": 4096, "h2d": 4096},
            engine=EngineStats(engine="simulated", classes=classes),
        )


@pytest.fixture
def fake(monkeypatch):
    """Put the fake store behind the command; ``fake.corrupt`` breaks what is served."""

    class Holder:
        corrupt = None
        variants: ClassVar[list[str]] = []

    @contextlib.asynccontextmanager
    async def open_row(config, variant):
        Holder.variants.append(variant.options)
        group = config.pool_groups[0]
        slots = config.device.gpu_cache_size // group.page_bytes
        yield CountingStore(slots, group.page_bytes, config.block_tokens, Holder.corrupt)

    monkeypatch.setattr(run, "open_row", open_row)
    monkeypatch.setattr(replay, "uring_refusal", lambda: "")
    Holder.variants = []
    return Holder


def test_report_has_the_shape_of_the_table(fake, tmp_path, monkeypatch):
    """INV-815: every row has medians, ranges and runs; the report has engine and all options."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["replay", *SMALL, "--ablation", "--output-format=json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["options"] for row in report["rows"]] == [
        "serial baseline", "parallel I/O (threads)", "parallel I/O (io_uring)",
        "+ keep copy", "+ write-through", "+ inclusive host",
    ]  # fmt: skip
    assert fake.variants == [row["options"] for row in report["rows"]] * 3
    for row in report["rows"]:
        assert len(row["runs"]) == 3
        assert row["mismatches"] == 0
        assert row["verified_pages"] > 0
        assert row["hit_tokens"]["device"] > 0
        assert row["ssd_bytes_written"] == 12288
        assert row["required_writes"] == 1
        assert row["d2h_bytes"] == 4096
        assert row["loop_lag_max_s"] >= 0
        for name in ("requests_per_s", "ttft_p50_s", "ttft_p90_s"):
            spread = row["range"][name]
            assert spread["min"] <= row[name] == spread["median"] <= spread["max"]
    assert report["time_scale"] == 0.0001
    assert report["config"]["disk_io_threads"] == 16
    assert report["workload"]["seed"] == 1
    assert list(tmp_path.iterdir()) == []


def test_wrong_byte_is_exit_status_1(fake, tmp_path, monkeypatch):
    """A page served with a wrong byte is in the report and decides the exit status."""

    def flip(page):
        page[-1] ^= 1

    monkeypatch.chdir(tmp_path)
    fake.corrupt = flip
    path = tmp_path / "report.json"
    result = CliRunner().invoke(cli, ["replay", *SMALL, "--output", str(path)])
    assert result.exit_code == 1, result.output
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert row["mismatches"] > 0
    assert "wrong bytes: request" in result.stderr
    assert "req/s" in result.stdout


def test_without_io_uring_threads_carry_the_options(fake, tmp_path, monkeypatch):
    """A refused io_uring leaves its row out, says why, and the options run on threads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay, "uring_refusal", lambda: "not permitted")
    result = CliRunner().invoke(cli, ["replay", *SMALL, "--ablation", "--output-format=json"])
    report = json.loads(result.stdout)
    assert len(report["rows"]) == 5
    assert report["skipped"] == [{"options": "parallel I/O (io_uring)", "reason": "not permitted"}]


def test_scratch_directory_is_removed_and_stale_ones_too(tmp_path, monkeypatch):
    """The directory goes with the block; one of a killed process goes at the next start."""
    monkeypatch.chdir(tmp_path)
    with scratch_directory(None) as path:
        assert path.parent == tmp_path
        assert remove_stale(tmp_path) == 0  # it is locked
        (path / "file").write_text("x", encoding="utf-8")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"{PREFIX}old").mkdir()
    (tmp_path / "mine").mkdir()
    with scratch_directory(None):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


KILLED = """
import sys, time
from kvstore_bench.scratch import scratch_directory
with scratch_directory(None) as path:
    (path / "slots").write_bytes(b"x")
    print(path, flush=True)
    time.sleep(60)
"""


def test_killed_process_leaves_only_its_directory(tmp_path):
    """After SIGKILL the temporary directory is all that is left, and the next start removes it."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        assert path.is_dir()
        child.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == [path]
    assert remove_stale(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
