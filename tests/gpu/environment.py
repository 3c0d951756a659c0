"""Write what the machine is into a JSON file: versions, GPU, driver attributes, link, kernel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "cuda-bindings", "cuda-core", "numpy", "cffi", "pytest", "anyio", "uvloop")
QUERY = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm,memory.total"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    done = subprocess.run(
        [program, f"--query-gpu={QUERY}", "--format=csv"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.stdout


def main() -> None:
    """Collect and write."""
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "nvidia_smi": _smi(),
        "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
    }
    try:
        from kvstore._uring.probe import probe_system

        found["system"] = repr(probe_system())
    except Exception as error:
        found["system"] = repr(error)
    try:
        from kvstore._uring.native import GateRing
        from kvstore.devices.cuda import CudaDevice

        device = CudaDevice(0, GateRing(64))
        found["driver"] = device.driver._asdict()
        found["caps"] = device.caps._asdict()
        found["min_dma"] = device.min_dma
        numbers = (122, 123, 92, 93, 94, 98, 91, 88, 100, 40, 134, 86, 117)
        found["attributes"] = {str(n): device.native.attribute(n) for n in numbers}
        device.close()
    except Exception as error:
        found["device_error"] = repr(error)
    text = json.dumps(found, indent=1)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
