"""Checks, by config.json, file names and tokenizers alone, that the models of a run fit its
settings and each other."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.attention.specs import SparseSpec
from rlcore.commands.derived import evaluation_actor
from rlcore.config.combinations import FEATURES
from rlcore.config.parts import PARTS
from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.models.folder import (
    ATTENTION_FILE,
    is_masked,
    read_config,
    refuse_odd_logits,
    weight_files,
)
from rlcore.models.routes import route_bytes
from rlcore.models.specs import FreshModelSpec
from rlcore.models.text import load_tokenizer
from rlcore.registry import load_object
from rlcore.rollout.checks import (
    attention_heads,
    check_heads,
    check_length,
    check_recurrent,
    check_width,
    refuse_with_states,
)
from rlcore.rollout.specs import ActorSpec
from rlcore.serialization import record_bytes
from rlcore.spec import refuse
from rlcore.weights.experts import FAMILIES

# (config.json, whose=): raises UserError for a masked-diffusion model that is not supported
MASKED_FOLDER = "rlcore.extras.diffusion.folder:check_masked"
# num_experts, num_local_experts, n_routed_experts, moe_num_experts: of all model families
EXPERTS = re.compile(r"(?:moe_)?(?:num|n)_(?:\w+_)?experts")


# features of `config/combinations.py` that no test has shown with recurrent layers, and remedies
_WITHOUT_STATES = {
    "ZeRO-3": "use 0, 1 or 2",
    **dict.fromkeys(("parts of sequences", "parts of layers", "parts of experts"), "use 1"),
    "FP8 products": "use none",
    "adapters published alone": "use merged",
    "trained draft": "leave it null",
    "bitwise": "use false",
    "GPUs in turns": "use false",
    "rounding learner": "leave it null",
    "kept passes": "use 0",
}


def check_models(config: RunConfig, tokenizer: Any) -> int:
    """Check the policy and every draft; returns the size of their vocabulary. `tokenizer`: the
    policy's. Raises UserError."""
    policy = _policy(config, tokenizer)
    size, unproven = int(policy["vocab_size"]), _unproven_with_states(config)
    refuse_with_states(policy, config.model.path or "the fresh model", unproven)
    for label, actor in config.actor.items():
        model = policy
        if actor.draft_path is not None:
            model = _draft(config, label, actor.draft_path, size, tokenizer)
        elif actor.draft_fresh is not None:
            model = _fresh(actor.draft_fresh, tokenizer)
            refuse(
                model["vocab_size"] != size,
                f"actor.{label}.draft_fresh.vocab_size={actor.draft_fresh.vocab_size} makes a "
                f"vocabulary of {model['vocab_size']} tokens, and the policy's has {size}: give "
                "both models the same.",
            )
        path = actor.draft_path or config.model.path or "the fresh model"
        _check_heads(f"actor.{label}", model, actor, path)
        check_recurrent(model, actor, key=f"actor.{label}", path=path)
        refuse_with_states(model, path, unproven)
        if (proposing := actor.speculate) is not None:
            key, what = f"actor.{label}.speculate.path", "tokens that it proposes"
            proposer = _compatible(config, key, proposing.path, size, tokenizer, what)
            check_width(proposer, actor, key=f"actor.{label}", path=proposing.path)
            check_recurrent(proposer, actor, key=f"actor.{label}", path=proposing.path)
    for part in PARTS:
        held = {own.folder: own for own in part.engines(config)}
        for key, path in part.models(config).items():
            model = _compatible(config, key, path, size, tokenizer, "distances to it")
            if path in held:
                _check_heads(held[path].key, model, held[path].spec, path)
                check_recurrent(model, held[path].spec, key=held[path].key, path=path)
    plain = evaluation_actor(config)
    if plain is not None:
        key = f"evaluation.dense_actor, as actor.{next(iter(config.actor))}"
        _check_heads(key, policy, plain, config.model.path or "the fresh model")
    return size


def _unproven_with_states(config: RunConfig) -> dict[str, str]:
    """Remedies by a run's settings that no test has shown with recurrent layers."""
    used = {FEATURES[name].setting(config): remedy for name, remedy in _WITHOUT_STATES.items()}
    return {str(setting): remedy for setting, remedy in used.items() if setting}


def within_vocabulary(config: RunConfig, size: int, say: Callable[[str], None]) -> RunConfig:
    """The run with at most `size` top log-probs, the size of the vocabulary."""
    k = config.rollout.logprobs_k
    if k <= size:
        return config
    say(
        f"rollout.logprobs_k={k} is above the model's vocabulary of {size} tokens, and is taken as "
        f"{size}"
    )
    rollout = config.rollout.model_copy(update={"logprobs_k": size})
    return config.model_copy(update={"rollout": rollout})


def require_end(config: RunConfig, tokenizer: Any) -> None:
    """Raise UserError for a tokenizer without an end of sequence, which worked answers end with."""
    refuse(
        tokenizer.eos_token_id is None,
        f"model.path={config.model.path} has a tokenizer without an end of sequence, which a "
        "warm-up puts behind every worked answer: name an eos_token in its tokenizer_config.json, "
        "or choose another model.",
    )


def check_attention(config: RunConfig) -> None:
    """Raise UserError when model.path was exported for a sparse attention that the evaluating
    engines do not have."""
    path = config.model.path
    if path is None or not (file := Path(path) / ATTENTION_FILE).is_file():
        return
    stored = json.loads(file.read_text())["sparse"]
    if "sparse_prompt" in stored:  # folders of versions that had no prompts by blocks
        stored["prompt"] = "sparse" if stored.pop("sparse_prompt") else "dense"
    rule = SparseSpec(**stored)
    plain = evaluation_actor(config)
    engines = {"evaluation.dense_actor": plain} if plain else {}
    for key, engine in (engines or {f"actor.{n}": a for n, a in config.actor.items()}).items():
        keys = ",".join(f"{k}:{json.dumps(v)}" for k, v in rule.model_dump().items())
        refuse(
            engine.sparse != rule,
            f"model.path={path} is made for sparse attention that {key} does not have, so its "
            f"outputs would differ silently: choose actor=sparse 'actor.sparse.sparse={{{keys}}}'.",
        )


def check_dense(model: Mapping[str, Any], *, whose: str) -> None:
    """Refuse mixtures of experts. `model`: a config.json."""
    experts = _experts(model)
    refuse(
        bool(experts),
        f"{whose} is a mixture of experts ({experts}), which only a policy can be: choose a dense "
        "model.",
    )


def check_kind(config: RunConfig, model: Mapping[str, Any]) -> None:
    """Refuse a masked-diffusion model as a causal one, and the reverse. `model`: the policy's
    config.json."""
    whose = f"model.path={config.model.path}"
    if config.model.diffusion is not None:
        load_object(MASKED_FOLDER)(model, whose=whose)
    refuse(
        config.model.diffusion is None and is_masked(model),
        f"{whose} is a masked-diffusion model (model_type={model.get('model_type')}): set "
        "model.diffusion={} and actor.*.engine=diffusion.",
    )


def check_experts(config: RunConfig, model: Mapping[str, Any]) -> None:
    """Refuse a mixture of experts whose weights vLLM holds under unknown names, which would only
    show at the first publication, and settings that are unproven with a mixture. `model`: the
    policy's config.json."""
    experts = _experts(model)
    for division in config.learner.divisions:
        refuse(
            division.of == "experts" and not experts,
            f"learner.{division.name}={division.ranks} divides the experts of a mixture, and the "
            f"model of model.path={config.model.path} has none: use 1.",
        )
    if not experts:
        return
    whose = f"model.path={config.model.path} is a mixture of experts ({experts})"
    refuse(
        model.get("model_type") not in FAMILIES,
        f"{whose} of model_type={model.get('model_type')}, whose weights cannot be published to "
        f"the rollout actors yet: choose a dense model, or one of {', '.join(FAMILIES)}.",
    )
    refuse(
        config.learner.lora is not None,
        f"{whose}, which cannot be combined with learner.lora yet: set learner.lora=null.",
    )
    unproven = [
        *(part.setting(config) for part in PARTS if not part.with_experts),
        *(f"actor.{n}.speculate" for n, a in config.actor.items() if a.speculate is not None),
    ]
    used = next(filter(None, unproven), "")
    refuse(bool(used), f"{whose}, which is not proven with {used}: choose a dense model.")
    for label, actor in config.actor.items():
        refuse(
            actor.kind != "bf16" or actor.rounding != "none",
            f"{whose}, which actor.{label} with kind={actor.kind} and rounding={actor.rounding} "
            "cannot serve yet: choose actor=bf16.",
        )
        refuse(
            actor.activations != "none",
            f"{whose}, which one kernel computes, and actor.{label}.activations="
            f"{actor.activations} rounds what linear maps read: use activations=none.",
        )
    _check_experts_on_gpus(config, whose)


def _check_experts_on_gpus(config: RunConfig, whose: str) -> None:
    """Refuse engines on GPUs that no row of the GPU check has shown to compute a mixture right."""
    path = config.model.gpu_check
    for label, actor in config.actor.items():
        if actor.on_cpu:
            continue
        refuse(
            path is None,
            f"{whose}, which actor.{label}.num_gpus={actor.num_gpus:g} cannot serve yet: on GPUs "
            f"vLLM may hold experts in another order. Set actor.{label}.num_gpus=0, choose a dense "
            "model, or run benchmarks/gpu/check.py --parts experts 'experts graphs' there and give "
            "its file of rows as model.gpu_check.",
        )
        refuse(
            actor.tensor_parallel > 1,
            f"{whose}, which actor.{label}.tensor_parallel={actor.tensor_parallel} cannot serve on "
            "GPUs yet: the GPU check shows engines of one GPU. Use 1, or choose a dense model.",
        )
        parts = ["experts"] if actor.eager else ["experts", "experts graphs"]
        reason = unshown(check_rows(str(path)), parts, vllm_version())
        refuse(
            bool(reason),
            f"model.gpu_check={path} does not show that actor.{label} serves a mixture of experts "
            f"right: {reason}. Run benchmarks/gpu/check.py --parts {' '.join(map(repr, parts))} on "
            "such a GPU, or choose a dense model.",
        )


def vllm_version() -> str:
    """The installed version; "" without vLLM for GPUs."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_rows(path: str) -> list[dict[str, Any]]:
    """The rows that the GPU check wrote. Raises UserError for another file."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    except (OSError, ValueError) as e:
        raise UserError(
            f"model.gpu_check={path} cannot be read as rows of benchmarks/gpu/check.py: {e}."
        ) from e
    if not all(isinstance(row, dict) and "part" in row for row in rows):
        raise UserError(
            f"model.gpu_check={path} has lines that are not rows of benchmarks/gpu/check.py."
        )
    return rows


# mean |dlogp| up to which an engine agrees with the learner whatever the model
# (`benchmarks/gpu/reference.py`)
_AGREES = 0.05


def unshown(rows: Sequence[Mapping[str, Any]], parts: Sequence[str], version: str) -> str:
    """Why rows of the GPU check do not show that engines of this vLLM compute mixtures as the
    learner does, and take updates in place; "" if they do."""
    of_part: dict[str, list[Mapping[str, Any]]] = {part: [] for part in parts}
    counts = False
    for row in rows:
        if row["part"] == "machine":
            counts = row.get("device") != "cpu" and row.get("vllm") == (version or None)
        elif counts and row["part"] in of_part:
            of_part[row["part"]].append(row)
    for part, own in of_part.items():
        if not own:
            return (
                f"it has no rows of part {part} on a GPU with vLLM {version or '(not installed)'}"
            )
        failed = next((row["what"] for row in own if "what" in row), None)
        if failed is not None:
            return f"its part {part} {failed}"
        key = "mean |dlogp| replayed"
        gaps = [row for row in own if key in row]
        wide = [r for r in gaps if not _agrees(r[key], r.get(_OWN_ERROR, 0.0))]
        if len(gaps) < 2 or wide:
            found = f"{wide[0][key]} apart" if wide else "missing"
            return f"log-probs of its part {part}, before and after an update, are {found}"
        fresh = [row["as a fresh engine"] for row in own if "as a fresh engine" in row]
        if part == "experts" and not (fresh and all(_all_of(text) for text in fresh)):
            return "its updated engine does not sample as a fresh one"
    return ""


_OWN_ERROR = "learner's to float32, replayed"


def _agrees(gap: Any, own_error: Any) -> bool:
    """True if an engine is as near to the learner as the learner to float32; not for NaN."""
    if not isinstance(gap, int | float) or not isinstance(own_error, int | float):
        return False
    return gap <= max(_AGREES, 2 * own_error)


def _all_of(counted: Any) -> bool:
    """True for "4/4"."""
    same, _, count = str(counted).partition("/")
    return same == count != "0"


def check_patches(config: RunConfig, model: Mapping[str, Any]) -> None:
    """Refuse to patch, in place, weights from which vLLM derives others when it loads a whole set.
    `model`: the policy's config.json."""
    rank = next((v for name, v in _settings(model) if name == "kv_lora_rank" and v), None)
    refuse(
        rank is not None
        and config.cluster.transport == "nccl"
        and config.cluster.full_weights_every > 1,
        f"cluster.full_weights_every={config.cluster.full_weights_every} with "
        "cluster.transport=nccl changes "
        f"weights in place, and model.path={config.model.path} has latent attention (kv_lora_rank="
        f"{rank}), for which vLLM keeps matrices made of them: use full_weights_every=1, or "
        "cluster.transport=object_store.",
    )


def check_replay(config: RunConfig, model: Mapping[str, Any]) -> None:
    """Refuse to replay experts of a dense model, or experts that an engine does not return.
    `model`: the policy's config.json."""
    if not config.learner.router_replay:
        return
    key = "learner.router_replay=true"
    refuse(
        not _experts(model),
        f"{key} repeats the choices of a mixture of experts, and the model of model.path="
        f"{config.model.path} has one expert for every token: use {key.partition('=')[0]}=false.",
    )
    refuse(
        model.get("model_type") != "qwen3_moe",
        f"{key} is proven with model_type=qwen3_moe, and the model of model.path="
        f"{config.model.path} has {model.get('model_type')}: use {key.partition('=')[0]}=false.",
    )
    for label, actor in config.actor.items():
        its = f"actor.{label}"
        refuse(
            "expert routes" not in actor.facts(its).provides,
            f"{key} needs the experts that an engine chose, and {its}.engine={actor.engine} does "
            "not return any: use engine=vllm, or learner.router_replay=false.",
        )
        if actor.on_cpu:
            refuse(
                actor.tensor_parallel > 1,
                f"{key} records experts on a CPU in one process, and {its}.tensor_parallel="
                f"{actor.tensor_parallel} has several: use 1.",
            )
            continue
        # as vLLM's own check of what it returns besides tokens (vllm/config/vllm.py)
        refuse(
            not actor.on_second_runner,
            f"{key} needs vLLM's second model runner on GPUs, and {its}.second_runner="
            f"{actor.second_runner} with {its}.logit_noise={actor.logit_noise:g} and "
            f"{its}.probability_floor={actor.probability_floor:g} takes the first: leave them null "
            "and 0.",
        )
        refuse(
            not actor.prefix_caching,
            f"{key} needs vLLM's prefix cache on GPUs, which keeps the experts of prompts: leave "
            f"{its}.prefix_caching=true.",
        )


def longest_record(config: RunConfig, label: str) -> int:
    """Bytes of a sample of a training task at full length."""
    length, k = config.model.max_len, max(0, config.rollout_of(label).logprobs_k)
    sampled, teacher = config.most_sampled(label), config.teacher
    scores = sampled * (4 + 8 * (teacher.top_k or 0)) if teacher.kind == "engine" else 0
    return record_bytes(length, sampled, k) + scores + length * expert_bytes(config)


def expert_bytes(config: RunConfig) -> int:
    """Bytes that the experts of a token take in a record."""
    if not config.learner.router_replay or config.model.path is None:
        return 0
    model = read_config(config.model.path)
    experts = int(_experts(model).partition("=")[2] or 0)
    return route_bytes(model["num_hidden_layers"], model["num_experts_per_tok"], experts)


def _experts(model: Mapping[str, Any]) -> str:
    """The setting that makes a model a mixture of experts, as name=value; "" for a dense one."""
    kinds = model.get("layers_block_type")  # of each layer, where a family may have none of experts
    if kinds and "moe" not in kinds:
        return ""
    for name, value in _settings(model):
        if EXPERTS.fullmatch(name) and isinstance(value, int) and value > 1:
            return f"{name}={value}"
    return ""


def _settings(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every setting of a config.json, nested parts (text_config and the like) included."""
    for name, value in model.items():
        if isinstance(value, Mapping):
            yield from _settings(value)
        else:
            yield name, value


def _policy(config: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the fields that are read of a config.json: the folder's, or the fresh model's."""
    path = config.model.path
    if path is None:
        assert config.model.fresh is not None
        fresh = _fresh(config.model.fresh, tokenizer)
        check_replay(config, fresh)
        return fresh
    weight_files(path)  # refuses a folder without safetensors
    policy = read_config(path)
    check_kind(config, policy)
    check_replay(config, policy)
    check_experts(config, policy)
    check_patches(config, policy)
    refuse_odd_logits(path, policy)
    check_length(policy, config.model.max_len, whose=f"model.path={path}")
    return policy


def _draft(
    config: RunConfig, label: str, path: str, vocab_size: int, tokenizer: Any
) -> dict[str, Any]:
    """The draft's config.json. `vocab_size`, `tokenizer`: the policy's."""
    key = f"actor.{label}.draft_path"
    return _compatible(config, key, path, vocab_size, tokenizer, "ratios between them")


# six parameters: the policy's part is what the model is compared with
def _compatible(
    config: RunConfig, key: str, path: str, vocab_size: int, tokenizer: Any, what: str
) -> dict[str, Any]:
    """The config.json of a model whose tokens are compared with the policy's, which has this
    `vocab_size` and `tokenizer`. `what` would mean nothing otherwise."""
    model = read_config(path, key=key)
    check_dense(model, whose=f"{key}={path}")
    refuse(
        is_masked(model),
        f"{key}={path} is a masked-diffusion model, which only a policy can be: choose a causal "
        "model.",
    )
    weight_files(path, key=key)
    check_length(model, config.model.max_len, whose=f"{key}={path}")
    other = _other_vocabulary(
        load_tokenizer(path, key=key), tokenizer, int(model["vocab_size"]), vocab_size
    )
    refuse(
        bool(other),
        f"{key}={path} has another vocabulary than model.path={config.model.path} ({other}): "
        f"{what} mean nothing; choose a model with the policy's tokenizer and vocab_size.",
    )
    return model


def _other_vocabulary(drafted: Any, tokenizer: Any, size: int, policy_size: int) -> str:
    """How a draft's tokens differ from the policy's; "" if they are equal."""
    # Ids are what is compared, so equal words under other ids are as wrong as other words.
    differing = len(set(drafted.get_vocab().items()) ^ set(tokenizer.get_vocab().items()))
    if differing:
        return f"{differing} entries of their tokenizers differ"
    if drafted.eos_token_id != tokenizer.eos_token_id:
        return f"its end of sequence is {drafted.eos_token}, the policy's {tokenizer.eos_token}"
    if size != policy_size:
        return f"its vocab_size is {size}, the policy's {policy_size}"
    return ""


def _fresh(fresh: FreshModelSpec, tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": fresh.vocab_size or len(tokenizer),
        "num_attention_heads": fresh.heads,
        "num_key_value_heads": fresh.kv_heads,
    }


def _check_heads(key: str, model: dict[str, Any], actor: ActorSpec, path: str) -> None:
    check_width(model, actor, key=key, path=path)
    if actor.tensor_parallel > 1:
        check_heads(attention_heads(model), actor.tensor_parallel, key=key)
