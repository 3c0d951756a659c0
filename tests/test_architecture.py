"""The layers of the package and its public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

#: The contract with users: these names and the errors. A new public name is written down here in
#: the commit that adds it.
API_NAMES = {
    "DeviceTierConfig",
    "DiskTierConfig",
    "Gate",
    "GateTicket",
    "Health",
    "HostTierConfig",
    "IoConfig",
    "KVEvent",
    "KVStore",
    "PoolGroupConfig",
    "Prefetch",
    "Probe",
    "Restore",
    "RestoreEstimate",
    "Session",
    "StoreConfig",
    "StoreStats",
    "Tier",
    "open_store",
}
ERROR_NAMES = {
    "BusyError",
    "CapacityError",
    "ConfigError",
    "DeadlineError",
    "DeviceError",
    "EngineError",
    "FormatError",
    "GateBusy",
    "InvariantError",
    "KVStoreError",
    "LogicError",
    "OutOfPages",
    "PagesLost",
    "StalePlan",
    "StaleSlot",
    "StoreClosed",
    "StoreFailed",
    "TransferError",
    "UnsupportedError",
    "WouldBlock",
}


def python(code: str, *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, without the modules that pytest has loaded."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_import_contracts_hold() -> None:
    """Dependencies point down, the core is pure, and optional packages stay at the edges."""
    done = python(
        "import sys\nfrom importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(no_cache=True))"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_is_placed_in_a_layer() -> None:
    """The layer list names each module of the package: an unplaced one would escape the rules."""
    contract = next(
        c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "layers"
    )
    placed = {name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")}
    placed |= set(contract["exhaustive_ignores"])
    found = {
        path.stem
        for path in (ROOT / "kvstore").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    }
    assert found <= placed


def test_every_package_is_listed_for_installation() -> None:
    """The explicit package list names every package folder, or an installed kvstore lacks it."""
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "kvstore").rglob("__init__.py")
    }
    found |= {
        ".".join(("kvstore_bench", *path.parent.relative_to(ROOT / "bench").parts))
        for path in (ROOT / "bench").rglob("__init__.py")
    }
    assert found == listed


def test_public_names_are_the_documented_ones() -> None:
    """`kvstore.__all__` is the API of the documentation plus the error tree, nothing unlisted."""
    kvstore = importlib.import_module("kvstore")
    assert set(kvstore.__all__) == API_NAMES | ERROR_NAMES
    assert all(hasattr(kvstore, name) for name in kvstore.__all__)
    assert len(kvstore.__all__) == len(set(kvstore.__all__))


def test_error_names_are_the_error_module() -> None:
    """Every exception that errors.py defines is public."""
    errors = importlib.import_module("kvstore.errors")
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == ERROR_NAMES


@pytest.mark.parametrize("name", ["torch", "cuda", "prometheus_client", "click", "rich", "pytest"])
def test_import_needs_no_optional_package(name: str) -> None:
    """`import kvstore` works where an extra is not installed, and does not load it where it is."""
    done = python(f"import sys; sys.modules[{name!r}] = None; import kvstore, kvstore.cli")
    assert done.returncode == 0, done.stderr


def test_import_starts_nothing() -> None:
    """Importing the package starts no thread and opens no file (INV-126: a store does that)."""
    done = python(
        "import os, threading, numpy, anyio, cffi, xxhash\n"
        "before = (threading.active_count(), len(os.listdir('/proc/self/fd')))\n"
        "tasks = len(os.listdir('/proc/self/task'))\n"
        "import kvstore\n"
        "assert before == (threading.active_count(), len(os.listdir('/proc/self/fd')))\n"
        "assert tasks == len(os.listdir('/proc/self/task'))\n"
    )
    assert done.returncode == 0, done.stderr


def test_modules_in_bench_import_each_other_relatively() -> None:
    """Nothing imports a top-level package named bench, and the package does not name itself."""
    for path in sorted((ROOT / "bench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {"bench", "kvstore_bench"}, path
