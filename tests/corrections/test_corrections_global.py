"""Statistics are of the whole step: the same on one rank or two, in one micro-batch or eight, in
any order of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from correction_helpers import mismatched_step, on_ranks, pipeline_of

from rlcore.corrections.ais import AisSpec
from rlcore.corrections.mismatch import mismatch_metrics, policy_age
from rlcore.corrections.numerics import ONE_RANK, token_uniforms
from rlcore.objectives.losses import coefficients, counts, policy_loss
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.specs import ObjectiveSpec, make_loss
from rlcore.types import StepTensors

CHOICES: list[dict[str, dict[str, Any]]] = [
    {},
    {"tis": {"level": "sequence"}},
    {"mis": {"level": "geometric"}},
    {"veto": {"threshold": 0.1}, "ais": {}},
    {"ais": {"alpha": "n_star"}},
    {"jackpot": {"alpha_hat": "bernoulli"}},
    {"jackpot": {"target": "new", "alpha_hat": "expected", "tail": "none", "missing": "bound"}},
    {"dvp": {}, "tis": {}},
    {"dvp": {"zero": "trajectory"}, "mis": {}},
    {"opsm": {"delta": 0.05}, "tis": {}},
    {"dppo": {"low": 0.05, "high": 0.05}},
    {"tis": {"cap": 1.2, "normalised": True, "level": "sequence"}},
    {"m2po": {"budget": 0.05}, "tis": {}},
    {"clip_cov": {"share": 0.1, "low": 0.0, "high": 9.0}, "outliers": {"threshold": 0.2}},
    {"kl_cov": {"share": 0.2}, "minpro": {}},
    {"jackpot": {"mode": "expected"}},
    {"rapid": {}},
]
SPLITS = [[range(0, 4), range(4, 8)], [range(0, 2), range(2, 8)], [range(0, 0), range(0, 8)]]


def uneven_step() -> StepTensors:
    step = mismatched_step(b=8, t=12, noise=0.6, seed=5)
    step.ref_inside = step.new_inside = (
        torch.rand(step.mask.shape, generator=torch.Generator().manual_seed(0)) > 0.1
    )
    step.coverage = 0.9 + 0.1 * torch.rand(
        step.mask.shape, generator=torch.Generator().manual_seed(1)
    )
    return step


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda c: "+".join(c) or "none")
@pytest.mark.parametrize("split", SPLITS, ids=["even", "uneven", "one-empty"])
def test_two_ranks_correct_as_one(chosen: dict[str, dict[str, Any]], split: list[range]) -> None:
    step = uneven_step()
    whole_advantages = pipeline_of(chosen, 1).advantages(step, ONE_RANK)
    whole = pipeline_of(chosen, 1).correct(step, ONE_RANK)

    def work(rank: int, reduce: Any) -> Any:
        pipeline, share = pipeline_of(chosen, 1), step.rows(list(split[rank]))
        return pipeline.advantages(share, reduce), pipeline.correct(share, reduce)

    parts = on_ranks(work, 2)
    torch.testing.assert_close(torch.cat([a for a, _ in parts]), whole_advantages, equal_nan=True)
    torch.testing.assert_close(
        torch.cat([c.weight for _, c in parts]), whole.weight, rtol=1e-6, atol=1e-7
    )
    assert torch.equal(torch.cat([c.mask for _, c in parts]), whole.mask)
    for _, corrected in parts:
        assert corrected.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda c: "+".join(c) or "none")
def test_overlong_filtering_is_that_of_a_step_without_the_truncated(chosen) -> None:
    step, cut = uneven_step(), torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool)
    step.truncated = cut
    filtering = pipeline_of(chosen, 1, overlong_filter=True)
    whole = filtering.correct(step, ONE_RANK)
    left = pipeline_of(chosen, 1).correct(step.rows(~cut), ONE_RANK)
    assert not whole.mask[cut].any() and torch.equal(whole.mask[~cut], left.mask)
    torch.testing.assert_close(whole.weight[~cut], left.weight, rtol=1e-6, atol=1e-7)
    unfiltered = pipeline_of(chosen, 1).advantages(
        step, ONE_RANK
    )  # a baseline has all of its group
    torch.testing.assert_close(filtering.advantages(step, ONE_RANK), unfiltered, equal_nan=True)
    parts = on_ranks(lambda r, reduce: filtering.correct(step.rows(SPLITS[1][r]), reduce), 2)
    torch.testing.assert_close(torch.cat([c.weight for c in parts]), whole.weight)
    for corrected in parts:
        assert corrected.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)
    assert whole.metrics["train/overlong_filtered"] == 4


def test_a_share_alone_would_have_come_out_otherwise() -> None:
    """Guards the tests above: the two halves really have different statistics."""
    step = uneven_step()
    for chosen in ({"ais": {}}, {"jackpot": {}}):
        whole = pipeline_of(chosen, 1).correct(step, ONE_RANK)
        half = pipeline_of(chosen, 1).correct(step.rows(slice(0, 4)), ONE_RANK)
        assert not torch.allclose(half.weight, whole.weight[:4])


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda c: "+".join(c) or "none")
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_eight_micro_batches_give_the_gradient_of_one(
    chosen: dict[str, dict[str, Any]], mode: Any
) -> None:
    step = uneven_step()
    pipeline = pipeline_of(chosen, 1)
    advantages = pipeline.advantages(step, ONE_RANK)
    corrected = pipeline.correct(step, ONE_RANK)
    tokens, sequences = counts(corrected.mask, ONE_RANK)

    def gradient(batches: list[Any]) -> torch.Tensor:
        logp = step.logp_new.clone().requires_grad_()
        for i in batches:
            mask = corrected.mask[i]
            inputs = LossTensors(
                logp[i], step.logp_ref[i], advantages[i], corrected.weight[i], mask, step.mask[i]
            )
            loss, _ = policy_loss(
                make_loss(ObjectiveSpec(eps_high=0.3)),
                inputs,
                short_circuit=pipeline.needs.short_circuit,
            )
            (loss * coefficients(mode, mask, tokens, sequences, 12)).sum().backward()
        assert logp.grad is not None
        return logp.grad

    one, eight = gradient([slice(0, 8)]), gradient([[i] for i in (5, 3, 7, 1, 0, 6, 2, 4)])
    assert torch.isfinite(one).all()
    torch.testing.assert_close(one, eight, rtol=1e-6, atol=1e-9)


def test_a_permuted_and_padded_layout_rejects_the_same_tokens() -> None:
    step = uneven_step()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    here = pipeline_of({"jackpot": {}}, 9).correct(step, ONE_RANK).mask
    there = pipeline_of({"jackpot": {}}, 9).correct(step.rows(order), ONE_RANK).mask
    assert torch.equal(here[order], there)
    assert not torch.equal(here, pipeline_of({"jackpot": {}}, 10).correct(step, ONE_RANK).mask)
    step.step += 1
    assert not torch.equal(here, pipeline_of({"jackpot": {}}, 9).correct(step, ONE_RANK).mask)


def test_draws_belong_to_the_token_and_are_uniform() -> None:
    ids = torch.arange(400) * 1000 - 5
    u = token_uniforms(1, "obrs", 3, ids, 250)
    assert u.dtype == torch.float32 and (u >= 0).all() and (u < 1).all()
    assert torch.equal(u[100:200, :50], token_uniforms(1, "obrs", 3, ids[100:200], 50))
    for other in (token_uniforms(2, "obrs", 3, ids, 250), token_uniforms(1, "obrs", 4, ids, 250)):
        assert (u == other).float().mean() < 1e-3
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    counts_ = torch.histc(u, 20, 0, 1)
    assert ((counts_ - 5000) ** 2 / 5000).sum() < 50  # chi-square with 19 degrees of freedom: 1e-4
    for a, b in (
        (u[:, :-1], u[:, 1:]),
        (u[:-1], u[1:]),
    ):  # neighbours in a row, neighbours in a column
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.015
    assert len(u.unique()) > 99_000


def test_mismatch_metrics_against_the_plain_formulas() -> None:
    step = mismatched_step(noise=0.7, seed=3)
    m = mismatch_metrics(step, ONE_RANK, AisSpec())
    ref, inf = step.logp_ref[step.mask].double(), step.logp_inf[step.mask].double()
    d = ref - inf
    w = d.exp()
    expected = {
        "kl_k1": -d.mean(),
        "kl_k3": (w - 1 - d).mean(),
        "abs_dlogp_mean": d.abs().mean(),
        "abs_dlogp_max": d.abs().max(),
        "abs_dprob_mean": (ref.exp() - inf.exp()).abs().mean(),
        "ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "ratio_cv": w.std() / w.mean(),
        "acceptance": w.clamp(max=1).mean(),
        "truncated_share": (w > 2).double().mean(),
        "masked_share": ((w > 2) | (w < 0.5)).double().mean(),
        "nonfinite_share": torch.tensor(0.0),
    }
    for name, value in expected.items():
        assert m[f"mismatch/{name}"] == pytest.approx(value.item(), rel=1e-5, abs=1e-9), name
    assert m["mismatch/kappa"] == pytest.approx(
        m["mismatch/acceptance"] / m["mismatch/z_approx"], rel=1e-6
    )
    assert 0 < m["mismatch/unknown_share"] < 1


def test_mismatch_is_measured_before_rejection_whatever_the_correction() -> None:
    step = mismatched_step(noise=1.0)
    all_of_them = [
        pipeline_of(c, 0).correct(step, ONE_RANK).metrics
        for c in ({}, {"jackpot": {}}, {"veto": {}})
    ]
    for metrics in all_of_them[1:]:
        assert {k: v for k, v in metrics.items() if not k.startswith("correction/")} == {
            k: v for k, v in all_of_them[0].items() if not k.startswith("correction/")
        }
    assert all_of_them[1]["correction/kept_share"] < 1


def test_policy_age_of_the_tokens() -> None:
    version = torch.tensor([[7, 7, 6, 99], [4, 5, 0, 99]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    ages = policy_age(version, mask, 7, ONE_RANK)
    assert (
        ages["staleness/mean"] == pytest.approx((0 + 0 + 1 + 3 + 2 + 7) / 6)
        and ages["staleness/max"] == 7
    )
    expected = {0: 2, 1: 1, 2: 2, 4: 1, 8: 0, 128: 0}
    for edge, tokens in expected.items():
        assert ages[f"staleness/share_{edge}"] == pytest.approx(tokens / 6)
    with pytest.raises(ValueError, match="version 8"):
        policy_age(torch.tensor([[8]]), torch.tensor([[1]]), 7, ONE_RANK)
    assert policy_age(version, torch.zeros(2, 4), 7, ONE_RANK)["staleness/max"] == 0


def test_leaving_the_measurement_out_changes_no_weight() -> None:
    step = uneven_step()
    for chosen in CHOICES:
        full = pipeline_of(chosen, 1).correct(step, ONE_RANK)
        bare = pipeline_of(chosen, 1).correct(step, ONE_RANK, measure=False)
        assert torch.equal(full.weight, bare.weight) and torch.equal(full.mask, bare.mask)
        assert bare.metrics == {
            k: v for k, v in full.metrics.items() if k.startswith("correction/")
        }


def test_the_share_of_tokens_that_a_default_safe_set_would_leave_out() -> None:
    step = mismatched_step(noise=0.1, seed=3)
    assert step.ref_topk_logp is not None
    assert mismatch_metrics(step, ONE_RANK, AisSpec())["mismatch/unlikely_share"] == 0.0
    ref = step.logp_ref.clone()
    ref[0, 0] = step.ref_topk_logp[0, 0].max() - 13.1
    ref[0, 1] = step.ref_topk_logp[0, 1].max() - 12.9
    assert step.mask[0, :2].all()
    found = mismatch_metrics(replace(step, logp_ref=ref), ONE_RANK, AisSpec())
    tokens = int(step.mask.sum())
    assert found["mismatch/unlikely_share"] == pytest.approx(1 / tokens)
    without = replace(step, ref_topk_logp=None, logp_ref=ref)
    assert "mismatch/unlikely_share" not in mismatch_metrics(without, ONE_RANK, AisSpec())
