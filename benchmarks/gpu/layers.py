"""The part `layer` of `check.py`: one layer of an 8B model, forward and backward, as the learner
computes it now (eager), compiled as a whole and in pieces, with linear maps that multiply FP8
numbers, and with Liger's kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from setting import NO_LIGER, NO_TORCHAO, Row, Setting
from sparse_forward import median_ms

EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # bfloat16, dense


def layer(s: Setting, shape: dict[str, int]) -> None:
    """A row for each way of computing it; the first is what the others are compared with."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    width = shape if s.small else EIGHT_B
    length = s.contexts[-1] if s.small else 16384
    config = Qwen3Config(**{**width, "num_hidden_layers": 1}, attn_implementation="sdpa")
    torch.manual_seed(0)
    x = torch.randn(1, length, config.hidden_size, device=s.device, dtype=s.dtype)
    with torch.device(s.device):
        places = torch.arange(length)[None]
        angles = Qwen3RotaryEmbedding(config)(x, places)
    found: dict[str, list[torch.Tensor]] = {}
    for name, make in WAYS.items():
        if (lacking := lacks(name, s)) is not None:
            s.add("layer", {"by": name, "what": lacking})
            continue
        run = passes(make(config, s), x, angles)
        found[name] = run()
        took = median_ms(run, synchronise=not s.small)
        s.add(
            "layer", {"by": name, "positions": length, **told(config, length, took), **gaps(found)}
        )


def plain(config: Any, s: Setting) -> Any:
    """Random weights, equal each time."""
    from transformers.models.qwen3 import modeling_qwen3

    torch.manual_seed(1)
    with torch.device(s.device):
        return modeling_qwen3.Qwen3DecoderLayer(config, 0).to(s.dtype)


def compiled(config: Any, s: Setting) -> Any:
    return torch.compile(plain(config, s), backend="aot_eager" if s.small else "inductor")


def in_fp8(config: Any, s: Setting) -> Any:
    """`learner.fp8=tensor`."""
    from rlcore.learner.layer_kernels import float8_layers

    module = plain(config, s)
    float8_layers(module, "tensor", emulate=s.small)
    return module


def in_fp8_compiled(config: Any, s: Setting) -> Any:
    """As it is fastest: roundings and products in fewer kernels."""
    return torch.compile(in_fp8(config, s), backend="aot_eager" if s.small else "inductor")


def in_pieces(module: Any, s: Setting) -> Any:
    """`learner.layers=compiled`."""
    from rlcore.learner.layer_kernels import compiled_layers

    compiled_layers(module, torch.device(s.device))
    return module


def with_liger(config: Any, s: Setting) -> Any:
    """Its norms, rotary embedding and SwiGLU; replaces transformers' own for the process."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
    return plain(config, s)


WAYS: dict[str, Callable[[Any, Setting], Any]] = {
    "eager": plain,
    "compiled": compiled,
    "compiled in pieces": lambda config, s: in_pieces(plain(config, s), s),
    "FP8": in_fp8,
    "FP8, compiled": in_fp8_compiled,
    "FP8, compiled in pieces": lambda config, s: in_pieces(in_fp8(config, s), s),
    "Liger": with_liger,  # last
}


def lacks(name: str, s: Setting) -> str | None:
    """Why a way cannot be tried here."""
    if name == "Liger" and not s.has_liger:
        return NO_LIGER
    if name.startswith("FP8") and importlib.util.find_spec("torchao") is None:
        return NO_TORCHAO
    return None


def passes(
    module: Any, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], list[torch.Tensor]]:
    """A function that gives the output, the gradient of the input, and of the weights."""
    torch.manual_seed(2)
    weight = torch.randn_like(x)

    def run() -> list[torch.Tensor]:
        given = x.detach().requires_grad_()
        out = module(given, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        wanted = [given, *module.parameters()]
        grads = torch.autograd.grad((out * weight).sum(), wanted)
        return [out.detach(), *grads]

    return run


def told(config: Any, length: int, ms: float) -> Row:
    """Milliseconds, and the share of the card's peak: 6 FLOPs a weight and position, and attention
    over half of the square, forward once and backward twice."""
    heads, dim = config.num_attention_heads, config.head_dim
    projections = config.hidden_size * dim * 2 * (heads + config.num_key_value_heads)
    weights = projections + 3 * config.hidden_size * config.intermediate_size
    flops = 6 * weights * length + 3 * 2 * heads * dim * length**2
    row: Row = {"forward and backward ms": ms}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((p for card, p in PEAKS.items() if card in name), None)
    return row | ({} if peak is None else {"share of peak": flops / (ms / 1000) / peak})


def gaps(found: dict[str, list[torch.Tensor]]) -> Row:
    """How far the last way is from the first, relative to the norm: output, and all gradients."""
    first, last = (list(found.values())[i] for i in (0, -1))
    if first is last:
        return {}
    apart = [float((a - b).float().norm() / a.float().norm()) for a, b in zip(first, last)]
    return {"output apart": apart[0], "gradients apart": max(apart[1:])}
