"""Sizes of a model, and memory by purpose, counted from shapes without loading anything."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.models.folder import read_config, read_shapes
from rlcore.models.specs import FreshModelSpec

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.\d+\.(?P<kind>gate|up|down)_proj\.weight")
_ENDS = ("embed_tokens", "lm_head")
Parts = dict[str, float]  # bytes by what holds them


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a model that its activations depend on; widths are in entries.

    Example: LayerSizes(36, 4096, 4096, 1024, 12288, True)
    """

    layers: int
    hidden: int
    queries: int  # of a position in a layer
    keys: int
    inner: int  # width of the MLP that a position goes through
    qk_norm: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], *, qk_norm: bool) -> LayerSizes:
        """The sizes that a config.json states. `qk_norm`: queries and keys are normalised."""
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        chosen = config.get("num_experts_per_tok") or 0
        expert = config.get("moe_intermediate_size") or 0
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            queries=heads * head_dim,
            keys=int(config.get("num_key_value_heads") or heads) * head_dim,
            inner=int(chosen * expert or config.get("intermediate_size") or 0),
            qk_norm=qk_norm,
        )

    def position_bytes(self, width: int, parts: int = 1) -> float:
        """Bytes kept for the backward pass of one position in one layer, in a dtype of `width`
        bytes. They are for the two norms (in float32), attention with a variable-length kernel, and
        the gated MLP. A rank has one of `parts` of attention and MLP."""
        norm = 4 + 2 * width
        attended = self.queries + self.keys
        divided = 2 * width * attended + 4 * width * self.inner
        divided += norm * attended if self.qk_norm else 0
        return 2 * norm * self.hidden + divided / parts


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that memory depends on. `of` reads them; lengths are in entries.

    Example: ModelSizes(8.2e9, 6.2e8, 151936, LayerSizes(36, 4096, 4096, 1024, 12288, True))
    """

    parameters: float
    largest: float  # of one parameter as it is trained: a layer's experts are stacked
    vocabulary: int
    layer: LayerSizes  # what activations depend on
    ends: float = 0.0  # embedding and head, which tensor parallelism leaves whole
    experts: float = 0.0  # all of them, in all layers

    @classmethod
    def of(cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSizes:
        """Of a config.json, and the shapes of all weights by Hugging Face name."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        stacked: dict[str, int] = {}
        for name, size in sizes.items():
            found = _EXPERT.fullmatch(name)
            if found is None:
                stacked[name] = size
            else:
                kind = "down" if found["kind"] == "down" else "gate_up"
                label = f"{found['layer']}.{kind}"
                stacked[label] = stacked.get(label, 0) + size
        return cls(
            parameters=float(sum(sizes.values())),
            largest=float(max(stacked.values())),
            vocabulary=int(config["vocab_size"]),
            layer=LayerSizes.of(config, qk_norm=any(n.endswith("q_norm.weight") for n in shapes)),
            ends=float(sum(size for name, size in sizes.items() if name.split(".")[-2] in _ENDS)),
            experts=float(sum(size for name, size in sizes.items() if _EXPERT.fullmatch(name))),
        )

    def key_bytes(self, tokens: int, width: int = 2) -> float:
        """Keys and values of a sequence."""
        return 2.0 * self.layer.layers * self.layer.keys * width * tokens


def fresh_parameters(spec: FreshModelSpec, alphabet: int) -> int:
    """Parameters of a fresh model whose tokenizer has `alphabet` entries."""
    # Of the Qwen3 architecture; the biases that other models have it does without.
    hidden, head = spec.hidden_size, spec.head_dim
    attention = hidden * head * (2 * spec.heads + 2 * spec.kv_heads) + 2 * head  # and QK norms
    layer = attention + 3 * hidden * spec.intermediate_size + 2 * hidden
    vocabulary = (spec.vocab_size or alphabet) * hidden * (1 if spec.tie_embeddings else 2)
    return vocabulary + spec.layers * layer + hidden


def folder_parameters(model_path: str) -> int:
    """Parameters of a model folder, tied ones once. Reads file headers only."""
    return sum(math.prod(shape) for shape in read_shapes(model_path).values())


def folder_sizes(model_path: str) -> ModelSizes | None:
    """Sizes of a model folder; None for a config.json with unusual names."""
    try:
        return ModelSizes.of(read_config(model_path), read_shapes(model_path))
    except KeyError:
        return None


def total(parts: Parts) -> float:
    """Bytes of all parts."""
    return sum(parts.values())


def in_words(parts: Parts) -> str:
    """Example: "41.2 GiB: weights 4.0, gradients 8.0, ..." """
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    return f"{total(parts) / GIB:.1f} GiB: {shown}"
