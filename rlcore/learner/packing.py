"""Micro-batches of variable count under a token budget, in one of two layouts that compute the same
thing.

sorted: rows of like length, right-padded. Causal attention keeps padding out of every real
position, so no mask is made. packed: one row, `position_ids` restarting at each sequence (for a
variable-length kernel, flash-attn's or torch's; with SDPA transformers derives the block-diagonal
mask from the positions).

An episode is one row of results, whatever number of sequences it takes: its columns go on from part
to part, and its parts share a micro-batch, so that losses over sequences see all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlcore.learner.sequences import TokenSequence

Layout = Literal["sorted", "packed"]
EpisodeTokens = Sequence[TokenSequence]  # the parts of one episode, in order; usually one


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some whole episodes, laid out for the model: N sampled tokens of b episodes, in s sequences
    over R rows of W positions.

    Example, two sequences of 2 + 2 and 1 + 1 tokens, packed: input_ids [[5, 9, 4, 6]],
    position_ids [[0, 1, 2, 0]], predict [1, 2, 3], row [0, 0, 1], column [0, 1, 0]
    """

    input_ids: Tensor  # [R, W] int64
    position_ids: Tensor  # [R, W] int64
    predict: Tensor  # [N] int64, flat positions in R*W whose hidden state predicts a sampled token
    targets: Tensor  # [N] int64, those sampled tokens
    episodes: Tensor  # [b] int64, index of each episode among those packed; empty for a dummy
    row: Tensor  # [N] int64, 0..b-1: the token's episode
    column: Tensor  # [N] int64, 0..T-1: the token's index among its episode's sampled tokens
    prompt_lens: Tensor  # [s] int64, first observation of each sequence, in the order of the rows

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    def dense(self, values: Tensor, width: int, fill: float | int | bool = 0.0) -> Tensor:
        """Per-token values [N, ...] as [b, width, ...], `fill` where there is no token.

        Differentiable.
        """
        shape = (len(self.episodes), width, *values.shape[1:])
        return values.new_full(shape, fill).index_put((self.row, self.column), values)

    def flat(self, dense: Tensor) -> Tensor:
        """The tokens [N, ...] of this micro-batch from a tensor [B, T, ...] over all episodes."""
        return dense[self.episodes[self.row], self.column]


def pack(
    episodes: Sequence[EpisodeTokens],
    micro_batch_tokens: int,
    layout: Layout,
    pad_id: int = 0,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Split episodes into micro-batches of at most `micro_batch_tokens` positions, padding
    included.

    A longer episode gets a micro-batch of its own. Sequences and episodes without sampled tokens
    are left out. Longest first, so that a lack of memory shows at once; ties by index, so that the
    same episodes always give the same batches.
    """
    # without a sampled token there is nothing to compute a loss or a score of
    parts = [tuple(s for s in episode if s.scored) for episode in episodes]
    order = [i for i, sequences in enumerate(parts) if sequences]
    # rows of like length share a micro-batch; in one packed row only the sum matters
    size = max if layout == "sorted" else sum
    order.sort(key=lambda i: (-size(map(len, parts[i])), i))
    batches: list[list[int]] = []
    rows = width = total = 0
    for i in order:
        lengths = [len(s) for s in parts[i]]
        # what the micro-batch would be with this episode in it
        rows, width, total = rows + len(lengths), max(width, *lengths), total + sum(lengths)
        needed = rows * width if layout == "sorted" else total
        if not batches or needed > micro_batch_tokens:
            batches.append([])
            rows, width, total = len(lengths), max(lengths), sum(lengths)
        batches[-1].append(i)
    lay_out = _padded_rows if layout == "sorted" else _packed_row
    return [_micro_batch({i: parts[i] for i in b}, lay_out, pad_id, device) for b in batches]


def dummy(token: int = 0, device: torch.device | str = "cpu") -> MicroBatch:
    """One position and no episode: keeps ranks with fewer micro-batches in step with the others, at
    zero weight."""
    one = torch.full((1, 1), token, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=one,
        position_ids=torch.zeros_like(one),
        predict=zero,
        targets=one[0],
        episodes=nothing,
        row=nothing,
        column=nothing,
        prompt_lens=torch.ones_like(zero),
    )


@dataclass(frozen=True, slots=True)
class _Laid:
    """Sequences as rows of inputs. `starts`: flat position at which each sequence begins."""

    input_ids: np.ndarray  # [R, W]
    position_ids: np.ndarray  # [R, W]
    starts: Sequence[int]


def _padded_rows(sequences: Sequence[TokenSequence], pad_id: int) -> _Laid:
    width = max(len(s) for s in sequences)
    # which token pads is of no consequence: no real position attends to it
    input_ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    for row, s in zip(input_ids, sequences):
        row[: len(s)] = s.inputs
    positions = np.broadcast_to(np.arange(width), input_ids.shape)
    return _Laid(input_ids, positions, [r * width for r in range(len(sequences))])


def _packed_row(sequences: Sequence[TokenSequence], pad_id: int) -> _Laid:
    lengths = [len(s) for s in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    input_ids = np.concatenate([s.inputs for s in sequences])[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    return _Laid(input_ids, positions, starts)


def _micro_batch(
    episodes: dict[int, tuple[TokenSequence, ...]],
    lay_out: Callable[[Sequence[TokenSequence], int], _Laid],
    pad_id: int,
    device: torch.device | str,
) -> MicroBatch:
    sequences = [s for parts in episodes.values() for s in parts]
    laid = lay_out(sequences, pad_id)
    counts = [sum(s.scored for s in parts) for parts in episodes.values()]
    arrays = {
        "input_ids": laid.input_ids,
        "position_ids": laid.position_ids,
        "predict": np.concatenate([a + s.predicting for a, s in zip(laid.starts, sequences)]),
        "targets": np.concatenate([s.targets for s in sequences]),
        "episodes": np.array(list(episodes)),
        "row": np.repeat(np.arange(len(counts)), counts),
        "column": np.concatenate([np.arange(n) for n in counts]),
        "prompt_lens": np.array([s.prompt_len for s in sequences]),
    }
    tensors = {n: torch.from_numpy(np.array(a, dtype=np.int64)) for n, a in arrays.items()}
    return MicroBatch(**{name: t.to(device) for name, t in tensors.items()})
