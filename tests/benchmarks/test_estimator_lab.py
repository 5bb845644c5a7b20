"""The estimator lab: its exact expectations, the four hypotheses, and what its page says."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks.evidence import estimator_lab, estimator_lab_page
from benchmarks.evidence.estimator_lab import World, cell, identity, mismatched, rounded
from benchmarks.evidence.estimator_lab_page import n_star

SEEDS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def cells():
    """Small cells, by kind and size of mismatch."""
    return {(k, s): cell(k, s, 8, 1000, SEEDS) for k in ("fixed", "fresh") for s in (0.3, 0.6)}


def test_the_exact_gradient_is_that_of_the_expected_reward():
    world = World.drawn(6, np.random.default_rng(3))
    logits = world.logits.clone().requires_grad_(True)
    p, value = logits.softmax(-1), torch.zeros(estimator_lab.STATES, dtype=torch.float64)
    for _ in range(world.length):
        value = (p * (world.quality + value[world.following])).sum(-1)
    (wanted,) = torch.autograd.grad(value.mean() / world.length, logits)
    torch.testing.assert_close(world.gradient(world.logits), wanted, atol=1e-12, rtol=1e-9)


def test_the_expectation_of_an_estimator_is_the_mean_of_its_samples():
    rng = np.random.default_rng(0)
    world = World.drawn(5, rng)
    inf_logits, target, _ = mismatched(world, "fixed", 0.6, 1, rng)
    logp, inf = target.log_softmax(-1), inf_logits.log_softmax(-1)
    weight = estimator_lab.averaged(logp, inf)["tis C=2"]
    exact = world.expected(inf.exp(), inf.exp() * weight, logp.exp()).flatten()
    states, tokens, _, rewards = estimator_lab.sample(world, inf_logits, 0.0, 40_000, rng)
    coefficients = weight[states, tokens] * (rewards - rewards.mean())[:, None]
    drawn = estimator_lab.gradients(coefficients, states, tokens, logp.exp())
    error = (drawn.mean(0) - exact).square().sum()
    assert error < 2 * drawn.var(0).sum() / len(drawn)  # as much as sampling explains


def test_averaged_jackpot_is_the_truncated_product_of_z_and_the_ratio():
    assert max(row["difference"] for row in identity(states=500)) < 1e-12


def test_averaging_the_draws_never_adds_variance(cells):
    for found in cells.values():
        arms = found["arms"]
        assert arms["jackpot"]["variance"] < arms["jackpot, drawn"]["variance"]
        assert arms["jackpot"]["bias2"] == arms["jackpot, drawn"]["bias2"]


def test_n_star_depends_little_on_the_size_of_rounding(cells):
    small, large = (cells["fixed", size]["arms"] for size in (0.3, 0.6))
    stars = [n_star(arms["tis C=10"], arms["none"]) for arms in (small, large)]
    assert 0.5 < stars[0] / stars[1] < 2
    assert n_star(large["none"], large["none"]) == math.inf


def test_fresh_noise_biases_less_than_a_fifth_of_a_fixed_error_of_its_kl(cells):
    for size in (0.3, 0.6):
        fixed, fresh = cells["fixed", size], cells["fresh", size]
        assert fresh["kl"] == pytest.approx(fixed["kl"], rel=0.15)
        biases = [math.sqrt(c["arms"]["none"]["bias2"]) for c in (fresh, fixed)]
        assert biases[0] < 0.2 * biases[1]


def test_the_fixed_share_of_samples_is_that_of_the_error():
    for share in (0.1, 0.5):
        assert cell("mixed", share, 8, 1000, SEEDS)["fixed_share"] == pytest.approx(share, abs=0.05)


def test_the_page_is_written_from_the_data_and_the_data_from_the_code():
    found = json.loads(estimator_lab.RESULTS.read_text())
    assert estimator_lab_page.block(found) in estimator_lab_page.PAGE.read_text()
    known = next(
        c for c in found["cells"] if (c["kind"], c["size"], c["length"]) == ("fixed", 0.3, 8)
    )
    again = rounded(cell("fixed", 0.3, 8, found["answers"], estimator_lab.SEEDS))
    assert again["arms"]["tis C=10"] == pytest.approx(known["arms"]["tis C=10"], rel=1e-3)
    assert again["kl"] == pytest.approx(known["kl"], rel=1e-3)


@pytest.mark.parametrize("arm", ["none", "dvp"])
def test_a_floor_takes_success_from_no_correction_and_none_from_dvp(arm):
    success, counted = estimator_lab.under_floor(1e-6, arm, 0)
    assert (success > 0.6) == (arm == "dvp")
    assert (counted > 2) == (arm == "none")


def test_the_bandit_weighs_each_batch_by_an_alpha_of_its_own():
    rng = torch.Generator().manual_seed(0)
    logp, inf, a = (torch.randn(3, 16, generator=rng, dtype=torch.float64) for _ in range(3))
    weight = estimator_lab.NEEDLE_ARMS["ais"](logp, inf, a)
    on = torch.ones(1, 16, dtype=torch.bool)
    for row in range(3):
        alone, _ = estimator_lab.F.ais(logp[row][None], inf[row][None], a[row][None], on)
        torch.testing.assert_close(weight[row], alone[0])


def test_a_needle_that_is_common_is_found_and_its_absence_is_not(monkeypatch):
    for probability, share in ((0.5, 1.0), (1e-9, 0.0)):
        monkeypatch.setattr(estimator_lab, "NEEDLE", probability)
        found = estimator_lab.needle_found("fixed", 0.0, "none", seeds=4)
        assert found.mean() == share


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([[0.1, 0.02], [0.08, 0.02]], "supported"),
        ([[0.0, 0.02], [-0.1, 0.02]], "refuted"),
        ([[0.1, 0.02], [0.0, 0.02]], "open"),
    ],
)
def test_the_bandits_statements_are_judged_at_all_sizes_of_noise(differences, verdict):
    assert estimator_lab_page.judged(differences) == verdict
