"""The source checks of cases C13 and C14: locks have a scope, finalisers take none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvstore

ROOT = Path(kvstore.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


def _bare_acquires(source: str) -> list[int]:
    """Lines that call ``something.acquire()`` instead of entering a scope."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "acquire"
    ]


def _locks_in_finalisers(source: str) -> list[int]:
    """Lines inside ``__del__`` or a weakref callback that could take a lock or wait."""
    tree = ast.parse(source)
    functions = {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    finalisers: list[ast.AST] = [functions["__del__"]] if "__del__" in functions else []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in {"weakref.finalize", "weakref.ref"} and len(node.args) > 1:
            callback = ast.unparse(node.args[1]).split(".")[-1]
            finalisers.append(functions.get(callback, node.args[1]))
    found = []
    for finaliser in finalisers:
        for node in ast.walk(finaliser):
            text = ast.unparse(node).lower() if isinstance(node, ast.With | ast.Call) else ""
            if "lock" in text or ".acquire" in text or ".join(" in text or ".wait(" in text:
                found.append(node.lineno)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_c13_no_lock_without_a_scope(path: Path):
    """An early return or an exception cannot keep a lock that only a scope takes."""
    assert [] == _bare_acquires(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_c14_no_lock_in_finalisers(path: Path):
    """Garbage collection inside a locked region cannot deadlock with itself."""
    assert [] == _locks_in_finalisers(path.read_text(encoding="utf-8"))


def test_c13_c14_the_checks_find_what_they_look_for():
    """Both checks report the broken variants."""
    assert [3] == _bare_acquires("import threading\nlock = threading.Lock()\nlock.acquire()\n")
    assert [] == _bare_acquires("with lock:\n    pass\n")
    broken = "class A:\n    def __del__(self):\n        with self._lock:\n            pass\n"
    assert [3] == _locks_in_finalisers(broken)
    broken = "import weakref\ndef forget(_):\n    thread.join()\nweakref.finalize(thing, forget)\n"
    assert [3] == _locks_in_finalisers(broken)
    assert [] == _locks_in_finalisers("weakref.finalize(thing, lib.free, handle)\n")
