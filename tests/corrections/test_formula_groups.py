"""RAPID's estimator on a bandit that can be enumerated, and keeping the best of a group."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.functional import best_of_group, rapid_advantages
from rlcore.errors import UserError

NOCLIP = 1e9


def enumerate_gradient(seed: int, group: int, arms: int, eta: float, leave_one_out: bool):
    """Expected estimate over every group of draws from mu, and the true gradient, both by logits
    [arms]."""
    g = torch.Generator().manual_seed(seed)
    new, mu = (torch.randn(arms, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    reward = torch.randn(arms, generator=g, dtype=torch.float64)
    score = torch.eye(arms, dtype=torch.float64) - new.exp()  # grad log p_new(a) by logits
    estimate = torch.zeros(arms, dtype=torch.float64)
    for draws in itertools.product(range(arms), repeat=group):
        index = torch.tensor(draws)
        advantage, weight = rapid_advantages(
            new[index][:, None],
            mu[index][:, None],
            torch.ones(group, 1),
            reward[index],
            torch.zeros(group, dtype=torch.long),
            eta=eta,
            leave_one_out=leave_one_out,
        )
        terms = (weight.double() * advantage.double())[:, None] * score[index]
        estimate += mu[index].sum().exp() * terms.mean(0)
    return estimate, new.exp() @ (reward[:, None] * score)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), group=st.sampled_from([1, 2, 3]))
def test_leave_one_out_estimate_is_unbiased(seed: int, group: int) -> None:
    estimate, true = enumerate_gradient(seed, group, 4, NOCLIP, True)
    torch.testing.assert_close(estimate, true, atol=1e-6, rtol=1e-5)


def test_own_sample_in_the_baseline_and_clipping_bias_it() -> None:
    plain, true = enumerate_gradient(0, 2, 4, NOCLIP, False)
    clipped, _ = enumerate_gradient(0, 2, 4, 1.0, True)
    assert (plain - true).abs().max() > 0.01 and (clipped - true).abs().max() > 0.01


def test_baseline_and_weight_are_clipped_from_above() -> None:
    new = torch.tensor([[-0.5, -0.5], [-1.0, -1.0], [-2.0, -9.0]])
    mu = torch.tensor([[-2.0, -2.0], [-1.0, -1.0], [-2.0, -8.0]])
    rewards = torch.tensor([1.0, 0.0, 1.0])
    advantage, weight = rapid_advantages(
        new, mu, torch.ones(3, 2), rewards, torch.zeros(3, dtype=torch.long)
    )
    torch.testing.assert_close(weight, torch.tensor([2.0, 1.0, math.exp(-1.0)]))
    baseline = (2.0 + math.exp(-1.0)) / 3
    torch.testing.assert_close(advantage, torch.tensor([1 - baseline, -baseline, 1 - baseline]))


def test_on_policy_limit_is_the_group_mean_and_groups_do_not_mix() -> None:
    logp = -torch.rand(6, 4)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.3, 0.3, 5.0])
    groups = torch.tensor([7, 2, 7, 2, 2, 9])
    advantage, weight = rapid_advantages(logp, logp, torch.ones(6, 4), rewards, groups)
    assert torch.equal(weight, torch.ones(6))
    torch.testing.assert_close(advantage, torch.tensor([0.0, -0.2, 0.0, 0.1, 0.1, 0.0]))
    equal, _ = rapid_advantages(logp, logp, torch.ones(6, 4), torch.full((6,), 0.1), groups)
    assert torch.equal(equal, torch.zeros(6))


def test_masked_and_broken_tokens_leave_the_product_and_a_group_of_one_stands_alone() -> None:
    new = torch.tensor([[-1.0, math.nan], [math.inf, math.nan]])
    mu = torch.tensor([[-1.5, 0.0], [math.nan, 1.0]])
    mask = torch.tensor([[1, 0], [1, 0]])
    one = torch.tensor([3])
    advantage, weight = rapid_advantages(new, mu, mask, torch.ones(2), torch.tensor([0, 1]))
    torch.testing.assert_close(weight, torch.tensor([math.exp(0.5), 1.0]))
    torch.testing.assert_close(advantage, torch.tensor([1 - math.exp(0.5), 0.0]))
    alone, _ = rapid_advantages(new[:1], mu[:1], mask[:1], torch.ones(1), one, leave_one_out=True)
    assert alone.item() == 1.0
    empty, ones = rapid_advantages(new, mu, torch.zeros(2, 2), torch.ones(2), torch.zeros(2))
    assert torch.equal(ones, torch.ones(2)) and torch.equal(empty, torch.zeros(2))
    for length in (0, 3):
        none = torch.zeros(0, length)
        assert len(rapid_advantages(none, none, none, torch.zeros(0), torch.zeros(0))[0]) == 0


@settings(max_examples=40, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=20),
    groups=st.integers(1, 4),
    keep=st.integers(1, 6),
)
def test_best_of_group_keeps_the_highest_and_ties_go_to_the_earlier(
    rewards, groups: int, keep: int
) -> None:
    ids = [i * 7 % groups for i in range(len(rewards))]
    chosen = best_of_group(torch.tensor(rewards), torch.tensor(ids), keep=keep).tolist()
    for group in set(ids):
        members = [i for i, g in enumerate(ids) if g == group]
        best = sorted(members, key=lambda i: (-rewards[i], i))[:keep]
        assert [i for i in members if chosen[i]] == sorted(best)


def test_best_of_group_edges() -> None:
    assert best_of_group(torch.tensor([]), torch.tensor([]), keep=2).tolist() == []
    kept = best_of_group(torch.tensor([math.nan, -math.inf, -5.0]), torch.zeros(3), keep=1)
    assert kept.tolist() == [False, False, True]
    with pytest.raises(UserError, match="keep=0"):
        best_of_group(torch.ones(2), torch.zeros(2), keep=0)
