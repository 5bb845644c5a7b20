"""Reverse KL of sparse to dense: values and gradients."""

from __future__ import annotations

import pytest
import torch

from rlcore.objectives.kl import distill_sampled, distill_topk

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
        found.append(
            distill_topk(
                logp[at][None, None], logq[at][None, None], ids[None, None], torch.ones(1, 1)
            ).sum()
        )
    values = torch.stack(found).detach()
    assert bool((values >= -1e-6).all()) and bool((values.diff() >= -1e-5).all())
    torch.testing.assert_close(values[-1], value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found[-1], sparse)[0], grad, atol=1e-5, rtol=1e-4
    )


def test_equal_policies_have_no_kl_and_no_gradient():
    sparse, _ = policies()
    logp = sparse.log_softmax(-1)
    ids = torch.arange(V)[None, None]
    terms = [
        distill_sampled("k1", logp[None], logp.detach()[None], torch.ones(1, V)),
        distill_sampled("k3", logp[None], logp.detach()[None], torch.ones(1, V)),
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
        distill_sampled(
            "k3", bad, torch.full((1, 3), -2.0), mask, torch.tensor([[1.0, float("nan"), 1.0]])
        ),
        distill_topk(bad[..., None], torch.full((1, 3, 1), -2.0), ids, mask),
    ):
        assert kl[0, 0] != 0 and kl[0, 1:].tolist() == [0.0, 0.0]
        (grad,) = torch.autograd.grad(kl.sum(), bad)
        assert torch.isfinite(grad).all() and grad[0, 0] != 0 and grad[0, 1:].tolist() == [0.0, 0.0]
