"""Weight rounding that emulates low-precision actors: quantise, dequantise, keep the dtype.

Reported as emulation everywhere: the arithmetic of the forward pass stays in the actor's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from rlcore.weights.specs import BLOCK_FORMATS, Rounding, RoundingSpec, Scales

BLOCK = 128  # rows and columns that share a scale with scales="block"
# Weights that vLLM fuses into one, in its order.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Largest magnitude of E4M3, of symmetric integers and of E2M1.
_MAX = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int3": 3.0, "mxfp4": 6.0, "nvfp4": 6.0}


def round_tensor(
    weight: torch.Tensor, kind: Rounding, scales: Scales, *, block: int = BLOCK
) -> torch.Tensor:
    """`weight` [out, in] rounded through `kind`, in its own dtype and shape."""
    if kind == "none":
        return weight
    codes, scale = quantise(weight, kind, scales, block=block)
    return (codes * scale).to(weight.dtype)


def round_rows(x: torch.Tensor, kind: Rounding) -> torch.Tensor:
    """`x` [..., D] rounded through `kind`, each vector by itself, whatever is next to it: fp8 and
    integers with one scale each, the blocks of nvfp4 in units of their vector."""
    return round_tensor(x.reshape(-1, x.shape[-1]), kind, "channel").view(x.shape)


def quantise(
    weight: torch.Tensor, kind: Rounding, scales: Scales, *, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the format [out, in] and what they are multiplied by, broadcastable, both float32.

    fp8 (E4M3) and symmetric integers: scale = max|w| / (largest value of the format), over the
    whole tensor, per output channel (row) or per `block` x `block` tile. mxfp4 and nvfp4 are E2M1,
    to nearest even, with scales over 32 and 16 columns of a row. The scale of mxfp4 is the power of
    two 2^(floor(log2 max|w|) - 2) (OCP Microscaling Formats 1.0, section 6.3). nvfp4's is max|w| /
    6 in E4M3, in units that let the largest of the tensor (scales="channel": of its row) be 448. An
    all-zero region stays zero.
    """
    w = weight.float()
    if kind == "mxfp4":
        scale = _power_scale(w)
    elif kind == "nvfp4":
        scale = _e4m3_scale(w, by_row=scales == "channel")
    else:
        amax = _amax(w, scales, block)
        # 1 for an all-zero region, which would otherwise become NaN
        scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / _MAX[kind]
    # Division may exceed the largest value by a bit, and E4M3 has no infinity: it would be NaN.
    q = (w / scale).clamp(-_MAX[kind], _MAX[kind])
    if kind == "fp8":
        return q.to(torch.float8_e4m3fn).float(), scale
    return (_e2m1(q) if kind in BLOCK_FORMATS else q.round()), scale


def _e2m1(q: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code."""
    size = q.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, q)


def _power_scale(w: torch.Tensor) -> torch.Tensor:
    """The scale [out, in] of mxfp4, a power of two within E8M0; 1 for an all-zero block."""
    amax = _column_amax(w, BLOCK_FORMATS["mxfp4"])
    exponent = torch.frexp(amax).exponent - 3  # frexp's mantissa is below 1
    power = torch.ldexp(torch.ones_like(amax), exponent.clamp(-126, 127))
    return torch.where(amax > 0, power, torch.ones_like(amax))


def nvfp4_units(w: torch.Tensor, *, by_row: bool = False) -> torch.Tensor:
    """How many units of nvfp4's block scales 1 has: then the largest block's scale is 448. A number
    for the tensor [out, in], or [out, 1]."""
    amax = w.float().abs().amax(-1, keepdim=True) if by_row else w.float().abs().amax()
    return torch.where(amax > 0, 448.0 * 6.0 / amax, torch.ones_like(amax))


def _e4m3_scale(w: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """The scale [out, in] of nvfp4; 1 for a block that is all zero, or too small for E4M3."""
    units = nvfp4_units(w, by_row=by_row)
    amax = _column_amax(w, BLOCK_FORMATS["nvfp4"])
    scale = (amax * units / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    # a huge scale, by which the whole block rounds to zero
    return torch.where(scale > 0, scale, torch.full_like(scale, 448.0)) / units


def _column_amax(w: torch.Tensor, size: int) -> torch.Tensor:
    """Largest magnitude over `size` columns of a row, repeated to [out, in]."""
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w.abs(), (0, -cols % size))
    return padded.view(rows, -1, size).amax(-1).repeat_interleave(size, 1)[:, :cols]


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


def rounded_names(shapes: Mapping[str, tuple[int, ...]], spec: RoundingSpec) -> list[str]:
    """Names of the weights that an actor of these settings rounds, of all that are published."""
    kept = (*spec.keep_high_precision, *precise_patterns(shapes, spec.precise_layers))
    empty = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    return [n for n, t in empty.items() if is_rounded(n, t, kept)]


def round_weights(
    tensors: Mapping[str, torch.Tensor], spec: RoundingSpec, *, block: int = BLOCK
) -> dict[str, torch.Tensor]:
    """All tensors; those that `is_rounded` selects are rounded, the others are the objects given.

    fp8 and nvfp4 have vLLM's scales: q, k and v share one (nvfp4: its unit) as one weight, and so
    do gate and up. In the other formats, to which vLLM does not quantise here or which need no
    scale of a whole tensor, each Hugging Face weight has its own scales.
    """
    if spec.rounding == "none":
        return dict(tensors)
    done = dict(tensors)
    rounded = [n for n, t in tensors.items() if is_rounded(n, t, spec.keep_high_precision)]
    for names in sharing(rounded, spec.rounding):
        whole = round_together([tensors[n] for n in names], spec, block=block)
        done |= zip(names, whole, strict=True)
    return done


def round_together(
    parts: Sequence[torch.Tensor], spec: RoundingSpec, *, block: int = BLOCK
) -> tuple[torch.Tensor, ...]:
    """Weights [out, in] of one list of `sharing`, rounded as one weight of all their rows."""
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    rounded = round_tensor(whole, spec.rounding, spec.scales, block=block)
    return rounded.split([len(p) for p in parts])


def sharing(names: Iterable[str], kind: Rounding) -> list[list[str]]:
    """Names of rounded weights in lists of those that share scales, in the order of their rows,
    whatever the order in which they are given."""
    groups: dict[str, list[str]] = {}
    for n in names:
        groups.setdefault(_fused_name(n) if kind in ("fp8", "nvfp4") else n, []).append(n)
    return [sorted(group, key=_place) for group in groups.values()]


def _fused_name(name: str) -> str:
    """The same name for all weights that vLLM fuses into one."""
    for parts in _FUSED:
        for part in parts:
            name = name.replace(f".{part}.", f".{'+'.join(parts)}.")
    return name


def _place(name: str) -> int:
    """Position within a fused weight."""
    return next((i for parts in _FUSED for i, part in enumerate(parts) if f".{part}." in name), 0)
