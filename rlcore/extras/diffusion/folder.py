"""Folders of masked-diffusion models by their config.json alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.models.folder import read_config
from rlcore.spec import refuse

MODEL_TYPE = "llada"
# LLaDA's names of the weights that other models call by these
NAMES = {"lm_head": "transformer.ff_out", "embed_tokens": "transformer.wte"}
# What of LLaDA's configuration the architecture here computes (`llada.py`); a missing key has
# the first of its values.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "activation_type": ("silu",),
    "rope": (True,),
    "alibi": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "multi_query_attention": (None, False),
    "block_group_size": (1,),
}
# Linear layers of its blocks. The last one's name is that of the head too.
LAYERS = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
_SIZES = ("d_model", "n_heads", "n_layers", "mlp_hidden_size", "max_sequence_length")


def check_masked(config: Mapping[str, Any], *, whose: str) -> None:
    """Raise UserError, naming the setting, for a config.json that is not of LLaDA's form."""
    refuse(
        config.get("model_type") != MODEL_TYPE,
        f"{whose} has model_type={config.get('model_type')}, and of masked-diffusion models only "
        f"ones of LLaDA's form (model_type={MODEL_TYPE}) are supported: its own code is not run.",
    )
    for key, accepted in SUPPORTED.items():
        refuse(
            config.get(key, accepted[0]) not in accepted,
            f"{whose} has {key}={config.get(key)}, and of LLaDA's form only {key}={accepted[0]} is "
            "supported.",
        )
    missing = [key for key in (*_SIZES, "mask_token_id") if not isinstance(config.get(key), int)]
    refuse(bool(missing), f"{whose} has no {', '.join(missing[:1])} in its config.json.")
    size, mask = int(config["vocab_size"]), int(config["mask_token_id"])
    refuse(
        config.get("embedding_size") not in (None, size),
        f"{whose} has embedding_size={config.get('embedding_size')} and vocab_size={size}, which "
        "must be equal here.",
    )
    refuse(
        not 0 <= mask < size,
        f"{whose} has mask_token_id={mask}, which is outside its vocab_size={size}.",
    )


def mask_token_id(model_path: str | Path) -> int:
    """The token that hides others. Raises UserError as `check_masked` does."""
    config = read_config(model_path)
    check_masked(config, whose=f"model.path={model_path}")
    return int(config["mask_token_id"])
