"""What can be refused before an engine starts, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.models import load_tokenizer
from rlcore.rollout.model_folder import read_config


def check_length(config: dict[str, Any], max_len: int, *, whose: str = "the model") -> None:
    """Raise UserError when the model was not made for `max_len` positions."""
    limit = config.get("max_position_embeddings")
    if limit is not None and max_len > limit:
        raise UserError(f"model.max_len={max_len} is beyond the {limit} positions of {whose}: choose at most {limit}.")


def check_heads(heads: tuple[int, int], tensor_parallel: int, *, key: str = "actor") -> None:
    """Raise UserError when `heads`, attention and KV, cannot be shared out evenly."""
    if heads[0] % tensor_parallel or (heads[1] % tensor_parallel and tensor_parallel % heads[1]):
        raise UserError(
            f"{key}.tensor_parallel={tensor_parallel} does not share out the model's {heads[0]} attention heads and "
            f"{heads[1]} KV heads evenly: choose a divisor of {heads[0]}."
        )


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


def attention_heads(config: dict[str, Any]) -> tuple[int, int]:
    """Attention heads and KV heads of a model's config.json."""
    heads = int(config["num_attention_heads"])
    return heads, int(config.get("num_key_value_heads") or heads)


def check_settings(
    *,
    on_cpu: bool,
    tensor_parallel: int,
    heads: tuple[int, int],
    sparse: bool,
    quantization: str | None,
    kv_cache_dtype: str,
    rounding: str,
    max_batched_tokens: int | None,
    max_len: int,
) -> None:
    """Raise UserError for settings that this platform or this engine does not support. `heads`: attention and KV."""
    check_heads(heads, tensor_parallel)
    if sparse and tensor_parallel != 1:
        raise UserError(
            f"actor.tensor_parallel={tensor_parallel} does not go with actor.kind=sparse, whose attention lives in "
            "one process: choose 1 and raise actor.count."
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
