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
completion, gates = sys.argv[1], int(sys.argv[2])
async def main():
    loop = asyncio.get_running_loop()
    queue = CompletionQueue(loop)
    ring = GateRing(64)
    device = CudaDevice(0, ring, calibrate=False, close_timeout=2.0, completion=completion)
    def notified(stream):
        future = loop.create_future()
        device.notify(stream, queue, queue.token(lambda status, *_: future.set_result(status)))
        return future
    tickets = [ring.take(1) for _ in range(gates)]
    behind_gates = []
    for index, ticket in enumerate(tickets):
        stream = device.stream(f"gated{index}")
        stream.wait_ticket(ticket)
        behind_gates.append(notified(stream))
    device.native.launch(device.stream("aux").key, "kvs_spin", 1, 1, (50_000_000,))
    device.native.launch(device.stream("aux").key, "kvs_fault", 1, 1, ())
    lost = [notified(device.stream("aux"))]
    device.stream("h2d").wait_event(device.stream("aux").record())  # waits, but does not run
    lost.append(notified(device.stream("h2d")))
    early = sum(future.done() for future in lost)
    if gates:
        await asyncio.sleep(0.5)
        early = sum(future.done() for future in lost)
    begin = loop.time()
    for ticket in tickets:
        ring.publish(ticket, -5)  # as a failed read or its deadline does
    try:
        statuses = await asyncio.wait_for(asyncio.gather(*lost), 5)
        parked = await asyncio.wait_for(asyncio.gather(*behind_gates), 5)
    except TimeoutError:
        for role in ("aux", "h2d", "gated0"):
            print(role, device.native.stream_query(device.stream(role).key), flush=True)
        raise
    took = loop.time() - begin
    print("lost", statuses, parked, "early", early, round(took, 4), flush=True)
    assert all(status < -20000 for status in statuses), statuses
    # the wait itself may still pass; its ticket says that the data is bad
    assert all(status == 0 or status < -20000 for status in parked), parked
    assert took < 1.0, took
    try:
        device.stream("h2d").record()
    except DeviceError as error:
        assert error.is_sticky
    else:
        raise AssertionError("the device still works")
    device.close()
    queue.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("gates", [0, 2])
@pytest.mark.parametrize("completion", ["words", "events"])
def test_t8_a_lost_context_ends_every_wait(
    cuda: Any, record: Any, completion: str, gates: int
) -> None:
    """T8, INV-917, INV-924: waits fail within a second, close does not hang, the process exits.

    While gates are parked or kernels run the driver does not tell; the second begins after them.
    """
    cuda.close()
    done = subprocess.run(
        [sys.executable, "-c", _LOSE, completion, str(gates)],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    record(completion=completion, gates=gates, output=done.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lost")


_LOSE_STORE = """
import asyncio, sys, time
import kvstore
from kvstore._uring.base import Opcode
from kvstore._uring.engine import FaultRule
PAGE, BLOCK, BLOCKS = 256 << 10, 16, 4
config = kvstore.StoreConfig(
    block_tokens=BLOCK,
    pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE),),
    device=kvstore.DeviceTierConfig(device="cuda:0", gpu_cache_size=2 * BLOCKS * PAGE),
    disk=kvstore.DiskTierConfig(
        disk_cache_size=64 * (PAGE + 4096),
        disk_cache_path=sys.argv[1],
        disk_keep_copy_after_restore=True,
    ),
)
async def serve(store, number):
    tokens = list(range(1000 * number, 1000 * number + BLOCK * BLOCKS))
    async with store.session(tokens) as session:
        await session.resume(store.stream())
        await session.grow(len(tokens))
        session.commit(tokens[session.history_tokens :])
        session.suspend(store.stream().record())
    await store.step(store.stream().record())
async def main():
    store = await kvstore.open_store(config).__aenter__()
    for _ in range(2):
        for number in range(6):
            await serve(store, number)
    tokens = list(range(BLOCK * BLOCKS))
    await asyncio.sleep(0.3)  # writes end and give their landing slots back
    rule = store.engine.inject(FaultRule(action="hold", opcode=Opcode.READ))
    session = await store.session(tokens).__aenter__()
    restore = await session.resume(store.stream(), gated=True, deadline=0.5)
    assert restore.is_gated
    device = store.device
    device.native.launch(device.stream("aux").key, "kvs_fault", 1, 1, ())
    begin = time.perf_counter()
    try:
        await asyncio.wait_for(restore.ready(), 10)
    except kvstore.KVStoreError as error:
        print("lost", type(error).__name__, end=" ")
    while store.health() != "failed" and time.perf_counter() - begin < 10:
        try:  # an idle store looks at nothing; the next copy meets the loss
            other = range(2000, 2000 + BLOCK * BLOCKS)
            async with store.session(list(other)) as next_session:
                await asyncio.wait_for(next_session.resume(store.stream()), 5)
        except kvstore.KVStoreError as error:
            print(type(error).__name__, end=" ")
        await asyncio.sleep(0.005)
    took = time.perf_counter() - begin
    print(store.health(), round(took, 3), flush=True)
    assert took < 1.5, took
    rule.release()
    try:
        await asyncio.wait_for(store.aclose(), 10)
    except kvstore.KVStoreError as error:
        print(type(error).__name__, flush=True)
asyncio.run(main())
"""


def test_t8_a_store_that_loses_its_device_behind_a_gate_fails(
    cuda: Any, record: Any, tmp_path: Any
) -> None:
    """T8, INV-119, INV-917: the deadline opens the gate; a second later the store has failed."""
    cuda.close()
    done = subprocess.run(
        [sys.executable, "-c", _LOSE_STORE, str(tmp_path / "kv")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    record(output=done.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lost")


_TELLS = """
import os, sys, time
from kvstore._uring.native import GateRing
from kvstore.devices.cuda import CudaDevice
from kvstore.errors import DeviceError
kind, gates = sys.argv[1], int(sys.argv[2])
ring = GateRing(64)
device = CudaDevice(0, ring, calibrate=False)
gated, idle, faulted = (device.stream(role) for role in ("gated0", "h2d", "aux"))
if gates:
    gated.wait_ticket(ring.take(1))
else:
    device.native.launch(gated.key, "kvs_spin", 1, 1, (5_000_000_000,))
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


@pytest.mark.parametrize("gates", [0, 1])
@pytest.mark.parametrize(
    "kind",
    ["idle stream", "written stream", "faulted stream", "parked stream", "parked event", "record"],
)
def test_t8_what_tells_a_loss_is_recorded(cuda: Any, record: Any, kind: str, gates: int) -> None:
    """T8: which call reports the code after a fault elsewhere; each in a process of its own."""
    cuda.close()
    done = subprocess.run(
        [sys.executable, "-c", _TELLS, kind, str(gates)],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    record(kind=kind, gates=gates, code_and_ms=done.stdout.strip())
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
