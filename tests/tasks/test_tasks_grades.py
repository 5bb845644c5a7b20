"""What a grader may return."""

import pytest

from rlcore.tasks.grades import as_grade, dense
from rlcore.types import Grade


def test_an_environment_s_grade_may_reward_turns_and_a_task_s_may_not():
    given = Grade(1.0, {"correct": True}, (0.5, -1))
    assert as_grade(given, by_turn=True) == Grade(1.0, {"correct": 1.0}, (0.5, -1.0))
    with pytest.raises(ValueError, match="only an environment's grade"):
        as_grade(given)
    with pytest.raises(ValueError, match="turn's reward is nan"):
        as_grade(Grade(1.0, {}, (float("nan"),)), by_turn=True)
    assert as_grade(Grade(1.0)) == as_grade(1) == Grade(1.0)


def test_a_list_has_a_reward_for_every_token():
    assert as_grade([1, 0.5]) == Grade(0.0, {}, (), (1.0, 0.5))
    assert as_grade(([1, 0.5], {"style": 1})) == Grade(0.0, {"style": 1.0}, (), (1.0, 0.5))
    for given, said in (([], "is empty"), ([1.0, None], "token's reward is None")):
        with pytest.raises(ValueError, match=said):
            as_grade(given)


def test_rewards_of_tokens_and_of_the_whole_response_add_up():
    assert dense(Grade(1.0), 3) == (1.0, ())
    assert dense(Grade(1.0, {}, (), (0.0, 0.25, 0.5)), 3) == (1.75, (0.0, 0.25, 1.5))
    with pytest.raises(ValueError, match="rewards 3 tokens, and the response has 4"):
        dense(Grade(0.0, {}, (), (0.0, 0.25, 0.5)), 4)
