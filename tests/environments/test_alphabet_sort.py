"""alphabet_sort over several turns: what is asked, rewarded and graded."""

import pytest

from rlcore.environments.alphabet_sort import AlphabetSort
from rlcore.environments.protocol import Action
from rlcore.errors import UserError
from rlcore.tasks import make_task


@pytest.fixture
def begun():
    task = make_task("alphabet_sort", {"style": "letters", "turns": 2, "per_turn": 2})
    environment = AlphabetSort(task, power=2.0)
    item = task.item("train", 0)
    environment.reset(item, 0)
    return environment, [n for names in item.meta["lists"] for n in names]


def test_every_turn_adds_names_and_is_rewarded_for_the_whole_list(begun):
    environment, names = begun
    first = environment.step(Action("".join(sorted(names[:2]))))
    assert first.reward == 0.5 and not first.over
    assert first.messages[0]["content"] == f"+{''.join(names[2:])}="
    assert environment.worked() == "".join(sorted(names))
    last = environment.step(Action(environment.worked()))
    assert last.over and last.reward == 0.5
    assert environment.grade().reward == 0.0 and environment.grade().parts["correct"] == 1.0


def test_a_list_that_misses_names_is_worth_less_than_its_likeness(begun):
    environment, names = begun
    assert environment.step(Action("")).reward == 0.0
    half = "".join(sorted(names)[:2])
    # two of four and two: a ratio of 4/6
    assert environment.step(Action(half)).reward == pytest.approx((4 / 6) ** 2 / 2)
    assert environment.grade().parts == {"correct": 0.0, "right_lists": 0.0}


def test_other_tasks_and_powers_that_reward_nothing_are_refused(begun):
    with pytest.raises(UserError, match="set task=alphabet_sort"):
        AlphabetSort(make_task("digits", {}))
    with pytest.raises(ValueError, match="power must be above 0"):
        AlphabetSort(make_task("alphabet_sort", {}), power=0)
