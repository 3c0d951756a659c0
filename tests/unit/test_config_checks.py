"""Wrong values and wrong types are told where they are given, by the name of the field."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import pytest

import kvstore

GROUP = kvstore.PoolGroupConfig("full", page_bytes=4096)
DEVICE = kvstore.DeviceTierConfig(gpu_cache_size=1 << 20)


def device(**fields: Any) -> Any:
    return kvstore.DeviceTierConfig(**({"gpu_cache_size": 1} | fields))


def host(**fields: Any) -> Any:
    return kvstore.HostTierConfig(**({"host_cache_size": 1} | fields))


def disk(**fields: Any) -> Any:
    return kvstore.DiskTierConfig(**({"disk_cache_size": 1, "disk_cache_path": "/kv"} | fields))


def store(**fields: Any) -> Any:
    base = {"block_tokens": 8, "pool_groups": (GROUP,), "device": DEVICE}
    return kvstore.StoreConfig(**(base | fields))


WRONG = [
    (device, "device", [None, 0, "cudafoo", "cuda:-1", "cuda:"]),
    (device, "reserved_slots", [5, (-1,), ("a",), "12"]),
    (device, "tensors", [[1], "full"]),
    (host, "keep_copy_after_restore", ["no", 1, None]),
    (host, "protected_copy_fraction", ["nan", "x", None, True, math.inf]),
    (disk, "disk_cache_path", [5, None, b"/kv", [], [""], [None], "a\0b", ["/kv", "/kv"]]),
    (disk, "disk_write_through", ["off", 1]),
    (disk, "checksum", ["no", None, 0]),
    (kvstore.IoConfig, "kernel_rings", [True, 1.0, 2, "1"]),
    (kvstore.IoConfig, "deadline", [math.nan, math.inf, 1e300, 10**400, "3", True, 0]),
    (kvstore.IoConfig, "inflight_bytes", [1 << 70, 0, 4096.0]),
    (kvstore.IoConfig, "io_engine", [None, ["threads"], "serial"]),
    (store, "pool_groups", [None, GROUP, "full", ({"name": "full"},), ()]),
    (store, "device", [None, "cpu"]),
    (store, "host", [5]),
    (store, "disk", ["/kv"]),
    (store, "io", [None, {}]),
    (store, "fingerprint", [5, b"m", "", "\ud800"]),
    (store, "agree", [5]),
    (store, "on_event", ["print"]),
    (store, "prefix_reuse", ["no", None]),
    (store, "check_invariants", [1]),
]


@pytest.mark.parametrize(
    ("make", "field", "value"), [(make, name, one) for make, name, all_ in WRONG for one in all_]
)
def test_a_wrong_value_names_its_field(make: Any, field: str, value: object) -> None:
    """INV-132: one ConfigError that names the field, before anything is allocated."""
    with pytest.raises(kvstore.ConfigError, match=f"^{field}: ") as caught:
        make(**{field: value})
    assert field == caught.value.field


def test_a_path_object_is_a_path() -> None:
    """``disk_cache_path`` takes what the rest of Python takes."""
    assert ("/kv",) == disk(disk_cache_path=pathlib.Path("/kv")).paths
    assert ("/a", "/b") == disk(disk_cache_path=[pathlib.Path("/a"), "/b"]).paths
