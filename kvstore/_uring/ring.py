"""The io_uring engine: one reactor thread in C owns every ring, one helper sums large payloads."""

from __future__ import annotations

import errno
import os
from typing import final

from kvstore._uring._ffi import lib
from kvstore._uring.engine import NativeEngine
from kvstore._uring.native import GateRing
from kvstore.config import IoConfig
from kvstore.errors import KVStoreError, UnsupportedError

#: Why io_uring is refused, and what helps.
REASONS = {
    errno.EPERM: "io_uring is not permitted (seccomp profile, or kernel.io_uring_disabled)",
    errno.EACCES: "io_uring is not permitted (seccomp profile)",
    errno.ENOSYS: "the kernel has no io_uring (or a seccomp profile hides it)",
    errno.EOPNOTSUPP: "the kernel's io_uring is too old (5.15 or later is needed)",
    errno.ENOMEM: "no memory for a ring: RLIMIT_MEMLOCK is too low (ulimit -l)",
    errno.EMFILE: "no file descriptor left for a ring: RLIMIT_NOFILE is too low (ulimit -n)",
}


@final
class RingEngine(NativeEngine):
    """Pieces go to the kernel through one io_uring, or one per class (INV-137).

    ``without`` masks parts of the ring set-up (``KVS_WITHOUT_...``), to run the fallbacks.
    Raises: UnsupportedError: this system does not allow io_uring; ``errno`` and the text say why.
    """

    name = "io_uring"
    _kind = lib.KVS_KIND_RING

    def __init__(
        self,
        config: IoConfig | None = None,
        *,
        gate: GateRing | None = None,
        policy: str = "kvstore",
        without: int = 0,
    ) -> None:
        super().__init__(config, gate=gate, policy=policy, without=without)

    def _start_error(self, code: int) -> KVStoreError:
        reason = REASONS.get(code, f"io_uring cannot be set up: {os.strerror(code)}")
        return UnsupportedError(reason, errno=code)
