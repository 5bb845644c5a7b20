"""DPPO: a policy gradient with its own trust region."""

from __future__ import annotations

from typing import Any

from rlcore.corrections.formulas.dppo import dppo, dppo_mask
from rlcore.corrections.formulas.numerics import log_difference, ratio, total
from rlcore.corrections.scope import inside
from rlcore.corrections.specs import DppoSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.types import StepTensors


class Dppo(Correction):
    """Weight `min(p_new/p_inf, cap)`, and 0 for a token that the update would lead further out of
    the trust region (DPPO, Qi et al. 2026, arXiv 2602.04879).

    The region is around p_inf, which was sampled from, not p_ref, and the weights lead all the way
    to p_new: it needs a loss that carries no ratio and has no clip (algorithm=dppo). Biased by the
    mask and the cap, and by nothing else; both stay in the loss's denominator.
    """

    needs = Needs(new=True)

    def __init__(self, spec: DppoSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec, tokens = self.spec, (step.logp_new, step.logp_inf, step.advantages, step.mask)
        region: dict[str, Any] = {"divergence": spec.divergence, "low": spec.low, "high": spec.high}
        weight = dppo(*tokens, cap=spec.cap, **region)
        out = dppo_mask(*tokens, **region)
        compared = inside(step, current.mask)
        over = ratio(log_difference(step.logp_new, step.logp_inf, step.mask)[0]) > spec.cap
        high, low, truncated, count = total(
            [*(which & compared for which in (out.high, out.low, over)), compared], reduce
        )
        count = max(count, 1.0)
        metrics = {
            "masked_high_share": high / count,
            "masked_low_share": low / count,
            "truncated_share": truncated / count,
        }
        return Corrected(current.weight * weight, current.mask, metrics)
