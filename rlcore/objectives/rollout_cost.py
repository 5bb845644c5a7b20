"""Cost model of rollouts with dense and sparse attention (DistillSparse, appendix B)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """One rollout phase, in the symbols of the appendix."""

    parameters: float  # P
    prompts: int  # B
    samples: int  # N, per prompt
    kv_dim: float  # D, width of keys (and of values) kept for a token, over all layers
    prompt_len: int  # L_in
    response_len: int  # L_out
    group: float = 1.0  # r, query heads per KV head

    def attended(self, budget: int | None = None) -> float:
        """H: keys and values read over a whole response, in tokens' worth; budget K in tokens, None is dense.

        `H = (2 L_in + L_dense) L_dense + 2 K (L_out - L_dense)`, `L_dense = min(L_out, K - L_in)`; a prompt longer than
        the budget leaves no dense step (L_dense = 0), which the paper's formula does not cover.
        """
        dense = self.response_len
        if budget is not None:
            dense = max(0, min(self.response_len, budget - self.prompt_len))
        kept = 0 if budget is None else 2 * budget * (self.response_len - dense)
        return (2 * self.prompt_len + dense) * dense + kept

    def memory(self, budget: int | None = None) -> float:
        """Memory traffic of decoding, `2 P L_out + B N D H` (the paper's units: parameters twice, KV entries once)."""
        kv = self.prompts * self.samples * self.kv_dim * self.attended(budget)
        return 2 * self.parameters * self.response_len + kv

    def compute(self, budget: int | None = None) -> float:
        """Arithmetic of decoding, `2 P B N L_out + r B N D H`."""
        sequences = self.prompts * self.samples
        attention = self.group * sequences * self.kv_dim * self.attended(budget)
        return 2 * self.parameters * sequences * self.response_len + attention

    def speedup(self, budget: int) -> float:
        """Dense over sparse memory traffic: the bound on decoding's gain while memory is what limits it."""
        return self.memory() / self.memory(budget)
