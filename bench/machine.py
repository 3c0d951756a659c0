"""What machine a result was measured on: read from /proc and /sys, nothing else is asked."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

THP_PATH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def chosen(text: str) -> str:
    """Return the bracketed word of a kernel choice: ``always [madvise] never`` -> ``madvise``."""
    for word in text.split():
        if word.startswith("["):
            return word.strip("[]")
    return text


def transparent_hugepage() -> str:
    """Return ``always``, ``madvise``, ``never``, or nothing where the kernel has none."""
    return chosen(_text(THP_PATH))


def _cpu_model() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def mount_of(directory: str | Path) -> tuple[str, str]:
    """Return (file system type, device name) under a directory."""
    path = Path(directory).resolve()
    best, found = -1, ("", "")
    for line in _text("/proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        point = head.split()[4]
        if (path == Path(point) or Path(point) in path.parents) and len(point) > best:
            kind, source = tail.split()[:2]
            best, found = len(point), (kind, Path(source).name)
    return found


def _queue(device: str) -> dict[str, str]:
    # a partition has its queue in the disk's directory
    real = Path("/sys/class/block", device)
    if not real.exists():
        return {}
    real = real.resolve()
    queue = real / "queue" if (real / "queue").is_dir() else real.parent / "queue"
    names = ("scheduler", "nr_requests", "max_sectors_kb", "max_segments", "write_cache")
    values = {name: _text(queue / name) for name in names}
    values["scheduler"] = chosen(values["scheduler"])
    return {name: value for name, value in values.items() if value}


def fio_version(program: str = "fio") -> str:
    """Return ``fio-3.33``, or nothing where it is not installed."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603  (the program the caller named)
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


class OtherLoad:
    """How many CPUs other processes keep busy, from its creation on (interrupts left out)."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        fields = _text("/proc/stat").partition("\n")[0].split()[1:]
        ticks = os.sysconf("SC_CLK_TCK")
        busy = sum(int(fields[i]) for i in (0, 1, 2)) / ticks if len(fields) > 2 else 0.0
        own = sum(
            used.ru_utime + used.ru_stime
            for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        return time.monotonic(), busy, own

    def cpus(self) -> float:
        """Return the mean number of CPUs that others kept busy."""
        now, busy, own = (
            after - before for after, before in zip(self._read(), self._start, strict=True)
        )
        return max(0.0, busy - own) / now if now > 0 else 0.0


def describe(directory: str | Path) -> dict[str, Any]:
    """Return the machine, the file system and the block queue under ``directory``."""
    kind, device = mount_of(directory)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "cpu": _cpu_model(),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": _memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": kind,
        "device": device,
        "queue": _queue(device),
        "transparent_hugepage": transparent_hugepage(),
        "memlock_bytes": soft,
    }


def describe_text(host: dict[str, Any]) -> str:
    """Return one line about a machine."""
    queue = host.get("queue", {})
    parts = [
        f"{host.get('cpus', '?')} x {host.get('cpu', '?')}",
        f"{host.get('memory_bytes', 0) / (1 << 30):.0f} GiB",
        f"Linux {host.get('kernel', '?')}",
        f"{host.get('filesystem', '?')} on {host.get('device', '?')}",
        f"scheduler {queue.get('scheduler', '?')}",
        f"transparent huge pages {host.get('transparent_hugepage', '?')}",
    ]
    return ", ".join(parts)
