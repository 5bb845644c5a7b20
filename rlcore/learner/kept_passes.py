"""Keeping the differentiated passes of a step's micro-batches until corrections have seen the whole
batch, instead of computing its scores by passes of their own first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rlcore.learner.packing import MicroBatch
from rlcore.learner.specs import LearnerSpec

MIB = 1 << 20


class KeptPasses:
    """Whether what these passes hold for their backward passes fits `learner.keep_passes_mib`.

    Judged by the bytes that one position held in the first pass measured: shapes alone decide, so
    that runs of one seed stay equal.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self._most = spec.keep_passes_mib * MIB
        self._per_position: float | None = None  # bytes; None: not measured yet

    def fit(self, micro: Sequence[MicroBatch]) -> bool:
        """Whether these may be kept, as far as is known."""
        if self._per_position is None:
            return self._most > 0
        return self._per_position * sum(mb.tokens for mb in micro) <= self._most

    @contextlib.contextmanager
    def measured(self, mb: MicroBatch, parameters: Iterable[Tensor]) -> Iterator[None]:
        """The differentiated pass of `mb` within the block is measured, once."""
        if self._per_position is not None:
            yield
            return
        parameters_at = {p.untyped_storage().data_ptr() for p in parameters}
        held: dict[int, int] = {}  # bytes by address: views share theirs

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters_at:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self._per_position = sum(held.values()) / mb.tokens
