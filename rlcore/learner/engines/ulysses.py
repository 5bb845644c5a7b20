"""Attention over sequences that several ranks hold in parts: DeepSpeed's Ulysses.

S. A. Jacobs and others, DeepSpeed Ulysses (arXiv:2309.14509).

Two all-to-all exchanges a layer. Before attention each rank gives its positions of all heads and
receives all positions of its share of the heads; after attention, the reverse. Between them runs
the attention that the model was loaded with, over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rlcore.attention.varlen import no_mask
from rlcore.errors import UserError
from rlcore.learner.policy import IN_PARTS
from rlcore.learner.ranks import Shards

Attend = Callable[..., tuple[Tensor, Any]]


def split_attention(lm: Any, shards: Shards) -> None:
    """Let a model's attention exchange positions for heads, in place; each forward is then given
    this rank's part. Raises UserError where heads cannot be divided."""
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and _divided(key_heads, n)]
    if shards.count not in fits:
        raise UserError.choice(
            "learner.sequence_parallel",
            shards.count,
            tuple(map(str, fits)),
            f"the model has {heads} attention heads and {key_heads} key heads",
        )
    core = lm.config._attn_implementation
    name = IN_PARTS + core
    AttentionInterface.register(name, _exchanging(ALL_ATTENTION_FUNCTIONS[core], shards))
    AttentionMaskInterface.register(name, no_mask)
    lm.set_attn_implementation(name)


def _divided(key_heads: int, parts: int) -> bool:
    """Return whether ranks have whole key heads, or copies of one each."""
    return key_heads % parts == 0 or parts % key_heads == 0


def _exchanging(core: Attend, shards: Shards) -> Attend:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    # transformers' interface fixes the parameters
    def over_whole_rows(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        mask = kwargs.pop("whole_mask", None)
        out, weights = core(module, query, key, value, mask, **kwargs)
        # rows of shared prefixes have no outputs for padding
        return F.pad(out, (0, 0, 0, 0, 0, query.shape[2] - out.shape[1])), weights

    made: dict[tuple[int, ...], UlyssesSPAttentionHF] = {}  # each module serves one number of rows

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        rows, heads, _, width = query.shape
        key_heads = key.shape[1]
        shape = rows, heads, key_heads, width
        if shape not in made:
            made[shape] = UlyssesSPAttentionHF(
                attn=over_whole_rows,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key_heads,
                num_hidden_layers=1,  # read by a debugging mode alone
                process_group=shards.group,
                seq_length_is_variable=True,
            )
        exchanged: tuple[Tensor, Any] = made[shape](module, query, key, value, None, **kwargs)
        return exchanged

    return attend
