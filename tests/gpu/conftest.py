"""Fixtures of the GPU tests: the device harness, a real device, a watchdog that opens all gates.

Numbers go into ``KVSTORE_GPU_RECORD`` (a JSON lines file) when it is set, so that a run on a lent
machine brings its figures back even if a later test fails. ``KVSTORE_GPU_SCALE`` multiplies the
repetitions: 1 is quick, ``tests/gpu/run.sh`` uses 20.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.devices.cuda import CudaDevice
from kvstore.errors import KVStoreError

_path = Path(__file__).parents[1] / "unit" / "device" / "conftest.py"
_spec = importlib.util.spec_from_file_location("kvstore_device_harness", _path)
assert _spec is not None and _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
_shared.WATCHDOG_S = 75.0  # many repetitions on real hardware
harness = _shared.harness
make_harness = _shared.make_harness
on_loop = _shared.on_loop

WATCHDOG_S = 70.0


def _reason() -> str:
    try:
        CudaDevice(0, calibrate=False).close()
    except KVStoreError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def gpu_reason() -> str:
    """Say why there is no GPU, or nothing."""
    return _reason()


@pytest.fixture
def cuda(gpu_reason: str, harness: Any) -> Iterator[CudaDevice]:
    """Give GPU 0 over the harness; a watchdog opens every gate long before the time limit."""
    if gpu_reason:
        pytest.skip(gpu_reason)
    device = harness.use(CudaDevice(0, harness.ring))
    timer = threading.Timer(WATCHDOG_S, harness.ring.publish_all, (-110,))
    timer.daemon = True
    timer.start()
    yield device
    timer.cancel()


@pytest.fixture
def second_cuda(gpu_reason: str, harness: Any) -> CudaDevice:
    """Give GPU 1 over the same gate words."""
    if gpu_reason:
        pytest.skip(gpu_reason)
    try:
        return harness.use(CudaDevice(1, harness.ring))
    except KVStoreError as error:
        pytest.skip(str(error))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Write named numbers of this test to the record file, if there is one."""

    def write(**values: Any) -> None:
        path = os.environ.get("KVSTORE_GPU_RECORD")
        if path:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"test": request.node.name, **values}) + "\n")

    return write


@pytest.fixture
def scale() -> int:
    """Return the factor on repetitions."""
    return int(os.environ.get("KVSTORE_GPU_SCALE", "1"))


@pytest.fixture
def torch_cuda(gpu_reason: str) -> Any:
    """Give torch with CUDA, or skip."""
    if gpu_reason:
        pytest.skip(gpu_reason)
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch
