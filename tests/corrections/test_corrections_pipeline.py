"""The corrections on their hooks and what composes them: identity, order, refusals, metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from correction_helpers import log_softmax, make_step, mismatched_step, rows

from rlcore.config.correction_schema import CorrectionsConfig
from rlcore.corrections import REGISTRY, build
from rlcore.corrections.reduction import ONE_RANK
from rlcore.errors import UserError
from rlcore.interfaces import Needs
from rlcore.objectives.aggregate import coefficients, counts
from rlcore.objectives.policy_loss import policy_loss
from rlcore.types import SamplingSpec, StepTensors

EVERY: list[dict[str, dict[str, Any]]] = [
    {},
    {"tis": {}},
    {"tis": {"level": "sequence"}},
    {"tis": {"adjusted": True}},
    {"mis": {}},
    {"mis": {"level": "sequence"}},
    {"mis": {"level": "geometric", "low": 0.99, "high": 1.01}},
    {"icepop": {}},
    {"veto": {}},
    {"jackpot": {}},
    {"jackpot": {"target": "new", "alpha_hat": "bernoulli", "missing": "bound"}},
    {"jackpot": {"target": "new", "short_circuit": True}},
    {"jackpot": {"mode": "mask"}},
    {"jackpot": {"mode": "reweight"}},
    {"ais": {}},
    {"dvp": {}},
    {"dvp": {}, "mis": {}, "veto": {}},
    {"rapid": {}},
    {"rapid": {"leave_one_out": True}},
]
IDS = ["+".join(c) + ":" + ",".join(f"{k}={v}" for a in c.values() for k, v in a.items()) for c in EVERY]


def with_safe_set(step: StepTensors) -> StepTensors:
    step.inside = torch.ones_like(step.mask)
    step.coverage = torch.ones(step.mask.shape)
    return step


def matched_step() -> StepTensors:
    logp = log_softmax(2 * torch.randn(8, 10, 50, generator=torch.Generator().manual_seed(1)))
    mask = torch.arange(10) < torch.tensor([10, 9, 1, 0, 4, 7, 10, 2])[:, None]
    return with_safe_set(make_step(logp, logp, mask=mask, k=20))


def gradient(step: StepTensors, weight: torch.Tensor, mask: torch.Tensor, short: bool, adv: torch.Tensor):
    logp = step.logp_new.clone().requires_grad_()
    loss, _ = policy_loss("ppo", logp, step.logp_ref, adv, mask, weight, eps_low=0.2, eps_high=0.2, short_circuit=short)
    (loss * coefficients("token-mean", mask, *counts(mask, ONE_RANK), 10)).sum().backward()
    return logp.grad


@pytest.mark.parametrize("chosen", EVERY, ids=IDS)
def test_without_mismatch_the_step_is_the_uncorrected_one_to_the_bit(chosen: dict[str, dict[str, Any]]) -> None:
    step = matched_step()
    pipeline = build(chosen, run_seed=3)
    corrected = pipeline.correct(step, ONE_RANK)
    assert torch.equal(corrected.weight, torch.ones_like(corrected.weight))
    assert torch.equal(corrected.mask, step.mask)
    plain = gradient(step, torch.ones(8, 10), step.mask, False, step.advantages)
    ours = gradient(step, corrected.weight, corrected.mask, pipeline.needs.short_circuit, step.advantages)
    assert plain is not None and ours is not None and plain.abs().sum() > 0
    assert torch.equal(plain, ours)
    assert all(math.isfinite(v) for v in corrected.metrics.values())


@pytest.mark.parametrize("chosen", EVERY[1:], ids=IDS[1:])
def test_with_mismatch_something_changes_and_stays_finite(chosen: dict[str, dict[str, Any]]) -> None:
    step = with_safe_set(mismatched_step(noise=1.5))
    step.inside[2, 0] = False
    step.logp_ref[4, 0] = step.logp_inf[4, 0] - 12.0
    pipeline = build(chosen, run_seed=3)
    step.advantages = pipeline.advantages(step, ONE_RANK)
    corrected = pipeline.correct(step, ONE_RANK)
    changed = (corrected.weight != 1).any() or not torch.equal(corrected.mask, step.mask)
    assert changed
    assert torch.isfinite(corrected.weight).all() and (corrected.weight >= 0).all()
    assert not (corrected.mask & ~step.mask).any()
    grad = gradient(step, corrected.weight, corrected.mask, pipeline.needs.short_circuit, step.advantages)
    assert grad is not None and torch.isfinite(grad).all()
    assert all(math.isfinite(v) for v in corrected.metrics.values())


def test_constructor_arguments_are_the_fields_of_the_schema() -> None:
    for name in REGISTRY:
        arguments = CorrectionsConfig.model_validate({name: {}}).chosen()
        assert list(arguments) == [name]
        build(arguments, run_seed=0)


def test_weights_multiply_masks_intersect_and_the_order_counts() -> None:
    step = mismatched_step(noise=0.3)
    step.logp_ref[0, 0] = step.logp_inf[0, 0] - 15.0
    tis, veto = (build({n: {}}, 0).correct(step, ONE_RANK) for n in ("tis", "veto"))
    both = build({"tis": {}, "veto": {}}, 0).correct(step, ONE_RANK)
    assert torch.equal(both.weight[both.mask], tis.weight[both.mask]) and torch.equal(both.mask, veto.mask)
    assert not both.mask[0].any() and both.mask[1].any()
    before = build({"veto": {}, "ais": {}}, 0).correct(step, ONE_RANK)
    after = build({"ais": {}, "veto": {}}, 0).correct(step, ONE_RANK)
    assert before.metrics["correction/ais/alpha_ess"] != after.metrics["correction/ais/alpha_ess"]
    assert before.metrics["mismatch/kl_k1"] == after.metrics["mismatch/kl_k1"] == tis.metrics["mismatch/kl_k1"]
    assert both.metrics["correction/veto/vetoed_share"] == 1 / 8


def test_mis_zeros_stay_in_the_denominator_and_rejected_tokens_leave_it() -> None:
    step = mismatched_step(noise=1.0)
    mis = build({"mis": {}}, 0).correct(step, ONE_RANK)
    assert torch.equal(mis.mask, step.mask) and (mis.weight[step.mask] == 0).any()
    jackpot = build({"jackpot": {}}, 0).correct(step, ONE_RANK)
    assert jackpot.mask.sum() < step.mask.sum() and (jackpot.weight[jackpot.mask] > 0).all()
    share = jackpot.mask.sum() / step.mask.sum()
    assert jackpot.metrics["correction/jackpot/acceptance"] == pytest.approx(share.item())


def test_jackpot_modes_and_targets() -> None:
    step = mismatched_step(noise=1.0)
    both, mask, reweight, new, short = (
        build({"jackpot": args}, 5).correct(step, ONE_RANK)
        for args in (
            {},
            {"mode": "mask"},
            {"mode": "reweight"},
            {"target": "new"},
            {"target": "new", "short_circuit": True},
        )
    )
    assert torch.equal(mask.mask, both.mask) and torch.equal(mask.weight, torch.ones_like(mask.weight))
    assert torch.equal(reweight.mask, step.mask) and torch.equal(reweight.weight[both.mask], both.weight[both.mask])
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
    corrected = build({"jackpot": settings}, 5).correct(step, ONE_RANK)
    assert corrected.mask.all() and dropped.min() > 0.01
    assert ((corrected.weight - 1.0).abs() <= dropped + 1e-6).all()
    assert (corrected.weight != 1.0).any()
    assert corrected.metrics["correction/jackpot/dropped_mass"] == pytest.approx(dropped.mean().item(), rel=1e-5)
    assert corrected.metrics["correction/jackpot/z_approx"] == pytest.approx(1 - dropped.mean().item(), rel=1e-5)


def test_jackpot_s_truncated_shares_are_of_each_cap_by_itself() -> None:
    # two tokens: the first's Z p_new/p_inf is above c1, and its p_ref/p_new of 1/9 takes the product far below
    p_inf, p_ref, p_new = (torch.tensor(p).log() for p in ([0.5, 0.5], [0.1, 0.9], [0.9, 0.1]))
    step = make_step(*(p.expand(4, 8, 2) for p in (p_inf, p_ref, p_new)), k=2)
    first = (step.logp_new - step.logp_inf > 0).float().mean().item()
    assert 0 < first < 1
    settings = {"target": "new", "alpha_hat": "bernoulli", "c1": 1.01, "c2": 8.0}
    metrics = build({"jackpot": settings}, 5).correct(step, ONE_RANK).metrics
    assert metrics["correction/jackpot/z"] * 1.8 > 1.01
    assert metrics["correction/jackpot/truncated_share"] == pytest.approx(first)
    assert metrics["correction/jackpot/c2_truncated_share"] == pytest.approx(1 - first)  # 9 > 8
    towards_ref = build({"jackpot": {}}, 5).correct(step, ONE_RANK).metrics
    assert "correction/jackpot/c2_truncated_share" not in towards_ref


def test_dvp_gives_tokens_outside_the_learners_set_no_weight_whatever_stands_there() -> None:
    step = with_safe_set(mismatched_step(noise=0.1))
    step.inside[0, 0] = False
    for filler in (-1e6, -50.0, 0.0, math.nan):
        step.logp_ref[0, 0] = step.logp_new[0, 0] = filler
        corrected = build({"dvp": {}, "tis": {}}, 0).correct(step, ONE_RANK)
        assert corrected.weight[0, 0] == 0 and corrected.mask[0, 0]
        assert corrected.weight[1, 0] > 0
        assert corrected.metrics["correction/dvp/outside_share"] == pytest.approx(1 / step.mask.sum().item())
        assert corrected.metrics["mismatch/abs_dlogp_max"] < 2
    sequence = build({"dvp": {}, "mis": {"level": "geometric"}}, 0).correct(step, ONE_RANK)
    assert not sequence.weight[0][step.mask[0]].any()  # a product with a factor of 0
    assert not build({"dvp": {}, "veto": {}}, 0).correct(step, ONE_RANK).mask[0].any()


def test_nan_in_the_engines_log_probs_leaves_the_loss_and_is_counted() -> None:
    for chosen in EVERY:
        step = with_safe_set(mismatched_step(noise=0.2))
        step.logp_inf[0, 0], step.logp_inf[1, 0] = math.nan, -math.inf
        pipeline = build(chosen, run_seed=0)
        step.advantages = pipeline.advantages(step, ONE_RANK)
        corrected = pipeline.correct(step, ONE_RANK)
        assert not corrected.mask[:2, 0].any()
        assert corrected.metrics["mismatch/nonfinite_share"] == pytest.approx(2 / step.mask.sum().item())
        assert torch.isfinite(corrected.weight).all()
        assert all(math.isfinite(v) for v in corrected.metrics.values())
        grad = gradient(step, corrected.weight, corrected.mask, False, step.advantages)
        assert grad is not None and torch.isfinite(grad).all() and grad[0, 0] == 0


@pytest.mark.parametrize("chosen", EVERY, ids=IDS)
def test_empty_masks_a_batch_of_one_and_an_empty_share_have_an_outcome(chosen: dict[str, dict[str, Any]]) -> None:
    for b, mask in ((3, torch.zeros(3, 4, dtype=torch.bool)), (1, torch.tensor([[True, False, False, False]]))):
        logp = log_softmax(torch.randn(b, 4, 9))
        step = with_safe_set(make_step(logp, log_softmax(torch.randn(b, 4, 9)), mask=mask, group=1))
        step.rewards = torch.ones(b)
        pipeline = build(chosen, run_seed=0)
        step.advantages = pipeline.advantages(step, ONE_RANK)
        corrected = pipeline.correct(step, ONE_RANK)
        assert torch.isfinite(corrected.weight).all()
        assert all(math.isfinite(v) for v in corrected.metrics.values())
    nothing = with_safe_set(mismatched_step(b=2, t=3))
    assert build(chosen, 0).correct(rows(nothing, slice(0, 0)), ONE_RANK).weight.shape == (0, 3)


def test_needs_are_the_union() -> None:
    assert build({}, 0).needs == Needs()
    assert build({"dvp": {"rho": 0.01}, "tis": {"adjusted": True}, "veto": {}}, 0).needs == Needs(
        new=True, short_circuit=True, safe_set_rho=0.01
    )
    jackpot = build({"jackpot": {"target": "new"}}, 0).needs
    assert jackpot.topk and jackpot.new and not jackpot.short_circuit
    assert not build({"jackpot": {"mode": "mask"}}, 0).needs.topk
    assert build({"rapid": {}}, 0).needs.short_circuit and build({"rapid": {}}, 0).needs.new


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"tis": {}, "mis": {}}, "tis and mis"),
        ({"jackpot": {"mode": "mask"}, "tis": {}}, "more than once"),
        ({"ais": {}, "veto": {}, "rapid": {}}, "ais and rapid"),
        ({"tiss": {}}, "choose one of: none, tis"),
        ({"tis": {"cap": 0.5}}, "correction.tis.cap=0.5"),
        ({"mis": {"low": 1.5, "high": 2.0}}, "correction.mis.low=1.5"),
        ({"icepop": {"low": 3.0, "high": 2.0}}, "correction.icepop.low=3.0"),
        ({"jackpot": {"short_circuit": True}}, "target=new"),
        ({"dvp": {"rho": 1.5}}, "correction.dvp.rho=1.5"),
    ],
)
def test_contradictions_are_refused_with_the_reason(chosen: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(chosen, run_seed=0)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01}])
def test_truncated_support_is_refused_unless_the_learner_applies_the_same(cut: dict[str, float]) -> None:
    sampling = SamplingSpec(**cut)  # type: ignore[arg-type]
    for chosen in ({}, {"tis": {}}, {"dvp": {}}):
        with pytest.raises(UserError, match=next(iter(cut))):
            pipeline = build(chosen, 0)
            pipeline.check(pipeline.constrain_sampling(sampling))
    with pytest.raises(UserError, match="greedy"):
        build({}, 0).check(SamplingSpec(temperature=0.0))


def test_dvp_constrains_the_actor_and_jackpot_wants_a_stored_top_k() -> None:
    dvp = build({"dvp": {"rho": 0.001}, "mis": {}}, 0)
    constrained = dvp.constrain_sampling(SamplingSpec())
    assert constrained.min_p == 0.001 and constrained.temperature == 1.0
    with pytest.raises(UserError, match=r"min_p=0\.0 contradicts"):
        dvp.check(SamplingSpec())  # an actor that kept to no safe set
    dvp.check(constrained)
    assert dvp.constrain_sampling(constrained) == constrained
    with pytest.raises(UserError, match="logprobs_k=0"):
        build({"jackpot": {}}, 0).check(SamplingSpec(logprobs_k=0))
    build({"jackpot": {"mode": "mask"}}, 0).check(SamplingSpec(logprobs_k=0))
    with pytest.raises(UserError, match="logprobs_k=-1"):
        build({}, 0).check(SamplingSpec(logprobs_k=-1))


def test_missing_tensors_are_an_invariant_not_a_fallback() -> None:
    step = mismatched_step()
    step.ref_topk_ids = None
    with pytest.raises(ValueError, match="top k"):
        build({"jackpot": {}}, 0).correct(step, ONE_RANK)
    with pytest.raises(ValueError, match="safe set"):
        build({"dvp": {}}, 0).correct(step, ONE_RANK)
