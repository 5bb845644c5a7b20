"""Weight rounding that emulates low-precision actors: quantise, dequantise, keep the dtype.

Reported as emulation everywhere: the arithmetic of the forward pass stays in the actor's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from rlcore.weights.specs import Rounding, RoundingSpec, Scales

BLOCK = 128  # rows and columns that share a scale with scales="block"
# Weights that vLLM fuses into one, in its order.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Largest magnitude of E4M3 and of symmetric integers.
_MAX = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int3": 3.0}


def round_tensor(
    weight: torch.Tensor, kind: Rounding, scales: Scales, *, block: int = BLOCK
) -> torch.Tensor:
    """`weight` [out, in] rounded through `kind`, in its own dtype and shape.

    scale = max|w| / (largest value of the format), over the whole tensor, per output channel (row)
    or per `block` x `block` tile. An all-zero region stays zero.
    """
    if kind == "none":
        return weight
    w = weight.float()
    amax = _amax(w, scales, block)
    # 1 for an all-zero region, which would otherwise become NaN
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / _MAX[kind]
    q = w / scale
    if kind == "fp8":
        # Division may exceed the largest value by a bit, and E4M3 has no infinity: it would be NaN.
        q = q.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    else:
        q = q.round().clamp(-_MAX[kind], _MAX[kind])
    return (q * scale).to(weight.dtype)


def _amax(w: torch.Tensor, scales: Scales, block: int) -> torch.Tensor:
    """Largest magnitude, broadcastable against w [out, in]."""
    if scales == "tensor":
        return w.abs().amax()
    if scales == "channel":
        return w.abs().amax(dim=-1, keepdim=True)
    rows, cols = w.shape
    # Incomplete tiles at the edges have a scale too; padding with 0 never raises a maximum.
    padded = torch.nn.functional.pad(w.abs(), (0, -cols % block, 0, -rows % block))
    tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    largest = tiles.amax(dim=(1, 3))
    return largest.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]


def is_rounded(name: str, weight: torch.Tensor, keep_high_precision: Iterable[str]) -> bool:
    """Return whether a parameter is a linear layer's weight whose name contains none of the
    patterns."""
    return (
        weight.ndim == 2
        and name.endswith(".weight")
        and not any(p in name for p in keep_high_precision)
    )


def precise_patterns(names: Iterable[str], count: int) -> tuple[str, ...]:
    """Patterns of the names of the last `count` decoder layers: "model.layers.3.mlp..." is one of
    layer 3."""
    found = {int(m.group(1)) for name in names if (m := re.search(r"\.layers\.(\d+)\.", name))}
    return tuple(f".layers.{number}." for number in sorted(found)[max(0, len(found) - count) :])


def round_weights(
    tensors: Mapping[str, torch.Tensor], spec: RoundingSpec, *, block: int = BLOCK
) -> dict[str, torch.Tensor]:
    """All tensors, those that `is_rounded` selects rounded; the others are the same objects.

    fp8 has vLLM's scales: q, k, v share theirs as one weight, and so do gate, up. The integer
    formats, which vLLM does not quantise to here, have a Hugging Face weight's own.
    """
    kind = spec.rounding
    if kind == "none":
        return dict(tensors)
    done = dict(tensors)
    # Weights that share scales, in whatever order they were published.
    groups: dict[str, list[str]] = {}
    for n, t in tensors.items():
        if is_rounded(n, t, spec.keep_high_precision):
            groups.setdefault(_fused_name(n) if kind == "fp8" else n, []).append(n)
    for names in groups.values():
        parts = [tensors[n] for n in sorted(names, key=_place)]
        whole = round_tensor(torch.cat(parts), kind, spec.scales, block=block)
        done |= zip(sorted(names, key=_place), whole.split([len(p) for p in parts]), strict=True)
    return done


def _fused_name(name: str) -> str:
    """The same name for all weights that vLLM fuses into one."""
    for parts in _FUSED:
        for part in parts:
            name = name.replace(f".{part}.", f".{'+'.join(parts)}.")
    return name


def _place(name: str) -> int:
    """Position within a fused weight."""
    return next((i for parts in _FUSED for i, part in enumerate(parts) if f".{part}." in name), 0)
