"""Randomly initialised small models, and their character tokenizers."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import UserError
from rlcore.files import follow_umask, new_folder
from rlcore.models.folder import INDEX_FILE, read_config, read_weights, weight_files
from rlcore.models.specs import FreshModelSpec
from rlcore.registry import load_object
from rlcore.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASKED = "rlcore.extras.diffusion.llada:fresh_llada"  # (spec, tokenizer, max_len) -> model
PAD, EOS, UNK, MASK = "<pad>", "<eos>", "<unk>", "<mask>"


def quiet_libraries() -> None:
    """No bars of transformers and, without a GPU, no warning of DeepSpeed, which it imports."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"


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
        f"{needed}; use that or more, or null.",
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

    quiet_libraries()
    tokenizer = build_char_tokenizer(alphabet, masked=masked)
    check_vocabulary(spec, len(tokenizer))
    make = load_object(MASKED) if masked else _causal
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


_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def spread(total: int, kept: int) -> list[int]:
    """`kept` of `total` layers at even distances, the first and the last among them.

    Example: spread(30, 4) is [0, 10, 19, 29].
    """
    if kept == 1:
        return [0]
    return [round(i * (total - 1) / (kept - 1)) for i in range(kept)]


def cut_model(model_path: str | Path, folder: str | Path, layers: int) -> Path:
    """Write to `folder`, which must not exist, the model with `layers` of its layers and all of its
    vocabulary; untrained, a start for a draft. Returns the folder.

    Raises UserError for a number of layers that it does not have, and as `read_weights` does.
    """
    from safetensors.torch import save_file

    config = read_config(model_path)
    total = int(config.get("num_hidden_layers", 0))
    if not 0 < layers < total:
        raise UserError(
            f"layers={layers} of model.path={model_path}, which has {total}: give 1 to {total - 1}."
        )
    kept = {old: new for new, old in enumerate(spread(total, layers))}
    weights = {}
    for name, tensor in read_weights(model_path).items():
        found = _LAYER.search(name)
        if found is None:
            weights[name] = tensor
        elif int(found[2]) in kept:
            place = f"{found[1]}layers.{kept[int(found[2])]}."
            weights[f"{name[: found.start()]}{place}{name[found.end() :]}"] = tensor
    config["num_hidden_layers"] = layers
    for name, value in config.items():  # one entry a layer, such as layer_types
        if isinstance(value, list) and len(value) == total:
            config[name] = [value[old] for old in kept]
    others = {INDEX_FILE, "config.json", *(f.name for f in weight_files(model_path))}
    with new_folder(folder) as out:
        for file in Path(model_path).iterdir():
            if file.is_file() and file.name not in others:
                shutil.copyfile(file, out / file.name)
        (out / "config.json").write_text(json.dumps(config, indent=1))
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        follow_umask(out / "model.safetensors")
    return Path(folder)
