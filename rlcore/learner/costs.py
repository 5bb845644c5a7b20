"""How much work a forward pass is: a model of it that depends on shapes alone, so that what is
chosen by it is the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.attention.shared_rows import blocks_of
from rlcore.learner.prefixes import PrefixTree

# Floating-point operations of matrix products that take as long as one of attention, and as moving
# one number to where attention reads it and its gradient back. Measured on CPU with models of 0.6M
# to 135M parameters; what is chosen depends little on them, as the layers outweigh both.
_ATTENTION = 4.0
_MOVE = 24.0
# Those that take as long as what a layer costs at any size: a third of 6 to 19 ms a micro-batch of
# four layers, at 100 GFLOP/s
_BATCH = 1e8


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Floating-point operations of a forward pass, by what it consists of; the head is left out,
    whose work is the same in every layout.

    Example: PassCosts(position=2.7e8, score=2.8e5, key=2.8e5, query=8.3e5)
    """

    position: float  # one position in every layer, but for attention
    score: float  # one pair of query and key in every layer
    key: float  # gathering one position's key and value for attention, in every layer
    query: float  # gathering one query, and its output back
    batch: float = 0.0  # one micro-batch, whatever its size

    @classmethod
    def of(cls, lm: Any) -> PassCosts:
        """Of a causal LM, whole or divided among the ranks."""
        config = lm.config.get_text_config()
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        ends = {id(lm.get_input_embeddings().weight), id(lm.get_output_embeddings().weight)}
        whole = {id(p): getattr(p, "ds_shape", p.shape) for p in lm.parameters()}
        matrices = [s.numel() for i, s in whole.items() if len(s) >= 2 and i not in ends]
        return cls(
            position=2.0 * sum(matrices),
            score=4.0 * heads * width * layers * _ATTENTION,
            key=2.0 * kv_heads * width * layers * _MOVE,
            query=2.0 * heads * width * layers * _MOVE,
            batch=_BATCH * layers,
        )

    def plain(self, rows: int, width: int) -> float:
        """Rows of sequences, each attending by itself."""
        return rows * width * (self.position + self.score * width / 2)

    def cuts(self, lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[int]:
        """Where to divide padded rows for the least work: the end of each micro-batch.

        Of items in order of falling length, `rows` each, a micro-batch has at most `budget`
        positions, or one item. The shortest path over all divisions.
        """
        ends = np.concatenate([[0], np.cumsum(rows)])
        count = len(lengths)
        best, cut = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        best[0] = 0.0
        for i, length in enumerate(lengths):
            most = int(np.searchsorted(ends, ends[i] + budget // length, side="right")) - 1
            to = slice(i + 1, max(most, i + 1) + 1)
            each = self.batch + (ends[to] - ends[i]) * self.plain(1, length)
            better = best[i] + each < best[to]
            best[to] = np.where(better, best[i] + each, best[to])
            cut[to] = np.where(better, i, cut[to])
        found = [count] if count else []
        while found and cut[found[-1]]:
            found.append(int(cut[found[-1]]))
        return found[::-1]

    def shared(self, tree: PrefixTree) -> float:
        """The nodes of a tree of sequences."""
        work = len(tree.tokens) * self.position
        for block in blocks_of(tree.sizes):
            rows = len(block.rows)
            work += block.scores * self.score
            work += rows * (block.keys * self.key + block.queries * self.query)
        return work
