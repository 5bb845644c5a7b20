"""Lists of corrections, and a correction beside the loss: what each sees of the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from correction_helpers import mismatched_step, pipeline_of

from rlcore.corrections.dvp import Dvp, DvpSpec
from rlcore.corrections.functional import ais
from rlcore.corrections.jackpot import JackpotSpec
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Needs
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.testing.records import make_sampling
from rlcore.types import StepTensors

WEIGHERS: list[dict[str, dict[str, Any]]] = [
    {"tis": {}},
    {"tis": {"level": "sequence"}},
    {"mis": {}},
    {"icepop": {}},
    {"ais": {}},
    {"ais": {"alpha": "n_star"}},
    {"jackpot": {}},
    {"jackpot": {"normaliser": "none"}},
]


def pruned_step(share: float = 0.1) -> StepTensors:
    """A safe set that leaves out some of the sampled tokens."""
    step = mismatched_step(noise=0.02, seed=2)
    g = torch.Generator().manual_seed(0)
    step.ref_inside = step.new_inside = torch.rand(step.mask.shape, generator=g) >= share
    step.coverage = torch.full(step.mask.shape, 0.99)
    assert (step.mask & ~step.ref_inside).any()
    return step


@pytest.mark.parametrize("chosen", [*WEIGHERS, {"dvp": {}, "veto": {}, "tis": {}}])
def test_under_a_loss_without_the_ratio_weights_lead_to_p_new(chosen) -> None:
    step = mismatched_step(noise=0.4)
    if "dvp" in chosen:
        step.ref_inside = step.new_inside = torch.ones_like(step.mask)
        step.coverage = torch.ones(step.mask.shape)
        step.logp_new[2, 0] = step.logp_inf[2, 0] - 12.0  # the veto is on p_ref, not on p_new
    anchored = pipeline_of(chosen, loss="reinforce")
    found = anchored.correct(step, ONE_RANK, measure=False)
    assert anchored.needs.new and not pipeline_of(chosen).needs.new
    moved = mismatched_step(noise=0.4)
    moved.ref_inside = moved.new_inside = step.ref_inside
    moved.coverage = step.coverage
    moved.logp_ref = step.logp_new
    moved.ref_topk_ids, moved.ref_topk_logp = step.new_topk_ids, step.new_topk_logp
    moved.ref_logp_at_inf_ids = step.new_logp_at_inf_ids
    weights = {n: s for n, s in chosen.items() if n != "veto"}
    expected = pipeline_of(weights).correct(moved, ONE_RANK, measure=False)
    assert torch.equal(found.weight, expected.weight) and torch.equal(found.mask, expected.mask)


def test_what_does_not_weigh_asks_for_no_p_new() -> None:
    for chosen in ({}, {"veto": {}}, {"m2po": {}}):
        assert not pipeline_of(chosen, loss="reinforce").needs.new
    assert pipeline_of({"tis": {}}, loss="reinforce").needs == Needs(new=True)


@pytest.mark.parametrize("zero", ["token", "trajectory"])
def test_dvp_alone_looks_at_the_set_of_the_policy_whose_gradient_is_taken(zero) -> None:
    step = pruned_step()
    step.new_inside = ~step.ref_inside  # both policies leave tokens out, and others
    chosen = {"dvp": {"zero": zero}}
    for loss, inside in {"reinforce": step.new_inside, "ppo": step.ref_inside}.items():
        whole = (inside | ~step.mask).all(-1)[:, None]
        expected = (inside & (whole if zero == "trajectory" else True)).float()
        found = pipeline_of(chosen, loss=loss).correct(step, ONE_RANK, measure=False)
        assert torch.equal(found.weight[step.mask], expected[step.mask]), loss


@pytest.mark.parametrize("order", [("dvp", "ais"), ("ais", "dvp")])
def test_tokens_outside_the_safe_set_are_in_no_statistic(order) -> None:
    step = pruned_step()
    metrics = pipeline_of({name: {} for name in order}).correct(step, ONE_RANK)
    on = step.mask & step.ref_inside
    _, signals = ais(step.logp_ref, step.logp_inf, step.advantages, on)
    for name, value in signals.items():
        assert metrics.metrics[f"correction/ais/{name}"] == pytest.approx(value), name
    assert signals["alpha_mis"] < 1  # one token outside would have counted as |dlogp| = 20
    assert not metrics.weight[step.mask & ~step.ref_inside].any()


@pytest.mark.parametrize("chosen", [*WEIGHERS, {"veto": {}}, {"dppo": {}}, {"rapid": {}}])
def test_each_correction_looks_at_the_safe_set_of_the_policy_that_it_compares(
    chosen: dict[str, dict[str, Any]],
) -> None:
    """Another policy's set does not matter."""
    loss = "reinforce" if chosen.keys() & {"dppo", "rapid"} else "ppo"
    pipeline = pipeline_of({"dvp": {}, **chosen}, loss=loss)
    step = pruned_step()
    other = "ref_inside" if loss == "reinforce" else "new_inside"
    moved = replace(step, **{other: torch.ones_like(step.mask)})
    for each in (step, moved):
        each.advantages = pipeline.advantages(each, ONE_RANK)
    found, expected = (pipeline.correct(s, ONE_RANK, measure=False) for s in (step, moved))
    assert torch.equal(found.weight, expected.weight) and torch.equal(found.mask, expected.mask)
    assert found.metrics == expected.metrics
    assert torch.equal(step.advantages.nan_to_num(), moved.advantages.nan_to_num())


def test_shares_are_of_the_tokens_that_have_a_ratio() -> None:
    step = pruned_step()
    masked = pipeline_of({"dvp": {}, "mis": {}}).correct(step, ONE_RANK)
    assert masked.metrics["correction/mis/masked_share"] == 0.0  # none but those outside
    assert masked.metrics["correction/dvp/outside_share"] > 0.0
    assert masked.metrics["correction/zero_weight_share"] == pytest.approx(
        masked.metrics["correction/dvp/outside_share"]
    )


def test_the_measured_ais_signals_are_those_of_the_configured_ais() -> None:
    step = mismatched_step(noise=0.02)
    settings = {"delta": 0.5, "cap": 1.5}
    metrics = pipeline_of({"ais": settings}).correct(step, ONE_RANK).metrics
    for name in ("alpha", "alpha_ess", "alpha_mis", "alpha_var"):
        assert metrics[f"mismatch/ais_{name}"] == metrics[f"correction/ais/{name}"], name
    usual = pipeline_of({}).correct(step, ONE_RANK).metrics
    assert usual["mismatch/ais_alpha_mis"] > metrics["mismatch/ais_alpha_mis"]
    by_size = {"ais": {**settings, "alpha": "n_star"}}  # which does not read them
    unread = pipeline_of(by_size).correct(step, ONE_RANK).metrics
    assert unread["mismatch/ais_alpha_mis"] == usual["mismatch/ais_alpha_mis"]


def test_a_veto_below_the_clamp_of_ratios_still_fires() -> None:
    step = mismatched_step(noise=0.1)
    step.logp_ref[0, 0] = step.logp_inf[0, 0] - 30.0
    for threshold, kept in ((1e-12, False), (1e-14, True)):  # e^-30 is 9.4e-14
        found = pipeline_of({"veto": {"threshold": threshold}}).correct(step, ONE_RANK)
        assert found.mask[0].any().item() is kept and found.mask[1, 0]


def test_jackpot_without_z_keeps_rejected_tokens_with_weight_zero() -> None:
    step = mismatched_step(noise=0.6)
    paper, free = (
        pipeline_of({"jackpot": {"normaliser": n, "c1": 50.0}}, 5).correct(step, ONE_RANK)
        for n in ("paper", "none")
    )
    assert torch.equal(free.mask, step.mask)
    assert torch.equal(free.weight[step.mask] > 0, paper.mask[step.mask])
    ratio = (step.logp_ref - step.logp_inf).exp().clamp(min=1.0)
    torch.testing.assert_close(free.weight[paper.mask], ratio[paper.mask])
    same = ("acceptance", "acceptance_expected", "kl_kept", "dropped_mass")
    for name in (f"correction/jackpot/{n}" for n in same):
        assert paper.metrics[name] == free.metrics[name], name
    assert "correction/jackpot/kappa" not in free.metrics
    assert free.metrics["correction/zero_weight_share"] == pytest.approx(
        1 - paper.metrics["correction/kept_share"]
    )
    without = mismatched_step(noise=0.6)
    without.topk_ids_inf = without.topk_logp_inf = None  # it needs no stored top k
    bare = pipeline_of({"jackpot": {"normaliser": "none", "c1": 50.0}}, 5).correct(
        without, ONE_RANK
    )
    assert torch.equal(bare.weight, free.weight)


def test_jackpot_s_normaliser_follows_the_aggregation() -> None:
    step = mismatched_step(noise=0.6)
    for aggregation, chosen in (
        ("token-mean", "paper"),
        ("seq-mean-token-mean", "none"),
        ("seq-mean-token-sum-norm", "none"),
    ):
        auto = pipeline_of({"jackpot": {}}, 5, aggregation=aggregation)
        named = pipeline_of({"jackpot": {"normaliser": chosen}}, 5, aggregation=aggregation)
        assert auto.needs == named.needs
        found, expected = (p.correct(step, ONE_RANK, measure=False) for p in (auto, named))
        assert torch.equal(found.weight, expected.weight)
        assert torch.equal(found.mask, expected.mask)
    with pytest.raises(UserError, match=r"correction\.jackpot\.mode=both"):
        JackpotSpec(normaliser="none", mode="mask").check("correction.jackpot")


def test_the_distance_of_the_kept_from_the_target_is_reported() -> None:
    matched = mismatched_step(noise=0.0)
    apart = mismatched_step(noise=1.0)
    values = [
        pipeline_of({"jackpot": {"lam": lam}}).correct(step, ONE_RANK).metrics
        for step, lam in ((matched, 1.0), (apart, 3.0), (apart, 1.0), (apart, 0.3))
    ]
    found = [v["correction/jackpot/kl_kept"] for v in values]
    assert found[0] < 1e-6 and found == sorted(found)  # it rises as fewer tokens are rejected
    assert math.isfinite(found[-1])


def test_dvp_takes_out_the_token_or_its_whole_sequence() -> None:
    step = pruned_step()
    outside = step.mask & ~step.ref_inside
    left = outside.any(-1)
    assert left.any() and not left.all()
    token, trajectory = (
        pipeline_of({"dvp": {"zero": zero}, "mis": {}}).correct(step, ONE_RANK)
        for zero in ("token", "trajectory")
    )
    kept = step.mask & ~left[:, None]
    assert torch.equal(trajectory.mask, step.mask) and torch.equal(token.mask, step.mask)
    assert torch.equal(trajectory.weight[kept], token.weight[kept]) and token.weight[kept].all()
    assert not trajectory.weight[step.mask & left[:, None]].any()
    assert torch.equal(token.weight[step.mask] == 0, outside[step.mask])
    share = left.double().mean().item()
    assert token.metrics["correction/dvp/sequence_outside_share"] == pytest.approx(share)


def test_a_trajectory_counts_as_outside_whatever_was_rejected_of_it_before() -> None:
    step = pruned_step()
    left = (step.mask & ~step.ref_inside).any(-1)
    kept = Corrected(torch.ones(step.mask.shape), step.mask & step.ref_inside, {})
    found = Dvp(DvpSpec(zero="trajectory"), 0).correct(step, kept, ONE_RANK)
    assert not found.weight[kept.mask & left[:, None]].any()
    assert found.weight[kept.mask & ~left[:, None]].all()
    share = left.double().mean().item()
    assert found.metrics["sequence_outside_share"] == pytest.approx(share)
    assert found.metrics["outside_share"] == 0.0


@pytest.mark.parametrize("rhos", [(0.01, 0.1), (0.1, 0.01)])
def test_of_two_safe_sets_the_smaller_holds_for_actor_and_learner(rhos) -> None:
    specs = {f"dvp{i}": DvpSpec(rho=rho) for i, rho in enumerate(rhos)}
    both = build(specs, 0, ObjectiveSpec())
    assert both.needs.safe_set_rho == 0.1
    assert both.constrain_sampling(make_sampling()) == make_sampling(min_p=0.1)
