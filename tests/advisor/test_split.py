"""The search for the best division of GPUs, on fleets whose best is known."""

import pytest

from rlcore.advisor.planner.forecast import Forecast, best_of, least_ranks, searched
from rlcore.advisor.planner.picture import picture


def balanced(ranks, actors):
    """A rank trains on 100 tokens a second, an actor samples 50: the slower side sets the pace."""
    pace = min(100.0 * ranks, 50.0 * actors)
    return Forecast(1.0, pace, pace, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("gpus", "each", "best"),
    [
        (2, 1, (1, 1)),
        (3, 1, (1, 2)),
        (48, 1, (16, 32)),
        (8, 2, (2, 3)),  # 6 GPUs in three actors: 150 tokens a second
        (384, 1, (128, 256)),
    ],
)
def test_the_best_division_is_found(gpus, each, best):
    splits = searched(gpus, each, 1, balanced)
    found = best_of(splits)
    ideal = balanced(*best).train_tokens_per_s
    assert found.forecast.train_tokens_per_s >= 0.97 * ideal
    assert all(s.ranks + each * s.actors == gpus for s in splits)
    assert len(splits) <= 16  # each is a simulation


def test_of_equal_divisions_the_one_with_fewer_actors_is_best():
    def same(ranks, actors):
        return balanced(1, 2)

    splits = searched(8, 1, 1, same)
    assert best_of(splits).actors == min(s.actors for s in splits)


def test_a_learner_that_needs_all_gpus_is_refused():
    with pytest.raises(ValueError, match="are more than 8"):
        searched(8, 1, 8, balanced)


def test_the_learners_state_decides_its_least_ranks():
    assert least_ranks(1.7e9, 80) == 1
    assert least_ranks(8.2e9, 80) == 3  # 148 GB over 69 GB each


def test_a_picture_has_each_curve_and_marks_its_top():
    svg = picture("a < b", "x", "y", {"one": [(0, 1), (2, 4), (4, 2)], "two": [(1, 1)]})
    assert svg.count("<polyline") == 2 and "a &lt; b" in svg
    # of four points each is drawn, and the top of each curve once more
    assert svg.count("<circle") == 6
