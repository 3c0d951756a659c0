"""Page pools: where the pages of a pool group lie on the device, piece by piece.

A pool of the store's own is one buffer, one piece per page. An adopted pool is the scheduler's
KV tensors: a page has one piece per tensor and per index of the dimensions before ``block_dim``,
in that order, and on host and disk the pieces follow each other without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from kvstore._uring.device_native import PagePlan
from kvstore.devices.base import HostLayout, SlotIds
from kvstore.errors import ConfigError, LogicError

U64 = npt.NDArray[np.uint64]


class _Strided(NamedTuple):
    """What is needed of a tensor, whichever library made it; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


def _strided(tensor: Any) -> _Strided:
    if hasattr(tensor, "data_ptr"):  # torch
        item = int(tensor.element_size())
        strides = tuple(int(step) * item for step in tensor.stride())
        return _Strided(int(tensor.data_ptr()), tuple(tensor.shape), strides, item)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if interface is None:
        interface = getattr(tensor, "__array_interface__", None)
    if interface is None:
        raise ConfigError(
            f"tensors: cannot read the address of {type(tensor).__name__}", field="tensors"
        )
    item = np.dtype(interface["typestr"]).itemsize
    shape = tuple(int(size) for size in interface["shape"])
    strides = interface.get("strides") or tuple(
        item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))
    )
    return _Strided(int(interface["data"][0]), shape, tuple(strides), item)


def _pieces(tensor: Any, block_dim: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the block count and (address, stride, bytes) of each piece of one tensor."""
    view = _strided(tensor)
    if block_dim >= len(view.shape):
        raise ConfigError(
            f"block_dim: tensor has {len(view.shape)} dimensions, got {block_dim}",
            field="block_dim",
        )
    inner = view.item_bytes
    for size, stride in zip(
        reversed(view.shape[block_dim + 1 :]), reversed(view.strides[block_dim + 1 :]), strict=True
    ):
        if size != 1 and stride != inner:
            raise ConfigError(
                "tensors: the dimensions behind block_dim must be contiguous", field="tensors"
            )
        inner *= size
    pieces = []
    for outer in np.ndindex(*view.shape[:block_dim]):
        offset = sum(i * step for i, step in zip(outer, view.strides, strict=False))
        pieces.append((view.address + offset, view.strides[block_dim], inner))
    return view.shape[block_dim], pieces


@final
@dataclass(slots=True, eq=False)
class PagePool:
    """The slots of one pool group on a device. Made by the devices, not by callers.

    Shapes: ``bases``, ``strides`` and ``sizes`` are (piece_count,) uint64, in bytes.
    Ownership: ``owner`` is what keeps the memory alive (a buffer, an allocation, the tensors).
    """

    name: str
    slot_count: int
    page_bytes: int
    bases: U64
    strides: U64
    sizes: U64
    owner: Any
    is_adopted: bool = False
    view: Callable[..., Any] | None = None
    _plans: dict[HostLayout, PagePlan] = field(default_factory=dict)

    @classmethod
    def contiguous(
        cls,
        name: str,
        slot_count: int,
        page_bytes: int,
        address: int,
        owner: Any,
        view: Callable[..., Any],
    ) -> PagePool:
        """Return a pool that is one buffer of ``slot_count * page_bytes`` bytes."""
        base = np.array([address], np.uint64)
        size = np.array([page_bytes], np.uint64)
        return cls(name, slot_count, page_bytes, base, size, size, owner, view=view)

    @classmethod
    def adopted(
        cls, name: str, tensors: Sequence[Any], block_dim: int, page_bytes: int
    ) -> PagePool:
        """Return a pool over the caller's tensors.

        Raises: ConfigError: counts differ, bytes per block do not add up to ``page_bytes``.
        """
        if not tensors:
            raise ConfigError(f"tensors: group {name!r} names no tensor", field="tensors")
        read = [_pieces(tensor, block_dim) for tensor in tensors]
        counts = {count for count, _ in read}
        if len(counts) != 1:
            raise ConfigError(
                f"tensors: group {name!r} has tensors of {sorted(counts)} blocks", field="tensors"
            )
        pieces = np.array([piece for _, parts in read for piece in parts], np.uint64)
        total = int(pieces[:, 2].sum())
        if total != page_bytes:
            raise ConfigError(
                f"page_bytes: group {name!r} says {page_bytes}, its tensors hold {total} per block",
                field="page_bytes",
            )
        bases, strides, sizes = (np.ascontiguousarray(pieces[:, column]) for column in range(3))
        return cls(
            name, counts.pop(), page_bytes, bases, strides, sizes, list(tensors), is_adopted=True
        )

    def as_tensor(self, dtype: Any = None, shape: Sequence[int] | None = None) -> Any:
        """Return the pool as (slot_count, ...) tensor; an adopted pool returns its tensors.

        ``shape`` is that of one page, or of the whole pool; without it (page_bytes,) of ``dtype``.
        """
        if self.is_adopted:
            return self.owner[0] if len(self.owner) == 1 else list(self.owner)
        assert self.view is not None
        return self.view(dtype, shape)

    def plan(self, host: HostLayout) -> PagePlan:
        """Return the native plan for this pool and host area, made once per pair."""
        plan = self._plans.get(host)
        if plan is None:
            room = host.slot_bytes - host.payload_offset
            if self.page_bytes > room:
                raise LogicError(f"a page of {self.page_bytes} bytes does not fit a slot of {room}")
            plan = PagePlan(
                self.bases,
                self.strides,
                self.sizes,
                (
                    host.base,
                    host.slot_bytes,
                    host.slots_per_slab,
                    host.slab_bytes,
                    host.payload_offset,
                ),
            )
            self._plans[host] = plan
        return plan

    def check_slots(self, device_slots: SlotIds, host_slots: SlotIds) -> tuple[SlotIds, SlotIds]:
        """Return both as contiguous int32 arrays. Raises: LogicError: lengths or ids are wrong."""
        device = np.ascontiguousarray(device_slots, np.int32)
        host = np.ascontiguousarray(host_slots, np.int32)
        if device.shape != host.shape or device.ndim != 1:
            raise LogicError(f"slot arrays differ: {device.shape} and {host.shape}")
        if len(device) and not (
            0 <= int(device.min()) and int(device.max()) < self.slot_count and int(host.min()) >= 0
        ):
            raise LogicError(f"slot id outside pool {self.name!r} of {self.slot_count} slots")
        return device, host


def pool_shape(
    slot_count: int, page_bytes: int, item_bytes: int, shape: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the full shape of a view; ``shape`` is one page's or the whole pool's.

    Raises: LogicError: the bytes do not match.
    """
    if shape is None:
        if page_bytes % item_bytes:
            raise LogicError(f"page of {page_bytes} bytes is no multiple of {item_bytes}")
        return slot_count, page_bytes // item_bytes
    sizes = tuple(int(size) for size in shape)
    total = math.prod(sizes) * item_bytes
    if total == page_bytes:
        return slot_count, *sizes
    if total == page_bytes * slot_count and sizes[0] == slot_count:
        return sizes
    raise LogicError(f"shape {sizes} holds {total} bytes, a page {page_bytes}")
