"""Files, locks, restarts and epochs on a real file system."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.testing import pattern

PAGE_BYTES = 16 << 10
SLOT_BYTES = PAGE_BYTES + 4096
BLOCK = 8
BLOCKS = 4


def config(path: Path, *, fingerprint: str | None = "model", **disk: Any) -> kvstore.StoreConfig:
    """Return a small store with named files."""
    options = {"disk_cache_size": 64 * SLOT_BYTES, "disk_cache_path": str(path / "kv")} | disk
    return kvstore.StoreConfig(
        block_tokens=BLOCK,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=8 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=8 * SLOT_BYTES),
        disk=kvstore.DiskTierConfig(**options),
        io=kvstore.IoConfig(io_engine="threads", disk_io_threads=4),
        fingerprint=fingerprint,
        check_invariants=True,
    )


def tokens_of(number: int) -> list[int]:
    """Return the tokens of one request."""
    return list(range(number * 1000, number * 1000 + BLOCK * BLOCKS))


async def put(store: kvstore.KVStore, number: int) -> None:
    """Compute and commit one request."""
    tokens = tokens_of(number)
    pool = np.asarray(store.device_pool("full").as_tensor()).reshape(-1, PAGE_BYTES)
    async with store.session(tokens) as session:
        await session.resume()
        await session.grow(len(tokens))
        table = session.page_table("full")
        for block in range(session.history_tokens // BLOCK, BLOCKS):
            pool[table[block]] = pattern(f"{number}.{block}", PAGE_BYTES)
        session.commit(tokens[session.history_tokens :])


async def get(store: kvstore.KVStore, number: int) -> int:
    """Resume one request, verify its pages and return the valid blocks."""
    pool = np.asarray(store.device_pool("full").as_tensor()).reshape(-1, PAGE_BYTES)
    async with store.session(tokens_of(number)) as session:
        restore = await session.resume()
        valid = restore.valid_tokens // BLOCK
        table = session.page_table("full")
        for block in range(valid):
            assert np.array_equal(pattern(f"{number}.{block}", PAGE_BYTES), pool[table[block]])
    return valid


def probe_all(store: kvstore.KVStore, numbers: range = range(8)) -> int:
    """Return the blocks that all requests together would find."""
    return sum(store.probe(tokens_of(number)) // BLOCK for number in numbers)


async def test_a_restart_is_warm_with_a_fingerprint(tmp_path: Path) -> None:
    """INV-919, INV-921, INV-926: what was flushed comes back, disk-only, droppable, verified."""
    async with kvstore.open_store(config(tmp_path)) as store:
        for number in range(8):
            await put(store, number)
        await store.aclose(flush=True)
    async with kvstore.open_store(config(tmp_path)) as store:
        report = await store.recovered()
        assert 8 * BLOCKS == report.taken
        pool = store.stats().pools["disk", "full"]
        assert 8 * BLOCKS == pool.primaries == pool.evictable
        assert {"disk": BLOCKS * BLOCK} == store.probe(tokens_of(3)).by_level
        assert [BLOCKS] * 8 == [await get(store, number) for number in range(8)]


async def test_without_flush_only_what_was_evicted_comes_back(tmp_path: Path) -> None:
    """INV-521, INV-921: close writes nothing; a page without its ancestors is a free slot."""
    async with kvstore.open_store(config(tmp_path)) as store:
        for number in range(8):
            await put(store, number)
        before = store.stats().moved_bytes.get("h2disk:required", 0)
    async with kvstore.open_store(config(tmp_path)) as store:
        report = await store.recovered()
        assert report.taken + report.free.get("no_ancestor", 0) == before // PAGE_BYTES
        found = sum([await get(store, number) for number in range(8)])
        assert report.taken == found


async def test_without_a_fingerprint_nothing_remains(tmp_path: Path) -> None:
    """INV-918: anonymous files have no name while the store is open, and leave nothing behind."""
    async with kvstore.open_store(config(tmp_path, fingerprint=None)) as store:
        for number in range(8):
            await put(store, number)
        assert [] == list((tmp_path / "kv").iterdir())
    assert [] == list((tmp_path / "kv").iterdir())
    async with kvstore.open_store(config(tmp_path, fingerprint=None)) as store:
        assert 0 == probe_all(store)


@pytest.mark.parametrize("change", ["clear", "bump_epoch"])
async def test_what_was_cleared_does_not_come_back(tmp_path: Path, change: str) -> None:
    """INV-925: clear and bump_epoch raise and sync the epoch before they return."""
    async with kvstore.open_store(config(tmp_path)) as store:
        await put(store, 1)
        await store.aclose(flush=True)
    async with kvstore.open_store(config(tmp_path)) as store:
        await store.recovered()
        assert BLOCKS == probe_all(store)
        await getattr(store, change)()
        assert 0 == probe_all(store)
        await put(store, 2)
        await store.aclose(flush=True)
    async with kvstore.open_store(config(tmp_path)) as store:
        await store.recovered()
        assert 0 == store.probe(tokens_of(1))
        assert BLOCKS * BLOCK == store.probe(tokens_of(2))


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "another model"},
        {"pool_groups": (kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES // 2),)},
        {"pool_groups": (kvstore.PoolGroupConfig("rest", page_bytes=PAGE_BYTES),)},
    ],
    ids=["fingerprint", "page size", "group"],
)
async def test_c06_another_identity_finds_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    """INV-919: bytes of another model or layout are never served; the same one still hits."""
    async with kvstore.open_store(config(tmp_path)) as store:
        await put(store, 1)
        await store.aclose(flush=True)
    changed = dataclasses.replace(config(tmp_path), **other)
    async with kvstore.open_store(changed) as store:
        await store.recovered()
        assert 0 == store.probe(tokens_of(1))


async def test_persist_mode_disabled_starts_empty(tmp_path: Path) -> None:
    """INV-919: `disabled` turns recovery off although the files have names."""
    off = config(tmp_path, persist_mode="disabled")
    async with kvstore.open_store(off) as store:
        await put(store, 1)
        await store.aclose(flush=True)
    async with kvstore.open_store(off) as store:
        await store.recovered()
        assert 0 == probe_all(store)


async def test_strict_counts_persistent_pages_after_their_sync(tmp_path: Path) -> None:
    """INV-927: strict syncs once per batch in the background and shows what is persistent."""
    async with kvstore.open_store(config(tmp_path, persist_mode="strict")) as store:
        for number in range(8):
            await put(store, number)
        written = store.stats().moved_bytes["h2disk:required"] // PAGE_BYTES
        while store.stats().persistent_pages < written:
            await kvstore_turn()
        assert written == store.stats().persistent_pages


async def kvstore_turn() -> None:
    """Let the loop and the store's threads go on."""
    import anyio

    await anyio.sleep(0.001)


@pytest.mark.parametrize("offset", [0, 199, 4096, 9000])
async def test_a_damaged_slot_is_a_miss_and_never_wrong_bytes(tmp_path: Path, offset: int) -> None:
    """INV-914, INV-920, INV-913: a damaged header or payload cuts the match there."""
    async with kvstore.open_store(config(tmp_path)) as store:
        await put(store, 1)
        await store.aclose(flush=True)
    path = tmp_path / "kv" / "full.0.slots"
    with path.open("r+b") as file:
        for slot in range(64):
            file.seek(4096 + slot * SLOT_BYTES)
            header = file.read(208)
            if header[:8] == b"KVSTSLOT" and int.from_bytes(header[112:120], "little") == 2:
                file.seek(4096 + slot * SLOT_BYTES + offset)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x40]))
    async with kvstore.open_store(config(tmp_path)) as store:
        await store.recovered()
        assert 2 == await get(store, 1)
        assert 2 == store.probe(tokens_of(1)) // BLOCK  # the bad page left the index


async def test_a_second_store_on_the_directory_is_refused(tmp_path: Path) -> None:
    """INV-923: two owners of one file would destroy each other's slots."""
    async with kvstore.open_store(config(tmp_path)):
        with pytest.raises(kvstore.BusyError, match="in use by another store"):
            async with kvstore.open_store(config(tmp_path)):
                pass
    async with kvstore.open_store(config(tmp_path)):
        pass


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with the umask it names."""
    old = os.umask(request.param)
    yield
    os.umask(old)


@pytest.mark.parametrize("umask", [0o000, 0o077], indirect=True)
@pytest.mark.usefixtures("umask")
async def test_c38_directory_and_files_are_private(tmp_path: Path) -> None:
    """Design section 7: mode 0600 in a 0700 directory, whatever the umask is."""
    async with kvstore.open_store(config(tmp_path)):
        assert 0o700 == stat.S_IMODE((tmp_path / "kv").stat().st_mode)
        for file in (tmp_path / "kv").iterdir():
            assert 0o600 == stat.S_IMODE(file.stat().st_mode)


async def test_c38_foreign_places_are_refused(tmp_path: Path) -> None:
    """A symlink, a world-writable directory or parent, and a missing parent: ConfigError."""
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "kv").symlink_to(real)
    with pytest.raises(kvstore.ConfigError, match="symlink"):
        async with kvstore.open_store(config(tmp_path)):
            pass
    (tmp_path / "kv").unlink()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(kvstore.ConfigError, match="writable by everybody"):
        async with kvstore.open_store(config(tmp_path)):
            pass
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(kvstore.ConfigError, match="writable by everybody"):
        async with kvstore.open_store(config(tmp_path / "open")):
            pass
    with pytest.raises(kvstore.ConfigError, match="disk_cache_path"):
        async with kvstore.open_store(config(tmp_path / "missing")):
            pass
    real.rmdir()


async def test_a_file_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    """A slot file may not point elsewhere."""
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / "full.0.slots").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(kvstore.ConfigError, match="symlink"):
        async with kvstore.open_store(config(tmp_path)):
            pass
    assert not (tmp_path / "elsewhere").exists()


async def test_no_space_is_one_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """C10, design section 7: CapacityError with the bytes needed and free; no file remains."""
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    with pytest.raises(kvstore.CapacityError, match="needed") as caught:
        async with kvstore.open_store(config(tmp_path, disk_cache_size=free + (1 << 40))):
            pass
    assert caught.value.needed > 1 << 40  # type: ignore[attr-defined]
    assert [] == list((tmp_path / "kv").iterdir())


async def test_slots_are_striped_over_several_paths(tmp_path: Path) -> None:
    """A list of paths: slots alternate, all bytes are right, a restart finds them (INV-919)."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    striped = config(tmp_path, disk_cache_path=paths)
    async with kvstore.open_store(striped) as store:
        for number in range(8):
            await put(store, number)
        await store.aclose(flush=True)
    sizes = [(Path(path) / f"full.{i}.slots").stat().st_size for i, path in enumerate(paths)]
    assert [4096 + 32 * SLOT_BYTES] * 2 == sizes
    async with kvstore.open_store(striped) as store:
        await store.recovered()
        assert [BLOCKS] * 8 == [await get(store, number) for number in range(8)]


async def test_the_limit_holds_after_a_restart(tmp_path: Path) -> None:
    """C35, C36: recovered bytes count; three times the capacity never exceeds it."""
    for start in range(0, 48, 16):
        async with kvstore.open_store(config(tmp_path)) as store:
            await store.recovered()
            for number in range(start, start + 16):
                await put(store, number)
            pool = store.stats().pools["disk", "full"]
            assert pool.primaries + pool.copies <= pool.total == 64
            await store.aclose(flush=True)
        size = (tmp_path / "kv" / "full.0.slots").stat().st_size
        assert 4096 + 64 * SLOT_BYTES == size
