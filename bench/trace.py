"""Traces of real requests: Mooncake and Qwen-Bailian rows, one JSON object a line.

Both forms carry ``input_length``, ``output_length`` and ``hash_ids``, one id per block of tokens
(512 in Mooncake, 16 in Qwen-Bailian); an equal id means an equal prefix up to and including that
block. Mooncake's ``timestamp`` is milliseconds, Qwen-Bailian's is fractional seconds; its other
fields (``chat_id``, ``parent_chat_id``, ``type``, ``turn``) mark the form and are not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ID_MAX = (1 << 31) - 1  # ids become tokens; the upper half of 32 bits is for outputs


class TraceError(ValueError):
    """A trace cannot be read; ``str()`` names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; ``timestamp_s`` is in seconds whatever the form."""

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def _number(value: Any, where: str, name: str, low: int, *, whole: bool = True) -> float:
    kinds = (int,) if whole else (int, float)
    if name not in value:
        raise TraceError(f"{where}: {name}: missing")
    number = value[name]
    if isinstance(number, bool) or not isinstance(number, kinds) or not number >= low:
        kind = "whole number" if whole else "number"
        raise TraceError(f"{where}: {name}: must be a {kind} of at least {low}, got {number!r}")
    return float(number)


def parse_row(text: str, where: str, block_tokens: int) -> TraceRow:
    """Return the row of one line.

    Raises: TraceError: names ``where`` (file and line) and the field.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{where}: json: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"{where}: json: must be an object, got {type(value).__name__}")
    is_qwen = "chat_id" in value
    timestamp = _number(value, where, "timestamp", 0, whole=False)
    input_tokens = int(_number(value, where, "input_length", 1))
    output_tokens = int(_number(value, where, "output_length", 0))
    ids = value.get("hash_ids")
    if not isinstance(ids, list):
        problem = "missing" if ids is None else f"must be a list, got {ids!r}"
        raise TraceError(f"{where}: hash_ids: {problem}")
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= ID_MAX:
            raise TraceError(f"{where}: hash_ids: must hold whole numbers, got {number!r}")
    block_count = -(-input_tokens // block_tokens)
    if len(ids) != block_count:
        raise TraceError(
            f"{where}: hash_ids: {len(ids)} ids for {input_tokens} tokens, expected {block_count}"
            f" with {block_tokens} tokens a block (see --block-tokens)"
        )
    scale = 1.0 if is_qwen else 1e-3
    return TraceRow(timestamp * scale, input_tokens, output_tokens, tuple(ids))


def read_trace(path: Path, block_tokens: int, limit: int | None = None) -> list[TraceRow]:
    """Return the first ``limit`` rows of a trace; empty lines are skipped.

    Raises: TraceError: the file or a line cannot be read, or there is no row.
    """
    rows: list[TraceRow] = []
    for where, text in _lines(path):
        if limit is not None and len(rows) >= limit:
            break
        rows.append(parse_row(text, where, block_tokens))
    if not rows:
        raise TraceError(f"{path}: no rows")
    return rows


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}: line {number}"
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    raise TraceError(f"{where}: text: {error.reason}") from None
                if text.strip():
                    yield where, text
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
