"""The learning rate as a function of the step."""

import pytest

from rlcore.learner.optimizer_specs import OptimizerSpec
from rlcore.learner.protocols import RateSchedule


def _rates(steps, total, **settings):
    schedule = RateSchedule(OptimizerSpec(lr=1.0, **settings), total)
    return [schedule(step) for step in steps]


def test_warm_up_then_constant():
    assert _rates((0, 3, 4, 9), 5, lr_warmup_steps=4) == [0.25, 1.0, 1.0, 1.0]


def test_down_to_zero_at_the_end_of_the_run():
    linear = _rates(range(6), 4, lr_schedule="linear", lr_warmup_steps=0)
    assert linear == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = _rates((2, 4, 6), 6, lr_schedule="cosine", lr_warmup_steps=2)
    assert cosine == pytest.approx([1.0, 0.5, 0.0])


def test_down_to_a_share_at_a_step_of_its_own():
    settings = {"lr_schedule": "linear", "lr_warmup_steps": 0, "lr_final": 0.5}
    assert _rates((0, 2, 4), 100, lr_decay_steps=4, **settings) == [1.0, 0.75, 0.5]
