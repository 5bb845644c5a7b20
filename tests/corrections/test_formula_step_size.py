"""VCPO: the effective sample size over sequences, and how it shortens a step."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
import torch
from bandit import Bandit
from correction_helpers import mismatched_step, on_ranks, pipeline_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal

from rlcore.corrections.functional import InvalidArgument
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.vcpo import (
    sequence_ess,
    sequence_ess_accumulate,
    sequence_ess_largest,
    vcpo_scale,
)


def ess_of(weights: list[float]) -> float:
    """Of sequences of one token with these ratios."""
    logs = torch.tensor([[w] for w in weights], dtype=torch.float64).log()
    return ess(logs, torch.ones_like(logs))


def ess(logs: torch.Tensor, mask: torch.Tensor, parts: int = 1) -> float:
    """Of sequences whose tokens have these log ratios [B, T], in micro-batches."""
    cut = zip(*(x.tensor_split(parts) for x in (logs, torch.zeros_like(logs), mask)))
    tokens = list(cut)
    largest = torch.stack([sequence_ess_largest(*part) for part in tokens]).max()
    statistics = [sequence_ess_accumulate(*part, largest=largest) for part in tokens]
    return sequence_ess(torch.stack(statistics).sum(0))


def exact(sums: list[float]) -> float:
    """(sum w)^2 / (n sum w^2) in decimal arithmetic of any exponent."""
    w = [Decimal(s).exp() for s in sums]
    return float(sum(w) ** 2 / len(w) / sum(x * x for x in w))


@settings(max_examples=50, deadline=None)
@given(
    sums=st.lists(st.floats(-2000, -10), min_size=2, max_size=12),
    shift=st.floats(-500, 3000),
    parts=st.integers(1, 3),
)
def test_the_ess_of_long_answers_is_exact(sums: list[float], shift: float, parts: int) -> None:
    logs = torch.tensor([[s + shift] for s in sums], dtype=torch.float64)
    found = ess(logs, torch.ones_like(logs), parts)
    assert found == pytest.approx(exact([row[0] for row in logs.tolist()]), rel=1e-9)


def test_answers_of_eight_thousand_tokens_have_one_effective_sample() -> None:
    """64 answers of 8,000 tokens, -0.005 +- 0.1 a token: the quantiles of their sums."""
    quantiles = Normal(-40.0, 0.1 * 8000**0.5).icdf((torch.arange(64).double() + 0.5) / 64)
    logs = (quantiles / 8000)[:, None].expand(64, 8000)
    found = ess(logs, torch.ones_like(logs))
    assert found == pytest.approx(exact(quantiles.tolist()), rel=1e-9)
    assert round(found, 3) == 0.016 and round(vcpo_scale(found), 3) == 0.128


def test_an_impossible_sequence_counts_with_weight_0() -> None:
    logs = torch.tensor([[-30.0, -math.inf], [-40.0, -1.0], [-41.0, 0.0]])
    assert ess(logs, torch.ones(3, 2)) == pytest.approx(2 / 3)
    assert ess(logs[:1], torch.ones(1, 2)) == 0.0
    assert ess(logs, torch.zeros(3, 2)) == 1.0


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), factor=st.floats(0.1, 10))
def test_the_ess_lies_between_one_sample_and_all_and_ignores_a_common_factor(
    weights: list[float], factor: float
) -> None:
    found, n = ess_of(weights), len(weights)
    assert found == pytest.approx(sum(weights) ** 2 / n / sum(w * w for w in weights))
    assert 1 / n - 1e-9 <= found <= 1 + 1e-9
    assert ess_of([factor * w for w in weights]) == pytest.approx(found)


def test_equal_ratios_are_all_effective_and_one_large_one_is_alone() -> None:
    assert ess_of([2.0] * 5) == pytest.approx(1.0)
    assert ess_of([1e6, 1e-6, 1e-6, 1e-6]) == pytest.approx(0.25)


def test_a_sequence_s_weight_is_the_product_of_its_tokens_and_may_be_capped() -> None:
    logs = torch.tensor([[2.0, 3.0, 7.0], [0.5, 9.0, 9.0], [1.0, 1.0, 1.0], [9.0, 9.0, 9.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    tokens = (logs, torch.zeros(4, 3), mask)
    assert sequence_ess_largest(*tokens).exp().item() == pytest.approx(6.0)
    assert sequence_ess_largest(*tokens, cap=2.0).exp().item() == pytest.approx(2.0)
    found = sequence_ess_accumulate(*tokens, largest=torch.tensor(0.0))
    assert found.tolist() == pytest.approx([7.5, 36 + 0.25 + 1, 3])
    capped = sequence_ess_accumulate(*tokens, largest=torch.tensor(0.0), cap=2.0)
    assert capped.tolist() == pytest.approx([3.5, 4 + 0.25 + 1, 3])
    with pytest.raises(InvalidArgument, match="cap="):
        sequence_ess_largest(*tokens, cap=0.5)


def test_the_rules_and_the_base() -> None:
    assert vcpo_scale(0.25) == 0.5 and vcpo_scale(0.25, rule="linear") == 0.25
    assert vcpo_scale(0.25, base=0.5) == pytest.approx(math.sqrt(0.5))
    assert vcpo_scale(0.9, base=0.5) == 1.0
    with pytest.raises(InvalidArgument, match="base="):
        vcpo_scale(0.5, base=0.0)


@pytest.mark.parametrize("target", ["ref", "new"])
def test_on_the_bandit_it_is_the_ratio_s_own_moments(target: str) -> None:
    b = Bandit()
    towards = b.new if target == "new" else b.ref
    p = b.inf[0, :, None] * b.inf[1:]
    w = (towards[0, :, None] * towards[1:]) / p
    expected = ((p * w).sum() ** 2 / (p * w * w).sum()).item()
    found = b.correct(pipeline_of({"vcpo": {"target": target}, "tis": {}}))
    plain = b.correct(pipeline_of({"tis": {}}))
    assert found.metrics["correction/vcpo/ess"] == pytest.approx(expected)
    assert found.step_scale == pytest.approx(expected**0.5) and plain.step_scale == 1.0
    assert torch.equal(found.weight, plain.weight) and torch.equal(found.mask, plain.mask)


def test_every_rank_takes_the_same_factor_and_scales_multiply() -> None:
    step = mismatched_step(noise=0.5)
    # long answers: every sequence's ratio is far below e^-20
    step.logp_new = step.logp_new - 10.0
    pipeline = pipeline_of({"vcpo": {"rule": "linear"}, "veto": {}})
    whole = pipeline.correct(step, ONE_RANK)
    shares: list[Any] = [slice(0, 3), slice(3, 8)]
    parts = on_ranks(lambda r, reduce: pipeline.correct(step.rows(shares[r]), reduce), 2)
    assert parts[0].step_scale == parts[1].step_scale == pytest.approx(whole.step_scale)
    assert 0 < whole.step_scale < 1
    stages = [*pipeline.stages[:1], *pipeline.stages]
    pipeline.stages = stages
    assert pipeline.correct(step, ONE_RANK).step_scale == pytest.approx(whole.step_scale**2)
