"""Several attempts at a problem of any task, and what the model learns of a wrong one."""

import json

import pytest

from rlcore.environments.attempts import Attempts
from rlcore.environments.protocol import Action
from rlcore.tasks import make_task
from rlcore.types import Item

ROW = {
    "text": "Write a function that doubles a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(2) == 4, 'double(2) is 4'", "assert double(-1) == -2"],
}


def begun(task, **args):
    environment = Attempts(task, **args)
    opening = environment.reset(task.item("train", 0), 0)
    return environment, opening.messages[0]["content"]


def said(reply):
    return reply.messages[0]["content"]


class Tokenwise:
    """Rewards every token of an answer."""

    def item(self, split, index):
        return Item(f"own/{split}/{index}", "?", "")

    def grade(self, item, response):
        return [0.5] * len(response)


def test_rewards_of_an_answer_s_tokens_are_no_rewards_of_an_episode_s():
    environment, _ = begun(Tokenwise(), attempts=2)
    with pytest.raises(ValueError, match="use environment=none"):
        environment.step(Action("xy"))


def test_a_grader_may_return_a_number():
    task = Tokenwise()
    task.grade = lambda item, response: float(response == "y")
    environment, _ = begun(task, attempts=3)
    assert not environment.step(Action("x")).over
    assert environment.step(Action("y")).over and environment.grade().reward == 1.0


def test_wrong_answers_may_be_corrected_until_the_attempts_end():
    task = make_task("digits", {})
    right = task.item("train", 0).answer
    environment, question = begun(task, attempts=3, retry="?", cost=0.25)
    assert question == task.item("train", 0).question
    first = environment.step(Action("x"))
    assert (said(first), first.over, first.reward) == ("?", False, -0.25)
    assert environment.step(Action(right)).over
    assert environment.grade().reward == 1.0 and environment.grade().parts["attempts"] == 2.0

    environment, _ = begun(task, attempts=2)
    assert environment.step(Action("x")).reward is None
    assert environment.step(Action("y")).over
    assert environment.grade().reward == 0.0


def test_an_instance_plays_again_from_the_beginning_and_may_end_without_an_attempt():
    task = make_task("digits", {})
    environment, _ = begun(task)
    environment.step(Action(task.item("train", 0).answer))
    environment.reset(task.item("train", 1), 0)
    assert environment.grade().reward == 0.0 and environment.grade().parts["attempts"] == 0.0
    with pytest.raises(ValueError, match="attempts must be at least 1"):
        Attempts(task, attempts=0)


@pytest.mark.processes
def test_a_program_is_answered_by_the_test_that_it_fails(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    task = make_task("mbpp", {"train_path": f"{tmp_path}/rows.jsonl"})
    environment, question = begun(task, attempts=4)
    assert "double(2)" in question
    try:
        assert "double(2) is 4" in said(environment.step(Action("def double(x): return x")))
        raised = said(environment.step(Action("```python\n1 / 0\n```")))
        assert "ZeroDivisionError" in raised and "sandbox" not in raised
        assert "time limit" not in raised
        assert environment.step(Action("def double(x): return x + x")).over
        assert environment.grade().parts["correct"] == 1.0
    finally:
        environment.close()
