"""Methods that vLLM's worker gains, called through `collective_rpc`. Torch only: vLLM imports this, not the reverse.

vLLM fuses q, k, v into `qkv_proj` and gate, up into `gate_up_proj`, pads the vocabulary and stores tied embeddings
once; `_held` undoes this, so that checksums are those of the weights as the engine holds them, under their Hugging
Face names. Exact with tensor parallelism 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlcore.weights.checksum import tensor_checksum

Shapes = Mapping[str, tuple[int, ...]]


class WeightExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any

    def rl_check_live(self) -> None:
        """Raise RuntimeError if a weight was packed away at load: it could not be replaced later."""
        empty = [n for n, p in self.model_runner.model.named_parameters() if p.numel() == 0]
        if empty:
            raise RuntimeError(f"vLLM packed {empty[0]} (and {len(empty) - 1} more): it could not be updated in place")

    @torch.no_grad()
    def rl_load(self, tensors: Mapping[str, torch.Tensor], quantised: bool) -> None:
        """Load a whole set of weights. Raises RuntimeError if the model did not take every one of them."""
        if quantised:  # quantise again and rebuild the kernels' layouts
            self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
            return
        model = self.model_runner.model
        tied = {"lm_head.weight"} if _tied(model) else set()
        loaded = model.load_weights((n, t) for n, t in tensors.items() if n not in tied)
        expected = {_fused_name(model, n) for n in tensors if n not in tied}
        if missing := expected - set(loaded):
            raise RuntimeError(f"the engine did not load {sorted(missing)[0]} (and {len(missing) - 1} more)")

    @torch.no_grad()
    def rl_checksums(self, shapes: Shapes, names: list[str]) -> dict[str, int]:
        """Checksums of `names`; `shapes` are the Hugging Face shapes of at least them and their fused siblings."""
        params = dict(self.model_runner.model.named_parameters())
        return {n: tensor_checksum(_held(self.model_runner.model, params, shapes, n)) for n in names}


def _tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def _siblings(model: Any, name: str) -> tuple[str, list[str]] | None:
    """(fused parameter, its parts in order) for a name that vLLM fuses."""
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        for part in parts:
            if f".{part}." in name and part != fused:
                return name.replace(f".{part}.", f".{fused}."), [name.replace(f".{part}.", f".{p}.") for p in parts]
    return None


def _fused_name(model: Any, name: str) -> str:
    found = _siblings(model, name)
    return found[0] if found else name


def _held(model: Any, params: Mapping[str, torch.Tensor], shapes: Shapes, name: str) -> torch.Tensor:
    """The engine's tensor for a Hugging Face name, as a view. Raises KeyError or RuntimeError naming the tensor."""
    if name == "lm_head.weight" and _tied(model):
        name = "model.embed_tokens.weight"
    found = _siblings(model, name)
    target, parts = found if found else (name, [name])
    if target not in params:
        raise KeyError(f"the engine holds no weight {target} (for {name})")
    before = sum(shapes[p][0] for p in parts[: parts.index(name)])
    shape = shapes[name]
    held = params[target][before : before + shape[0]]
    if tuple(held.shape) != tuple(shape) or held.numel() != math.prod(shape):
        raise RuntimeError(f"the engine holds {name} as {tuple(held.shape)}, the checkpoint as {tuple(shape)}")
    return held
