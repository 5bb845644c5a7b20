"""RMS norms of float32 models on the CPU, with a backward pass written here.

Autograd takes transformers' norm apart into eight operations, each of which reads and writes the
whole activations again on the way back. The forward pass here is the same to the bit.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlcore.learner.engines.deepspeed_patches import NORM

_EPSILONS = ("variance_epsilon", "eps")  # what transformers' norms call it
_PROBE = (5, 24)  # rows and width of the input that a kind of norm is tried with


def own_norms(lm: nn.Module) -> int:
    """Have the modules of `lm` that compute exactly `rms_norm` use it, in place; returns their
    number. Each class of modules is tried by running it: a class that computes anything else
    (Gemma's multiplies by 1 + weight) is not changed.
    """
    kinds: dict[type[nn.Module], bool] = {}
    found = 0
    for module in lm.modules():
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm"):
            continue
        if kind not in kinds:
            kinds[kind] = _is_plain(kind)
        if kinds[kind]:
            module.own_epsilon = _epsilon(module)  # type: ignore[assignment]
            # bound, so that a copy of the model has a method of its own
            NORM.replace(MethodType(_forward, module), of=module)
            found += 1
    return found


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.

    x [..., D] float32, weight [D] float32 -> [..., D] (Zhang and Sennrich 2019, eq. 4).
    """
    normed: Tensor = _RmsNorm.apply(x, weight, epsilon)
    return normed


def _is_plain(kind: type[nn.Module]) -> bool:
    """Return whether a fresh module of this kind with random weights computes the result of
    `rms_norm`."""
    rows, width = _PROBE
    generator = torch.Generator().manual_seed(0)
    try:
        module = kind(width)
        epsilon = _epsilon(module)
        if epsilon is None or [n for n, _ in module.named_parameters()] != ["weight"]:
            return False
        weight = torch.randn(width, generator=generator)
        x = torch.randn(rows, width, generator=generator)
        with torch.no_grad():
            module.weight.copy_(weight)  # type: ignore[operator]
            return torch.equal(module(x), rms_norm(x, weight, epsilon))
    except (TypeError, RuntimeError):  # a module that is made or called in another way
        return False


def _epsilon(module: nn.Module) -> float | None:
    found = [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    return float(found[0]) if found else None


def _forward(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.own_epsilon)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = rows * rows
        # the operations of transformers, in their order: sums round alike
        scale = out.mean(1, keepdim=True).add_(epsilon).rsqrt_()
        torch.mul(rows, scale, out=out).mul_(weight)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With s = 1 / sqrt(mean(x^2) + epsilon) and y = g * weight, the gradient of x is s * y -
        s^3 * x * mean(x * y). The weight's gradient is the sum of g * x * s."""
        rows, weight, scale = ctx.saved_tensors
        g = grad.reshape(rows.shape)
        product = g * rows
        scales = scale.view(-1)
        d_weight = torch.mv(product.t(), scales) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        along = torch.mv(product, weight) * scales.pow(3).div_(-rows.shape[1])
        d_rows = torch.mul(g, scale, out=product).mul_(weight)
        d_rows.addcmul_(rows, along.unsqueeze(1))
        return d_rows.view(grad.shape), d_weight, None
