"""A model whose forward pass rounds its linear layers' weights as an actor rounds what was
published, while its parameters stay the float32 weights that the optimizer trains.

With master weights W and R(W) of `weights/rounding.py`, a layer computes y = x R(W)^T + b. Its
gradient passes straight through the rounding: dL/dW is taken as dL/dR(W) (Bengio et al. 2013, arXiv
1308.3432), which is what quantisation-aware training of policies does (QaRL, arXiv 2604.07853).
R(W) is computed in the forward pass and once more in the backward pass, and not kept between them.
So no second model is in memory and ZeRO-3 gathers one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlcore.attention.bitwise import linear
from rlcore.errors import UserError
from rlcore.interfaces import Reduce
from rlcore.learner.parts.part import LearnerPart
from rlcore.weights.experts import single_shapes
from rlcore.weights.rounding import round_together, rounded_names, sharing
from rlcore.weights.specs import RoundingSpec

KEY = "learner.round_as"


class RoundedLayers(LearnerPart):
    """The linear layers of a model that compute with rounded weights from now on."""

    def __init__(self, lm: nn.Module, spec: RoundingSpec, *, model_path: str) -> None:
        """`spec`: the actor's. ZeRO-3 may have divided the weights already.

        Raises UserError for a model with a weight that the actor rounds and that is not a linear
        layer's of the blocks.
        """
        self._spec = spec
        layers = _layers(lm, _rounded_names(lm, spec), model_path)
        #: layers that share scales, in the order of their rows
        self._groups = [[layers[n] for n in names] for names in sharing(layers, spec.rounding)]
        self._unmeasured = set(layers.values())  # since the last metrics
        self._moved = self._size = 0.0
        for group in self._groups:
            for own, layer in enumerate(group):
                layer.forward = partial(self._forward, group, own)  # type: ignore[method-assign]

    def neighbours(self) -> Iterator[tuple[nn.Linear, Tensor]]:
        """Each layer with every weight of another layer that its own scales depend on."""
        for group in self._groups:
            for layer in group:
                yield from ((layer, other.weight) for other in group if other is not layer)

    def rounded(self, group: Sequence[nn.Linear], own: int) -> Tensor:
        """The weight [out, in] that a layer of a group computes with."""
        held: Tensor = round_together([layer.weight.detach() for layer in group], self._spec)[own]
        if group[own] in self._unmeasured:
            self._unmeasured.remove(group[own])
            w = group[own].weight.detach()
            self._moved += float((held - w).double().square().sum())
            self._size += float(w.double().square().sum())
        return held

    def _forward(self, group: Sequence[nn.Linear], own: int, x: Tensor) -> Tensor:
        y: Tensor = _StraightThrough.apply(x, group[own].weight, self, group, own)
        bias = group[own].bias
        return y if bias is None else y + bias

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """How far rounding moved the weights in the first pass since the last call, the same on
        every rank. Not collective."""
        del reduce
        share = (self._moved / self._size) ** 0.5 if self._size else 0.0
        self._unmeasured = {layer for group in self._groups for layer in group}
        self._moved = self._size = 0.0
        return {"rounding/relative_error": share}


class _StraightThrough(torch.autograd.Function):
    """x R(W)^T, and the gradient of W as if R were the identity."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        layers: RoundedLayers,
        group: Sequence[nn.Linear],
        own: int,
    ) -> Tensor:
        """x [..., in] -> [..., out]. `weight` belongs to `group[own]`, which autograd has to see;
        with ZeRO-3 it is empty between the passes, so that nothing of it is saved."""
        ctx.save_for_backward(x)
        ctx.place = layers, group, own
        del weight
        return linear(x, layers.rounded(group, own))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (layers, group, own) = ctx.saved_tensors, ctx.place
        d_x = grad @ layers.rounded(group, own) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return d_x, d_weight, None, None, None


def _rounded_names(lm: nn.Module, spec: RoundingSpec) -> list[str]:
    """Names of the parameters that the actor rounds a part of."""
    shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in lm.named_parameters()}
    parts = {name: single_shapes(name, shape) for name, shape in shapes.items()}
    published = {n: own for of in parts.values() for n, own in of.items()}
    rounded = set(rounded_names(published, spec))
    return [name for name, of in parts.items() if not rounded.isdisjoint(of)]


def _layers(lm: nn.Module, names: Sequence[str], model_path: str) -> dict[str, nn.Linear]:
    modules = dict(lm.named_modules())
    head = lm.get_output_embeddings()  # type: ignore[operator]
    found = {}
    for name in names:
        module = modules.get(name.removesuffix(".weight"))
        if type(module) is not nn.Linear or module is head:
            raise UserError(
                f"{KEY} cannot follow an actor that rounds {name} of model.path={model_path}, "
                "which is not a linear layer of the blocks: add a part of its name to the actor's "
                "keep_high_precision, or leave learner.round_as=null."
            )
        found[name] = module
    return found
