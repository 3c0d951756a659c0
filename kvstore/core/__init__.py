"""The pure, synchronous core: tables, decisions and plans; no clock, no I/O, no asyncio.

`setup.py` compiles its modules with mypyc (docs/adr/0015); this file stays Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_attributes: bool) -> Any:
        """Say something to the compiler. ``acyclic``: pages and their slots and moves let go of
        each other when they end, so the collector need not look at them.
        """
        return lambda described: described
