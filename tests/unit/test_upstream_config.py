"""Upstream's tests of its options, mirrored: defaults, bounds, schema, and who knows the fields."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

import pytest
from kvstore_bench.run import ReplayOptions

from kvstore.config import (
    GIB,
    MIB,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    IoConfig,
    PoolGroupConfig,
    StoreConfig,
    slot_bytes,
)
from kvstore.errors import ConfigError
from kvstore.testing import open_sim_store, sim_config

Record = type[Any]
GROUP = PoolGroupConfig("full", 4096)
NAN, INF = float("nan"), float("inf")

#: What each record needs besides the field that is looked at.
BASE: dict[Record, dict[str, Any]] = {
    PoolGroupConfig: {"name": "full", "page_bytes": 4096},
    DeviceTierConfig: {"gpu_cache_size": 4096},
    HostTierConfig: {"host_cache_size": 4096},
    DiskTierConfig: {"disk_cache_size": 4096, "disk_cache_path": "/kv"},
    IoConfig: {},
    StoreConfig: {
        "block_tokens": 8,
        "pool_groups": (GROUP,),
        "device": DeviceTierConfig(gpu_cache_size=4096),
    },
}
FRACTION = ([0, 0.0, 0.25, 1.0, "0.29", Decimal("0.5")], [-0.1, 1.1, NAN, INF, "much", True, None])
SECONDS = ([0.001, 30, 3600.0], [0, -1.0, NAN, INF, "1", True])
BYTES = ([4096, 16 * MIB], [4095, -1, 1.5, "4096", True])
PIECE = ([4096, MIB, 4 * MIB], [0, 4097, 8 * MIB, -4096, "1m"])
SWITCH: tuple[list[Any], list[Any]] = ([False, True], [])
HOOK: tuple[list[Any], list[Any]] = ([None, lambda value: value], [])

#: Field by field what a serving configuration may say and what is refused with the field's name.
SCHEMA: dict[Record, dict[str, tuple[list[Any], list[Any]]]] = {
    PoolGroupConfig: {
        "name": (["full", "layer_0"], ["", "a b", "1x", 7, None]),
        "page_bytes": ([1, 4096, 1 << 21], [0, -1, 1.5, True, None]),
        "window": ([None, 1, 4096], [0, -1, 2.5, True]),
        "sinks": ([0], [-1, 4, 1.5, None]),
        "share": ([None, 0.5, 3], [0, -1, NAN, INF, "half"]),
        "eviction_policy": (["lru", "s3fifo"], ["", "fifo", None]),
    },
    DeviceTierConfig: {
        "gpu_cache_size": ([1, GIB], [0, -1, 1.5, True, None]),
        "device": (["cpu", "cuda", "cuda:1"], ["", "tpu"]),
        "tensors": ([None, {}], []),
        "block_dim": ([0, 1], [-1, 1.0, None]),
        "reserved_slots": ([(), (0, 1)], []),
        "gated_streams": ([0, 2, 4], [-1, 5, 2.0, True, None]),
    },
    HostTierConfig: {
        "host_cache_size": ([1, GIB], [0, -1, 1.5, True, None]),
        "keep_copy_after_restore": SWITCH,
        "protected_copy_fraction": FRACTION,
        "numa_node": ([None, 0, 1], [-1, 0.5, True, "0"]),
    },
    DiskTierConfig: {
        "disk_cache_size": ([1, GIB], [0, -1, 1.5, True, None]),
        "disk_cache_path": (["/kv", ("/a", "/b")], ["", (), ("/a", "")]),
        "disk_keep_copy_after_restore": SWITCH,
        "disk_write_through": SWITCH,
        "disk_protected_copy_fraction": FRACTION,
        "write_policy": (["all", "selective"], ["", "some", None]),
        "selective_uses": ([1, 2, 100], [0, -1, 1.5, True]),
        "persist_mode": (["disabled", "relaxed", "strict"], ["", "fsync", None]),
        "checksum": ([True], [False]),  # False is refused unless nothing is persistent (INV-915)
    },
    IoConfig: {
        "io_engine": (["auto", "io_uring", "threads"], ["", "aio", "serial", None]),
        "disk_io_threads": ([0, 1, 16, 256], [-1, 257, 1.0, True, "16", None]),
        "direct": (["auto", "on", "off"], ["", "yes", True]),
        "kernel_rings": ([1, 3], [0, 2, 4]),
        "ring_entries": ([1, 256, 32768], [0, 32769, 1.5, True]),
        "read_piece_bytes": PIECE,
        "write_piece_bytes": PIECE,
        "inflight_bytes": BYTES,
        "required_inflight_bytes": BYTES,
        "background_inflight_bytes": BYTES,
        "required_age": SECONDS,
        "background_age": SECONDS,
        "background_turn": ([2, 8], [1, 0, 2.5, True]),
        "background_bytes_max": ([0, GIB], [-1, 1.5, True]),
        "staging_bytes": ([1, 64 * MIB], [0, -1, 1.5]),
        "bounce_pages": ([1, 2], [0, -1, 1.5, True]),
        "deadline": SECONDS,
        "drain_timeout": SECONDS,
        "watchdog": SECONDS,
    },
    StoreConfig: {
        "block_tokens": ([1, 512], [0, -1, 1.5, True, None]),
        "pool_groups": ([(GROUP,), [GROUP]], [(), (GROUP, GROUP)]),
        "device": ([DeviceTierConfig(gpu_cache_size=1)], []),
        "host": ([None, HostTierConfig(host_cache_size=1)], []),
        "disk": ([None, DiskTierConfig(disk_cache_size=1, disk_cache_path="/kv")], []),
        "io": ([IoConfig()], []),
        "fingerprint": ([None, "model"], [""]),
        "agree": HOOK,
        "on_event": HOOK,
        "prefix_reuse": SWITCH,
        "prefetch_fraction": ([0.1, 1.0], [0, -0.5, 1.5, NAN, INF, "all"]),
        "restore_fraction": ([0.1, 1.0], [0, -0.5, 1.5, NAN, INF, "all"]),
        "check_invariants": SWITCH,
    },
}


def cases(which: int) -> list[Any]:
    """Return every (record, field, value) of the schema that is accepted (0) or refused (1)."""
    return [
        pytest.param(
            record, name, value, id=f"{record.__name__}.{name}={value!r:.24}".replace(" ", "")
        )
        for record, fields in SCHEMA.items()
        for name, values in fields.items()
        for value in values[which]
        if not callable(value)
    ]


def names(record: Record) -> set[str]:
    """Return the fields of a record."""
    return {one.name for one in dataclasses.fields(record)}


def test_disk_offload_options_have_upstreams_defaults() -> None:
    """INV-134, INV-701: every option is off, and the disk's share is whole, the host's none."""
    disk = DiskTierConfig(disk_cache_size=1, disk_cache_path="/kv")
    assert not disk.disk_keep_copy_after_restore
    assert not disk.disk_write_through
    assert (1.0, "all") == (disk.disk_protected_copy_fraction, disk.write_policy)
    host = HostTierConfig(host_cache_size=1)
    assert (False, 0.0) == (host.keep_copy_after_restore, host.protected_copy_fraction)
    io = IoConfig()
    assert 16 == io.disk_io_threads
    assert (4 * MIB, MIB) == (io.read_piece_bytes, io.write_piece_bytes)
    assert (0.010, 0.100, 8) == (io.required_age, io.background_age, io.background_turn)
    assert (16 * MIB, 8 * MIB, 4 * MIB, GIB) == (
        io.inflight_bytes,
        io.required_inflight_bytes,
        io.background_inflight_bytes,
        io.background_bytes_max,
    )


@pytest.mark.parametrize("threads", [0, 256])
def test_both_bounds_of_the_thread_count_are_accepted(threads: int) -> None:
    """INV-124: 0 and 256 are values, -1 and 257 are errors that name the field."""
    assert threads == IoConfig(disk_io_threads=threads).disk_io_threads
    for beyond in (-1, 257):
        with pytest.raises(ConfigError, match="disk_io_threads") as caught:
            IoConfig(disk_io_threads=beyond)
        assert "disk_io_threads" == caught.value.field


def test_rejected_combinations_name_the_field() -> None:
    """INV-125, INV-132, INV-915: options that contradict each other, before anything is made."""
    for name in ("disk_keep_copy_after_restore", "disk_write_through"):
        with pytest.raises(ConfigError, match=name):
            DiskTierConfig(disk_cache_path="/kv", **{name: True})
    with pytest.raises(ConfigError, match="checksum"):
        DiskTierConfig(**BASE[DiskTierConfig], checksum=False)
    loose = DiskTierConfig(**BASE[DiskTierConfig], checksum=False, persist_mode="disabled")
    assert not loose.checksum
    through = DiskTierConfig(**BASE[DiskTierConfig], disk_write_through=True)
    with pytest.raises(ConfigError, match="disk_io_threads"):
        StoreConfig(**BASE[StoreConfig], disk=through, io=IoConfig(disk_io_threads=0))
    with pytest.raises(ConfigError, match="sinks"):
        PoolGroupConfig("full", 4096, sinks=4)
    assert 4 == PoolGroupConfig("full", 4096, window=8, sinks=4).sinks


@pytest.mark.parametrize(("record", "name", "value"), cases(0))
def test_the_schema_accepts(record: Record, name: str, value: Any) -> None:
    """INV-132: every value a field may have is taken as it is."""
    fields = BASE[record] | {name: value}
    if name == "tensors" and value is None:
        fields["gpu_cache_size"] = 1
    assert value == getattr(record(**fields), name)


@pytest.mark.parametrize(("record", "name", "value"), cases(1))
def test_the_schema_refuses(record: Record, name: str, value: Any) -> None:
    """INV-132: a ConfigError, which is a ValueError too, whose message and field name the field."""
    with pytest.raises(ConfigError) as caught:
        record(**BASE[record] | {name: value})
    error = caught.value
    assert isinstance(error, ValueError)
    assert name in str(error).split(":", 1)[0].replace("pool_groups.", "")
    assert str(error).split(":", 1)[0] == error.field


@pytest.mark.parametrize("record", list(BASE))
def test_the_schema_knows_every_field(record: Record) -> None:
    """INV-132: a new field needs its accepted and refused values here."""
    assert names(record) == set(SCHEMA[record])
    with pytest.raises(TypeError, match="no_such_field"):
        record(**BASE[record], no_such_field=1)


#: Fields that `sim_config` decides by its own parameters, named on the right.
SIM_NAMES = {
    DeviceTierConfig: {"gpu_cache_size": "device_pages"},
    HostTierConfig: {
        "host_cache_size": "host_pages",
        "keep_copy_after_restore": "keep_host",
    },
    DiskTierConfig: {
        "disk_cache_size": "disk_pages",
        "disk_cache_path": None,  # the simulated file system has one directory
        "disk_keep_copy_after_restore": "keep_disk",
        "disk_write_through": "write_through",
    },
    IoConfig: {},
    StoreConfig: {
        "device": "device_pages",
        "pool_groups": "groups",
        "host": "host",
        "disk": "disk",
        "io": "io",
    },
}
#: Only real devices and tensors of a framework have these.
SIM_WITHOUT = {"device", "tensors", "block_dim", "reserved_slots", "gated_streams"}


def test_stub_covers_the_simulated_configuration() -> None:
    """INV-132: every field of every record can be set through `sim_config`, and arrives."""
    for record, key in ((HostTierConfig, "host"), (DiskTierConfig, "disk"), (IoConfig, "io")):
        for name in names(record) - set(SIM_NAMES[record]):
            value = SCHEMA[record][name][0][-1]
            config = sim_config(**{key: {name: value}})
            assert value == getattr(getattr(config, key), name)
    for name in names(StoreConfig) - set(SIM_NAMES[StoreConfig]):
        value = SCHEMA[StoreConfig][name][0][-1]
        assert value == getattr(sim_config(**{name: value}), name)
    assert names(DeviceTierConfig) == set(SIM_NAMES[DeviceTierConfig]) | SIM_WITHOUT
    full = sim_config(keep_disk=True, write_through=True, keep_host=True)
    assert full.disk is not None
    assert full.host is not None
    assert full.disk.disk_keep_copy_after_restore
    assert full.disk.disk_write_through
    assert full.host.keep_copy_after_restore


#: What a row of the replay sets, and for everything else why it does not.
REPLAY = {
    PoolGroupConfig: ({"name", "page_bytes", "eviction_policy"}, {"window", "sinks", "share"}),
    DeviceTierConfig: (
        {"gpu_cache_size", "device"},
        {"tensors", "block_dim", "reserved_slots", "gated_streams"},  # memory of its own, no gate
    ),
    HostTierConfig: (
        {"host_cache_size", "keep_copy_after_restore"},
        {"protected_copy_fraction", "numa_node"},  # as by default
    ),
    DiskTierConfig: (
        {
            "disk_cache_size",
            "disk_cache_path",
            "disk_keep_copy_after_restore",
            "disk_write_through",
            "disk_protected_copy_fraction",
            "write_policy",
        },
        {"selective_uses", "persist_mode", "checksum"},  # as by default
    ),
    IoConfig: (
        {"io_engine", "disk_io_threads"},
        {  # `kvstore-bench io` is what measures the engine's own bounds
            *("direct", "kernel_rings", "ring_entries", "read_piece_bytes", "write_piece_bytes"),
            *("inflight_bytes", "required_inflight_bytes", "background_inflight_bytes"),
            *("required_age", "background_age", "background_turn", "background_bytes_max"),
            *("staging_bytes", "bounce_pages", "deadline", "drain_timeout", "watchdog"),
        },
    ),
    StoreConfig: (
        {"block_tokens", "pool_groups", "device", "host", "disk", "io"},
        {  # one run, one rank, always with reuse
            *("fingerprint", "agree", "on_event", "prefix_reuse", "check_invariants"),
            *("prefetch_fraction", "restore_fraction"),
        },
    ),
}


@pytest.mark.parametrize("record", list(BASE))
def test_stub_covers_the_options_of_the_replay(record: Record) -> None:
    """INV-132, INV-815: the replay sets each field or is known to leave it alone."""
    own, left = REPLAY[record]
    assert names(record) == own | left
    assert not own & left


def test_the_replay_maps_its_options_to_the_tiers() -> None:
    """INV-132, INV-814: what a row says is what the tiers are configured with."""
    from kvstore_bench.ablation import Variant

    off = {one.name for one in dataclasses.fields(Variant)}
    assert {"keep_copy", "write_through", "inclusive_host", "write_policy"} <= off
    options = ReplayOptions(host_bytes=1 << 20, disk_bytes=1 << 20, protected_copy_fraction=0.25)
    variant = Variant(
        options="all", engine="threads", keep_copy=True, write_through=True, inclusive_host=True
    )
    config = options.store_config(variant, "/kv")
    assert config.host is not None
    assert config.disk is not None
    assert config.host.keep_copy_after_restore
    assert config.disk.disk_keep_copy_after_restore
    assert config.disk.disk_write_through
    assert 0.25 == float(config.disk.disk_protected_copy_fraction)
    assert ("threads", 16) == (config.io.io_engine, config.io.disk_io_threads)


async def test_the_options_reach_the_tiers() -> None:
    """INV-132, INV-134, INV-507: the tables are built from the options, share and all."""
    config = sim_config(
        keep_disk=True,
        write_through=True,
        keep_host=True,
        disk_pages=100,
        disk={"disk_protected_copy_fraction": 0.29, "write_policy": "selective"},
        host={"protected_copy_fraction": 0.5},
    )
    async with open_sim_store(config) as store:
        spec = store.tables.spec
        assert [True, True] == [level.keep_copy for level in spec.levels[1:]]
        assert spec.is_write_through
        assert 2 == spec.selective_uses
        totals = [store.tables.pools[level][0].total for level in (1, 2)]
        assert [12, 100] == totals
        assert [6, 29] == [spec.levels[level].share(totals[level - 1]) for level in (1, 2)]
    async with open_sim_store(sim_config()) as store:
        spec = store.tables.spec
        assert [False, False] == [level.keep_copy for level in spec.levels[1:]]
        assert not spec.is_write_through
        assert spec.selective_uses is None


async def test_a_tier_too_small_for_one_session_is_refused_by_name() -> None:
    """INV-132, INV-905: refused at construction, never adjusted."""
    config = dataclasses.replace(
        sim_config(), host=HostTierConfig(host_cache_size=slot_bytes(8192) - 1)
    )
    with pytest.raises(ConfigError, match="host_cache_size"):
        async with open_sim_store(config):
            pass
