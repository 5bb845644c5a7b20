"""Whether the models of a run fit its settings and each other, by config.json, file names and tokenizers alone."""

from __future__ import annotations

from typing import Any

from rlcore.config.schema import ActorConfig, FreshModel, RunConfig
from rlcore.errors import UserError
from rlcore.models import load_tokenizer
from rlcore.rollout.checks import attention_heads, check_heads, check_length
from rlcore.rollout.model_folder import read_config, weight_files
from rlcore.runtime import options


def check_models(config: RunConfig, tokenizer: Any) -> None:
    """Check the policy and every draft. `tokenizer`: the policy's. Raises UserError."""
    policy = _policy(config, tokenizer)
    size, k = int(policy["vocab_size"]), config.rollout.logprobs_k
    if k > size:
        raise UserError(
            f"rollout.logprobs_k={k} is more than the model's vocabulary of {size} tokens: choose 0 to {size}."
        )
    for label, actor in config.actor.items():
        model = policy
        if actor.draft_path is not None:
            model = _draft(config, f"actor.{label}.draft_path", actor.draft_path)
            _check_vocabularies(config, label, actor.draft_path, int(model["vocab_size"]), size, tokenizer)
        elif actor.draft_fresh is not None:
            model = _fresh(actor.draft_fresh, tokenizer)
            if model["vocab_size"] != size:
                raise UserError(
                    f"actor.{label}.draft_fresh.vocab_size={actor.draft_fresh.vocab_size} makes a vocabulary of "
                    f"{model['vocab_size']} tokens, and the policy's has {size}: give both models the same."
                )
        _check_heads(f"actor.{label}", model, actor)
    plain = options.evaluation_actor(config)
    if plain is not None:
        _check_heads(f"evaluation.dense_actor, as actor.{next(iter(config.actor))}", policy, plain)


def _policy(config: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """What is read of a config.json: the folder's, or what a fresh model's will be."""
    if config.model.path is None:
        assert config.model.fresh is not None
        return _fresh(config.model.fresh, tokenizer)
    weight_files(config.model.path)
    policy = read_config(config.model.path)
    check_length(policy, config.model.max_len, whose=f"model.path={config.model.path}")
    return policy


def _draft(config: RunConfig, key: str, path: str) -> dict[str, Any]:
    draft = read_config(path, key=key)
    weight_files(path, key=key)
    check_length(draft, config.model.max_len, whose=f"{key}={path}")
    return draft


def _fresh(fresh: FreshModel, tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": fresh.vocab_size or len(tokenizer),
        "num_attention_heads": fresh.heads,
        "num_key_value_heads": fresh.kv_heads,
    }


def _check_heads(key: str, model: dict[str, Any], actor: ActorConfig) -> None:
    if actor.tensor_parallel > 1:
        check_heads(attention_heads(model), actor.tensor_parallel, key=key)


def _check_vocabularies(config: RunConfig, label: str, path: str, size: int, wanted: int, tokenizer: Any) -> None:
    """A draft's tokens mean what the policy's do, and it ends a response with the same one."""
    key = f"actor.{label}.draft_path"
    drafted = load_tokenizer(path, key=key)
    differing = len(set(drafted.get_vocab().items()) ^ set(tokenizer.get_vocab().items()))
    why = ""
    if differing:
        why = f"{differing} entries of their tokenizers differ"
    elif drafted.eos_token_id != tokenizer.eos_token_id:
        why = f"its end of sequence is {drafted.eos_token}, the policy's {tokenizer.eos_token}"
    elif size != wanted:
        why = f"its vocab_size is {size}, the policy's {wanted}"
    if why:
        raise UserError(
            f"{key}={path} has another vocabulary than model.path={config.model.path} ({why}): ratios between them "
            "mean nothing; choose a draft with the policy's tokenizer and vocab_size."
        )
