"""The one import of the compiled module, and the check that it belongs to this source."""

from __future__ import annotations

from kvstore._uring._lib import ffi as ffi
from kvstore._uring._lib import lib as lib
from kvstore.errors import UnsupportedError

#: Raised together with ``KVS_ABI_VERSION`` whenever a signature or a struct in the cdef changes.
ABI_VERSION = 1

if lib.kvs_abi_version() != ABI_VERSION:
    raise UnsupportedError(
        f"kvstore._uring._lib has ABI {lib.kvs_abi_version()}, this source needs {ABI_VERSION}: "
        "build the extension again (python build_uring.py, or pip install)"
    )
