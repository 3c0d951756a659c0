"""T8, T9, T13: ends of processes, lost contexts, forced fallbacks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from kvstore.errors import UnsupportedError
from kvstore.gate import Gate

pytestmark = pytest.mark.gpu

_PREPARE = """
import sys, time
{before}
from kvstore._uring.native import GateRing
from kvstore.devices.cuda import CudaDevice
{after}
ring = GateRing(64)
device = CudaDevice(0, ring, calibrate=False)
device.stream("gated0").wait_ticket(ring.take(1))
device.native.launch(device.stream("gated0").key, "kvs_spin", 1, 1, (1000,))
print("ready", flush=True)
"""


@pytest.mark.parametrize("torch_import", ["never", "before", "after"])
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("raise RuntimeError('end')", 1),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_t13_a_process_ends_with_a_closed_gate(
    cuda: Any, torch_import: str, end: str, status: int
) -> None:
    """T13, P19, INV-222: no exit hangs behind a gate, whatever torch does."""
    cuda.close()
    if torch_import != "never":
        pytest.importorskip("torch")
    torch_line = "import torch; torch.cuda.init(); x = torch.ones(8, device='cuda')"
    code = (
        _PREPARE.format(
            before=torch_line if torch_import == "before" else "",
            after=torch_line if torch_import == "after" else "",
        )
        + end
        + "\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        begin = time.perf_counter()
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert time.perf_counter() - begin < 10
    assert status == process.returncode, errors


_LOSE = """
import asyncio, sys
from kvstore._uring.native import CompletionQueue, GateRing
from kvstore.devices.cuda import CudaDevice
from kvstore.errors import DeviceError
async def main():
    loop = asyncio.get_running_loop()
    queue = CompletionQueue(loop)
    ring = GateRing(64)
    device = CudaDevice(0, ring, calibrate=False, close_timeout=2.0, completion=sys.argv[1])
    futures = []
    tickets = [ring.take(1) for _ in range(2)]
    for index, role in enumerate(("gated0", "gated1")):
        stream = device.stream(role)
        stream.wait_ticket(tickets[index])
        future = loop.create_future()
        token = queue.token(lambda status, flags, value, f=future: f.set_result(status))
        device.notify(stream, queue, token)
        futures.append(future)
    device.native.launch(device.stream("aux").key, "kvs_fault", 1, 1, ())
    begin = loop.time()
    try:
        statuses = await asyncio.wait_for(asyncio.gather(*futures), 5)
    except TimeoutError:
        for role in ("aux", "h2d", "gated0"):
            print(role, device.native.stream_query(device.stream(role).key), flush=True)
        raise
    took = loop.time() - begin
    assert all(status < -20000 for status in statuses), statuses
    assert took < 1.0, took
    for ticket in tickets:
        ring.publish(ticket, -5)
    try:
        device.stream("h2d").record()
    except DeviceError as error:
        assert error.is_sticky
    else:
        raise AssertionError("the device still works")
    device.close()
    queue.close()
    print("lost", statuses, took)
asyncio.run(main())
"""


@pytest.mark.parametrize("completion", ["words", "events"])
def test_t8_a_lost_context_ends_every_wait(cuda: Any, record: Any, completion: str) -> None:
    """T8, INV-917, INV-924: waits fail within a second, close does not hang, the process exits."""
    cuda.close()
    done = subprocess.run(
        [sys.executable, "-c", _LOSE, completion],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    record(completion=completion, output=done.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lost")


_TELLS = """
import os, sys, time
from kvstore._uring.native import GateRing
from kvstore.devices.cuda import CudaDevice
from kvstore.errors import DeviceError
kind = sys.argv[1]
ring = GateRing(64)
device = CudaDevice(0, ring, calibrate=False)
gated, idle, faulted = (device.stream(role) for role in ("gated0", "h2d", "aux"))
gated.wait_ticket(ring.take(1))
parked = gated.record()
word = device.native.lane_word(60)
device.native.launch(faulted.key, "kvs_fault", 1, 1, ())
time.sleep(0.05)
if kind == "written stream":
    device.native.write_word(idle.key, word, 1)
begin = time.perf_counter()
found = None
while found is None and time.perf_counter() - begin < 2:
    try:
        if kind == "parked event":
            parked.query()
        elif kind == "record":
            idle.record()
        else:
            stream = {"faulted stream": faulted, "parked stream": gated}.get(kind, idle)
            result = device.native.stream_query(stream.key)
            device.raise_for(0 if result == 600 else result, "query")
    except DeviceError as error:
        found = error.code
    time.sleep(0.005)
print(found, round(1000 * (time.perf_counter() - begin), 1), flush=True)
ring.publish_all(-5)
os._exit(0)
"""


@pytest.mark.parametrize(
    "kind",
    ["idle stream", "written stream", "faulted stream", "parked stream", "parked event", "record"],
)
def test_t8_what_tells_a_loss_is_recorded(cuda: Any, record: Any, kind: str) -> None:
    """T8: which call reports the code after a fault elsewhere; each in a process of its own."""
    cuda.close()
    done = subprocess.run(
        [sys.executable, "-c", _TELLS, kind],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    record(kind=kind, code_and_ms=done.stdout.strip())
    assert done.returncode == 0, done.stderr


def test_t9_forced_fallbacks(cuda: Any, harness: Any, on_loop: Any) -> None:
    """T9, INV-213: 32-bit waits on the same word, then await mode; host functions still post."""
    stream = cuda.stream("gated0")

    async def body(waiting: Any) -> None:
        gate = Gate(cuda, harness.ring)
        ticket = harness.ring.take(1)
        cuda.caps = cuda.caps._replace(memops64=False)
        stream.wait_ticket(ticket)
        event = stream.record()
        assert cuda.gate_fallbacks["memop32"] == 1
        assert not event.query()
        harness.ring.publish(ticket, 0)
        assert await waiting.notified(cuda, stream) == 0
        cuda.caps = cuda.caps._replace(memops32=False)
        with pytest.raises(UnsupportedError):
            gate.take(stream)
        token, future = waiting.token()
        assert cuda.native.host_post(stream.key, waiting.queue, token) == 0
        assert await future == 0

    on_loop(body)


def test_t9_bindings_against_a_gil_hog_is_recorded(cuda: Any, record: Any) -> None:
    """P1: whether the installed cuda-bindings take the GIL in a host function; written down."""
    bindings = pytest.importorskip("cuda.bindings")
    from cuda.bindings import driver

    fired: list[float] = []
    import ctypes

    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    callback = prototype(lambda _argument: fired.append(time.perf_counter()))
    address = ctypes.cast(callback, ctypes.c_void_p).value
    begin = time.perf_counter()
    (result,) = driver.cuLaunchHostFunc(cuda.stream("aux").key, address, 0)
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end:
        pass
    waiter = threading.Event()
    waiter.wait(0.2)
    record(
        bindings=getattr(bindings, "__version__", "?"),
        result=int(result),
        python_callback_after_s=fired[0] - begin if fired else None,
    )
