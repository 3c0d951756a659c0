"""Trace rows of both forms, errors with line and field, and workloads made from them."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from kvstore_bench.trace import TraceError, read_trace
from kvstore_bench.workload import agentic_workload, trace_workload

MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 9]}
QWEN = {
    "chat_id": 12, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 33,
    "output_length": 5, "type": "text", "turn": 1, "hash_ids": [4, 5, 6],
}  # fmt: skip


def write(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_mooncake_row(tmp_path):
    """A Mooncake timestamp is milliseconds; empty lines do not count."""
    (row,) = read_trace(write(tmp_path, "", MOONCAKE, ""), 512)
    assert (row.timestamp_s, row.input_tokens, row.output_tokens) == (1.5, 1100, 7)
    assert row.hash_ids == (1, 2, 9)


def test_qwen_row(tmp_path):
    """A Qwen-Bailian timestamp is seconds, its blocks have 16 tokens."""
    (row,) = read_trace(write(tmp_path, QWEN), 16)
    assert row.timestamp_s == 61.25
    assert row.hash_ids == (4, 5, 6)


def test_limit(tmp_path):
    """Only as many rows as asked for are read; a bad line behind them is not seen."""
    assert len(read_trace(write(tmp_path, MOONCAKE, MOONCAKE, "{"), 512, 2)) == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"timestamp": None}, "timestamp"),
        ({"timestamp": -1}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"output_length": "7"}, "output_length"),
        ({"output_length": True}, "output_length"),
        ({"hash_ids": 3}, "hash_ids"),
        ({"hash_ids": None}, "hash_ids"),
        ({"hash_ids": [1, 2, "x"]}, "hash_ids"),
        ({"hash_ids": [1, 2, 1 << 31]}, "hash_ids"),
        ({"hash_ids": [1, 2]}, "hash_ids"),
    ],
)
def test_bad_field_names_line_and_field(tmp_path, change, field):
    """The error names file, line number and field."""
    path = write(tmp_path, MOONCAKE, MOONCAKE | change)
    with pytest.raises(TraceError, match=rf"trace\.jsonl: line 2: {field}: "):
        read_trace(path, 512)


@pytest.mark.parametrize("line", ["{", "3", "[]", '{"timestamp": NaN}'])
def test_bad_line_names_its_number(tmp_path, line):
    """A line that is no JSON object is named by its number."""
    with pytest.raises(TraceError, match="line 2: "):
        read_trace(write(tmp_path, MOONCAKE, line), 512)


def test_missing_field(tmp_path):
    """A missing field is named."""
    row = {key: value for key, value in MOONCAKE.items() if key != "output_length"}
    with pytest.raises(TraceError, match="line 1: output_length: missing"):
        read_trace(write(tmp_path, row), 512)


def test_bytes_that_are_no_text(tmp_path):
    """Bytes outside UTF-8 are one error with the line."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 1: text: "):
        read_trace(path, 512)


def test_empty_trace(tmp_path):
    """A file without a row is an error."""
    with pytest.raises(TraceError, match="no rows"):
        read_trace(write(tmp_path, ""), 512)


def test_trace_tokens_share_what_ids_share(tmp_path):
    """Equal ids give equal tokens; outputs are unique to their request."""
    other = MOONCAKE | {"hash_ids": [1, 2, 10], "input_length": 1200}
    workload = trace_workload("t", read_trace(write(tmp_path, MOONCAKE, other), 512), 512)
    first, second = (request.tokens() for request in workload.requests)
    assert first.dtype == np.uint32
    assert (first.size, second.size) == (1107, 1207)
    assert np.array_equal(first[:1024], second[:1024])
    assert first[1024] != second[1024]
    assert first[1100] >= 1 << 31
    assert first[1100] != second[1200]
    assert workload.longest_blocks == 3
    assert workload.distinct_blocks == 4 + 2


def test_agentic_workload_follows_its_seed():
    """Equal seeds give equal requests, other seeds others; prompts of a conversation extend."""
    one, two, other = (agentic_workload(60, 512, seed) for seed in (5, 5, 6))
    assert len(one.requests) == 60
    for left, right in zip(one.requests, two.requests, strict=True):
        assert np.array_equal(left.tokens(), right.tokens())
    assert one.describe() == two.describe()
    assert one.describe() != other.describe()
    for conversation in one.conversations:
        for before, after in pairwise(conversation):
            whole = before.tokens()
            assert after.prompt_tokens > before.total_tokens
            assert np.array_equal(whole, after.tokens()[: whole.size])
    assert [request.index for request in one.requests] == list(range(60))
