"""A short run of the stress program; ``python tests/uring/stress.py`` is the long one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).with_name("stress.py")


def load() -> Any:
    spec = importlib.util.spec_from_file_location("kvstore_stress", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("engine", ["io_uring", "io_uring-3", "threads", "serial"])
async def test_random_cancels_faults_and_shutdowns(engine: str, kind_is_available: Any) -> None:
    """INV-112 to INV-120, INV-204, INV-808: nothing twice, nothing lost, no wrong byte is good."""
    kind_is_available(engine.partition("-")[0])
    result = await load().stress(2500, seed=5, kinds=(engine,))
    assert result["transfers"] >= 2500
    assert result["good"] > 0
