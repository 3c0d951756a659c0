"""Cases C53 to C58: memory registration, containers, NUMA."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from kvstore._uring.native import Arena
from kvstore.config import GIB, MIB
from kvstore.errors import DeviceError
from kvstore.testing import SimDevice, SimEngine, SimMemory
from kvstore.tiers.host import HostPool, arena_geometry

PAGE = 256 << 10


class _Map:
    """Memory of any size that is never touched: a fake for geometry above what a machine has."""

    def __init__(self, length: int) -> None:
        self.address = 1 << 40
        self.length = length
        self.is_closed = False

    def prefault(self) -> None:
        """Touch nothing."""

    def view(self, offset: int, length: int) -> np.ndarray:
        raise AssertionError("nobody looks at fake memory")

    def close(self) -> None:
        self.is_closed = True

    def leak(self) -> None:
        raise AssertionError("nothing is in flight")


class _PickyDevice:
    """Registers host memory like a driver that rejects regions above a limit."""

    def __init__(self, limit: int, *, fail_at: int | None = None) -> None:
        self.limit = limit
        self.fail_at = fail_at
        self.regions: dict[int, int] = {}
        self.call_count = 0

    def register_host(self, address: int, length: int) -> None:
        self.call_count += 1
        if length > self.limit or self.call_count == self.fail_at:
            raise DeviceError("register_host: out of memory", code=2, is_sticky=False)
        self.regions[address] = length

    def unregister_host(self, address: int) -> None:
        del self.regions[address]


def _pool(device: object, slot_count: int, page_bytes: int = 4 * MIB) -> HostPool:
    return HostPool(page_bytes, lambda length, _slab, _node: _Map(length), None, device)  # type: ignore[arg-type]


def test_c53_registration_covers_a_large_region_in_chunks_once():
    """512 GiB of host memory reach the device in parts of at most 1 GiB, without gap or overlap."""
    device = _PickyDevice(limit=64 * GIB)
    pool = _pool(device, 0)
    slot_count = 512 * GIB // pool.slot_bytes
    run = pool.map(slot_count)
    pool.register(run)
    pool.add(run)
    assert max(device.regions.values()) <= GIB
    end = run.memory.address
    for address, length in sorted(device.regions.items()):
        assert end == address
        end += length
    assert run.memory.address + run.memory.length == end
    for slot in (0, 1, slot_count // 3, slot_count - 1):
        start = pool.address(slot)
        holders = [
            a for a, n in device.regions.items() if a <= start and start + pool.slot_bytes <= a + n
        ]
        assert 1 == len(holders), "a slot never crosses a registration boundary (INV-339)"


@pytest.mark.parametrize("fail_at", [1, 2, 7])
def test_c53_a_refused_chunk_undoes_the_earlier_ones(fail_at):
    """A chunk that fails leaves no other one registered."""
    device = _PickyDevice(limit=64 * GIB, fail_at=fail_at)
    pool = _pool(device, 0)
    run = pool.map(8 * GIB // pool.slot_bytes)
    with pytest.raises(DeviceError):
        pool.register(run)
    assert fail_at == device.call_count
    assert {} == device.regions
    assert 0 == pool.slot_count


def _mapped_bytes() -> int:
    text = Path("/proc/self/statm").read_text(encoding="ascii")
    return int(text.split()[0]) * resource.getpagesize()


@pytest.mark.parametrize("size", [32 * MIB + 1, 64 * MIB + 4096, 33 * MIB])
def test_c54_memory_taken_is_the_memory_asked_for(size):
    """Just above a power of two an arena takes the request plus at most 2 MiB, and says so."""
    before = _mapped_bytes()
    arena = Arena(size)
    arena.prefault(threads=1)
    grown = _mapped_bytes() - before
    assert size <= arena.length < size + 2 * MIB
    assert grown <= arena.length + 1 * MIB
    arena.close()
    assert _mapped_bytes() - before <= 1 * MIB


def test_c54_slots_of_a_pool_take_their_bytes_and_slack_per_slab_only():
    """Slots just above a power of two waste less than one slot per slab of 1 GiB."""
    slot_bytes = 4 * MIB + 4096
    _, _, length = arena_geometry(1000, slot_bytes)
    assert 1000 * slot_bytes <= length <= 1000 * slot_bytes + (length // GIB + 1) * slot_bytes


def test_c48_first_touch_happens_at_start():
    """After prefault a pass over the whole pool takes no page faults worth mentioning."""
    arena = Arena(64 * MIB)
    arena.prefault()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arena.view()[::4096] = 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 64 * MIB // 4096 // 16
    arena.close()


def test_c48_without_prefault_the_same_pass_faults():
    """The check above can fail: untouched memory faults while it is served."""
    arena = Arena(64 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arena.view()[::4096] = 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults >= 64 * MIB // (2 * MIB)  # at least one per huge page
    arena.close()


async def test_c57_a_refused_registration_is_reported_once_and_the_next_call_works():
    """A failed registration leaves no error behind for unrelated calls."""
    device, engine = SimDevice(), SimEngine()
    device.inject("register_host", 2)
    memory = SimMemory(1 << 20)
    pool = HostPool(PAGE, lambda *_: _Map(1 << 20), engine, device)
    run = pool.map(2)
    with pytest.raises(DeviceError) as caught:
        pool.register(run)
    assert not caught.value.is_sticky
    device.check()
    device.register_host(memory.address, memory.length)
    device.stream("h2d").record()
    assert 1 == device.registered_count
    assert 0 == engine.stats().registered_memory_bytes


def test_c58_memory_is_bound_to_the_node_that_was_asked_for():
    """Node 0 exists everywhere and is honoured; a node that cannot exist is refused by name."""
    arena = Arena(4 * MIB, numa_node=0)
    arena.prefault(threads=1)
    arena.view()[:] = 1
    arena.close()
    with pytest.raises(Exception, match="cannot map"):
        Arena(4 * MIB, numa_node=900)
