"""Off-policy sequence masking."""

from __future__ import annotations

import torch

from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.formulas.sequence_mask import opsm, sequence_kl
from rlcore.corrections.specs import OpsmSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.types import StepTensors


class Opsm(Correction):
    """Weight 0 for a sequence of negative advantage whose mean `log p_inf - log p_new` exceeds
    delta (DeepSeek-V3.2, arXiv 2512.02556, eq. 9; p_ref in the place of p_new with target=ref).

    It weighs by no ratio, so it goes beside a correction that does, and stays in the denominators
    as there. Biased by the mask alone: a masked sequence is not made less likely. Under DVP, a
    token outside the learner's safe set is impossible for p_new, so its sequence is masked where
    its advantage is negative. The KL is over all sampled tokens, whatever was rejected before.
    """

    def __init__(self, spec: OpsmSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(new=spec.target == "new")

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        target = step.logp_new if self.spec.target == "new" else step.logp_ref
        weight = opsm(target, step.logp_inf, step.advantages, step.mask, delta=self.spec.delta)
        kl = sequence_kl(target, step.logp_inf, step.mask)
        present = step.mask.any(-1)
        possible = present & (kl < 1e3)  # DVP's impossible tokens would be the whole mean
        masked = torch.any((weight == 0) & step.mask, dim=-1)
        hits, kl_sum, compared, count = total(
            [masked, kl.where(possible, 0.0), possible, present], reduce
        )
        metrics = {"masked_share": hits / max(count, 1.0), "kl_mean": kl_sum / max(compared, 1.0)}
        return Corrected(current.weight * weight, current.mask, metrics)
