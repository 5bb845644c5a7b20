"""Which keys each query sees where sequences share the positions of their common prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rlcore.attention.specs import SparseSpec

_SLACK = 32  # rows whose lengths differ by no more are padded to one block


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One sequence in the tree.

    Example, a sequence of 5 positions of which the first 3 are another's: TreeRow([0, 1, 2, 8, 9],
    3)
    """

    path: np.ndarray  # [L] int64, the node of each position
    first: int  # the nodes from this position on are this row's own: its queries


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of like size, padded: S rows of K keys and Q queries.

    The queries of a square block are all its positions, and attend as in a plain forward; only
    those of the rows' own nodes are read. Another block has the own ones alone, under a mask.
    """

    keys: Tensor  # [S, K] int64, nodes
    queries: Tensor | None  # [S, Q] int64, nodes; None: square
    first: Tensor  # [S] int64, position of each row's first own node
    bias: Tensor | None = None  # [S, 1, Q, K], added to the scores; made by `ready`

    def ready(self, dtype: torch.dtype) -> Block:
        """With the mask of a forward."""
        if self.queries is None:
            return self
        (_, width), length = self.queries.shape, self.keys.shape[1]
        device = self.keys.device
        position = self.first[:, None] + torch.arange(width, device=device)
        seen = torch.arange(length, device=device) <= position[:, :, None]
        bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
        return replace(self, bias=bias[:, None])


@dataclass(frozen=True, slots=True)
class SharedRows:
    """How attention reads the nodes of a forward."""

    blocks: tuple[Block, ...]
    places: Tensor  # [U] int64: each node's query among those of all blocks, flattened
    rule: SparseSpec | None = None  # which pages queries attend to; None: all

    @classmethod
    def of(cls, rows: Sequence[TreeRow], nodes: int, device: torch.device | str = "cpu") -> Self:
        """From rows that own each of `nodes` nodes once."""
        places = np.empty(nodes, dtype=np.int64)
        blocks, start = [], 0
        for shape in blocks_of([(len(r.path), len(r.path) - r.first) for r in rows]):
            chosen = [rows[i] for i in shape.rows]
            for row in chosen:
                own = row.path[row.first :]
                at = start + (row.first if shape.square else 0)
                places[own] = np.arange(at, at + len(own))
                start += shape.queries
            blocks.append(_padded(chosen, shape, device))
        return cls(tuple(blocks), torch.from_numpy(places).to(device))

    def ready(self, dtype: torch.dtype) -> SharedRows:
        """With the masks that a dense forward in `dtype` needs."""
        return replace(self, blocks=tuple(block.ready(dtype) for block in self.blocks))

    def by(self, rule: SparseSpec) -> SharedRows:
        """For a sparse forward, which makes its masks in every layer."""
        if not rule.sparse_prompt:
            raise ValueError(
                "sparse_prompt=false: a node does not say where its sequence's prompt ends"
            )
        return replace(self, rule=rule)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Which rows a block holds, by index, padded to `keys` and `queries`."""

    rows: tuple[int, ...]
    keys: int
    queries: int
    square: bool

    @property
    def scores(self) -> int:
        """Pairs of query and key that are computed."""
        pairs = self.queries * self.keys
        return len(self.rows) * (pairs // 2 if self.square else pairs)


def blocks_of(sizes: Sequence[tuple[int, int]]) -> list[BlockShape]:
    """Blocks for rows of (keys, own queries), rows without queries left out.

    Causal attention over all of a row's positions costs half a square, so the rows whose own nodes
    are the larger part are computed as squares.
    """
    blocks = []
    for square in (True, False):
        chosen = [i for i, (k, q) in enumerate(sizes) if q and (2 * q >= k) == square]
        chosen.sort(key=lambda i: (-sizes[i][0], i))
        while chosen:
            keys = sizes[chosen[0]][0]
            least = keys - max(_SLACK, keys // 4)
            end = next((n for n, i in enumerate(chosen) if sizes[i][0] < least), len(chosen))
            rows, chosen = tuple(chosen[:end]), chosen[end:]
            queries = keys if square else max(sizes[i][1] for i in rows)
            blocks.append(BlockShape(rows, keys, queries, square))
    return blocks


def _padded(rows: Sequence[TreeRow], shape: BlockShape, device: torch.device | str) -> Block:
    """Padding repeats node 0: no query that is read attends to it, and its own outputs are not
    read."""
    keys = np.zeros((len(rows), shape.keys), dtype=np.int64)
    queries = np.zeros((len(rows), shape.queries), dtype=np.int64)
    for i, row in enumerate(rows):
        keys[i, : len(row.path)] = row.path
        own = row.path[row.first :]
        queries[i, : len(own)] = own
    first = np.array([row.first for row in rows], dtype=np.int64)
    keys_, queries_, first_ = (torch.from_numpy(a).to(device) for a in (keys, queries, first))
    return Block(keys_, None if shape.square else queries_, first_)
