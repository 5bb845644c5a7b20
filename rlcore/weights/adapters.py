"""Low-rank adapters that are published alone, for base weights that the actors already have.

The adapter of a weight W [out, in] is two tensors under its name, A [rank, in] and B [out, rank],
of which B is published with the adapter's scale. The actors compute x W^T + (x A^T) B^T. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.interfaces import WeightTransport
from rlcore.types import WeightManifest

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The layers of a model that have an adapter, and its rank.

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


@dataclass(frozen=True, slots=True)
class InParts:
    """A transport's handles of one set in several parts, some of which other actors receive,
    too."""

    parts: Sequence[tuple[WeightManifest, Any]]  # of each part, with its handle


def together(manifests: Sequence[WeightManifest]) -> WeightManifest:
    """The manifest of one set that is published in several parts, of one version and dtype.

    Raises ValueError if they differ in version or dtype, or share a name.
    """
    names = tuple(n for m in manifests for n in m.names)
    if len(set(names)) < len(names) or len({(m.version, m.dtype) for m in manifests}) > 1:
        raise ValueError("parts of a set must have one version, one dtype and their own names")
    return WeightManifest(
        version=manifests[0].version,
        names=names,
        shapes=tuple(s for m in manifests for s in m.shapes),
        dtype=manifests[0].dtype,
        checksums={n: c for m in manifests for n, c in m.checksums.items()},
        full=all(m.full for m in manifests),
    )


def receive(
    transport: WeightTransport, manifest: WeightManifest, handle: Any
) -> Iterator[Mapping[str, torch.Tensor]]:
    """`WeightTransport.receive` of a set that may be in parts."""
    for own, its in handle.parts if isinstance(handle, InParts) else [(manifest, handle)]:
        yield from transport.receive(own, its)
