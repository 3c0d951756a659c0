"""The stated linear cost model of the replay: what the missing GPU would have taken.

    step = step_s + prefill_token_s * prefill tokens
         + burst * (decode_step_s + decode_sequence_s * decoding sequences)

where ``burst`` is how many tokens each decoding sequence produces in one scheduler step (0 if none
decodes). The defaults are round figures for a model of about 8 billion parameters on one
accelerator; they are a model, not a measurement. Real time is model time multiplied by the time
scale, which is part of every report; pages, event loop and disk are real and are not scaled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of model time. ``chunk_tokens`` bounds the prefill tokens of one step."""

    step_s: float = 0.002
    prefill_token_s: float = 50e-6
    decode_step_s: float = 0.010
    decode_sequence_s: float = 0.0001
    chunk_tokens: int = 8192
    burst_tokens: int = 32

    def step_cost_s(self, prefill_tokens: int, decoding: int, burst: int) -> float:
        """Return the model time of one scheduler step."""
        decode_s = burst * (self.decode_step_s + self.decode_sequence_s * decoding)
        return self.step_s + self.prefill_token_s * prefill_tokens + (decode_s if decoding else 0)

    def estimate_s(self, workload: Workload, sessions: int) -> float:
        """Return a rough model time of a workload: no hits, ``sessions`` / 2 decode together."""
        requests = workload.requests
        prompt = sum(r.prompt_tokens for r in requests)
        output = sum(r.output_tokens for r in requests)
        together = max(1.0, min(sessions, 16) / 2)
        decode_s = output * (self.decode_step_s / together + self.decode_sequence_s)
        steps = prompt / self.chunk_tokens + output / self.burst_tokens / together
        return prompt * self.prefill_token_s + decode_s + steps * self.step_s

    def describe(self) -> dict[str, Any]:
        """Return the model for a report."""
        return asdict(self)


REFERENCE_S = 0.00015  # of compute for each block a request refers to
COMPUTE_MAX_S = 10.0


def default_time_scale(workload: Workload, cost: CostModel, sessions: int) -> float:
    """Return the scale at which the compute of one run takes 0.15 ms a block reference.

    At most 10 s in all, which leaves the bookkeeping and the disk of a two-core machine room within
    the 25 s of a run; never above 1. It depends on the workload alone, so all rows of an ablation
    share it.
    """
    references = sum(-(-r.total_tokens // workload.block_tokens) for r in workload.requests)
    target_s = min(COMPUTE_MAX_S, references * REFERENCE_S)
    return min(1.0, float(f"{target_s / cost.estimate_s(workload, sessions):.2g}"))
