"""RAPID: sequence importance weights, in the gradient and in the group's baseline."""

from __future__ import annotations

import torch

from rlcore.corrections.base import BaseCorrection, at_least_one
from rlcore.corrections.formulas.groups import sequence_log_ratio
from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.functional import rapid_advantages
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import StepTensors


class Rapid(BaseCorrection):
    """Gradient `SG(min(W, eta)) A grad log p_new`, `W = prod_t p_new/p_inf`, A weighted alike (RAPID eq. 3 to 5).

    Replaces the algorithm's advantage, and switches PPO's clip off. RAPID's mean over samples of the sum over tokens is
    `seq-mean-token-sum-norm`, up to its constant divisor.
    """

    name = "rapid"
    weighs = True
    needs = Needs(new=True, short_circuit=True)

    def __init__(self, *, eta: float = 2.0, leave_one_out: bool = False) -> None:
        at_least_one("correction.rapid.eta", eta)
        self.eta, self.leave_one_out = eta, leave_one_out

    def _formula(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        mask = step.mask & torch.isfinite(step.logp_inf)
        return rapid_advantages(
            step.logp_new,
            step.logp_inf,
            mask,
            step.rewards,
            step.group_ids,
            eta=self.eta,
            leave_one_out=self.leave_one_out,
        )

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor | None:
        return self._formula(step)[0][:, None] * step.mask

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        weight = self._formula(step)[1]
        alive = step.mask.any(-1)
        clipped = sequence_log_ratio(step.logp_new, step.logp_inf, step.mask).exp() > self.eta
        logs = torch.where(alive, weight.log(), 0.0)
        over, log_sum, weight_sum, count = total([clipped & alive, logs, weight * alive, alive], reduce)
        count = max(count, 1.0)
        metrics = {"clipped_share": over / count, "log_weight_mean": log_sum / count, "weight_mean": weight_sum / count}
        return Corrected(current.weight * weight[:, None], current.mask, metrics)
