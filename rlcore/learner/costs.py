"""How much work a forward pass is: a model of it that depends on shapes alone, so that what is
chosen by it is the same in every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcore.attention.shared_rows import blocks_of
from rlcore.learner.prefixes import PrefixTree

# Floating-point operations of matrix products that take as long as one of attention, and as moving
# one number to where attention reads it and its gradient back. Measured on CPU with models of 0.6M
# to 135M parameters; what is chosen depends little on them, as the layers outweigh both.
_ATTENTION = 4.0
_MOVE = 24.0


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
        )

    def plain(self, rows: int, width: int) -> float:
        """Rows of sequences, each attending by itself."""
        return rows * width * (self.position + self.score * width / 2)

    def shared(self, tree: PrefixTree) -> float:
        """The nodes of a tree of sequences."""
        work = len(tree.tokens) * self.position
        for block in blocks_of(tree.sizes):
            rows = len(block.rows)
            work += block.scores * self.score
            work += rows * (block.keys * self.key + block.queries * self.query)
        return work
