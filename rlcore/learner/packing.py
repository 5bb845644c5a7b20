"""Micro-batches of variable count under a token budget, in one of two layouts that compute the same thing.

sorted: rows of like length, right-padded. Causal attention keeps padding out of every real position: no mask is made.
packed: one row, `position_ids` restarting at each sequence (flash-attn's variable-length kernel; with SDPA transformers
derives the block-diagonal mask from the positions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Layout = Literal["sorted", "packed"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence to score: prompt [P], P >= 1, and response [T] token ids.

    Position P+t-1 predicts response token t, so the last token is never an input.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError("a sequence without a prompt has nothing to predict its first token from")

    def __len__(self) -> int:
        """Positions to compute."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def inputs(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, self.response_ids[:-1]])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some whole sequences, laid out for the model. N response tokens of b sequences in R rows of L positions."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64
    predict: Tensor  # [N] int64, flat positions in R*L whose hidden state predicts a response token
    targets: Tensor  # [N] int64, those response tokens
    sequences: Tensor  # [b] int64, index of each sequence in the list that was packed; empty for a dummy
    row: Tensor  # [N] int64, 0..b-1
    column: Tensor  # [N] int64, 0..T-1

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    def dense(self, values: Tensor, width: int, fill: float | int | bool = 0.0) -> Tensor:
        """Per-token values [N, ...] as [b, width, ...], `fill` where there is no token; differentiable."""
        shape = (len(self.sequences), width, *values.shape[1:])
        return values.new_full(shape, fill).index_put((self.row, self.column), values)

    def flat(self, dense: Tensor) -> Tensor:
        """The tokens [N, ...] of this micro-batch from a tensor [B, T, ...] over all sequences."""
        return dense[self.sequences[self.row], self.column]


def pack(
    sequences: Sequence[Tokens],
    micro_batch_tokens: int,
    layout: Layout,
    pad_id: int = 0,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Split sequences into micro-batches of at most `micro_batch_tokens` positions, padding included.

    A sequence longer than that gets one of its own. Sequences of length 0 in the response are left out. Longest first,
    so that a lack of memory shows at once; ties by index, so that the same sequences always give the same batches.
    """
    order = [i for i in range(len(sequences)) if len(sequences[i].response_ids)]
    order.sort(key=lambda i: (-len(sequences[i]), i))
    batches: list[list[int]] = []
    used = width = 0
    for i in order:
        length = len(sequences[i])
        needed = used + (width if layout == "sorted" else length)
        if not batches or needed > micro_batch_tokens:
            batches.append([])
            needed = width = length
        batches[-1].append(i)
        used = needed
    if layout == "sorted":
        return [_rows([sequences[i] for i in b], b, pad_id, device) for b in batches]
    return [_one_row([sequences[i] for i in b], b, device) for b in batches]


def dummy(token: int = 0, device: torch.device | str = "cpu") -> MicroBatch:
    """One position and no sequence: keeps ranks with fewer micro-batches in step with the others, at zero weight."""
    one = Tokens(np.array([token]), np.array([token]))
    mb = _rows([one], [0], token, device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return MicroBatch(mb.input_ids, mb.position_ids, mb.predict, mb.targets, nothing, nothing, nothing)


def _rows(sequences: Sequence[Tokens], index: Sequence[int], pad_id: int, device: torch.device | str) -> MicroBatch:
    width = max(len(s) for s in sequences)
    input_ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    for r, s in enumerate(sequences):
        input_ids[r, : len(s)] = s.inputs
    starts = [r * width for r in range(len(sequences))]
    positions = np.broadcast_to(np.arange(width), input_ids.shape)
    return _finish(input_ids, positions, starts, sequences, index, device)


def _one_row(sequences: Sequence[Tokens], index: Sequence[int], device: torch.device | str) -> MicroBatch:
    lengths = [len(s) for s in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    input_ids = np.concatenate([s.inputs for s in sequences])[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    return _finish(input_ids, positions, starts, sequences, index, device)


def _finish(
    input_ids: np.ndarray,
    positions: np.ndarray,
    starts: Sequence[int],
    sequences: Sequence[Tokens],
    index: Sequence[int],
    device: torch.device | str,
) -> MicroBatch:
    lengths = [len(s.response_ids) for s in sequences]
    column = np.concatenate([np.arange(n) for n in lengths])
    first = [start + len(s.prompt_ids) - 1 for start, s in zip(starts, sequences)]
    arrays = (
        input_ids,
        positions,
        np.repeat(first, lengths) + column,
        np.concatenate([s.response_ids for s in sequences]),
        np.asarray(index),
        np.repeat(np.arange(len(sequences)), lengths),
        column,
    )
    return MicroBatch(*(torch.from_numpy(np.array(a, dtype=np.int64)).to(device) for a in arrays))
