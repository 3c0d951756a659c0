"""Build ``kvstore._uring._lib``: read the cdef, name the sources, nothing else.

Environment: ``KVSTORE_STATIC_LIBURING=1`` links liburing.a into the extension,
``KVSTORE_SANITIZE=1`` builds with AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import cffi

SOURCE_DIR = Path("kvstore/_uring")  # relative: builds run from the project root
#: Header -> the Debian package that brings it.
HEADERS = {"liburing.h": "liburing-dev", "xxhash.h": "libxxhash-dev"}
PACKAGING_ONLY = {"sdist", "egg_info", "dist_info"}


def check_headers() -> None:
    """Leave with one clear line when the compiler or a system header is missing."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    missing = []
    for header, package in HEADERS.items():
        command = [compiler, *shlex.split(os.environ.get("CFLAGS", "")), "-E", "-x", "c", "-"]
        source = f"#include <{header}>\n".encode()
        try:
            done = subprocess.run(command, input=source, capture_output=True, check=False)
        except OSError:
            sys.exit("kvstore: no C compiler found: apt-get install gcc libc6-dev")
        if done.returncode:
            missing.append((header, package))
    if missing:
        names = " and ".join(header for header, _ in missing)
        packages = " ".join(package for _, package in missing)
        sys.exit(f"kvstore: {names} not found: apt-get install {packages}")


COMPILE_ARGS = ["-std=gnu11", "-O2", "-g", "-UNDEBUG", "-Wall", "-Wextra", "-Werror=implicit"]
LINK_ARGS: list[str] = []
LIBRARIES = ["pthread"]
if os.environ.get("KVSTORE_STATIC_LIBURING") == "1":
    LINK_ARGS += ["-Wl,-Bstatic", "-luring", "-Wl,-Bdynamic"]
else:
    LIBRARIES.append("uring")
if os.environ.get("KVSTORE_SANITIZE") == "1":
    SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    COMPILE_ARGS += [*SANITIZE, "-fno-sanitize-recover=undefined"]
    LINK_ARGS += SANITIZE

if not PACKAGING_ONLY & set(sys.argv):
    check_headers()

ffibuilder = cffi.FFI()
ffibuilder.cdef((SOURCE_DIR / "uring.cdef.h").read_text(encoding="utf-8"))
ffibuilder.set_source(
    "kvstore._uring._lib",
    '#include "uring.h"',
    sources=[str(path) for path in sorted(SOURCE_DIR.glob("*.c")) if path.name != "_lib.c"],
    include_dirs=[str(SOURCE_DIR)],
    libraries=LIBRARIES,
    depends=[str(path) for path in sorted(SOURCE_DIR.glob("*.h"))],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=False)
