"""Compile kvstore/_uring/kernels.cu to PTX with NVRTC and write it as a C string.

Usage: python scripts/compile_kernels.py LIBNVRTC.so
NVRTC comes with any CUDA toolkit, or in the wheel nvidia-cuda-nvrtc-cu12; no GPU is needed. Use
release 12.2 or older, so that every driver from 12.2 on can translate the PTX.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

SOURCE = Path("kvstore/_uring/kernels.cu")
TARGET = Path("kvstore/_uring/kernels.ptx.h")


def compile_ptx(library: str, text: str) -> str:
    """Return the PTX of ``text``; leaves with the compiler's log if it is refused."""
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    name = SOURCE.name.encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name, 0, None, None)
    options = [b"--gpu-architecture=compute_75", b"--std=c++17"]
    array = (ctypes.c_char_p * len(options))(*options)
    result = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    if result:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(log.value.decode())
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.value.decode()


def main() -> None:
    """Write the header."""
    ptx = compile_ptx(sys.argv[1], SOURCE.read_text(encoding="utf-8"))
    lines = [line.rstrip() for line in ptx.splitlines() if line.strip()]
    lines = [line for line in lines if "nv6target" not in line and line.lstrip()[:2] != "//"]
    body = "\n".join(
        '    "' + line.replace("\t", " ").replace('"', '\\"') + '\\n"' for line in lines
    )
    TARGET.write_text(
        "/* Made from kernels.cu by scripts/compile_kernels.py; do not edit. */\n"
        f"static const char kvs_kernels_ptx[] =\n{body};\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
