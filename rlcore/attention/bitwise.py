"""Operations of a decoder whose result for a position is the same to the bit whatever else is
computed with it. It may be an engine's step with other requests, or in a learner's pass with whole
sequences.

On x86 CPUs, float32, one thread, torch and MKL have almost all of it. Softmax, sums over the last
dimension and functions of single values give a row the same bits in any company. A product of
matrices does so in any company of four rows or more, also if its columns belong to several weights
side by side (multiples of 32). Two things have to be seen to: products of fewer rows, which take
other kernels, and attention, whose kernels divide the keys by how many there are. Here products
have `LEAST` rows at least, and attention is a product with all `length` positions that a sequence
may have, those that are not attended to masked.

`benchmarks/evidence/bitwise.py` measures each operation, and what vLLM's own kernels leave.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAME = "bitwise"
LEAST = 8  # rows of a product; four suffice with one thread
WIDTHS = 32  # what the sizes of a layer must be multiples of: whole vectors of the processor
LENGTHS = 16  # what `length` is rounded up to


def padded_length(positions: int) -> int:
    """The positions that attention computes with, for sequences of at most so many."""
    return -(-positions // LENGTHS) * LENGTHS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    rows = x.numel() // x.shape[-1]
    if rows >= LEAST:
        return nn.functional.linear(x, weight, bias)
    flat = nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, LEAST - rows))
    return nn.functional.linear(flat, weight, bias)[:rows].view(*x.shape[:-1], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """q [G, M, d], k and v [G, length, d], allowed [G or 1, M, length] bool -> [G, M, d].

    Every row of q attends to something; k and v are finite everywhere.
    """
    rows = q.shape[1]
    missing = max(LEAST - rows, 0)
    q = nn.functional.pad(q, (0, 0, 0, missing))
    scores = torch.bmm(q, k.transpose(1, 2))[:, :rows] * scale
    p = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return torch.bmm(nn.functional.pad(p, (0, 0, 0, missing)), v)[:, :rows]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] turned by its position's angles, cos and sin [..., d] (the same for each half of
    d), in the operations of transformers, which round equally."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def log_probs(logits: Tensor) -> Tensor:
    """[n, V] float32 of logits, which are overwritten, in the operations of the learner's head."""
    z = logits.sub_(logits.amax(dim=1, keepdim=True))
    return z.sub_(z.exp().sum(dim=1, keepdim=True).log())


def machine_reason() -> str | None:
    """Why products of this machine depend on their company; None: they do not."""
    if torch.get_num_threads() > 1:
        return f"{torch.get_num_threads()} threads divide a product by its size, and one does not"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 192, generator=generator) for n in (100, 96))
    whole = linear(x, weight)
    for rows in (1, 3, LEAST, 33):
        if not torch.equal(linear(x[-rows:], weight), whole[-rows:]):
            return f"a product of {rows} rows differs from the same rows among {len(x)}"
    return None


def hold(lm: Any, positions: int) -> None:
    """Have a causal model of transformers compute by these operations, in place. `positions`: the
    most that a sequence has."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, partial(_attend, padded_length(positions)))
    AttentionMaskInterface.register(NAME, lambda *a, **k: None)
    lm.set_attn_implementation(NAME)
    for layer in lm.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


# transformers' interface fixes the parameters
def _attend(
    length: int,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [R, H, W, d], key and value [R, Hk, W, d] of rows that begin at position 0 -> [R, W, H,
    d]."""
    rows, heads, width, dim = query.shape
    own = key.shape[1]
    if width > length or attention_mask is not None or scaling is None:
        raise RuntimeError(f"{NAME} attention takes rows of {length} positions, and no mask")
    # the query heads that share keys are rows of one product
    q = query.reshape(rows * own, heads // own * width, dim)
    k, v = (
        nn.functional.pad(x, (0, 0, 0, length - width)).reshape(rows * own, length, dim)
        for x in (key, value)
    )
    at = torch.arange(width).repeat(heads // own)
    allowed = at[:, None] >= torch.arange(length)
    out = attend(q, k, v, allowed[None], scaling)
    return out.reshape(rows, heads, width, dim).transpose(1, 2), None
