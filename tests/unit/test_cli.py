"""The command line: doctor, fsck, inspect, top; one line and exit code 2 for a bad question."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import cli, compiled, doctor
from kvstore._uring.probe import SystemProbe
from kvstore.config import IoConfig
from kvstore.exporters import jsonfile
from kvstore.stats import EngineStats, PoolStats, StoreStats
from kvstore.tiers import disk_format

PAGE_BYTES = 8192
SLOT_BYTES = 4096 + PAGE_BYTES
FINGERPRINT = disk_format.fingerprint_digest("model")


def superblock(slot_count: int, epoch: int = 3) -> disk_format.Superblock:
    return disk_format.Superblock(
        fingerprint=FINGERPRINT,
        slot_bytes=SLOT_BYTES,
        slot_count=slot_count,
        page_bytes=PAGE_BYTES,
        epoch=epoch,
        pool_group=0,
    )


def sealed_slot(index: int, *, epoch: int = 3, key: bytes | None = None) -> bytes:
    """Return one whole slot as native code writes it."""
    payload = bytes([index + 1]) * PAGE_BYTES
    identity = disk_format.SlotIdentity(
        fingerprint=FINGERPRINT,
        key=bytes([index + 1]) * 32 if key is None else key,
        parent_key=disk_format.NO_KEY,
        block_index=index,
        epoch=epoch,
        pool_group=0,
        generation=1,
        sequence=index,
        payload_bytes=PAGE_BYTES,
    )
    checksum = cli.xxhash.xxh3_64_intdigest(payload)
    return disk_format.seal_header(identity.encode(), checksum) + payload


@pytest.fixture
def slot_file(tmp_path: Path) -> Path:
    """A file with two good slots, one of an older epoch, one partial tail and one free slot."""
    path = tmp_path / "full.0.slots"
    slots = [
        sealed_slot(0),
        sealed_slot(1),
        sealed_slot(2, epoch=2),
        sealed_slot(3, key=disk_format.NO_KEY),
        bytes(SLOT_BYTES),
    ]
    path.write_bytes(superblock(len(slots)).encode() + b"".join(slots))
    return path


def run(*arguments: str | Path) -> tuple[int, str]:
    out = io.StringIO()
    code = cli.main([str(argument) for argument in arguments], out)
    return code, out.getvalue()


def corrupt(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_fsck_counts_slots_by_state(slot_file: Path) -> None:
    """Sound slots of another epoch and partial tails are stale, not damaged (INV-921, INV-925)."""
    code, text = run("fsck", slot_file.parent, "--json")
    report = json.loads(text)
    assert code == 0
    assert report["damaged"] is False
    assert report["files"][0]["slots"] == {
        "good": 2,
        "free": 1,
        "stale": 2,
        "damaged_header": 0,
        "damaged_payload": 0,
    }


@pytest.mark.parametrize(
    ("offset", "state"),
    [
        (disk_format.slot_offset(1, SLOT_BYTES) + 60, "damaged_header"),
        (disk_format.slot_offset(1, SLOT_BYTES) + 205, "damaged_header"),
        (disk_format.slot_offset(1, SLOT_BYTES) + 4096, "damaged_payload"),
        (disk_format.slot_offset(2, SLOT_BYTES) - 1, "damaged_payload"),
    ],
)
def test_fsck_finds_one_flipped_bit(slot_file: Path, offset: int, state: str) -> None:
    """One flipped bit anywhere in a slot is found, named, and exits 1 (INV-914)."""
    corrupt(slot_file, offset)
    code, text = run("fsck", slot_file, "--json")
    report = json.loads(text)["files"][0]
    assert code == 1
    assert report["slots"][state] == 1
    assert report["damage"] == [f"slot 1: {state.replace('_', ' ')}"]


def test_fsck_says_so_when_the_superblock_or_the_end_is_gone(slot_file: Path) -> None:
    """A short file and a foreign superblock are damage, in words a person can read."""
    os.truncate(slot_file, slot_file.stat().st_size - 4096)
    code, text = run("fsck", slot_file)
    assert code == 1
    assert "needs" in text
    corrupt(slot_file, 60)
    code, text = run("fsck", slot_file)
    assert code == 1
    assert "superblock checksum differs" in text


def test_fsck_refuses_files_of_a_running_store(slot_file: Path) -> None:
    """The directory's lock is honoured: slots in motion would look damaged (INV-923)."""
    fd = os.open(slot_file.parent, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert run("fsck", slot_file.parent)[0] == 2
    finally:
        os.close(fd)
    assert run("fsck", slot_file.parent)[0] == 0


def test_fsck_changes_nothing(slot_file: Path) -> None:
    """Checking leaves the bytes and the folder as they were."""
    before = slot_file.read_bytes()
    corrupt(slot_file, 100)
    corrupt(slot_file, 100)
    run("fsck", slot_file)
    assert slot_file.read_bytes() == before
    assert [path.name for path in slot_file.parent.iterdir()] == [slot_file.name]


def test_inspect_shows_superblock_and_slots(slot_file: Path) -> None:
    """Every slot in use is listed with what its header says."""
    code, text = run("inspect", slot_file, "--slots", "--json")
    file = json.loads(text)["files"][0]
    assert code == 0
    assert file["superblock"]["epoch"] == 3
    assert file["superblock"]["fingerprint"] == FINGERPRINT.hex()
    assert [entry["slot"] for entry in file["entries"]] == [0, 1, 2, 3]
    assert file["entries"][1]["key"] == "02" * 32
    code, text = run("inspect", slot_file, "--slots")
    assert code == 0
    assert "0202020202020202" in text


def test_fsck_and_inspect_read_what_a_store_wrote(tmp_path: Path) -> None:
    """Files of a real store are in use while it runs, and sound afterwards (INV-923, INV-926)."""
    page_bytes, tokens = 16 << 10, list(range(80))
    config = kvstore.StoreConfig(
        block_tokens=8,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=page_bytes),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=16 * page_bytes),
        host=kvstore.HostTierConfig(host_cache_size=16 * page_bytes),
        disk=kvstore.DiskTierConfig(disk_cache_size=32 * page_bytes, disk_cache_path=str(tmp_path)),
        fingerprint="model",
    )

    async def main() -> None:
        async with kvstore.open_store(config) as store:
            async with store.session(tokens) as session:
                await session.resume()
                await session.grow(len(tokens))
                session.commit(tokens)
            assert run("fsck", tmp_path)[0] == 2
            await store.aclose(flush=True)

    asyncio.run(main())
    code, text = run("fsck", tmp_path, "--json")
    slots = json.loads(text)["files"][0]["slots"]
    assert code == 0
    assert (slots["good"], slots["free"]) == (10, 15)  # a slot is header and page: 20 KiB
    code, text = run("inspect", tmp_path, "--slots", "--json")
    blocks = [entry["block_index"] for entry in json.loads(text)["files"][0]["entries"]]
    assert sorted(blocks) == list(range(10))


def test_top_shows_pools_and_classes(tmp_path: Path) -> None:
    """One view of a statistics file names pools, paths and classes."""
    stats = StoreStats(
        pools={("disk", "full"): PoolStats(total=77, copies=5)},
        moved_bytes={"d2h": 3 << 20},
        engine=EngineStats(engine="io_uring"),
    )
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(jsonfile.as_dict(stats)))
    code, text = run("top", path, "--once")
    assert code == 0
    for word in ("io_uring", "disk/full", "77", "d2h", "background"):
        assert word in text


def test_top_computes_rates_between_two_snapshots() -> None:
    """Rates are differences over the time between two files, gauges are shown as they are."""
    before = jsonfile.as_dict(StoreStats(moved_bytes={"d2h": 0}))
    now = jsonfile.as_dict(StoreStats(moved_bytes={"d2h": 10 << 20}))
    out = io.StringIO()
    cli.render_top(before, now, 2.0, out)
    assert "5.0" in out.getvalue()


def test_doctor_reports_in_text_and_json(tmp_path: Path) -> None:
    """Each check has a name, a status and a sentence, and the store's choice is stated."""
    code, text = run("doctor", "--directory", tmp_path)
    assert code == 0
    assert "would use" in text
    code, text = run("doctor", "--directory", tmp_path, "--json")
    report = json.loads(text)
    names = {check["name"] for check in report["checks"]}
    assert {"system", "packages", "io_uring", "direct I/O", "memlock", "huge pages"} <= names
    (core,) = (check for check in report["checks"] if check["name"] == "core")
    assert core["text"].startswith(compiled.describe())
    assert (core["status"] == "ok") == bool(compiled.DIGEST)
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn", "missing"}
    assert report["store"]["engine"] in {"io_uring", "threads"}
    assert list(tmp_path.iterdir()) == []


def test_calibration_measures_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration reports its curve and bounds in the ratio of INV-136, and removes its file."""
    monkeypatch.setattr(doctor, "SECONDS_PER_DEPTH", 0.02)
    code, text = run("doctor", "--directory", tmp_path, "--calibrate", "--size", "16m", "--json")
    found = json.loads(text)["calibration"]
    assert code == 0
    assert found["write_bytes_per_s"] > 0
    assert [point["inflight_bytes"] for point in found["reads"]][:3] == [1 << 20, 2 << 20, 4 << 20]
    assert all(point["read_ns_p50"] <= point["read_ns_p99"] for point in found["reads"])
    proposal = found["proposal"]
    assert proposal["inflight_bytes"] == 2 * proposal["required_inflight_bytes"]
    assert proposal["inflight_bytes"] == 4 * proposal["background_inflight_bytes"]
    assert list(tmp_path.iterdir()) == []
    assert run("doctor", "--directory", tmp_path, "--calibrate", "--size", "16m")[0] == 0


class FakeDriver:
    """Two GPUs, of which the second cannot wait on 64-bit words."""

    def __init__(self, _name: str = "", status: int = 0) -> None:
        self.status = status

    def cuInit(self, _flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = int(attribute == 122 and device.value == 0)
        return 0


def test_doctor_asks_every_gpu_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ability to wait on 64-bit words is reported per device (INV-212)."""
    monkeypatch.setattr(doctor.ctypes, "CDLL", FakeDriver)
    checks = {check["name"]: check["status"] for check in doctor.check_cuda()}
    assert checks["memops cuda:0"] == "ok"
    assert checks["memops cuda:1"] == "warn"


def test_doctor_lives_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, or one that finds no GPU, is a finding and not an error."""

    def refuse(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor.ctypes, "CDLL", refuse)
    assert [check["status"] for check in doctor.check_cuda()] == ["missing"]
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: FakeDriver(name, 100))
    assert [check["status"] for check in doctor.check_cuda()] == ["missing"]


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without io_uring, huge pages and memory lock gets a reason for each (INV-127)."""
    probe = SystemProbe(
        io_uring=False,
        io_uring_reason="io_uring is not permitted (seccomp profile)",
        registered_buffers_reason="no ring",
        memlock_bytes=65536,
        huge_pages=False,
        huge_pages_setting="never",
    )
    monkeypatch.setattr(doctor, "_has_capability", lambda _number: False)
    checks = {check["name"]: check for check in doctor.check_engine(probe)}
    assert {check["status"] for check in checks.values()} == {"warn"}
    assert "seccomp" in checks["io_uring"]["text"]
    assert "ulimit -l" in checks["memlock"]["text"]
    assert "never" in checks["huge pages"]["text"]


def test_proposed_bounds_are_bandwidth_times_six_milliseconds() -> None:
    """A disk of 3 GB/s may have 18 MB in flight, a slow one two large pieces (INV-136)."""
    fast, slow = doctor.propose(3e9), doctor.propose(1e8)
    assert 18e6 <= fast["inflight_bytes"] < 18e6 + (1 << 20)
    assert slow["inflight_bytes"] == 8 << 20
    IoConfig(**fast)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--directory", "{tmp}/none"], "--directory"),
        (["fsck", "{tmp}/none"], "no such file"),
        (["fsck", "{tmp}"], "no slot files"),
        (["inspect", "{tmp}"], "no slot files"),
        (["top", "{tmp}/none"], "no such file"),
        (["top", "{tmp}/bad.json"], "not a statistics file"),
    ],
)
def test_question_without_answer_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong path ends in one line that names it, and exit code 2."""
    (tmp_path / "bad.json").write_text("{")
    code, out = run(*[argument.format(tmp=tmp_path) for argument in arguments])
    error = capsys.readouterr().err
    assert (code, out) == (2, "")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frob"],
        ["fsck"],
        ["fsck", "--frob", "."],
        ["top", "x", "--interval", "0"],
        ["doctor", "--size", "0"],
        ["doctor", "--size", "big"],
    ],
)
def test_bad_option_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An option that cannot be read ends in one line and exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("kvstore")
    assert error.count("\n") == 1


def test_closed_pipe_is_no_traceback(slot_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvstore fsck | head` ends quietly."""
    monkeypatch.setattr(os, "dup2", lambda *_: None)

    class Closed(io.StringIO):
        write: Callable[[str], int] = lambda *_: (_ for _ in ()).throw(BrokenPipeError())  # type: ignore[assignment]

    assert cli.main(["fsck", str(slot_file)], Closed()) == 0
