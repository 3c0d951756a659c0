"""The comparison with fio: order, arithmetic, options; and the report made from its JSON."""

import ctypes
import json
import os
import sys
import time

import click.testing
import pytest
from kvstore_bench import compare, machine, mixed, peers
from kvstore_bench.cli import cli
from kvstore_bench.jobs import MIB, JobError
from kvstore_bench.peers import Measurement, Rival, Unavailable, Workload, fio_arguments, parse_fio

FIO_JSON = {
    "jobs": [
        {
            "jobname": "compare",
            "error": 0,
            "usr_cpu": 5.0,
            "sys_cpu": 15.0,
            "job_runtime": 2000,
            "read": {
                "io_bytes": 1 << 30,
                "bw_bytes": 536870912,
                "iops": 512.0,
                "total_ios": 1024,
                "clat_ns": {
                    "mean": 1e6,
                    "percentile": {"50.000000": 900_000, "99.000000": 4_000_000},
                },
            },
        }
    ]
}


def measurement(rate):
    return Measurement(
        bw_bytes=rate * MIB,
        iops=rate,
        clat_ns={"mean": 1e6, "p50": 1e6, "p99": 2e6, "p99.9": 3e6},
        cpu_s_per_gib=0.1,
    )


def plan(tmp_path, rivals, repeats=3):
    return compare.Plan(
        directory=tmp_path,
        size=1 << 30,
        block_sizes=[65536, 4 * MIB],
        modes=["randread", "randwrite"],
        iodepth=0,
        repeats=repeats,
        runtime=1.0,
        ramp_time=0.0,
        memory="small",
        rivals=rivals,
    )


def rival(name, calls, rate=100.0, fail_at=None):
    def run(work):
        calls.append((name, work.rw, work.bs, work.seed))
        if fail_at is not None and len(calls) >= fail_at:
            raise Unavailable("broke")
        return measurement(rate * work.seed)

    return Rival(name=name, caching="direct", check=lambda: None, run=run)


def test_rounds_are_interleaved_and_rotate(tmp_path):
    """Every round runs all engines on all cells, and the first one changes."""
    calls = []
    cells = compare.run_plan(
        plan(tmp_path, [rival("a", calls), rival("b", calls)]), lambda line: None
    )
    assert 4 * 2 * 3 == len(calls)
    assert ["a", "b"] == [name for name, *_ in calls[:2]]
    assert ["b", "a"] == [name for name, *_ in calls[8:10]]
    assert {1, 2, 3} == {seed for *_, seed in calls}
    assert [3] * 8 == [len(cell.rounds) for cell in cells]


def test_ratio_is_taken_round_by_round(tmp_path):
    """A disk that slows down over the rounds leaves the ratio alone."""
    calls = []
    rivals = [rival("fio-io_uring", calls, 200.0), rival("kvstore-io_uring", calls, 190.0)]
    rows = compare.rows_of(compare.run_plan(plan(tmp_path, rivals), lambda line: None))
    ours = next(row for row in rows if row["engine"] == "kvstore-io_uring")
    assert 0.95 == pytest.approx(ours["ratio_to_fio"])
    assert [0.95, 0.95] == pytest.approx(ours["ratio_to_fio_range"])
    assert [190 * MIB, 570 * MIB] == ours["bw_bytes_range"]
    assert {
        "engine",
        "rw",
        "bs",
        "iodepth",
        "bw_bytes",
        "ratio_to_fio",
        "clat_ns",
        "cpu_s_per_gib",
    } <= set(ours)


def test_failing_rival_is_dropped_with_a_line(tmp_path):
    """A rival that fails does not stop the others."""
    calls, lines = [], []
    rivals = [rival("fio-io_uring", calls), rival("broken", calls, fail_at=2)]
    cells = compare.run_plan(plan(tmp_path, rivals, repeats=1), lines.append)
    assert {"fio-io_uring"} == {cell.engine for cell in cells}
    assert "skipped broken: broke" in lines


def test_depth_fills_the_default_bounds():
    """Equal bytes in flight on both sides, inside our bounds."""
    assert [32, 32, 32, 16, 4] == [
        compare.auto_depth("randread", kib << 10) for kib in (16, 64, 256, 1024, 4096)
    ]
    assert [32, 32, 32, 8, 2] == [
        compare.auto_depth("randwrite", kib << 10) for kib in (16, 64, 256, 1024, 4096)
    ]


@pytest.mark.parametrize(
    ("kind", "thp", "expected"),
    [
        ("auto", "always", "huge"),
        ("auto", "madvise", "small"),
        ("small", "never", "small"),
        ("huge", "always", "huge"),
    ],
)
def test_both_sides_stand_on_the_same_pages(kind, thp, expected):
    """Fio gets huge pages only where the system gives them to everybody."""
    memory, note = compare.choose_memory(kind, thp)
    assert expected == memory
    assert ("2 MiB" if expected == "huge" else "4 KiB") in note


@pytest.mark.parametrize(("kind", "thp"), [("huge", "madvise"), ("small", "always")])
def test_unequal_pages_are_refused(kind, thp):
    """No comparison on different pages."""
    with pytest.raises(JobError, match="--memory"):
        compare.choose_memory(kind, thp)


def test_fio_gets_its_best_settings(tmp_path):
    """Registered buffers and files, direct, on mapped memory; psync gets sixteen threads."""
    work = Workload(
        path=tmp_path / "f",
        size=1 << 30,
        rw="randread",
        bs=65536,
        iodepth=32,
        runtime=3.0,
        ramp_time=0.5,
        memory="small",
    )
    ring = fio_arguments(work, "io_uring")
    assert {
        "--fixedbufs=1",
        "--registerfiles=1",
        "--nonvectored=1",
        "--direct=1",
        "--iodepth=32",
    } <= set(ring)
    assert {"--numjobs=16", "--thread", "--direct=1"} <= set(fio_arguments(work, "psync"))


def test_fio_result_is_read():
    """The lines that fio may print before its JSON do not matter."""
    measured = parse_fio("note: something\n" + json.dumps(FIO_JSON), "read")
    assert 512 * MIB == measured.bw_bytes
    assert 0.4 == pytest.approx(measured.cpu_s_per_gib)
    assert (900_000, 4_000_000) == (measured.clat_ns["p50"], measured.clat_ns["p99"])
    with pytest.raises(Unavailable, match="no result"):
        parse_fio("fio: broken pipe", "read")


def test_missing_rivals_are_one_line_each():
    """Fio and optional engines that are not installed are skipped with a line."""
    lines = []
    chosen = compare.choose_rivals("", "no-such-fio", lines.append)
    assert "skipped fio-io_uring: no-such-fio is not installed" in lines
    assert "kvstore-io_uring" in [rival.name for rival in chosen]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bs=5"], "--bs: must be multiples of 4096, got 5"),
        (["--bs="], "--bs: names no size"),
        (["--rw=trim"], "--rw: must be read, write or both, got 'trim'"),
        (["--size=1m"], "--size: must be a multiple of 4096 and hold 32 of the largest blocks"),
        (["--runtime=soon"], "--runtime: must be a time such as 10, 500ms or 2m, got 'soon'"),
        (["--repeats=0"], "--repeats: 0 is not in the range 1<=x<=1000."),
    ],
)
def test_bad_option_is_one_line_and_status_2(tmp_path, arguments, line):
    """INV-132: one line that names the option."""
    done = click.testing.CliRunner().invoke(cli, ["compare", f"--directory={tmp_path}", *arguments])
    assert f"kvstore-bench: error: {line}\n" == done.output.splitlines(keepends=True)[-1]
    assert 2 == done.exit_code


def test_machine_is_described():
    """A result says where it was measured."""
    host = machine.describe("/")
    assert {"cpu", "cpus", "kernel", "filesystem", "queue", "transparent_hugepage"} <= set(host)
    assert f"Linux {host['kernel']}" in machine.describe_text(host)
    assert "madvise" == machine.chosen("always [madvise] never")


def spread(p50):
    return {"N": 10, "mean": p50, "p50": p50, "p90": p50 * 2, "p99": p50 * 4, "max": p50 * 8}


def mixed_rows():
    rows = []
    for number in range(3):
        for variant in ("io_uring, no writers", "io_uring"):
            rows.append(
                {
                    "experiment": "restore60",
                    "variant": variant,
                    "repeat": number,
                    "engine": "io_uring",
                    "policy": "kvstore",
                    "restore_ns": spread(1e6 * (number + 1)),
                    "restore_bw_bytes": 1e9,
                    "cpu_s_per_gib": 0.1,
                    "loop_lag_ns": spread(1e4),
                    "background_bw_bytes": 2e9,
                }
            )
    rows.append(
        {
            "experiment": "small",
            "variant": "io_uring",
            "writers": "alone",
            "repeat": 0,
            "engine": "io_uring",
            "policy": "kvstore",
            "small_ns": spread(1e6),
            "small_bw_bytes": 1e9,
            "cpu_s_per_gib": 0.1,
            "loop_lag_ns": spread(1e4),
        }
    )
    rows.append(
        {
            "experiment": "idle",
            "variant": "io_uring",
            "repeat": 0,
            "engine": "io_uring",
            "switches": 0,
            "threads": 3,
        }
    )
    return rows


def test_mixed_summary_takes_medians():
    """One line per load and variant, with the range of p99."""
    summary = mixed.summarize(mixed_rows())
    ours = next(
        row for row in summary if row["variant"] == "io_uring" and row["experiment"] == "restore60"
    )
    assert 3 == ours["repeats"]
    assert 2e6 == ours["restore_ns"]["p50"]
    assert [4e6, 12e6] == ours["restore_ns"]["p99_range"]
    text = mixed.table_text(summary)
    assert "**restore60**" in text
    assert "| io_uring | 0 |" in text


def test_mixed_options_are_checked(tmp_path):
    """Unknown experiments and variants are one line."""
    for option in ("--experiments=all", "--variants=fast", "--size=1m"):
        done = click.testing.CliRunner().invoke(cli, ["mixed", f"--directory={tmp_path}", option])
        assert 2 == done.exit_code
        assert done.output.startswith(f"kvstore-bench: error: {option.partition('=')[0]}: ")


def test_report_draws_all_kinds(tmp_path):
    """One page, no script, with a drawing for each kind of result."""
    calls = []
    rivals = [rival("fio-io_uring", calls, 200.0), rival("kvstore-io_uring", calls, 190.0)]
    rows = compare.rows_of(compare.run_plan(plan(tmp_path, rivals), lambda line: None))
    results = {
        "compare.json": {
            "kind": "compare",
            "host": machine.describe("/"),
            "rows": rows,
            "notes": ["a <note>"],
        },
        "mixed.json": {
            "kind": "mixed",
            "rows": mixed_rows(),
            "summary": mixed.summarize(mixed_rows()),
        },
        "fio.json": FIO_JSON,
        "replay.json": {
            "rows": [{"name": "base", "hit_rate": 0.1}, {"name": "kept", "hit_rate": 0.3}]
        },
        "doctor.json": {
            "calibration": {
                "reads": [
                    {
                        "inflight_bytes": depth << 20,
                        "read_bytes_per_s": depth << 28,
                        "read_ns_p50": depth * 400_000,
                        "read_ns_p99": depth * 500_000,
                    }
                    for depth in (1, 2, 4)
                ]
            }
        },
    }
    for name, result in results.items():
        (tmp_path / name).write_text(json.dumps(result))
    svg = tmp_path / "svg"
    svg.mkdir()
    out = tmp_path / "out.html"
    done = click.testing.CliRunner().invoke(
        cli, ["report", *(str(tmp_path / name) for name in results), "-o", str(out), f"--svg={svg}"]
    )
    assert 0 == done.exit_code, done.output
    text = out.read_text()
    assert text.count("<svg") == len(list(svg.iterdir())) == 6 + 2 + 1 + 1 + 1
    assert "<td>4</td><td>1024</td><td>1.60</td><td>2.00</td>" in text
    assert "a &lt;note&gt;" in text
    assert "<script" not in text


def test_report_errors_are_one_line(tmp_path):
    """A missing or broken file is named."""
    (tmp_path / "bad.json").write_text("{")
    for name in ("missing.json", "bad.json"):
        done = click.testing.CliRunner().invoke(
            cli, ["report", str(tmp_path / name), "-o", str(tmp_path / "x.html")]
        )
        assert 2 == done.exit_code
        assert done.output.startswith(f"kvstore-bench: error: {tmp_path / name}: ")


def test_all_rivals_have_names_of_their_own():
    """The table's names are keys."""
    names = [rival.name for rival in peers.all_rivals("fio")]
    assert len(names) == len(set(names))


def test_other_load_is_not_our_own():
    """Our own work does not count as somebody else's."""
    others = machine.OtherLoad()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    busy = others.cpus()
    assert 0.0 <= busy <= (os.cpu_count() or 1)


class FakeNixl:
    """The part of nixl's agent that the rival calls, over os.preadv: what is moved is real."""

    def __init__(self, status: str = "DONE") -> None:
        self.status = status
        self.open: dict[str, int] = {"lists": 0, "requests": 0, "registered": 0}
        self.moved: list[tuple[str, int, int]] = []

    nixl_agent_config = staticmethod(lambda backends: backends)

    def nixl_agent(self, name: str, _config: object) -> "FakeNixl":
        self.name = name
        return self

    def get_plugin_list(self) -> list[str]:
        return ["POSIX"]

    def create_backend(self, name: str, options: dict[str, str]) -> None:
        assert (name, options) == ("POSIX", {"use_aio": "true"})

    def register_memory(self, regions: list, kind: str, backends: list[str]) -> object:
        assert backends == ["POSIX"]
        assert all(len(region) == 4 for region in regions)
        self.open["registered"] += 1
        return kind

    def deregister_memory(self, _regions: object, backends: list[str]) -> None:
        self.open["registered"] -= 1

    def prep_xfer_dlist(self, side: str, rows: list, kind: str, backends: list[str]) -> list:
        assert (side, kind) in {("NIXL_INIT_AGENT", "DRAM"), (self.name, "FILE")}
        self.open["lists"] += 1
        return rows

    def release_dlist_handle(self, _rows: list) -> None:
        self.open["lists"] -= 1

    def make_prepped_xfer(self, operation, local, ours, remote, theirs, **options) -> list:
        assert options == {"backends": ["POSIX"], "skip_desc_merge": True}
        assert len(ours) == len(theirs)
        self.open["requests"] += 1
        rows = [(local[mine], remote[other]) for mine, other in zip(ours, theirs, strict=True)]
        for (address, size, _), (offset, file_size, fd) in rows:
            assert size == file_size
            memory = (ctypes.c_char * size).from_address(address)
            move = os.preadv if operation == "READ" else os.pwritev
            assert move(fd, [memory], offset) == size
            self.moved.append((operation, offset, size))
        return rows

    def transfer(self, _request: list) -> str:
        return "PROC"

    def check_xfer_state(self, _request: list) -> str:
        return self.status

    def release_xfer_handle(self, _request: list) -> None:
        self.open["requests"] -= 1


def nixl_rival() -> Rival:
    return next(rival for rival in peers.all_rivals("fio") if rival.name == "nixl-posix-aio")


def nixl_work(path, rw: str) -> Workload:
    path.write_bytes(bytes(MIB))
    return Workload(
        path=path, size=MIB, rw=rw, bs=4096, iodepth=8, runtime=0.1, ramp_time=0, memory="small"
    )


@pytest.mark.parametrize("rw", ["randread", "randwrite"])
def test_nixl_moves_blocks_of_the_file_and_gives_everything_back(monkeypatch, tmp_path, rw):
    """Two requests of half the depth; what was registered and prepared is released."""
    fake = FakeNixl()
    monkeypatch.setitem(sys.modules, "nixl", fake)
    monkeypatch.setitem(sys.modules, "nixl._api", fake)
    rival = nixl_rival()
    rival.check()
    measured = rival.run(nixl_work(tmp_path / "data", rw))
    assert measured.iops > 0
    assert {0} == set(fake.open.values())
    assert {rw[4:].upper()} == {operation for operation, _, _ in fake.moved}
    assert all(offset % size == 0 for _, offset, size in fake.moved)
    assert len({offset for _, offset, _ in fake.moved}) > 8


def test_nixl_that_is_missing_or_fails_says_so(monkeypatch, tmp_path):
    """A line instead of a row."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(Unavailable, match="nixl is not installed"):
        nixl_rival().check()
    fake = FakeNixl("ERR")
    monkeypatch.setitem(sys.modules, "nixl", fake)
    monkeypatch.setitem(sys.modules, "nixl._api", fake)
    with pytest.raises(Unavailable, match="ended a transfer with ERR"):
        nixl_rival().run(nixl_work(tmp_path / "data", "randread"))
