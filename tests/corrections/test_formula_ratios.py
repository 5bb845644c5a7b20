"""TIS, MIS, veto: the formulas, and what they do with masked, broken and extreme tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.functional import mis, tis, veto
from rlcore.errors import UserError

NAN, INF = math.nan, math.inf
ON = torch.ones(1, 3, dtype=torch.bool)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def test_tis_truncates_the_token_ratio() -> None:
    target, inf = row(0.2, 0.5, 0.9).log(), row(0.4, 0.5, 0.3).log()
    torch.testing.assert_close(tis(target, inf, ON, cap=2.0), row(0.5, 1.0, 2.0))


def test_tis_sequence_truncates_the_product_of_the_unmasked_tokens() -> None:
    target, inf = row(-1.0, -2.0, -3.0), row(-1.5, -1.75, -99.0)
    weight = tis(target, inf, torch.tensor([[1, 1, 0]]), cap=2.0, level="sequence")
    torch.testing.assert_close(weight, row(math.exp(0.25), math.exp(0.25), 1.0))
    assert torch.equal(tis(target, row(-9, -9, -9), ON, cap=2.0, level="sequence"), row(2, 2, 2))


def test_a_long_sequence_product_is_taken_in_logs() -> None:
    up = torch.full((1, 4096), 0.01)
    alternating = torch.tensor([15.0, -15.0]).repeat(2048)[None]
    mask = torch.ones_like(up)
    assert torch.equal(
        tis(up, torch.zeros_like(up), mask, cap=2.0, level="sequence"), torch.full_like(up, 2.0)
    )
    neutral = tis(alternating, torch.zeros_like(up), mask, cap=2.0, level="sequence")
    assert torch.equal(neutral, torch.ones_like(up))


def test_mis_keeps_the_ratio_inside_the_band_ends_included() -> None:
    target = row(0.5, 2.0, 2.1).log()
    weight = mis(target.double(), torch.zeros(1, 3).double(), ON, low=0.5 - 1e-9, high=2.0 + 1e-6)
    torch.testing.assert_close(weight.float(), row(0.5, 2.0, 0.0))
    assert torch.equal(
        mis(torch.zeros(1, 3), torch.zeros(1, 3), ON, low=1.0, high=1.0), row(1, 1, 1)
    )


def test_mis_levels_differ_on_the_same_sequence() -> None:
    target, inf = row(-1.0, -1.0, -1.0), row(-1.4, -1.4, -1.4)  # token ratio e^0.4, product e^1.2
    assert mis(target, inf, ON, low=0.5, high=2.0).gt(1.4).all()
    assert torch.equal(mis(target, inf, ON, low=0.5, high=2.0, level="sequence"), row(0, 0, 0))
    geometric = mis(target, inf, ON, low=0.5, high=2.0, level="geometric")
    torch.testing.assert_close(geometric, torch.full((1, 3), math.exp(0.4)))
    masked = torch.tensor([[1, 0, 1]])  # the mean is over the other two
    geometric = mis(target, inf, masked, low=0.5, high=2.0, level="geometric")
    torch.testing.assert_close(geometric, row(math.exp(0.4), 1.0, math.exp(0.4)))


def test_veto_drops_a_sequence_for_one_impossible_token_and_only_an_unmasked_one() -> None:
    inf = torch.zeros(3, 3)
    target = torch.tensor([[0.0, -9.0, 0.0], [0.0, -9.3, 0.0], [0.0, 0.0, -50.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    assert veto(target, inf, mask).tolist() == [True, False, True]  # log 1e-4 = -9.21


def test_veto_keeps_a_sequence_at_the_threshold_itself() -> None:
    edge = torch.full((2, 1), math.log(0.5), dtype=torch.float64)
    edge[1] = edge[1].nextafter(edge[1] - 1)
    zeros = torch.zeros_like(edge)
    assert veto(edge, zeros, torch.ones(2, 1), threshold=0.5).tolist() == [True, False]


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(UserError, match="level=word"):
        level: Any = "word"
        mis(row(0, 0, 0), row(0, 0, 0), ON, low=0.5, high=2.0, level=level)
    with pytest.raises(UserError, match="level=geometric"):
        tis(row(0, 0, 0), row(0, 0, 0), ON, level="geometric")  # type: ignore[arg-type]


WEIGHTS = [
    lambda a, b, m: tis(a, b, m),
    lambda a, b, m: tis(a, b, m, level="sequence"),
    lambda a, b, m: mis(a, b, m, low=0.5, high=2.0),
    lambda a, b, m: mis(a, b, m, low=0.5, high=2.0, level="sequence"),
    lambda a, b, m: mis(a, b, m, low=0.5, high=2.0, level="geometric"),
]


@pytest.mark.parametrize("weigh", WEIGHTS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), junk=st.sampled_from([NAN, INF, -INF, 1e30, 0.0]))
def test_what_stands_at_masked_positions_changes_nothing(weigh, seed: int, junk: float) -> None:
    g = torch.Generator().manual_seed(seed)
    target, inf = -torch.rand(3, 5, generator=g), -torch.rand(3, 5, generator=g)
    mask = torch.rand(3, 5, generator=g) > 0.4
    clean = weigh(target, inf, mask)
    dirty = weigh(target.where(mask, junk), inf.where(mask, -junk), mask)
    assert torch.equal(clean, dirty)
    assert torch.equal(clean[~mask], torch.ones_like(clean[~mask]))


@pytest.mark.parametrize("weigh", WEIGHTS)
def test_an_unmasked_nan_leaves_the_loss_and_the_other_tokens_keep_theirs(weigh) -> None:
    target, inf = row(-1.0, -1.0, -1.0), row(-1.1, NAN, -1.1)
    weight = weigh(target, inf, ON)
    without = weigh(target, row(-1.1, 0.0, -1.1), torch.tensor([[1, 0, 1]]))
    assert weight[0, 1] == 0
    assert torch.equal(weight[0, ::2], without[0, ::2])
    assert veto(target, inf, ON).all()


@pytest.mark.parametrize("weigh", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_matched_log_probs_weigh_exactly_one_in_every_precision(weigh, dtype: torch.dtype) -> None:
    logp = (-5 * torch.rand(4, 7)).to(dtype)
    weight = weigh(logp, logp.clone(), torch.rand(4, 7) > 0.3)
    assert torch.equal(weight, torch.ones_like(weight))
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("weigh", WEIGHTS)
@pytest.mark.parametrize("target", [-INF, -1e4, 1e4, INF, 0.0])
@pytest.mark.parametrize("inf", [-INF, -1e4, 0.0])
def test_extreme_log_probs_give_finite_weights_without_a_gradient(
    weigh, target: float, inf: float
) -> None:
    learner = torch.tensor([[target, -1.0, -INF]], requires_grad=True)
    weight = weigh(learner, row(inf, -1.0, -1.0), ON)
    assert torch.isfinite(weight).all() and (weight >= 0).all() and not weight.requires_grad


@pytest.mark.parametrize("weigh", WEIGHTS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (1, 1)])
def test_empty_batches_and_empty_masks(weigh, shape: tuple[int, int]) -> None:
    logp = torch.full(shape, -1.0)
    for mask in (torch.zeros(shape), torch.ones(shape)):
        assert torch.equal(weigh(logp, logp - 0.0, mask), torch.ones(shape))
        assert veto(logp, logp, mask).all()
