"""Randomly initialised small models, and their character tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import UserError
from rlcore.models.specs import FreshModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def build_char_tokenizer(alphabet: str) -> PreTrainedTokenizerBase:
    """One token per character of `alphabet`, after <pad> (0), <eos> (1) and <unk> (2)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Sorted, so that the order of the task's characters cannot change the ids.
    vocab = {t: i for i, t in enumerate([PAD, EOS, UNK, *sorted(set(alphabet))])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    # Every character by itself, white space included.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # Characters are joined as they are: the default puts spaces between tokens.
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK
    )


def build_fresh_model(
    folder: str | Path, alphabet: str, spec: FreshModelSpec, *, seed: int, max_len: int
) -> Path:
    """Write a Qwen3-architecture model (float32) and its character tokenizer to `folder`.

    `spec.vocab_size` pads the vocabulary upwards (ids beyond the tokenizer's are never encoded);
    UserError if it is smaller than the alphabet needs. `max_len`: positions.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_char_tokenizer(alphabet)
    if spec.vocab_size is not None and spec.vocab_size < len(tokenizer):
        raise UserError(
            f"model.fresh.vocab_size={spec.vocab_size} is too small: the task's alphabet needs "
            f"{len(tokenizer)}."
        )
    config = Qwen3Config(
        vocab_size=spec.vocab_size or len(tokenizer),
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=max_len,
        tie_word_embeddings=spec.tie_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        torch.manual_seed(seed % 2**31)
        model = Qwen3ForCausalLM(config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
