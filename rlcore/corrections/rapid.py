"""RAPID: sequence importance weights, in the gradient and in the group's baseline."""

from __future__ import annotations

import torch

from rlcore.corrections.formulas.groups import rapid_advantages, sequence_log_ratio
from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.specs import RapidSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.types import StepTensors


class Rapid(Correction):
    """Gradient `SG(min(W, eta)) A grad log p_new`, `W = prod_t p_new/p_inf`, A weighted alike
    (RAPID eq. 3 to 5).

    Replaces the algorithm's advantage, and needs a loss that carries no ratio. RAPID's mean over
    samples of the sum over tokens is `seq-mean-token-sum-norm`, up to its constant divisor.
    """

    needs = Needs(new=True)

    def __init__(self, spec: RapidSpec, run_seed: int) -> None:
        self.spec = spec

    # called by both hooks, on the same p_new: it costs nothing beside a forward pass
    def _formula(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        # advantages come before the pipeline has taken unusable tokens off the mask
        mask = step.mask & torch.isfinite(step.logp_inf)
        return rapid_advantages(
            step.logp_new,
            step.logp_inf,
            mask,
            step.rewards,
            step.group_ids,
            eta=self.spec.eta,
            leave_one_out=self.spec.leave_one_out,
        )

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor | None:
        return self._formula(step)[0][:, None] * step.mask

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        weight = self._formula(step)[1]
        present = step.mask.any(-1)
        log_ratio = sequence_log_ratio(step.logp_new, step.logp_inf, step.mask)
        logs = torch.where(present, weight.log(), 0.0)
        clipped = (log_ratio.exp() > self.spec.eta) & present
        over, log_sum, weight_sum, count = total([clipped, logs, weight * present, present], reduce)
        count = max(count, 1.0)
        metrics = {
            "clipped_share": over / count,
            "log_weight_mean": log_sum / count,
            "weight_mean": weight_sum / count,
        }
        return Corrected(current.weight * weight[:, None], current.mask, metrics)
