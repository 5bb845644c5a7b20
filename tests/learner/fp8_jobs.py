"""Optimizer steps of a learner whose layers multiply FP8 numbers by torchao, emulated, and of one
whose layers compute the definition written here; prints how far they are apart.

    python fp8_jobs.py tensor|row FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from learner_helpers import small_model, trained
from torch import nn

from rlcore.learner import build

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = {
    "ZeRO-0": {"zero_stage": 0},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "recomputed": {"gradient_checkpointing": True},
    "reference": {"kl_coef": 0.1},
}


def rounded(x: torch.Tensor, dim: int | None, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """x through FP8 and back, scaled so that the largest entry along `dim`, or of all, is FP8's."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    top = torch.finfo(dtype).max
    scale = (top / largest.double().clamp(min=1e-12)).float()
    if dim is not None:  # powers of two
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x * scale).clamp(-top, top).to(dtype).float() / scale


class Product(torch.autograd.Function):
    """x @ w.T of rounded numbers; the sums of each of the three products run over `dim` of its
    operands, whose rows have a scale each, or whole tensors."""

    @staticmethod
    def forward(ctx, x, w, by_row):
        ctx.save_for_backward(x, w)
        ctx.by_row = by_row
        dim = -1 if by_row else None
        return rounded(x, dim) @ rounded(w, dim).T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if ctx.by_row:
            dx = rounded(grad, -1) @ rounded(w, 0)
            return dx, rounded(grad, 0).T @ rounded(x, 0), None
        g = rounded(grad, None, E5M2)
        return g @ rounded(w, None), g.T @ rounded(x, None), None


def by_definition(lm: nn.Module, scales: str, *, emulate: bool) -> int:
    """In place of `float8_layers`."""
    assert emulate
    head, found = lm.get_output_embeddings(), 0
    for module in lm.modules():
        if isinstance(module, nn.Linear) and module is not head:
            found += 1

            def forward(x, m=module):
                out = Product.apply(x.reshape(-1, x.shape[-1]), m.weight, scales == "row")
                return out.view(*x.shape[:-1], -1)

            module.forward = forward
    return found


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((w - b[name]).abs().max()) for name, w in a.items())


def main(scales: str, folder: Path) -> None:
    model = small_model(folder / "model", hidden=64, intermediate_size=80)
    counts, float8_layers = [], build.float8_layers

    def counted(lm, scales, *, emulate):
        counts.append(float8_layers(lm, scales, emulate=emulate))
        return counts[-1]

    build.float8_layers = counted
    own = trained(model, CASES, fp8=scales)
    plain = trained(model, CASES, fp8="none")
    [compiled] = trained(model, {"ZeRO-1": CASES["ZeRO-1"]}, fp8=scales, layers="compiled").values()
    build.float8_layers = by_definition
    wanted = trained(model, CASES, fp8=scales)
    apart = {case: largest(weights, wanted[case]) for case, weights in own.items()}
    without = largest(own["ZeRO-0"], plain["ZeRO-0"])
    said = {"apart": apart, "without": without, "maps": counts[0]}
    print("FOUND" + json.dumps(said | {"compiled": largest(compiled, wanted["ZeRO-1"])}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
