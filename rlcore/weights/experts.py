"""Names of a mixture of experts' weights: stacked in a trained model, one by one everywhere else.

transformers holds the experts of a layer as two parameters, `experts.gate_up_proj` [E, 2I, H] and
`experts.down_proj` [E, H, I]. A model folder has three matrices an expert,
`experts.0.gate_proj.weight` and so on, and these are the names that are published. vLLM stacks them
again, as `experts.routed_experts.w13_weight` and `w2_weight`. E experts, H the model's width, I an
expert's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rlcore.lazy import torch

_STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_SINGLE = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<kind>gate|up|down)_proj\.weight"
)
_REPORTED = re.compile(r"\.experts\.(?=(?:w13|w2)_weight$)")
#: model types whose experts have these names, as config.json gives them
FAMILIES = ("qwen3_moe", "qwen2_moe", "olmoe", "qwen3_next")


class EnginePlace(NamedTuple):
    """Where vLLM holds one expert's matrix.

    Example: the matrix `model.layers.0.mlp.experts.3.up_proj.weight` is the second half of
    parameter `model.layers.0.mlp.experts.routed_experts.w13_weight` [3]."""

    parameter: str
    expert: int
    half: int | None  # of the rows of w13: gate is 0, up is 1; None for w2, which is down alone


def single_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a folder of what a trained model holds as `name`, in order.

    Example: ("l.experts.down_proj", (2, 8, 4)) gives l.experts.0.down_proj.weight and
    l.experts.1.down_proj.weight, both (8, 4); any other name gives itself."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return {name: shape}
    experts, rows, columns = shape
    kinds = ("gate", "up") if match["kind"] == "gate_up_proj" else ("down",)
    each = (rows // len(kinds), columns)
    return {
        f"{match['experts']}.{e}.{kind}_proj.weight": each for e in range(experts) for kind in kinds
    }


def singles(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of `single_shapes` as views of `weight`, or `weight` itself."""
    shapes = single_shapes(name, tuple(weight.shape))
    if name in shapes:
        yield name, weight
        return
    (rows, columns) = next(iter(shapes.values()))
    yield from zip(shapes, weight.reshape(-1, rows, columns), strict=True)


def engine_place(name: str) -> EnginePlace | None:
    """Where vLLM holds the published weight `name`; None unless it is an expert's."""
    match = _SINGLE.fullmatch(name)
    if match is None:
        return None
    down = match["kind"] == "down"
    parameter = f"{match['experts']}.routed_experts.{'w2' if down else 'w13'}_weight"
    half = None if down else ("gate", "up").index(match["kind"])
    return EnginePlace(parameter, int(match["index"]), half)


def as_held(name: str) -> str:
    """The name of vLLM's parameter for one that its loader says it has loaded: 0.26 leaves a part
    out of it.

    Example: l.mlp.experts.w2_weight gives l.mlp.experts.routed_experts.w2_weight; any other name
    gives itself."""
    return _REPORTED.sub(".experts.routed_experts.", name)


def in_engine(place: EnginePlace, held: torch.Tensor) -> torch.Tensor:
    """The matrix at a place, as a view of vLLM's parameter [E, rows, columns]."""
    matrix = held[place.expert]
    return matrix if place.half is None else matrix.chunk(2)[place.half]
