"""The largest entries of long rows, found through the maxima of blocks: one pass over the rows, and
few candidates that are ranked. torch's own top k on CPU copies every row and selects in it."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64  # columns of a block


def row_maxima(z: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """Row maxima [n, 1], and for a later top k the maxima [n, nb] of blocks: block j holds columns
    j, j + nb, ... None where rows are too short for blocks to save time. z: [n, V]."""
    v = z.shape[1]
    nb = v // _BLOCK
    if k == 0 or nb <= 4 * k:
        return z.amax(dim=1, keepdim=True), None
    blocks = _block_maxima(z, nb)
    top = blocks.amax(dim=1, keepdim=True)
    if nb * _BLOCK < v:
        top = torch.maximum(top, z[:, nb * _BLOCK :].amax(dim=1, keepdim=True))
    return top, blocks


def largest_columns(z: Tensor, blocks: Tensor | None, k: int) -> Tensor:
    """Columns [n, k] of the exact top k of z [n, V], the largest first: the k blocks of largest
    maxima hold it. `blocks`: the result of `row_maxima`, valid also for rows that were shifted
    since."""
    if blocks is None:
        return z.topk(k, dim=1).indices
    candidates = _candidates(z.shape[1], blocks, k)
    return candidates.gather(1, z.gather(1, candidates).topk(k, dim=1).indices)


def largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values [n, k] and columns [n, k] of the exact top k of z [n, V], the largest first.

    Where equal values compete for a place, any of their columns may be named, as by `torch.topk`.
    """
    v = z.shape[1]
    nb = v // _BLOCK
    if k == 0 or nb <= 4 * k:
        found = z.topk(k, dim=1)
        return found.values, found.indices
    candidates = _candidates(v, _block_maxima(z, nb), k)
    values, places = z.gather(1, candidates).topk(k, dim=1)
    return values, candidates.gather(1, places)


def _block_maxima(z: Tensor, nb: int) -> Tensor:
    return z[:, : nb * _BLOCK].view(len(z), _BLOCK, nb).amax(dim=1)


def _candidates(v: int, blocks: Tensor, k: int) -> Tensor:
    """Columns [n, c] among which the top k are."""
    n, nb = blocks.shape
    best = blocks.topk(k, dim=1).indices
    columns = best.unsqueeze(2) + torch.arange(_BLOCK, device=blocks.device) * nb
    columns = columns.view(n, best.shape[1] * _BLOCK)
    left_over = torch.arange(nb * _BLOCK, v, device=blocks.device).expand(n, -1)
    return torch.cat([columns, left_over], dim=1)
