"""Option types that the subcommands share."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from kvstore.config import ALIGNMENT_BYTES, GIB, KIB, MIB

_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB << 10}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of ``64m``, ``1g``, ``4KiB`` or a plain number; units are powers of 1024.

    Raises: ValueError: the text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"must be a size such as 64m or 1g, got {text!r}")
    return int(found[1]) * _UNITS[found[2].lower()]


def format_size(size_bytes: int) -> str:
    """Return bytes with a binary unit, exact where that is short."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            value = size_bytes / unit
            return f"{value:.0f} {name}" if value == int(value) else f"{value:.2f} {name}"
    return f"{size_bytes} B"


class SizeType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A size in bytes above 0, and a multiple of ``multiple``."""

    name = "size"

    def __init__(self, multiple: int = 1) -> None:
        self.multiple = multiple

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the size in bytes or fail with one line."""
        try:
            size = value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size <= 0:
            self.fail(f"must be above 0, got {value}", param, ctx)
        if size % self.multiple:
            self.fail(f"must be a multiple of {self.multiple}, got {value}", param, ctx)
        return size


class FiniteRange(click.FloatRange):
    """A range of numbers; click's own lets ``nan`` and ``inf`` through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number or fail with one line."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"must be finite, got {value}", param, ctx)
        return number


SIZE = SizeType()
PAGE_SIZE = SizeType(ALIGNMENT_BYTES)
