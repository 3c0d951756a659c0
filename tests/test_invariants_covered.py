"""Every rule of docs/invariants.md has a test that cites it, or a stated reason why not."""

from __future__ import annotations

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


def cited() -> set[int]:
    """Return the numbers that tests cite one by one; ranges count for their ends only."""
    found: set[int] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path != Path(__file__).resolve():
            found.update(map(int, CITATION.findall(path.read_text(encoding="utf-8"))))
    return found


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
