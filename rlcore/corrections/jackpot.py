"""Jackpot: optimal budgeted rejection of tokens, and weights for those that stay.

Denominators and rejected tokens. At a state s a token x ~ p_inf stays with probability a(x) and
then follows `q = min(p_inf, p_t/lam) / Z(s)`; the weight `Z(s) max(lam, p_t/p_inf)` is p_t/q, so
the mean over ACCEPTED tokens has expectation `E_{x~p_t}[f]` in every state. Dividing the sum over
accepted tokens by all N proposed ones would give `Z(s) E_{p_t}[f]`, an unintended scaling by the
acceptance rate. So under the paper's normaliser a rejected token leaves the mask, and a
token-mean divides by the tokens kept (over several states this weighs state s by its Z(s), the
share of its tokens that stayed).

Without Z, the sum over accepted tokens of `max(lam, p_t/p_inf) f` divided by all N proposed ones
has expectation `E_{x~p_t}[f]` in every state, all states counting alike. There a rejected token
stays in the mask with weight 0, as the zeros of MIS, IcePop and DVP do. `normaliser=auto` takes
this wherever the mean is not over all tokens at once: Z would shrink a sum over a constant by the
acceptance rate, and bias a mean of sequence means (by 25% on the bandit of the tests, at 75%
acceptance). Under token-mean Z has 6% to 19% less variance and, weighing states by their
acceptance, 2% bias at 70% acceptance (benchmarks/jackpot_variance.py).
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from rlcore.corrections.draws import token_uniforms
from rlcore.corrections.formulas.jackpot import JackpotTokens, JackpotWeights, TopK, jackpot
from rlcore.corrections.formulas.numerics import log_difference, ratio, total
from rlcore.corrections.formulas.obrs import jackpot_weight, obrs_divergence
from rlcore.corrections.specs import JackpotSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.types import StepTensors


class Jackpot(Correction):
    """OBRS mask and weights towards p_ref (eq. 8) or p_new (eq. 11).

    Modes: `both`; `mask` rejects and does not weigh; `reweight` weighs by the same formula and
    rejects nothing (an ablation: the weights are those of accepted tokens). `short_circuit`, with
    target=new, switches PPO's clip off and with it the factor p_ref/p_new (B.1). Draws depend on
    (run seed, step, sample, position) only.

    Biased by the truncations at c1 and c2 and, under the paper's normaliser, by the error of Z and
    by states counting by their acceptance; mode `mask` by what p_kept differs from p_t (`kl_kept`).
    """

    def __init__(self, spec: JackpotSpec, run_seed: int) -> None:
        self.spec = spec
        self.run_seed = run_seed
        self.needs = Needs(
            topk=spec.needs_topk, new=spec.target == "new", batch_stats=spec.needs_topk
        )

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        topk = self._topk(step)
        if topk is None and self.spec.needs_topk:
            raise ValueError(
                "correction=jackpot needs the actor's and the learner's top k "
                f"(target={self.spec.target})"
            )
        length = step.logp_inf.shape[1]
        uniforms = token_uniforms(self.run_seed, "obrs", step.step, step.sample_ids, length)
        tokens = JackpotTokens(
            step.logp_new, step.logp_ref, step.logp_inf, current.mask, uniforms, topk
        )
        found = jackpot(tokens, self.spec, reduce=reduce)
        metrics = self._metrics(tokens, found, reduce)
        return Corrected(current.weight * found.weight, found.keep, metrics)

    def _topk(self, step: StepTensors) -> TopK | None:
        """Both sides' most likely tokens, if all of them are there."""
        new = self.spec.target == "new"
        ids = step.new_topk_ids if new else step.ref_topk_ids
        logp = step.new_topk_logp if new else step.ref_topk_logp
        at_inf = step.new_logp_at_inf_ids if new else step.ref_logp_at_inf_ids
        if step.topk_ids_inf is None or step.topk_logp_inf is None:
            return None
        if ids is None or logp is None or at_inf is None:
            return None
        return TopK(step.topk_ids_inf, step.topk_logp_inf, ids, logp, at_inf)

    def _metrics(
        self, tokens: JackpotTokens, found: JackpotWeights, reduce: Reduce
    ) -> dict[str, float]:
        on = tokens.mask
        accepted = found.accepted & on
        # what weights and caps do is of the tokens they apply to, the rest is of all proposed ones
        weighed = on if self.spec.mode == "reweight" else accepted
        proposed: dict[str, Tensor] = {
            "acceptance": accepted,
            "acceptance_expected": found.probability,
        }
        kept: dict[str, Tensor] = {}
        if self.spec.mode != "mask":
            proposed |= self._normaliser_values(tokens, found)
            kept = {"weight_mean": found.weight, **self._truncated(tokens, found)}
        values = [v.where(on, 0.0) for v in proposed.values()]
        values += [v.where(weighed, 0.0) for v in kept.values()]
        *summed, count, count_kept = total([*values, on, weighed], reduce)
        sums = dict(zip([*proposed, *kept], summed))
        metrics = {name: sums[name] / max(count, 1.0) for name in proposed}
        metrics |= {name: sums[name] / max(count_kept, 1.0) for name in kept}
        if not count:
            metrics |= {"acceptance": 1.0, "acceptance_expected": 1.0}
        if "z_approx" in sums:
            drawn = "acceptance" if self.spec.alpha_hat == "bernoulli" else "acceptance_expected"
            metrics["kappa"] = sums[drawn] / sums["z_approx"] if sums["z_approx"] > 0 else 1.0
        return metrics

    def _normaliser_values(self, tokens: JackpotTokens, found: JackpotWeights) -> dict[str, Tensor]:
        """Per-token values [B, T] whose means say how well Z and the rejection do."""
        values: dict[str, Tensor] = {}
        if found.z is not None and found.z_approx is not None and found.unknown is not None:
            values = {"z_approx": found.z_approx, "z": found.z, "unknown_share": found.unknown}
        if tokens.topk is not None:
            ids, logp, _, _, at_inf = tokens.topk
            stored = logp.nan_to_num(-torch.inf).exp().where(ids >= 0, 0.0)
            values["dropped_mass"] = (1.0 - stored.sum(-1)).clamp(0.0, 1.0)
            values["kl_kept"] = obrs_divergence(ids, logp, at_inf, lam=self.spec.lam)
        return values

    def _truncated(self, tokens: JackpotTokens, found: JackpotWeights) -> dict[str, Tensor]:
        """Where each factor is above its own cap, [B, T] bool: their product tells neither."""
        spec = self.spec
        logp_target = tokens.target(spec)
        z = torch.ones_like(found.weight) if found.z is None else found.z
        uncapped = jackpot_weight(
            z, logp_target, logp_target, tokens.logp_inf, target="ref", lam=spec.lam, c1=inf
        )
        over = {"truncated_share": uncapped > spec.c1}
        if spec.target == "new":
            # the factor that leads back to p_ref, which short_circuit leaves out
            logp_ref = tokens.logp_new if spec.short_circuit else tokens.logp_ref
            factor = ratio(log_difference(logp_ref, tokens.logp_new, tokens.mask)[0])
            over["c2_truncated_share"] = factor > spec.c2
        return over
