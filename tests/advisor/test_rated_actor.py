"""Lengths of simulated answers."""

import numpy as np
import pytest

from rlcore.advisor.planner.run import LONGEST, PlannedFleet
from rlcore.advisor.planner.specs import ActorRates, LengthSpec, Rates
from rlcore.loop.specs import ScheduleSpec
from rlcore.testing.records import make_sampling
from rlcore.types import Request


def fleet(most=6400, **lengths):
    rates = Rates(lengths=LengthSpec(**{"median": 500.0, "spread": 0.6, **lengths}))
    return PlannedFleet(
        {"bf16": 1}, {"bf16": ActorRates()}, rates, ScheduleSpec(), samples=8, max_tokens=most
    )


def request(i):
    ids = np.array([3, 4], np.int32)
    return Request(i, 0, f"digits/train/{i}", ids, make_sampling(), seed=i)


def test_lengths_depend_on_the_request_alone_and_keep_their_mean_in_coarse_units():
    planned = fleet()
    real = [planned.real_tokens(request(i)) for i in range(3000)]
    coarse = [planned.simulated_tokens(request(i)) * planned.unit for i in range(3000)]
    assert real == [planned.real_tokens(request(i)) for i in range(3000)]
    assert np.median(real) == pytest.approx(500, rel=0.05)
    assert np.mean(coarse) == pytest.approx(np.mean(real), rel=0.02)


def test_lengths_are_cut_at_the_longest_answer():
    planned = fleet(most=300)
    assert max(planned.real_tokens(request(i)) for i in range(500)) == 300
    assert max(planned.simulated_tokens(request(i)) for i in range(500)) <= LONGEST
