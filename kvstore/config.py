"""Configuration records that check themselves, and the two enumerations every layer shares.

All records are frozen. Each number is checked on construction, so a half-built store cannot
exist: an error names the field before anything is allocated (INV-132). Sizes are bytes, times
are seconds unless a name ends in a unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, Protocol

from kvstore.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ALIGNMENT_BYTES = 4096
HEADER_BYTES = 4096
PIECE_BYTES_MAX = 4 * MIB
IO_THREADS_MAX = 256
BYTES_MAX = (1 << 63) - 1
PRIORITY_MIN, PRIORITY_MAX = -(1 << 31), (1 << 31) - 1
SECONDS_MAX = 1e9  # in nanoseconds it still fits into 64 bits


class PathLike(Protocol):
    """A path object; this module may not import ``os`` to name its class."""

    def __fspath__(self) -> str:
        """Return the path as text."""
        ...


class Tier(IntEnum):
    """The medium of a level, hottest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class IoClass(IntEnum):
    """The class of a transfer, most urgent first (INV-101)."""

    READ = 0
    REQUIRED = 1
    BACKGROUND = 2


class IoEngine(Enum):
    """The engines a store may be asked for; ``auto`` falls back visibly (INV-127)."""

    AUTO = "auto"
    IO_URING = "io_uring"
    THREADS = "threads"


def _fail(name: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"{name}: {rule}, got {value!r}", field=name)


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ConfigError naming ``name`` unless ``value`` is a whole number in low..high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(name, value, "must be a whole number")
    if value < low or (high is not None and value > high):
        bound = f"must be in {low}..{high}" if high is not None else f"must be at least {low}"
        raise _fail(name, value, bound)


def check_number(
    name: str, value: object, low: float, high: float = math.inf, *, above: bool = False
) -> None:
    """Raise ConfigError unless ``value`` is a finite number in low..high (``above``: > low)."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _fail(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number) or math.isinf(number):
        raise _fail(name, value, "must be finite")
    if number < low or number > high or (above and number == low):
        raise _fail(
            name,
            value,
            f"must be {'above' if above else 'at least'} {low:g}"
            + (f" and at most {high:g}" if high != math.inf else ""),
        )


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is True or False: "no" is true in Python."""
    if not isinstance(value, bool):
        raise _fail(name, value, "must be True or False")


def check_seconds(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a finite number of seconds that fits a clock.

    Zero and below are fine: that time has passed already.
    """
    check_number(name, value, -SECONDS_MAX, SECONDS_MAX)


def check_io_threads(value: object, name: str = "disk_io_threads") -> None:
    """The one validator of thread counts: configuration, engine and CLI call it (INV-124)."""
    check_int(name, value, 0, IO_THREADS_MAX)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise _fail(name, value, f"must be one of {', '.join(choices)}")


def share_slots(fraction: float | str | Decimal, slot_count: int) -> int:
    """Return floor(fraction x slots), from the decimal text of the fraction (INV-507)."""
    return int(Decimal(str(fraction)) * slot_count)


def slot_bytes(page_bytes: int) -> int:
    """Return header plus page bytes rounded up to 4 KiB: one slot on host and disk (INV-339)."""
    return HEADER_BYTES + -(-page_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class PoolGroupConfig:
    """One layer group: one page per block, all pages of one size (INV-337).

    ``window`` and ``sinks`` are tokens; ``window=None`` is full attention. ``share`` weights how
    a tier's bytes are divided among groups; by default the page bytes do.
    """

    name: str
    page_bytes: int
    window: int | None = None
    sinks: int = 0
    share: float | None = None
    eviction_policy: str = "lru"

    def __post_init__(self) -> None:
        """Check every field by itself."""
        name: object = self.name
        if not isinstance(name, str) or not name.isidentifier():
            raise _fail("pool_groups.name", self.name, "must be an identifier")
        check_int("page_bytes", self.page_bytes, 1, BYTES_MAX)
        if self.window is not None:
            check_int("window", self.window, 1)
        check_int("sinks", self.sinks, 0)
        if self.sinks and self.window is None:
            raise _fail("sinks", self.sinks, "needs a window")
        if self.share is not None:
            check_number("share", self.share, 0.0, above=True)
        check_choice("eviction_policy", self.eviction_policy, ("lru", "s3fifo"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTierConfig:
    """Level 0: memory of the store's own, or the scheduler's tensors adopted as the pool.

    ``gpu_cache_size`` counts page bytes. With ``tensors={group: [Tensor, ...]}`` a device page is
    one piece per tensor, cut along ``block_dim``; ``reserved_slots`` are never handed out.
    """

    gpu_cache_size: int = 0
    device: str = "cpu"
    tensors: Mapping[str, Sequence[Any]] | None = None
    block_dim: int = 0
    reserved_slots: tuple[int, ...] = ()
    gated_streams: int = 2

    def __post_init__(self) -> None:
        """Check every field by itself."""
        check_int("gpu_cache_size", self.gpu_cache_size, 0, BYTES_MAX)
        if self.tensors is not None and not isinstance(self.tensors, Mapping):
            raise _fail("tensors", self.tensors, "must map each pool group to its tensors")
        if not self.gpu_cache_size and not self.tensors:
            raise _fail("gpu_cache_size", self.gpu_cache_size, "must be above 0 without tensors")
        device: object = self.device
        if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise _fail("device", device, "must be cpu or cuda[:N]")
        reserved: object = self.reserved_slots
        if isinstance(reserved, str) or not isinstance(reserved, Sequence):
            raise _fail("reserved_slots", reserved, "must be a sequence of slot numbers")
        for slot in reserved:
            check_int("reserved_slots", slot, 0)
        check_int("block_dim", self.block_dim, 0)
        check_int("gated_streams", self.gated_streams, 0, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig:
    """Pinned host memory. ``keep_copy_after_restore=True`` makes the tier inclusive (INV-701)."""

    host_cache_size: int
    keep_copy_after_restore: bool = False
    protected_copy_fraction: float | str | Decimal = 0.0
    numa_node: int | None = None

    def __post_init__(self) -> None:
        """Check every field by itself."""
        check_int("host_cache_size", self.host_cache_size, 1, BYTES_MAX)
        check_flag("keep_copy_after_restore", self.keep_copy_after_restore)
        _check_fraction("protected_copy_fraction", self.protected_copy_fraction)
        if self.numa_node is not None:
            check_int("numa_node", self.numa_node, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig:
    """Slot files on one path or a list of paths; every option needs a size above 0 (INV-132)."""

    disk_cache_size: int = 0
    disk_cache_path: str | PathLike | Sequence[str | PathLike] = ""
    disk_keep_copy_after_restore: bool = False
    disk_write_through: bool = False
    disk_protected_copy_fraction: float | str | Decimal = 1.0
    write_policy: str = "all"
    selective_uses: int = 2
    persist_mode: str = "relaxed"
    checksum: bool = True

    def __post_init__(self) -> None:
        """Check the fields, and that no option is set without a disk behind it."""
        check_int("disk_cache_size", self.disk_cache_size, 0, BYTES_MAX)
        for name in ("disk_keep_copy_after_restore", "disk_write_through", "checksum"):
            check_flag(name, getattr(self, name))
        if not self.disk_cache_size:
            for name in ("disk_keep_copy_after_restore", "disk_write_through"):
                if getattr(self, name):
                    raise _fail(name, True, "needs disk_cache_size above 0")
            raise _fail("disk_cache_size", 0, "must be above 0; leave disk=None for no disk tier")
        self._check_paths()
        _check_fraction("disk_protected_copy_fraction", self.disk_protected_copy_fraction)
        check_choice("write_policy", self.write_policy, ("all", "selective"))
        check_int("selective_uses", self.selective_uses, 1)
        check_choice("persist_mode", self.persist_mode, ("disabled", "relaxed", "strict"))
        if not self.checksum and self.persist_mode != "disabled":
            raise _fail("checksum", self.checksum, "False needs persist_mode='disabled'")

    def _check_paths(self) -> None:
        value: object = self.disk_cache_path
        is_one = isinstance(value, str) or hasattr(value, "__fspath__")
        paths: list[object]
        if is_one:
            paths = [value]
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            paths = list(value)
        else:
            raise _fail("disk_cache_path", value, "must be a path or a list of paths")
        if not paths:
            raise _fail("disk_cache_path", value, "must name a directory")
        for path in paths:
            is_path = isinstance(path, str) or hasattr(path, "__fspath__")
            if not is_path or not str(path) or "\0" in str(path):
                raise _fail("disk_cache_path", path, "must name a directory")
        if len(set(self.paths)) != len(paths):
            raise _fail("disk_cache_path", value, "names a directory twice")

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories, as a tuple even when one path was given."""
        if isinstance(self.disk_cache_path, str) or hasattr(self.disk_cache_path, "__fspath__"):
            return (str(self.disk_cache_path),)
        return tuple(str(path) for path in self.disk_cache_path)


def _check_fraction(name: str, value: object) -> None:
    if isinstance(value, str):
        try:
            value = Decimal(value)
        except ArithmeticError:
            raise _fail(name, value, "must be a number") from None
    check_number(name, value, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class IoConfig:
    """The disk engine and its bounds; the values and their reasons are in INV-101 to INV-139."""

    io_engine: str = "auto"
    disk_io_threads: int = 16
    direct: str = "auto"
    kernel_rings: int = 1
    ring_entries: int = 256
    read_piece_bytes: int = 4 * MIB
    write_piece_bytes: int = 1 * MIB
    inflight_bytes: int = 16 * MIB
    required_inflight_bytes: int = 8 * MIB
    background_inflight_bytes: int = 4 * MIB
    required_age: float = 0.010
    background_age: float = 0.100
    background_turn: int = 8
    background_bytes_max: int = 1 * GIB
    staging_bytes: int = 64 * MIB
    bounce_pages: int = 2
    deadline: float = 30.0
    drain_timeout: float = 30.0
    watchdog: float = 5.0

    def __post_init__(self) -> None:
        """Check every field by itself."""
        check_choice("io_engine", self.io_engine, ("auto", "io_uring", "threads"))
        check_io_threads(self.disk_io_threads)
        check_choice("direct", self.direct, ("auto", "on", "off"))
        check_int("kernel_rings", self.kernel_rings, 1, 3)
        if self.kernel_rings == 2:
            raise _fail("kernel_rings", self.kernel_rings, "must be 1 or 3")
        check_int("ring_entries", self.ring_entries, 1, 32768)
        for name in ("read_piece_bytes", "write_piece_bytes"):
            check_int(name, getattr(self, name), ALIGNMENT_BYTES, PIECE_BYTES_MAX)
            if getattr(self, name) % ALIGNMENT_BYTES:
                raise _fail(name, getattr(self, name), "must be a multiple of 4096")
        for name in ("inflight_bytes", "required_inflight_bytes", "background_inflight_bytes"):
            check_int(name, getattr(self, name), ALIGNMENT_BYTES, BYTES_MAX)
        for name in ("required_age", "background_age", "deadline", "drain_timeout", "watchdog"):
            check_number(name, getattr(self, name), 0.0, SECONDS_MAX, above=True)
        check_int("background_turn", self.background_turn, 2, (1 << 31) - 1)
        check_int("background_bytes_max", self.background_bytes_max, 0, BYTES_MAX)
        check_int("staging_bytes", self.staging_bytes, 1, BYTES_MAX)
        check_int("bounce_pages", self.bounce_pages, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The whole store. ``fingerprint`` names the model: files are named and a restart is warm.

    ``agree(min_prefix) -> int`` is the hook by which ranks settle on the smallest common prefix.
    ``on_event`` receives KV events (stored, removed, moved) for cache-aware routers; default off.
    ``check_invariants`` runs every rule of the tables after each step: for tests and debugging.
    """

    block_tokens: int
    pool_groups: Sequence[PoolGroupConfig]
    device: DeviceTierConfig
    host: HostTierConfig | None = None
    disk: DiskTierConfig | None = None
    io: IoConfig = field(default_factory=IoConfig)
    fingerprint: str | None = None
    agree: Callable[[int], int] | None = None
    on_event: Callable[[Any], None] | None = None
    prefix_reuse: bool = True
    prefetch_fraction: float = 0.25
    restore_fraction: float = 0.5
    check_invariants: bool = False

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        check_int("block_tokens", self.block_tokens, 1)
        self._check_kinds()
        if not self.pool_groups:
            raise _fail("pool_groups", self.pool_groups, "must name at least one group")
        names = [group.name for group in self.pool_groups]
        if len(set(names)) != len(names):
            raise _fail("pool_groups", names, "names must differ")
        for name in ("prefetch_fraction", "restore_fraction"):
            check_number(name, getattr(self, name), 0.0, 1.0, above=True)
        fingerprint: object = self.fingerprint
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise _fail("fingerprint", fingerprint, "must be a string")
        if fingerprint == "":
            raise _fail("fingerprint", fingerprint, "must not be empty")
        if fingerprint is not None and not fingerprint.isprintable():
            raise _fail("fingerprint", fingerprint, "must be printable text")
        if self.disk is None:
            return
        if self.disk.disk_write_through and self.io.disk_io_threads == 0:
            raise _fail("disk_io_threads", 0, "must be above 0 with disk_write_through")

    def _check_kinds(self) -> None:
        """A record or a callback of the wrong kind is told here, not where it is first used."""
        groups: object = self.pool_groups
        if not isinstance(groups, list | tuple) or not all(
            isinstance(group, PoolGroupConfig) for group in groups
        ):
            raise _fail("pool_groups", groups, "must be a sequence of PoolGroupConfig")
        for name, kind, is_optional in (
            ("device", DeviceTierConfig, False),
            ("host", HostTierConfig, True),
            ("disk", DiskTierConfig, True),
            ("io", IoConfig, False),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (is_optional and value is None):
                raise _fail(name, value, f"must be a {kind.__name__}")
        for name in ("agree", "on_event"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise _fail(name, value, "must be callable")
        for name in ("prefix_reuse", "check_invariants"):
            check_flag(name, getattr(self, name))
