"""Build ``kvstore._uring._lib``: read the cdef, name the sources, nothing else."""

from __future__ import annotations

from pathlib import Path

import cffi

SOURCE_DIR = Path("kvstore/_uring")  # relative: builds run from the project root

ffibuilder = cffi.FFI()
ffibuilder.cdef((SOURCE_DIR / "uring.cdef.h").read_text(encoding="utf-8"))
ffibuilder.set_source(
    "kvstore._uring._lib",
    '#include "uring.h"',
    sources=[str(path) for path in sorted(SOURCE_DIR.glob("*.c")) if path.name != "_lib.c"],
    include_dirs=[str(SOURCE_DIR)],
    libraries=["uring", "pthread"],
    depends=[str(path) for path in sorted(SOURCE_DIR.glob("*.h"))],
    extra_compile_args=["-std=gnu11", "-O2", "-UNDEBUG", "-Wall", "-Wextra", "-Werror=implicit"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=False)
