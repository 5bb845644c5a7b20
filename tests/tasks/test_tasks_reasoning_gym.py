"""Problems of reasoning-gym: pip install 'rlcore[reasoning-gym]'."""

from __future__ import annotations

import re
import sys

import pytest

from rlcore.errors import UserError
from rlcore.tasks import make_task


def test_a_missing_package_is_named_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=re.escape("pip install 'rlcore[reasoning-gym]'")):
        make_task("reasoning_gym", {"name": "leg_counting"})


def test_problems_are_the_same_everywhere_and_its_own_scorer_judges():
    pytest.importorskip("reasoning_gym")
    task, again = (make_task("reasoning_gym", {"name": "leg_counting"}) for _ in range(2))
    items = [task.item(split, i) for split in ("train", "heldout") for i in (0, 3, 12345)]
    assert items == [again.item(*_place(i)) for i in items]
    assert len({i.question for i in items}) == len(items)
    item = items[0]
    assert item.question.endswith("between <answer> and </answer>.")
    worked = task.worked_answer(item)
    assert task.grade(item, f"So many. {worked}").parts == {"correct": 1.0, "format": 1.0}
    assert task.grade(item, item.answer).parts == {"correct": 0.0, "format": 0.0}
    assert task.grade(item, "<answer>-1</answer>").reward < 1.0


def _place(item):
    _, split, index = item.prompt_id.split("/")
    return split, int(index)


def test_settings_of_a_data_set_and_whole_answers():
    pytest.importorskip("reasoning_gym")
    settings = {"min_animals": 2, "max_animals": 2}
    args = {"name": "leg_counting", "settings": settings, "answer": "whole"}
    task = make_task("reasoning_gym", args)
    item = task.item("train", 0)
    assert "<answer>" not in item.question
    assert task.worked_answer(item) == item.answer
    assert task.grade(item, f" {item.answer}\n").reward == 1.0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"name": "legs"}, "task.args.name=legs is not accepted; choose one of: ab, acre"),
        ({"name": "leg_counting", "settings": {"legs": 3}}, "does not suit the dataset"),
        ({"name": "leg_counting", "answer": "all"}, "choose one of: tags, whole"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(args, words):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=re.escape(words)):
        make_task("reasoning_gym", args)
