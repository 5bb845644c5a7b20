"""Lists of corrections that are measured beside the executed one (`correction.shadow`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from correction_helpers import mismatched_step, on_ranks, pipeline_of

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.corrections.shadow import build_shadows, refuse_further_needs, shadow_metrics
from rlcore.corrections.specs import CORRECTIONS, Shadow, Stratum
from rlcore.errors import UserError
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object


def specs(chosen: dict[str, dict[str, Any]]) -> Any:
    return {name: load_object(CORRECTIONS[name])(**args) for name, args in chosen.items()}


def shadows(*lists: dict[str, dict[str, Any]], strata: Any = (), **objective: Any) -> Any:
    named = {"+".join(chosen) or "none": specs(chosen) for chosen in lists}
    return build_shadows(Shadow(named, 1), 0, ObjectiveSpec(**objective), strata)


@pytest.mark.parametrize("chosen", [{}, {"tis": {}}, {"veto": {}, "ais": {}}, {"jackpot": {}}])
def test_the_executed_list_keeps_what_it_keeps_and_points_where_it_points(chosen):
    step = mismatched_step()
    executed = pipeline_of(chosen).correct(step, ONE_RANK)
    (label,) = others = shadows(chosen)
    found = shadow_metrics(others, step, executed, ONE_RANK)
    assert found[f"shadow/{label}/kept_share"] == executed.metrics["correction/kept_share"]
    assert found[f"shadow/{label}/cosine"] == pytest.approx(1, abs=1e-12)
    weight = executed.weight.double()[executed.mask]
    ess = float(weight.sum() ** 2 / (weight.square().sum() * step.mask.sum()))
    assert found[f"shadow/{label}/ess"] == pytest.approx(ess, rel=1e-12)


def test_another_list_is_compared_by_its_own_weights():
    step = mismatched_step(noise=1.0)
    executed = pipeline_of({"tis": {}}).correct(step, ONE_RANK)
    found = shadow_metrics(shadows({"jackpot": {}}, {"mis": {}}), step, executed, ONE_RANK)
    for label in ("jackpot", "mis"):
        other = pipeline_of({label: {}}).correct(step, ONE_RANK)
        a = (other.weight * step.advantages).double()[step.mask] * other.mask[step.mask]
        b = (executed.weight * step.advantages).double()[step.mask]
        cosine = float(a @ b / (a.norm() * b.norm()))
        assert found[f"shadow/{label}/cosine"] == pytest.approx(cosine, rel=1e-6)
        kept = float(other.mask.sum() / step.mask.sum())
        assert found[f"shadow/{label}/kept_share"] == pytest.approx(kept)
    assert found["shadow/jackpot/kept_share"] < 0.9 < 1 == found["shadow/mis/kept_share"]
    assert found["shadow/mis/cosine"] < 0.95


def test_without_an_advantage_there_is_no_cosine():
    step = mismatched_step()
    step.advantages = torch.zeros_like(step.logp_inf)
    executed = pipeline_of({"tis": {}}).correct(step, ONE_RANK)
    found = shadow_metrics(shadows({"ais": {}}), step, executed, ONE_RANK)
    assert found.keys() == {"shadow/ais/kept_share", "shadow/ais/ess"}


def test_figures_are_of_all_ranks():
    step, run = mismatched_step(), pipeline_of({"tis": {}})
    others = shadows({"ais": {}}, {"jackpot": {}})
    whole = shadow_metrics(others, step, run.correct(step, ONE_RANK), ONE_RANK)

    def work(rank: int, reduce: Any) -> dict[str, float]:
        part = step.rows(torch.arange(8) % 2 == rank)
        return shadow_metrics(others, part, run.correct(part, reduce), reduce)

    for found in on_ranks(work, 2):
        assert found == pytest.approx(whole, rel=1e-6)


def test_kinds_of_actors_have_figures_of_their_own():
    step = mismatched_step()
    step.kinds = (torch.arange(8) >= 4).long()
    strata = [Stratum((kind,), specs({"tis": {}})) for kind in ("bf16", "fp8")]
    run = build(specs({"tis": {}}), 0, ObjectiveSpec(), strata)
    executed = run.correct(step, ONE_RANK)
    others = shadows({"ais": {}}, strata=strata)
    found = shadow_metrics(others, step, executed, ONE_RANK, ("bf16", "fp8"))
    rows = step.kinds == 1
    alone = pipeline_of({"tis": {}}).correct(step.rows(rows), ONE_RANK)
    own = shadow_metrics(shadows({"ais": {}}), step.rows(rows), alone, ONE_RANK)
    for name, value in own.items():
        assert found[f"{name}@fp8"] == pytest.approx(value, rel=1e-12)
        assert f"{name}@bf16" in found and name in found


@pytest.mark.parametrize(
    ("chosen", "own", "objective", "said"),
    [
        ({"dvp": {}, "tis": {}}, {"tis": {}}, {}, "other safe sets"),
        ({"tis": {}}, {"dvp": {}, "tis": {}}, {}, "other safe sets"),
        ({"jackpot": {"target": "new"}}, {"tis": {}}, {}, "looks at p_new"),
        ({"tis": {}}, {}, {"loss": "reinforce"}, "looks at p_new"),
        ({"jackpot": {}}, {"tis": {}}, {"loss": "reinforce"}, "looks at p_new"),
    ],
)
def test_what_the_learner_does_not_compute_for_the_run_is_refused(chosen, own, objective, said):
    run, others = pipeline_of(own, **objective), shadows(chosen, **objective)
    with pytest.raises(UserError, match=said):
        refuse_further_needs(run, others, scores_once=True)
    if said == "looks at p_new":  # in a phase of one step p_new is p_ref
        refuse_further_needs(run, others, scores_once=False)
    refuse_further_needs(others["+".join(chosen)], others, scores_once=True)
