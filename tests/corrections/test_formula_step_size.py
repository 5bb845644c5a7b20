"""VCPO: the effective sample size over sequences, and how it shortens a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bandit import Bandit
from correction_helpers import mismatched_step, on_ranks, pipeline_of, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.functional import InvalidArgument
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.vcpo import sequence_ess, sequence_ess_accumulate, vcpo_scale


def ess_of(weights: list[float]) -> float:
    """Of sequences of one token with these ratios."""
    logs = torch.tensor([[w] for w in weights], dtype=torch.float64).log()
    return sequence_ess(
        sequence_ess_accumulate(logs, torch.zeros_like(logs), torch.ones_like(logs))
    )


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
    assert sequence_ess(torch.zeros(3)) == 1.0


def test_a_sequence_s_weight_is_the_product_of_its_tokens_and_may_be_capped() -> None:
    logs = torch.tensor([[2.0, 3.0, 7.0], [0.5, 9.0, 9.0], [1.0, 1.0, 1.0], [9.0, 9.0, 9.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    found = sequence_ess_accumulate(logs, torch.zeros(4, 3), mask)
    assert found.tolist() == pytest.approx([7.5, 36 + 0.25 + 1, 3])
    capped = sequence_ess_accumulate(logs, torch.zeros(4, 3), mask, cap=2.0)
    assert capped.tolist() == pytest.approx([3.5, 4 + 0.25 + 1, 3])
    with pytest.raises(InvalidArgument, match="cap="):
        sequence_ess_accumulate(logs, torch.zeros(4, 3), mask, cap=0.5)


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
    pipeline = pipeline_of({"vcpo": {"rule": "linear"}, "veto": {}})
    whole = pipeline.correct(step, ONE_RANK)
    shares: list[Any] = [slice(0, 3), slice(3, 8)]
    parts = on_ranks(lambda r, reduce: pipeline.correct(rows(step, shares[r]), reduce), 2)
    assert parts[0].step_scale == parts[1].step_scale == pytest.approx(whole.step_scale)
    assert 0 < whole.step_scale < 1
    stages = [*pipeline.stages[:1], *pipeline.stages]
    pipeline.stages = stages
    assert pipeline.correct(step, ONE_RANK).step_scale == pytest.approx(whole.step_scale**2)
