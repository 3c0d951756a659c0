"""The compiled form of the core: never stale unnoticed, visible, and free of cycles."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from kvstore import compiled
from kvstore.config import Tier
from kvstore.core import planner, slots
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Plan, Tables
from kvstore.keys import KeyChain, scope_key
from kvstore.testing import open_sim_store, sim_config

PACKAGE = Path(compiled.__file__).parent
SUFFIX = EXTENSION_SUFFIXES[0]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package's Python source, with nothing compiled."""
    copy = tmp_path / "kvstore"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def build(package: Path) -> None:
    """Put down empty files with the names that a build would give."""
    library = f"{compiled.LIBRARY}{compiled.digest(package)}{compiled.LIBRARY_END}"
    (package / "core" / f"{library}{SUFFIX}").touch()
    for path in compiled.modules(package):
        path.with_suffix(SUFFIX).touch()


def test_what_was_built_from_these_sources_is_found(package: Path) -> None:
    """Nothing compiled is no error, and neither are modules of another Python version."""
    assert compiled.find(package) == ""
    (package / "core/planner.cpython-39-some-machine.so").touch()
    assert compiled.find(package) == ""
    build(package)
    assert compiled.find(package) == compiled.digest(package)


@pytest.mark.parametrize("name", ["core/planner.py", "core/eviction/lru.py", *compiled.IMPORTED])
def test_a_source_edited_after_the_build_stops_the_import(package: Path, name: str) -> None:
    """The error names the two ways out; editing back is a third."""
    build(package)
    text = (package / name).read_bytes()
    (package / name).write_bytes(text + b"\n# edited\n")
    with pytest.raises(ImportError, match=r"make setup.*KVSTORE_PURE_PYTHON=1"):
        compiled.find(package)
    (package / name).write_bytes(text)
    assert compiled.find(package)


def test_a_module_added_removed_or_left_over_stops_the_import(package: Path) -> None:
    """Half a build would mix two forms of one class."""
    build(package)
    module = (package / "core/planner.py").with_suffix(SUFFIX)
    module.unlink()
    with pytest.raises(ImportError, match="make setup"):
        compiled.find(package)
    module.touch()
    assert compiled.find(package)
    (package / "core" / f"gone{SUFFIX}").touch()
    with pytest.raises(ImportError, match="make setup"):
        compiled.find(package)


def imported(package: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Import a package's core in a fresh interpreter and print where it came from."""
    code = "import kvstore.core.planner as p, kvstore.core.eviction.lru as e; print(p, e)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_stale_modules_fail_loudly_and_the_source_runs_on_request(package: Path) -> None:
    """A process never begins with compiled modules of other sources; the variable ignores them."""
    shutil.copy2(PACKAGE / "_uring/_lib.abi3.so", package / "_uring")
    build(package)
    (package / "core/planner.py").write_bytes(
        (package / "core/planner.py").read_bytes() + b"\n# edited\n"
    )
    done = imported(package, KVSTORE_PURE_PYTHON="")
    assert done.returncode == 1
    assert "compile them again with `make setup`" in done.stderr
    done = imported(package, KVSTORE_PURE_PYTHON="1")
    assert done.returncode == 0, done.stderr
    assert "core/planner.py" in done.stdout
    assert "core/eviction/lru.py" in done.stdout


def test_the_form_that_runs_is_the_one_that_is_told() -> None:
    """The digest is empty exactly if the modules in use come from Python files."""
    for module in (planner, slots):
        assert str(module.__file__).endswith(".py") == (not compiled.DIGEST)
    assert compiled.describe().startswith("compiled" if compiled.DIGEST else "Python source")


async def test_a_store_tells_the_form() -> None:
    """`stats()` names it, so a fallback is seen where the store runs."""
    async with open_sim_store(sim_config()) as store:
        assert store.stats().core == compiled.describe()


def test_everything_is_freed_without_the_collector() -> None:
    """Pages, slots and moves hold each other only while they live: compiled, no collector would
    find a cycle among them.
    """

    def live() -> None:
        level = [(Tier.DEVICE, False), (Tier.HOST, False), (Tier.DISK, True)]
        spec = TablesSpec(
            groups=(GroupSpec(name="full"),),
            levels=[
                LevelSpec(tier=tier, slot_counts=(64,), keep_copy=keeps) for tier, keeps in level
            ],
            block_tokens=1,
        )
        tables = Tables(spec)
        for name in range(12):
            plan = tables.plan_grow((32,))
            assert isinstance(plan, Plan)
            row: list[Any] = tables.apply(plan).new_pages[0]
            chain = KeyChain(1, scope_key(b"test"))
            chain.extend([name, *range(31)])
            parent = None
            for block, page in enumerate(row):
                parent = row[block] = tables.commit(page, chain.keys[block], parent, block)
            tables.unlock(row, PASSED)
            while outbox := tables.take_outbox():
                for move in outbox.start:
                    if name % 4 == 3:
                        tables.move_failed(move, -5)
                    else:
                        tables.move_done(move)
            tables.unhold(row)
        tables.close()

    live()
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in range(10):
            live()
        grown = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    # Per run: the pools with their queues, which the collector sees; not 384 pages and their slots.
    assert grown < 10 * 100
