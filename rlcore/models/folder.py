"""Reading a Hugging Face model folder without loading a model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore.errors import UserError
from rlcore.files import not_here
from rlcore.registry import load_object

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"  # names the files of a model that has several
ATTENTION_FILE = "rlcore.json"  # of an exported folder: the sparse attention it was trained with

# Architectures that transformers lacks, by the model_type of config.json. The module of each
# registers it there. All are masked-diffusion models.
ARCHITECTURES = {"llada": "rlcore.extras.diffusion.llada:LladaForMaskedDiffusion"}

# settings of configurations by which a head does more to its logits than one product
_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# parts of the names of dropout probabilities in configurations (GPT-2's are attn_pdrop, ...)
_DROPOUT = ("dropout", "pdrop", "layerdrop")
_T = TypeVar("_T")


def is_masked(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a masked-diffusion model."""
    return config.get("model_type") in ARCHITECTURES or "mask_token_id" in config


# kinds of layers with a state that runs along the sequence, as configurations name them
_RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "hybrid")
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "_block_types")
# keys that only configurations with such layers have, where no list names the layers: state-space
# models, the first forms of Qwen3-Next, Kimi, MiniMax and LFM2, RWKV, xLSTM
_STATES = (
    *("mamba_d_state", "ssm_state_size", "state_size", "lru_width"),
    *("linear_conv_kernel_dim", "linear_attn_config", "attn_type_list"),
    *("full_attn_idxs", "rescale_every", "chunkwise_kernel"),
)


def is_recurrent(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model with recurrent layers: linear attention,
    state-space models, short convolutions."""
    kinds = {kind for name in _LAYER_LISTS for kind in config.get(name) or ()}
    return bool(kinds & {*_RECURRENT}) or any(config.get(key) for key in _STATES)


def refuse_odd_logits(path: str | Path, config: Mapping[str, Any]) -> None:
    """Raise UserError for a configuration whose head does more to its logits than one product with
    its weights, or whose attention caps its own."""
    odd = next((k for k in _SCALED_LOGITS if config.get(k) not in (None, 0, 1)), None)
    if odd is not None:
        raise UserError(
            f"model.path={path} is not supported: its LM head has {odd}; choose another model."
        )
    if cap := config.get("attn_logit_softcapping"):
        raise UserError(
            f"model.path={path} is not supported: its attention caps its logits "
            f"(attn_logit_softcapping={cap:g}), which no learner.attention computes; choose "
            "another model."
        )


def register_architecture(model_path: str | Path) -> None:
    """Make a folder's architecture known to transformers, where it is one of `ARCHITECTURES`."""
    path = Path(model_path) / "config.json"
    kind = read_config(model_path).get("model_type") if path.is_file() else None
    if kind in ARCHITECTURES:
        load_object(ARCHITECTURES[kind])


def without_dropout(config: Any) -> dict[str, Any]:
    """Set every dropout probability of a configuration, and of those within it, to 0, in place;
    the settings that this changes.

    The ratios compare two passes over one policy: with dropout they would differ by its noise.
    """
    changed: dict[str, Any] = {}
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):  # the configuration of a model's text part, for example
            changed |= {name: inner} if (inner := without_dropout(value)) else {}
        elif any(part in name for part in _DROPOUT) and _is_probability(value):
            setattr(config, name, 0.0)
            changed[name] = 0.0
    return changed


def _is_probability(value: Any) -> bool:
    """Return whether a setting is a number above 0 (a bool is not a number)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def read_config(model_path: str | Path, *, key: str = "model.path") -> dict[str, Any]:
    """The folder's config.json.

    Raises UserError, naming `key`, if there is none with a vocab_size.
    """
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{key}={model_path} holds no config.json: give a local Hugging Face model folder; "
            f"{not_here(str(model_path), 'model')}."
        )
    try:
        config = dict(json.loads(path.read_text()))
        int(config["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(
            f"{key}={model_path} holds no config.json with a vocab_size ({type(e).__name__}): give "
            "a folder with a language model's."
        ) from e
    return config


def read_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every weight, tied ones once. Reads file headers only.

    Raises UserError as `weight_files` does.
    """
    shapes = {name: tuple(entry["shape"]) for name, entry in _entries(model_path)}
    return _tied_once(model_path, shapes)


def read_dtypes(model_path: str | Path) -> dict[str, str]:
    """Hugging Face name -> format of every weight as safetensors names it, such as BF16. Reads file
    headers only.

    Raises UserError as `weight_files` does.
    """
    return {name: str(entry["dtype"]) for name, entry in _entries(model_path)}


def _entries(model_path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in weight_files(model_path):
        # Eight bytes of length, then JSON: the header of a safetensors file.
        with file.open("rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(size))
        yield from ((name, entry) for name, entry in header.items() if name != "__metadata__")


def read_weights(model_path: str | Path) -> dict[str, torch.Tensor]:
    """All weights of the folder on the CPU, tied ones once.

    Raises UserError as `weight_files` does.
    """
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(model_path):
        tensors.update(load_file(file))
    return _tied_once(model_path, tensors)


def weight_files(model_path: str | Path, *, key: str = "model.path") -> list[Path]:
    """The safetensors files of the folder's model: as its index lists them, or model.safetensors.

    Further files in the folder (`consolidated.safetensors`, adapters) name the same weights
    differently, and transformers does not read them either. Raises UserError, naming `key`, if
    there is none or one is missing.
    """
    folder = Path(model_path)
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder, key)
    whole = folder / "model.safetensors"
    if not whole.is_file():
        raise UserError(
            f"{key}={model_path} holds no .safetensors file of weights (model.safetensors, or the "
            f"files of {INDEX_FILE}): save the model in that format."
        )
    return [whole]


def _indexed_files(folder: Path, key: str) -> list[Path]:
    try:
        names = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise UserError(
            f"{key}={folder} holds an unreadable {INDEX_FILE} ({type(e).__name__}): copy it again."
        ) from e
    files = sorted(folder / name for name in names)
    if missing := [f.name for f in files if not f.is_file()]:
        raise UserError(
            f"{key}={folder} lacks {missing[0]}, which {INDEX_FILE} names: copy the whole folder."
        )
    return files


def _tied_once(model_path: str | Path, named: dict[str, _T]) -> dict[str, _T]:
    # Some folders store a tied head although it is the embedding's own storage.
    if read_config(model_path).get("tie_word_embeddings"):
        named.pop("lm_head.weight", None)
    return named
