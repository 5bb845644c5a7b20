"""The scores of an LM-head pass by one kernel, for GPUs. Tiles of logits are summed up where they
are computed: no row of the vocabulary is ever in memory.

A program takes some positions through all tiles of the vocabulary. It keeps the running maximum,
the sums of exponentials, the target's logit and the largest logits so far. A tile's entries enter
that list only while they exceed its least, which after the first tiles is seldom. Logits are exact:
float32 sums that are not rounded. The backward pass is `lm_head`'s, in chunks.

UNPROVEN on GPUs: the kernel is compiled for them, and equal under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.corrections.break_even import SIZE, sketch_of, vocabulary_places

ROWS, TILE, STEP = 64, 128, 64  # positions of a program, columns of a tile, states of a product
_GATHERED = 1024  # positions whose rows of the weight are gathered at a time


# six parameters: the tensors of the pass, as in `lm_head`
def score(
    out: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor | None, spec: Any
) -> Tensor | None:
    """Fill the `_Outputs` of a pass (`lm_head`) over n positions; the sketch [n, 32] if the spec
    asks for one. hidden [n, D], weight [V, D] of one dtype."""
    k = 0 if out.topk_ids is None else out.topk_ids.shape[1]
    scale, places = 1.0 / spec.temperature, vocabulary_places(len(weight), hidden.device)
    slots = max(16, 1 << max(k - 1, 0).bit_length())
    n, device = len(hidden), hidden.device
    weighted, chosen = (torch.empty(n, device=device) for _ in range(2))
    values = torch.empty(n, slots, device=device)
    columns = torch.empty(n, slots, dtype=torch.int32, device=device)
    sketched = torch.empty(n, SIZE if spec.sketch else 0, device=device)
    if n:
        _head_kernel[(triton.cdiv(n, ROWS),)](
            *(hidden.contiguous(), weight.contiguous(), targets, places),
            *(out.top, out.total, weighted, chosen, values, columns, sketched),
            *(n, len(weight), hidden.shape[1], scale),
            ROWS=ROWS,
            TILE=TILE,
            STEP=STEP,
            SLOTS=slots,
            TOPK=k > 0,
            SKETCH=spec.sketch,
            num_warps=8,
        )
    base = out.top + out.total.log()  # [n, 1]: z less it is a log-prob
    out.logp.copy_(chosen - base[:, 0])
    out.entropy.copy_(out.total.log()[:, 0] - weighted / out.total[:, 0])
    if out.topk_ids is not None:
        best, order = values.topk(k, dim=1)
        out.topk_ids.copy_(columns.gather(1, order))
        out.topk_logp.copy_(best - base)
    if ids is not None:
        z = _logits_at(hidden, weight, ids.clamp_min(0), scale)
        out.at_ids.copy_((z - base).masked_fill_(ids < 0, 0.0))
    return sketch_of(hidden, sketched, out.total, targets, places) if spec.sketch else None


def _logits_at(hidden: Tensor, weight: Tensor, columns: Tensor, scale: float) -> Tensor:
    """Tempered logits [n, k] float32 at columns [n, k] int64."""
    parts = [
        torch.einsum("nd,nkd->nk", h.float(), weight[at].float()) * scale
        for h, at in zip(hidden.split(_GATHERED), columns.split(_GATHERED), strict=True)
    ]
    return torch.cat(parts)


LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _tile_logits(states, weight, on, column, inside, dim, scale, STEP: tl.constexpr):
    """[rows, tile] float32: scale times the products of states and rows of the weight."""
    weights = weight + column.to(tl.int64)[None, :] * dim
    z = tl.zeros([states.shape[0], column.shape[0]], tl.float32)
    for first in range(0, dim, STEP):
        d = first + tl.arange(0, STEP)
        h = tl.load(states + d[None, :], mask=on[:, None] & (d < dim)[None, :], other=0.0)
        v = tl.load(weights + d[:, None], mask=inside[None, :] & (d < dim)[:, None], other=0.0)
        z = tl.dot(h, v, z, input_precision="ieee")
    return tl.where(inside[None, :], z * scale, LOWEST)


@triton.jit
def _softmax_sums(z, inside, m, s, w):
    """(new maximum, what sums so far shrink by, e of the tile, sum of e, sum of e (z - m))."""
    higher = tl.maximum(m, tl.max(z, 1))
    shrunk = tl.exp(m - higher)
    w = tl.where(s > 0, shrunk * (w + s * (m - higher)), 0.0)
    shifted = z - higher[:, None]
    e = tl.where(inside[None, :], tl.exp(shifted), 0.0)
    w += tl.sum(tl.where(inside[None, :], e * shifted, 0.0), 1)
    return higher, shrunk, e, s * shrunk + tl.sum(e, 1), w


@triton.jit
def _largest(z, start, kept, kept_at):
    """The largest logits [rows, slots] and their columns, after a tile."""
    of_tile, slot = tl.arange(0, z.shape[1]), tl.arange(0, kept.shape[1])
    best, least = tl.max(z, 1), tl.min(kept, 1)
    while tl.max((best > least).to(tl.int32), 0) > 0:
        where, gone = tl.argmax(z, 1), tl.argmin(kept, 1)
        enters = (best > least)[:, None]
        replaced = enters & (slot[None, :] == gone[:, None])
        kept = tl.where(replaced, best[:, None], kept)
        kept_at = tl.where(replaced, (start + where)[:, None].to(tl.int32), kept_at)
        z = tl.where(enters & (of_tile[None, :] == where[:, None]), LOWEST, z)
        best, least = tl.max(z, 1), tl.min(kept, 1)
    return kept, kept_at


@triton.jit
def _head_kernel(
    hidden,
    weight,
    targets,
    places,
    top,
    total,
    weighted,
    chosen,
    values,
    columns,
    sketched,
    n,
    vocabulary,
    dim,
    scale,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SLOTS: tl.constexpr,
    TOPK: tl.constexpr,
    SKETCH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    on = row < n
    states = hidden + row.to(tl.int64)[:, None] * dim
    target = tl.load(targets + row, mask=on, other=-1)[:, None]
    place = tl.arange(0, 16)[None, :]
    m = tl.full([ROWS], LOWEST, tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    w = tl.zeros([ROWS], tl.float32)  # sum of e (z - m)
    own = tl.zeros([ROWS], tl.float32)  # logit of the target
    sums = tl.zeros([ROWS, 16], tl.float32)
    kept = tl.full([ROWS, SLOTS], LOWEST, tl.float32)
    kept_at = tl.zeros([ROWS, SLOTS], tl.int32)
    for start in range(0, vocabulary, TILE):
        column = start + tl.arange(0, TILE)
        inside = column < vocabulary
        z = _tile_logits(states, weight, on, column, inside, dim, scale, STEP)
        m, shrunk, e, s, w = _softmax_sums(z, inside, m, s, w)
        own += tl.sum(tl.where(column[None, :] == target, z, 0.0), 1)
        if SKETCH:
            its = tl.load(places + column[:, None] * 16 + place, mask=inside[:, None], other=0.0)
            sums = tl.dot(e, its, sums * shrunk[:, None], input_precision="tf32x3")
        if TOPK:
            kept, kept_at = _largest(z, start, kept, kept_at)
    tl.store(top + row, m, mask=on)
    tl.store(total + row, s, mask=on)
    tl.store(weighted + row, w, mask=on)
    tl.store(chosen + row, own, mask=on)
    at = row[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
    tl.store(values + at, kept, mask=on[:, None])
    tl.store(columns + at, kept_at, mask=on[:, None])
    if SKETCH:
        tl.store(sketched + row[:, None] * 16 + place, sums, mask=on[:, None])
