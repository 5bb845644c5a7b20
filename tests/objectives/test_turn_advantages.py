"""Advantages of turns: rewards to go, by hand, and what their expected gradient is by enumeration.

The enumerated game: a first choice of two; `go on` leads to a second choice of two. Every choice is
one token, and every group of three episodes is summed over with its probability.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rlcore.corrections.numerics import ONE_RANK
from rlcore.objectives.advantages import rewards_to_go, sequence_advantages, turn_advantages
from rlcore.objectives.specs import ADVANTAGES, ObjectiveSpec, advantage_class, make_advantage

STOP, LEFT, RIGHT = 0, 1, 2
# rewards of the turns of each way to play; the first knows nothing of the second choice
REWARDS = {STOP: (0.7,), LEFT: (-0.2, 1.0), RIGHT: (-0.2, -0.5)}
SAMPLES = 3


def by_turn(advantage: str, ways: tuple[int, ...], discount: float = 1.0) -> Tensor:
    """[B, 2] of one group."""
    rewards = torch.tensor([[*REWARDS[w], *[0.0] * (2 - len(REWARDS[w]))] for w in ways])
    present = torch.tensor([[True, w != STOP] for w in ways])
    return turn_advantages(
        make_advantage(ObjectiveSpec(advantage=advantage)),
        rewards_to_go(rewards, discount),
        torch.full((len(ways),), 7),
        present.double(),
        ONE_RANK,
        present,
    )


def policy(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the first and second choice [2] each."""
    return torch.log_softmax(parameters[:2], 0), torch.log_softmax(parameters[2:], 0)


def logp(parameters: Tensor, way: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the turns of a way to play; 0 of one that it does not have."""
    first, second = policy(parameters)
    if way == STOP:
        return first[0], second.sum() * 0
    return first[1], second[way - 1]


PARAMETERS = torch.tensor([0.3, -0.4, 0.8, -0.1], dtype=torch.float64)


def expected_gradient(advantage: str, discount: float = 1.0) -> Tensor:
    """[4]: of the mean over the group of `sum over turns of A log p`."""
    parameters = PARAMETERS.clone().requires_grad_()
    objective = parameters.sum() * 0
    for ways in itertools.product(REWARDS, repeat=SAMPLES):
        turns = [logp(parameters, w) for w in ways]
        probability = sum(p.detach() for pair in turns for p in pair).exp()
        values = by_turn(advantage, ways, discount).double()
        summed = sum(a * p for row, pair in zip(values, turns) for a, p in zip(row, pair))
        objective = objective + probability * summed / SAMPLES
    (gradient,) = torch.autograd.grad(objective, parameters)
    return gradient


def exact_gradient(discount: float = 1.0) -> Tensor:
    """[4]: of the expected reward; what a turn does to rewards behind it counts discounted."""
    parameters = PARAMETERS.clone().requires_grad_()
    objective = parameters.sum() * 0
    for way, rewards in REWARDS.items():
        first, second = logp(parameters, way)
        later = rewards[1] if way != STOP else 0.0
        probability = (first + second).detach().exp()
        objective = objective + probability * (
            first * (rewards[0] + discount * later) + second * later
        )
    (gradient,) = torch.autograd.grad(objective, parameters)
    return gradient


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
def test_rloo_follows_the_exact_gradient_scaled_by_who_reaches_a_turn(discount: float) -> None:
    reach = float(policy(PARAMETERS)[0][1].exp())
    scale = torch.tensor([1, 1, *[1 - (1 - reach) ** (SAMPLES - 1)] * 2])
    found, exact = expected_gradient("rloo", discount), exact_gradient(discount)
    torch.testing.assert_close(found, exact * scale, atol=1e-6, rtol=1e-6)
    assert exact.abs().min() > 0.02


def test_a_group_mean_scales_by_the_samples_that_reach_a_turn() -> None:
    p = float(policy(PARAMETERS)[0][1].exp())
    shares = {0: (1 - p) ** 2, 1: 2 * p * (1 - p), 2: p * p}  # others that reach the second turn
    later = sum(share * others / (others + 1) for others, share in shares.items())
    scale = torch.tensor([2 / 3, 2 / 3, later, later])
    found = expected_gradient("dr_grpo")
    torch.testing.assert_close(found, exact_gradient() * scale, atol=1e-6, rtol=1e-6)


def test_undiscounted_and_by_episode_the_expected_gradient_is_the_same() -> None:
    """Of the first turn: rewards that a turn cannot change only add noise."""
    advantage = make_advantage(ObjectiveSpec(advantage="rloo"))
    parameters = PARAMETERS.clone().requires_grad_()
    objective = parameters.sum() * 0
    for ways in itertools.product(REWARDS, repeat=SAMPLES):
        rewards = torch.tensor([sum(REWARDS[w]) for w in ways])
        values = sequence_advantages(advantage, rewards, torch.zeros(SAMPLES), ONE_RANK).double()
        whole = [sum(logp(parameters, w)) for w in ways]
        probability = sum(p.detach() for p in whole).exp()
        objective = objective + probability * sum(a * p for a, p in zip(values, whole)) / SAMPLES
    (gradient,) = torch.autograd.grad(objective, parameters)
    torch.testing.assert_close(gradient, exact_gradient(), atol=1e-6, rtol=1e-6)
    by_turns = expected_gradient("rloo")[:2]
    torch.testing.assert_close(by_turns, gradient[:2], atol=1e-6, rtol=1e-6)


def test_rewards_to_go_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, -1.0, 0.0]])
    assert rewards_to_go(rewards, 0.5).tolist() == [[3.0, 4.0, 4.0], [2.5, -1.0, 0.0]]
    assert rewards_to_go(rewards, 1.0).tolist() == [[7.0, 6.0, 4.0], [2.0, -1.0, 0.0]]
    assert rewards_to_go(rewards, 0.0).tolist() == rewards.tolist()


def test_turns_are_compared_with_those_of_their_number() -> None:
    values = by_turn("dr_grpo", (STOP, LEFT, RIGHT))
    # to go: 0.7 | 0.8, 1.0 | -0.7, -0.5
    mean = (0.7 + 0.8 - 0.7) / 3
    expected = [[0.7 - mean, 0.0], [0.8 - mean, 0.75], [-0.7 - mean, -0.75]]
    torch.testing.assert_close(values, torch.tensor(expected))
    alone = by_turn("grpo", (STOP, STOP, LEFT))
    assert alone[2, 1] == 0 and alone[:, 0].abs().min() > 0.1


@pytest.mark.parametrize(
    "name", sorted(name for name in ADVANTAGES if not advantage_class(name).needs_values)
)
def test_of_one_turn_each_the_advantage_is_that_of_the_episode(name: str) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.5])
    groups = torch.tensor([3, 3, 5, 5])
    tokens = torch.tensor([2.0, 1.0, 3.0, 1.0])
    for whitening in ("episodes", "tokens"):
        advantage = make_advantage(ObjectiveSpec(advantage=name, whitening=whitening))
        present = torch.ones(4, 1, dtype=torch.bool)
        turns = turn_advantages(
            advantage, rewards[:, None], groups, tokens[:, None], ONE_RANK, present
        )
        whole = sequence_advantages(advantage, rewards, groups, ONE_RANK, tokens)
        assert torch.equal(turns[:, 0], whole)


def test_batch_statistics_are_over_the_turns_of_the_batch() -> None:
    values = by_turn("reinforce", (STOP, LEFT, RIGHT))
    mean = (0.7 + 0.8 + 1.0 - 0.7 - 0.5) / 5
    expected = [[0.7 - mean, 0.0], [0.8 - mean, 1.0 - mean], [-0.7 - mean, -0.5 - mean]]
    torch.testing.assert_close(values, torch.tensor(expected))
    whitened = by_turn("reinforce_pp", (STOP, LEFT, RIGHT))
    assert float(whitened.sum()) == pytest.approx(0, abs=1e-6)
    assert float((whitened**2).sum()) / 4 == pytest.approx(1, abs=1e-4)


def test_turns_of_groups_with_neighbouring_numbers_are_not_compared() -> None:
    to_go = torch.tensor([[1.0, 5.0], [3.0, 9.0], [10.0, 2.0], [14.0, 8.0]])
    found = turn_advantages(
        make_advantage(ObjectiveSpec(advantage="group_mean")),
        to_go,
        torch.tensor([0, 0, 1, 1]),
        torch.ones(4, 2),
        ONE_RANK,
        torch.ones(4, 2, dtype=torch.bool),
    )
    assert found.tolist() == [[-1.0, -2.0], [1.0, 2.0], [-2.0, -3.0], [2.0, 3.0]]
