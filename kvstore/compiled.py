"""Whether the core runs compiled, and whether what was compiled is what lies beside it.

`setup.py` compiles `kvstore.core` with mypyc. The Python source stays the reference and works
alone: without compiled modules, or with ``KVSTORE_PURE_PYTHON=1`` in the environment, it runs
instead. The name of the compiled library carries a digest of all that the compiler read, so a
source that was edited afterwards is found at import and nobody runs the old code unnoticed.

Known to `kvstore/__init__.py` and `setup.py`; imports nothing of this package.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path

#: Set to anything but 0: do not compile the core (at build), do not use what was compiled (at run).
VARIABLE = "KVSTORE_PURE_PYTHON"

#: What the core imports of the package without being compiled itself; the compiler reads it too.
IMPORTED = ("config.py", "errors.py", "keys.py", "stats.py")

LIBRARY = "compiled_"
LIBRARY_END = "__mypyc"  # mypyc appends it to the name of a group


def is_wanted() -> bool:
    """Tell whether the environment allows compiled modules."""
    return os.environ.get(VARIABLE, "") in ("", "0")


def modules(package: Path) -> list[Path]:
    """Return the sources that are compiled; a package's ``__init__`` holds no code."""
    return sorted(path for path in (package / "core").rglob("*.py") if path.stem != "__init__")


def digest(package: Path) -> str:
    """Return a short digest of everything the compiler reads of the package."""
    total = hashlib.blake2b(digest_size=8)
    for path in (*modules(package), *(package / name for name in IMPORTED)):
        text = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode())
        total.update(text)
    return total.hexdigest()


def group(package: Path) -> str:
    """Return the name that the compiled library of these sources has, for mypyc."""
    return f"{package.name}.core.{LIBRARY}{digest(package)}"


def find(package: Path) -> str:
    """Return the digest of the compiled core, or "" if there is none for this Python version.

    Raises: ImportError: the compiled modules are not those of the sources beside them.
    """
    core = package / "core"
    suffix = EXTENSION_SUFFIXES[0]  # that of this version; others are somebody else's
    found = {str(path.relative_to(core)).removesuffix(suffix) for path in core.rglob(f"*{suffix}")}
    if not found:
        return ""
    built = digest(package)
    library = f"{LIBRARY}{built}{LIBRARY_END}"
    expected = {str(path.relative_to(core).with_suffix("")) for path in modules(package)}
    if found != expected | {library}:
        raise ImportError(
            f"the compiled modules in {core} are not those of the sources beside them:"
            f" compile them again with `make setup`, or run the sources with {VARIABLE}=1"
        )
    return built


def prepare(package: Path) -> str:
    """Choose the form of the core before any of it is imported; return what `find` returns.

    Raises: ImportError: see `find`.
    """
    if is_wanted():
        return find(package)
    for folder in (package / "core", package / "core" / "eviction"):
        # The finder that the import system would make, without the loader of extensions.
        finder = FileFinder(str(folder), (SourceFileLoader, SOURCE_SUFFIXES))
        sys.path_importer_cache[str(folder)] = finder
    return ""


#: The digest of the compiled core that this process runs; empty: it runs the Python source.
DIGEST = prepare(Path(__file__).parent) if __name__ == "kvstore.compiled" else ""


def describe() -> str:
    """Return one line for people: the form of the core and why it is that one."""
    if DIGEST:
        return f"compiled ({DIGEST})"
    reason = "no compiled modules for this Python" if is_wanted() else f"{VARIABLE} is set"
    return f"Python source: {reason}"


if __name__ == "__main__":
    # For the Makefile: what the build has to be of.
    sys.stdout.write(f"{digest(Path(__file__).parent) if is_wanted() else 'pure'}\n")
