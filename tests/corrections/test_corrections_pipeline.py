"""The corrections on their hooks and what composes them: identity, order, refusals, metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from correction_helpers import log_softmax, make_step, mismatched_step, pipeline_of

from rlcore.corrections.numerics import ONE_RANK
from rlcore.interfaces import Needs
from rlcore.objectives.losses import coefficients, counts, policy_loss
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.specs import ObjectiveSpec, make_loss
from rlcore.testing.records import make_sampling
from rlcore.types import StepTensors

EVERY: list[dict[str, dict[str, Any]]] = [
    {},
    {"tis": {}},
    {"tis": {"level": "sequence"}},
    {"tis": {"adjusted": True}},
    {"tis": {"floor": 0.9, "cap": 1.1, "normalised": True}},
    {"m2po": {"budget": 1e-3}, "tis": {}},
    {"outliers": {"threshold": 0.01}, "tis": {}},
    {"outliers": {"threshold": 0.01, "divergence": "k2", "over": "worst"}},
    {"kl_cov": {"share": 0.2}},
    {"minpro": {}},
    {"vesp": {}},
    {"mis": {}},
    {"mis": {"level": "sequence"}},
    {"mis": {"level": "geometric", "low": 0.99, "high": 1.01}},
    {"icepop": {}},
    {"veto": {}},
    {"opsm": {"delta": 0.0}},
    {"dppo": {"low": 0.0, "high": 0.0}},
    {"dppo": {"divergence": "kl"}},
    {"dppo": {"divergence": "topk_kl", "low": 0.0, "high": 0.0, "penalty": 0.1}},
    {"dppo": {"region": "smooth", "delta": 0.1}},
    {"vcpo": {}},
    {"opsm": {"delta": 0.1, "target": "ref"}, "tis": {}},
    {"jackpot": {}},
    {"jackpot": {"target": "new", "alpha_hat": "bernoulli", "missing": "bound"}},
    {"jackpot": {"target": "new", "short_circuit": True}},
    {"jackpot": {"mode": "mask"}},
    {"jackpot": {"mode": "reweight"}},
    {"jackpot": {"mode": "expected"}},
    {"ais": {}},
    {"dvp": {}},
    {"dvp": {}, "mis": {}, "veto": {}},
    {"dvp": {"zero": "trajectory"}},
    {"rapid": {}},
    {"rapid": {"leave_one_out": True}},
]
IDS = [
    "+".join(c) + ":" + ",".join(f"{k}={v}" for a in c.values() for k, v in a.items())
    for c in EVERY
]


def with_safe_set(step: StepTensors) -> StepTensors:
    step.ref_inside = step.new_inside = torch.ones_like(step.mask)
    step.coverage = torch.ones(step.mask.shape)
    return step


def matched_step() -> StepTensors:
    logp = log_softmax(2 * torch.randn(8, 10, 50, generator=torch.Generator().manual_seed(1)))
    mask = torch.arange(10) < torch.tensor([10, 9, 1, 0, 4, 7, 10, 2])[:, None]
    return with_safe_set(make_step(logp, logp, mask=mask, k=20))


def gradient(
    step: StepTensors, weight: torch.Tensor, mask: torch.Tensor, short: bool, adv: torch.Tensor
):
    logp = step.logp_new.clone().requires_grad_()
    tokens = LossTensors(logp, step.logp_ref, adv, weight, mask, step.mask)
    loss, _ = policy_loss(make_loss(ObjectiveSpec()), tokens, short_circuit=short)
    (loss * coefficients("token-mean", mask, *counts(mask, ONE_RANK), 10)).sum().backward()
    return logp.grad


@pytest.mark.parametrize("chosen", EVERY, ids=IDS)
def test_without_mismatch_the_step_is_the_uncorrected_one_to_the_bit(
    chosen: dict[str, dict[str, Any]],
) -> None:
    step = matched_step()
    pipeline = pipeline_of(chosen, 3)
    corrected = pipeline.correct(step, ONE_RANK)
    assert corrected.step_scale == 1.0
    assert torch.equal(corrected.weight, torch.ones_like(corrected.weight))
    assert torch.equal(corrected.mask, step.mask)
    plain = gradient(step, torch.ones(8, 10), step.mask, False, step.advantages)
    ours = gradient(
        step, corrected.weight, corrected.mask, pipeline.needs.short_circuit, step.advantages
    )
    assert plain is not None and ours is not None and plain.abs().sum() > 0
    assert torch.equal(plain, ours)
    assert all(math.isfinite(v) for v in corrected.metrics.values())


@pytest.mark.parametrize("chosen", EVERY[1:], ids=IDS[1:])
def test_with_mismatch_something_changes_and_stays_finite(
    chosen: dict[str, dict[str, Any]],
) -> None:
    step = with_safe_set(mismatched_step(noise=1.5))
    step.ref_inside[2, 0] = False
    step.logp_ref[4, 0] = step.logp_inf[4, 0] - 12.0
    pipeline = pipeline_of(chosen, 3)
    step.advantages = pipeline.advantages(step, ONE_RANK)
    corrected = pipeline.correct(step, ONE_RANK)
    changed = (corrected.weight != 1).any() or not torch.equal(corrected.mask, step.mask)
    assert changed or corrected.step_scale < 1 or corrected.score is not None
    assert torch.isfinite(corrected.weight).all()
    leads_back = "smooth" in str(chosen)
    assert leads_back or (corrected.weight >= 0).all()
    assert not (corrected.mask & ~step.mask).any()
    grad = gradient(
        step, corrected.weight, corrected.mask, pipeline.needs.short_circuit, step.advantages
    )
    assert grad is not None and torch.isfinite(grad).all()
    assert all(math.isfinite(v) for v in corrected.metrics.values())


def test_weights_multiply_masks_intersect_and_the_order_counts() -> None:
    step = mismatched_step(noise=0.3)
    step.logp_ref[0, 0] = step.logp_inf[0, 0] - 15.0
    tis, veto = (pipeline_of({n: {}}, 0).correct(step, ONE_RANK) for n in ("tis", "veto"))
    both = pipeline_of({"tis": {}, "veto": {}}, 0).correct(step, ONE_RANK)
    assert torch.equal(both.weight[both.mask], tis.weight[both.mask]) and torch.equal(
        both.mask, veto.mask
    )
    assert not both.mask[0].any() and both.mask[1].any()
    assert (tis.weight[0] != 1).any() and (both.weight[~both.mask] == 1).all()
    before = pipeline_of({"veto": {}, "ais": {}}, 0).correct(step, ONE_RANK)
    after = pipeline_of({"ais": {}, "veto": {}}, 0).correct(step, ONE_RANK)
    assert before.metrics["correction/ais/alpha_ess"] != after.metrics["correction/ais/alpha_ess"]
    assert (
        before.metrics["mismatch/kl_k1"]
        == after.metrics["mismatch/kl_k1"]
        == tis.metrics["mismatch/kl_k1"]
    )
    assert both.metrics["correction/veto/vetoed_share"] == 1 / 8


def test_mis_zeros_stay_in_the_denominator_and_rejected_tokens_leave_it() -> None:
    step = mismatched_step(noise=1.0)
    mis = pipeline_of({"mis": {}}, 0).correct(step, ONE_RANK)
    assert torch.equal(mis.mask, step.mask) and (mis.weight[step.mask] == 0).any()
    jackpot = pipeline_of({"jackpot": {}}, 0).correct(step, ONE_RANK)
    assert jackpot.mask.sum() < step.mask.sum() and (jackpot.weight[jackpot.mask] > 0).all()
    share = jackpot.mask.sum() / step.mask.sum()
    assert jackpot.metrics["correction/jackpot/acceptance"] == pytest.approx(share.item())


def test_jackpot_modes_and_targets() -> None:
    step = mismatched_step(noise=1.0)
    both, mask, reweight, new, short = (
        pipeline_of({"jackpot": args}, 5).correct(step, ONE_RANK)
        for args in (
            {},
            {"mode": "mask"},
            {"mode": "reweight"},
            {"target": "new"},
            {"target": "new", "short_circuit": True},
        )
    )
    assert torch.equal(mask.mask, both.mask) and torch.equal(
        mask.weight, torch.ones_like(mask.weight)
    )
    assert torch.equal(reweight.mask, step.mask) and torch.equal(
        reweight.weight[both.mask], both.weight[both.mask]
    )
    factor = (step.logp_ref - step.logp_new).exp().clamp(max=3.0)
    torch.testing.assert_close(new.weight[new.mask], (short.weight * factor)[new.mask])
    assert not torch.equal(new.mask, both.mask)


@pytest.mark.parametrize("target", ["ref", "new"])
@pytest.mark.parametrize("alpha_hat", ["expected", "bernoulli"])
def test_without_a_tail_matched_weights_are_off_by_the_dropped_mass_at_most_and_the_run_says_it(
    target: str, alpha_hat: str
) -> None:
    logp = log_softmax(2.0 * torch.randn(6, 9, 40, generator=torch.Generator().manual_seed(3)))
    step = make_step(logp, logp, k=5)
    dropped = 1.0 - logp.topk(5, -1).values.exp().sum(-1)
    settings = {"tail": "none", "target": target, "alpha_hat": alpha_hat, "c1": 10.0}
    corrected = pipeline_of({"jackpot": settings}, 5).correct(step, ONE_RANK)
    assert corrected.mask.all() and dropped.min() > 0.01
    assert ((corrected.weight - 1.0).abs() <= dropped + 1e-6).all()
    assert (corrected.weight != 1.0).any()
    assert corrected.metrics["correction/jackpot/dropped_mass"] == pytest.approx(
        dropped.mean().item(), rel=1e-5
    )
    assert corrected.metrics["correction/jackpot/z_approx"] == pytest.approx(
        1 - dropped.mean().item(), rel=1e-5
    )


def test_jackpot_s_truncated_shares_are_of_each_cap_by_itself() -> None:
    # two tokens: the first's Z p_new/p_inf is above c1, and its p_ref/p_new of 1/9 takes the
    # product far below
    p_inf, p_ref, p_new = (torch.tensor(p).log() for p in ([0.5, 0.5], [0.1, 0.9], [0.9, 0.1]))
    step = make_step(*(p.expand(4, 8, 2) for p in (p_inf, p_ref, p_new)), k=2)
    settings = {"target": "new", "alpha_hat": "bernoulli", "c1": 1.01, "c2": 8.0}
    corrected = pipeline_of({"jackpot": settings}, 5).correct(step, ONE_RANK)
    metrics, kept = corrected.metrics, corrected.mask
    first = (step.logp_new > step.logp_inf)[kept].float().mean().item()
    assert 0 < first < 1 and not kept.all()
    assert metrics["correction/jackpot/z"] * 1.8 > 1.01
    assert metrics["correction/jackpot/truncated_share"] == pytest.approx(first)
    assert metrics["correction/jackpot/c2_truncated_share"] == pytest.approx(1 - first)  # 9 > 8
    assert metrics["correction/jackpot/weight_mean"] == pytest.approx(
        corrected.weight[kept].mean().item()
    )
    towards_ref = pipeline_of({"jackpot": {}}, 5).correct(step, ONE_RANK).metrics
    assert "correction/jackpot/c2_truncated_share" not in towards_ref


def test_dvp_gives_tokens_outside_the_learners_set_no_weight_whatever_stands_there() -> None:
    step = with_safe_set(mismatched_step(noise=0.1))
    step.ref_inside[0, 0] = False
    for filler in (-1e6, -50.0, 0.0, math.nan):
        step.logp_ref[0, 0] = step.logp_new[0, 0] = filler
        corrected = pipeline_of({"dvp": {}, "tis": {}}, 0).correct(step, ONE_RANK)
        assert corrected.weight[0, 0] == 0 and corrected.mask[0, 0]
        assert corrected.weight[1, 0] > 0
        assert corrected.metrics["correction/dvp/outside_share"] == pytest.approx(
            1 / step.mask.sum().item()
        )
        assert corrected.metrics["mismatch/abs_dlogp_max"] < 2
    sequence = pipeline_of({"dvp": {}, "mis": {"level": "geometric"}}, 0).correct(step, ONE_RANK)
    assert not sequence.weight[0][step.mask[0]].any()  # a product with a factor of 0
    assert not pipeline_of({"dvp": {}, "veto": {}}, 0).correct(step, ONE_RANK).mask[0].any()


def test_nan_in_the_engines_log_probs_leaves_the_loss_and_is_counted() -> None:
    for chosen in EVERY:
        step = with_safe_set(mismatched_step(noise=0.2))
        step.logp_inf[0, 0], step.logp_inf[1, 0] = math.nan, -math.inf
        pipeline = pipeline_of(chosen, 0)
        step.advantages = pipeline.advantages(step, ONE_RANK)
        corrected = pipeline.correct(step, ONE_RANK)
        assert not corrected.mask[:2, 0].any()
        assert corrected.metrics["mismatch/nonfinite_share"] == pytest.approx(
            2 / step.mask.sum().item()
        )
        assert torch.isfinite(corrected.weight).all()
        assert all(math.isfinite(v) for v in corrected.metrics.values())
        grad = gradient(step, corrected.weight, corrected.mask, False, step.advantages)
        assert grad is not None and torch.isfinite(grad).all() and grad[0, 0] == 0


@pytest.mark.parametrize("chosen", EVERY, ids=IDS)
def test_empty_masks_a_batch_of_one_and_an_empty_share_have_an_outcome(
    chosen: dict[str, dict[str, Any]],
) -> None:
    for b, mask in (
        (3, torch.zeros(3, 4, dtype=torch.bool)),
        (1, torch.tensor([[True, False, False, False]])),
    ):
        logp = log_softmax(torch.randn(b, 4, 9))
        step = with_safe_set(make_step(logp, log_softmax(torch.randn(b, 4, 9)), mask=mask, group=1))
        step.rewards = torch.ones(b)
        pipeline = pipeline_of(chosen, 0)
        step.advantages = pipeline.advantages(step, ONE_RANK)
        corrected = pipeline.correct(step, ONE_RANK)
        assert torch.isfinite(corrected.weight).all()
        assert all(math.isfinite(v) for v in corrected.metrics.values())
    nothing = with_safe_set(mismatched_step(b=2, t=3))
    assert pipeline_of(chosen, 0).correct(nothing.rows(slice(0, 0)), ONE_RANK).weight.shape == (
        0,
        3,
    )


def test_needs_are_the_union() -> None:
    assert pipeline_of({}, 0).needs == Needs()
    assert pipeline_of(
        {"dvp": {"rho": 0.01}, "tis": {"adjusted": True}, "veto": {}}, 0
    ).needs == Needs(new=True, short_circuit=True, safe_set_rho=0.01)
    jackpot = pipeline_of({"jackpot": {"target": "new"}}, 0).needs
    assert jackpot.topk and jackpot.new and not jackpot.short_circuit
    assert not pipeline_of({"jackpot": {"mode": "mask"}}, 0).needs.topk
    assert pipeline_of({"rapid": {}}, 0).needs == Needs(new=True)


def test_dvp_constrains_the_actor() -> None:
    dvp = pipeline_of({"dvp": {"rho": 0.001}, "mis": {}})
    constrained = dvp.constrain_sampling(make_sampling())
    assert constrained == make_sampling(min_p=0.001)
    assert dvp.constrain_sampling(constrained) == constrained
    assert pipeline_of({"tis": {}}).constrain_sampling(make_sampling()) == make_sampling()


def test_which_lists_can_be_corrected_one_micro_batch_at_a_time() -> None:
    assert pipeline_of({}).sequence_wise
    assert pipeline_of({"dvp": {}, "mis": {"level": "sequence"}}).sequence_wise
    for name in ("veto", "jackpot", "ais", "rapid"):
        assert not pipeline_of({"tis": {}, name: {}}).sequence_wise


def test_missing_tensors_are_an_invariant_not_a_fallback() -> None:
    step = mismatched_step()
    step.ref_topk_ids = None
    with pytest.raises(ValueError, match="top k"):
        pipeline_of({"jackpot": {}}, 0).correct(step, ONE_RANK)
    with pytest.raises(ValueError, match="safe set"):
        pipeline_of({"dvp": {}}, 0).correct(step, ONE_RANK)
