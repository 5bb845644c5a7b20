"""Composes an ordered list of corrections into one: the union of needs, and each hook applied in the named order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlcore.corrections.base import BaseCorrection
from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.mismatch import mismatch_metrics, policy_age
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import SamplingSpec, StepTensors


class Pipeline:
    """The corrections of a run. Weights multiply, masks intersect; an empty list is the uncorrected run.

    A correction's statistics are over the tokens still in the loss when its turn comes. Raises UserError for a list
    that contradicts itself.
    """

    def __init__(self, corrections: Sequence[BaseCorrection]) -> None:
        self.corrections = list(corrections)
        self.needs = _union([c.needs for c in self.corrections])
        _refuse_contradictions(self.corrections)

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        """What the actors sample from, every correction's constraint added. Raises UserError on a conflict."""
        for correction in self.corrections:
            sampling = correction.constrain_sampling(sampling)
        return sampling

    def check(self, sampling: SamplingSpec) -> None:
        """Refuse sampling whose log-probs would make the ratios biased or impossible.

        `sampling` is what `constrain_sampling` made of the run's own. Raises UserError with the reason.
        """
        for correction in self.corrections:
            correction.check(sampling)
        _refuse_truncated_support(sampling, self.needs.safe_set_rho)

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor:
        """The advantages [B,T] to train with: `step.advantages` unless a correction brings its own."""
        for correction in self.corrections:
            replaced = correction.advantages(step, reduce)
            if replaced is not None:
                return replaced
        return step.advantages

    @torch.no_grad()
    def correct(self, step: StepTensors, reduce: Reduce, *, measure: bool = True) -> Corrected:
        """Weights [B,T] and mask [B,T] of the rank's whole share of a step, before its backward pass.

        Every rank calls it once a step, an empty share included: it reduces. A token whose stored log-prob is NaN or
        infinite leaves the mask. Metrics come under their full keys: mismatch/*, staleness/*, correction/*; with
        `measure` off the first two, which do not bear on the weights, are spared.
        """
        before = step.mask != 0
        step = replace(step, mask=before)
        metrics: dict[str, float] = {}
        if measure:
            metrics = mismatch_metrics(step, reduce) | policy_age(step.token_version, before, step.step, reduce)
        usable = before & torch.isfinite(step.logp_inf)
        step = _outside_is_impossible(replace(step, mask=usable))
        current = Corrected(torch.ones_like(usable, dtype=torch.float32), usable, {})
        for correction in self.corrections:
            current = correction.correct(step, replace(current, metrics={}), reduce)
            metrics |= {f"correction/{correction.name}/{k}": v for k, v in current.metrics.items()}
        weight = torch.where(current.mask, current.weight.float(), 1.0)
        return Corrected(weight, current.mask, metrics | _totals(weight, current.mask, before, reduce))


def _outside_is_impossible(step: StepTensors) -> StepTensors:
    """Under a safe set, a token outside it has probability 0 for the learner, whatever filler its log-prob holds."""
    if step.inside is None:
        return step
    return replace(
        step,
        logp_ref=torch.where(step.inside, step.logp_ref, -torch.inf),
        logp_new=torch.where(step.inside, step.logp_new, -torch.inf),
    )


def _totals(weight: torch.Tensor, mask: torch.Tensor, before: torch.Tensor, reduce: Reduce) -> dict[str, float]:
    kept, proposed, weight_sum, zeros = total([mask, before, weight.where(mask, 0.0), mask & (weight == 0)], reduce)
    return {
        "correction/kept_share": kept / proposed if proposed else 1.0,
        "correction/weight_mean": weight_sum / kept if kept else 1.0,
        "correction/zero_weight_share": zeros / max(kept, 1.0),
    }


def _union(needs: Sequence[Needs]) -> Needs:
    rho = [n.safe_set_rho for n in needs if n.safe_set_rho is not None]
    return Needs(
        topk=any(n.topk for n in needs),
        new=any(n.new for n in needs),
        batch_stats=any(n.batch_stats for n in needs),
        safe_set_rho=max(rho) if rho else None,
        short_circuit=any(n.short_circuit for n in needs),
    )


def _refuse_contradictions(corrections: Sequence[BaseCorrection]) -> None:
    listed = f"correction=[{','.join(c.name for c in corrections)}]"
    weighers = [c.name for c in corrections if c.weighs]
    if len(weighers) > 1:
        raise UserError(
            f"{listed} is not accepted: {' and '.join(weighers)} each correct the ratio between actor and learner, and "
            "together they would correct it more than once; choose one of them (dvp and veto go with any)."
        )


def _refuse_truncated_support(sampling: SamplingSpec, safe_set_rho: float | None) -> None:
    if sampling.temperature <= 0:
        raise UserError(f"rollout.temperature={sampling.temperature} is not accepted: greedy samples have no ratios.")
    if sampling.logprobs_k < 0:
        raise UserError(
            f"rollout.logprobs_k={sampling.logprobs_k} is not accepted for training: without the sampled tokens' "
            "log-probs no mismatch can be measured or corrected; use 0 or more."
        )
    cut = {"top_p": sampling.top_p < 1.0, "top_k": sampling.top_k != 0, "min_p": sampling.min_p > 0.0}
    if safe_set_rho is not None:
        cut["min_p"] = False  # the learner masks its own logits by the same rule
    for key, on in cut.items():
        if on:
            raise UserError(
                f"rollout.{key}={getattr(sampling, key)} is not accepted: it cuts tokens off for the actor and not for "
                "the learner, so every ratio would be off by the kept mass; sample with full support, or prune both "
                "sides with correction=[dvp]."
            )
