"""Low-rank adapters on linear layers of a causal LM. The file that imports PEFT.

The base weights are frozen; what is published and exported is W + scale * B A under W's Hugging Face name, so that an
engine serves one plain set of tensors and nothing of an adapter can fail to arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from rlcore.errors import UserError

_ADAPTER = "default"
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """rank r and alpha of the adapters (their product B A is scaled by alpha / r); names of the adapted linears."""

    rank: int
    alpha: float
    targets: Sequence[str]

    def peft(self) -> LoraConfig:
        """PEFT's own configuration of the same."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides it: any number will do
            target_modules=list(self.targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )


def add_adapters(lm: nn.Module, spec: LoraSpec, *, seed: int, key: str) -> None:
    """Freeze `lm` and put adapters on its linear layers named in `spec`, in place. B starts at 0: nothing changes yet.

    A is drawn from `seed`, so every rank makes the same. `key`: configuration section for the error. Raises UserError
    when no layer bears such a name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(spec.peft(), lm)
        except ValueError as e:
            raise UserError(f"{key}.targets={list(spec.targets)} names no linear layer of the model.") from e


def plain_name(name: str) -> str:
    """The Hugging Face name of a parameter of an adapted model."""
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return f".{_ADAPTER}." in name


def adapted_layers(lm: nn.Module) -> dict[str, LoraLayer]:
    """Hugging Face name of each adapted weight -> its layer."""
    return {f"{name}.weight": m for name, m in lm.named_modules() if isinstance(m, LoraLayer)}


def factors(layer: LoraLayer) -> list[nn.Parameter]:
    """A [r, in] and B [out, r]."""
    return [m[_ADAPTER].weight for m in (layer.lora_A, layer.lora_B)]  # type: ignore[misc]  # linears


def merged(weight: Tensor, layer: LoraLayer) -> Tensor:
    """W + scale * B A, summed in float32 and rounded once to W's dtype. Factors must be whole (gathered)."""
    a, b = (f.detach().float() for f in factors(layer))
    return (weight.float() + layer.scaling[_ADAPTER] * (b @ a)).to(weight.dtype)


def save_adapter(folder: str | Path, adapters: Mapping[str, Tensor], spec: LoraSpec, base_model: str) -> None:
    """Write adapters (parameter names of the adapted model) as a folder that PEFT's `from_pretrained` opens."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    state = {f"base_model.model.{n.replace(f'.{_ADAPTER}.', '.')}": t.contiguous() for n, t in adapters.items()}
    save_file(state, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = spec.peft()
    config.base_model_name_or_path, config.inference_mode = base_model, True
    config.save_pretrained(str(out))
