"""A harness for device tests: real loops with a watchdog, host slots, patterns, both devices."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import shutil
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from kvstore._uring.device_native import CpuQueueConfig
from kvstore._uring.native import Arena, CompletionQueue, GateRing
from kvstore.devices.base import CopyDirection, HostLayout
from kvstore.devices.cpu import CpuDevice
from kvstore.errors import KVStoreError

WATCHDOG_S = 20.0


class Harness:
    """One device, one gate ring, one host area of slots; everything is closed at the end."""

    def __init__(self, *, page_bytes: int = 8192, host_slots: int = 64, words: int = 256) -> None:
        self.page_bytes = page_bytes
        self.ring = GateRing(words)
        slot_bytes = 4096 + page_bytes
        per_slab = 16
        self.arena = Arena(host_slots // per_slab * (1 << 21))
        self.arena.prefault(threads=1)
        self.host = HostLayout(self.arena.address, slot_bytes, per_slab, 1 << 21)
        self.device: Any = None
        self._opened: list[Any] = []

    def open(self, **options: Any) -> CpuDevice:
        """Open the CPU device with ``queues`` fields given by name, register the host area."""
        gates = options.pop("gates", True)
        device = CpuDevice(self.ring, queues=CpuQueueConfig(**options), gates=gates)
        return self.use(device)

    def use(self, device: Any) -> Any:
        """Take a device in: registers the host area, closes it at the end."""
        self.device = device
        self._opened.append(device)
        for start in range(0, self.arena.length, 1 << 21):
            device.register_host(self.arena.address + start, 1 << 21)
        return device

    def payload(self, slot: int) -> np.ndarray:
        """Return the payload bytes of a host slot, writable."""
        begin = self.host.address(slot) + 4096 - self.arena.address
        return self.arena.view(begin, self.page_bytes)

    def fill(self, slot: int, seed: int) -> np.ndarray:
        """Fill a host slot with the pattern of ``seed`` and return the pattern."""
        self.payload(slot)[:] = pattern(seed, self.page_bytes)
        return pattern(seed, self.page_bytes)

    def ids(self, *slots: int) -> np.ndarray:
        """Return slot ids as the devices take them."""
        return np.array(slots, np.int32)

    def to_device(self, stream: Any, pool: Any, device: list[int], host: list[int]) -> None:
        """Enqueue host -> device copies."""
        self.device.copy_pages(
            stream, pool, self.ids(*device), self.host, self.ids(*host), CopyDirection.TO_DEVICE
        )

    def to_host(self, stream: Any, pool: Any, device: list[int], host: list[int]) -> None:
        """Enqueue device -> host copies."""
        self.device.copy_pages(
            stream, pool, self.ids(*device), self.host, self.ids(*host), CopyDirection.TO_HOST
        )

    def close(self) -> None:
        """Open every gate, then close devices and memory."""
        self.ring.publish_all(-125)
        for device in self._opened:
            device.close()
        self.ring.close()
        self.arena.close()


def pattern(seed: int, length: int) -> np.ndarray:
    """Return bytes that differ between seeds and between positions."""
    values = np.arange(length, dtype=np.uint32) * 2654435761 + np.uint32(seed * 40503 + 1)
    return (values >> 13).astype(np.uint8)


@pytest.fixture
def harness() -> Iterator[Harness]:
    """Give a harness and close it, under a watchdog."""
    faulthandler.dump_traceback_later(WATCHDOG_S + 10, exit=True)
    made = Harness()
    try:
        yield made
    finally:
        made.close()
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def make_harness() -> Iterator[Callable[..., Harness]]:
    """Give a factory of harnesses with other page sizes."""
    made: list[Harness] = []
    faulthandler.dump_traceback_later(WATCHDOG_S + 10, exit=True)

    def make(**options: Any) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    faulthandler.cancel_dump_traceback_later()


class Waiting:
    """Completions of a real loop, each an awaited status."""

    def __init__(self) -> None:
        self.queue = CompletionQueue(asyncio.get_running_loop())

    def token(self) -> tuple[int, asyncio.Future[int]]:
        """Return a token and the future of its status."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(status: int, _flags: int, _value: int) -> None:
            if not future.done():
                future.set_result(status)

        return self.queue.token(done), future

    async def notified(self, device: Any, stream: Any) -> int:
        """Await the stream; returns the status."""
        token, future = self.token()
        device.notify(stream, self.queue, token)
        return await future


@pytest.fixture
def on_loop() -> Callable[[Callable[[Waiting], Coroutine[Any, Any, None]]], None]:
    """Run an async body on a real loop with completions and a watchdog."""

    def run(body: Callable[[Waiting], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            waiting = Waiting()
            try:
                with anyio.fail_after(WATCHDOG_S):
                    await body(waiting)
            finally:
                waiting.queue.close()

        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(main())

    return run


class FakeDriver:
    """The stand-in driver of one test: a copy of the library, so that its state is its own."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_get.restype = ctypes.c_long
        self._library.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_long]

    def __setitem__(self, name: str, value: int) -> None:
        self._library.fake_set(name.encode(), value)

    def settle(self) -> None:
        """Give streams that were abandoned time to leave memory that is about to be unmapped."""
        time.sleep(0.05)

    def __getitem__(self, name: str) -> int:
        return int(self._library.fake_get(name.encode()))


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in for libcuda once."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in driver")
    target = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    source = Path(__file__).parents[2] / "gpu" / "fake_libcuda.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-g", "-o", target, source, "-lpthread"], check=True
    )
    return target


@pytest.fixture
def fake(fake_library: Path, tmp_path: Path) -> FakeDriver:
    """Give a stand-in driver with fresh state."""
    mine = tmp_path / "libcuda.so.1"
    shutil.copy(fake_library, mine)
    return FakeDriver(mine)


def gpu_reason() -> str:
    """Return why no real GPU can be used, or an empty string."""
    from kvstore.devices.cuda import CudaDevice

    try:
        CudaDevice(0, calibrate=False).close()
    except KVStoreError as error:
        return str(error)
    return ""


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def any_device(request: pytest.FixtureRequest, harness: Harness) -> Any:
    """Give each kind of device in turn, over the harness's gate words and host slots."""
    from kvstore.devices.cuda import CudaDevice

    if request.param == "cpu":
        return harness.open()
    if request.param == "fake":
        fake = request.getfixturevalue("fake")
        return harness.use(CudaDevice(0, harness.ring, library=fake.path, calibrate=False))
    reason = gpu_reason()
    if reason:
        pytest.skip(reason)
    return harness.use(CudaDevice(0, harness.ring))
