"""The KL in a loss: what leads its tokens to p_new, its bounds, and what has no KL.

Expected gradients over whole corrections are in tests/corrections/test_bandit_gradients.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlcore.objectives.kl import KlController, full_kl, kl_penalty, penalty_weight, sampled_kl
from rlcore.objectives.specs import ObjectiveSpec

V = 12
KINDS = ["k1", "k2", "k3"]


def policies(count: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(V, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_value_from_another_policy_s_samples(kind) -> None:
    actor, current, base = policies(3)
    base = (current + (base - current).clamp(-2.0, 1.5)).log_softmax(0)  # inside k3's bound
    z = current.clone().requires_grad_()
    new = z.log_softmax(0)
    weight = penalty_weight(new, actor, torch.ones(V), torch.ones(V), cap=1e9)
    mean = (actor.exp() * kl_penalty(kind, new, base, weight)).sum()
    # k3's is the forward KL's, in its second argument
    exact = (base.exp() * (base - new)).sum() if kind == "k3" else full_kl(new, base)
    expected = torch.autograd.grad(exact, z, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(mean, z)[0], expected)
    if kind != "k2":
        torch.testing.assert_close(mean.detach(), full_kl(new, base).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_the_value_is_the_estimator_s(kind) -> None:
    new, base = policies(2, seed=1)
    base = new + (base - new).clamp(-2.0, 2.0)  # inside k3's bound
    weight = penalty_weight(new, new, torch.ones(V), torch.ones(V), cap=2.0)
    assert torch.equal(weight, torch.ones(V, dtype=torch.float64))
    torch.testing.assert_close(
        kl_penalty(kind, new, base, weight), sampled_kl(kind, new, base, torch.ones(V))
    )


def test_differentiating_k1_s_value_would_have_had_no_gradient() -> None:
    """Guards the first test: why k1 needs its score."""
    current, base = policies(2)
    z = current.clone().requires_grad_()
    new = z.log_softmax(0)
    mean = (new.exp().detach() * sampled_kl("k1", new, base, torch.ones(V))).sum()
    assert torch.autograd.grad(mean, z)[0].abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [-1e4, -18.0, 18.0, 1e4])
def test_value_and_gradient_are_bounded_and_the_gradient_does_not_vanish(kind, gap) -> None:
    new = torch.tensor([[-20.0]], requires_grad=True)
    loss = kl_penalty(kind, new, torch.tensor([[-20.0 + gap]]), torch.full((1, 1), 2.0))
    loss.sum().backward()
    assert new.grad is not None
    assert 0.9 <= new.grad.abs().item() / 2 <= 20.0
    assert loss.abs().item() / 2 <= 200.0
    if kind == "k3":
        assert loss.item() / 2 <= 20.0
        assert new.grad.sign().item() == (-1.0 if gap > 0 else 1.0)


def test_the_ratio_is_truncated_and_goes_on_from_where_the_weight_led() -> None:
    new, origin = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, -0.5])
    weight = penalty_weight(new, origin, torch.tensor([0.5, 1.0, 2.0]), torch.ones(3), cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([0.5, 2.0, 2.0 * math.exp(-0.5)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -1e6])
def test_a_token_without_weight_has_no_kl_whatever_stands_there(kind, junk: float) -> None:
    new = torch.tensor([[-1.0, junk, -20.0, junk]], requires_grad=True)
    origin = torch.tensor([[-1.0, -1.0, -2.0, math.nan]])
    weight = penalty_weight(
        new, origin, torch.tensor([[1.0, 1.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1, 1]]), cap=2.0
    )
    assert weight[0, 0] == 1.0 and weight[0, 1:].tolist() == [0.0, 0.0, 0.0]
    loss = kl_penalty(kind, new, torch.tensor([[-2.0, junk, -2.0, junk]]), weight)
    loss.sum().backward()
    assert loss[0, 0] != 0 and loss[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert new.grad is not None and torch.isfinite(new.grad).all()
    assert new.grad[0, 0] != 0 and not new.grad[0, 1:].any()


def test_the_coefficient_follows_the_relative_error_within_a_fifth() -> None:
    fixed = KlController(ObjectiveSpec(kl_coef=0.5, kl_in="reward"))
    fixed.follow(9.0, 64)
    assert fixed.value == 0.5
    adaptive = KlController(
        ObjectiveSpec(kl_coef=0.5, kl_in="reward", kl_target=2.0, kl_horizon=100)
    )
    for kl, answers, factor in ((2.2, 50, 1.05), (9.0, 50, 1.1), (0.0, 20, 0.96), (9.0, 999, 1.2)):
        before = adaptive.value
        adaptive.follow(kl, answers)
        assert adaptive.value / before == pytest.approx(factor)
