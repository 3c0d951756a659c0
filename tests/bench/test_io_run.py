"""``kvstore-bench io`` from option to result, on the simulated engine in virtual time."""

import json

import click.testing
import pytest
from kvstore_bench.cli import cli


@pytest.fixture
def bench(tmp_path):
    def run(*arguments, status=0):
        words = [
            "io",
            f"--directory={tmp_path}",
            "--ioengine=simulated",
            "--size=16m",
            "--output-format=json",
            *arguments,
        ]
        done = click.testing.CliRunner().invoke(cli, words)
        assert status == done.exit_code, done.output
        return json.loads(done.stdout)["jobs"]

    return run


def test_job_without_runtime_moves_its_size_once(bench):
    """A job ends after ``size`` bytes, and every transfer was counted."""
    (job,) = bench("--rw=read", "--bs=1m", "--iodepth=4")
    assert 16 << 20 == job["read"]["io_bytes"]
    assert 16 == job["read"]["total_ios"] == job["read"]["clat_ns"]["N"]
    assert 0 == job["write"]["total_ios"]
    assert 16 == job["kvstore"]["classes"]["read"]["transfers"]


def test_time_based_job_runs_for_its_runtime(bench):
    """Bandwidth is bytes over the time between start and last completion."""
    (job,) = bench("--rw=randwrite", "--bs=64k", "--iodepth=8", "--time_based", "--runtime=0.5")
    assert 500 == pytest.approx(job["job_runtime"], abs=10)
    assert job["write"]["io_bytes"] / 0.5 == pytest.approx(job["write"]["bw_bytes"], rel=0.01)
    assert ["required"] == list(job["kvstore"]["classes"])


def test_ramp_time_is_not_counted(bench):
    """What happens in the ramp is in no figure."""
    arguments = ("--rw=randread", "--bs=64k", "--iodepth=8", "--time_based", "--runtime=0.5")
    (plain,) = bench(*arguments)
    (ramped,) = bench(*arguments, "--ramp_time=0.5")
    assert 500 == pytest.approx(ramped["job_runtime"], abs=10)
    assert plain["read"]["total_ios"] == pytest.approx(ramped["read"]["total_ios"], rel=0.02)
    assert ramped["kvstore"]["classes"]["read"]["pieces"] == pytest.approx(
        ramped["read"]["total_ios"], abs=16
    )


def test_mix_follows_rwmixread(bench):
    """Reads and writes come in the asked proportion."""
    (job,) = bench(
        "--rw=randrw", "--bs=4k", "--iodepth=16", "--rwmixread=70", "--time_based", "--runtime=0.5"
    )
    reads, writes = job["read"]["total_ios"], job["write"]["total_ios"]
    assert 0.7 == pytest.approx(reads / (reads + writes), abs=0.02)


@pytest.mark.parametrize("process", ["linear", "poisson"])
def test_rate_iops_is_kept(bench, process):
    """A rate limit holds within a few percent."""
    (job,) = bench(
        "--rw=randread",
        "--bs=64k",
        "--iodepth=16",
        "--rate_iops=500",
        "--time_based",
        "--runtime=4",
        f"--rate_process={process}",
    )
    assert 500 == pytest.approx(job["read"]["iops"], rel=0.05)


def test_rate_bounds_bytes(bench):
    """rate= is bytes per second."""
    (job,) = bench(
        "--rw=read", "--bs=64k", "--iodepth=4", "--rate=32m", "--time_based", "--runtime=0.5"
    )
    assert 32 << 20 == pytest.approx(job["read"]["bw_bytes"], rel=0.03)


def test_priority_goes_to_its_class(bench):
    """--prio names the class, and reads of another job overtake it."""
    jobs = bench(
        "--time_based",
        "--runtime=1",
        "--name=reader",
        "--rw=randread",
        "--bs=256k",
        "--iodepth=1",
        "--name=writer",
        "--rw=randwrite",
        "--bs=1m",
        "--iodepth=32",
        "--prio=background",
    )
    assert ["reader", "writer"] == [job["jobname"] for job in jobs]
    classes = jobs[0]["kvstore"]["classes"]
    assert {"read", "background"} == set(classes)
    wait = {
        name: entry["queue_wait_ns"]["percentile"]["50.000000"] for name, entry in classes.items()
    }
    assert wait["read"] < wait["background"]


def test_group_reporting_merges_clones(bench):
    """One entry per group, or one per clone."""
    arguments = ("--rw=randread", "--bs=64k", "--iodepth=2", "--numjobs=3", "--filename=shared")
    (merged,) = bench(*arguments, "--group_reporting")
    clones = bench(*arguments)
    assert 3 == len(clones)
    assert merged["read"]["io_bytes"] == sum(job["read"]["io_bytes"] for job in clones)


def test_stonewall_runs_groups_one_after_the_other(bench):
    """Each group is reported under its own id."""
    jobs = bench(
        "--name=a", "--rw=write", "--bs=1m", "--name=b", "--rw=read", "--bs=1m", "--stonewall"
    )
    assert [0, 1] == [job["groupid"] for job in jobs]


def test_verify_seals_and_checks(bench):
    """Written blocks are read back and checked; a read job checks every block (INV-914)."""
    (job,) = bench("--rw=write", "--bs=64k", "--iodepth=4", "--verify=xxh3")
    assert 256 == job["kvstore"]["verified_ios"]
    assert 0 == job["error"] == job["kvstore"]["mismatches"]
    (job,) = bench("--rw=randread", "--bs=64k", "--iodepth=4", "--verify=xxh3")
    assert 256 == job["kvstore"]["verified_ios"]


def test_missed_deadlines_are_counted_and_the_job_goes_on(bench):
    """A deadline that passes is a figure, not the end of the job (INV-119)."""
    (job,) = bench(
        "--rw=randread",
        "--bs=1m",
        "--iodepth=32",
        "--deadline_ms=4",
        "--time_based",
        "--runtime=0.5",
    )
    assert 0 < job["kvstore"]["deadlines"]
    assert 0 < job["read"]["total_ios"]
    assert 0 == job["error"]


def test_background_above_the_cap_is_skipped_and_counted(bench):
    """INV-111: what would exceed the cap is not issued."""
    (job,) = bench(
        "--rw=write", "--bs=1m", "--iodepth=8", "--prio=background", "--background_bytes_max=2m"
    )
    assert 0 < job["kvstore"]["classes"]["background"]["skips"]
    assert 16 << 20 == job["write"]["io_bytes"]


def test_equal_seeds_give_equal_results(bench):
    """A simulated run can be replayed."""
    arguments = (
        "--rw=randrw",
        "--bs=64k",
        "--iodepth=8",
        "--time_based",
        "--runtime=0.5",
        "--randseed=5",
    )
    (one,), (two,) = bench(*arguments), bench(*arguments)
    assert one["read"] == two["read"]
    assert one["write"] == two["write"]


def test_simulation_writes_no_file(bench, tmp_path):
    """Virtual time needs no disk."""
    bench("--rw=write", "--bs=1m")
    assert [] == list(tmp_path.iterdir())


def test_human_output_and_file(bench, tmp_path):
    """Both formats together, into a file."""
    out = tmp_path / "result"
    done = click.testing.CliRunner().invoke(
        cli,
        [
            "io",
            f"--directory={tmp_path}",
            "--ioengine=simulated",
            "--size=4m",
            "--bs=1m",
            "--output-format=normal,json",
            f"--output={out}",
        ],
    )
    assert 0 == done.exit_code
    text = out.read_text()
    assert "Run status group 0 (all jobs):" in text
    assert '"jobname": "job"' in text


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "sub/missing/file"])
def test_no_file_outside_the_directory(tmp_path, name):
    """kvstore-bench never writes outside the directory it is given."""
    done = click.testing.CliRunner().invoke(
        cli,
        [
            "io",
            f"--directory={tmp_path}",
            "--size=1m",
            f"--filename={name}",
            "--ioengine=simulated",
        ],
    )
    assert 2 == done.exit_code
    assert done.output.splitlines()[-1].startswith("kvstore-bench: error: --filename: ")


def test_symlink_out_of_the_directory_is_refused(tmp_path):
    """A link does not lead out either."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside / "file")
    done = click.testing.CliRunner().invoke(
        cli, ["io", f"--directory={inside}", "--size=1m", "--filename=link", "--ioengine=simulated"]
    )
    assert 2 == done.exit_code
    assert [] == list(outside.iterdir())
