"""Block top-k attention on the learner's side: an attention implementation of transformers, forward
and backward.

Load the model with `attn_implementation=register(dense)`. A forward without `sparse_rows` is then
exactly the dense implementation; with it, the same module with the same weights attends by the
rule:

    dense = model(input_ids=ids, position_ids=pos, use_cache=False).logits
    sparse = model(input_ids=ids, position_ids=pos, use_cache=False,
                   sparse_rows=SparseRows(rule, prompt_lens)).logits

The switch is an argument of the forward, not a global, so that a forward repeated by gradient
checkpointing attends as it did the first time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rlcore.attention.flex import attend_blocks
from rlcore.attention.seen import QUERY_CHUNK, pages_seen, summaries_of, tokens_seen
from rlcore.attention.specs import SparseSpec
from rlcore.attention.varlen import no_mask
from rlcore.errors import UserError

# By the dense implementation. The last two are GPUs' kernels, where block masks take the place of
# masks over tokens. transformers tries to import any name that contains "flash".
_NAMES = {
    "sdpa": "block_topk_sdpa",
    "eager": "block_topk_eager",
    "varlen": "block_topk_flex",
    "flash_attention_2": "block_topk_flex",
}
_BY_BLOCKS = _NAMES["varlen"]


@dataclass(frozen=True, slots=True)
class SparseRows:
    """How to interpret the rows of one forward.

    Rows start at position 0 in column 0 and are right-padded, or one row holds several packed
    sequences. prompt_lens: prompt tokens of each sequence, in order; required when
    `rule.sparse_prompt` is False. cu_seqlens: for one packed row, the S+1 boundaries of its S
    sequences, from 0 to the row's length; None for right-padded rows.

    Example, two sequences of 5 and 3 tokens packed: SparseRows(rule, cu_seqlens=[0, 5, 8])
    """

    rule: SparseSpec
    prompt_lens: Sequence[int] | None = None
    cu_seqlens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.rule.sparse_prompt and self.prompt_lens is None:
            raise ValueError("sparse_prompt=false needs the prompt lengths of the rows")


def register(dense: str = "sdpa") -> str:
    """Register with transformers and return the implementation's name.

    `dense` serves forwards without `sparse_rows`. Beside a GPU's kernel (varlen, flash_attention_2)
    sparse forwards are FlexAttention's (`flex.py`), and a forward without `sparse_rows` is a
    RuntimeError. Raises UserError for another dense implementation.
    """
    if dense not in _NAMES:
        raise UserError.choice("learner.attention", dense, tuple(_NAMES))
    name = _NAMES[dense]
    attend_sparsely = attend_rows_by_blocks if name == _BY_BLOCKS else attend_rows

    # transformers calls it with these names
    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        sparse_rows: SparseRows | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if sparse_rows is None:
            return _dense(dense)(module, query, key, value, attention_mask, **kwargs)
        if kwargs.get("sliding_window") is not None or kwargs.get("dropout"):
            raise RuntimeError("block top-k attention supports no sliding window and no dropout")
        out = attend_sparsely(query, key, value, sparse_rows, kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    mask = no_mask if name == _BY_BLOCKS else ALL_MASK_ATTENTION_FUNCTIONS[dense]
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    return name


def _dense(name: str) -> Any:
    """The implementation that transformers knows under `name`."""
    if _NAMES[name] == _BY_BLOCKS:
        raise RuntimeError(
            f"{_BY_BLOCKS} attends sparsely only: load the model with {name} for a dense forward"
        )
    return ALL_ATTENTION_FUNCTIONS[name]


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: SparseRows, scaling: float | None = None
) -> Tensor:
    """Causal block top-k attention, differentiable.

    query [B, H, T, D], key and value [B, Hk, T, D] -> [B, H, T, D]. Columns after a row's last
    token yield meaningless values and reach no other column.
    """
    bounds = _bounds(query, key, rows)
    if rows.cu_seqlens is None:
        return _attend(query, key, value, rows, scaling)
    parts = []
    for i, (a, b) in enumerate(pairwise(bounds)):
        prompt = None if rows.prompt_lens is None else rows.prompt_lens[i : i + 1]
        one = (query[:, :, a:b], key[:, :, a:b], value[:, :, a:b])
        parts.append(_attend(*one, SparseRows(rows.rule, prompt), scaling))
    return torch.cat(parts, dim=2)


def attend_rows_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, rows: SparseRows, scaling: float | None = None
) -> Tensor:
    """The same by FlexAttention (`flex.py`), whose backward pass needs a GPU."""
    bounds = _bounds(query, key, rows)
    shape = (query.shape[0], len(bounds) - 1)
    until = None
    if not rows.rule.sparse_prompt:
        prompts = rows.prompt_lens
        if prompts is None or len(prompts) != shape[0] * shape[1]:
            raise ValueError(f"{shape[0] * shape[1]} sequences need as many prompt lengths")
        until = torch.as_tensor(list(prompts), device=query.device).view(shape)
    return attend_blocks(query, key, value, rows.rule, bounds, until, scaling)


def _bounds(query: Tensor, key: Tensor, rows: SparseRows) -> list[int]:
    """Where sequences begin and end in every row; raises ValueError where rows do not fit."""
    if query.shape[2] != key.shape[2]:
        raise ValueError("block top-k attention on the learner takes whole sequences, not a cache")
    if rows.cu_seqlens is None:
        return [0, query.shape[2]]
    bounds = list(rows.cu_seqlens)
    if query.shape[0] != 1 or bounds[0] != 0 or bounds[-1] != query.shape[2]:
        raise ValueError(
            f"packed rows: boundaries {bounds} do not cover one row of {query.shape[2]} tokens"
        )
    return bounds


def _attend(
    query: Tensor, key: Tensor, value: Tensor, rows: SparseRows, scaling: float | None
) -> Tensor:
    """Rows that all start in column 0, in chunks of queries so that masks stay small."""
    rule, t = rows.rule, query.shape[2]
    dense_end, dense_until = _dense_prefix(rows, query.shape[0], t, query.device)
    parts = []
    if dense_end:
        q, k, v = (x[:, :, :dense_end] for x in (query, key, value))
        parts.append(attend_groups(q, k, v, None, scaling))
    summaries = summaries_of(key, rule.block_size)
    for a in range(dense_end, t, QUERY_CHUNK):
        z = min(t, a + QUERY_CHUNK)
        q, k, v = query[:, :, a:z], key[:, :, :z], value[:, :, :z]
        pages = pages_seen(q, summaries, rule, a, dense_until)
        parts.append(attend_groups(q, k, v, tokens_seen(pages, rule.block_size, a), scaling))
    return torch.cat(parts, dim=2)


def attend_groups(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """SDPA with one mask for each KV head's group of queries; without a mask, causal.

    q [B, H, C, D], k and v [B, Hk, T, D], mask [B, Hk, C, T] bool -> [B, H, C, D].
    """
    (b, heads, c, d), (kv_heads, t) = q.shape, k.shape[1:3]
    # KV heads join the batch, so that one mask serves a whole group without a copy
    folded = (b * kv_heads, heads // kv_heads)
    k, v = (x.reshape(-1, 1, t, d).expand(*folded, t, d) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.reshape(*folded, c, d),
        k,
        v,
        attn_mask=None if mask is None else mask.view(-1, 1, c, t),
        is_causal=mask is None,
        scale=scaling,
    )
    return out.reshape(q.shape)


def _dense_prefix(
    rows: SparseRows, b: int, t: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """Columns that attend densely in every row; each row's prompt length [b] where prompts do."""
    end = min(t, rows.rule.dense_positions)
    if rows.rule.sparse_prompt:
        return end, None
    prompts = rows.prompt_lens
    if prompts is None or len(prompts) != b:
        raise ValueError(f"{b} rows need as many prompt lengths, not {prompts}")
    until = torch.as_tensor(list(prompts), device=device)
    return min(t, max(end, min(prompts))), until
