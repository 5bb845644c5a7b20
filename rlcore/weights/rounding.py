"""Weight rounding that emulates low-precision actors: quantise, dequantise, keep the dtype. Pure functions.

Stated as emulation wherever it is reported: the arithmetic of the forward pass stays in the actor's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from rlcore.errors import UserError

Rounding = Literal["none", "fp8", "int8", "int4"]
Granularity = Literal["tensor", "channel", "block"]
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # one weight each in vLLM, in this order
_MAX = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}  # largest magnitude of E4M3; symmetric integers


def round_tensor(
    weight: torch.Tensor, kind: Rounding, *, granularity: Granularity = "tensor", block: int = 128
) -> torch.Tensor:
    """`weight` [out, in] rounded through `kind`, in its own dtype and shape.

    scale = max|w| / (largest value of the format), over the whole tensor, per output channel (row) or per
    `block` x `block` tile. An all-zero region stays zero. Raises UserError for an unknown kind.
    """
    if kind == "none":
        return weight
    if kind not in _MAX:
        raise UserError.choice("actor.rounding", kind, ["none", *_MAX])
    w = weight.float()
    amax = _amax(w, granularity, block)
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / _MAX[kind]
    q = w / scale
    if kind == "fp8":
        q = q.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    else:
        q = q.round().clamp(-_MAX[kind], _MAX[kind])
    return (q * scale).to(weight.dtype)


def _amax(w: torch.Tensor, granularity: Granularity, block: int) -> torch.Tensor:
    """Largest magnitude, broadcastable against w [out, in]."""
    if granularity == "tensor":
        return w.abs().amax()
    if granularity == "channel":
        return w.abs().amax(dim=-1, keepdim=True)
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w.abs(), (0, -cols % block, 0, -rows % block))
    tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block).amax(dim=(1, 3))
    return tiles.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]


def is_rounded(name: str, weight: torch.Tensor, keep_high_precision: Iterable[str]) -> bool:
    """Whether a parameter is a linear layer's weight that no pattern (a substring of its name) keeps precise."""
    return weight.ndim == 2 and name.endswith(".weight") and not any(p in name for p in keep_high_precision)


def round_weights(
    tensors: Mapping[str, torch.Tensor],
    kind: Rounding,
    *,
    keep_high_precision: Iterable[str] = ("lm_head", "embed_tokens"),
    granularity: Granularity = "tensor",
    block: int = 128,
) -> dict[str, torch.Tensor]:
    """All tensors, those that `is_rounded` selects rounded; the others are the same objects.

    fp8 has vLLM's scales: they are those of q, k, v and of gate, up as one weight. The integer formats, which vLLM
    does not quantise to here, have a Hugging Face weight's own.
    """
    keep = tuple(keep_high_precision)
    if kind == "none":
        return dict(tensors)
    done = dict(tensors)
    groups: dict[str, list[str]] = {}
    for n, t in tensors.items():
        if is_rounded(n, t, keep):
            groups.setdefault(_fused_name(n) if kind == "fp8" else n, []).append(n)
    for names in groups.values():
        parts = [tensors[n] for n in sorted(names, key=_place)]
        whole = round_tensor(torch.cat(parts), kind, granularity=granularity, block=block)
        done |= zip(sorted(names, key=_place), whole.split([len(p) for p in parts]), strict=True)
    return done


def _fused_name(name: str) -> str:
    """The same for weights that vLLM fuses."""
    for parts in _FUSED:
        for part in parts:
            name = name.replace(f".{part}.", f".{'+'.join(parts)}.")
    return name


def _place(name: str) -> int:
    """Order within a fused weight."""
    return next((i for parts in _FUSED for i, part in enumerate(parts) if f".{part}." in name), 0)
