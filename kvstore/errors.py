"""The exception tree of the store.

A name says the condition, the attributes say where it arose, and ``str()`` is one line. Every
exception pickles: the keyword attributes travel with it. ``InvariantError`` stands outside the
tree, because it reports a bug of ours and must never be swallowed with the others.
"""

from __future__ import annotations

from typing import Any


class KVStoreError(Exception):
    """The base of everything the store raises on purpose.

    Keyword arguments become attributes (``level``, ``pool_group``, ``errno``, ...), so that a
    handler never has to parse the message.
    """

    def __init__(self, message: str = "", **context: Any) -> None:
        super().__init__(message)
        self.context = context
        for name, value in context.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message and the context, which plain exceptions would lose."""
        return _rebuild, (type(self), str(self), self.context)


def _rebuild(kind: type[KVStoreError], message: str, context: dict[str, Any]) -> KVStoreError:
    return kind(message, **context)


class ConfigError(KVStoreError, ValueError):
    """A configuration value is wrong; ``field`` names it (INV-132)."""


class CapacityError(KVStoreError):
    """A tier has no room or no memory."""


class OutOfPages(CapacityError):
    """A plan was refused: names ``level``, ``pool_group``, ``needed``, ``available`` (INV-404)."""


class PagesLost(KVStoreError):
    """Pages a session held could not be served; ``first_failed_token`` names where (INV-335)."""


class StoreClosed(KVStoreError):
    """The store is closing or closed (INV-909)."""


class StoreFailed(KVStoreError):
    """A sticky device error or a broken internal rule stopped this store (INV-917)."""


class BusyError(KVStoreError):
    """Somebody else uses the resource."""


class GateBusy(BusyError):
    """No gate word, no stream below the cap, or a slot that is not ready (INV-202, INV-211)."""


class WouldBlock(KVStoreError):
    """A ``*_nowait`` call would have had to wait."""


class LogicError(KVStoreError):
    """A call in a wrong state; nothing was changed."""


class StaleSlot(LogicError):
    """A slot handle whose generation has passed (INV-304)."""


class StalePlan(LogicError):
    """A plan made for older tables (INV-402)."""


class TransferError(KVStoreError):
    """A transfer of page bytes failed."""


class EngineError(TransferError):
    """The disk engine failed; ``errno`` says how."""


class DeviceError(TransferError):
    """The device failed; ``code`` is the driver's, ``is_sticky`` says whether it is lost."""


class DeadlineError(TransferError):
    """The deadline of a transfer passed (INV-119)."""


class FormatError(KVStoreError):
    """Bytes on disk are not what this version writes."""


class UnsupportedError(KVStoreError):
    """The system lacks something; the message names the cause and the remedy."""


class InvariantError(Exception):
    """An internal rule is broken: a bug of ours, outside the tree on purpose."""
