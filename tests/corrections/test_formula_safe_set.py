"""DVP's constrained log-probs: against enumeration, and its facts (no gradient outside, the noise
bound)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlcore.corrections import dvp
from rlcore.corrections.functional import safe_set_logprobs
from rlcore.errors import UserError

SEEDS = st.integers(0, 10_000)


def logits_of(seed: int, v: int = 25, scale: float = 4.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(3, v, generator=g, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, rho=st.sampled_from([math.exp(-13), 1e-3, 0.1, 1.0]))
def test_constrained_probabilities_renormalise_over_the_set(seed: int, rho: float) -> None:
    z = logits_of(seed)
    p = z.softmax(-1)
    safe = p >= rho * p.amax(-1, keepdim=True) * (1 - 1e-12)
    ids = torch.arange(25)[:, None].expand(25, 3)
    logp, inside, coverage = safe_set_logprobs(z.expand(25, 3, 25), ids, rho=rho)
    assert torch.equal(inside, safe.T)
    torch.testing.assert_close(logp.T[safe], (p / (p * safe).sum(-1, keepdim=True)).log()[safe])
    torch.testing.assert_close(coverage, (p * safe).sum(-1).expand(25, 3))
    torch.testing.assert_close(
        logp.exp().sum(0), torch.ones(3, dtype=torch.float64)
    )  # outside: exactly nothing


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, fill=st.sampled_from([-1e4, -1e9, -1e30, -3e38]))
def test_the_fill_value_changes_no_output_and_no_gradient(seed: int, fill: float) -> None:
    def outputs() -> list[torch.Tensor]:
        z = logits_of(seed).float().requires_grad_()
        logp, inside, coverage = safe_set_logprobs(z, torch.tensor([0, 1, 2]), rho=0.05)
        (logp * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
        assert z.grad is not None
        return [logp.detach(), inside, coverage, z.grad]

    usual = outputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dvp, "FILL", fill)
        for a, b in zip(usual, outputs()):
            assert torch.equal(a, b)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_gradient_is_exactly_zero_outside_the_set_and_right_inside(seed: int) -> None:
    z = logits_of(seed).requires_grad_()
    ids = z.argmax(-1)
    logp, _, _ = safe_set_logprobs(z, ids, rho=0.1)
    logp.sum().backward()
    safe = z >= z.amax(-1, keepdim=True) + math.log(0.1)
    assert z.grad is not None and torch.equal(z.grad[~safe], torch.zeros_like(z.grad[~safe]))
    constrained = torch.where(safe, z.detach(), -torch.inf).softmax(-1)
    expected = torch.nn.functional.one_hot(ids, z.shape[-1]) - constrained
    torch.testing.assert_close(z.grad[safe], expected[safe])


def test_a_token_outside_the_set_has_no_gradient_at_all() -> None:
    z = torch.tensor([[0.0, -1.0, -13.5]], requires_grad=True)
    logp, inside, coverage = safe_set_logprobs(z, torch.tensor([2]))
    logp.sum().backward()
    assert not inside.any() and torch.isfinite(logp).all() and logp.exp().item() == 0.0
    assert z.grad is not None and not z.grad.any()
    assert coverage.item() < 1.0 and not coverage.requires_grad


def test_everything_inside_is_the_plain_log_softmax() -> None:
    z = torch.randn(5, 7, 30)
    ids = torch.randint(0, 30, (5, 7))
    logp, inside, coverage = safe_set_logprobs(z, ids)
    torch.testing.assert_close(logp, z.log_softmax(-1).gather(-1, ids[..., None])[..., 0])
    assert inside.all() and torch.equal(coverage, torch.ones(5, 7))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, eps=st.sampled_from([1e-4, 1e-2, 0.3]), adversarial=st.booleans())
def test_bounded_logit_noise_moves_log_probs_by_at_most_its_bound(
    seed: int, eps: float, adversarial: bool
) -> None:
    """|dlogp| <= 2 eps (1 - p) to first order; 1 - p itself moves by at most a factor exp(2 eps) on
    the way."""
    z, rho = logits_of(seed), 0.02
    edge = z - z.amax(-1, keepdim=True) - math.log(rho)
    assume((edge.abs() > 2 * eps).all())  # noise that moves no token across the set's edge
    g = torch.Generator().manual_seed(seed + 1)
    noise = eps * (2 * torch.rand(z.shape, generator=g, dtype=torch.float64) - 1)
    ids = z.topk(2, -1).indices[:, 1]
    if adversarial:
        noise = torch.full_like(z, -eps).scatter(-1, ids[:, None], eps)
    logp, inside, _ = safe_set_logprobs(z, ids, rho=rho)
    noisy, still, _ = safe_set_logprobs(z + noise, ids, rho=rho)
    assume(inside.all())
    assert still.all()
    bound = 2 * eps * (1 - logp.exp())
    assert ((noisy - logp).abs() <= bound * math.exp(2 * eps) + 1e-12).all()
    if adversarial and eps < 1e-3:
        assert ((noisy - logp).abs() >= 0.99 * bound - 1e-12).all()  # the bound is attained


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_extreme_logits(dtype: torch.dtype) -> None:
    z = torch.tensor(
        [[6e4, -6e4, 0.0, -math.inf], [-5e4, -5e4, -6e4, -math.inf]],
        dtype=dtype,
        requires_grad=True,
    )
    logp, inside, coverage = safe_set_logprobs(z, torch.tensor([0, 1]))
    logp.sum().backward()
    assert inside.all() and logp.dtype == torch.float32 and torch.isfinite(coverage).all()
    torch.testing.assert_close(logp, torch.tensor([0.0, math.log(0.5)]))
    assert z.grad is not None and torch.isfinite(z.grad).all()


def test_rho_outside_its_range_is_refused() -> None:
    for rho in (0.0, -1.0, 1.5):
        with pytest.raises(UserError, match="rho="):
            safe_set_logprobs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), rho=rho)
