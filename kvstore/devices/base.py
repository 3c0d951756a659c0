"""What a device is: pools of page slots, ordered streams, events, and awaited copies.

Two implementations pass the same contract tests: `CudaDevice` and `CpuDevice`; `SimDevice` of
the test kit steps deterministically. Work on one stream runs in order; between streams only
events order. A device never blocks the loop: enqueueing returns at once, completion arrives
through the store's `Completions` queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore._uring.base import Completions, Ticket
from kvstore.errors import DeviceError

SlotIds = npt.NDArray[np.int32]

#: A completion that carries a device error has the status ``DEVICE_STATUS - code``.
DEVICE_STATUS = -20_000
#: Driver codes used by every device, with the driver's meaning.
CODE_INVALID_VALUE = 1
CODE_OUT_OF_MEMORY = 2
CODE_DEINITIALIZED = 4
CODE_LAUNCH_FAILED = 719
CODE_NOT_SUPPORTED = 801
CODE_CAPTURE_UNSUPPORTED = 900
CODE_CAPTURE_INVALIDATED = 901
#: Codes after which a context is lost; every later call returns them (INV-917).
STICKY_CODES = frozenset(
    {
        4,
        46,
        201,
        214,
        219,
        220,
        226,
        700,
        702,
        709,
        710,
        714,
        715,
        716,
        717,
        718,
        719,
        720,
        721,
        999,
    }
)


def device_error(code: int, what: str) -> DeviceError:
    """Return the exception for a driver code; ``is_sticky`` says whether the device is lost."""
    sticky = code in STICKY_CODES
    lost = "; the device is lost" if sticky else ""
    return DeviceError(f"{what}: device error {code}{lost}", code=code, is_sticky=sticky)


def error_from_status(status: int, what: str = "device work") -> DeviceError | None:
    """Return the error a completion carries, or None if its status is no device error."""
    if status > DEVICE_STATUS:
        return None
    return device_error(DEVICE_STATUS - status, what)


class CopyDirection(Enum):
    """Seen from the device."""

    TO_DEVICE = "h2d"
    TO_HOST = "d2h"


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Equal slots in host memory: slot ``i`` begins at

    ``base + (i // slots_per_slab) * slab_bytes + (i % slots_per_slab) * slot_bytes``

    and its payload ``payload_offset`` bytes later, so that no slot crosses a registration
    boundary (INV-339). Units: bytes.
    """

    base: int
    slot_bytes: int
    slots_per_slab: int
    slab_bytes: int
    payload_offset: int = 4096

    def address(self, slot_id: int) -> int:
        """Return the address of the slot's first byte (its header)."""
        slab, index = divmod(slot_id, self.slots_per_slab)
        return self.base + slab * self.slab_bytes + index * self.slot_bytes


class DeviceCaps(NamedTuple):
    """What the device offers; asked per device and cached per device (INV-212)."""

    kind: str
    memops64: bool
    memops32: bool = False
    batch_copy: int = 0
    copy_engines: int = 1
    host_numa: int = -1
    uses_host_page_tables: bool = False
    max_connections_hint: int = 8


class Event(Protocol):
    """A point in a stream; a never recorded event counts as complete."""

    def query(self) -> bool:
        """Return whether the point has passed. Raises: DeviceError: the device is lost."""
        ...


class Stream(Protocol):
    """An ordered queue of device work. No call blocks, except on a full hardware queue."""

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for ``event``."""
        ...

    def wait_ticket(self, ticket: Ticket) -> None:
        """Let later work wait until the ticket is published.

        Raises: UnsupportedError, DeviceError.
        """
        ...

    def record(self) -> Event:
        """Return an event behind everything enqueued so far."""
        ...

    def is_capturing(self) -> bool:
        """Return whether a graph capture is open; gates and batches are refused then."""
        ...


class DevicePool(Protocol):
    """The page slots of one pool group; a page is one piece per base address."""

    slot_count: int
    page_bytes: int

    def as_tensor(self, dtype: Any = None, shape: Sequence[int] | None = None) -> Any:
        """Return the pool as (slot_count, ...) torch tensor, or numpy array without torch."""
        ...


class Device(Protocol):
    """Callers guarantee: calls come from the loop. Implementations must: keep the last good error
    state sticky, and complete every pending notification with it.
    """

    caps: DeviceCaps
    #: What a fence of None means (INV-338): it has passed, or it is the next step's.
    none_fence_has_passed: bool
    #: True after `quiesce` or `close` left work outstanding: gate words and arenas are then leaked.
    holds_memory: bool

    @property
    def error(self) -> int:
        """The sticky code of a lost device, or 0 (INV-917). Cheap: asked at each call."""
        ...

    def quiesce(self) -> bool:
        """Block until our streams are idle, for a bounded time; False and `holds_memory` if not."""
        ...

    def create_pool(self, name: str, slot_count: int, page_bytes: int) -> DevicePool:
        """Allocate a pool. Raises: CapacityError: the device has no memory."""
        ...

    def adopt_pool(
        self, name: str, tensors: Sequence[Any], block_dim: int, page_bytes: int
    ) -> DevicePool:
        """Use the caller's tensors, one piece each. Raises: ConfigError: bytes do not add up."""
        ...

    def register_host(self, address: int, length: int) -> None:
        """Make host memory reachable for copies and gate waits (slabs of at most 1 GiB)."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`, after the last copy that uses it."""
        ...

    def stream(self, role: str) -> Stream:
        """Return the store's own stream for a role: ``h2d``, ``d2h``, ``gated0`` ..., ``aux``."""
        ...

    def wrap_stream(self, stream: Any) -> Stream:
        """Wrap a stream (ours, an int handle, torch's, ``__cuda_stream__``, None: default)."""
        ...

    def wrap_event(self, event: Any) -> Event:
        """Wrap a caller's event (ours or torch's)."""
        ...

    def copy_pages(
        self,
        stream: Stream,
        pool: DevicePool,
        device_slots: SlotIds,
        host: HostLayout,
        host_slots: SlotIds,
        direction: CopyDirection,
    ) -> None:
        """Enqueue page copies; page ``i`` pairs ``device_slots[i]`` with ``host_slots[i]``.

        Pieces of one batch are unordered among each other. Ownership: source and target are
        borrowed until the work has completed. Raises: DeviceError: nothing was enqueued.
        """
        ...

    def notify(self, stream: Stream, queue: Completions, token: int) -> None:
        """Complete ``token`` (status 0 or the device's error) when the stream gets here."""
        ...

    def notify_event(self, event: Event, queue: Completions, token: int) -> None:
        """Complete ``token`` when ``event`` has passed."""
        ...

    def synchronize(self) -> None:
        """Block until all streams of the store are idle; for closing and tests only."""
        ...

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        ...
