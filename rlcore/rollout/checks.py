"""What can be refused before an engine starts, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.models import load_tokenizer
from rlcore.rollout.model_folder import read_config


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


def check_settings(
    *,
    on_cpu: bool,
    tensor_parallel: int,
    quantization: str | None,
    kv_cache_dtype: str,
    rounding: str,
    max_batched_tokens: int | None,
    max_len: int,
) -> None:
    """Raise UserError for settings that this platform or this engine does not support."""
    if tensor_parallel != 1:
        raise UserError(
            f"actor.tensor_parallel={tensor_parallel} is not supported yet: the arrival check of weights is exact for "
            f"1 only; choose 1 and raise actor.count instead."
        )
    if on_cpu and (quantization is not None or kv_cache_dtype != "auto"):
        raise UserError(
            "actor.kind=fp8 with vLLM's FP8 needs a GPU: on CPU choose actor.rounding=fp8 and actor.fp8_kv_cache=false."
        )
    if quantization is not None and rounding != "none":
        raise UserError(f"actor.rounding={rounding} on top of vLLM's FP8 rounds twice: choose actor.rounding=none.")
    if on_cpu and max_batched_tokens is not None and max_batched_tokens < max_len:
        raise UserError(
            f"actor.max_batched_tokens={max_batched_tokens} does not hold one sequence, which is never cut on CPU: "
            f"choose at least model.max_len={max_len}."
        )
