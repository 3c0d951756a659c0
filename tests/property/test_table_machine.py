"""The tables as a state machine: hypothesis and seeds drive sessions, executor and faults.

After each step `check_state` runs every rule that is visible in the tables, all balances are
recomputed, and the symbol in each valid slot is compared with what its page must hold.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


def load(name: str) -> ModuleType:
    """Import a module that lies beside this file."""
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


table_model = load("table_model")
fuzz_tables = load("fuzz_tables")


class TableMachine(RuleBasedStateMachine):
    """Hypothesis picks the steps and every choice inside them, and shrinks what fails.

    INV-301 to INV-315, INV-319 to INV-330, INV-337, INV-401 to INV-420, INV-501 to INV-526,
    INV-601 to INV-617, INV-701 to INV-713, INV-801 to INV-806, INV-901 to INV-904, INV-910 to
    INV-913, INV-916.
    """

    @initialize(data=st.data(), seed=st.integers(0, 2**32))
    def start(self, data: st.DataObject, seed: int) -> None:
        # One generator per run, seeded by hypothesis: a draw per choice would be far too slow.
        self.generator = random.Random(seed)
        self.model = table_model.TableModel(self.generator.randrange, with_recovery=True)

    def _go(self, name: str, seed: int) -> None:
        self.generator.seed(seed)
        getattr(self.model, name)()

    @rule(seed=st.integers(0, 255))
    def open(self, seed: int) -> None:
        self._go("open", seed)

    @rule(seed=st.integers(0, 255))
    def resume(self, seed: int) -> None:
        self._go("resume", seed)

    @rule(seed=st.integers(0, 255))
    def grow(self, seed: int) -> None:
        self._go("grow", seed)

    @rule(seed=st.integers(0, 255))
    def decode(self, seed: int) -> None:
        self._go("decode", seed)

    @rule(seed=st.integers(0, 255))
    def commit(self, seed: int) -> None:
        self._go("commit", seed)

    @rule(seed=st.integers(0, 255))
    def suspend(self, seed: int) -> None:
        self._go("suspend", seed)

    @rule(seed=st.integers(0, 255))
    def close(self, seed: int) -> None:
        self._go("close", seed)

    @rule(seed=st.integers(0, 255))
    def cancel(self, seed: int) -> None:
        self._go("cancel", seed)

    @rule(seed=st.integers(0, 255))
    def fork(self, seed: int) -> None:
        self._go("fork", seed)

    @rule(seed=st.integers(0, 255))
    def prefetch(self, seed: int) -> None:
        self._go("prefetch", seed)

    @rule(seed=st.integers(0, 255))
    def resize(self, seed: int) -> None:
        self._go("resize", seed)

    @rule(seed=st.integers(0, 255))
    def recover(self, seed: int) -> None:
        self._go("recover", seed)

    @rule(seed=st.integers(0, 255))
    def trim(self, seed: int) -> None:
        self._go("trim", seed)

    @rule(seed=st.integers(0, 255))
    def pass_kernel(self, seed: int) -> None:
        self._go("pass_kernel", seed)

    @precondition(lambda self: self.model.running)
    @rule(seed=st.integers(0, 255), count=st.integers(1, 6))
    def run_moves(self, seed: int, count: int) -> None:
        self.generator.seed(seed)
        for _ in range(count):
            self.model.run_move()

    @precondition(lambda self: self.model.running)
    @rule()
    def drain(self) -> None:
        self.model.drain()

    @invariant()
    def every_rule_holds(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()
            self.model.finish()


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("part", range(4))
def test_seeded_steps_break_no_rule(part: int, request: pytest.FixtureRequest) -> None:
    """INV-401 to INV-420, INV-501 to INV-526, INV-601 to INV-617, INV-701 to INV-713, INV-804,
    INV-805: 2 x 10^5 steps in four parts; `fuzz_tables.py` runs as many as one likes.
    """
    seed = request.config.getoption("--seed", default=None)
    if seed is not None:
        fuzz_tables.run_round(seed, 500, 1)
        return
    for number in range(100):
        fuzz_tables.run_round(1 + part * 100 + number, 500, 7)


def test_seeded_steps_with_pages_of_an_earlier_life(request: pytest.FixtureRequest) -> None:
    """INV-304, INV-333, INV-921: recovery beside everything else, and refused prefetches."""
    seed = request.config.getoption("--seed", default=None)
    recovered = prefetches = 0
    for number in [seed] if seed is not None else range(1000, 1100):
        model = fuzz_tables.run_round(number, 500, 7, with_recovery=True)
        recovered += model.recovered_pages
        prefetches += model.prefetch_refusals
    assert seed is not None or (recovered > 150 and prefetches > 0)
