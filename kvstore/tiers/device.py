"""The device tier: one pool per pool group, the store's streams, and batched page copies.

A batch is one call per (direction, pool): positions in device memory against positions in host
memory. Completion arrives through the store's completion queue; nobody waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from kvstore import config as cfg
from kvstore._uring.base import Completions
from kvstore.devices.base import CopyDirection, Device, DevicePool, HostLayout, SlotIds, Stream
from kvstore.errors import ConfigError


class HostSlots(Protocol):
    """Slots in host memory, of whichever tier or landing zone."""

    def split(self, slot_ids: Sequence[int]) -> Iterator[tuple[HostLayout, list[int], SlotIds]]:
        """Split a batch by layout: (layout, positions in the batch, slot ids in the layout)."""
        ...


@final
@dataclass(slots=True)
class CopyBatch:
    """Pages that go between one device pool and one host pool in one call."""

    group: int
    host: HostSlots
    direction: CopyDirection
    device_slots: list[int]
    host_slots: list[int]


@final
class DeviceTier:
    """Level 0. The streams: ``h2d`` for restores, ``d2h`` for evictions, ``gated<i>`` per gate."""

    __slots__ = ("_positions", "_queue", "d2h", "device", "gated", "h2d", "pools", "slot_counts")

    def __init__(self, device: Device, queue: Completions, gated_stream_count: int) -> None:
        self.device = device
        self._queue = queue
        self.pools: list[DevicePool] = []
        self.slot_counts: list[int] = []
        #: Positions in an adopted pool with reserved slots; None where slot ids are positions.
        self._positions: list[SlotIds | None] = []
        self.h2d = device.stream("h2d")
        self.d2h = device.stream("d2h")
        # Created and warmed at the start: a stream that is first used while a gate is parked hangs.
        self.gated = [device.stream(f"gated{i}") for i in range(gated_stream_count)]

    def create_pools(
        self,
        groups: Sequence[cfg.PoolGroupConfig],
        slot_counts: Sequence[int],
        config: cfg.DeviceTierConfig,
    ) -> None:
        """Allocate the pools, or adopt the scheduler's tensors.

        Raises: ConfigError: tensors are missing or their bytes do not add up. CapacityError.
        """
        tensors: Mapping[str, Sequence[Any]] | None = config.tensors
        for group, slot_count in zip(groups, slot_counts, strict=True):
            if tensors is None:
                pool = self.device.create_pool(group.name, slot_count, group.page_bytes)
            elif group.name not in tensors:
                raise ConfigError(
                    f"tensors: no tensor for pool group {group.name}", field="tensors"
                )
            else:
                pool = self.device.adopt_pool(
                    group.name, tensors[group.name], config.block_dim, group.page_bytes
                )
            self.pools.append(pool)
            reserved = set(config.reserved_slots) if tensors is not None else set()
            free = [slot for slot in range(pool.slot_count) if slot not in reserved]
            self.slot_counts.append(len(free))
            self._positions.append(np.array(free, np.int32) if reserved else None)

    def position(self, group: int, slot_id: int) -> int:
        """Return where a slot lies in its pool: reserved positions are never handed out."""
        positions = self._positions[group]
        return slot_id if positions is None else int(positions[slot_id])

    def copy(self, stream: Stream, batch: CopyBatch) -> None:
        """Enqueue one batch; one device call per run of host memory (usually one).

        Raises: DeviceError: the device refused; copies of earlier runs may be enqueued already,
        so the caller still waits for the stream before slots are given up.
        """
        for layout, positions, host_slots in batch.host.split(batch.host_slots):
            device_slots = np.array([batch.device_slots[i] for i in positions], np.int32)
            mapped = self._positions[batch.group]
            if mapped is not None:
                device_slots = mapped[device_slots]
            self.device.copy_pages(
                stream, self.pools[batch.group], device_slots, layout, host_slots, batch.direction
            )

    def notify(self, stream: Stream, callback: Callable[[int, int, int], Any]) -> None:
        """Call ``callback(status, flags, value)`` on the loop when the stream gets here."""
        token = self._queue.token(callback)
        try:
            self.device.notify(stream, self._queue, token)
        except BaseException:
            self._queue.discard(token)
            raise

    def notify_event(self, event: Any, callback: Callable[[int, int, int], Any]) -> None:
        """Call ``callback`` on the loop when the event has passed."""
        token = self._queue.token(callback)
        try:
            self.device.notify_event(event, self._queue, token)
        except BaseException:
            self._queue.discard(token)
            raise
