"""What can be refused before an engine starts, in one sentence, reading nothing but the model folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.models import load_tokenizer


def read_config(model_path: str | Path) -> dict[str, Any]:
    """The folder's config.json. Raises UserError when there is none."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise UserError(f"model.path={model_path} holds no config.json: give a local Hugging Face model folder.")
    return json.loads(path.read_text())


def read_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every stored tensor, from the safetensors headers alone.

    Raises UserError when the folder holds no safetensors file.
    """
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise UserError(f"model.path={model_path} holds no .safetensors file: save the model in that format.")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file.open("rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(size))
        shapes.update({n: tuple(e["shape"]) for n, e in header.items() if n != "__metadata__"})
    return shapes


def check_length(config: dict[str, Any], max_len: int) -> None:
    """Raise UserError when the model was not made for `max_len` positions."""
    limit = config.get("max_position_embeddings")
    if limit is not None and max_len > limit:
        raise UserError(f"model.max_len={max_len} is beyond the model's {limit} positions: choose at most {limit}.")


def check_vocabulary(model_path: str | Path, policy_path: str | Path | None) -> None:
    """Raise UserError when the tokenizer does not fit the model, or the actor's vocabulary not the policy's."""
    size = int(read_config(model_path)["vocab_size"])
    vocabulary = load_tokenizer(model_path).get_vocab()
    if (largest := max(vocabulary.values())) >= size:
        raise UserError(
            f"model.path={model_path}: its tokenizer has token id {largest}, its model only {size} tokens; "
            f"give a model and a tokenizer that belong together."
        )
    if policy_path is None or Path(policy_path).resolve() == Path(model_path).resolve():
        return
    other = int(read_config(policy_path)["vocab_size"])
    if other != size or load_tokenizer(policy_path).get_vocab() != vocabulary:
        raise UserError(
            f"actor.draft_path={model_path} has another vocabulary ({size} tokens) than the policy {policy_path} "
            f"({other} tokens): choose a draft model with the policy's tokenizer and vocab_size."
        )
