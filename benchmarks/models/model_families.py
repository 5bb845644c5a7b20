"""Tiny random models of every family that `models.py` proves: configurations of the installed
transformers, whose layers are of each kind that the family has."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz =+-?:,."
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's attention on CPUs has none below
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
}
WINDOW = 8  # positions that a windowed layer attends to; samples are longer

_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED |= {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 2,
}
_HYBRID = ["mamba", "attention", "mamba", "attention"]


@dataclass(frozen=True)
class Family:
    """A row of the page.

    Example: Family("qwen2, tied", "qwen2", {"tie_word_embeddings": True})
    """

    name: str
    kind: str  # model_type of its config.json
    settings: dict[str, Any] = field(default_factory=dict)
    variation: bool = False  # of a family above: on the page's second table
    added: tuple[str, ...] = ()  # special tokens, for which the embedding is made larger

    @property
    def sizes(self) -> dict[str, Any]:
        """Settings of its configuration."""
        return _SIZES | self.settings


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    own = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    own |= {"original_max_position_embeddings": 16}
    return {"rope_parameters": own | more}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _long_rope(first: int) -> dict[str, Any]:
    """Settings of factors that change beyond the `first` positions."""
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [2.0 + 0.5 * i for i in range(16)],
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    key = "original_max_position_embeddings"
    return {"pad_token_id": 0, key: first, "rope_parameters": rope | {key: first}}


ALL = [
    Family("llama", "llama"),
    Family("qwen2", "qwen2"),
    Family("qwen3", "qwen3"),
    Family("qwen3_moe", "qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    Family("gemma2", "gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}),
    Family("gemma3", "gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}),
    Family("phi", "phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    Family("phi3", "phi3", {"pad_token_id": 0}),
    Family("mistral", "mistral", {"sliding_window": None}),
    Family("olmo2", "olmo2", {}),
    Family("smollm3", "smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    Family(
        "gpt_oss",
        "gpt_oss",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Family("deepseek_v3", "deepseek_v3", _GROUPED | _LATENT),
    Family("glm4_moe", "glm4_moe", _GROUPED | {"use_qk_norm": True}),
    Family("qwen3_5", "qwen3_5_text", _DELTA),
    Family("qwen3_next", "qwen3_next", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    Family(
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    ),
    Family(
        "nemotron_h",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 8,
        },
    ),
    Family(
        "granite hybrid",
        "granitemoehybrid",
        _MAMBA
        | {
            "layer_types": _HYBRID,
            "num_hidden_layers": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    Family("falcon_h1", "falcon_h1", _MAMBA | {"mamba_d_ssm": 128}),
    Family("llama, tied", "llama", {"tie_word_embeddings": True}, True),
    Family("qwen3, untied", "qwen3", {"tie_word_embeddings": False}, True),
    Family("gemma3, untied", "gemma3_text", {"tie_word_embeddings": False}, True),
    Family("qwen3, padded vocabulary", "qwen3", {"vocab_size": 200}, True),
    Family("qwen3, added tokens", "qwen3", {}, True, ("<think>", "</think>", "<tool>")),
    Family("llama, tied, added tokens", "llama", {"tie_word_embeddings": True}, True, ("<think>",)),
    Family("llama, biases", "llama", {"attention_bias": True, "mlp_bias": True}, True),
    Family("qwen3, biases", "qwen3", {"attention_bias": True}, True),
    Family("llama, yarn", "llama", _rope("yarn"), True),
    Family("qwen3, yarn", "qwen3", _rope("yarn"), True),
    Family("llama, llama3 scaling", "llama", _rope("llama3", **_LLAMA3), True),
    Family("llama, linear scaling", "llama", _rope("linear"), True),
    Family("llama, dynamic scaling", "llama", _rope("dynamic"), True),
    Family("phi3, longrope", "phi3", _long_rope(96), True),
    Family("phi3, longrope, beyond", "phi3", _long_rope(16), True),
    Family("mistral, window", "mistral", {"sliding_window": WINDOW}, True),
    Family(
        "qwen2, windows",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        True,
    ),
    Family("phi3, window", "phi3", {"pad_token_id": 0, "sliding_window": WINDOW}, True),
    Family(
        "gemma2, no cap of logits",
        "gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "final_logit_softcapping": None},
        True,
    ),
    Family(
        "gemma2, no caps",
        "gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        },
        True,
    ),
    Family("granite, scaled logits", "granite", {"logits_scaling": 4.0}, True),
    Family(
        "granite, multipliers",
        "granite",
        {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
        True,
    ),
    Family(
        "deepseek_v3, dense (MLA)",
        "deepseek_v3",
        _GROUPED | _LATENT | {"first_k_dense_replace": 2},
        True,
    ),
    Family(
        "minicpm3 (MLA)",
        "minicpm3",
        _LATENT | {"qk_nope_head_dim": 16, "dim_model_base": 64},
        True,
    ),
    Family("qwen2_moe", "qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 32}, True),
    Family(
        "mixtral",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        True,
    ),
    Family("olmoe", "olmoe", _EXPERTS, True),
    Family("cohere2", "cohere2", {"sliding_window": WINDOW, "logit_scale": 1.0}, True),
    Family("olmo3", "olmo3", {"sliding_window": WINDOW, "num_hidden_layers": 4}, True),
    Family("starcoder2", "starcoder2", {"sliding_window": None}, True),
    Family("gpt2", "gpt2", {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 128}, True),
    Family("gpt_neox", "gpt_neox", {}, True),
    Family("glm4", "glm4", {"pad_token_id": 0}, True),
    Family("stablelm", "stablelm", {}, True),
    Family("ministral3", "ministral3", {}, True),
    Family("exaone4", "exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}, True),
    Family("seed_oss", "seed_oss", {}, True),
]
FAMILIES = {family.name: family for family in ALL}


def write_folder(family: Family, folder: Path) -> Any:
    """Write a random float32 model of the family and a character tokenizer to `folder`; returns the
    model. Its weights, biases and scales are such that each of them shows in its log-probs."""
    import torch
    import transformers

    from rlcore.models.fresh import build_char_tokenizer

    tokenizer = build_char_tokenizer(ALPHABET)
    config = transformers.AutoConfig.for_model(
        family.kind,
        **{
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            **family.sizes,
        },
    )
    torch.manual_seed(1)
    lm = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    if family.added:
        tokenizer.add_special_tokens({"additional_special_tokens": list(family.added)})
        lm.resize_token_embeddings(config.vocab_size + len(family.added), pad_to_multiple_of=8)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=1.5 * p.shape[-1] ** -0.5)
            elif not name.endswith(("A_log", "dt_bias", ".D")):
                p.add_(0.2 * torch.randn_like(p))
        for name, b in lm.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.add_(0.2 * torch.randn_like(b))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lm
