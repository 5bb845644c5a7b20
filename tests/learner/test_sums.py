"""Sums become metrics as they were declared, whatever they are called."""

import pytest
import torch

from rlcore.corrections.numerics import ONE_RANK
from rlcore.learner.metric_sums import LOSS, Declared, Sums

CPU = torch.device("cpu")


def test_each_sum_is_divided_by_its_declared_denominator():
    declared = {"a": Declared("kept tokens"), "b": LOSS, "c": Declared("sampled tokens")}
    sums = Sums(declared)
    for _ in range(2):
        sums.add({"a": torch.tensor(3.0), "b": torch.tensor(5.0), "c": torch.tensor(4.0)})
    totals = sums.over_ranks(ONE_RANK, CPU)
    assert totals == {"a": 6.0, "b": 10.0, "c": 8.0} and sums.losses(totals) == {"b": 10.0}
    metrics = sums.divided(totals, {"kept tokens": 2, "sampled tokens": 4})
    assert metrics == {"a": 3.0, "b": 10.0, "c": 2.0}


def test_nothing_added_and_nothing_kept_is_zero():
    sums = Sums({"a": Declared("kept tokens")})
    assert sums.divided(sums.over_ranks(ONE_RANK, CPU), {"kept tokens": 0}) == {"a": 0.0}


def test_an_undeclared_sum_is_an_error():
    with pytest.raises(KeyError, match="policy/mine"):
        Sums({}).add({"policy/mine": torch.tensor(1.0)})
