"""Checks over the text of the project: what a reviewer would otherwise have to look for."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THIS = Path(__file__).resolve()
TEXT_SUFFIXES = {
    "",
    ".c",
    ".cfg",
    ".h",
    ".in",
    ".ini",
    ".json",
    ".md",
    ".py",
    ".pyi",
    ".toml",
    ".txt",
}
IGNORED_FOLDERS = {"build", "dist", "htmlcov", "__pycache__", "node_modules"}

#: Folders below tests/, each with a meaning of its own; see docs/testing.md.
TEST_FOLDERS = {
    "bench",
    "cases",
    "faults",
    "gpu",
    "property",
    "simulation",
    "typing",
    "unit",
    "uring",
}
#: Here everything runs on virtual time or none at all.
VIRTUAL_TIME_FOLDERS = {"property", "simulation"}

#: Text that must not reach a commit. Spelled in halves, so that this file passes its own check.
BANNED = {
    "a leftover note": ("FIX" + "ME", "TO" + "DO", "X" + "XX", "HACK" + ":"),
    "a merge conflict": ("<<<<" + "<<< ", ">>>>" + ">>> "),
    "a path of one machine": ("/wo" + "rk/", "/ro" + "ot/", "/opt/" + "kvenv", "/home" + "/"),
    "a package registry's host": (
        "py" + "pi.org",
        "python" + "hosted",
        "deb." + "debian",
        "security." + "debian",
        "archive." + "ubuntu",
        "npm" + "js",
    ),
    "a debugger": ("breakpoint" + "()", "pdb." + "set_trace"),
}


def _files() -> list[Path]:
    """Return the files of the project: what git tracks or would, else what lies there."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in IGNORED_FOLDERS or part.startswith(".") or part.endswith(".egg-info")
                for part in path.relative_to(ROOT).parts
            )
        ]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


FILES = _files()
TEXTS = [path for path in FILES if path.suffix in TEXT_SUFFIXES]
PYTHON = [path for path in FILES if path.suffix == ".py"]
TESTS = [path for path in PYTHON if path.is_relative_to(ROOT / "tests")]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _lines(paths: list[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        if path == THIS or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{_name(path)}:{number}", line


@pytest.mark.parametrize("what", sorted(BANNED))
def test_no_banned_text(what: str) -> None:
    """No tracked file carries text that belongs to one machine or one afternoon."""
    found = [
        f"{place}: {word}"
        for place, line in _lines(TEXTS)
        for word in BANNED[what]
        if re.search(rf"(?<![A-Za-z]){re.escape(word)}", line)
    ]
    assert found == []


def test_text_files_are_clean() -> None:
    """Lines carry no trailing blanks, Python no tabs, and files end with one newline."""
    found = [
        place
        for place, line in _lines(TEXTS)
        if line != line.rstrip() or ("\t" in line and ".py:" in place)
    ]
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            found.append(_name(path))
    assert found == []


def test_documents_that_are_named_exist() -> None:
    """Every docs/... path in code and prose, and every relative link, leads somewhere."""
    found = []
    for path in TEXTS:
        if path == THIS or path.suffix == ".json":
            continue
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\bdocs/[\w./-]+?\.md\b", text):
            if not (ROOT / name).exists():
                found.append(f"{_name(path)}: {name}")
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
                if "://" not in target and not (path.parent / target).exists():
                    found.append(f"{_name(path)}: {target}")
    assert sorted(set(found)) == []


def test_modules_explain_themselves() -> None:
    """Every module begins with a docstring."""
    found = [
        _name(path)
        for path in PYTHON
        if (text := path.read_text(encoding="utf-8")).strip()
        and not ast.get_docstring(ast.parse(text))
    ]
    assert found == []


def test_no_top_level_module_is_named_bench() -> None:
    """The folder bench is installed as kvstore_bench alone."""
    assert not (ROOT / "bench.py").exists()
    for place, line in _lines([path for path in PYTHON if path != THIS]):
        assert not re.match(r"\s*(from bench[. ]|import bench\b)", line), place


def test_tests_lie_in_known_folders() -> None:
    """A test file sits in a folder with a meaning, and its name is found by pytest."""
    for path in TESTS:
        parts = path.relative_to(ROOT / "tests").parts
        assert len(parts) == 1 or parts[0] in TEST_FOLDERS, _name(path)
        has_test = re.search(r"^(async )?def test_", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not has_test or path.name.startswith("test_"), _name(path)


def _test_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and node.name.startswith("test_"):
                yield f"{_name(path)}:{node.lineno} {node.name}", node


def test_tests_say_what_they_show() -> None:
    """Every test has a docstring of one sentence."""
    assert [place for place, node in _test_functions() if not ast.get_docstring(node)] == []


def test_tests_on_virtual_time_do_not_sleep() -> None:
    """No test on virtual time sleeps in real time."""
    found = []
    for path in TESTS:
        if path.relative_to(ROOT / "tests").parts[0] not in VIRTUAL_TIME_FOLDERS:
            continue
        found += [place for place, line in _lines([path]) if re.search(r"\btime\.sleep\(", line)]
    assert found == []


def _is_shipped_c(path: Path) -> bool:
    """C of the package; the stand-in for a driver in tests has a driver's names and state."""
    return path.suffix == ".c" and "tests" not in path.parts


def test_c_code_has_no_static_state() -> None:
    """No C file keeps variables at file scope: two stores in one process share none (INV-122)."""
    declaration = re.compile(
        r"^(static\s+)?(?!typedef|return|extern|struct\s+\w+\s*[{;]|enum|union|#|//|\}|const)"
        r"(?:_Atomic\s+|volatile\s+|unsigned\s+|struct\s+)*\w+\s+\*?\w+(\[[^\]]*\])?\s*(=[^(]*)?;"
    )
    found = [
        place
        for place, line in _lines([path for path in FILES if _is_shipped_c(path)])
        if declaration.match(line) and "const" not in line.split("=")[0]
    ]
    assert found == []


def test_c_functions_carry_the_prefix() -> None:
    """What a C file exports begins with kvs_, so that nothing collides in the host's process."""
    definition = re.compile(
        r"^(?!static|typedef|#|/|\s|\}|else|extern)[\w\s\*]+?\b(\w+)\s*\([^;]*$"
    )
    found = []
    for path in FILES:
        if _is_shipped_c(path):
            found += [
                f"{place}: {match[1]}"
                for place, line in _lines([path])
                if (match := definition.match(line)) and not match[1].startswith("kvs_")
            ]
    assert found == []
