"""Fault plans select by class, opcode, offset and count, and print what they are."""

from __future__ import annotations

import errno
from random import Random

import pytest

from kvstore._uring.base import Opcode
from kvstore.config import IoClass
from kvstore.testing import Fault, FaultKind, FaultPlan

READ, WRITE = Opcode.READ, Opcode.WRITE


def _hits(plan: FaultPlan, count: int = 10, **where) -> list[int]:
    fields = {"io_class": IoClass.READ, "opcode": READ, "file_id": 0, "offset": 0, "length": 4096}
    fields |= where
    return [number for number in range(count) if plan.decide(**fields) is not None]


def test_rule_skips_nth_and_stops_after_count():
    """The third and fourth matching piece fail, no other."""
    plan = FaultPlan()
    plan.add("errno", errno.EIO, nth=2, count=2)
    assert [2, 3] == _hits(plan)
    assert 2 == plan.hit_count


def test_rule_without_count_applies_for_ever():
    """A broken disk stays broken."""
    plan = FaultPlan([Fault(FaultKind.ERRNO, errno.EIO, count=None)])
    assert list(range(10)) == _hits(plan)
    plan.clear()
    assert [] == _hits(plan)


@pytest.mark.parametrize(
    ("where", "other"),
    [
        ({"io_class": IoClass.REQUIRED}, {"io_class": IoClass.BACKGROUND}),
        ({"opcode": READ}, {"opcode": WRITE}),
        ({"file_id": 0}, {"file_id": 1}),
        ({"offset_min": 8192}, {"offset": 4096}),
        ({"offset_max": 4096}, {"offset": 4096}),
    ],
)
def test_each_selector_excludes_what_differs(where, other):
    """A piece that differs in one field is neither hit nor counted."""
    plan = FaultPlan()
    plan.add("zero", count=1, **where)
    assert [] == _hits(plan, **other)
    matching = {name: value for name, value in where.items() if not name.startswith("offset")}
    if "offset_min" in where:
        matching["offset"] = 8192
    assert [0] == _hits(plan, **matching)


def test_torn_applies_to_writes_only_and_the_first_rule_decides():
    """A read passes a torn rule by; the order of the rules is the order of the plan."""
    plan = FaultPlan()
    torn, late = plan.add("torn", 4096, count=None), plan.add("late", 5, count=None)
    assert late is plan.decide(IoClass.READ, READ, 0, 0, 4096)
    assert torn is plan.decide(IoClass.REQUIRED, WRITE, 0, 0, 4096)


def test_random_plans_are_equal_for_equal_seeds_and_print_what_they_do():
    """A plan replays from its seed, and its text names every rule."""
    first, second = (FaultPlan.random(Random(5), rate=8) for _ in range(2))
    assert repr(first) == repr(second)
    assert len(first.faults) == repr(first).count("Fault(")
    kinds = {
        fault.kind
        for seed in range(200)
        for fault in FaultPlan.random(Random(seed), rate=4, never=True).faults
    }
    assert set(FaultKind) == kinds


def test_unknown_kind_is_refused():
    """A misspelt kind does not become a plan that does nothing."""
    with pytest.raises(ValueError, match="nonsense"):
        FaultPlan().add("nonsense")
