"""Composes an ordered list of corrections into one: the union of needs, and each hook applied in the named order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.corrections.base import BaseCorrection
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import SamplingSpec, StepTensors


class Pipeline:
    """The corrections of a run. Weights multiply, masks intersect; an empty list is the uncorrected run."""

    def __init__(self, corrections: Sequence[BaseCorrection]) -> None:
        self.corrections = list(corrections)
        self.needs = _union([c.needs for c in corrections])

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        """What the actors sample from, every correction's constraint added."""
        for correction in self.corrections:
            sampling = correction.constrain_sampling(sampling)
        return sampling

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor:
        """The advantages [B,T] to train with: `step.advantages` unless a correction brings its own."""
        for correction in self.corrections:
            replaced = correction.advantages(step, reduce)
            if replaced is not None:
                return replaced
        return step.advantages

    def correct(self, step: StepTensors, reduce: Reduce) -> Corrected:
        """Weights and mask of the step, with metrics under their full keys. Runs before the backward pass."""
        current = Corrected(torch.ones_like(step.logp_inf), step.mask & torch.isfinite(step.logp_inf), {})
        metrics: dict[str, float] = {}
        for correction in self.corrections:
            current = correction.correct(step, current, reduce)
            metrics |= {f"correction/{correction.name}/{k}": v for k, v in current.metrics.items()}
        return Corrected(current.weight, current.mask, metrics)


def _union(needs: Sequence[Needs]) -> Needs:
    rho = [n.safe_set_rho for n in needs if n.safe_set_rho is not None]
    return Needs(
        topk=any(n.topk for n in needs),
        new=any(n.new for n in needs),
        batch_stats=any(n.batch_stats for n in needs),
        safe_set_rho=max(rho) if rho else None,
        short_circuit=any(n.short_circuit for n in needs),
    )
