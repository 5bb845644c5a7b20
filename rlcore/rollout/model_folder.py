"""Reading a Hugging Face model folder without loading a model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore.errors import UserError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


def read_config(model_path: str | Path, *, key: str = "model.path") -> dict[str, Any]:
    """The folder's config.json. Raises UserError, naming `key`, when there is none with a vocab_size."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise UserError(f"{key}={model_path} holds no config.json: give a local Hugging Face model folder.")
    try:
        config = dict(json.loads(path.read_text()))
        int(config["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{key}={model_path} holds no config.json with a vocab_size: {type(e).__name__}.") from e
    return config


def read_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every weight, tied ones once, from the safetensors headers alone.

    Raises UserError when the folder holds no safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(model_path):
        with file.open("rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(size))
        shapes.update({n: tuple(e["shape"]) for n, e in header.items() if n != "__metadata__"})
    return _tied_once(model_path, shapes)


def read_weights(model_path: str | Path) -> dict[str, torch.Tensor]:
    """All weights of the folder on the CPU, tied ones once. Raises UserError as `read_shapes` does."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(model_path):
        tensors.update(load_file(file))
    return _tied_once(model_path, tensors)


def weight_files(model_path: str | Path, *, key: str = "model.path") -> list[Path]:
    """The folder's safetensors files; weights in no other format are ever read. Raises UserError when there is none."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise UserError(f"{key}={model_path} holds no .safetensors file: save the model in that format.")
    return files


def _tied_once(model_path: str | Path, named: dict[str, _T]) -> dict[str, _T]:
    if read_config(model_path).get("tie_word_embeddings"):
        named.pop("lm_head.weight", None)
    return named
