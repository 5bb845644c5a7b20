"""How large a run's models are, from file headers and settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.commands.roles import wire_dtype
from rlcore.config.schema import RunConfig
from rlcore.learner.specs import LoraSpec
from rlcore.models.folder import read_shapes
from rlcore.models.specs import FreshModelSpec
from rlcore.weights.adapters import AdapterShape, adapter_shapes

BYTES = {"float32": 4, "bfloat16": 2}


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


def folder_parameters(model_path: str) -> int:
    """Parameters of a model folder, tied ones once. Reads file headers only."""
    total = 0
    for shape in read_shapes(model_path).values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def fresh_parameters(spec: FreshModelSpec, alphabet: int) -> int:
    """Parameters of a fresh model whose tokenizer has `alphabet` entries."""
    # Of the Qwen3 architecture; the biases that other models have it does without.
    hidden, head = spec.hidden_size, spec.head_dim
    attention = hidden * head * (2 * spec.heads + 2 * spec.kv_heads) + 2 * head  # and QK norms
    layer = attention + 3 * hidden * spec.intermediate_size + 2 * hidden
    vocabulary = (spec.vocab_size or alphabet) * hidden * (1 if spec.tie_embeddings else 2)
    return vocabulary + spec.layers * layer + hidden


def published_bytes(config: RunConfig, tokenizer: Any) -> int:
    """Bytes of one publication: every set of weights that actors load."""
    learner = config.learner
    total = _sent(config, tokenizer, learner.lora)
    if learner.distill is not None:
        total += _sent(config, tokenizer, learner.distill.lora)
    if learner.draft is not None:
        draft = next(iter(config.actor.values()))
        if draft.draft_path is not None:
            total += folder_parameters(draft.draft_path)
        elif draft.draft_fresh is not None:
            total += fresh_parameters(draft.draft_fresh, len(tokenizer))
    return total * BYTES[wire_dtype(config)]


def _sent(config: RunConfig, tokenizer: Any, lora: LoraSpec | None) -> int:
    """Parameters that are sent of the policy's model: all, or those of an adapter alone."""
    if lora is None or lora.publish == "merged":
        return policy_parameters(config, tokenizer)
    adapter = adapter_shapes(_shapes(config), AdapterShape(lora.rank, lora.targets))
    return sum(rows * columns for rows, columns in adapter.values())


def _shapes(config: RunConfig) -> Mapping[str, tuple[int, ...]]:
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
    """What of it Ray's object store must hold: nothing, where weights travel another way."""
    if config.cluster.transport != "object_store":
        return 0
    return published_bytes(config, tokenizer)
