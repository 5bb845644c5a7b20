"""Low-rank adapters as they are published by themselves, over base weights that the actors have.

The adapter of a weight W [out, in] is two tensors beside its name, A [rank, in] and B [out, rank],
of which B is published with the adapter's scale: the actors compute x W^T + (x A^T) B^T. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Which layers of a model have an adapter, and of which rank.

    Example: AdapterShape(16, ("q_proj", "v_proj"))
    """

    rank: int
    targets: tuple[str, ...]  # last parts of the names of linear layers


def factor_names(weight: str) -> tuple[str, str]:
    """Names of A and B for the Hugging Face name of an adapted weight, "layers.0.q_proj.weight"."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def adapter_shapes(model: Shapes, adapter: AdapterShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter's tensors for a model whose weights have these shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in model.items():
        layer = f".{name.removesuffix('.weight')}"
        if len(shape) == 2 and any(layer.endswith(f".{target}") for target in adapter.targets):
            a, b = factor_names(name)
            found |= {a: (adapter.rank, shape[1]), b: (shape[0], adapter.rank)}
    return found
