"""Fresh small models and their tokenizers, and the chat formatting of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTENTION_FILE = "rlcore.json"  # in an exported folder: the sparse attention that its weights are made for
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def build_char_tokenizer(alphabet: str) -> PreTrainedTokenizerBase:
    """A tokenizer with one token per character of `alphabet` plus <pad> (0), <eos> (1) and <unk> (2)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {t: i for i, t in enumerate([PAD, EOS, UNK, *sorted(set(alphabet))])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK)


def build_fresh_model(
    folder: str | Path,
    alphabet: str,
    *,
    seed: int,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    max_len: int,
    vocab_size: int | None = None,
    tie_embeddings: bool = True,
) -> Path:
    """Write a randomly initialised Qwen3-architecture model (float32) and its character tokenizer to `folder`.

    `vocab_size` pads the vocabulary upwards (ids beyond the tokenizer's are never encoded). Raises UserError when it
    is smaller than the alphabet needs.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_char_tokenizer(alphabet)
    if vocab_size is not None and vocab_size < len(tokenizer):
        raise UserError(
            f"model.fresh.vocab_size={vocab_size} is too small: the task's alphabet needs {len(tokenizer)}."
        )
    config = Qwen3Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_len,
        tie_word_embeddings=tie_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**31)
        model = Qwen3ForCausalLM(config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_tokenizer(path: str | Path, *, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder. Raises UserError, naming `key`, when there is none."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UserError(f"{key}={path} is not a folder: give a local Hugging Face model folder.")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as e:
        raise UserError(f"{key}={path} holds no readable tokenizer: {str(e).splitlines()[0]}") from e


def padding(tokenizer: Any) -> int:
    """The token that fills unused places, which nothing reads: many tokenizers have none of that name."""
    return next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)


def encode_prompt(
    tokenizer: Any, question: str, *, chat_template: str = "auto", system_prompt: str | None = None
) -> list[int]:
    """Token ids of a prompt: through the tokenizer's chat template where it has one, else the plain text."""
    if chat_template == "auto" and getattr(tokenizer, "chat_template", None):
        messages: list[dict[str, str]] = [{"role": "user", "content": question}]
        if system_prompt:
            messages.insert(0, {"role": "system", "content": system_prompt})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(ids)
    text = question if not system_prompt else f"{system_prompt}\n{question}"
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode_response(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of a response, without special tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=True)
