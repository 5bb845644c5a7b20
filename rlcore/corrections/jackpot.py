"""Jackpot: optimal budgeted rejection of tokens, and weights for those that stay.

Which denominator a rejected token leaves. At a state s a token x ~ p_inf stays with probability a(x) and then follows
`q = min(p_inf, p_t/lam) / Z(s)`; the weight `Z(s) max(lam, p_t/p_inf)` is p_t/q, so the mean over ACCEPTED tokens has
expectation `E_{x~p_t}[f]` in every state. Dividing the sum over accepted tokens by all N proposed ones would give
`Z(s) E_{p_t}[f]`, an unasked-for shrinking by the acceptance rate. So a rejected token leaves the mask, and a
token-mean divides by the tokens kept (over several states this weighs state s by its Z(s), the share of its tokens that
stayed). Zero weights of MIS, IcePop and DVP are the other case: terms of a sum over all tokens, which stay in the mask.
"""

from __future__ import annotations

from math import inf
from typing import Literal

import torch

from rlcore.corrections.base import BaseCorrection, at_least_one
from rlcore.corrections.draws import token_uniforms
from rlcore.corrections.formulas.numerics import log_difference, ratio, total
from rlcore.corrections.formulas.obrs import Missing, Tail, Target
from rlcore.corrections.functional import jackpot_weight, obrs_acceptance, obrs_calibrate, obrs_normalizer
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import SamplingSpec, StepTensors

AlphaHat = Literal["bernoulli", "expected"]


class Jackpot(BaseCorrection):
    """OBRS mask and weights towards p_ref (eq. 8) or p_new (eq. 11).

    Modes: `both`; `mask` rejects and does not weigh; `reweight` weighs by the same formula and rejects nothing (an
    ablation: the weights are those of accepted tokens). `short_circuit`, with target=new, switches PPO's clip off and
    with it the factor p_ref/p_new (B.1). Draws depend on (run seed, step, sample, position) only.
    """

    name = "jackpot"
    weighs = True

    def __init__(
        self,
        *,
        run_seed: int,
        mode: Literal["mask", "reweight", "both"] = "both",
        target: Target = "ref",
        lam: float = 1.0,
        c1: float = 3.0,
        c2: float = 3.0,
        alpha_hat: AlphaHat = "expected",
        missing: Missing = "zero",
        tail: Tail = "residual",
        short_circuit: bool = False,
    ) -> None:
        at_least_one("correction.jackpot.c1", c1)
        at_least_one("correction.jackpot.c2", c2)
        if short_circuit and target != "new":
            raise UserError(
                f"correction.jackpot.short_circuit=true with correction.jackpot.target={target} is not accepted: "
                "without the ratio p_new/p_ref in the loss, the weight itself must lead to p_new; choose target=new."
            )
        self.run_seed, self.mode, self.target = run_seed, mode, target
        self.lam, self.c1, self.c2 = lam, c1, c2
        self.alpha_hat, self.missing, self.tail, self.short_circuit = alpha_hat, missing, tail, short_circuit
        self.needs = Needs(
            topk=mode != "mask", new=target == "new", batch_stats=mode != "mask", short_circuit=short_circuit
        )

    def check(self, sampling: SamplingSpec) -> None:
        if self.needs.topk and sampling.logprobs_k < 1:
            raise UserError(
                f"rollout.logprobs_k={sampling.logprobs_k} gives correction=jackpot nothing to estimate Z from: it "
                "needs at least 1 (the paper has 20)."
            )

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        logp_target = step.logp_new if self.target == "new" else step.logp_ref
        probability = obrs_acceptance(logp_target, step.logp_inf, lam=self.lam)
        uniforms = token_uniforms(self.run_seed, "obrs", step.step, step.sample_ids, probability.shape[1])
        accepted = uniforms < probability
        on = current.mask
        weight = torch.ones_like(current.weight)
        metrics: dict[str, float] = {}
        if self.mode != "mask":
            weight, metrics = self._weigh(step, accepted if self.alpha_hat == "bernoulli" else probability, on, reduce)
        kept, expected, count = total([accepted & on, probability.where(on, 0.0), on], reduce)
        metrics["acceptance"] = kept / count if count else 1.0
        metrics["acceptance_expected"] = expected / count if count else 1.0
        mask = on if self.mode == "reweight" else on & accepted
        return Corrected(current.weight * torch.where(on, weight, 1.0), mask, metrics)

    def _weigh(
        self, step: StepTensors, accepted: torch.Tensor, on: torch.Tensor, reduce: Reduce
    ) -> tuple[torch.Tensor, dict[str, float]]:
        z_approx, unknown, dropped = self._normalizer(step)
        z, kappa, _ = obrs_calibrate(z_approx, accepted, on, lam=self.lam, reduce=reduce)
        logp_ref = step.logp_new if self.short_circuit else step.logp_ref
        weight = jackpot_weight(
            z, step.logp_new, logp_ref, step.logp_inf, target=self.target, lam=self.lam, c1=self.c1, c2=self.c2
        )
        # each factor against its own cap: their product tells neither
        logp_target = step.logp_new if self.target == "new" else logp_ref
        uncapped = jackpot_weight(z, logp_target, logp_target, step.logp_inf, target="ref", lam=self.lam, c1=inf)
        values = {
            "z_approx": z_approx,
            "z": z,
            "unknown_share": unknown,
            "dropped_mass": dropped,
            "weight_mean": weight,
        }
        values["truncated_share"] = uncapped > self.c1
        if self.target == "new":
            values["c2_truncated_share"] = ratio(log_difference(logp_ref, step.logp_new, on)[0]) > self.c2
        *sums, count = total([*(v.where(on, 0.0) for v in values.values()), on], reduce)
        return weight, {"kappa": kappa, **{name: s / max(count, 1.0) for name, s in zip(values, sums)}}

    def _normalizer(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """z_approx, unknown share and the actor's probability mass outside its stored top k, all [B,T]."""
        new = self.target == "new"
        ids = step.new_topk_ids if new else step.ref_topk_ids
        logp = step.new_topk_logp if new else step.ref_topk_logp
        at_inf = step.new_logp_at_inf_ids if new else step.ref_logp_at_inf_ids
        if step.topk_ids_inf is None or step.topk_logp_inf is None or ids is None or logp is None or at_inf is None:
            raise ValueError(f"correction=jackpot needs the actor's and the learner's top k (target={self.target})")
        z_approx, unknown = obrs_normalizer(
            step.topk_ids_inf, step.topk_logp_inf, ids, logp, at_inf, lam=self.lam, missing=self.missing, tail=self.tail
        )
        stored = step.topk_logp_inf.nan_to_num(-torch.inf).exp().where(step.topk_ids_inf >= 0, 0.0)
        return z_approx, unknown, (1.0 - stored.sum(-1)).clamp(0.0, 1.0)
