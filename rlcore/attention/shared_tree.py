"""Attention over shared prefixes on GPUs: torch's FlexAttention over all nodes of a tree at once
(`shared_prefix.py`), by one mask, so that nothing is gathered.

Nodes come in the order in which a walk from the root meets them. So the nodes below one follow it
in one stretch, and the mask is two comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from rlcore.attention.implementation import BLOCK, flex_kernel
from rlcore.attention.shared_prefix import TreeRow
from rlcore.attention.specs import SparseSpec


@dataclass(frozen=True, slots=True)
class SharedTree:
    """How FlexAttention reads the nodes of a forward: U nodes, each seen by itself and by those
    below it. Made once for a micro-batch and used by all layers. Gradients of keys are summed in
    float32 by the kernel.

    Example, the tree of [5, 9, 4] and [5, 9, 7]: node 1 (the 9) is seen by nodes 1 to 3, node 2
    (the 4) by itself alone
    """

    nodes: int
    mask: BlockMask

    @classmethod
    def of(cls, rows: Sequence[TreeRow], nodes: int, device: torch.device | str = "cpu") -> Self:
        """From rows that own each of `nodes` nodes once. Raises ValueError for nodes in another
        order than a walk from the root."""
        end = np.zeros(-(-nodes // BLOCK) * BLOCK, dtype=np.int64)
        above = 0  # pairs of a node and one of its path
        for row in rows:
            end[row.path] = np.maximum(end[row.path], row.path[-1] + 1)
            length = len(row.path)
            above += (length * (length + 1) - row.first * (row.first + 1)) // 2
        if int((end[:nodes] - np.arange(nodes)).sum()) != above:
            raise ValueError("the nodes below one must follow it in one stretch")
        return cls(nodes, _tree_mask(torch.from_numpy(end).to(device), nodes))

    def ready(self, dtype: torch.dtype) -> SharedTree:
        """Itself: one mask serves every dtype."""
        return self

    def by(self, rule: SparseSpec) -> SharedTree:
        raise RuntimeError("one mask over shared prefixes attends densely, not by pages")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        """q [1, H, U, D], k and v [1, Hk, U, D] -> [1, U, H, D]."""
        q, k, v = (x[:, :, : self.nodes] for x in (q, k, v))  # more: padding, which sees nothing
        grouped = q.shape[1] != k.shape[1]
        kernel = flex_kernel(q.device.type)
        out = kernel(q, k, v, block_mask=self.mask, scale=scaling, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)


def _tree_mask(end: Tensor, nodes: int) -> BlockMask:
    """The mask of nodes that are seen from themselves on until `end` [n * BLOCK] int64, 0 for
    padding. Listed are the blocks that hold a visible pair; a block of visible pairs alone is in a
    separate list, which needs no mask."""
    first = torch.arange(0, len(end), BLOCK, device=end.device)
    before = first[:, None] > first  # blocks of queries after a block of keys
    ends = end.view(-1, BLOCK)
    touched = before & (ends.amax(1) > first[:, None])
    last = (first + BLOCK).clamp(max=nodes)
    whole = before & (ends.amin(1) >= last[:, None])
    own = torch.eye(len(first), dtype=torch.bool, device=end.device)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        *_listed(touched & ~whole | own),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(nodes, nodes),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[n, n] bool -> how many blocks of keys each block of queries has, and which, as FlexAttention
    takes them."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
