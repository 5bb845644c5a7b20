"""Low-rank adapters on linear layers of a causal LM. The file that imports PEFT, where there are
adapters: it takes most of a second.

The base weights are frozen. What is exported, and with publish=merged published, is W + scale * B A
under W's Hugging Face name. An engine then serves one plain set of tensors. With publish=adapter
the factors travel alone (`weights/adapters.py`), and the engine computes PEFT's forward, x W +
scale * (x A) B.

In bfloat16 the sum is rounded, and an update smaller than half a unit in W's last place is lost. So
that the learner's policy is the published one, its own forward then multiplies by the same rounded
sum where that is published. Otherwise, and in float32, it is PEFT's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlcore.errors import UserError
from rlcore.files import follow_umask
from rlcore.learner.engines.deepspeed_patches import ADAPTED_LINEAR
from rlcore.learner.specs import LoraSpec
from rlcore.weights.adapters import factor_names

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"
_BASE = ".base_layer."


def _peft(spec: LoraSpec) -> LoraConfig:
    """PEFT's configuration of the specification."""
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # PEFT divides it: any number is accepted
        target_modules=list(spec.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _linear(lm: nn.Module) -> list[str]:
    """Last parts of the names of a model's linear layers, but for its head."""
    names = (name for name, module in lm.named_modules() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name in names} - {"lm_head"})


def add_adapters(lm: nn.Module, spec: LoraSpec, *, seed: int, key: str) -> None:
    """Freeze `lm` and put adapters on its linear layers named in `spec`, in place.

    B starts at 0, so nothing changes yet; A is drawn from `seed`, so every rank makes the same.
    `key`: configuration section for the error. Raises UserError when no layer has such a name.
    """
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(_peft(spec), lm)
        except ValueError as e:
            raise UserError(
                f"{key}.targets={list(spec.targets)} names no linear layer of the model: choose "
                f"out of {', '.join(_linear(lm))}."
            ) from e
    if spec.publish == "adapter":
        return  # the engine computes what PEFT does
    # float32 keeps PEFT's forward: there the sum is rounded as finely as everything else
    for layer in adapted_layers(lm).values():
        base = layer.get_base_layer()
        if isinstance(base, nn.Linear) and base.weight.dtype == torch.bfloat16:
            ADAPTED_LINEAR.replace(MethodType(_forward_as_published, layer), of=layer)


def plain_name(name: str) -> str:
    """The Hugging Face name of a parameter of an adapted model."""
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return f".{_ADAPTER}." in name


def adapted_layers(lm: nn.Module) -> dict[str, LoraLayer]:
    """Hugging Face name of each adapted weight -> its layer."""
    if "peft" not in sys.modules:
        return {}  # nothing can have put adapters on it
    from peft.tuners.lora import LoraLayer

    return {f"{name}.weight": m for name, m in lm.named_modules() if isinstance(m, LoraLayer)}


def factors(layer: LoraLayer) -> list[nn.Parameter]:
    """A [r, in] and B [out, r]."""
    linears: list[Any] = [layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]]
    return [linear.weight for linear in linears]


def published_factors(name: str, layer: LoraLayer) -> dict[str, tuple[nn.Parameter, float]]:
    """Names of the factors of the adapted weight `name` as they are published, and the factor by
    which each is multiplied first (`weights/adapters.py`)."""
    a, b = factors(layer)
    name_a, name_b = factor_names(name)
    return {name_a: (a, 1.0), name_b: (b, layer.scaling[_ADAPTER])}


def merged(weight: Tensor, layer: LoraLayer) -> Tensor:
    """W + scale * B A, summed in float32 and rounded once to W's dtype.

    Factors must be whole (gathered).
    """
    a, b = (f.detach() for f in factors(layer))
    return _merge(weight, a, b, layer.scaling[_ADAPTER])


def _merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


class _AsPublished(torch.autograd.Function):
    """x W'^T with W' the merged weight; the gradients at A and B belong to the unrounded sum.

    W' is formed anew in the backward pass: it would be a second copy of the model.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return x @ _merge(weight, a, b, scale).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        d_x = grad @ _merge(weight, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        flat_x, flat_grad = x.flatten(0, -2), grad.flatten(0, -2)
        d_a = ctx.scale * ((flat_grad @ b).t() @ flat_x)
        d_b = ctx.scale * (flat_grad.t() @ (flat_x @ a.t()))
        return d_x, None, d_a, d_b, None


def _forward_as_published(layer: LoraLayer, x: Tensor) -> Tensor:
    """Forward of an adapted linear layer through its merged weight."""
    base = layer.get_base_layer()
    out = _AsPublished.apply(x, base.weight, *factors(layer), layer.scaling[_ADAPTER])
    return out if base.bias is None else out + base.bias


def save_adapter(
    folder: str | Path, adapters: Mapping[str, Tensor], spec: LoraSpec, base_model: str
) -> None:
    """Write adapters (parameter names of the adapted model) as a folder that PEFT's
    `from_pretrained` opens."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    state = {
        f"base_model.model.{n.replace(f'.{_ADAPTER}.', '.')}": t.contiguous()
        for n, t in adapters.items()
    }
    save_file(state, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    follow_umask(out / "adapter_model.safetensors")
    config = _peft(spec)
    config.base_model_name_or_path, config.inference_mode = base_model, True
    config.save_pretrained(str(out))
