"""Experts of a mixture on the CPU, computed from weights that can be replaced in place.

vLLM's own kernel wants them packed, at the same shapes: a weight loaded into the packed parameter
would be read wrongly, and a checksum of that parameter could not tell.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def keep_experts_live() -> None:
    """Have vLLM's unquantised CPU experts keep and read their weights as they were loaded."""
    experts: Any = CPUUnquantizedExperts
    experts.process_weights_after_loading = _as_loaded
    experts.apply = _apply


def _as_loaded(self: Any, layer: torch.nn.Module) -> None:
    del self, layer


def _apply(self: Any, **given: Any) -> None:
    """vLLM's arguments, by name: see `FusedMoEExpertsModular.apply`."""
    activation = given["activation"]
    if activation != MoEActivation.SILU or self.w1_bias is not None or self.w2_bias is not None:
        raise RuntimeError(f"experts on the CPU have no bias and SiLU, not {activation.value}")
    chosen = (given["topk_weights"], given["topk_ids"])
    given["output"].copy_(mixed(given["hidden_states"], given["w1"], given["w2"], *chosen))


def mixed(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """The sum over a token's experts of weight times `w2[e] (silu(gate) * up)`.

    x [n, H], w13 [E, 2I, H] (gate above up), w2 [E, H, I], weights [n, k], experts [n, k] int ->
    [n, H] in x's dtype, summed in float32.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in experts.unique().tolist():
        tokens, place = torch.nonzero(experts == e, as_tuple=True)
        gate, up = F.linear(x[tokens], w13[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w2[e])
        total.index_add_(0, tokens, y.float() * weights[tokens, place, None].float())
    return total.to(x.dtype)
