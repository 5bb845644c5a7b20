"""Block top-k attention on the learner's side: an attention implementation of transformers, forward and backward.

Load the model with `attn_implementation=register(dense)`. A forward without `sparse_rows` is then exactly the dense
implementation; with it, the same module with the same weights attends by the rule:

    dense = model(input_ids=ids, position_ids=pos, use_cache=False).logits
    sparse = model(input_ids=ids, position_ids=pos, use_cache=False, sparse_rows=SparseRows(rule, prompt_lens)).logits

The switch travels as an argument of the forward, not as a global: a forward that gradient checkpointing repeats in the
backward pass, after others have run, attends as it did the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rlcore.attention.block_topk import BlockTopK, group_queries, page_mask, page_summaries, select_pages
from rlcore.errors import UserError

QUERY_CHUNK = 512  # queries whose masks exist at one time
# Transformers takes every name with "flash" in it for a package or kernel to import.
_NAMES = {"sdpa": "block_topk_sdpa", "eager": "block_topk_eager", "flash_attention_2": "block_topk_fa2"}


@dataclass(frozen=True, slots=True)
class SparseRows:
    """How the rows of one forward are to be read. Rows start at position 0 in column 0 (right-padded, or packed).

    prompt_lens: prompt tokens of each sequence, in order; needed when `rule.sparse_prompt` is False. cu_seqlens: for
    one packed row, the S+1 boundaries of its S sequences, from 0 to the row's length; None for right-padded rows.
    """

    rule: BlockTopK
    prompt_lens: Sequence[int] | None = None
    cu_seqlens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.rule.sparse_prompt and self.prompt_lens is None:
            raise ValueError("sparse_prompt=false needs the prompt lengths of the rows")


def register(dense: str = "sdpa") -> str:
    """Register with transformers and return the implementation's name; `dense` serves forwards without `sparse_rows`.

    flash_attention_2 lends its mask function alone (packed rows need no mask) and is not imported: transformers finds
    its kernels by the implementation's name, so a forward without `sparse_rows` is then a RuntimeError.
    Raises UserError for a dense implementation that transformers does not know.
    """
    if dense not in _NAMES:
        raise UserError.choice("learner.attention", dense, tuple(_NAMES))
    name = _NAMES[dense]

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        sparse_rows: SparseRows | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if sparse_rows is None:
            if dense == "flash_attention_2":
                raise RuntimeError(f"{name} attends sparsely only: a dense forward needs a model loaded with {dense}")
            inner = ALL_ATTENTION_FUNCTIONS[dense]
            return inner(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        if kwargs.get("sliding_window") is not None or dropout:
            raise RuntimeError("block top-k attention has neither a sliding window nor dropout")
        out = attend_rows(query, key, value, sparse_rows, scaling)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[dense])
    return name


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: SparseRows, scaling: float | None = None
) -> torch.Tensor:
    """Causal block top-k attention. query [B, H, T, D], key and value [B, Hk, T, D] -> [B, H, T, D]; differentiable.

    Columns after a row's last token yield values that mean nothing and reach no other column.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError("block top-k attention on the learner takes whole sequences, not a cache")
    if rows.cu_seqlens is None:
        return _attend(query, key, value, rows.rule, rows.prompt_lens, scaling)
    bounds = list(rows.cu_seqlens)
    if query.shape[0] != 1 or bounds[0] != 0 or bounds[-1] != query.shape[2]:
        raise ValueError(f"packed rows: boundaries {bounds} do not cover one row of {query.shape[2]} tokens")
    parts = []
    for i, (a, b) in enumerate(pairwise(bounds)):
        prompt = None if rows.prompt_lens is None else rows.prompt_lens[i : i + 1]
        parts.append(_attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], rows.rule, prompt, scaling))
    return torch.cat(parts, dim=2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: BlockTopK,
    prompt_lens: Sequence[int] | None,
    scaling: float | None,
) -> torch.Tensor:
    """Rows that all start in column 0, in chunks of queries so that masks stay small."""
    b, heads, t, d = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    dense_end = min(t, rule.dense_positions)
    dense_until = None
    if not rule.sparse_prompt:
        if prompt_lens is None or len(prompt_lens) != b:
            raise ValueError(f"{b} rows need as many prompt lengths, not {prompt_lens}")
        dense_until = torch.as_tensor(list(prompt_lens), device=query.device)
        dense_end = min(t, max(dense_end, min(prompt_lens)))
    # KV heads join the batch, so that a mask of one KV head serves its group of query heads without a copy
    q = query.reshape(b * kv_heads, group, t, d)
    k = key.reshape(b * kv_heads, 1, t, d).expand(-1, group, -1, -1)
    v = value.reshape(b * kv_heads, 1, t, d).expand(-1, group, -1, -1)
    parts = []
    if dense_end:
        q0, k0, v0 = q[:, :, :dense_end], k[:, :, :dense_end], v[:, :, :dense_end]
        parts.append(F.scaled_dot_product_attention(q0, k0, v0, is_causal=True, scale=scaling))
    summaries = _summaries(key, rule.block_size)
    for a in range(dense_end, t, QUERY_CHUNK):
        z = min(t, a + QUERY_CHUNK)
        mask = _token_mask(query[:, :, a:z], summaries, rule, a, dense_until)
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, a:z], k[:, :, :z], v[:, :, :z], attn_mask=mask.view(b * kv_heads, 1, z - a, z), scale=scaling
            )
        )
    return torch.cat(parts, dim=2).view(b, heads, t, d)


@torch.no_grad()
def _summaries(key: torch.Tensor, block_size: int) -> torch.Tensor:
    """Summaries of the complete pages of each row: key [B, Hk, T, D] -> [B, Hk, T // block_size, D]."""
    whole = key.shape[2] // block_size
    return page_summaries(key[:, :, : whole * block_size].unflatten(2, (whole, block_size)))


@torch.no_grad()
def _token_mask(
    query: torch.Tensor, summaries: torch.Tensor, rule: BlockTopK, start: int, dense_until: torch.Tensor | None
) -> torch.Tensor:
    """Which keys the queries at positions `start ..` see: query [B, H, C, D] -> [B, Hk, C, start + C] bool."""
    kv_heads, bs = summaries.shape[1], rule.block_size
    end = start + query.shape[2]
    position = torch.arange(start, end, device=query.device)
    n = (end - 1) // bs + 1
    mean_query = group_queries(query.transpose(1, 2), kv_heads).transpose(1, 2)  # [B, Hk, C, D]
    scores = mean_query.new_zeros(*mean_query.shape[:3], n)  # an incomplete last page is somebody's own: no score
    complete = min(n, summaries.shape[2])
    scores[..., :complete] = mean_query @ summaries[:, :, :complete].transpose(-1, -2)
    pages = position // bs + 1
    keep = page_mask(select_pages(scores, pages, rule.budget(pages), rule.max_budget(n)), n)
    seen = keep.repeat_interleave(bs, dim=-1)[..., :end]
    if dense_until is not None:
        seen = seen | (position < dense_until[:, None])[:, None, :, None]
    return seen & (torch.arange(end, device=query.device) <= position[:, None])
