"""fio's options and job files: what they mean here, and how a mistake is reported."""

from pathlib import Path

import click.testing
import kvstore_bench
import pytest
from kvstore_bench.cli import cli
from kvstore_bench.jobfile import parse_command_line, parse_job_text
from kvstore_bench.jobs import (
    JobError,
    groups_of,
    job_options,
    parse_block_size,
    parse_bssplit,
    parse_size,
    parse_time,
)

from kvstore.config import IoClass


def run(*arguments):
    return click.testing.CliRunner().invoke(cli, ["io", *arguments])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("4k", 4096),
        ("1m", 1 << 20),
        ("2G", 2 << 30),
        ("1MiB", 1 << 20),
        ("0.5m", 1 << 19),
    ],
)
def test_sizes_are_powers_of_1024(text, expected):
    """A size reads as in fio with its default kb_base."""
    assert expected == parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("10", 10.0), ("500ms", 0.5), ("2m", 120.0), ("1h", 3600.0)]
)
def test_times_are_seconds_without_a_unit(text, expected):
    """A time reads as in fio."""
    assert expected == parse_time(text)


def test_block_size_may_differ_by_direction():
    """Bs takes one size, or read and write."""
    assert (65536, 65536) == parse_block_size("64k")
    assert (4096, 1 << 20) == parse_block_size("4k,1m")
    assert (4096, 1 << 20) == parse_block_size("4k,1m")


def test_bssplit_shares_out_the_blanks():
    """Sizes without a percentage share what is left."""
    read, write = parse_bssplit("4k/50:64k:1m")
    assert ((4096, 50.0), (65536, 25.0), (1 << 20, 25.0)) == read
    assert read == write


def test_command_line_starts_a_job_at_each_name():
    """Options before the first --name are defaults of all jobs, as in fio."""
    jobs, run_options = parse_command_line(
        [
            "--directory=/d",
            "--size",
            "1g",
            "--name=a",
            "--rw=randread",
            "--name=b",
            "--rw",
            "write",
            "--bs=1m",
            "--prio=background",
            "--output-format=json",
            "--time_based",
            "--runtime=3",
        ]
    )
    assert ["a", "b"] == [job.name for job in jobs]
    assert ["randread", "write"] == [job.rw for job in jobs]
    assert [1 << 30] * 2 == [job.size for job in jobs]
    assert (False, True) == (jobs[0].time_based, jobs[1].time_based)
    assert IoClass.BACKGROUND is jobs[1].io_class(is_read=False)
    assert {"output-format": "json"} == run_options


def test_default_classes_follow_the_direction():
    """Reads are READ, writes are REQUIRED."""
    (job,), _ = parse_command_line(["--directory=/d", "--size=1m", "--rw=rw"])
    assert (IoClass.READ, IoClass.REQUIRED) == (
        job.io_class(is_read=True),
        job.io_class(is_read=False),
    )


JOB_FILE = """
; a comment
[global]
directory=/d
size=1g
thread
fixedbufs=1

[reader]
rw=randread
bs=64k
iodepth=8
[writer]
stonewall
rw=write
blocksize=1m
numjobs=2
"""


def test_job_file_has_fio_sections():
    """[global] gives defaults, a bare key is a switch, keys that are always so are taken."""
    reader, writer = parse_job_text(JOB_FILE, "jobs.fio")
    assert ("reader", "randread", 8, (65536, 65536)) == (
        reader.name,
        reader.rw,
        reader.iodepth,
        reader.bs,
    )
    assert ("writer", "write", 2, (1 << 20, 1 << 20)) == (
        writer.name,
        writer.rw,
        writer.numjobs,
        writer.bs,
    )
    assert [["reader"], ["writer"]] == [
        [job.name for job in group] for group in groups_of([reader, writer])
    ]


def test_options_read_back():
    """The options in the result, parsed again, give the same job."""
    (job,), _ = parse_command_line(
        [
            "--name=x",
            "--directory=/d",
            "--size=3m",
            "--rw=randrw",
            "--bssplit=4k/25:8k/75",
            "--rate=10m,5m",
            "--rate_iops=100",
            "--rwmixread=70",
            "--deadline_ms=2.5",
            "--runtime=1.5",
        ]
    )
    again, _ = parse_command_line([f"--{key}={value}" for key, value in job_options(job).items()])
    assert [job] == again


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--rw=sideways"],
            "--rw: must be one of read, write, randread, randwrite, rw, randrw, got 'sideways'",
        ),
        (["--iodept=4"], "--iodept: no such option, did you mean iodepth?"),
        (["--iodepth=0"], "--iodepth: must be a whole number in 1..65536, got '0'"),
        (["--bs=100"], "--bs: must be a multiple of 4096, got '100'"),
        (["--bs"], "--bs: needs a value"),
        (["--rw=read"], "--directory: needed: files are made there and nowhere else"),
        (
            ["--directory=/nonexistent", "--size=1m"],
            "--directory: is not a directory: /nonexistent",
        ),
        (["--directory=/tmp", "--time_based"], "--time_based: needs a runtime"),
        (
            ["--directory=/tmp", "--verify=xxh3"],
            "--verify: needs blocks of at least 8k: 4k of each hold the header",
        ),
        (["--directory=/tmp", "--size=1k"], "--size: must hold one block of 4096 bytes"),
        (
            ["--directory=/tmp", "--output-format=xml"],
            "--output-format: must be one or more of normal, json, got 'xml'",
        ),
        (["nofile.fio"], "nofile.fio: cannot read job file: No such file or directory"),
        (
            ["--bssplit=4k/60:8k/60"],
            "--bssplit: the percentages must add up to 100, got '4k/60:8k/60'",
        ),
        (
            ["--disk_io_threads=300"],
            "--disk_io_threads: must be a whole number in 1..256, got '300'",
        ),
    ],
)
def test_bad_option_is_one_line_and_status_2(arguments, line):
    """INV-132: every mistake is one line that names the option; the thread bound is INV-124's."""
    result = run(*arguments)
    assert f"kvstore-bench: error: {line}\n" == result.output
    assert 2 == result.exit_code


def test_bad_key_in_a_job_file_names_file_and_line(tmp_path):
    """The line says where the mistake stands."""
    path = tmp_path / "bad.fio"
    path.write_text("[a]\nrw=read\niodepth=many\n")
    result = run(str(path))
    assert (
        f"kvstore-bench: error: {path}:3: iodepth: must be a whole number in 1..65536, got 'many'\n"
        == result.output
    )
    assert 2 == result.exit_code


def test_job_file_errors():
    """Keys before a section and files without a job are refused."""
    with pytest.raises(JobError, match=r"x:1: rw=read: stands before the first \[section\]"):
        parse_job_text("rw=read", "x")
    with pytest.raises(JobError, match="x: holds no job"):
        parse_job_text("[global]\nrw=read", "x")


def test_help_lists_fio_options():
    """The help needs no engine."""
    result = run("--help")
    assert 0 == result.exit_code
    for option in ("--rwmixread", "--bssplit", "--group_reporting", "--output-format"):
        assert option in result.output


def test_shipped_job_file_parses():
    """The example beside the package is a valid job file."""
    path = Path(kvstore_bench.__file__).parent / "data" / "priorities.fio"
    jobs, _ = parse_command_line(["--directory=/d", str(path)])
    assert ["restore", "evict", "write-through"] == [job.name for job in jobs]


def test_size_zero_is_one_line_before_anything_is_printed():
    """A size of 0 names the option and exits with 2."""
    result = run("--rw=randread", "--bs=64k", "--directory=.", "--size=0")
    assert 2 == result.exit_code
    assert result.stdout == ""
    assert "kvstore-bench: error: --size: must be above 0, got '0'" == result.stderr.strip()
