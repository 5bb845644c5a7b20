"""The hidden numbers of higher_lower: both splits have all of them, and one guess is graded."""

from collections import Counter

from rlcore.tasks import make_task


def test_the_heldout_split_weighs_all_numbers_equally():
    task = make_task("higher_lower", {"digits": 2})
    answers = [task.item("heldout", i).answer for i in range(200)]
    assert Counter(answers) == {f"{n:02d}": 2 for n in range(100)}
    assert {task.item("train", i).answer for i in range(2000)} == set(answers)
    assert {task.item("train", i).question for i in range(9)} == {"??"}
    assert task.item("train", 5) == make_task("higher_lower", {"digits": 2}).item("train", 5)
    other = make_task("higher_lower", {"digits": 2, "seed": 1})
    assert [other.item("heldout", i).answer for i in range(9)] != answers[:9]


def test_without_an_environment_it_is_a_game_of_one_guess():
    task = make_task("higher_lower", {})
    item = task.item("train", 0)
    assert task.grade(item, f" {item.answer}\n").reward == 1.0
    assert task.grade(item, str(9 - int(item.answer))).reward == 0.0
    assert task.worked_answer(item) == item.answer and set(item.answer) < set(task.alphabet())
