"""Reward functions of other trainers, unchanged: recognised by parameters, called as there."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from rlcore.cli import main
from rlcore.errors import UserError
from rlcore.tasks import make_task, tasks_with_tokens
from rlcore.tasks.specs import EvalTaskSpec

FUNCTIONS = """
import torch


def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=True):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 7
    extra_info.clear()  # as some do: the next call has a row of its own
    right = float(solution_str == ground_truth)
    return {"score": right if strict else 0.5, "acc": right, "pred": solution_str}


async def plain_score(solution_str, ground_truth, **kwargs):
    return sum(ground_truth) == int(solution_str)


def batch_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == t) for s, t in zip(solution_strs, ground_truths)]


def accuracy_reward(completions, solution, **kwargs):
    assert set(kwargs) >= {"level", "prompts"}
    return [float(c[0]["content"] == s) for c, s in zip(completions, solution)]


def short_reward(prompts, completions, level=None):
    return [float(len(c[0]["content"]) < lev) if lev > 1 else None
            for c, lev in zip(completions, level)]


def text_reward(completions, answer):
    return [float(c == str(a)) for c, a in zip(completions, answer)]


def reward_func(queries, prompts, labels, **kwargs):
    right = torch.tensor([q[len(p):] == x for q, p, x in zip(queries, prompts, labels)]).float()
    return {"rewards": right, "scores": right / 2, "extra_logs": {"length": torch.ones(1)}}


def tensor_func(queries, prompts, labels):
    return torch.ones(len(queries))


def grade(item, response, tokens):
    return [0.0] * (len(tokens) - 1) + [float(response == item.answer)]


def unknown(text, gold, mode):
    return 1.0


def too_many(completions, completion_ids):
    return [1.0]


def none_at_all(completions):
    return [None]


def pair(completions):
    return [1.0, 2.0]
"""
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "answer": "It is #### 4", "split": "train"},
}
LISTED = {**VERL, "reward_model": {"style": "rule", "ground_truth": [1, 3]}}
TRL = {"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4", "level": 3}
OPEN = {"question": "2+2?", "label": "4"}


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)


def task_of(row, grader, **args):
    with open("rows.jsonl", "w") as file:
        file.write(json.dumps(row) + "\n")
    names = [grader] if isinstance(grader, str) else grader
    named = [f"mine.py:{name}" for name in names]
    given = named[0] if isinstance(grader, str) else named
    return make_task("file", {"train_path": "rows.jsonl", "grader": given, **args})


def graded(row, grader, response="4", **args):
    task = task_of(row, grader, **args)
    grades = [task.grade(task.item("train", 0), response) for _ in range(2)]
    assert grades[0] == grades[1]
    return grades[0].reward, grades[0].parts


@pytest.mark.parametrize(
    ("row", "grader", "reward", "parts"),
    [
        (VERL, "compute_score", 1.0, {"acc": 1.0, "correct": 1.0}),
        (LISTED, "plain_score", 1.0, {}),
        (VERL, "batch_score", 1.0, {}),
        (TRL, "accuracy_reward", 1.0, {}),
        (TRL, "short_reward", 1.0, {}),
        ({"prompt": "2+2?", "answer": 4}, "text_reward", 1.0, {}),
        (OPEN, "reward_func", 1.0, {"length": 1.0, "score": 0.5}),
        (OPEN, "tensor_func", 1.0, {}),
    ],
)
def test_functions_of_other_trainers_are_called_as_there(row, grader, reward, parts):
    assert graded(row, grader) == (reward, parts)
    assert graded(row, grader, "5")[0] == (1.0 if "short" in grader or "tensor" in grader else 0.0)


def test_arguments_of_a_function_are_those_of_the_configuration():
    assert graded(VERL, "compute_score", grader_args={"strict": False})[0] == 0.5
    with pytest.raises(UserError, match=r"task\.args\.grader_args=.*has no strictness"):
        task_of(VERL, "compute_score", grader_args={"strictness": 1})


def test_several_functions_are_weighed_and_none_is_left_out():
    both = ["accuracy_reward", "short_reward"]
    reward, parts = graded(TRL, both, grader_weights=[2, 0.5])
    assert reward == 2.5 and parts == {"accuracy_reward": 1.0, "short_reward": 1.0}
    reward, parts = graded({**TRL, "level": 1}, both, grader_weights=[2, 0.5])
    assert reward == 2.0 and parts == {"accuracy_reward": 1.0}
    assert graded(TRL, both)[0] == 2.0


def test_completions_are_text_or_messages_as_the_question_is():
    assert graded({**TRL, "answer": 4}, "text_reward", completions="text")[0] == 1.0
    assert graded({**TRL, "answer": 4}, "text_reward")[0] == 0.0  # messages are no text


@pytest.mark.parametrize(
    ("row", "grader", "args", "said"),
    [
        (TRL, "unknown", {}, r"give grade\(item, .*verl's .*TRL's .*OpenRLHF's reward_func"),
        (TRL, "too_many", {}, "requires completion_ids, which graders do not have"),
        (TRL, "text_reward", {}, "row 1: it has no answer, which the grader takes"),
        (TRL, ["accuracy_reward"], {"grader_weights": [1, 2]}, "give a number for each of acc"),
        (TRL, ["text_reward", "text_reward"], {}, "names text_reward twice"),
        (TRL, [], {}, "names no function"),
    ],
)
def test_what_cannot_be_called_is_refused_before_a_run(row, grader, args, said):
    if grader == "text_reward":
        row = {key: value for key, value in row.items() if key != "solution"}
    with pytest.raises(UserError, match=said):
        task_of(row, grader, **args)


@pytest.mark.parametrize(
    ("grader", "said"), [("none_at_all", "returned None"), ("pair", "not a list of one reward")]
)
def test_a_result_that_is_no_reward_is_a_failed_score(grader, said):
    with pytest.raises(ValueError, match=said):
        graded(TRL, grader)


def test_tokens_are_asked_for_by_any_of_several_functions():
    def wanted(grader):
        spec = EvalTaskSpec(name="file", args={"grader": grader})
        return tasks_with_tokens({"mine": spec}) == {"mine"}

    assert wanted("mine.py:grade") and wanted(["mine.py:unknown", "mine.py:grade"])
    assert not wanted("mine.py:compute_score")


def test_try_names_the_form_and_shows_the_verdicts(capsys):
    with open("rows.jsonl", "w") as file:
        file.write(json.dumps(VERL) + "\n")
    words = ["task=file", "task.args.train_path=rows.jsonl", "n=1"]
    assert main(["try", *words, "task.args.grader=mine.py:compute_score"]) == 0
    shown = capsys.readouterr().out
    assert "mine.py:compute_score is called as verl's compute_score(data_source" in shown
    assert "reference answer: reward 1 (acc 1, correct 1)" in shown
    assert "mean reward: reference answer 1 (1), empty response 0 (1)" in shown


def test_a_parquet_file_of_verl_names_the_field_of_its_answers():
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), "train.parquet")
    with pytest.raises(UserError, match=r"try task\.args\.answer_field=extra_info\.answer"):
        make_task("gsm8k", {"train_path": "train.parquet"})
    args = {"train_path": "train.parquet", "answer_field": "extra_info.answer"}
    task = make_task("gsm8k", args)
    assert (task.item("train", 0).question, task.item("train", 0).answer) == ("2+2?", "4")
