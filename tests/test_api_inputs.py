"""Rows and functions of a Python program as files of a run."""

import functools
import json
import linecache

import numpy as np
import pandas as pd
import pytest

from rlcore.api_inputs import Inputs, as_words
from rlcore.errors import UserError
from rlcore.tasks import make_task
from rlcore.types import Item

ROWS = [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": "3"}]
CELL = """
import math
import re

NUMBER = re.compile(r"[0-9]+", re.ASCII)
BONUS = {"2": 0.5}
answer = object()  # another cell's

def near(word, item):
    return math.isclose(float(word), float(item.answer))

def right(item, response):
    found = NUMBER.findall(response)
    return float(any(near(word, item) for word in found)) + BONUS.get(item.answer, 0.0)

def odd(item, response):
    return float(answer == response)

def inside(item, response):
    answer = object()
    return float(answer == response)
"""


def of_a_notebook(text, name):
    """A function of a cell: it has a source, and no file."""
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(keepends=True), "<cell>")
    space = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), space)
    return space[name]


def of_this_file(item, response):
    return len([row for row in ROWS if row["answer"] == response])


def graded(words, response):
    """The reward of a response to the first row, by the files that the words name."""
    given = dict(word.split("=", 1) for word in words)
    args = {"train_path": given["data"], "grader": given["reward"]}
    task = make_task("file", args)
    item = task.item("train", 0)
    assert isinstance(item, Item) and item.answer == "2"
    return task.grade(item, response).reward


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        pd.DataFrame(ROWS),
        pd.DataFrame({"question": ["1+1=", "1+2="], "answer": [2, 3]}),
        [{"question": "1+1=", "answer": np.int64(2)}],
    ],
    ids=["list", "tuple", "frame", "frame of numbers", "numpy"],
)
def test_rows_of_a_program_are_graded_by_its_function(data, tmp_path):
    given = Inputs("m", data, of_this_file)
    assert given.objects
    words = given.words(tmp_path)
    assert words[0] == "model=m"
    assert graded(words, "2") == 1 and graded(words, "7") == 0


def test_a_notebook_s_function_takes_what_its_inner_code_reads(tmp_path):
    words = Inputs(None, ROWS, of_a_notebook(CELL, "right")).words(tmp_path)
    assert graded(words, "it is 2") == 1.5 and graded(words, "it is 3") == 0.5
    assert "object" not in (tmp_path / "inputs" / "reward.py").read_text()


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (of_a_notebook(CELL, "odd"), "uses answer, a object that cannot be written"),
        (lambda item, response: 1.0, "give a function that is defined with def"),
        (functools.partial(of_this_file, 1), "give a function that is defined with def"),
    ],
    ids=["object", "lambda", "partial"],
)
def test_a_function_that_no_file_can_hold_is_refused(reward, said, tmp_path):
    with pytest.raises(UserError, match=said):
        Inputs(None, ROWS, reward).words(tmp_path)
    assert graded(Inputs(None, ROWS, of_a_notebook(CELL, "inside")).words(tmp_path), "2") == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "which is not empty"),
        (["1+1="], "a list of dictionaries"),
        ([{"question": object()}], "holds a value that is not JSON"),
    ],
)
def test_data_that_are_no_rows_are_refused(data, said, tmp_path):
    with pytest.raises(UserError, match=said):
        Inputs(None, data, "gsm8k").words(tmp_path)


def test_a_folder_with_a_run_keeps_its_inputs(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="already holds a run"):
        Inputs(None, ROWS, "gsm8k").words(tmp_path)


def test_settings_by_key_are_words():
    nested = {"schedule.steps": 2, "learner": {"lr": 1e-4}, "correction": [], "actor": {}}
    words = ["schedule.steps=2", "learner.lr=0.0001", "correction=[]", "actor={}"]
    assert as_words(nested) == words == as_words(words)
    assert json.loads(as_words({"a": True})[0].partition("=")[2]) is True
