"""Adapters as the folders that vLLM loads them from. Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

# what vLLM can lay an adapter's buffers out for (vllm/config/lora.py: MaxLoRARanks)
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def buffer_rank(rank: int) -> int:
    """The smallest of vLLM's ranks that holds an adapter of this one."""
    return min(r for r in RANKS if r >= rank)


@contextmanager
def adapter_folder(tensors: Mapping[str, torch.Tensor], rank: int) -> Iterator[str]:
    """A PEFT folder with these factors (`weights/adapters.py`), for processes on this machine."""
    with TemporaryDirectory(prefix="rlcore-adapter-") as folder:
        named = {f"base_model.model.{n}": t.contiguous() for n, t in tensors.items()}
        save_file(named, str(Path(folder) / "adapter_model.safetensors"))
        modules = sorted({n.split(".lora_")[0].rpartition(".")[2] for n in tensors})
        # alpha = rank: B has the scale already
        config = {"r": rank, "lora_alpha": rank, "target_modules": modules, "peft_type": "LORA"}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        yield folder
