"""``io``, ``compare`` and ``mixed`` on real files and real engines, small and short."""

import json
import os
import shutil

import click.testing
import pytest

pytest.importorskip("kvstore._uring._lib")

from kvstore_bench.cli import cli
from kvstore_bench.iofiles import is_written

from kvstore._uring import open_engine
from kvstore.errors import KVStoreError


def is_refused():
    try:
        open_engine(kind="io_uring").close()
    except KVStoreError as error:
        return str(error)
    return ""


REFUSED = is_refused()
ENGINES = [
    pytest.param("io_uring", marks=pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "-")),
    "threads",
    "serial",
]


def bench(*words, status=0):
    done = click.testing.CliRunner().invoke(cli, words)
    assert status == done.exit_code, done.output
    return done


def jobs(tmp_path, *words, status=0):
    done = bench(
        "io",
        f"--directory={tmp_path}",
        "--size=8m",
        "--direct=0",
        "--memory=small",
        "--output-format=json",
        *words,
        status=status,
    )
    return json.loads(done.stdout)["jobs"]


@pytest.mark.parametrize("engine", ENGINES)
def test_writes_are_read_back_and_checked(tmp_path, engine):
    """Every engine seals, checks and counts alike."""
    (job,) = jobs(
        tmp_path,
        f"--ioengine={engine}",
        "--rw=randwrite",
        "--bs=64k",
        "--iodepth=8",
        "--verify=xxh3",
    )
    assert 128 == job["kvstore"]["verified_ios"]
    assert 128 == job["write"]["total_ios"]
    assert engine == job["kvstore"]["engine"]
    assert 0 == job["error"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_mixed_job_runs_on_both_loops(tmp_path, engine, loop):
    """Asyncio and uvloop give the same kind of result, with loop lag measured."""
    pytest.importorskip(loop)
    (job,) = jobs(
        tmp_path,
        f"--ioengine={engine}",
        "--rw=randrw",
        "--bs=16k",
        "--iodepth=4",
        "--time_based",
        "--runtime=0.2",
        f"--loop={loop}",
    )
    assert 0 < job["read"]["total_ios"]
    assert 0 < job["write"]["total_ios"]
    assert 0 < job["kvstore"]["loop_lag_ns"]["N"]
    assert 0 < job["kvstore"]["cpu_s_per_gib"]


def test_file_is_laid_out_before_it_is_read(tmp_path):
    """A preallocated file would answer reads without the disk."""
    jobs(tmp_path, "--ioengine=threads", "--rw=randread", "--bs=64k", "--name=a")
    path = tmp_path / "a.0.0"
    assert 8 << 20 == path.stat().st_size
    with path.open("rb") as file:
        assert is_written(file.fileno(), 8 << 20)
        assert any(file.read(4096))
    assert [path] == list(tmp_path.iterdir())


def test_hole_and_unwritten_extent_are_seen(tmp_path):
    """Holes and preallocated extents do not count as written."""
    path = tmp_path / "f"
    with path.open("w+b") as file:
        os.ftruncate(file.fileno(), 1 << 20)
        if is_written(file.fileno(), 1 << 20):
            pytest.skip("this file system does not tell its extents")
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        assert not is_written(file.fileno(), 1 << 20)


def test_job_file_runs(tmp_path):
    """Fio's INI, two groups and a shared file."""
    path = tmp_path / "jobs.fio"
    path.write_text(
        f"[global]\ndirectory={tmp_path}\nsize=4m\nbs=64k\nioengine=threads\ndirect=0\n"
        "filename=data\nmemory=small\n[write]\nrw=write\n"
        "[read]\nstonewall\nrw=randread\niodepth=4\nnumjobs=2\ngroup_reporting\n"
    )
    done = bench("io", str(path), "--output-format=json")
    write, read = json.loads(done.stdout)["jobs"]
    assert (4 << 20, 8 << 20) == (write["write"]["io_bytes"], read["read"]["io_bytes"])


def test_broken_block_ends_the_job_with_an_error(tmp_path, monkeypatch):
    """A checksum mismatch is an error of the job and exit status 1 (INV-914)."""
    from kvstore_bench import iorun

    lay_out = iorun._Group._lay_out

    async def broken(self, job, system, file_id, address, size):
        await lay_out(self, job, system, file_id, address, size)
        with (tmp_path / "job.0.0").open("r+b") as file:
            file.seek(5000)
            file.write(b"wrong")

    monkeypatch.setattr(iorun._Group, "_lay_out", broken)
    (job,) = jobs(
        tmp_path, "--ioengine=threads", "--rw=read", "--bs=64k", "--verify=xxh3", status=1
    )
    assert 84 == job["error"]
    assert 1 == job["kvstore"]["mismatches"]


@pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "-")
def test_compare_runs_what_is_there(tmp_path):
    """One short round of our engines and the baseline; the file is removed at the end."""
    engines = "kvstore-io_uring,kvstore-threads,kvstore-serial,executor"
    if shutil.which("fio"):
        engines += ",fio-io_uring,fio-psync-x16"
    done = bench(
        "compare",
        f"--directory={tmp_path}",
        "--size=32m",
        "--bs=64k",
        "--repeats=1",
        "--runtime=0.2",
        "--ramp_time=0",
        f"--engines={engines}",
        "--output-format=json",
    )
    result = json.loads(done.stdout)
    assert 2 * len(engines.split(",")) == len(result["rows"])
    assert [] == list(tmp_path.iterdir())
    if shutil.which("fio"):
        assert all(row["ratio_to_fio"] for row in result["rows"])


@pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "-")
def test_mixed_runs_every_experiment(tmp_path):
    """Each experiment gives rows; an idle engine causes no wake-up (INV-129)."""
    done = bench(
        "mixed",
        f"--directory={tmp_path}",
        "--size=64m",
        "--repeats=1",
        "--runtime=0.3",
        "--ramp_time=0.1",
        "--variants=io_uring;io_uring, one FIFO ring;threads",
        "--output-format=normal,json",
        f"--output={tmp_path / 'mixed.json'}",
        "--experiments=restore60,small,blocked,lag,idle",
    )
    assert "**restore60**" in done.output
    result = json.loads((tmp_path / "mixed.json").read_text())
    kinds = {row["experiment"] for row in result["rows"]}
    assert {"restore60", "small", "blocked", "lag", "idle"} == kinds
    assert 0 == sum(row["switches"] for row in result["rows"] if row["experiment"] == "idle")
    assert 0 == sum(row.get("failed", 0) for row in result["rows"])
