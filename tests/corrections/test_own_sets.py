"""The law of sets: every statistic is over a set of tokens, tokens outside of it may hold anything,
and tokens that take no part change no other token's weight or advantage. For every registered
correction, loss, advantage and KL."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from correction_helpers import mismatched_step, pipeline_of
from grid_cells import TIGHT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.specs import CORRECTIONS
from rlcore.interfaces import Corrected
from rlcore.objectives.advantages import turn_advantages
from rlcore.objectives.kl import Estimator, kl_penalty, penalty_weight, sampled_kl
from rlcore.objectives.losses import policy_loss
from rlcore.objectives.protocols import LossTensors, Rewards
from rlcore.objectives.specs import (
    ADVANTAGES,
    LOSSES,
    ObjectiveSpec,
    advantage_class,
    make_advantage,
    make_loss,
)
from rlcore.types import StepTensors

# every correction with settings that bind, and the settings that change its statistics
LISTS: list[dict[str, dict[str, Any]]] = [
    *({name: TIGHT.get(name, {})} for name in CORRECTIONS),
    {"tis": {"normalised": True}},
    {"tis": {"normalised": True, "level": "sequence"}},
    {"tis": {"widen_clip": True, "cap": 1.1}},
    {"mis": {"level": "geometric"}},
    {"m2po": {"budget": 0.1, "over": "harmful"}},
    {"outliers": {"threshold": 0.1, "over": "token"}},
    {"outliers": {"threshold": 0.2, "divergence": "k1", "over": "worst"}},
    {"dppo": {"region": "smooth", "penalty": 0.1}},
    {"dppo": {"divergence": "topk_tv"}},
    {"jackpot": {"mode": "mask"}},
    {"jackpot": {"mode": "expected"}},
    {"centre": {}, "jackpot": {"mode": "expected"}},
    {"tis": {"cap": 1.1}, "centre": {}},
    {"jackpot": {"target": "new", "alpha_hat": "expected"}},
]
JUNK = (math.nan, math.inf, -math.inf, 1e30, -50.0)
seeds = st.integers(0, 10_000)


def named(chosen: dict[str, dict[str, Any]]) -> str:
    return "-".join([*chosen, *(f"{k}={v}" for its in chosen.values() for k, v in its.items())])


every_list = pytest.mark.parametrize("chosen", LISTS, ids=named)


def a_step(seed: int, chosen: Any = ()) -> StepTensors:
    """Rows of unequal length, one without a usable log-prob somewhere, some cut off; under DVP some
    tokens are outside the safe sets."""
    step = mismatched_step(b=6, t=5, v=12, noise=0.7, seed=seed)
    g = torch.Generator().manual_seed(seed)
    step.truncated = torch.rand(6, generator=g) < 0.3
    step.logp_inf = torch.where(torch.rand(6, 5, generator=g) < 0.05, torch.nan, step.logp_inf)
    if "dvp" in chosen:
        step.coverage = 0.5 + torch.rand(6, 5, generator=g) / 2
        step.ref_inside, step.new_inside = (torch.rand(6, 5, generator=g) < 0.8 for _ in range(2))
    return step


def filled(step: StepTensors, where: Tensor, junk: float) -> StepTensors:
    """The step with `junk` in every tensor of tokens at these positions [B, T]."""
    changed = {}
    for f in fields(step):
        value = getattr(step, f.name)
        if f.name != "mask" and isinstance(value, Tensor) and value.shape[:2] == where.shape:
            at = where[..., None].expand(value.shape) if value.dim() == 3 else where
            fill = junk if value.is_floating_point() else 3
            changed[f.name] = value.masked_fill(at, fill)
    return replace(step, **changed)


def same(one: Corrected, other: Corrected, on: Tensor, tolerance: float = 0.0) -> None:
    """Weights, mask, scores and widened bounds are equal at these tokens [B, T], and the scale."""
    assert torch.equal(one.mask & on, other.mask & on)
    for name in ("weight", "score", "widen"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a[on], b[on], rtol=tolerance, atol=tolerance, msg=name)
    assert one.step_scale == pytest.approx(other.step_scale, rel=tolerance, abs=tolerance)


@every_list
@settings(max_examples=3, deadline=None)
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_tokens_outside_the_mask_may_hold_anything(chosen, seed: int, junk: float) -> None:
    step = a_step(seed, chosen)
    pipeline = pipeline_of(chosen)
    plain = pipeline.correct(step, ONE_RANK)
    other = pipeline.correct(filled(step, ~step.mask, junk), ONE_RANK)
    same(plain, other, step.mask)
    assert plain.metrics == pytest.approx(other.metrics, rel=0, abs=0)
    assert all(math.isfinite(v) for v in plain.metrics.values()), plain.metrics
    replaced = [
        pipeline.advantages(s, ONE_RANK)[step.mask] for s in (step, filled(step, ~step.mask, junk))
    ]
    assert torch.equal(*replaced)


@every_list
@settings(max_examples=3, deadline=None)
@given(seed=seeds, junk=st.floats(-40, 5))
def test_a_token_without_a_usable_log_prob_takes_no_part(chosen, seed: int, junk: float) -> None:
    """Whatever p_ref and p_new say of it: the others are as if it had not been sampled."""
    step = a_step(seed, chosen)
    unusable = step.mask & ~step.logp_inf.isfinite()
    pipeline = pipeline_of(chosen)
    plain = pipeline.correct(step, ONE_RANK)
    moved = replace(
        step,
        logp_ref=step.logp_ref.masked_fill(unusable, junk),
        logp_new=step.logp_new.masked_fill(unusable, junk),
    )
    same(plain, pipeline.correct(moved, ONE_RANK), step.mask)
    assert not plain.mask[unusable].any()
    left = replace(step, mask=step.mask & ~unusable)
    same(plain, pipeline.correct(left, ONE_RANK), step.mask & ~unusable, 1e-6)


@every_list
@settings(max_examples=3, deadline=None)
@given(seed=seeds, filler=st.sampled_from([-1e6, -30.0, 4.0]))
def test_the_filler_outside_a_safe_set_changes_nothing(chosen, seed: int, filler: float) -> None:
    chosen = chosen if "dvp" in chosen else {"dvp": {}, **chosen}
    step = a_step(seed, chosen)
    usual, other = (
        replace(
            step,
            logp_ref=torch.where(step.ref_inside, step.logp_ref, value),
            logp_new=torch.where(step.new_inside, step.logp_new, value),
        )
        for value in (-1e6, filler)
    )
    pipeline = pipeline_of(chosen)
    plain, changed = (pipeline.correct(s, ONE_RANK) for s in (usual, other))
    same(plain, changed, step.mask)
    assert plain.metrics == pytest.approx(changed.metrics, rel=0, abs=0)
    assert all(math.isfinite(v) for v in plain.metrics.values()), plain.metrics


@every_list
@pytest.mark.parametrize("how", ["vetoed", "cut off", "padding"])
@settings(max_examples=3, deadline=None)
@given(seed=seeds)
def test_sequences_that_take_no_part_change_no_other_s_weight(chosen, how: str, seed: int) -> None:
    """Dropped by a veto before, by the overlong filter, or without a token."""
    step = a_step(seed, chosen)
    if how == "padding":
        step.mask = step.mask.clone()
        step.mask[::3] = False
    before = {"veto": {"threshold": 0.4}} if how == "vetoed" and "veto" not in chosen else {}
    pipeline = pipeline_of(before | chosen, overlong_filter=how == "cut off")
    gone = ~pipeline_of(before, overlong_filter=how == "cut off").correct(step, ONE_RANK).mask.any(
        1
    )
    whole, rest = (pipeline.correct(s, ONE_RANK) for s in (step, step.rows(~gone)))
    if not gone.all():
        left = replace(whole.rows(~gone), step_scale=whole.step_scale)
        same(left, rest, step.mask[~gone], 2e-5)


@every_list
@settings(max_examples=3, deadline=None)
@given(seed=seeds, width=st.integers(1, 3))
def test_further_columns_change_nothing(chosen, seed: int, width: int) -> None:
    step = a_step(seed, chosen)
    wider = {}
    for f in fields(step):
        value = getattr(step, f.name)
        if isinstance(value, Tensor) and value.shape[:2] == step.mask.shape:
            more = value.new_zeros((value.shape[0], width, *value.shape[2:]))
            wider[f.name] = torch.cat([value, more], 1)
    pipeline = pipeline_of(chosen)
    plain, other = (pipeline.correct(s, ONE_RANK) for s in (step, replace(step, **wider)))
    parts = {n: getattr(other, n) for n in ("weight", "mask", "score", "widen")}
    cut = replace(other, **{n: None if v is None else v[:, :5] for n, v in parts.items()})
    same(plain, cut, step.mask, 1e-6)
    assert plain.metrics == pytest.approx(other.metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if not advantage_class(n).needs_values])
@settings(max_examples=20, deadline=None)
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_advantages_are_of_their_own_tokens_and_turns(name: str, seed: int, junk: float) -> None:
    g = torch.Generator().manual_seed(seed)
    advantage = make_advantage(ObjectiveSpec(advantage=name))
    mask = torch.arange(5) < torch.randint(1, 6, (6, 1), generator=g)
    rewards = Rewards(torch.randn(6, generator=g), torch.arange(6) // 3, ONE_RANK, mask.sum(1))
    penalty = torch.randn(6, 5, generator=g, dtype=torch.float64)
    # a KL to go is 0 behind the last token, and finite
    behind = torch.where(mask, penalty, 0.0 if not math.isfinite(junk) else junk)
    one, other = (advantage.of_tokens(rewards, p, mask)[mask] for p in (penalty, behind))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    to_go = torch.randn(6, 5, generator=g, dtype=torch.float64)
    groups, tokens = torch.arange(6) // 3, mask.double()
    found = [
        turn_advantages(advantage, values, groups, tokens, ONE_RANK, mask)
        for values in (to_go, to_go.masked_fill(~mask, junk))
    ]
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_losses_are_of_their_own_tokens(name: str, seed: int, junk: float) -> None:
    """What was not sampled may hold anything; what was rejected changes no other token's value or
    gradient."""
    g = torch.Generator().manual_seed(seed)
    new, ref, advantages, weight = (torch.randn(4, 5, generator=g).double() for _ in range(4))
    sampled = torch.arange(5) < torch.randint(1, 6, (4, 1), generator=g)
    kept = sampled & (torch.rand(4, 5, generator=g) < 0.7)
    loss = make_loss(ObjectiveSpec(loss=name))

    def of(mask: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        its = [v.masked_fill(~sampled, fill) for v in (new, ref, advantages, weight)]
        leaf = its[0].requires_grad_()
        tokens = LossTensors(leaf, *its[1:], mask=mask, sampled=sampled)
        value, _ = policy_loss(loss, tokens, short_circuit=False)
        value[kept].sum().backward()
        return value.detach(), leaf.grad

    plain, slope = of(kept, 0.0)
    for value, gradient in (of(kept, junk), of(sampled, 0.0)):
        torch.testing.assert_close(value[kept], plain[kept], rtol=0, atol=0)
        torch.testing.assert_close(gradient[kept], slope[kept], rtol=0, atol=0)
        assert (gradient[~sampled] == 0).all()


@pytest.mark.parametrize("kind", get_args(Estimator))
@settings(max_examples=20, deadline=None)
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_kls_are_of_their_own_tokens(kind: Estimator, seed: int, junk: float) -> None:
    g = torch.Generator().manual_seed(seed)
    new, base, inf = (torch.randn(4, 5, generator=g).double() - 3 for _ in range(3))
    on = torch.rand(4, 5, generator=g) < 0.6

    def of(fill: float) -> tuple[Tensor, ...]:
        a, b, c = (v.masked_fill(~on, fill) for v in (new, base, inf))
        leaf = a.requires_grad_()
        weight = penalty_weight(leaf, c, torch.ones_like(leaf), on, cap=2.0)
        value = kl_penalty(kind, leaf, b, weight)
        value.sum().backward()
        return value.detach(), weight, leaf.grad, sampled_kl(kind, leaf.detach(), b, on)

    for found, plain in zip(of(junk), of(0.0)):
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
        assert (found[~on] == 0).all()
