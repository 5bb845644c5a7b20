"""Requirements on a model folder that is to be sampled from, checked before an engine starts.

Preflight and the engine call the same functions, so that each rule is stated once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.models.folder import is_recurrent, read_config
from rlcore.models.text import load_tokenizer
from rlcore.rollout.specs import ActorSpec, EngineJob


def check_model(job: EngineJob) -> None:
    """Raise UserError if the job's model cannot serve its episodes, ranks or policy."""
    config = read_config(job.model_path)
    check_length(config, job.max_len)
    check_recurrent(config, job.actor, key=job.key, path=job.model_path)
    check_width(config, job.actor, key=job.key, path=job.model_path)
    check_vocabulary(job.model_path, job.policy_path)
    if (proposing := job.actor.speculate) is not None:
        key, other = f"{job.key}.speculate.path", read_config(proposing.path)
        check_length(other, job.max_len, whose=f"{key}={proposing.path}")
        check_width(other, job.actor, key=job.key, path=proposing.path)
        check_recurrent(other, job.actor, key=job.key, path=proposing.path)
        check_vocabulary(proposing.path, job.model_path, key=key)
    if job.actor.tensor_parallel > 1:
        check_heads(attention_heads(config), job.actor.tensor_parallel, key=job.key)


# Families with recurrent layers whose engines on a CPU equal transformers (docs/models.md), and why
# vLLM 0.32 cannot serve others, by model_type
RECURRENT_ON_CPU = ("falcon_h1", "granitemoehybrid", "lfm2", "qwen3_5_text", "qwen3_next")
REFUSED_ON_CPU = {
    "jamba": "its build for CPUs lacks the kernel selective_scan_fwd",
    "bamba": "it has no implementation of it since 0.23",
}


# Why engines of vLLM 0.32 on CPUs do not serve other models right, likewise
WRONG_ON_CPU = {"cohere2": "its log-probs are up to 1.4 nats off"}
# Settings of config.json, by model_type, that vLLM 0.32 or transformers does not read, or that were
# not compared, with the values that are proven: the first where a folder has none
_ALL_STEPS = {"time_step_limit": ([0.0, float("inf")],)}
_GATED = {
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "layer_scale": (False,),
    "is_causal": (True,),
    "qkv_bias": (False,),
    "hidden_act": ("silu",),
    "rope_type": ("default",),
}
_WHOLE = {"partial_rotary_factor": (1.0,), "rope_type": ("default",)}
_NEXT: dict[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
UNREAD: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "falcon_h1": {
        "mamba_norm_before_gate": (False,),
        "attn_rotary_emb": (None,),
        "rope_type": ("default",),
        **_ALL_STEPS,
    },
    "granitemoehybrid": {"mamba_n_groups": (1,), **_WHOLE, **_ALL_STEPS},
    "lfm2": {"tie_word_embeddings": (True,), "tie_embedding": (True,), **_WHOLE},
    "olmoe": {"norm_topk_prob": (False,), "clip_qkv": (None,), "rms_norm_eps": (1e-5,)},
    "qwen2_moe": {"use_sliding_window": (False,), "qkv_bias": (True,)},
    "qwen3_5_text": _GATED,
    "qwen3_next": {"tie_word_embeddings": (False,), **_NEXT, **_GATED},
}


def check_recurrent(
    config: Mapping[str, Any], actor: ActorSpec, *, key: str, path: str | Path
) -> None:
    """Raise UserError where an engine would compute a model wrong, or was not compared: settings
    with recurrent layers, families on a CPU, and settings of a model that the engine ignores."""
    recurrent, kind = is_recurrent(config), str(config.get("model_type"))
    unproven = {
        f"{key}.tensor_parallel={actor.tensor_parallel}": actor.tensor_parallel > 1 and "use 1",
        f"{key}.kind=sparse": actor.sparse is not None and "choose actor=bf16",
        f"{key}.kind=fp8": actor.quantised_by_engine and "choose actor=bf16",
        f"{key}.speculate": actor.speculate is not None and "remove it",
        f"{key}.fp8_kv_cache=true": actor.fp8_kv_cache and "use false",
        f"{key}.activations={actor.activations}": actor.activations != "none" and "use none",
        f"{key}.dtype=bfloat16": actor.on_cpu and actor.dtype == "bfloat16" and "use float32",
        f"{key}.kv_on_update=keep": actor.kv_on_update == "keep" and "use recompute",
    }
    refuse_with_states(config, path, unproven)
    if actor.engine != "vllm":
        return
    read = {**config, **(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    if kind == "falcon_h1":  # whose gated norm is off by default, and on would come before the gate
        normed = config.get("mamba_rms_norm", False)
        read["mamba_norm_before_gate"] = normed and config.get("mamba_norm_before_gate", True)
    for name, (computed, *alike) in UNREAD.get(kind, {}).items():
        if (given := _plain(read.get(name, computed))) not in (computed, *alike):
            raise UserError(
                f"{key}.engine=vllm is proven for a {kind} with {name}={json.dumps(computed)}, and "
                f"{path} has {json.dumps(given)}: choose another model."
            )
    if not actor.on_cpu:
        return
    if kind in WRONG_ON_CPU:
        raise UserError(
            f"{key}.engine=vllm cannot serve {path} (model_type={kind}) on a CPU, with vLLM 0.32: "
            f"{WRONG_ON_CPU[kind]}; choose a model of another family."
        )
    if recurrent and kind not in RECURRENT_ON_CPU:
        why = REFUSED_ON_CPU.get(kind, "it was not compared with transformers")
        raise UserError(
            f"{key}.engine=vllm cannot serve {path} on a CPU, a model with recurrent layers "
            f"(model_type={kind}), with vLLM 0.32: {why}; choose a model whose layers all attend, "
            f"or one of {', '.join(RECURRENT_ON_CPU)}."
        )


def refuse_with_states(
    config: Mapping[str, Any], path: str | Path, used: Mapping[str, str | bool]
) -> None:
    """Raise UserError for the first setting that no test has shown with recurrent layers, where the
    model has some. `used`: remedies by setting, empty where it is not used."""
    for setting, remedy in used.items():
        if remedy and is_recurrent(config):
            raise UserError(
                f"{setting} is not proven with recurrent layers, which {path} has: {remedy}."
            )


def _plain(value: Any) -> Any:
    """A setting with infinite numbers as such, for which transformers writes {"__float__": ...}."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def check_width(config: Mapping[str, Any], actor: ActorSpec, *, key: str, path: str | Path) -> None:
    """Raise UserError for a model whose heads have a width that the engine's attention lacks on a
    CPU. Latent attention (MLA) has kernels of another width."""
    widths = actor.facts(key).cpu_heads if actor.on_cpu else ()
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    width = config.get("head_dim") or (heads and hidden and hidden // heads)
    if not widths or not width or config.get("kv_lora_rank") or width in widths:
        return
    raise UserError(
        f"{key}.engine={actor.engine} cannot serve {path} on a CPU: its heads are {width} wide "
        f"(head_dim), and the engine's attention has {', '.join(map(str, widths))}; choose a model "
        f"of such a width, or set {key}.num_gpus=1."
    )


def check_length(config: dict[str, Any], max_len: int, *, whose: str = "the model") -> None:
    """Raise UserError for a model with fewer than `max_len` positions, and for one whose rotations
    depend on a batch's longest sequence in transformers and not in vLLM."""
    # LLaDA's form has another key for them
    limit = config.get("max_position_embeddings", config.get("max_sequence_length"))
    if limit is not None and max_len > limit:
        raise UserError(
            f"model.max_len={max_len} is beyond the {limit} positions of {whose}: choose at most "
            f"{limit}."
        )
    for rope in _long_ropes(config):
        short = int(rope["original_max_position_embeddings"])
        if max_len > short:
            raise UserError(
                f"model.max_len={max_len} is beyond the {short} positions up to which {whose} has "
                "one set of factors (rope_type=longrope): its log-probs would depend on the "
                f"longest sequence of the batch; choose at most {short}."
            )
        factor = rope.get("factor")
        if factor is not None and limit is not None and abs(factor * short / limit - 1) > 1e-3:
            raise UserError(
                f"model.max_len={max_len}: {whose} scales its rotations by factor={factor:g} "
                f"(rope_type=longrope), which engines take for {limit}/{short}, the longest by the "
                "first positions: remove the factor from config.json if it is not meant."
            )


def _long_ropes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The longrope scalings of a model, with the positions up to which each has short factors."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # a family may have others in each kind of layer
    ropes = [given, *(part for part in given.values() if isinstance(part, Mapping))]
    key = "original_max_position_embeddings"
    # as transformers: the configuration's own number stands
    long = [
        {**r, key: config.get(key, r.get(key))}
        for r in ropes
        if r.get("rope_type", r.get("type")) in ("longrope", "su")
    ]
    return [r for r in long if r[key] is not None]


def check_heads(heads: tuple[int, int], tensor_parallel: int, *, key: str = "actor") -> None:
    """Raise UserError if `heads` (attention, KV) cannot be divided evenly among the ranks.

    Fewer KV heads than ranks are copied, so either number may divide the other.
    """
    if heads[0] % tensor_parallel or (heads[1] % tensor_parallel and tensor_parallel % heads[1]):
        raise UserError(
            f"{key}.tensor_parallel={tensor_parallel} does not divide the model's {heads[0]} "
            f"attention heads and {heads[1]} KV heads evenly: choose a divisor of {heads[0]}."
        )


def check_vocabulary(
    model_path: str | Path, policy_path: str | Path | None, *, key: str = "actor.draft_path"
) -> None:
    """Raise UserError if tokenizer and model do not match, or actor and policy differ in
    vocabulary."""
    size = int(read_config(model_path)["vocab_size"])
    vocabulary = load_tokenizer(model_path).get_vocab()
    if (largest := max(vocabulary.values())) >= size:
        raise UserError(
            f"model.path={model_path}: its tokenizer has token id {largest}, its model only {size} "
            "tokens; give a model and a tokenizer that belong together."
        )
    if policy_path is None or Path(policy_path).resolve() == Path(model_path).resolve():
        return
    other = int(read_config(policy_path)["vocab_size"])
    if other != size or load_tokenizer(policy_path).get_vocab() != vocabulary:
        raise UserError(
            f"{key}={model_path} has another vocabulary ({size} tokens) than the policy "
            f"{policy_path} ({other} tokens): choose a model with the policy's tokenizer and "
            "vocab_size."
        )


def attention_heads(config: dict[str, Any]) -> tuple[int, int]:
    """Attention heads and KV heads of a model's config.json."""
    heads = int(config["num_attention_heads"])
    return heads, int(config.get("num_key_value_heads") or heads)
