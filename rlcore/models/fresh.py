"""Randomly initialised small models, and their character tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.files import follow_umask
from rlcore.models.specs import FreshModelSpec
from rlcore.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS, UNK, MASK = "<pad>", "<eos>", "<unk>", "<mask>"


def build_char_tokenizer(alphabet: str, *, masked: bool = False) -> PreTrainedTokenizerBase:
    """One token per character of `alphabet`, after <pad> (0), <eos> (1) and <unk> (2); with
    `masked` also <mask>, the last."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Sorted, so that the order of the task's characters cannot change the ids.
    tokens = [PAD, EOS, UNK, *sorted(set(alphabet)), *([MASK] if masked else [])]
    vocab = {t: i for i, t in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    # Every character by itself, white space included.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # Characters are joined as they are: the default puts spaces between tokens.
    core.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    if masked:
        special["mask_token"] = MASK
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def check_vocabulary(spec: FreshModelSpec, needed: int) -> None:
    """Raise UserError if the vocabulary is smaller than the tokenizer's `needed` entries."""
    refuse(
        spec.vocab_size is not None and spec.vocab_size < needed,
        f"model.fresh.vocab_size={spec.vocab_size} is too small: the task's alphabet needs "
        f"{needed}.",
    )


def build_fresh_model(
    folder: str | Path,
    alphabet: str,
    spec: FreshModelSpec,
    *,
    seed: int,
    max_len: int,
    masked: bool = False,
) -> Path:
    """Write a Qwen3-architecture model (float32) and its character tokenizer to `folder`; with
    `masked` a masked-diffusion model of LLaDA's form.

    `spec.vocab_size` pads the vocabulary upwards (ids beyond the tokenizer's are never encoded);
    UserError if it is smaller than the alphabet needs. `max_len`: positions.
    """
    import torch

    tokenizer = build_char_tokenizer(alphabet, masked=masked)
    check_vocabulary(spec, len(tokenizer))
    make = _masked if masked else _causal
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        torch.manual_seed(seed % 2**31)
        model = make(spec, tokenizer, max_len)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    follow_umask(folder)
    return folder


def _causal(spec: FreshModelSpec, tokenizer: Any, max_len: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
    return Qwen3ForCausalLM(config)


def _masked(spec: FreshModelSpec, tokenizer: Any, max_len: int) -> Any:
    from rlcore.models.llada import LladaConfig, LladaForMaskedDiffusion

    config = LladaConfig(
        vocab_size=spec.vocab_size or len(tokenizer),
        d_model=spec.hidden_size,
        n_layers=spec.layers,
        n_heads=spec.heads,
        n_kv_heads=spec.kv_heads,
        mlp_hidden_size=spec.intermediate_size,
        max_sequence_length=max_len,
        weight_tying=spec.tie_embeddings,
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return LladaForMaskedDiffusion(config)
