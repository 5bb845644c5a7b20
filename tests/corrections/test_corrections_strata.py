"""A fleet of several kinds of actors: statistics, lists of corrections and metrics by kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from correction_helpers import mismatched_step, on_ranks, pipeline_of

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import Pipeline, build
from rlcore.corrections.specs import CORRECTIONS, Stratum
from rlcore.interfaces import Corrected
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object
from rlcore.types import StepTensors

Lists = list[tuple[tuple[str, ...], dict[str, dict[str, Any]]]]
STATISTICS: list[dict[str, dict[str, Any]]] = [{"ais": {}}, {"jackpot": {}}, {"vcpo": {}}]


def fleet(lists: Lists, usual: dict[str, dict[str, Any]] | None = None) -> Pipeline:
    def specs(chosen: dict[str, dict[str, Any]]) -> Any:
        return {name: load_object(CORRECTIONS[name])(**args) for name, args in chosen.items()}

    strata = [Stratum(kinds, specs(chosen)) for kinds, chosen in lists]
    return build(specs(usual or {}), 1, ObjectiveSpec(), strata)


def half_noisy() -> StepTensors:
    """Four sequences of actors that match the learner, then four of noisy ones."""
    step = mismatched_step(b=8, noise=0.7, seed=3)
    matched = torch.arange(8) < 4
    step.kinds = (~matched).long()
    for name in ("logp_ref", "logp_new"):
        setattr(step, name, step.logp_inf.where(matched[:, None], getattr(step, name)))
    for name, own in (("logp", "logp"), ("ids", "ids")):
        ref, inf = f"ref_topk_{name}", f"topk_{own}_inf"
        setattr(step, ref, getattr(step, inf).where(matched[:, None, None], getattr(step, ref)))
    at_inf = step.topk_logp_inf.where(matched[:, None, None], step.ref_logp_at_inf_ids)
    return replace(step, ref_logp_at_inf_ids=at_inf)


def own(corrected: Corrected, kind: str) -> dict[str, float]:
    """The metrics of a kind, under the names that they would have in a run of that kind alone."""
    end = f"@{kind}"
    return {n.removesuffix(end): v for n, v in corrected.metrics.items() if n.endswith(end)}


@pytest.mark.parametrize("chosen", STATISTICS, ids=lambda c: "+".join(c))
def test_each_kind_is_corrected_and_measured_as_if_it_were_alone(chosen) -> None:
    step, pipeline = half_noisy(), pipeline_of(chosen, 1)
    found = fleet([(("bf16",), chosen), (("int3",), chosen)]).correct(step, ONE_RANK)
    for number, kind in enumerate(("bf16", "int3")):
        rows = step.kinds == number
        alone = pipeline.correct(step.rows(rows), ONE_RANK)
        assert torch.equal(found.weight[rows], alone.weight)
        assert torch.equal(found.mask[rows], alone.mask)
        assert own(found, kind) == alone.metrics
    assert (found.weight[:4] == 1).all() and found.mask[:4].equal(step.mask[:4])


def test_a_clip_is_widened_for_the_kind_whose_list_asks_for_it() -> None:
    step, wide = half_noisy(), {"tis": {"cap": 1.1, "widen_clip": True}}
    found = fleet([(("bf16",), {"tis": {}}), (("int3",), wide)]).correct(step, ONE_RANK)
    on, ratio = step.mask != 0, (step.logp_ref - step.logp_inf).exp()
    expected = (ratio / 1.1).clamp(min=1.0).where(on & (step.kinds == 1)[:, None], 1.0)
    assert found.widen is not None and expected.max() > 1.5
    torch.testing.assert_close(found.widen.where(on, 1.0), expected)
    rows = found.rows(step.kinds == 1)
    assert rows.widen is not None and torch.equal(rows.widen, found.widen[4:])
    assert pipeline_of({"tis": {}}, 1).correct(step, ONE_RANK).widen is None


def test_statistics_of_all_kinds_together_are_those_of_a_run_that_knows_of_none() -> None:
    """And they would weigh samples that match: that is what strata are for."""
    step, chosen = half_noisy(), {"jackpot": {}}
    pooled = fleet([(("bf16", "int3"), chosen)]).correct(step, ONE_RANK)
    plain = pipeline_of(chosen, 1).correct(replace(step, kinds=None), ONE_RANK)
    assert torch.equal(pooled.weight, plain.weight) and torch.equal(pooled.mask, plain.mask)
    together = {n: v for n, v in pooled.metrics.items() if "@" not in n}
    assert together == pytest.approx(plain.metrics, rel=1e-12)
    assert (pooled.weight[:4] < 1).any()
    assert "correction/kept_share@int3" in pooled.metrics
    assert "correction/jackpot/kappa@int3" not in pooled.metrics  # there is one kappa


def test_a_kind_has_its_own_list_and_another_than_the_run_s_the_usual_one() -> None:
    step = half_noisy()
    step.kinds = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])  # 2: a kind that the run had before
    pipeline = fleet([(("bf16",), {}), (("int3",), {"mis": {}})], {"tis": {}})
    found = pipeline.correct(step, ONE_RANK)
    for rows, chosen in ((slice(0, 3), {}), (slice(3, 6), {"mis": {}}), (slice(6, 8), {"tis": {}})):
        alone = pipeline_of(chosen, 1).correct(step.rows(rows), ONE_RANK)
        assert torch.equal(found.weight[rows], alone.weight)
    assert "correction/mis/masked_share@int3" in found.metrics
    assert "correction/mis/masked_share@bf16" not in found.metrics


@pytest.mark.parametrize("split", [(slice(0, 3), slice(3, 8)), (slice(0, 4), slice(4, 8))])
def test_two_ranks_correct_as_one_also_where_a_kind_is_on_one_of_them(split) -> None:
    step = half_noisy()
    pipeline = fleet([(("bf16",), {"ais": {}}), (("int3",), {"vcpo": {}, "jackpot": {}})])
    whole = pipeline.correct(step, ONE_RANK)
    parts = on_ranks(lambda r, reduce: pipeline.correct(step.rows(split[r]), reduce), 2)
    torch.testing.assert_close(torch.cat([p.weight for p in parts]), whole.weight)
    for part in parts:
        assert part.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)
        assert part.step_scale == pytest.approx(whole.step_scale) and part.step_scale < 1


def test_a_kind_without_a_token_has_no_metrics() -> None:
    step = half_noisy()
    step.kinds = torch.zeros(8, dtype=torch.int64)
    found = fleet([(("bf16",), {"ais": {}}), (("int3",), {"ais": {}})]).correct(step, ONE_RANK)
    assert own(found, "int3") == {} and own(found, "bf16")
