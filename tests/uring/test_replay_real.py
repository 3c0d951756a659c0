"""The replay over the real store: all engines and options, every byte checked, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from kvstore_bench import replay
from kvstore_bench.cli import cli
from kvstore_bench.scratch import PREFIX

SMALL = (
    "--requests", "100", "--sessions", "12", "--block-tokens", "512", "--page-bytes", "4096",
    "--device-cache-size", "600k", "--host-cache-size", "2400k", "--time-scale", "0.0005",
)  # fmt: skip


def report(*args: str) -> dict:
    result = CliRunner().invoke(cli, ["replay", *args, "--output-format=json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_every_option_saves_what_it_is_for(tmp_path, monkeypatch):
    """INV-814, INV-815: keep copy writes fewer bytes, write-through leaves fewer required writes.

    And the inclusive host copies fewer bytes from the device; no page differs in any row.
    """
    monkeypatch.chdir(tmp_path)
    rows = {row["options"]: row for row in report("--ablation", *SMALL)["rows"]}
    ring = rows.get("parallel I/O (io_uring)", rows["parallel I/O (threads)"])
    keep, through, inclusive = (
        rows[name] for name in ("+ keep copy", "+ write-through", "+ inclusive host")
    )
    for row in rows.values():
        assert row["mismatches"] == 0
        assert row["requests"] == 100
        assert all(row["hit_tokens"][tier] for tier in ("device", "host", "disk")), row
        assert row["ssd_bytes_written"] > 0
        assert row["lost_pages"] == row["refused_requests"] == row["truncated_restores"] == 0
    assert keep["ssd_bytes_written"] < ring["ssd_bytes_written"] * 0.9
    assert through["required_writes"] < keep["required_writes"] * 0.5
    assert inclusive["d2h_bytes"] < through["d2h_bytes"]
    assert rows["serial baseline"]["engine"] == "serial"
    assert list(tmp_path.iterdir()) == []


def test_disk_that_is_full(tmp_path, monkeypatch):
    """A disk that holds an eighth of the pages fills up, and still no byte is wrong."""
    monkeypatch.chdir(tmp_path)
    (row,) = report("--disk", "full", "--keep-copy", "--write-through", "--repeats", "1", *SMALL)[
        "rows"
    ]
    assert row["mismatches"] == 0
    assert row["requests"] == 100
    assert row["disk_free_slots"] == 0


def test_without_lower_tiers(tmp_path, monkeypatch):
    """Device and host alone, device and disk alone, and the device alone all serve the workload."""
    monkeypatch.chdir(tmp_path)
    args = list(SMALL)
    host = args.index("--host-cache-size")
    del args[host : host + 2]
    for missing in (["--no-disk"], ["--no-host"], ["--no-host", "--no-disk"]):
        (row,) = report(*missing, "--repeats", "1", *args)["rows"]
        assert row["mismatches"] == 0
        assert row["requests"] == 100


@pytest.mark.parametrize("capacity", [4, 17, 60])
def test_oracle_is_equal(tmp_path, capacity):
    """INV-324: one request at a time, the hits of every request are those of plain LRU."""
    path = tmp_path / "trace.jsonl"
    rows, names = [], {}
    for number in range(200):
        chain, ids = (), []
        for depth in range(1 + number * 7 % 9):
            chain = (*chain, (number * (depth + 3)) % (2 + depth % 3))
            ids.append(names.setdefault(chain, len(names)))
        length = 512 * len(ids) - number % 200
        rows.append(
            {"timestamp": number, "input_length": length, "output_length": 3, "hash_ids": ids}
        )
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    oracle = report("--oracle", "--trace", str(path), "--device-cache-size", str(capacity * 4096))[
        "oracle"
    ]
    assert oracle["is_equal"]
    assert oracle["hits"] == oracle["hits_reference"] > 0
    assert oracle["verified_pages"] == oracle["hits"]
    assert oracle["mismatches"] == 0


def test_oracle_that_differs_is_exit_status_1(tmp_path, monkeypatch):
    """The comparison decides the exit status."""
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 2, encoding="utf-8")
    monkeypatch.setattr(replay, "lru_hits", lambda rows, capacity: [0 for _ in rows])
    result = CliRunner().invoke(cli, ["replay", "--oracle", "--trace", str(path)])
    assert result.exit_code == 1
    assert "DIFFERENT" in result.stdout


def start(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-m", "kvstore_bench", "replay", "--requests", "4000", *SMALL[2:]],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    for _ in range(400):
        if any(path.glob("run-*/*") for path in tmp_path.glob(f"{PREFIX}*")):
            break
        time.sleep(0.05)
    time.sleep(0.5)
    return child


def test_terminated_replay_removes_its_files(tmp_path):
    """SIGTERM closes the store, removes the directory and ends with its own status."""
    with start(tmp_path) as child:
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 128 + signal.SIGTERM, child.stderr.read()
        assert child.stderr.read() == ""
    assert list(tmp_path.iterdir()) == []


def test_killed_replay_leaves_one_directory_that_the_next_start_removes(tmp_path, monkeypatch):
    """After SIGKILL only the slot directory is left, and a second start works and removes it."""
    with start(tmp_path) as child:
        child.kill()
    assert [path.name.startswith(PREFIX) for path in tmp_path.iterdir()] == [True]
    monkeypatch.chdir(tmp_path)
    report("--repeats", "1", *SMALL)
    assert list(tmp_path.iterdir()) == []
