"""Composes an ordered list of corrections into one: the union of needs, and each hook applied in
the order in which they were named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rlcore.corrections.ais import AisSpec
from rlcore.corrections.mismatch import mismatch_metrics, policy_age
from rlcore.corrections.numerics import at_least_float32, total
from rlcore.corrections.specs import CorrectionSpec
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.advantages import without_truncated
from rlcore.objectives.kl import penalty_weight
from rlcore.objectives.protocols import UNCORRECTED, Bias
from rlcore.objectives.specs import ObjectiveSpec, loss_class
from rlcore.registry import LoadError, load_object, require_whole
from rlcore.types import SamplingSpec, StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class Stage(NamedTuple):
    """One correction of a run. Example: Stage("tis", TisSpec(), Tis(TisSpec(), 0))"""

    label: str  # its metrics are correction/<label>/...
    spec: CorrectionSpec
    method: Correction


def build(
    corrections: Mapping[str, CorrectionSpec], run_seed: int, objective: ObjectiveSpec
) -> Pipeline:
    """The pipeline of a run: specifications by label, in the order in which they apply.

    `objective` is what the run optimises: weights must lead to what its loss does not carry. Raises
    UserError if a specification's method cannot be loaded.
    """
    stages = []
    for label, chosen in corrections.items():
        spec = chosen.under(objective)
        stages.append(Stage(label, spec, _method(label, spec)(spec, run_seed)))
    return Pipeline(
        stages,
        loss_carries_ratio=loss_class(objective.loss).carries_ratio,
        overlong_filter=objective.overlong_filter,
    )


def _method(label: str, spec: CorrectionSpec) -> type[Correction]:
    try:
        method: type[Correction] = load_object(spec.method)
    except LoadError as error:
        raise UserError(f"correction.{label}: method={spec.method} {error}") from error
    require_whole(method, Correction, f"correction.{label}: method={spec.method}")
    return method


class Pipeline:
    """The corrections of a run. Weights multiply, masks intersect; an empty list is the uncorrected
    run.

    Each correction's statistics cover the tokens that earlier ones left in the loss. Which
    combinations are allowed is checked with the configuration (`config/checks.py`). Where no stage
    weighs there is no correction of the policy gradient: it is biased by the whole mismatch."""

    def __init__(
        self, stages: Sequence[Stage], *, loss_carries_ratio: bool, overlong_filter: bool = False
    ) -> None:
        """`loss_carries_ratio`: the loss carries p_new/p_ref (`PolicyLoss.carries_ratio`);
        `overlong_filter`: truncated sequences leave the loss (`without_truncated`)."""
        self.stages = list(stages)
        self._overlong_filter = overlong_filter
        clip_off = any(stage.spec.inner_clip_off for stage in stages)
        #: weights must lead to p_new, because the loss is anchored there and carries no p_new/p_ref
        self.leads_to_new = clip_off or not loss_carries_ratio
        self.needs = _union(self.stages, self.leads_to_new, clip_off)
        #: see `CorrectionSpec.sequence_wise`: all of them are
        self.sequence_wise = all(stage.spec.sequence_wise for stage in self.stages)
        self._weighs = any(stage.spec.weighs for stage in self.stages)
        self._rejects = any(stage.spec.rejects for stage in self.stages)
        chosen = [stage.spec for stage in self.stages if isinstance(stage.spec, AisSpec)]
        self._ais = chosen[0] if chosen else AisSpec()

    @property
    def biases(self) -> tuple[Bias, ...]:
        """How the expected gradient departs from its reference, whatever the loss."""
        own = tuple(bias for stage in self.stages for bias in stage.spec.biases)
        return own if self._weighs else (UNCORRECTED, *own)

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        """Return the sampling settings of the actors, with every correction's constraint added."""
        for stage in self.stages:
            sampling = stage.method.constrain_sampling(sampling)
        return sampling

    def advantages(self, step: StepTensors, reduce: Reduce) -> Tensor:
        """The advantages [B, T] to train with: `step.advantages` unless a correction replaces
        them."""
        step = _outside_is_impossible(step)  # a baseline's weights are those of the gradient
        for stage in self.stages:
            replaced = stage.method.advantages(step, reduce)
            if replaced is not None:
                return replaced
        return step.advantages

    def usable(self, step: StepTensors) -> Tensor:
        """The tokens [B, T] that corrections look at: known before any of them is asked.

        A ratio to a log-prob that is NaN or infinite means nothing, so such a token leaves.
        """
        on = (step.mask != 0) & torch.isfinite(step.logp_inf)
        return without_truncated(on, step.truncated) if self._overlong_filter else on

    @torch.no_grad()
    def correct(self, step: StepTensors, reduce: Reduce, *, measure: bool = True) -> Corrected:
        """Weights [B, T], mask [B, T] and step scale of the rank's whole share of a step, before
        its backward pass.

        Every rank calls it once a step, an empty share included: it reduces. It begins with the
        `usable` tokens. Metrics come under their full keys: mismatch/*, staleness/*, correction/*;
        without `measure` the first two, which do not affect the weights, are left out.
        """
        before = step.mask != 0
        step = replace(step, mask=before)
        metrics: dict[str, float] = {}
        if measure:
            metrics = mismatch_metrics(step, reduce, self._ais) | policy_age(
                step.token_version, before, step.step, reduce
            )
        usable = self.usable(step)
        step = _outside_is_impossible(replace(step, mask=usable))
        current = Corrected(torch.ones_like(at_least_float32(step.logp_inf)), usable, {})
        # a veto keeps judging actor against p_ref: only weights have to make up for the loss
        weighed = _towards_new(step) if self.leads_to_new else step
        scale = 1.0
        for stage in self.stages:
            follows = stage.spec.weighs or (stage.spec.follows_weights and self._weighs)
            seen = weighed if follows else step
            before_it = replace(current, metrics={}, step_scale=1.0)
            current = stage.method.correct(seen, before_it, reduce)
            scale *= current.step_scale
            metrics |= {f"correction/{stage.label}/{k}": v for k, v in current.metrics.items()}
        # rejected tokens carry a neutral weight, so that nothing but the mask takes them out
        weight = torch.where(current.mask, current.weight, 1.0)
        metrics |= _totals(weight, current.mask, before, reduce)
        if self._overlong_filter:
            metrics |= _filtered(step.truncated, before, reduce)
        return Corrected(weight, current.mask, metrics, scale)

    @torch.no_grad()
    def penalty_weight(
        self, corrected: Corrected, logp_new: Tensor, logp_ref: Tensor, logp_inf: Tensor, cap: float
    ) -> Tensor:
        """Weight [B, T] that leads sampled tokens to p_new, for a term without a ratio of its own
        (the KL in the loss); detached, 0 for a token of weight 0 or off the mask.

        It is `min(p_new/p_inf, cap)`. Tokens that survived a rejection do not follow p_inf: theirs
        is `weight * min(p_new/p_ref, cap)`. The arguments have the rows of `corrected`.
        """
        if not self._rejects:
            # the correction's own weight may stop short of its target (AIS), or be a sequence's
            plain = torch.ones_like(corrected.weight).where(corrected.weight != 0, 0.0)
            return penalty_weight(logp_new, logp_inf, plain, corrected.mask, cap=cap)
        reached = logp_new if self.leads_to_new else logp_ref
        return penalty_weight(logp_new, reached, corrected.weight, corrected.mask, cap=cap)

    @torch.no_grad()
    def state_weight(self, corrected: Corrected) -> Tensor:
        """Weight [B, T] of a term that sums over the vocabulary at each state (the full KL): 0 for
        a token of weight 0 or off the mask, else 1.

        Of a state's tokens a rejection keeps a share: there it is the weight, whose mean over the
        kept ones makes up for the others.
        """
        if self._rejects:
            return corrected.weight * corrected.mask
        return (corrected.mask & (corrected.weight != 0)).to(corrected.weight.dtype)


def _towards_new(step: StepTensors) -> StepTensors:
    """The same step with p_new in the place of the policy that weights lead to."""
    return replace(
        step,
        logp_ref=step.logp_new,
        ref_topk_ids=step.new_topk_ids,
        ref_topk_logp=step.new_topk_logp,
        ref_logp_at_inf_ids=step.new_logp_at_inf_ids,
        ref_inside=step.new_inside,
    )


def _outside_is_impossible(step: StepTensors) -> StepTensors:
    """A token outside the safe set of a policy has probability 0 under that policy, whatever
    placeholder its log-prob holds."""

    def bounded(logp: Tensor, inside: Tensor | None) -> Tensor:
        return logp if inside is None else torch.where(inside, logp, -torch.inf)

    return replace(
        step,
        logp_ref=bounded(step.logp_ref, step.ref_inside),
        logp_new=bounded(step.logp_new, step.new_inside),
    )


def _totals(weight: Tensor, mask: Tensor, before: Tensor, reduce: Reduce) -> dict[str, float]:
    kept, proposed, weight_sum, zeros = total(
        [mask, before, weight.where(mask, 0.0), mask & (weight == 0)], reduce
    )
    return {
        "correction/kept_share": kept / proposed if proposed else 1.0,
        "correction/weight_mean": weight_sum / kept if kept else 1.0,
        "correction/zero_weight_share": zeros / max(kept, 1.0),
    }


def _filtered(truncated: Tensor | None, before: Tensor, reduce: Reduce) -> dict[str, float]:
    sequences = before.any(-1)
    cut = torch.zeros_like(sequences) if truncated is None else truncated & sequences
    return {"train/overlong_filtered": total([cut], reduce)[0]}


def _union(stages: Sequence[Stage], leads_to_new: bool, clip_off: bool) -> Needs:
    needs = [stage.method.needs for stage in stages]
    rho = [n.safe_set_rho for n in needs if n.safe_set_rho is not None]
    return Needs(
        topk=any(n.topk for n in needs),
        new=any(n.new for n in needs) or (leads_to_new and any(s.spec.weighs for s in stages)),
        batch_stats=any(n.batch_stats for n in needs),
        # the smallest set holds for all
        safe_set_rho=max(rho) if rho else None,
        short_circuit=clip_off,
    )
