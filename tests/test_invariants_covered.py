"""Every rule of docs/invariants.md has a test that cites it, or a stated reason why not.

A citation counts in the docstring of a test, of a class of tests, or of a rule of a state machine.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPECIFICATION = ROOT / "docs" / "invariants.md"
RULE = re.compile(r"^- \*\*INV-(\d{3})\*\*", re.MULTILINE)
CITATION = re.compile(r"INV-(\d{3})(?!\d)")

#: Rules without a test of their own, each with its reason.
REASONS: dict[int, str] = {}

#: Rules whose tests are still being written; empty before a release.
PENDING: set[int] = set()


def rules() -> list[int]:
    """Return the numbers of the specification, in its order."""
    return [int(number) for number in RULE.findall(SPECIFICATION.read_text(encoding="utf-8"))]


def is_test(node: ast.AST) -> bool:
    """Whether a definition is a test, a class of tests, or a step or check of a state machine."""
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test")
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return node.name.startswith("test_") or any(
        isinstance(called, ast.Call)
        and isinstance(called.func, ast.Name)
        and called.func.id in {"rule", "invariant", "initialize"}
        for called in node.decorator_list
    )


def citations(source: str) -> set[int]:
    """Return the numbers in the docstrings of the tests of a file; ranges count for their ends.

    A comment, a helper or the docstring of a module proves nothing, so it does not count.
    """
    return {
        int(number)
        for node in ast.walk(ast.parse(source))
        if is_test(node)
        for number in CITATION.findall(ast.get_docstring(node) or "")  # type: ignore[arg-type]
    }


@functools.cache
def cited() -> set[int]:
    """Return the numbers that the tests cite one by one."""
    return {
        number
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__).resolve()
        for number in citations(path.read_text(encoding="utf-8"))
    }


def test_only_docstrings_of_tests_count() -> None:
    """Comments, helpers, modules and nested strings are no citation."""
    rule = "INV" + "-{}"
    source = f'''
"""{rule.format(101)}"""
# {rule.format(102)}
def helper():
    """{rule.format(103)}"""
def test_one():
    """{rule.format(104)}, {rule.format(105)} to {rule.format(109)}."""
    x = "{rule.format(110)}"
class TestAll:
    """{rule.format(111)}"""
    async def test_two(self):
        """{rule.format(112)}"""
class Machine(RuleBasedStateMachine):
    """{rule.format(113)}"""
    @rule(x=1)
    def step(self, x):
        """{rule.format(114)}"""
    @invariant()
    def check(self):
        """{rule.format(115)}"""
'''
    assert {104, 105, 109, 111, 112, 114, 115} == citations(source)


def test_the_specification_is_read_whole() -> None:
    """The pattern finds every rule, once, in rising order."""
    numbers = rules()
    assert len(numbers) > 180
    assert numbers == sorted(set(numbers))
    groups = {number // 100 for number in numbers}
    assert groups == {1, 2, 3, 4, 5, 6, 7, 8, 9}


def test_every_rule_has_a_test_or_a_reason() -> None:
    """A rule nobody tests is a wish."""
    missing = [number for number in rules() if number not in cited() | REASONS.keys() | PENDING]
    assert missing == [], f"no test cites {missing}"


def test_reasons_and_pending_rules_are_needed() -> None:
    """An entry whose rule has a test, or does not exist, is out of date."""
    known = set(rules())
    stale = [number for number in REASONS if number in cited()]
    stale += [number for number in (*REASONS, *PENDING) if number not in known]
    assert stale == [], f"cited by a test by now: {stale}"
    assert not PENDING & REASONS.keys()
    assert all(len(reason) > 20 for reason in REASONS.values())


def test_every_citation_names_a_rule_that_exists() -> None:
    """A mistyped number would count as covered elsewhere."""
    known = set(rules())
    unknown: dict[str, list[int]] = {}
    for folder in ("kvstore", "tests", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".c", ".h"}:
                text = path.read_text(encoding="utf-8")
                wrong = sorted({int(n) for n in CITATION.findall(text)} - known)
                if wrong:
                    unknown[str(path.relative_to(ROOT))] = wrong
    assert unknown == {}
