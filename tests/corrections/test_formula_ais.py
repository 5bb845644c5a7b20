"""AIS: the formula, its bounds, and its statistics on next to nothing."""

from __future__ import annotations

import math

import pytest
import torch
from correction_helpers import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.ais import Ais, AisSpec
from rlcore.corrections.functional import ais, ais_accumulate, ais_weight
from rlcore.corrections.numerics import OneRank
from rlcore.interfaces import Corrected
from rlcore.types import StepTensors


def batch(seed: int, noise: float, b: int = 6, t: int = 9) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    inf = -3 * torch.rand(b, t, generator=g)
    ref = inf + noise * torch.randn(b, t, generator=g)
    return (
        ref,
        inf,
        torch.randn(b, 1, generator=g).expand(b, t),
        torch.rand(b, t, generator=g) > 0.3,
    )


def reference(
    ref, inf, adv, mask, cap=5.0, delta=0.02, gamma=1.2, beta=1.0, eps=1e-6
) -> dict[str, float]:
    """METHODS.md, with torch's own statistics over the selected tokens."""
    d, a = (ref - inf)[mask].double(), adv[mask].double()
    w = d.exp().clamp(max=cap)
    ess = (1 + (w.std() / w.mean()) ** 2) ** -0.5
    mis = (d.abs().mean() / delta).clamp(max=1)
    var = (((a * w).std() / (a.std() + eps) - gamma) / gamma).clamp(min=0)
    alpha = (ess - beta * var).clamp(0, 1) * mis
    return {
        "alpha": alpha.item(),
        "alpha_ess": ess.item(),
        "alpha_mis": mis.item(),
        "alpha_var": var.item(),
    }


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(1e-4, 3.0), cap=st.sampled_from([1.5, 5.0]))
def test_signals_match_the_formula_and_the_weight_stays_in_its_interval(
    seed: int, noise: float, cap: float
) -> None:
    ref, inf, adv, mask = batch(seed, noise)
    weight, signals = ais(ref, inf, adv, mask, cap=cap)
    expected = reference(ref, inf, adv, mask, cap=cap)
    for name, value in expected.items():
        assert signals[name] == pytest.approx(value, abs=1e-6), name
    alpha = signals["alpha"]
    assert (weight >= 1 - alpha - 1e-6).all() and (weight <= 1 + alpha * (cap - 1) + 1e-6).all()
    w = (ref - inf).exp().clamp(max=cap)
    torch.testing.assert_close(weight[mask], (1 + alpha * (w - 1))[mask])


def test_variance_amplification_lowers_alpha() -> None:
    inf = torch.zeros(4, 8)
    ref = inf.clone()
    ref[0, 0] = math.log(4.0)
    adv = torch.full((4, 8), 0.01)
    adv[0], adv[1, 0] = 1.0, -0.01  # the one large ratio meets a large advantage
    mask = torch.ones(4, 8)
    _, mild = ais(ref, inf, adv, mask, beta=0.0, delta=0.001)
    _, strict = ais(ref, inf, adv, mask, beta=1.0, delta=0.001)
    assert mild["alpha_var"] > 0
    assert strict["alpha"] == pytest.approx(mild["alpha"] - mild["alpha_var"])


def test_degenerate_variance_switches_the_correction_off() -> None:
    ref, inf, _, mask = batch(0, 0.5)
    weight, signals = ais(ref, inf, torch.ones_like(ref), mask)  # std(A) = 0, std(A w) > 0
    assert signals["alpha"] == 0.0 and torch.equal(weight, torch.ones_like(weight))


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_spread_is_claimed_on_fewer_than_two_tokens(tokens: int) -> None:
    ref, inf, adv = torch.full((1, 3), -1.0), torch.full((1, 3), -1.3), torch.full((1, 3), 2.0)
    weight, signals = ais(ref, inf, adv, torch.arange(3)[None] < tokens)
    assert signals["alpha_ess"] == 1.0 and signals["alpha_var"] == 0.0
    assert signals["alpha_mis"] == float(tokens)  # |dlogp| = 0.3 is far beyond delta
    expected = torch.ones(1, 3)
    expected[0, :tokens] = math.exp(0.3)
    torch.testing.assert_close(weight, expected)


def test_equal_rewards_leave_the_other_signals_in_force() -> None:
    ref, inf, adv, mask = batch(1, 0.3)
    _, signals = ais(ref, inf, torch.zeros_like(adv), mask)
    assert signals["alpha_var"] == 0.0 and 0 < signals["alpha"] <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_matched_log_probs_weigh_exactly_one(dtype: torch.dtype) -> None:
    _, inf, adv, mask = batch(2, 0.0)
    inf = inf.to(dtype)
    weight, signals = ais(inf, inf.clone(), adv.to(dtype), mask)
    assert torch.equal(weight, torch.ones_like(weight)) and signals["alpha"] == 0.0


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e4])
def test_junk_at_masked_and_nan_at_unmasked_positions(junk: float) -> None:
    ref, inf, adv, mask = batch(3, 0.4)
    clean, signals = ais(ref, inf, adv, mask)
    dirty, dirty_signals = ais(
        ref.where(mask, junk), inf.where(mask, -junk), adv.where(mask, junk), mask
    )
    assert torch.equal(clean, dirty) and signals == dirty_signals
    inf[0, 0], mask[0, 0] = math.nan, True
    broken, signals = ais(ref, inf, adv, mask)
    mask[0, 0] = False
    assert broken[0, 0] == 0.0 and signals == ais(ref, inf, adv, mask)[1]


def test_extreme_differences_saturate() -> None:
    inf = torch.tensor([[-1e4, 0.0, -math.inf, -1.0]])
    weight, signals = ais(-inf.abs().flip(1), inf, torch.ones(1, 4), torch.ones(1, 4))
    assert torch.isfinite(weight).all() and all(math.isfinite(v) for v in signals.values())


def test_one_broken_token_counts_as_a_difference_of_twenty_at_most() -> None:
    inf, adv, mask = torch.zeros(40, 100), torch.ones(40, 100), torch.ones(40, 100)
    ref = inf.clone()
    ref[3, 7] = -1000.0
    _, signals = ais(ref, inf, adv, mask, delta=1.0)
    assert signals["alpha_mis"] == pytest.approx(20 / 4000)
    _, signals = ais_weight(ais_accumulate(ref, inf, adv, mask), ref, inf, mask, delta=1.0)
    assert signals["alpha_mis"].item() == pytest.approx(20 / 4000)


def test_alpha_is_one_number_however_the_batch_is_split_over_ranks() -> None:
    ref, inf, adv, mask = batch(4, 0.5)
    whole, signals = ais(ref, inf, adv, mask)
    cut = [slice(0, 2), slice(2, 6)]
    halves = on_ranks(
        lambda r, reduce: ais(ref[cut[r]], inf[cut[r]], adv[cut[r]], mask[cut[r]], reduce=reduce), 2
    )
    torch.testing.assert_close(torch.cat([h[0] for h in halves]), whole, rtol=1e-7, atol=1e-7)
    for _, other in halves:
        assert other == pytest.approx(signals, rel=1e-12)
    assert ais(ref[:2], inf[:2], adv[:2], mask[:2])[1]["alpha"] != pytest.approx(
        signals["alpha"], rel=1e-3
    )


def step_of(ref, inf, mask, age=0, ref_version=None):
    """Tensors of a step of version 7, whose tokens are `age` versions older."""
    rows = torch.arange(len(ref))
    return StepTensors(
        mask=mask,
        logp_inf=inf,
        logp_ref=ref,
        logp_new=ref,
        rewards=torch.zeros(len(ref)),
        group_ids=rows,
        advantages=torch.ones_like(ref),
        token_version=(torch.full(ref.shape, 7) - age).int(),
        sample_ids=rows,
        step=7,
        ref_version=ref_version,
    )


def of_size(step, **spec):
    start = Corrected(torch.ones_like(step.logp_ref), step.mask, {})
    return Ais(AisSpec(alpha="n_star", **spec), 0).correct(step, start, OneRank())


def test_the_first_share_is_typical_of_the_batch_and_the_answers_length():
    for answers, tokens, star in [(30, 8, 90), (90, 8, 90), (90, 64, 20)]:
        ref, inf = torch.full((answers, tokens), -1.0), torch.full((answers, tokens), -1.3)
        found = of_size(step_of(ref, inf, torch.ones_like(ref) > 0))
        alpha = answers / (answers + star)
        assert found.metrics == pytest.approx({"alpha": alpha, "n_star": star})
        expected = torch.full_like(ref, 1 + alpha * (math.exp(0.3) - 1))
        torch.testing.assert_close(found.weight, expected)


def test_what_cannot_be_compared_leaves_and_what_is_masked_is_not_corrected():
    ref, inf = torch.full((90, 8), -1.0), torch.full((90, 8), -2.0)
    inf[0, 0] = math.nan
    on = torch.ones_like(ref) > 0
    on[2, 2] = False
    found = of_size(step_of(ref, inf, on), cap=2.0)
    assert found.weight[0, 0] == 0.0 and found.weight[2, 2] == 1.0
    assert found.weight[3, 0] == pytest.approx(1.5, abs=0.01)
    kept = on & ~torch.isnan(inf)
    assert found.metrics["alpha"] == pytest.approx(float((found.weight - 1)[kept].mean()))
    assert torch.equal(found.mask, on)


def test_later_steps_of_a_phase_correct_its_own_tokens_by_the_same_share():
    ref, inf = torch.full((90, 8), -1.0), torch.full((90, 8), -1.3)
    on = torch.ones_like(ref) > 0
    first = of_size(step_of(ref, inf, on, age=0))
    later = of_size(step_of(ref, inf, on, age=3, ref_version=4))  # the fourth step of the phase
    assert torch.equal(first.weight, later.weight) and first.metrics == later.metrics
