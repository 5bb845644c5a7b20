"""The learning rate as a function of the step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.learner.optimizer_specs import OptimizerSpec
from rlcore.learner.protocols import RateSchedule


def _rates(steps, total, **settings):
    schedule = RateSchedule(OptimizerSpec(lr=1.0, **settings), total)
    return [schedule(step) for step in steps]


def test_warm_up_then_constant():
    assert _rates((0, 3, 4, 9), 5, lr_warmup_steps=4) == [0.25, 1.0, 1.0, 1.0]


def test_down_to_zero_at_the_end_of_the_run():
    linear = _rates(range(6), 4, lr_schedule="linear", lr_warmup_steps=0)
    assert linear == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0, 0.0, 0.0])
    cosine = _rates((2, 4, 6), 7, lr_schedule="cosine", lr_warmup_steps=2)
    assert cosine == pytest.approx([1.0, 0.5, 0.0])


def test_down_to_a_share_at_a_step_of_its_own():
    settings = {"lr_schedule": "linear", "lr_warmup_steps": 0, "lr_final": 0.5}
    assert _rates((0, 2, 4, 5), 100, lr_decay_steps=5, **settings) == [1.0, 0.75, 0.5, 0.5]


@given(st.integers(1, 40), st.data())
def test_the_last_step_has_the_final_rate_and_no_rate_after_the_warm_up_rises(steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    final = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    decay = data.draw(st.sampled_from(["linear", "cosine"]))
    own = {"lr_schedule": decay, "lr_warmup_steps": warmup, "lr_final": final}
    rates = _rates(range(steps + 2), steps, **own)
    assert rates[steps - 1 :] == pytest.approx([final] * 3)
    after = rates[max(0, warmup - 1) :]
    assert all(later <= earlier for earlier, later in pairwise(after))
    assert max(rates[:warmup], default=1.0) == 1.0


@pytest.mark.parametrize(
    "words, said",
    [
        (["learner.lr_warmup_steps=20", "learner.lr_decay_steps=10"], "learner.lr_warmup_steps=9"),
        (["learner.lr_warmup_steps=10", "learner.lr_decay_steps=10"], "learner.lr_warmup_steps=9"),
        (["learner.lr_warmup_steps=5", "schedule.steps=4"], "learner.lr_warmup_steps=3"),
    ],
)
def test_a_warm_up_as_long_as_the_decay_is_refused_and_its_remedies_work(words, said):
    base = ["run_dir=r", "learner.lr_schedule=cosine", *words]
    with pytest.raises(
        UserError, match=r"^learner\.lr_warmup_steps=\d+ leaves no step to"
    ) as error:
        load(base)
    assert said in str(error.value)
    for remedy in (said, "learner.lr_schedule=constant"):
        load([*base, remedy])
    load([*base[:1], *words])  # a constant rate has no decay


def test_a_warm_up_of_the_starting_model_leaves_steps_to_its_decay():
    words = ["run_dir=r", "model.warmup.steps=20", "model.warmup.lr_schedule=linear"]
    with pytest.raises(UserError, match=r"set model\.warmup\.lr_warmup_steps=19 or less"):
        load(words)
    load([*words, "model.warmup.lr_warmup_steps=19"])
