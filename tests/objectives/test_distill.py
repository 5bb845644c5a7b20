"""Reverse KL of sparse to dense: values, gradients, and the rollout cost model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import UserError
from rlcore.objectives.distill import distill_full, distill_sampled, distill_topk
from rlcore.objectives.rollout_cost import RolloutShape

V = 7


def policies(scale: float = 1.0):
    gen = torch.Generator().manual_seed(2)
    sparse = (scale * torch.randn(V, generator=gen)).requires_grad_()
    return sparse, scale * torch.randn(V, generator=gen)


def exact(sparse, dense):
    """The KL and its gradient, by autograd over the whole vocabulary."""
    p, q = sparse.log_softmax(-1), dense.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum()
    return kl.detach(), torch.autograd.grad(kl, sparse)[0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_sampled_kl_has_the_value_and_gradient_of_the_reverse_kl(kind):
    sparse, dense = policies()
    logp = sparse.log_softmax(-1)
    each = distill_sampled(kind, logp[None], dense.log_softmax(-1)[None], torch.ones(1, V))
    mean = (logp.exp().detach() * each[0]).sum()  # every token as often as the actor draws it
    value, grad = exact(sparse, dense)
    torch.testing.assert_close(mean.detach(), value)
    torch.testing.assert_close(torch.autograd.grad(mean, sparse)[0], grad)


def test_weight_corrects_for_an_older_sampler():
    sparse, dense = policies()
    logp, older = sparse.log_softmax(-1), torch.linspace(-1, 1, V).log_softmax(-1)
    weight = (logp.detach() - older).exp()[None]
    each = distill_sampled("k1", logp[None], dense.log_softmax(-1)[None], torch.ones(1, V), weight)
    mean = (older.exp() * each[0]).sum()
    torch.testing.assert_close(torch.autograd.grad(mean, sparse)[0], exact(sparse, dense)[1])


def test_full_is_exact_and_dense_gets_no_gradient():
    sparse, dense = policies()
    dense.requires_grad_()
    value, grad = exact(sparse, dense)
    kl = distill_full(sparse[None], dense[None], torch.ones(1))
    torch.testing.assert_close(kl[0].detach(), value)
    kl.sum().backward()
    torch.testing.assert_close(sparse.grad, grad)
    assert dense.grad is None


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_topk_is_a_bound_that_closes_with_the_vocabulary(scale):
    sparse, dense = policies(scale)
    value, grad = exact(sparse, dense)
    logp, logq = sparse.log_softmax(-1), dense.log_softmax(-1)
    order = logp.argsort(descending=True)
    found = []
    for k in range(1, V + 1):
        ids = torch.cat([order[:k], torch.tensor([-1, -1])])  # padded as an engine that had fewer
        at = ids.clamp(min=0)
        found.append(distill_topk(logp[at][None, None], logq[at][None, None], ids[None, None], torch.ones(1, 1)).sum())
    values = torch.stack(found).detach()
    assert bool((values >= -1e-6).all()) and bool((values.diff() >= -1e-5).all())
    torch.testing.assert_close(values[-1], value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(found[-1], sparse)[0], grad, atol=1e-5, rtol=1e-4)


def test_equal_policies_have_no_kl_and_no_gradient():
    sparse, _ = policies()
    logp = sparse.log_softmax(-1)
    ids = torch.arange(V)[None, None]
    terms = [
        distill_sampled("k1", logp[None], logp.detach()[None], torch.ones(1, V)),
        distill_sampled("k3", logp[None], logp.detach()[None], torch.ones(1, V)),
        distill_full(sparse[None], sparse.detach()[None], torch.ones(1)),
        distill_topk(logp[None, None], logp.detach()[None, None], ids, torch.ones(1, 1)),
    ]
    for kl in terms:
        assert float(kl.detach().abs().max()) < 1e-6
        (grad,) = torch.autograd.grad(kl.sum(), sparse, retain_graph=True)
        assert float(grad.abs().max()) < 1e-6


def test_masked_positions_add_nothing_whatever_they_hold():
    mask = torch.tensor([[1, 0, 0]])
    bad = torch.tensor([[-1.0, float("-inf"), float("nan")]], requires_grad=True)
    ids = torch.zeros(1, 3, 1, dtype=torch.long)
    for kl in (
        distill_sampled("k3", bad, torch.full((1, 3), -2.0), mask, torch.tensor([[1.0, float("nan"), 1.0]])),
        distill_topk(bad[..., None], torch.full((1, 3, 1), -2.0), ids, mask),
    ):
        assert kl[0, 0] != 0 and kl[0, 1:].tolist() == [0.0, 0.0]
        (grad,) = torch.autograd.grad(kl.sum(), bad)
        assert torch.isfinite(grad).all() and grad[0, 0] != 0 and grad[0, 1:].tolist() == [0.0, 0.0]


def test_unknown_estimator_is_named():
    with pytest.raises(UserError, match="k2"):
        distill_sampled("k2", torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))


SHAPES = st.builds(
    RolloutShape,
    parameters=st.just(1e3),
    prompts=st.integers(1, 4),
    samples=st.integers(1, 8),
    kv_dim=st.sampled_from([8, 64]),
    prompt_len=st.integers(0, 40),
    response_len=st.integers(1, 60),
    group=st.sampled_from([1.0, 2.0]),
)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.integers(1, 120))
def test_cost_counts_the_tokens_read(shape, budget):
    # step t reads t earlier response tokens and the prompt, keys and values; + 1 is the appendix's half step
    dense_steps = max(0, min(shape.response_len, budget - shape.prompt_len))
    read = [2 * (shape.prompt_len + t) + 1 if t < dense_steps else 2 * budget for t in range(shape.response_len)]
    assert shape.attended(budget) == sum(read)
    assert shape.attended() == sum(2 * (shape.prompt_len + t) + 1 for t in range(shape.response_len))
    sequences = shape.prompts * shape.samples
    assert shape.memory(budget) == 2e3 * shape.response_len + sequences * shape.kv_dim * sum(read)
    assert shape.compute(budget) == sequences * (2e3 * shape.response_len + shape.group * shape.kv_dim * sum(read))
    if budget >= shape.prompt_len + shape.response_len:
        assert shape.speedup(budget) == 1.0


def test_gain_grows_with_length_and_ends_at_the_weights():
    at = [RolloutShape(1.7e9, 32, 8, 28 * 8 * 128, 512, n, 2).speedup(1024) for n in (512, 4096, 16384, 65536)]
    assert at[0] == 1.0 and at == sorted(at) and at[2] > 4
    few = RolloutShape(1.7e9, 1, 1, 28 * 8 * 128, 512, 16384, 2)
    assert few.speedup(1024) < 1.2
