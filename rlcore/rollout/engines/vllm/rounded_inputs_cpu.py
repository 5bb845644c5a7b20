"""Emulates products of low-precision activations on the CPU: what a linear map of a decoder layer
reads goes through the format and back, and the product stays in the actor's dtype.

Each token is rounded by itself, so that its log-probs do not depend on its company. Engines with
these formats often share a scale of activations that was measured before; such a scale differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from rlcore.errors import UserError
from rlcore.weights.rounding import is_rounded, precise_patterns, round_rows
from rlcore.weights.specs import ActivationRounding


def round_inputs(
    model: Any, kind: ActivationRounding, kept: Sequence[str], precise_layers: int, key: str
) -> None:
    """Round what each linear map of vLLM's `model` reads, but of those whose weights stay as they
    are: names with a pattern of `kept`, and the last `precise_layers` decoder layers. `key`: of the
    actor.

    Raises UserError for a mixture of experts, which one kernel computes, and for patterns that name
    a part of a map that vLLM computes as one.
    """
    if expert := next((n for n, _ in model.named_parameters() if ".experts." in n), ""):
        raise UserError(
            f"{key}.activations={kind} rounds what linear maps read, and {expert} is computed "
            "in one kernel: use activations=none with a mixture of experts."
        )
    maps = {n: m for n, m in model.named_modules() if isinstance(m, LinearBase)}
    patterns = (*kept, *precise_patterns(maps, precise_layers))
    said = f"{key}.activations={kind}"
    rounded = {name: _rounds(model, name, patterns, said) for name in maps}
    if not any(rounded.values()):
        raise UserError(
            f"{said} rounds nothing, since keep_high_precision and "
            "precise_layers keep every linear map: use activations=none, or keep fewer."
        )
    for name, module in maps.items():
        if rounded[name]:
            module.register_forward_pre_hook(_hook(kind))


def _rounds(model: Any, name: str, patterns: Sequence[str], said: str) -> bool:
    parts = list(_parts(model, name))
    found = {part: is_rounded(f"{part}.weight", torch.empty(1, 1), patterns) for part in parts}
    if len(set(found.values())) > 1:
        stays = ", ".join(part.rpartition(".")[2] for part, own in found.items() if not own)
        raise UserError(
            f"{said} cannot leave out {stays} alone, which vLLM computes "
            f"with the rest of {name}: name all or none of its parts in keep_high_precision."
        )
    return all(found.values())


def _parts(model: Any, name: str) -> Iterator[str]:
    """The Hugging Face names of the maps that vLLM computes as one."""
    stem, _, own = name.rpartition(".")
    for part in getattr(model, "packed_modules_mapping", {}).get(own, [own]):
        yield f"{stem}.{part}"


def _hook(kind: ActivationRounding) -> Any:
    def rounded(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_rows(args[0], kind), *args[1:])

    return rounded
