"""Distances to a teacher against float64 references: values, gradients, tails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.objectives.distillation import divergence, rest_mass, sampled_rest, topk_divergence
from rlcore.objectives.specs import TeacherSpec

V = 9
F = torch.float64
KINDS = ("reverse", "forward", "js")


def spec(**settings) -> TeacherSpec:
    return TeacherSpec(**{"kind": "frozen", "path": "x", "js_weight": 0.3} | settings)


def policies(rows: int = 4, dtype: torch.dtype = F) -> tuple[Tensor, Tensor]:
    """Logits of the policy [rows, V], with a gradient, and log-probs of the teacher."""
    gen = torch.Generator().manual_seed(5)
    policy, teacher = torch.randn(2, rows, V, generator=gen, dtype=F).mul(2.0).to(dtype)
    return policy.clone().requires_grad_(), teacher.log_softmax(-1)


def written_out(p: np.ndarray, q: np.ndarray, kind: str, w: float) -> np.ndarray:
    """In NumPy, from probabilities."""

    def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a * np.log(a / b)).sum(-1)

    m = w * q + (1 - w) * p
    return {
        "reverse": kl(p, q),
        "forward": kl(q, p),
        "js": w * kl(q, m) + (1 - w) * kl(p, m),
    }[kind]


def top(teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs, with two places that are empty."""
    values, ids = teacher.topk(k, -1)
    pad = ids.new_full((len(ids), 2), -1)
    return torch.cat([ids, pad], -1), torch.cat([values, values.new_full(pad.shape, -torch.inf)], 1)


def slope_of(value: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(value, z, retain_graph=True)[0]


def at(logp: Tensor, ids: Tensor) -> Tensor:
    return logp.gather(-1, ids.clamp(min=0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "close"), [(F, 1e-12), (torch.float32, 2e-6)])
def test_the_distance_is_the_written_out_one(kind, dtype, close) -> None:
    z, teacher = policies(dtype=dtype)
    found = divergence(z.log_softmax(-1), teacher, spec(divergence=kind))
    p, q = (x.detach().double().softmax(-1).numpy() for x in (z, teacher))
    np.testing.assert_allclose(found.detach(), written_out(p, q, kind, 0.3), atol=close, rtol=close)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["bucket", "drop"])
def test_a_tail_is_the_distance_of_what_it_makes_of_both(kind, tail) -> None:
    z, teacher = policies()
    ids, logp = top(teacher, 3)
    found = topk_divergence(at(z.log_softmax(-1), ids), logp, ids, spec(divergence=kind, tail=tail))

    def coarse(x: Tensor) -> np.ndarray:
        held = x.detach().softmax(-1).gather(-1, ids[:, :3]).numpy()
        if tail == "drop":
            return held / held.sum(-1, keepdims=True)
        return np.concatenate([held, 1 - held.sum(-1, keepdims=True)], -1)

    expected = written_out(coarse(z), coarse(teacher), kind, 0.3)
    np.testing.assert_allclose(found.detach(), expected, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_is_a_bound_that_closes_with_the_vocabulary(kind) -> None:
    z, teacher = policies()
    whole = divergence(z.log_softmax(-1), teacher, spec(divergence=kind))
    slope = slope_of(whole.sum(), z)
    before = torch.zeros_like(whole)
    for k in range(1, V + 1):
        ids, logp = top(teacher, k)
        found = topk_divergence(at(z.log_softmax(-1), ids), logp, ids, spec(divergence=kind))
        assert bool((found >= before - 1e-9).all() and (found <= whole + 1e-9).all())
        before = found.detach()
    torch.testing.assert_close(found, whole, atol=1e-9, rtol=0)
    torch.testing.assert_close(slope_of(found.sum(), z), slope, atol=1e-5, rtol=0)
    for tail in ("drop", "sampled"):
        if tail == "drop" or kind == "reverse":
            same = topk_divergence(
                at(z.log_softmax(-1), ids), logp, ids, spec(divergence=kind, tail=tail)
            )
            torch.testing.assert_close(same, whole, atol=1e-12, rtol=0)
            torch.testing.assert_close(slope_of(same.sum(), z), slope)


@pytest.mark.parametrize("k", [0, 1, 3, V - 1])
def test_a_sampled_tail_has_the_value_and_gradient_of_the_whole_reverse_kl(k) -> None:
    """The mean over all tokens of a sampler that is neither policy, with the whole ratio."""
    z, teacher = policies(1)
    older = torch.linspace(-1, 1, V, dtype=F).log_softmax(-1)
    logp = z.log_softmax(-1)
    whole = divergence(logp, teacher, spec())
    values, ids = teacher.topk(k, -1)
    exact = topk_divergence(at(logp, ids), values, ids, spec(tail="sampled"))
    listed = (ids == torch.arange(V)[:, None]).any(-1)[None]
    weight = (logp.detach() - older).exp()
    # `distill_sampled` is in float32
    rest = (older.exp() * sampled_rest(logp, teacher, listed, weight)).sum(-1)
    torch.testing.assert_close((exact + rest).detach(), whole.detach(), atol=2e-6, rtol=1e-6)
    found = slope_of((exact + rest).sum(), z)
    expected = slope_of(whole.sum(), z)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)
    if k < V - 1:  # and without the ratio it is another one
        plain = (older.exp() * sampled_rest(logp, teacher, listed, torch.ones(1, V))).sum()
        other = topk_divergence(at(logp, ids), values, ids, spec(tail="sampled")).sum() + plain
        assert (slope_of(other, z) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["bucket", "drop"])
def test_a_policy_that_is_its_teacher_has_neither_distance_nor_slope(kind, tail) -> None:
    z, _ = policies()
    teacher = z.detach().log_softmax(-1)
    ids, logp = top(teacher, 4)
    found = topk_divergence(at(z.log_softmax(-1), ids), logp, ids, spec(divergence=kind, tail=tail))
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-12, rtol=0)
    slope = slope_of(found.sum(), z)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["bucket", "drop"])
def test_a_state_without_a_teachers_token_adds_nothing(kind, tail) -> None:
    z, _ = policies(2)
    ids = torch.full((2, 3), -1)
    given = torch.full((2, 3), -torch.inf, dtype=F)
    found = topk_divergence(
        at(z.log_softmax(-1), ids), given, ids, spec(divergence=kind, tail=tail)
    )
    assert not found.any()
    assert not slope_of(found.sum(), z).any()


def test_the_rest_is_what_the_teacher_has_elsewhere() -> None:
    _, teacher = policies()
    ids, logp = top(teacher, 3)
    torch.testing.assert_close(rest_mass(logp, ids), 1 - teacher.exp().topk(3, -1).values.sum(-1))
