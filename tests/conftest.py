"""Loop factories, options and marks of the test suite. It hands out factories, never open stores.

A yielding async fixture is set up and torn down in different tasks, which a task group does not
survive; tests write ``async with open_sim_store(...) as store:`` in their body instead.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from kvstore import compiled
from kvstore.testing import SimLoop

WATCHDOG_S = 120.0
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _debug_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 1.0  # type: ignore[attr-defined]
    return loop


REAL_LOOPS: dict[str, LoopFactory] = {"plain": asyncio.SelectorEventLoop, "debug": _debug_loop}
try:
    import uvloop
except ImportError:  # an optional test requirement
    pass
else:
    REAL_LOOPS["uvloop"] = uvloop.new_event_loop


def pytest_asyncio_loop_factories(
    config: pytest.Config,
    item: pytest.Item,
) -> Mapping[str, LoopFactory]:
    """Real loops (plain, debug, uvloop) where a kernel is involved, virtual time elsewhere.

    The marker ``real_loop`` puts one test of another folder on a plain real loop.
    """
    if {"uring", "gpu"} & set(item.path.parts):
        return REAL_LOOPS
    if item.get_closest_marker("real_loop") or "bench" in item.path.parts:
        return {"plain": asyncio.SelectorEventLoop}
    return {"sim": SimLoop}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that replay a seed and name a trace."""
    group = parser.getgroup("kvstore")
    group.addoption("--seed", type=int, default=None, help="replay one seed of the sweeps")
    group.addoption("--seeds", type=int, default=None, help="how many seeds a sweep runs")
    group.addoption(
        "--traces",  # pytest has a --trace of its own
        default=os.environ.get("KVSTORE_TRACES"),
        help="folder or file of request traces (default: KVSTORE_TRACES)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    """Say in which form the core is tested; stale compiled modules have failed at import."""
    return f"kvstore core: {compiled.describe()}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, so that --strict-markers accepts them without any other settings."""
    for mark in (
        "uring: needs io_uring",
        "gpu: needs a CUDA device",
        "slow: longer than a few seconds",
        "real_loop: runs on a real event loop although its folder uses virtual time",
    ):
        config.addinivalue_line("markers", mark)
    _choose_examples(config)


def _choose_examples(config: pytest.Config) -> None:
    """Give hypothesis the same examples in every run, or those of ``--hypothesis-seed N``.

    The machines of `tests/property` take their sizes from the profile ``deep`` when
    ``--hypothesis-profile deep`` asks for it.
    """
    seed = config.getoption("--hypothesis-seed", default=None)
    for name, factor in (("kvstore", 1), ("deep", 20)):
        hypothesis.settings.register_profile(
            name,
            max_examples=100 * factor,
            derandomize=seed is None and name == "kvstore",
            deadline=None,
            print_blob=True,
        )
    if config.getoption("--hypothesis-profile", default=None) is None:
        hypothesis.settings.load_profile("kvstore")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test with an argument ``seed`` its seeds: ``--seed`` runs that one only."""
    if "seed" not in metafunc.fixturenames:
        return
    one, count = metafunc.config.getoption("--seed"), metafunc.config.getoption("--seeds")
    default = getattr(metafunc.module, "SEEDS", 20)
    seeds = [one] if one is not None else list(range(count if count is not None else default))
    metafunc.parametrize("seed", seeds)


@pytest.fixture
def trace_path(request: pytest.FixtureRequest) -> Path:
    """The trace given with ``--traces`` or KVSTORE_TRACES; the test is skipped without one."""
    value = request.config.getoption("--traces")
    if not value:
        pytest.skip("no trace: give --traces or set KVSTORE_TRACES")
    path = Path(value)
    if path.is_dir():
        path = next(iter(sorted(path.glob("*.jsonl"))), path)
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    return path


@pytest.fixture(autouse=True)
def _watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """A hang is a failure with a traceback of every thread, not a time-out of the CI machine."""
    limit: Any = WATCHDOG_S * (5 if request.node.get_closest_marker("slow") else 1)
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
