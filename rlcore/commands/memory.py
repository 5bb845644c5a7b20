"""The most memory that a run's processes hold, by role, and the check that it fits on its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from rlcore.commands.derived import wire_dtype
from rlcore.config.parts import PARTS
from rlcore.config.schema import RunConfig
from rlcore.engine_facts import RankLoad, RankMemory
from rlcore.launch.specs import ELSEWHERE
from rlcore.learner.specs import LoraSpec
from rlcore.models.folder import read_shapes
from rlcore.models.sizes import (
    BYTES,
    GIB,
    ModelSizes,
    Parts,
    folder_parameters,
    folder_sizes,
    fresh_parameters,
    in_words,
    total,
)
from rlcore.models.specs import FreshModelSpec
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse
from rlcore.weights.adapters import AdapterShape, adapter_shapes


def policy_parameters(config: RunConfig, tokenizer: Any) -> int:
    """Parameters of the policy. `tokenizer`: the policy's."""
    if config.model.path is not None:
        return folder_parameters(config.model.path)
    assert config.model.fresh is not None
    count = fresh_parameters(config.model.fresh, len(tokenizer))
    if config.model.diffusion is None:
        return count
    # LLaDA's form has no norms of queries and keys
    return count - 2 * config.model.fresh.head_dim * config.model.fresh.layers


def published_bytes(config: RunConfig, tokenizer: Any) -> int:
    """Bytes of one publication: every set of weights that actors load. `tokenizer`: the policy's,
    which is read where the model is fresh."""
    sent = partial(_sent, config, tokenizer)
    alphabet = 0 if config.model.path is not None else len(tokenizer)
    used = [part for part in PARTS if part.setting(config)]
    further = sum(part.published(config, sent, alphabet) for part in used)
    return (sent(config.learner.lora) + further) * BYTES[wire_dtype(config)]


def _sent(config: RunConfig, tokenizer: Any, lora: LoraSpec | None) -> int:
    """Parameters of the policy's model that are sent: all, or an adapter's alone."""
    if lora is None or lora.publish == "merged":
        return policy_parameters(config, tokenizer)
    adapter = adapter_shapes(weight_shapes(config), AdapterShape(lora.rank, lora.targets))
    return sum(rows * columns for rows, columns in adapter.values())


def weight_shapes(config: RunConfig) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the policy's weights; of a fresh model, of its linear layers alone."""
    if config.model.path is not None:
        return read_shapes(config.model.path)
    assert config.model.fresh is not None
    return linear_shapes(config.model.fresh)


def linear_shapes(spec: FreshModelSpec) -> dict[str, tuple[int, int]]:
    """Names and shapes [out, in] of a fresh model's linear layers, without its head."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{i}.{n}.weight": s for i in range(spec.layers) for n, s in layer.items()}


def stored_bytes(config: RunConfig, tokenizer: Any) -> int:
    """Return the bytes of weights in Ray's object store: 0 if weights travel another way."""
    if config.cluster.transport != "object_store":
        return 0
    return published_bytes(config, tokenizer)


KEY = "cluster.launch.gpu_memory_gib"


def memory_lines(config: RunConfig, tokenizer: Any) -> list[str]:
    """One line for each role. `tokenizer`: the policy's."""
    sizes = _sizes(config, tokenizer)
    if sizes is None:
        return ["not counted: config.json does not say the sizes of a layer"]
    lines = [f"{role}: {in_words(parts)}" for role, _, parts in _on_gpus(config, sizes)]
    rank = _rank(config, sizes)
    if rank is None:
        return [*lines, f"learner rank: learner.engine={config.learner.engine} does not state it"]
    if config.schedule.colocated and config.learner.num_gpus:
        lines.append(f"learner rank while engines sample: {in_words(rank.waiting)}")
    if not config.learner.num_gpus:
        lines.append(f"learner rank: {in_words(rank.peak)}")
    return [*lines, f"learner rank's host: {in_words(rank.host)}"]


def check_memory(config: RunConfig, tokenizer: Any) -> None:
    """Raise UserError for a role that needs more than the GPUs of `cluster.launch` have, or than
    the learner's own nodes. `tokenizer`: read where the model is fresh."""
    room = config.cluster.launch.gpu_memory_gib
    sizes = _sizes(config, tokenizer)
    if sizes is None:
        return
    _check_nodes(config, sizes)
    if room is None:
        return
    for role, share, parts in _on_gpus(config, sizes):
        own = share * room
        advice = (
            "raise learner.ranks, set learner.gradient_checkpointing=true, lower "
            f"learner.micro_batch_tokens, {config.learner.facts.smaller}"
            if role.startswith("learner")
            else f"raise {role.split()[0]}.tensor_parallel"
        )
        refuse(
            total(parts) > own * GIB,
            f"{KEY}={room:g} gives the {role} {own:.1f} GiB, and it needs {in_words(parts)}: "
            f"{advice}.",
        )

    if config.schedule.colocated and config.learner.num_gpus:
        _check_turns(config, sizes, room)


def _check_nodes(config: RunConfig, sizes: ModelSizes) -> None:
    """Check that the learner's ranks fit on its nodes, where their memory is known."""
    launch, learner = config.cluster.launch, config.learner
    memory_gib = launch.node(of_learner=True).memory_gib
    if launch.kind not in ELSEWHERE or not launch.learner_nodes or memory_gib is None:
        return
    ranks = -(-learner.ranks // launch.learner_nodes)
    held = _rank(config, sizes)
    if held is None:
        return
    parts = held.host | ({} if learner.num_gpus else held.peak)
    refuse(
        ranks * total(parts) > memory_gib * GIB,
        f"cluster.launch.learner_memory_gib_per_node={memory_gib} is less than what {ranks} "
        f"learner ranks need on a node, {in_words(parts)} each: raise it or "
        "cluster.launch.learner_nodes.",
    )


def _check_turns(config: RunConfig, sizes: ModelSizes, room: float) -> None:
    """Check that an idle learner rank fits next to the largest share of an engine."""
    rank = _rank(config, sizes)
    if rank is None:
        return
    waiting = rank.waiting
    label, actor = max(config.actor.items(), key=lambda a: a[1].gpu_memory_utilization)
    left = (1 - actor.gpu_memory_utilization) * room
    more = config.learner.facts.unused_room(config.learner)
    offload = more and f", or set {more}"
    refuse(
        total(waiting) > left * GIB,
        f"{KEY}={room:g} leaves {left:.1f} GiB beside actor.{label}.gpu_memory_utilization="
        f"{actor.gpu_memory_utilization:g}, and the learner rank that has the GPU in turns with it "
        f"keeps {in_words(waiting)}: lower actor.{label}.gpu_memory_utilization{offload}.",
    )


def _rank(config: RunConfig, sizes: ModelSizes) -> RankMemory | None:
    """Memory of a learner rank with its parts; None: its engine does not state it."""
    load = RankLoad(
        kl=_has_kl(config),
        trained=_adapted(config, config.learner.lora),
        bucket_bytes=config.cluster.bucket_mib << 20,
        kept_width=BYTES[wire_dtype(config)] if config.cluster.full_weights_every > 1 else 0,
    )
    own = config.learner.facts.rank_memory(sizes, config.learner, load)
    if own is None:
        return None
    beside: Parts = {}
    for part in PARTS:
        beside |= part.memory(config, sizes, partial(_adapted, config))
    return RankMemory(own.peak | beside, own.waiting | beside, own.host)


def _on_gpus(config: RunConfig, sizes: ModelSizes) -> Iterator[tuple[str, float, Parts]]:
    """(role, share of a GPU that it may fill, its memory by purpose) of every role on GPUs."""
    learner, bucket = config.learner, config.cluster.bucket_mib << 20
    rank = _rank(config, sizes) if learner.num_gpus else None
    if rank is not None:
        yield "learner rank", learner.num_gpus, rank.peak
    for own in (e for part in PARTS for e in part.engines(config) if e.spec.num_gpus):
        of_model = sizes if own.folder is None else folder_sizes(own.folder) or sizes
        held = _engine(of_model, own.spec, own.key, 0, config.model.max_len)
        del held["arriving weights"]  # its weights stay
        yield f"{own.key} rank", own.spec.gpu_memory_utilization, held
    for label, actor in config.actor.items():
        if actor.num_gpus and not actor.own_model:
            key = f"actor.{label}"
            if held := _engine(sizes, actor, key, bucket, config.model.max_len):
                yield f"{key} rank", actor.gpu_memory_utilization, held


def _engine(sizes: ModelSizes, actor: ActorSpec, key: str, bucket: int, max_len: int) -> Parts:
    """Least memory of a rollout engine's rank; empty: the engine does not state it."""
    facts = actor.facts(key)
    return facts.actor_memory(sizes, actor, bucket_bytes=bucket, max_len=max_len) or {}


def _has_kl(config: RunConfig) -> bool:
    return config.algorithm.kl_coef > 0


def _adapted(config: RunConfig, lora: LoraSpec | None) -> float | None:
    if lora is None:
        return None
    factors = adapter_shapes(weight_shapes(config), AdapterShape(lora.rank, lora.targets))
    return float(sum(rows * columns for rows, columns in factors.values()))


def _sizes(config: RunConfig, tokenizer: Any) -> ModelSizes | None:
    """Sizes of a model; None for a config.json with unusual names."""
    if config.model.path is None:
        assert config.model.fresh is not None
        return _fresh(config.model.fresh, len(tokenizer))
    return folder_sizes(config.model.path)


def _fresh(spec: FreshModelSpec, alphabet: int) -> ModelSizes:
    vocabulary = spec.vocab_size or alphabet
    shapes: dict[str, tuple[int, ...]] = {**linear_shapes(spec)}
    shapes["model.layers.0.self_attn.q_norm.weight"] = (spec.head_dim,)
    shapes["model.embed_tokens.weight"] = (vocabulary, spec.hidden_size)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (vocabulary, spec.hidden_size)
    described = {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": vocabulary,
    }
    return ModelSizes.of(described, shapes)
