"""The compiled extension against the Python beside it, and what an installed kvstore contains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import compiled
from kvstore._uring import _ffi, base, native

ROOT = Path(__file__).resolve().parent.parent

#: C struct -> the numpy dtype that stands beside it; a new pair is added with the struct.
STRUCTS = {
    "kvs_record": native.RECORD_DTYPE,
    "kvs_submission": base.SUBMISSION_DTYPE,
}


def test_extension_belongs_to_this_source() -> None:
    """The ABI version in the cdef, in the compiled module and in Python is one number."""
    assert _ffi.lib.kvs_abi_version() == _ffi.ABI_VERSION
    assert _ffi.lib.KVS_ABI_VERSION == _ffi.ABI_VERSION


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_struct_layouts_agree(name: str) -> None:
    """Each struct that crosses into C has the size and the offsets of its numpy dtype."""
    dtype = STRUCTS[name]
    ctype = _ffi.ffi.typeof(name)
    fields = dict(ctype.fields)
    assert dtype.itemsize == _ffi.ffi.sizeof(name)
    assert list(fields) == list(dtype.names or ())
    assert dtype.fields is not None
    for field, member in fields.items():
        assert dtype.fields[field][1] == _ffi.ffi.offsetof(name, field), field
        assert dtype.fields[field][0].itemsize == _ffi.ffi.sizeof(member.type), field


def test_c_asserts_are_compiled_in() -> None:
    """The build undoes the interpreter's -DNDEBUG, or every assert in C would be empty."""
    text = (ROOT / "build_uring.py").read_text(encoding="utf-8")
    assert "-UNDEBUG" in text
    symbols = Path(_ffi.__file__).with_name("_lib.abi3.so").read_bytes()
    assert b"__assert_fail" in symbols


def test_checksum_is_that_of_the_package() -> None:
    """C and the xxhash package give one value, whichever header version C was built with."""
    xxhash = pytest.importorskip("xxhash")
    for size in (0, 1, 240, 241, 4096, 100_003):
        data = np.arange(size, dtype=np.uint8)
        assert native.xxh3_64(data) == xxhash.xxh3_64_intdigest(data.tobytes())


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the sdist from a copy of the tree and the wheel from the sdist, once."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    if not names:
        pytest.skip("not a git checkout: the sdist itself is under test elsewhere")
    for name in names:
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    out = source / "dist"
    _run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source, PYTHONPATH=""
    )
    yield out
    shutil.rmtree(source)


def _one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.slow
def test_sdist_has_what_a_build_needs(dist: Path) -> None:
    """The sdist carries sources, tests and build script, and nothing compiled."""
    with tarfile.open(_one(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("build_uring.py", "setup.py", "LICENSE", "kvstore/_uring/uring.cdef.h"):
        assert needed in names
    for source in (ROOT / "kvstore/_uring").glob("*.[ch]"):
        if source.name != "_lib.c":
            assert f"kvstore/_uring/{source.name}" in names
    assert "tests/test_packaging.py" in names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc", "_lib.c"))]


@pytest.mark.slow
def test_wheel_holds_two_packages_and_no_sources(dist: Path) -> None:
    """The wheel's top level is kvstore and kvstore_bench; it is typed and free of C files.

    What mypyc compiles belongs to one Python version, and so does the wheel that holds it; without
    it the wheel is for every version from 3.11 on.
    """
    wheel = _one(dist, "*.whl")
    version = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    tag = f"-{version}-{version}-linux" if compiled.is_wanted() else "-cp311-abi3-linux"
    assert tag in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    assert {name.split("/")[0] for name in names} == {"kvstore", "kvstore_bench", info}
    assert "kvstore/py.typed" in names
    assert "kvstore/_uring/_lib.abi3.so" in names
    assert "kvstore/_uring/_lib.pyi" in names
    assert not [name for name in names if name.endswith((".c", ".h", ".o", ".pyc"))]
    modules = [name for name in names if name.startswith("kvstore/core/") and name.endswith(".so")]
    wanted = len(compiled.modules(ROOT / "kvstore")) + 1 if compiled.is_wanted() else 0
    assert len(modules) == wanted
    for path in (ROOT / "kvstore").rglob("*.py"):
        assert str(path.relative_to(ROOT)) in names
    for path in (ROOT / "bench").rglob("*.py"):
        assert f"kvstore_bench/{path.relative_to(ROOT / 'bench')}" in names


@pytest.mark.slow
def test_wheel_passes_the_public_checkers(dist: Path, tmp_path: Path) -> None:
    """The wheel's contents and its use of the stable ABI pass the community's checkers.

    The C extension keeps to the stable ABI in either wheel; what mypyc compiles claims nothing.
    """
    wheel = _one(dist, "*.whl")
    checker = (sys.executable, "-m", "check_wheel_contents", "--no-config")
    _run(*checker, "--ignore=W009", wheel, cwd=dist)  # two packages at the top, on purpose
    with zipfile.ZipFile(wheel) as archive:
        stable = archive.extract("kvstore/_uring/_lib.abi3.so", tmp_path)
    auditor = (sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.11")
    _run(*auditor, stable, cwd=dist)


@pytest.mark.slow
def test_installed_wheel_works_without_the_checkout(dist: Path, tmp_path: Path) -> None:
    """What the wheel installs imports, finds its extension and has the command line."""
    target = tmp_path / "site"
    with zipfile.ZipFile(_one(dist, "*.whl")) as archive:
        archive.extractall(target)
    code = "import kvstore, kvstore_bench, kvstore.cli; print(kvstore.__file__)"
    assert str(target) in _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    code = "import kvstore.compiled, kvstore.core.tables; print(kvstore.compiled.describe())"
    text = _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    assert text.startswith("compiled" if compiled.is_wanted() else "Python source")
    text = _run(sys.executable, "-m", "kvstore.cli", "--help", cwd=tmp_path, PYTHONPATH=str(target))
    assert "doctor" in text


@pytest.mark.parametrize("missing", ["liburing", "xxhash"])
def test_setup_names_a_missing_header_in_one_line(missing: str, tmp_path: Path) -> None:
    """Where nothing can be installed, set-up says which package is missing, and stops."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "tr", "sed", "cat", "id"):
        (tools / name).symlink_to(shutil.which(name) or name)
    compiler = tools / "cc"
    compiler.write_text(f'#!/bin/sh\ncase "$(cat)" in *{missing}*) exit 1;; esac\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        ["sh", ROOT / "scripts/system-packages", sys.executable],
        env={"PATH": str(tools), "CC": "cc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"missing: lib{missing.removeprefix('lib')}-dev" in done.stderr


def test_setup_is_quiet_when_nothing_is_missing() -> None:
    """On a machine that has everything, the check prints nothing and installs nothing."""
    text = _run("sh", "scripts/system-packages", sys.executable, cwd=ROOT)
    assert text == ""


def test_requirements_resolve_extras_of_extras() -> None:
    """The list that set-up installs holds the extras' own extras, and never kvstore itself."""
    lines = _run(sys.executable, "scripts/requirements.py", "test,lint", cwd=ROOT).splitlines()
    assert any(line.startswith("click") for line in lines)
    assert any(line.startswith("mypy") for line in lines)
    assert any(line.startswith("numpy") for line in lines)
    assert not any(line.startswith("kvstore") for line in lines)
