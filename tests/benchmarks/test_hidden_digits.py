import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.evidence.hidden_digits import LETTERS, HiddenDigits
from rlcore.tasks.arguments import ArgumentError

TASK = HiddenDigits(letters=40)


@given(st.sampled_from(("train", "heldout")), st.integers(0, 10_000))
def test_the_answer_is_the_sorted_digits_of_the_text(split, index):
    item = TASK.item(split, index)
    text = item.question.removesuffix("=")
    digits = [c for c in text if c.isdigit()]
    assert "".join(sorted(digits)) == item.answer
    assert sum(c in LETTERS for c in text) == 40
    assert set(item.question) <= set(TASK.alphabet())
    assert TASK.item(split, index) == item  # the same text each time


def test_digits_stand_at_many_places():
    """Else an actor that sees the same few pages of each prompt would sort them all."""
    places = {
        place
        for index in range(200)
        for place, c in enumerate(TASK.item("train", index).question)
        if c.isdigit()
    }
    assert places >= set(range(44))


def test_only_the_sorted_digits_are_right():
    item = HiddenDigits(letters=40, min_digits=5, max_digits=5).item("heldout", 3)
    assert TASK.grade(item, item.answer).reward == 1.0
    assert TASK.grade(item, item.answer[:-1]).reward == 0.0
    assert TASK.grade(item, item.answer + "0").reward == 0.0


def test_heldout_problems_are_not_trained_on():
    task = HiddenDigits(letters=40, min_digits=2, max_digits=2)
    heldout = {task.item("heldout", i).question for i in range(task.size("heldout"))}
    assert len(heldout) == 10
    assert heldout.isdisjoint(task.item("train", i).question for i in range(200))


def test_problems_stay_those_of_the_finished_runs():
    """The study's lines do not name this task's source: other problems would mix with theirs. The
    first round has those of before, in another order."""
    first = {HiddenDigits(letters=8).item("train", i).question for i in range(5)}
    assert "ba8hb18nob0j=" in first and len(first) == 5


def test_digits_that_no_number_has_are_refused():
    with pytest.raises(ArgumentError, match="max_digits"):
        HiddenDigits(letters=8, min_digits=5, max_digits=4)
