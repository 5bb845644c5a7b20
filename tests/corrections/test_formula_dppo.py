"""DPPO's trust region: the divergences, the printed mask, and the gradient that it leaves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bandit import Bandit
from correction_helpers import mismatched_step, pipeline_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.dppo import binary_divergence
from rlcore.corrections.functional import InvalidArgument, dppo
from rlcore.corrections.numerics import ONE_RANK
from rlcore.objectives.specs import ObjectiveSpec

WIDE = 1e9


def written_out(kind: str, p: float, q: float) -> float:
    """Between (q, 1 - q), which was sampled from, and (p, 1 - p)."""
    if kind == "tv":
        return (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@settings(max_examples=60, deadline=None)
@given(p=st.floats(1e-6, 1 - 1e-6), q=st.floats(1e-6, 1 - 1e-6), kind=st.sampled_from(["tv", "kl"]))
def test_the_binary_divergence_is_that_of_two_outcomes(p: float, q: float, kind: Any) -> None:
    logs = [torch.tensor([[math.log(x)]], dtype=torch.float64) for x in (p, q)]
    found = binary_divergence(kind, *logs).item()
    assert found == pytest.approx(written_out(kind, p, q), rel=1e-6, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["tv", "kl"]))
def test_it_never_exceeds_the_divergence_over_the_vocabulary(seed: int, kind: Any) -> None:
    g = torch.Generator().manual_seed(seed)
    new, inf = (2 * torch.randn(9, generator=g, dtype=torch.float64) for _ in range(2))
    new, inf = new.log_softmax(0), inf.log_softmax(0)
    whole = {
        "tv": (new.exp() - inf.exp()).abs().sum() / 2,
        "kl": (inf.exp() * (inf - new)).sum(),
    }[kind]
    assert (binary_divergence(kind, new, inf) <= whole + 1e-12).all()


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_only_an_update_that_leads_further_out_is_masked(kind: Any) -> None:
    inf = torch.tensor([[0.2, 0.2, 0.6, 0.6, 0.2, 1e-5]]).double()
    new = torch.tensor([[0.5, 0.5, 0.3, 0.3, 0.21, 1e-3]]).double()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, 1.0]]).double()
    bounds = {"low": 0.1, "high": 0.1, "cap": 2.0}
    found = dppo(new.log(), inf.log(), advantages, torch.ones(1, 6), divergence=kind, **bounds)
    # the last token's ratio is 100, and its divergence small: the cap holds it, the region does not
    expected = torch.tensor([[0.0, 2.0, 0.5, 0.0, 1.05, 2.0]]).double()
    torch.testing.assert_close(found, expected)


def test_each_side_has_its_own_bound_and_junk_weighs_nothing() -> None:
    inf, new = torch.tensor([[0.3, 0.6]]).log(), torch.tensor([[0.5, 0.4]]).log()
    adv = torch.tensor([[1.0, -1.0]])
    for low, high, zero in ((0.1, 0.3, [False, True]), (0.3, 0.1, [True, False])):
        weight = dppo(new, inf, adv, torch.ones(1, 2), low=low, high=high)
        assert (weight == 0).tolist() == [zero]
    junk = torch.tensor([[math.nan, -math.inf]])
    assert dppo(junk, inf, adv, torch.ones(1, 2))[0, 0] == 0
    assert dppo(junk, inf, adv, torch.ones(1, 2))[0, 1] == 0
    assert dppo(junk, inf, adv, torch.zeros(1, 2)).tolist() == [[1.0, 1.0]]
    for argument, value in (("low", -1.0), ("high", -1.0), ("cap", 0.5), ("divergence", "js")):
        with pytest.raises(InvalidArgument, match=argument):
            dppo(new, inf, adv, torch.ones(1, 2), **{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_gradient_is_that_of_the_tokens_inside(kind: Any) -> None:
    """Over all sequences, written out: prefix and rest from p_inf, the token from p_new, masked
    tokens left out."""
    b, bound = Bandit(), 0.1
    logp = b.logits.log_softmax(-1)
    total, masked = torch.zeros((), dtype=torch.float64), 0
    for first in range(3):
        for second in range(3):
            p = b.inf[0, first] * b.inf[1 + first, second]
            for at in ((0, first), (1 + first, second)):
                new, inf, a = b.new[at].item(), b.inf[at].item(), b.reward[first, second].item()
                if written_out(kind, new, inf) > bound and (new - inf) * a > 0:
                    masked += 1
                    continue
                total = total + p * a * (new / inf) * logp[at] / 2
    assert masked > 0
    expected = torch.autograd.grad(total, b.logits)[0]
    chosen = {"dppo": {"divergence": kind, "low": bound, "high": bound, "cap": WIDE}}
    pipeline = pipeline_of(chosen, loss="reinforce")
    found = b.descent(pipeline, ObjectiveSpec(loss="reinforce"))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    whole = {"dppo": {"low": 1e3, "high": 1e3, "cap": WIDE}}
    found = b.descent(pipeline_of(whole, loss="reinforce"), ObjectiveSpec(loss="reinforce"))
    torch.testing.assert_close(found, b.reference(b.inf, b.new, b.inf), atol=1e-9, rtol=1e-9)


def test_what_is_reported_and_asked_for() -> None:
    step = mismatched_step(noise=1.0)
    pipeline = pipeline_of({"dppo": {"cap": 1.5, "low": 0.05, "high": 0.05}}, loss="reinforce")
    assert pipeline.needs.new and pipeline.sequence_wise
    found = pipeline.correct(step, ONE_RANK)
    zero = (found.weight == 0)[step.mask].double().mean().item()
    shares = [found.metrics[f"correction/dppo/masked_{side}_share"] for side in ("high", "low")]
    assert sum(shares) == pytest.approx(zero) and min(shares) > 0
    assert found.metrics["correction/dppo/truncated_share"] > 0
    assert found.weight.max() <= 1.5
