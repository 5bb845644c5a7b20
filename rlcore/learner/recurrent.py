"""Layers whose state runs along the row: linear attention, state-space models, short convolutions.

A packed row holds several sequences. Attention is told where they begin, a recurrent layer is not:
its state would run from each sequence into the next. `separate` makes such layers compute the
sequences of a packed row as the rows of a batch, so that the layers around them stay packed:

    policy's row  [1, W, D]  ->  recurrent layer [S, L, D]  ->  policy's row [1, W, D]

for S sequences of at most L positions. Sequences are padded at their end, which a causal layer
does not notice. Kernels that take boundaries themselves (flash-linear-attention, causal-conv1d)
would save the padding; transformers' own implementation in PyTorch ignores them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ARGUMENT = "rows_of_sequences"  # of a forward pass, for `separate`d models alone


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The sequences of a packed row of W positions, as S rows of L.

    Example, sequences of 3 and 1 positions: SequenceRows(rows=[[0, 1, 2], [3, 3, 3]],
    back=[0, 1, 2, 3])
    """

    rows: Tensor  # [S, L] int64, positions of the packed row; padding repeats the sequence's last
    back: Tensor  # [W] int64, where each position of the packed row stands among the S*L

    @classmethod
    def of(cls, position_ids: Tensor, known: Iterable[int] | None = None) -> SequenceRows | None:
        """position_ids [R, W], each sequence of a packed row from 0 on; None where rows hold one
        sequence each. `known`: where they begin; without it the host waits for the device."""
        if position_ids.shape[0] > 1:
            return None
        positions = position_ids[0]
        if known is None:
            known = torch.nonzero(positions == 0)[:, 0].tolist()
        starts = torch.tensor([*known])
        if len(starts) <= 1:
            return None
        lengths = torch.cat([starts[1:], starts.new_tensor([len(positions)])]) - starts
        longest = int(lengths.max())
        rows = starts[:, None] + torch.minimum(torch.arange(longest), lengths[:, None] - 1)
        sequence = torch.repeat_interleave(torch.arange(len(starts)), lengths)
        device = positions.device
        return cls(rows.to(device), (sequence * longest).to(device) + positions)


def separate(lm: Any) -> bool:
    """Make the recurrent layers of a causal LM compute the sequences of a packed row apart where
    the forward pass is given `ARGUMENT`, in place; again has no further effect.

    Returns whether the model has such layers. A layer is known by its convolution over positions,
    which linear attention, Mamba, gated delta nets and short convolutions have. A model whose
    recurrent layers have none is found by the comparison of layouts (`learner/probes.py`).
    """
    found = False
    for layer in getattr(lm.base_model, "layers", ()):
        mixers = recurrent_parts(layer)
        found = found or bool(mixers)
        if not mixers or hasattr(mixers[0], "sequence_rows"):
            continue
        # a hook of the layer, so that a recomputation of its activations passes it too
        layer.register_forward_pre_hook(_enter, with_kwargs=True)
        for mixer in mixers:
            mixer.sequence_rows = None  # type: ignore[assignment]
            mixer.register_forward_pre_hook(_apart, with_kwargs=True)
            mixer.register_forward_hook(_together)
    return found


def recurrent_parts(layer: nn.Module) -> list[nn.Module]:
    """The modules within a layer that hold a convolution over positions."""
    return [m for m in layer.modules() if any(isinstance(c, nn.Conv1d) for c in m.children())]


def _enter(layer: nn.Module, args: Any, given: Any) -> tuple[Any, Any]:
    """Tell the layer's recurrent parts of the sequences; the rest of the layer does not see it."""
    rows = given.get(ARGUMENT)
    for mixer in recurrent_parts(layer):
        mixer.sequence_rows = rows
    return args, {name: value for name, value in given.items() if name != ARGUMENT}


def _apart(mixer: nn.Module, args: Any, given: Any) -> tuple[Any, Any]:
    """Lay out everything that has a value for each position as rows of sequences."""
    rows: Any = mixer.sequence_rows
    if rows is None:
        return args, given

    def laid(value: Any) -> Any:
        per_position = isinstance(value, Tensor) and value.shape[:2] == (1, len(rows.back))
        return value[0][rows.rows] if per_position else value

    return tuple(map(laid, args)), {name: laid(value) for name, value in given.items()}


def _together(mixer: nn.Module, args: Any, output: Any) -> Any:
    """The outputs in the order of the packed row; a tuple's first member is the states."""
    del args
    rows: Any = mixer.sequence_rows
    if rows is None:
        return output
    states = output[0] if isinstance(output, tuple) else output
    packed = states.flatten(0, 1)[rows.back][None]
    return (packed, *output[1:]) if isinstance(output, tuple) else packed
