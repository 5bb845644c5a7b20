"""Rounded weights in a model folder: dequantised, or in the layout of compressed-tensors, codes and
scales, which vLLM loads.

Both hold exactly what `weights/rounding.py` makes of the weights for an actor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.errors import UserError
from rlcore.files import follow_umask, replace_file
from rlcore.weights.rounding import (
    BLOCK,
    nvfp4_units,
    precise_patterns,
    quantise,
    round_weights,
    rounded_names,
    sharing,
)
from rlcore.weights.specs import BLOCK_FORMATS, RoundingSpec

# compressed-tensors' name of the layout of each format that it has
LAYOUTS = {
    "fp8": "float-quantized",
    "int8": "pack-quantized",
    "int4": "pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def check_layout(shapes: Mapping[str, tuple[int, ...]], spec: RoundingSpec) -> None:
    """Raise UserError for a format that compressed-tensors has no layout of, or for a weight [out,
    in] that the layout cannot hold."""
    kind, columns, rows = spec.rounding, BLOCK_FORMATS.get(spec.rounding, 1), 1
    if kind not in LAYOUTS:
        raise UserError(
            f"format=compressed-tensors has no layout of {kind} that vLLM loads: choose "
            f"format=rounded, or a rounding of {', '.join(LAYOUTS)}."
        )
    if spec.scales == "block":
        columns, rows = BLOCK, BLOCK if kind == "fp8" else 1
    for name in rounded_names(shapes, spec):
        if shapes[name][1] % columns or shapes[name][0] % rows:
            raise UserError(
                f"format=compressed-tensors holds {kind} in whole blocks of {rows} x {columns}, "
                f"and {name} is {shapes[name][0]} x {shapes[name][1]}: choose format=rounded."
            )


def round_folder(folder: Path, spec: RoundingSpec, form: str) -> int:
    """Round the weights of an exported model folder, in place; how many were rounded. `form`:
    rounded or compressed-tensors.

    Raises UserError as `check_layout` does.
    """
    tensors = load_file(folder / "model.safetensors")
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    names = rounded_names(shapes, spec)
    if form == "rounded":
        kept = (*spec.keep_high_precision, *precise_patterns(tensors, spec.precise_layers))
        own = spec.model_copy(update={"keep_high_precision": kept})
        written = round_weights(tensors, own)
    else:
        check_layout(shapes, spec)
        written = compressed(tensors, names, spec)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = layout_config(tensors, names, spec)
        replace_file(folder / "config.json", json.dumps(config, indent=2) + "\n")
    state = {n: t.contiguous().clone() for n, t in written.items()}  # fused weights share a scale
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    follow_umask(folder / "model.safetensors")
    return len(names)


def compressed(
    tensors: Mapping[str, Tensor], names: Sequence[str], spec: RoundingSpec
) -> dict[str, Tensor]:
    """All tensors, `names` among them as codes and scales under names of compressed-tensors."""
    done = {n: t for n, t in tensors.items() if n not in set(names)}
    for group in sharing(names, spec.rounding):
        whole = torch.cat([tensors[n] for n in group])
        codes, scale = quantise(whole, spec.rounding, spec.scales)
        rows = [len(tensors[n]) for n in group]
        parts = zip(codes.split(rows), scale.expand(codes.shape).split(rows), strict=True)
        for name, (c, s) in zip(group, parts, strict=True):
            stem = name.removesuffix("weight")
            done |= {f"{stem}{part}": t for part, t in _parts(c, s, whole, spec)}
    return done


def _parts(
    codes: Tensor, scale: Tensor, whole: Tensor, spec: RoundingSpec
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one weight, by the last part of their names. `whole`: what shares scales."""
    kind, scales = spec.rounding, spec.scales
    if kind == "fp8":
        yield "weight", codes.to(torch.float8_e4m3fn)
        blocks = scale[::BLOCK, ::BLOCK]
        compact = {"tensor": scale[0, :1], "channel": scale[:, :1], "block": blocks}
        yield "weight_scale", compact[scales]
    elif kind in BLOCK_FORMATS:
        yield "weight_packed", _pack_e2m1(codes)
        compact_scale = scale[:, :: BLOCK_FORMATS[kind]]
        if kind == "mxfp4":  # E8M0: the exponent, biased
            yield "weight_scale", (compact_scale.log2().round() + 127).to(torch.uint8)
        else:
            units = nvfp4_units(whole)
            yield "weight_scale", (compact_scale * units).to(torch.float8_e4m3fn)
            yield "weight_global_scale", units.reshape(1)
    else:
        yield "weight_packed", _pack_integers(codes, 8 if kind == "int8" else 4)
        yield "weight_scale", scale[:, ::BLOCK] if scales == "block" else scale[:, :1]
        yield "weight_shape", torch.tensor(codes.shape)


def _pack_integers(codes: Tensor, bits: int) -> Tensor:
    """[out, in] -> [out, in * bits / 32] int32: the first in the lowest bits, each with an offset
    of 2^(bits - 1). Missing ones at the end of a row are 0."""
    count = 32 // bits
    values = codes.to(torch.int64) + 2 ** (bits - 1)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % count))
    shifts = torch.arange(count) * bits
    words = (values.view(len(values), -1, count) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _pack_e2m1(codes: Tensor) -> Tensor:
    """[out, in] -> [out, in / 2] uint8: the first of two in the low half, its sign on top."""
    nibbles = torch.bucketize(codes.abs(), _E2M1) + 8 * torch.signbit(codes).long()
    return (nibbles[:, ::2] + 16 * nibbles[:, 1::2]).to(torch.uint8)


def layout_config(
    tensors: Mapping[str, Tensor], names: Sequence[str], spec: RoundingSpec
) -> dict[str, Any]:
    """`quantization_config` of config.json: weights alone are quantised, in layers of `names`."""
    kind, scales = spec.rounding, spec.scales
    weights: dict[str, Any] = {"dynamic": False, "symmetric": True}
    weights["type"] = "int" if kind.startswith("int") else "float"
    weights["num_bits"] = 8 if kind in ("fp8", "int8") else 4
    if kind == "fp8":
        weights["strategy"] = scales
        weights |= {"block_structure": [BLOCK, BLOCK]} if scales == "block" else {}
    elif kind in BLOCK_FORMATS:
        weights["strategy"] = "tensor_group" if kind == "nvfp4" else "group"
        weights["group_size"] = BLOCK_FORMATS[kind]
        weights["scale_dtype"] = "torch.float8_e4m3fn" if kind == "nvfp4" else "torch.uint8"
    elif scales == "block":
        weights |= {"strategy": "group", "group_size": BLOCK}
    else:  # one scale a tensor is repeated for each channel
        weights["strategy"] = "channel"
    plain = [n for n, t in tensors.items() if t.ndim == 2 and n not in set(names)]
    modules = sorted({"lm_head", *(n.removesuffix(".weight") for n in plain)})
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUTS[kind],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": modules,
        "config_groups": {
            "group_0": group | {"input_activations": None, "output_activations": None}
        },
    }
