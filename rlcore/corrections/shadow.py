"""Other lists of corrections on the batches that a run trains on (`correction.shadow`): the weights
and masks that they would give, next to the executed ones. They take no part in the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlcore.corrections.numerics import total
from rlcore.corrections.pipeline import Pipeline, build, present_kinds
from rlcore.corrections.specs import Shadow, Stratum
from rlcore.interfaces import Corrected, Reduce
from rlcore.lazy import no_grad, torch
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.spec import refuse
from rlcore.types import StepTensors, at_kind

if TYPE_CHECKING:
    from torch import Tensor


def build_shadows(
    shadow: Shadow, run_seed: int, objective: ObjectiveSpec, strata: Sequence[Stratum] = ()
) -> dict[str, Pipeline]:
    """The pipeline of each list by its label; statistics of the batch are of the run's `strata`."""
    found = {}
    for label, chosen in shadow.lists.items():
        own = [Stratum(stratum.kinds, chosen) for stratum in strata]
        found[label] = build(chosen, run_seed, objective, own)
    return found


def refuse_further_needs(
    run: Pipeline, shadows: Mapping[str, Pipeline], *, scores_once: bool
) -> None:
    """Raise UserError for a list that needs what the learner does not compute for the run.

    `scores_once`: a phase has several steps, and p_new of a later step is computed only where a
    correction of the run asks for it.
    """
    for label, shadow in shadows.items():
        needs, has = shadow.needs, run.needs
        key = f"correction.shadow: {label}"
        refuse(
            needs.safe_set_rho != has.safe_set_rho,
            f"{key} is of other safe sets than the run's corrections, and these decide what actors "
            "sample: use dvp with the same settings in both, or in neither.",
        )
        further = (needs.new and not has.new) or (needs.new and needs.topk and not has.topk)
        refuse(
            scores_once and further,
            f"{key} looks at p_new, which the run's corrections do not, so that later steps of a "
            "phase would take a pass more: leave it out, or use schedule.steps_per_phase=1.",
        )


@no_grad
def shadow_metrics(
    shadows: Mapping[str, Pipeline],
    step: StepTensors,
    executed: Corrected,
    reduce: Reduce,
    kinds: Sequence[str] = (),
) -> dict[str, float]:
    """shadow/<list>/... of a step with the advantages that it trains with, over all ranks; of each
    of the run's `kinds` of actors, too. Collective.

    Effective samples are of the weights over all tokens of the batch; a rejected one weighs 0. The
    cosine is between the weighted advantages of list and run; it is left out where one is 0.
    """
    found: dict[str, float] = {}
    own = _weights(executed)
    every = torch.ones(len(step.mask), dtype=torch.bool, device=step.mask.device)
    groups = [("", every), *present_kinds(kinds, step, reduce)]
    for label, pipeline in shadows.items():
        corrected = pipeline.correct(step, reduce, measure=False)
        for kind, rows in groups:
            pair = (corrected.mask[rows], _weights(corrected)[rows], own[rows])
            values = compared(step.mask[rows] != 0, step.advantages[rows], *pair, reduce)
            values = {f"shadow/{label}/{name}": value for name, value in values.items()}
            found |= at_kind(values, kind) if kind else values
    return found


def _weights(corrected: Corrected) -> Tensor:
    return corrected.weight.double().where(corrected.mask, 0.0)


def compared(
    on: Tensor, advantages: Tensor, mask: Tensor, weight: Tensor, own: Tensor, reduce: Reduce
) -> dict[str, float]:
    """Metrics of one list; masks [B, T] bool, weights [B, T] float64, 0 outside their masks."""
    gains = advantages.double().where(on, 0.0)
    a, b = weight * gains, own * gains
    values = [on, mask & on, weight, weight * weight, a * b, a * a, b * b]
    tokens, kept, first, second, dot, squares, others = total(values, reduce)
    found = {"kept_share": kept / tokens if tokens else 1.0}
    if tokens and second:
        found["ess"] = first * first / (tokens * second)
    if squares and others:
        found["cosine"] = dot / (squares * others) ** 0.5
    return found
