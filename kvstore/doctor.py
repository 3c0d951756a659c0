"""What this machine offers a store, found by trying, and what a store would use.

`examine` costs milliseconds and changes nothing but a file without a name in the directory asked
about. `calibrate` measures the disk through the real engine and proposes bounds for it (INV-136).
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np

from kvstore import compiled
from kvstore._uring import open_engine
from kvstore._uring.base import SUBMISSION_DTYPE, Engine, Opcode
from kvstore._uring.native import Arena, CompletionQueue, now_ns
from kvstore._uring.probe import SystemProbe, open_slot_file, probe_system
from kvstore.config import MIB, IoClass, IoConfig
from kvstore.errors import EngineError

OK, WARN, MISSING = "ok", "warn", "missing"
Check = dict[str, str]
CAP_IPC_LOCK = 14


def _check(name: str, status: str, text: str, remedy: str = "") -> Check:
    return {"name": name, "status": status, "text": text + (f"; {remedy}" if remedy else "")}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def check_versions() -> list[Check]:
    """Kernel, interpreter and packages: what a fault report needs first."""
    packages = ("kvstore", "cffi", "numpy", "anyio", "xxhash")
    found = ", ".join(f"{name} {_version(name)}" for name in packages if _version(name))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    cores = len(os.sched_getaffinity(0))
    return [
        _check("system", OK, f"{system}, {cores} cores, Python {platform.python_version()}"),
        _check("packages", OK, found),
        check_core(),
    ]


def check_core() -> Check:
    """Return whether the bookkeeping runs compiled."""
    if compiled.DIGEST:
        return _check("core", OK, compiled.describe())
    remedy = "each page costs about four times the time; install a wheel for this Python"
    return _check("core", WARN, compiled.describe(), remedy)


def check_engine(probe: SystemProbe) -> list[Check]:
    """io_uring, registered memory, the memory lock limit and huge pages, as tried by the probe."""
    checks = []
    if probe.io_uring:
        flags = ", ".join(probe.ring_flags) or "no optional flags"
        checks.append(_check("io_uring", OK, f"works ({flags})"))
    else:
        checks.append(_check("io_uring", WARN, probe.io_uring_reason))
    if probe.registered_buffers:
        checks.append(_check("registered memory", OK, "accepted"))
    else:
        checks.append(
            _check("registered memory", WARN, probe.registered_buffers_reason or "refused")
        )
    limit = probe.memlock_bytes
    if limit is None:
        checks.append(_check("memlock", OK, "unlimited"))
    elif probe.registered_buffers and _has_capability(CAP_IPC_LOCK):
        checks.append(_check("memlock", OK, f"{limit >> 10} KiB, lifted by CAP_IPC_LOCK"))
    else:
        text = f"{limit >> 10} KiB: memory above it stays unregistered, which is slower"
        remedy = "raise it with ulimit -l, LimitMEMLOCK= or --ulimit memlock=-1"
        checks.append(_check("memlock", WARN, text, remedy))
    if probe.huge_pages:
        checks.append(_check("huge pages", OK, f"given ({probe.huge_pages_setting})"))
    else:
        text = f"not given (transparent_hugepage is {probe.huge_pages_setting or 'missing'})"
        remedy = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        checks.append(_check("huge pages", WARN, text, remedy))
    return checks


def _has_capability(number: int) -> bool:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def check_direct(directory: Path) -> tuple[Check, str]:
    """Return whether direct I/O works in ``directory``, by a real write and read, and the mode."""
    kind = _file_system(directory)
    file = open_slot_file(directory / "doctor", anonymous=True)
    file.close()
    if file.mode == "direct":
        return _check("direct I/O", OK, f"works on {kind}"), file.mode
    return _check("direct I/O", WARN, f"{kind}: {file.reason}", "use a local disk"), file.mode


def check_space(directory: Path) -> Check:
    """Return how large the disk tier could be."""
    room = os.statvfs(directory)
    return _check("disk space", OK, f"{room.f_bavail * room.f_frsize / 1e9:.1f} GB free")


def check_cuda() -> list[Check]:
    """Return what a GPU offers. Neither bindings nor a driver are needed to ask."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [_check("cuda", MISSING, "no driver; device='cpu' works everywhere")]
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return [_check("cuda", MISSING, "the driver finds no usable GPU")]
    checks = [
        _check("cuda", OK, f"{count.value} devices, cuda-bindings {_version('cuda-bindings')}")
    ]
    if importlib.util.find_spec("cuda") is None:
        checks[0] = _check(
            "cuda", WARN, f"{count.value} devices", "install the extra: kvstore[cuda]"
        )
    can_wait = ctypes.c_int(0)
    for index in range(count.value):
        device = ctypes.c_int(0)
        driver.cuDeviceGet(ctypes.byref(device), index)
        # CAN_USE_64_BIT_STREAM_MEM_OPS of the current calls; 92 belongs to the deprecated ones
        driver.cuDeviceGetAttribute(ctypes.byref(can_wait), 122, device)
        checks.append(
            _check(f"memops cuda:{index}", OK, "64-bit stream waits: gated restores work")
            if can_wait.value
            else _check(
                f"memops cuda:{index}", WARN, "no 64-bit stream waits: restores are awaited"
            )
        )
    return checks


def _file_system(directory: Path) -> str:
    """Return the type of the file system a directory lies on."""
    best, kind = "", "unknown"
    for line in _read("/proc/self/mounts").splitlines():
        mount, found = line.split()[1:3]
        if (f"{directory.resolve()}/").startswith(mount.rstrip("/") + "/") and len(mount) > len(
            best
        ):
            best, kind = mount, found
    return kind


def examine(directory: Path) -> dict[str, Any]:
    """Return the checks and what a store on ``directory`` would use, ready for JSON."""
    probe = probe_system()
    direct, mode = check_direct(directory)
    checks = [
        *check_versions(),
        *check_engine(probe),
        direct,
        check_space(directory),
        *check_cuda(),
    ]
    memory = "registered" if probe.registered_buffers else "unregistered"
    pages = "huge" if probe.huge_pages else "4 KiB"
    return {
        "checks": checks,
        "store": {
            "engine": probe.engine,
            "mode": mode,
            "fallback_reason": probe.io_uring_reason,
            "text": f"engine {probe.engine}, {mode} I/O, {memory} memory on {pages} pages",
        },
    }


# ----------------------------------------------------------------------------------- calibration

READ_BYTES = 1 * MIB
#: Bytes in flight to try; the bound follows from the bandwidth, these show what it costs.
DEPTHS_BYTES = tuple(MIB << power for power in range(7))
SECONDS_PER_DEPTH = 0.5
TURN_NS = 6_000_000  # INV-136: bandwidth x 6 ms


class _Load:
    """Keeps a number of transfers in the engine and takes the time of each."""

    def __init__(self, engine: Engine, queue: CompletionQueue, file_id: int, address: int) -> None:
        self._engine = engine
        self._queue = queue
        self._file_id = file_id
        self._address = address

    async def run(
        self, opcode: Opcode, offsets: Sequence[int], depth: int, seconds: float
    ) -> tuple[float, list[int]]:
        """Return bytes per second and the latencies in ns, sorted."""
        done = asyncio.get_running_loop().create_future()
        latencies: list[int] = []
        position = inflight = 0
        started_ns = now_ns()
        ends_ns = started_ns + round(seconds * 1e9)

        def issue(slot: int) -> None:
            nonlocal position, inflight
            issued_ns = now_ns()

            def complete(status: int, _flags: int, _value: int) -> None:
                nonlocal inflight
                inflight -= 1
                latencies.append(now_ns() - issued_ns)
                if status < 0 and not done.done():
                    done.set_exception(EngineError(f"calibration: {os.strerror(-status)}"))
                if position < len(offsets) and now_ns() < ends_ns and not done.done():
                    issue(slot)
                elif not inflight and not done.done():
                    done.set_result(None)

            record = np.zeros(1, SUBMISSION_DTYPE)
            record["token"] = self._queue.token(complete)
            record["address"] = self._address + slot * READ_BYTES
            record["offset"] = offsets[position]
            record["payload_bytes"] = READ_BYTES
            record["gate_word"] = -1
            record["file_id"] = self._file_id
            record["io_class"] = IoClass.READ if opcode is Opcode.READ else IoClass.REQUIRED
            record["opcode"] = opcode
            position, inflight = position + 1, inflight + 1
            self._engine.submit(self._queue, record)

        for slot in range(min(depth, len(offsets))):
            issue(slot)
        await done
        total = len(latencies) * READ_BYTES
        return total * 1e9 / max(1, now_ns() - started_ns), sorted(latencies)


async def calibrate(directory: Path, size_bytes: int) -> dict[str, Any]:
    """Measure the disk under ``directory`` through the engine and propose bounds (INV-136).

    Writes one file without a name, of ``size_bytes``, reads it at rising depth, and leaves nothing.
    Cost: a few seconds. Raises: CapacityError: no space; EngineError, OSError.
    """
    count = max(16, size_bytes // READ_BYTES)
    depth_max = max(DEPTHS_BYTES) // READ_BYTES
    file = await anyio.to_thread.run_sync(
        lambda: open_slot_file(directory / "calibrate", count * READ_BYTES, anonymous=True)
    )
    arena = Arena(depth_max * READ_BYTES)
    await arena.prefault_off_loop()
    queue = CompletionQueue(asyncio.get_running_loop())
    wide = 1 << 40  # the bounds are what is being looked for
    engine = open_engine(
        IoConfig(inflight_bytes=wide, required_inflight_bytes=wide, background_inflight_bytes=wide)
    )
    try:
        for address, length in arena.slabs():
            engine.register_memory(address, length)
        file_id = engine.register_file(file.direct_fd, file.buffered_fd)
        load = _Load(engine, queue, file_id, arena.address)
        in_order = [index * READ_BYTES for index in range(count)]
        write_rate, _ = await load.run(Opcode.WRITE, in_order, 16, 60.0)
        # a fixed stride visits every megabyte once and never in order
        stride = next(step for step in (7, 11, 13, 17) if count % step)
        scattered = [index * stride % count * READ_BYTES for index in range(count)]
        curve = []
        for depth_bytes in DEPTHS_BYTES:
            depth = min(count, depth_bytes // READ_BYTES)
            rate, latencies = await load.run(Opcode.READ, scattered * 4, depth, SECONDS_PER_DEPTH)
            curve.append(
                {
                    "inflight_bytes": depth * READ_BYTES,
                    "read_bytes_per_s": round(rate),
                    "read_ns_p50": latencies[len(latencies) // 2],
                    "read_ns_p99": latencies[len(latencies) * 99 // 100],
                }
            )
        await engine.drain(file_id, 10.0)
        engine.unregister_file(file_id)
        name = engine.name
    finally:
        await engine.aclose()
        queue.close()
        arena.close()
        file.close()
    best = max(point["read_bytes_per_s"] for point in curve)
    return {
        "text": f"Measured through {name}, {file.mode} I/O, {count} MiB: "
        f"reads {best / 1e6:.0f} MB/s, writes {write_rate / 1e6:.0f} MB/s. Proposed for IoConfig:",
        "engine": name,
        "mode": file.mode,
        "write_bytes_per_s": round(write_rate),
        "reads": curve,
        "proposal": propose(best),
    }


def propose(bytes_per_s: float) -> dict[str, int]:
    """Return the bounds for a disk of this bandwidth: bandwidth x 6 ms, half, a quarter (INV-136).

    Whole MiB, and never below two of the largest pieces.
    """
    total = max(8, -(-round(bytes_per_s * TURN_NS / 1e9) // MIB)) * MIB
    return {
        "inflight_bytes": total,
        "required_inflight_bytes": total // 2,
        "background_inflight_bytes": total // 4,
    }
