"""The problems of alphabet_sort: distinct names, the same in every process, and one turn graded."""

import pytest

from rlcore.errors import UserError
from rlcore.tasks import make_task
from rlcore.tasks.game_problems import LETTERS, NAMES


@pytest.mark.parametrize(("style", "pool"), [("names", NAMES), ("letters", LETTERS)])
def test_problems_are_distinct_lists_of_distinct_names(style, pool):
    task = make_task("alphabet_sort", {"style": style, "turns": 4, "per_turn": 2})
    items = [task.item(split, i) for split in ("train", "heldout") for i in range(200)]
    lists = [i.meta["lists"] for i in items]
    assert all([len(one) for one in four] == [2, 2, 2, 2] for four in lists)
    drawn = [[n for one in four for n in one] for four in lists]
    assert all(len(set(names)) == 8 and set(names) <= set(pool) for names in drawn)
    assert len({tuple(names) for names in drawn}) == len(items)
    assert task.item("train", 3) == items[3]


def test_one_turn_is_graded_and_letters_fit_a_fresh_model_s_alphabet():
    task = make_task("alphabet_sort", {"style": "letters", "per_turn": 4})
    item = task.item("train", 0)
    assert item.question == "".join(item.meta["lists"][0]) + "="
    assert task.grade(item, task.worked_answer(item)).reward == 1.0
    wrong = task.grade(item, item.answer[::-1])
    assert wrong.reward == 0.0 and 0 < wrong.parts["likeness"] < 1
    assert set(item.question + item.answer + task.asked("ab", 1)) <= set(task.alphabet())


def test_the_names_are_sorted_without_repetition_and_too_many_are_refused():
    assert len(set(NAMES)) == len(NAMES) == 48
    with pytest.raises(UserError, match="per_turn=9 is too many for 3 turns: 26 exist"):
        make_task("alphabet_sort", {"style": "letters", "per_turn": 9})
