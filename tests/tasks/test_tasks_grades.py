"""What a grader may return."""

import pytest

from rlcore.tasks.grades import as_grade
from rlcore.types import Grade


def test_an_environment_s_grade_may_reward_turns_and_a_task_s_may_not():
    given = Grade(1.0, {"correct": True}, (0.5, -1))
    assert as_grade(given, by_turn=True) == Grade(1.0, {"correct": 1.0}, (0.5, -1.0))
    with pytest.raises(ValueError, match="only an environment's grade"):
        as_grade(given)
    with pytest.raises(ValueError, match="turn's reward is nan"):
        as_grade(Grade(1.0, {}, (float("nan"),)), by_turn=True)
    assert as_grade(Grade(1.0)) == as_grade(1) == Grade(1.0)
