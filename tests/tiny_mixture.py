"""A mixture of experts that is small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_mixture(folder: Path, alphabet: str, *, seed: int, max_len: int = 128) -> Any:
    """Write a random Qwen3 mixture of experts and a tokenizer of the characters of `alphabet` to
    `folder`; the model, in float32. Two layers of four experts, two of them a token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from rlcore.models.fresh import build_char_tokenizer

    tokenizer = build_char_tokenizer(alphabet)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    lm = Qwen3MoeForCausalLM(config)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lm
