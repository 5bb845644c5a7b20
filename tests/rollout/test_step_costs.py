"""Costs of engine steps, recovered from what steps took."""

from dataclasses import replace

import numpy as np
import pytest

from rlcore.interfaces import StepLoad
from rlcore.rollout.step_costs import FEWEST, StepCosts, non_negative

COSTS = {"step_s": 4e-3, "request_s": 2e-5, "context_s": 3e-7, "prompt_s": 6e-6}


def load(rng):
    requests, begun = int(rng.integers(1, 256)), int(rng.integers(0, 3)) * 8
    return StepLoad(requests, int(requests * rng.integers(10, 900)), begun * 30)


def seconds(load, costs=COSTS):
    work = (1, load.tokens, load.context_tokens, load.prompt_tokens)
    return float(np.dot(list(costs.values()), work))


def test_costs_are_recovered_from_steps_of_all_sizes():
    rng, costs = np.random.default_rng(0), StepCosts()
    for _ in range(400):
        step = load(rng)
        costs.add(step, seconds(step) * float(rng.uniform(0.9, 1.1)))
    assert costs.fitted() == pytest.approx(COSTS, rel=0.1)


def test_accepted_proposals_are_no_further_requests():
    rng, costs = np.random.default_rng(0), StepCosts()
    for _ in range(400):
        step = load(rng)
        accepted = int(rng.integers(0, 3)) * step.tokens
        more = replace(step, tokens=step.tokens + accepted, accepted=accepted)
        costs.add(more, seconds(step))
    assert costs.fitted() == pytest.approx(COSTS, rel=1e-3)


def test_as_many_requests_as_cost_half_of_a_step_s_fixed_part_are_counted():
    rng, costs = np.random.default_rng(0), StepCosts()
    assert costs.requests_at(0.5) == np.inf
    steps = [load(rng) for _ in range(400)]
    for step in steps:
        costs.add(step, seconds(step))
    context = sum(s.context_tokens for s in steps) / sum(s.tokens for s in steps)
    assert costs.requests_at(0.5) == pytest.approx(2e-3 / (2e-5 + 3e-7 * context), rel=1e-3)
    even = StepCosts()
    for step in steps:
        even.add(step, 1e-3)
    assert even.requests_at(0.5) > 1e4


def test_nothing_is_said_of_few_steps():
    costs = StepCosts()
    for _ in range(FEWEST - 1):
        costs.add(StepLoad(1, 10, 0), 1e-3)
    assert costs.fitted() == {}
    costs.add(StepLoad(1, 10, 0), 1e-3)
    assert sum(costs.fitted().values()) > 0


def test_no_cost_is_negative_and_the_mean_step_is_kept():
    rng, costs = np.random.default_rng(1), StepCosts()
    steps = [load(rng) for _ in range(200)]
    took = [max(1e-4, 9e-3 - 2e-5 * s.tokens) for s in steps]  # more requests, less time: noise
    for step, each in zip(steps, took):
        costs.add(step, each)
    found = costs.fitted()
    assert min(found.values()) >= 0 and found["request_s"] == 0
    assert np.mean([seconds(s, found) for s in steps]) == pytest.approx(np.mean(took), rel=1e-6)


def test_loads_that_always_go_together_share_a_cost():
    x = np.array([[1, n, 50 * n] for n in range(1, 40)], float)
    found = non_negative(x.T @ x, x.T @ (x @ [1e-3, 2e-5, 0]))
    np.testing.assert_allclose(x @ found, x @ [1e-3, 2e-5, 0], rtol=1e-6)
