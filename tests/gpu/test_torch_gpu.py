"""T7 and the border to torch: streams, events, pools, adopted tensors, graph capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import DeviceError, UnsupportedError
from kvstore.gate import Gate

pytestmark = pytest.mark.gpu


def test_pool_is_a_torch_view(cuda: Any, harness: Any, torch_cuda: Any, on_loop: Any) -> None:
    """A pool is the same memory as its torch view, with any dtype and shape."""
    pool = cuda.create_pool("full", 8, harness.page_bytes)
    view = pool.as_tensor(torch_cuda.bfloat16, (2, harness.page_bytes // 4))
    assert tuple(view.shape) == (8, 2, harness.page_bytes // 4)
    assert view.data_ptr() == int(pool.bases[0])

    async def body(waiting: Any) -> None:
        want = harness.fill(3, 7)
        harness.to_device(cuda.stream("h2d"), pool, [5], [3])
        assert await waiting.notified(cuda, cuda.stream("h2d")) == 0
        assert np.array_equal(want, pool.as_tensor()[5].cpu().numpy())

    on_loop(body)


@pytest.mark.parametrize("piece_bytes", [8192, 512])
def test_adopted_tensors(
    cuda: Any, harness: Any, torch_cuda: Any, on_loop: Any, piece_bytes: int
) -> None:
    """One piece per tensor; small pieces take the staged path; order by the caller's stream."""
    layers = harness.page_bytes // piece_bytes
    tensors = [
        torch_cuda.zeros((40, piece_bytes), dtype=torch_cuda.uint8, device="cuda:0")
        for _ in range(layers)
    ]
    torch_cuda.cuda.synchronize()
    pool = cuda.adopt_pool("full", tensors, 0, harness.page_bytes)

    async def body(waiting: Any) -> None:
        slots = list(range(39, 7, -1))
        for host in range(32):
            harness.fill(host, host)
        up, down = cuda.stream("h2d"), cuda.stream("d2h")
        harness.to_device(up, pool, slots, list(range(32)))
        caller = cuda.wrap_stream(torch_cuda.cuda.current_stream())
        caller.wait_event(up.record())
        for tensor in tensors:
            tensor.add_(1)
        event = torch_cuda.cuda.Event()
        event.record()
        down.wait_event(cuda.wrap_event(event))
        harness.to_host(down, pool, slots, list(range(32, 64)))
        assert await waiting.notified(cuda, down) == 0
        for host in range(32):
            assert np.array_equal(harness.payload(host) + np.uint8(1), harness.payload(host + 32))

    on_loop(body)
    assert (cuda.counters().staged_calls > 0) == (piece_bytes < 8192)


def test_torch_events_are_awaited(cuda: Any, torch_cuda: Any, on_loop: Any) -> None:
    """A torch event completes a token; one that was never recorded completes at once."""

    async def body(waiting: Any) -> None:
        for recorded in (True, False):
            event = torch_cuda.cuda.Event()
            if recorded:
                torch_cuda.cuda._sleep(2_000_000)
                event.record()
            token, future = waiting.token()
            cuda.notify_event(cuda.wrap_event(event), waiting.queue, token)
            del event
            assert await future == 0
        assert await waiting.notified(cuda, cuda.wrap_stream(None)) == 0

    on_loop(body)


def test_t7_graph_capture_is_not_disturbed(
    cuda: Any, harness: Any, torch_cuda: Any, on_loop: Any
) -> None:
    """T7, P13: awaits go on during a global capture; gate and batch on it are refused."""
    pool = cuda.create_pool("full", 8, harness.page_bytes)
    x = torch_cuda.ones(1024, device="cuda:0")
    side = torch_cuda.cuda.Stream()
    side.wait_stream(torch_cuda.cuda.current_stream())
    with torch_cuda.cuda.stream(side):
        for _ in range(3):
            x.mul_(1.0)
    torch_cuda.cuda.current_stream().wait_stream(side)
    graph = torch_cuda.cuda.CUDAGraph()

    async def body(waiting: Any) -> None:
        event = cuda.stream("aux").record()
        with torch_cuda.cuda.graph(graph):
            x.add_(1.0)
            stream = cuda.wrap_stream(torch_cuda.cuda.current_stream())
            assert stream.is_capturing()
            with pytest.raises(UnsupportedError):
                Gate(cuda, harness.ring).take(stream)
            with pytest.raises(DeviceError) as refused:
                harness.to_device(stream, pool, [0], [0])
            assert refused.value.code == 900
            harness.to_device(cuda.stream("h2d"), pool, [0], [0])
            token, future = waiting.token()
            cuda.notify(cuda.stream("h2d"), waiting.queue, token)
            token, second = waiting.token()
            cuda.notify_event(event, waiting.queue, token)
            assert await future == 0 and await second == 0
            assert event.query()
            x.add_(1.0)
        before = float(x[0])
        ticket = Gate(cuda, harness.ring).take(cuda.wrap_stream(torch_cuda.cuda.current_stream()))
        graph.replay()
        ticket.publish()
        torch_cuda.cuda.synchronize()
        assert float(x[0]) == before + 2.0

    on_loop(body)
