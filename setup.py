"""Name the compiled modules: the one setting that pyproject.toml cannot carry.

The C extension is built always. The core is compiled with mypyc unless KVSTORE_PURE_PYTHON is
set; its Python source is installed in any case and works alone (docs/adr/0015).
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

#: The commands that compile nothing.
PACKAGING_ONLY = {"sdist", "egg_info", "dist_info"}
OUTPUT = "build/core"
MYPY = (
    "--follow-imports=silent",  # what is not compiled is checked by `make lint`
    "--ignore-missing-imports",  # and an isolated build has no numpy to read
    f"--cache-dir={OUTPUT}/cache",
)


def compile_core() -> list[Extension]:
    """Return the extensions of the core, their C sources generated."""
    compiled: dict[str, Any] = runpy.run_path("kvstore/compiled.py")
    package = Path("kvstore")
    for old in (package / "core").rglob("*.so"):
        old.unlink()  # `build_ext --inplace` adds files and removes none
    if not compiled["is_wanted"]():
        sys.stderr.write(f"kvstore: {compiled['VARIABLE']} is set, the core is not compiled\n")
        return []
    from mypyc.build import mypycify

    extensions: list[Extension] = mypycify(
        [*MYPY, *map(str, compiled["modules"](package))],
        group_name=compiled["group"](package),
        target_dir=OUTPUT,
        debug_level="0",
    )
    for extension in extensions:
        # Another compiler's new warning about generated code is no reason not to install.
        flags = extension.extra_compile_args
        extension.extra_compile_args = [flag for flag in flags if flag != "-Werror"]
    return extensions


core = [] if PACKAGING_ONLY & set(sys.argv) else compile_core()

setup(
    cffi_modules=["build_uring.py:ffibuilder"],
    ext_modules=core,
    # The C extension keeps to the stable ABI; what mypyc compiles belongs to one Python version.
    options={} if core else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
