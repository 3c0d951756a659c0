"""What is replayed: requests, in conversations, from a trace or from a seed.

A conversation is a list of requests that follow each other; conversations are independent. A
trace gives one request each, because its ids already say which prefixes are shared. The built-in
agentic workload imitates a coding agent: a few shared system prompts, a task, then turns in which
the model answers and a tool returns text, so every prompt extends the one before it. Everything,
the outputs included, follows from the seed and never from timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .trace import TraceRow

Tokens = npt.NDArray[np.uint32]
_OUTPUT_BASE = 1 << 31  # trace ids stay below, so an output never equals a prompt block


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and the output that follows it.

    ``source`` holds block ids of a trace, or the token stream of a conversation. ``think_s`` is
    the pause before the request in seconds of model time (a tool at work).
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    source: Tokens
    block_tokens: int = 0
    think_s: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Return prompt and output together."""
        return self.prompt_tokens + self.output_tokens

    def tokens(self) -> Tokens:
        """Return prompt and output tokens; a trace id becomes a block of equal tokens."""
        if not self.block_tokens:
            return self.source[: self.total_tokens]
        prompt = np.repeat(self.source, self.block_tokens)[: self.prompt_tokens]
        output = np.full(self.output_tokens, _OUTPUT_BASE + self.index, dtype=np.uint32)
        return np.concatenate((prompt, output))


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to replay, and what they amount to."""

    name: str
    block_tokens: int
    conversations: Sequence[Sequence[Request]]
    distinct_blocks: int
    details: dict[str, Any]

    @property
    def requests(self) -> list[Request]:
        """Return all requests, conversation by conversation."""
        return [request for conversation in self.conversations for request in conversation]

    @property
    def longest_blocks(self) -> int:
        """Return the most blocks one request occupies."""
        return max(-(-r.total_tokens // self.block_tokens) for r in self.requests)

    def describe(self) -> dict[str, Any]:
        """Return the workload for a report."""
        requests = self.requests
        return {
            "name": self.name,
            "requests": len(requests),
            "conversations": len(self.conversations),
            "block_tokens": self.block_tokens,
            "prompt_tokens": sum(r.prompt_tokens for r in requests),
            "output_tokens": sum(r.output_tokens for r in requests),
            "distinct_blocks": self.distinct_blocks,
            "longest_request_blocks": self.longest_blocks,
            **self.details,
        }


def trace_workload(name: str, rows: Sequence[TraceRow], block_tokens: int) -> Workload:
    """Return a trace as a workload; each row is a conversation of one request."""
    conversations = []
    ids: set[int] = set()
    output_blocks = 0
    for index, row in enumerate(rows):
        source = np.asarray(row.hash_ids, dtype=np.uint32)
        request = Request(index, row.input_tokens, row.output_tokens, source, block_tokens)
        conversations.append((request,))
        ids.update(row.hash_ids)
        full_prompt_blocks = row.input_tokens // block_tokens
        output_blocks += -(-request.total_tokens // block_tokens) - full_prompt_blocks
    details = {"block_references": sum(len(row.hash_ids) for row in rows)}
    return Workload(name, block_tokens, conversations, len(ids) + output_blocks, details)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgenticSpec:
    """Lengths in tokens and times in model seconds of the agentic workload.

    Lengths are drawn from log-normal distributions with these medians and cut at ``prompt_max``.
    """

    system_prompts: int = 3
    system_tokens: int = 4096
    task_tokens: int = 8000
    tool_tokens: int = 2000
    output_tokens: int = 160
    spread: float = 0.6
    turns_low: int = 6
    turns_high: int = 14
    prompt_max: int = 60_000
    think_s: float = 4.0


def agentic_workload(
    request_count: int, block_tokens: int, seed: int, spec: AgenticSpec | None = None
) -> Workload:
    """Return ``request_count`` turns of seeded coding-agent conversations."""
    spec = spec or AgenticSpec()
    generator = np.random.default_rng(seed)

    def draw(median: float, low: int) -> int:
        return max(low, round(median * float(np.exp(spec.spread * generator.standard_normal()))))

    def text(count: int) -> Tokens:
        return generator.integers(0, 1 << 17, count, dtype=np.uint32)

    systems = [text(draw(spec.system_tokens, 64)) for _ in range(spec.system_prompts)]
    conversations: list[list[Request]] = []
    index = distinct_blocks = 0
    while index < request_count:
        pieces = [systems[int(generator.integers(len(systems)))], text(draw(spec.task_tokens, 16))]
        length = sum(piece.size for piece in pieces)
        turns: list[tuple[int, int, float]] = []
        for turn in range(int(generator.integers(spec.turns_low, spec.turns_high + 1))):
            think_s = float(generator.exponential(spec.think_s)) if turn else 0.0
            output = draw(spec.output_tokens, 8)
            tool = draw(spec.tool_tokens, 8)
            if length + output > spec.prompt_max or index + len(turns) >= request_count:
                break
            turns.append((length, output, think_s))
            pieces += (text(output), text(tool))
            length += output + tool
        stream = np.concatenate(pieces)
        conversation = [
            Request(index + turn, prompt, output, stream, think_s=think_s)
            for turn, (prompt, output, think_s) in enumerate(turns)
        ]
        if not conversation:
            continue
        index += len(conversation)
        conversations.append(conversation)
        distinct_blocks += -(-conversation[-1].total_tokens // block_tokens)
    details = {"seed": seed, **{name: getattr(spec, name) for name in AgenticSpec.__slots__}}
    return Workload("agentic", block_tokens, conversations, distinct_blocks, details)
