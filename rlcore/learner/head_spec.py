"""What a pass through the LM head computes, and in which chunks."""

from __future__ import annotations

from dataclasses import dataclass

_FEWEST = 64  # positions that a chunk may always have: fewer would waste the products


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What the head pass computes besides log p and entropy.

    Example: HeadSpec(temperature=1.0, chunk=1024, topk=20)
    """

    temperature: float  # divides the logits, as the actor does
    chunk: int  # most positions per chunk
    topk: int = 0  # own top entries; 0: none
    # DVP's rho: probabilities are conditioned on {a: p(a) >= rho * max p}; None: on everything
    safe_set_rho: float | None = None
    entropy_grad: bool = False  # whether gradients flow through the entropy
    # products in float32 on both passes, from a float32 copy of the weight: a bfloat16 model's
    # logits and their gradient are then not rounded
    fp32: bool = False

    def slices(self, n: int) -> list[slice]:
        """The chunks of n positions: `chunk` at most, and an eighth of n, but never fewer than
        `_FEWEST` because of n (benchmarks/results/head_memory_cpu.md has times). Of none, an empty
        one: a rank that predicts no token takes part all the same."""
        rows = min(self.chunk, max(_FEWEST, -(-n // 8)))
        return [slice(start, min(start + rows, n)) for start in range(0, max(n, 1), rows)]
