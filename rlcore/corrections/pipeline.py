"""Composes an ordered list of corrections into one: the union of needs, and each hook applied in
the order in which they were named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rlcore.corrections.ais import AisSpec
from rlcore.corrections.break_even import NEARLY_WHOLE, BreakEven
from rlcore.corrections.drift import DriftEstimate
from rlcore.corrections.dvp import OUTSIDE_LOGP
from rlcore.corrections.mismatch import mismatch_metrics, policy_age
from rlcore.corrections.numerics import at_least_float32, inside, total
from rlcore.corrections.specs import CorrectionSpec, Stratum
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Correction, Needs, Reduce, WeighAt
from rlcore.lazy import no_grad, torch
from rlcore.objectives.advantages import without_truncated
from rlcore.objectives.kl import penalty_weight
from rlcore.objectives.protocols import UNCORRECTED, Bias
from rlcore.objectives.specs import ObjectiveSpec, loss_class
from rlcore.registry import LoadError, load_object, require_whole
from rlcore.types import SamplingSpec, StepTensors, at_kind

if TYPE_CHECKING:
    from torch import Tensor


class Stage(NamedTuple):
    """One correction of a run. Example: Stage("tis", TisSpec(), Tis(TisSpec(), 0))"""

    label: str  # its metrics are correction/<label>/...
    spec: CorrectionSpec
    method: Correction


def build(
    corrections: Mapping[str, CorrectionSpec],
    run_seed: int,
    objective: ObjectiveSpec,
    strata: Sequence[Stratum] = (),
) -> Pipeline:
    """The pipeline of a run: specifications by label, in the order in which they apply.

    `objective` is what the run optimises: weights must lead to what its loss does not carry.
    `strata`: of a run whose actors are of several kinds. Raises UserError if a specification's
    method cannot be loaded.
    """
    usual = _built(corrections, run_seed, objective)
    if not strata:
        return usual
    lists = [(s.kinds, _built(s.corrections, run_seed, objective)) for s in strata]
    return StratifiedPipeline(usual, lists)


def _built(
    corrections: Mapping[str, CorrectionSpec], run_seed: int, objective: ObjectiveSpec
) -> Pipeline:
    stages = []
    for label, chosen in corrections.items():
        spec = chosen.under(objective)
        stages.append(Stage(label, spec, _method(label, spec)(spec, run_seed)))
    return Pipeline(
        stages,
        loss_carries_ratio=loss_class(objective.loss).carries_ratio,
        loss_corrects=objective.ratio_to == "p_inf",
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
    weighs, no correction is made: the policy gradient is biased by the whole mismatch."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        loss_carries_ratio: bool,
        loss_corrects: bool = False,
        overlong_filter: bool = False,
    ) -> None:
        """`loss_carries_ratio`: the loss carries p_new/p_ref (`PolicyLoss.carries_ratio`), or
        p_new/p_inf if `loss_corrects` (`algorithm.ratio_to=p_inf`);
        `overlong_filter`: truncated sequences leave the loss (`without_truncated`)."""
        self.stages = list(stages)
        self._overlong_filter = overlong_filter
        clip_off = any(stage.spec.inner_clip_off for stage in stages)
        #: weights must lead to p_new, because the loss is anchored there and carries no p_new/p_ref
        self.leads_to_new = clip_off or not loss_carries_ratio
        weighs = any(stage.spec.weighs for stage in self.stages)
        judges_new = weighs or any(stage.spec.zeroes for stage in self.stages)
        own = Needs(new=self.leads_to_new and judges_new, short_circuit=clip_off)
        #: the loss has a term at the actor's stored tokens (`Correction.centre`)
        self.centres = any(stage.spec.centres for stage in self.stages)
        self.needs = _union([own, *(stage.method.needs for stage in self.stages)])
        #: see `CorrectionSpec.sequence_wise`: all of them are
        self.sequence_wise = all(stage.spec.sequence_wise for stage in self.stages)
        self._weighs = weighs
        self._loss_corrects = loss_corrects
        self._rejects = any(stage.spec.rejects for stage in self.stages)
        specs = (stage.spec for stage in self.stages)
        chosen = [s for s in specs if isinstance(s, AisSpec) and s.alpha == "signals"]
        self._ais = chosen[0] if chosen else AisSpec()
        self._worth: dict[str, BreakEven] = {}  # by label of a kind; "" of all samples
        self._drift: dict[str, DriftEstimate] = {}

    @property
    def biases(self) -> tuple[Bias, ...]:
        """How the expected gradient departs from its reference, whatever the loss."""
        own = tuple(bias for stage in self.stages for bias in stage.spec.biases)
        return own if self._weighs or self._loss_corrects else (UNCORRECTED, *own)

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        """Return the sampling settings of the actors, with every correction's constraint added."""
        for stage in self.stages:
            sampling = stage.method.constrain_sampling(sampling)
        return sampling

    def advantages(self, step: StepTensors, reduce: Reduce) -> Tensor:
        """The advantages [B, T] to train with: `step.advantages` unless a correction replaces
        them."""
        step = _outside_is_impossible(step)  # a baseline is weighed like the gradient
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

    @no_grad
    def correct(self, step: StepTensors, reduce: Reduce, *, measure: bool = True) -> Corrected:
        """Weights [B, T], mask [B, T] and step scale of the rank's whole share of a step, before
        its backward pass.

        Every rank calls it once a step, with an empty share, too, since it reduces over ranks. It
        begins with the `usable` tokens. Metrics come under their full keys: mismatch/*,
        staleness/*, correction/*; without `measure` the first two, which do not affect the weights,
        are left out.
        """
        step = replace(step, mask=step.mask != 0)
        metrics = self._measured(step, reduce) if measure else {}
        found = self._weighed(step, reduce)
        metrics |= found.metrics | _totals(found, step, reduce)
        if self._overlong_filter:
            sequences = step.mask.any(-1)
            cut = (
                torch.zeros_like(sequences)
                if step.truncated is None
                else step.truncated & sequences
            )
            metrics |= {"train/overlong_filtered": total([cut], reduce)[0]}
        return replace(found, metrics=metrics)

    def _measured(self, step: StepTensors, reduce: Reduce, kind: str = "") -> dict[str, float]:
        """mismatch/* and staleness/* of a step whose mask is bool; `kind`: of whose samples."""
        step = _outside_is_impossible(step, OUTSIDE_LOGP)
        age = policy_age(step.token_version, step.mask, step.step, reduce)
        worth = self._worth.setdefault(kind, BreakEven(NEARLY_WHOLE))
        worth.follow(step, inside(step, self.usable(step)), reduce)
        usable = inside(step, self.usable(step))
        drift = self._drift.setdefault(kind, DriftEstimate()).follow(step, usable, reduce)
        named = {**worth.figures(), **drift}
        figures = {f"mismatch/{name}": value for name, value in named.items()}
        return mismatch_metrics(step, reduce, self._ais) | figures | age

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, as JSON holds it."""
        stages = {stage.label: dict(stage.method.state()) for stage in self.stages}
        worth = {k: w.state() for k, w in self._worth.items()}
        drift = {k: d.state() for k, d in self._drift.items()}
        return {"worth": worth, "drift": drift, "stages": stages}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, also from other stages' state: stages that it lacks begin anew."""
        for kind, own in state.get("worth", {}).items():
            self._worth.setdefault(kind, BreakEven(NEARLY_WHOLE)).restore(own)
        for kind, own in state.get("drift", {}).items():
            self._drift.setdefault(kind, DriftEstimate()).restore(own)
        for stage in self.stages:
            stage.method.restore(state.get("stages", {}).get(stage.label, {}))

    def _weighed(self, step: StepTensors, reduce: Reduce) -> Corrected:
        """Weights and mask after all stages, with the metrics of each."""
        usable = self.usable(step)
        step = _outside_is_impossible(replace(step, mask=usable))
        current = Corrected(torch.ones_like(at_least_float32(step.logp_inf)), usable, {})
        # a veto goes on comparing the actor with p_ref: only weights make up for what the loss does
        # not carry
        weighed = _towards_new(step) if self.leads_to_new else step
        metrics: dict[str, float] = {}
        scale = 1.0
        scores: list[Tensor] = []
        widen: Tensor | None = None
        weights_at: list[WeighAt] = []
        for stage in self.stages:
            spec = stage.spec
            follows = spec.weighs or spec.zeroes or (spec.follows_weights and self._weighs)
            seen = weighed if follows else step
            nothing = replace(current, score=None, widen=None, weigh_at=None)
            before_it = replace(nothing, metrics={}, step_scale=1.0)
            current = stage.method.correct(seen, before_it, reduce)
            scale *= current.step_scale
            if current.widen is not None:
                widen = current.widen if widen is None else widen * current.widen
            scores += [] if current.score is None else [current.score]
            weights_at += [] if current.weigh_at is None else [current.weigh_at]
            metrics |= {f"correction/{stage.label}/{k}": v for k, v in current.metrics.items()}
        # rejected tokens carry a neutral weight, so that nothing but the mask takes them out
        weight = torch.where(current.mask, current.weight, 1.0)
        score = torch.stack(scores).sum(0) if scores else None
        centre = self._centre(weighed, weights_at)
        return Corrected(
            weight, current.mask, metrics, scale, score=score, widen=widen, centre=centre
        )

    def _centre(self, step: StepTensors, weights_at: Sequence[WeighAt]) -> Tensor | None:
        """The stage that centres is given the weights of the whole list."""

        def product(new: Tensor, ref: Tensor, inf: Tensor) -> Tensor:
            return math.prod((at(new, ref, inf) for at in weights_at), start=torch.ones_like(inf))

        found = (s.method.centre(step, product if weights_at else None) for s in self.stages)
        return next((own for own in found if own is not None), None)

    @no_grad
    def penalty_weight(
        self, corrected: Corrected, logp_new: Tensor, logp_ref: Tensor, logp_inf: Tensor, cap: float
    ) -> Tensor:
        """Weight [B, T] that leads sampled tokens to p_new, for a term without a ratio (the KL in
        the loss). Detached; 0 for a token of weight 0 or off the mask.

        It is `min(p_new/p_inf, cap)`. Tokens that a rejection kept do not follow p_inf: their
        weight is `weight * min(p_new/p_ref, cap)`. The arguments have the rows of `corrected`.
        """
        if not self._rejects:
            # the correction's own weight may stop short of its target (AIS), or be a sequence's
            plain = torch.ones_like(corrected.weight).where(corrected.weight != 0, 0.0)
            return penalty_weight(logp_new, logp_inf, plain, corrected.mask, cap=cap)
        reached = logp_new if self.leads_to_new else logp_ref
        return penalty_weight(logp_new, reached, corrected.weight, corrected.mask, cap=cap)

    @no_grad
    def state_weight(self, corrected: Corrected) -> Tensor:
        """Weight [B, T] of a term that sums over the vocabulary at each state (the full KL): 0 for
        a token of weight 0 or off the mask, else 1.

        Where a rejection keeps a share of a state's tokens, it is the correction's weight, whose
        mean over the kept tokens makes up for the rejected ones.
        """
        if self._rejects:
            return corrected.weight * corrected.mask
        return (corrected.mask & (corrected.weight != 0)).to(corrected.weight.dtype)


def _towards_new(step: StepTensors) -> StepTensors:
    """The step with p_new as the policy that weights lead to."""
    return replace(
        step,
        ref_version=step.step,
        logp_ref=step.logp_new,
        ref_topk_ids=step.new_topk_ids,
        ref_topk_logp=step.new_topk_logp,
        ref_logp_at_inf_ids=step.new_logp_at_inf_ids,
        ref_inside=step.new_inside,
        sketch=step.new_sketch,
    )


def _outside_is_impossible(step: StepTensors, filler: float = -math.inf) -> StepTensors:
    """A token outside the safe set of a policy has probability 0 under that policy, whatever
    placeholder its log-prob holds."""

    def bounded(logp: Tensor, inside: Tensor | None) -> Tensor:
        return logp if inside is None else torch.where(inside, logp, filler)

    return replace(
        step,
        logp_ref=bounded(step.logp_ref, step.ref_inside),
        logp_new=bounded(step.logp_new, step.new_inside),
    )


def _totals(found: Corrected, step: StepTensors, reduce: Reduce) -> dict[str, float]:
    weight, mask = found.weight, found.mask
    kept, proposed, weight_sum, zeros = total(
        [mask, step.mask, weight.where(mask, 0.0), mask & (weight == 0)], reduce
    )
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
        # the smallest set holds for all
        safe_set_rho=max(rho) if rho else None,
        short_circuit=any(n.short_circuit for n in needs),
    )


class StratifiedPipeline(Pipeline):
    """The corrections of a run whose actors are of several kinds: each stratum has its own list and
    statistics of the batch, over its own samples of all ranks.

    Metrics are pooled and, under `name@kind`, by kind. Metrics of a stage are given by kind where a
    stratum is one kind; their pooled values and the step scale are means over the strata, weighted
    by tokens. RAPID's baseline stays a mean over the whole group: its weights lead every sample to
    p_new."""

    def __init__(self, usual: Pipeline, lists: Sequence[tuple[tuple[str, ...], Pipeline]]) -> None:
        """`lists`: labels of kinds, which `StepTensors.kinds` counts in this order, and their
        pipeline. `usual`: the pipeline for samples of all other kinds, left from before a
        resume."""
        carries = not usual.leads_to_new
        super().__init__(
            usual.stages, loss_carries_ratio=carries, overlong_filter=usual._overlong_filter
        )
        self.kinds = tuple(kind for kinds, _ in lists for kind in kinds)
        self._lists = [*lists, (("",), usual)]
        self.needs = _union([pipeline.needs for _, pipeline in self._lists])
        self.sequence_wise = all(pipeline.sequence_wise for _, pipeline in self._lists)
        self.centres = any(pipeline.centres for _, pipeline in self._lists)

    @property
    def biases(self) -> tuple[Bias, ...]:
        return tuple(bias for _, pipeline in self._lists[:-1] for bias in pipeline.biases)

    def _measured(self, step: StepTensors, reduce: Reduce, kind: str = "") -> dict[str, float]:
        metrics = super()._measured(step, reduce, kind)
        for kind, rows in present_kinds(self.kinds, step, reduce):
            metrics |= at_kind(super()._measured(step.rows(rows), reduce, kind), kind)
        return metrics

    def state(self) -> dict[str, Any]:
        lists = {",".join(kinds): pipeline.state() for kinds, pipeline in self._lists}
        return super().state() | {"lists": lists}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        for kinds, pipeline in self._lists:
            pipeline.restore(state.get("lists", {}).get(",".join(kinds), {}))

    def _weighed(self, step: StepTensors, reduce: Reduce) -> Corrected:
        """Every rank goes through all lists: statistics of the global batch are collective."""
        weight, mask = torch.ones_like(at_least_float32(step.logp_inf)), step.mask.clone()
        score: Tensor | None = None
        widen: Tensor | None = None
        centre: Tensor | None = None
        tokens, scale = 0.0, 0.0
        sums: dict[str, tuple[float, float]] = {}  # sums of metrics by name, and their tokens
        by_kind: dict[str, float] = {}
        for kinds, rows, pipeline in self._each(step.kinds):
            part = step.rows(rows)
            found = pipeline._weighed(part, reduce)
            weight[rows], mask[rows] = found.weight.to(weight), found.mask
            if found.score is not None:
                score = torch.zeros_like(weight) if score is None else score
                score[rows] = found.score.to(weight)
            if found.widen is not None:
                widen = torch.ones_like(weight) if widen is None else widen
                widen[rows] = found.widen.to(weight)
            if found.centre is not None:  # without mass nothing is taken out
                shape = (*weight.shape, found.centre.shape[-1])
                centre = found.centre.new_zeros(shape) if centre is None else centre
                centre[rows] = found.centre
            (own,) = total([part.mask], reduce)
            tokens, scale = tokens + own, scale + own * found.step_scale
            for name, value in found.metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + own * value, before[1] + own
            if own and len(kinds) == 1 and kinds[0] in self.kinds:
                by_kind |= at_kind(found.metrics, kinds[0])
        metrics = {name: value / n for name, (value, n) in sums.items() if n}
        scale = scale / tokens if tokens else 1.0
        whole = Corrected(weight, mask, metrics, scale, step.kinds, score, widen, centre=centre)
        for kind, rows in present_kinds(self.kinds, step, reduce):
            by_kind |= at_kind(_totals(whole.rows(rows), step.rows(rows), reduce), kind)
        return replace(whole, metrics=metrics | by_kind)

    def _each(self, kinds: Tensor | None) -> Iterator[tuple[tuple[str, ...], Tensor, Pipeline]]:
        """(labels, rows [B] bool, pipeline) of each list; `kinds` [B] of the sequences."""
        if kinds is None:
            raise ValueError("the sequences of a run with several kinds of actors have no kinds")
        first = 0
        for labels, pipeline in self._lists:
            yield labels, (kinds >= first) & (kinds < first + len(labels)), pipeline
            first += len(labels)

    @no_grad
    def penalty_weight(
        self, corrected: Corrected, logp_new: Tensor, logp_ref: Tensor, logp_inf: Tensor, cap: float
    ) -> Tensor:
        found = torch.zeros_like(corrected.weight)
        for _, rows, pipeline in self._each(corrected.kinds):
            logps = (logp_new[rows], logp_ref[rows], logp_inf[rows])
            found[rows] = pipeline.penalty_weight(corrected.rows(rows), *logps, cap).to(found)
        return found

    @no_grad
    def state_weight(self, corrected: Corrected) -> Tensor:
        found = torch.zeros_like(corrected.weight)
        for _, rows, pipeline in self._each(corrected.kinds):
            found[rows] = pipeline.state_weight(corrected.rows(rows))
        return found


def present_kinds(
    kinds: Sequence[str], step: StepTensors, reduce: Reduce
) -> Iterator[tuple[str, Tensor]]:
    """(label, rows [B] bool) of each kind that some rank has tokens of. Collective."""
    if not kinds or step.kinds is None:
        return
    rows = [step.kinds == number for number in range(len(kinds))]
    tokens = total([step.mask & of[:, None] for of in rows], reduce)
    yield from ((kind, of) for kind, of, count in zip(kinds, rows, tokens) if count)
