"""What the system may refuse: io_uring, memory, direct I/O, threads; fork; and idleness."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore._uring import open_engine, probe
from kvstore._uring._ffi import lib
from kvstore._uring.base import Opcode, SubmitFlag
from kvstore._uring.ring import RingEngine
from kvstore._uring.threads import ThreadsEngine
from kvstore.config import KIB, MIB, IoClass, IoConfig
from kvstore.errors import CapacityError, ConfigError, UnsupportedError

#: What a child process needs to move pages through an engine of its own, and to refuse itself
#: system calls: a filter of four instructions that answers one call number with an errno.
CHILD = '''
import asyncio, ctypes, errno, logging, os, resource, struct, sys
import numpy as np

def refuse(numbers, code):
    """Answer these system calls with an errno from now on (x86-64 and aarch64 share them)."""
    steps = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for number in numbers:
        steps.append(struct.pack("HBBI", 0x15, 0, 1, number))
        steps.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | code))
    steps.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    code_buffer = ctypes.create_string_buffer(b"".join(steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code_buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0

SETUP, ENTER, REGISTER = 425, 426, 427

async def round_trip(engine):
    from kvstore._uring.base import SUBMISSION_DTYPE
    from kvstore._uring.native import Arena, CompletionQueue
    from kvstore._uring.probe import open_slot_file
    file = open_slot_file(os.path.join(sys.argv[1], "child.slots"), 1 << 20)
    arena = Arena(2 << 20)
    arena.prefault()
    registered = engine.register_memory(arena.address, arena.length)
    file_id = engine.register_file(file.direct_fd, file.buffered_fd)
    queue = CompletionQueue(asyncio.get_running_loop())
    arena.view(4096, 65536)[:] = 7
    for opcode, flags, address in ((1, 2, 0), (0, 1, 1 << 20)):
        done = asyncio.get_running_loop().create_future()
        record = np.zeros(1, SUBMISSION_DTYPE)
        record["address"] = arena.address + address
        record["payload_bytes"], record["header_bytes"] = 65536, 4096
        record["gate_word"], record["file_id"] = -1, file_id
        record["io_class"], record["opcode"], record["flags"] = opcode, opcode, flags
        record["token"] = queue.token(lambda status, *_: done.set_result(status))
        engine.submit(queue, record)
        assert await asyncio.wait_for(done, 20) == 0
    assert (arena.view(4096 + (1 << 20), 65536) == 7).all()
    stats = engine.stats()
    await engine.aclose()
    queue.close()
    return registered, stats
'''


def run_child(tmp_path: Path, body: str) -> str:
    """Run a script in a fresh interpreter and return what it printed."""
    script = CHILD + textwrap.dedent(body)
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("call", ["SETUP", "ENTER"])
@pytest.mark.parametrize("code", ["EPERM", "ENOSYS", "EACCES"])
def test_refused_io_uring_falls_back_visibly(tmp_path: Path, call: str, code: str) -> None:
    """INV-127: auto takes threads, warns and says why in the statistics; io_uring by name raises.

    The refusal of io_uring_enter alone lets the set-up succeed, and is found all the same.
    """
    out = run_child(
        tmp_path,
        f"""
        from kvstore._uring import open_engine
        from kvstore.errors import UnsupportedError
        logging.basicConfig(stream=sys.stdout)
        refuse([{call}], errno.{code})
        try:
            open_engine(kind="io_uring")
        except UnsupportedError as error:
            print("refused:", error.errno == errno.{code}, error)
        registered, stats = asyncio.run(round_trip(open_engine(kind="auto")))
        print("engine:", stats.engine, "reason:", stats.fallback_reason)
        """,
    )
    assert "refused: True" in out
    assert "falling back to the threads engine" in out
    assert "engine: threads reason: " in out
    assert "io_uring" in out.rpartition("reason: ")[2]


def test_refused_registration_runs_unregistered(tmp_path: Path) -> None:
    """INV-138: without io_uring_register the ring works, on plain memory and descriptors."""
    out = run_child(
        tmp_path,
        """
        from kvstore._uring.ring import RingEngine
        from kvstore.errors import UnsupportedError
        refuse([REGISTER], errno.EPERM)
        try:
            engine = RingEngine()
        except UnsupportedError as error:
            print("refused", error)  # the probe of opcodes needs the call as well
        """,
    )
    assert "refused" in out


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to drop its rights")
@pytest.mark.parametrize("limit_kib", [64, 8192])
def test_low_memlock_leaves_memory_unregistered(tmp_path: Path, limit_kib: int) -> None:
    """INV-138: the warning names the limit and what is needed; the bytes are the same."""
    tmp_path.chmod(0o777)
    for parent in list(tmp_path.parents)[:3]:
        if parent.stat().st_uid == os.getuid() and parent.name.startswith(("pytest", "test")):
            parent.chmod(0o755)
    out = run_child(
        tmp_path,
        f"""
        from kvstore._uring.native import Arena
        from kvstore._uring import open_engine
        from kvstore._uring.ring import RingEngine
        from kvstore.errors import UnsupportedError
        resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit_kib} << 10,) * 2)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            engine = RingEngine()
        except UnsupportedError as error:
            print("no ring:", error)
            sys.exit(0)
        arena = Arena(64 << 20)
        arena.prefault()
        print("registered:", engine.register_memory(arena.address, arena.length))
        registered, stats = asyncio.run(round_trip(engine))
        print("small:", registered, "warnings:", stats.warnings)
        """,
    )
    assert "no ring: no memory for a ring: RLIMIT_MEMLOCK" in out or (
        "registered: False" in out and "RLIMIT_MEMLOCK is" in out and "65536 KiB more" in out
    )


@pytest.mark.parametrize("kind", ["io_uring", "threads", "serial"])
def test_a_forked_child_gets_a_clear_error(tmp_path: Path, kind: str) -> None:
    """A ring does not survive fork: the child is told, the parent goes on."""
    out = run_child(
        tmp_path,
        f"""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from kvstore._uring import open_engine
        from kvstore.errors import LogicError
        engine = open_engine(kind="{kind}")
        pid = os.fork()
        if pid == 0:
            try:
                engine.stats()
            except LogicError as error:
                print("child:", error, flush=True)
            fresh = open_engine(kind="{kind}")
            fresh.close()
            print("child: fresh engine", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print("parent:", asyncio.run(round_trip(engine))[1].engine)
        """,
    )
    assert "child: this disk engine was made before fork()" in out
    assert "child: fresh engine" in out
    assert f"parent: {kind}" in out


def test_fork_is_fast_with_registered_memory(tmp_path: Path) -> None:
    """INV-138: arenas are excluded from fork, so pinned pages are not copied."""
    out = run_child(
        tmp_path,
        """
        import time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from kvstore._uring import open_engine
        from kvstore._uring.native import Arena
        engine = open_engine(kind="auto")
        arena = Arena(256 << 20)
        arena.prefault()
        engine.register_memory(arena.address, arena.length)
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        print("fork:", time.perf_counter() - started)
        os.waitpid(pid, 0)
        engine.close()
        """,
    )
    assert float(out.split("fork:")[1]) < 0.1


def test_an_interpreter_may_end_with_work_in_flight(tmp_path: Path) -> None:
    """C21: no hang, no crash and no thread left behind when nobody closed anything."""
    out = run_child(
        tmp_path,
        """
        import warnings
        warnings.simplefilter("ignore")
        from kvstore._uring import open_engine
        from kvstore._uring.engine import FaultRule
        engine = open_engine(kind="auto")
        engine.inject(FaultRule(action="hold", count=None))
        print("leaving")
        asyncio.run(asyncio.wait_for(asyncio.sleep(0), 1))
        """,
    )
    assert "leaving" in out


MASKS = [
    lib.KVS_WITHOUT_DEFER,
    lib.KVS_WITHOUT_DEFER | lib.KVS_WITHOUT_COOP,
    lib.KVS_WITHOUT_SUBMIT_ALL | lib.KVS_WITHOUT_CQSIZE,
    lib.KVS_WITHOUT_FIXED_FILES,
    lib.KVS_WITHOUT_FIXED_BUFFERS,
    63,
]


@pytest.mark.parametrize("without", MASKS)
@pytest.mark.parametrize("rings", [1, 3])
async def test_older_kernels_and_both_ring_counts(open_rig: Any, without: int, rings: int) -> None:
    """INV-137: every step of the set-up ladder works, with one ring and with one per class."""
    config = IoConfig(kernel_rings=rings)
    async with open_rig("io_uring", config) as rig:
        await rig.engine.aclose()
        rig.engine = RingEngine(config, gate=rig.gate, without=without)
        registered = rig.engine.register_memory(rig.arena.address, rig.arena.length)
        rig.file_id = rig.engine.register_file(rig.slot_file.direct_fd, rig.slot_file.buffered_fd)
        assert registered == (not without & lib.KVS_WITHOUT_FIXED_BUFFERS)
        data = [rig.fill(slot) for slot in range(16)]
        classes = [IoClass(1 + slot % 2) for slot in range(16)]
        for transfer in [rig.write(slot, io_class=classes[slot]) for slot in range(16)]:
            assert await transfer.end() == 0
        for transfer in [rig.read(slot) for slot in range(16)]:
            assert await transfer.end() == 0
        for slot in range(16):
            assert np.array_equal(data[slot], rig.payload(16 + slot))
        stats = rig.engine.stats()
        assert stats.kernel_rings == rings
        assert ("DEFER_TASKRUN" in stats.ring_flags) == (not without & lib.KVS_WITHOUT_DEFER)
        assert registered == stats.registered_buffers


@pytest.mark.parametrize("rings", [1, 3])
async def test_the_order_is_the_same_for_both_ring_counts(open_rig: Any, rings: int) -> None:
    """INV-137: the scheduler orders, whatever carries the pieces; deadlines and holds work too."""
    config = IoConfig(
        kernel_rings=rings, inflight_bytes=4096, required_age=60.0, background_age=60.0
    )
    async with open_rig("io_uring", config) as rig:
        hold, held = await rig.hold_one()
        ended: list[str] = []
        for name, io_class in (("b", 2), ("q", 1), ("r", 0), ("r", 0), ("q", 1)):
            opcode = Opcode.WRITE if io_class else Opcode.READ
            record = rig.record(opcode, 1, io_class=IoClass(io_class), flags=SubmitFlag(0))
            record["token"] = rig.queue.token(lambda *_, name=name: ended.append(name))
            rig.engine.submit(rig.queue, record)
        hold.release()
        assert await held.end() == 0
        assert await rig.engine.drain(rig.file_id, 5.0)
        await asyncio.sleep(0.01)
        assert ended == ["r", "r", "q", "q", "b"]


def test_a_named_engine_that_cannot_start_raises() -> None:
    """INV-126, INV-127: what has started is stopped; the error names the cause."""
    threads, descriptors = own_threads(), count("fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, hard))  # the doorbell, and no ring
    try:
        with pytest.raises(UnsupportedError, match="RLIMIT_NOFILE is too low"):
            RingEngine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert own_threads() <= threads
    assert descriptors == count("fd")


def count(folder: str) -> int:
    """How many open files (``fd``) this process has."""
    return len(entries(folder))


def own_threads() -> set[str]:
    """Ids of the engines' threads; the kernel's own workers come and go as they like."""
    found = set()
    for tid in entries("task"):
        try:
            name = Path(f"/proc/self/task/{tid}/comm").read_text(encoding="ascii")
        except OSError:
            continue  # it has ended meanwhile
        if name.startswith("kvs-"):
            found.add(tid)
    return found


def entries(folder: str) -> set[str]:
    """Names below /proc/self."""
    return {path.name for path in Path(f"/proc/self/{folder}").iterdir()}


@pytest.mark.parametrize("threads", [-1, 257, 1.5, True])
def test_thread_counts_have_one_validator(threads: Any) -> None:
    """INV-124: 0..256, checked by configuration and engine alike, with the field named."""
    with pytest.raises(ConfigError, match="disk_io_threads"):
        IoConfig(disk_io_threads=threads)
    with pytest.raises(ConfigError, match="disk_io_threads"):
        ThreadsEngine(threads=threads)


def test_thread_counts_at_the_edges_start() -> None:
    """INV-124, INV-126: 1 and 256 threads start at construction and end with the engine."""
    for threads in (1, 256):
        before = own_threads()
        engine = open_engine(IoConfig(disk_io_threads=threads), kind="threads")
        started = own_threads() - before
        assert threads + 1 == len(started)
        engine.close()
        assert not started & own_threads()


def test_unknown_engines_and_policies_are_refused() -> None:
    """INV-132: the error names the field."""
    with pytest.raises(ConfigError, match="io_engine"):
        open_engine(kind="aio")
    with pytest.raises(ConfigError, match="policy"):
        open_engine(kind="threads", policy="best")


def switches(tid: str) -> int:
    text = Path(f"/proc/self/task/{tid}/status").read_text(encoding="ascii")
    return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def engine_threads() -> dict[str, int]:
    """Voluntary context switches of every native thread of ours."""
    found = {}
    for tid in entries("task"):
        name = Path(f"/proc/self/task/{tid}/comm").read_text(encoding="ascii").strip()
        if name.startswith("kvs-"):
            found[f"{name} {tid}"] = switches(tid)
    return found


async def test_an_idle_engine_wakes_nobody(open_rig: Any, native_kind: str) -> None:
    """INV-129: no thread of an idle engine is scheduled at all, before and after work."""
    async with open_rig(native_kind) as rig:
        rig.fill(0)
        assert await rig.write(0).end() == 0
        assert await rig.read(0).end() == 0
        await asyncio.sleep(0.05)
        before = engine_threads()
        assert before
        await asyncio.sleep(1.0)
        assert before == engine_threads()


def test_the_probe_reports_what_works(tmp_path: Path) -> None:
    """INV-130: the effective mode, found by a real write and read; contents are kept."""
    path = tmp_path / "probe.slots"
    file = probe.open_slot_file(path, MIB)
    assert file.mode == ("direct" if file.direct_fd >= 0 else "buffered")
    assert bool(file.reason) == (file.mode == "buffered")
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.fstat(file.buffered_fd).st_blocks * 512 >= MIB
    os.pwrite(file.buffered_fd, b"superblock", 0)
    file.close()
    again = probe.open_slot_file(path)
    assert os.pread(again.buffered_fd, 10, 0) == b"superblock"
    again.close()
    off = probe.open_slot_file(path, direct="off")
    assert (-1, "buffered") == (off.direct_fd, off.mode)
    off.close()
    off.close()
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        probe.open_slot_file(link)


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    """INV-918: anonymous files have no name; a file that does not fit is removed again."""
    file = probe.open_slot_file(tmp_path / "none", MIB, anonymous=True)
    assert os.fstat(file.buffered_fd).st_size == MIB
    file.close()
    with pytest.raises(CapacityError, match="bytes needed"):
        probe.open_slot_file(tmp_path / "huge", 1 << 50)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["open", "write", "lie"])
def test_refused_direct_io_falls_back_or_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """INV-130: refused at open, at the first write, or silently wrong: buffered, and why."""
    real_open, real_write = os.open, os.pwritev

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if step == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, *args, **kwargs)

    def write(fd: int, buffers: Any, offset: int) -> int:
        if step == "write":
            raise OSError(errno.EINVAL, "no")
        return real_write(fd, buffers, offset) - (1 if step == "lie" else 0)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", write)
    file = probe.open_slot_file(tmp_path / "slots", 64 * KIB)
    assert (-1, "buffered") == (file.direct_fd, file.mode)
    assert "O_DIRECT" in file.reason
    file.close()
    with pytest.raises(UnsupportedError, match="direct"):
        probe.open_slot_file(tmp_path / "slots", direct="on")


def test_the_system_probe_tells_what_auto_would_take() -> None:
    """INV-127: doctor and auto agree."""
    found = probe.probe_system(register_bytes=2 * MIB)
    engine = open_engine(kind="auto")
    assert engine.name == found.engine
    assert bool(found.io_uring_reason) == (not found.io_uring)
    engine.close()


def test_an_unclosed_engine_is_a_warning() -> None:
    """Handles are guards: dropping one unreleased raises ResourceWarning."""
    engine = open_engine(kind="threads")
    with pytest.warns(ResourceWarning, match="unclosed threads engine"):
        engine.__del__()
    engine.close()
