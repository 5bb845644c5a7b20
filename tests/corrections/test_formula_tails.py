"""Tails of the mismatch: percentiles from counts, and what the actors' floor has drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from correction_helpers import mismatched_step, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.corrections.ais import AisSpec
from rlcore.corrections.mismatch import mismatch_metrics
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.regimes import PERCENTILES, mismatch_tails
from rlcore.metrics.names import declared


@given(st.lists(st.floats(-19, 19, width=32), min_size=1, max_size=60))
@settings(max_examples=80, deadline=None)
def test_percentiles_are_those_of_the_sorted_tokens_up_to_a_bin(differences: list[float]) -> None:
    """The least value that so many percent of the tokens do not exceed."""
    d = torch.tensor([differences])
    found = mismatch_tails(d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool))
    for name, values in (("ratio", d[0]), ("abs_dlogp", d[0].abs())):
        ordered = values.double().sort().values.tolist()
        for percent in PERCENTILES:
            exact = ordered[max(math.ceil(percent * len(ordered) / 100), 1) - 1]
            got = found[f"{name}_p{percent}"]
            got = math.log(got) if name == "ratio" else got
            assert got == pytest.approx(exact, rel=0.03, abs=1e-4), (name, percent)
    assert found["agreement_p5"] == math.exp(-found["abs_dlogp_p95"])
    below = sum(math.exp(-abs(x)) < 0.86 for x in d[0].double().tolist()) / len(differences)
    assert found["below_086_share"] == pytest.approx(below, abs=1.01 / len(differences))


def test_matched_tokens_have_no_tail() -> None:
    zero = torch.zeros(2, 8)
    found = mismatch_tails(zero, zero, torch.ones(2, 8, dtype=torch.bool))
    assert found["ratio_p1"] == found["ratio_p99"] == found["agreement_p5"] == 1
    assert found["abs_dlogp_p99"] == found["below_086_share"] == 0
    assert mismatch_tails(zero, zero, torch.zeros(2, 8, dtype=torch.bool)) == {}


def test_an_eighth_is_of_each_answer_whatever_its_length() -> None:
    """Two answers, of 16 and 8 tokens, whose difference is their own eighth."""
    on = torch.arange(16) < torch.tensor([[16], [8]])
    eighth = torch.stack([torch.arange(16) // 2, torch.arange(16)]) + 1
    found = mismatch_tails(-0.1 * eighth.float(), torch.zeros(2, 16), on)
    for n in range(1, 9):
        assert found[f"eighth_{n}/abs_dlogp_p50"] == pytest.approx(0.1 * n, rel=0.03)
        assert found[f"eighth_{n}/ratio_p1"] == pytest.approx(math.exp(-0.1 * n), rel=0.03)


def test_tails_are_of_all_ranks_and_declared() -> None:
    step = mismatched_step(b=8, t=12, noise=0.6, seed=5)
    whole = mismatch_metrics(step, ONE_RANK, AisSpec())

    def share(rank: int, reduce: Any) -> dict[str, float]:
        rows = slice(0, 2) if rank else slice(2, 8)
        return mismatch_metrics(step.rows(rows), reduce, AisSpec())

    assert all(part == pytest.approx(whole) for part in on_ranks(share, 2))
    assert [name for name in whole if declared(name) is None] == []
    assert whole["mismatch/ratio_p1"] < whole["mismatch/ratio_p50"] < whole["mismatch/ratio_p99"]


def test_the_floor_draws_what_the_learner_finds_all_but_impossible() -> None:
    """One of four tokens, at a probability far above the learner's; DVP's set says the same."""
    step = mismatched_step(b=2, t=2, k=4)
    step.mask = torch.ones(2, 2, dtype=torch.bool)
    step.logp_inf = torch.full((2, 2), -10.0)
    step.logp_ref = torch.tensor([[-10.0, -40.0], [-10.0, -10.0]])
    found = mismatch_metrics(step, ONE_RANK, AisSpec())
    assert found["mismatch/floor_tokens"] == pytest.approx(0.5)
    assert found["mismatch/floor_mass"] == pytest.approx(found["mismatch/unlikely_share"]) == 0.25
    step.ref_inside = step.logp_ref > -20
    under_dvp = mismatch_metrics(step, ONE_RANK, AisSpec())
    assert under_dvp["mismatch/floor_tokens"] == pytest.approx(0.5)
