"""A wrong name or argument is one sentence that names the key, the value and what would be
accepted."""

import subprocess
import sys

import pytest
from timing import deadline

from rlcore.errors import UserError
from rlcore.tasks import TASKS, make_task, parse_prompt_id


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("digit", {}, ["task.name=digit", "arithmetic", "digits", "sudoku4x4"]),
        ("digits", {"digits": 3}, ["task.args.digits=3", "min_digits", "max_digits", "op", "seed"]),
        ("digits", {"op": "shuffle"}, ["task.args.op=shuffle", "sort, reverse, copy"]),
        ("digits", {"min_digits": 5, "max_digits": 4}, ["task.args.max_digits=4", "min_digits=5"]),
        ("digits", {"min_digits": "4"}, ["task.args.min_digits=4", "integer from 1"]),
        ("digits", {"seed": -1}, ["task.args.seed=-1"]),
        ("arithmetic", {"question": "What is {a}?"}, ["task.args.question=", "{op}", "{b}"]),
        ("arithmetic", {"ops": "+^"}, ["task.args.ops=+^", "+ - *"]),
        ("countdown", {"style": "long"}, ["task.args.style=long", "short, text"]),
        ("countdown", {"max_target": 5}, ["task.args.max_target=5", "integer from 200"]),
        ("sudoku4x4", {"max_empty": 13}, ["task.args.max_empty=13", "to 12"]),
        ("sudoku4x4", {"format_reward": 1.5}, ["task.args.format_reward=1.5", "0 to 1"]),
        ("file", {"train_path": "x.jsonl"}, ["task.args.grader is missing", "question_field"]),
        (
            "gsm8k",
            {"path": "x"},
            ["task.args.path=x", "train_path", "heldout_path", "missing_answer"],
        ),
        ("no.such.module:Task", {}, ["task.name=no.such.module:Task", "cannot be loaded"]),
        ("rlcore.tasks.digits:Digit", {}, ["task.name=rlcore.tasks.digits:Digit", "Digits"]),
    ],
)
def test_a_wrong_name_or_argument_is_a_user_error(name, args, said):
    with pytest.raises(UserError) as error:
        make_task(name, args)
    assert all(part in str(error.value) for part in said), error.value
    assert "\n" not in str(error.value)


def test_the_key_of_another_place_in_the_config_is_named():
    with pytest.raises(UserError, match=r"^evaluation\.tasks\.long\.args\.op=shuffle "):
        make_task("digits", {"op": "shuffle"}, label="long", key="evaluation.tasks.long")


def test_the_label_begins_the_prompt_id():
    task = make_task("digits", {}, label="long")
    assert task.name == "long"
    assert task.item("heldout", 3).prompt_id == "long/heldout/3"
    with pytest.raises(UserError, match="label"):
        make_task("digits", {}, label="a/b")


@pytest.mark.parametrize(
    "text", ["digits/train", "digits/test/1", "digits/train/-1", "/train/1", "a/b/train/1"]
)
def test_what_is_no_prompt_id_is_refused(text):
    with pytest.raises(ValueError):
        parse_prompt_id(text)


def test_a_users_own_task_is_a_class_in_a_file(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "from rlcore.tasks.digits import Digits\nclass Mine(Digits):\n"
        "    def __init__(self, *, length=3):\n"
        "        super().__init__(min_digits=length, max_digits=length)\n"
    )
    task = make_task(f"{source}:Mine", {"length": 2})
    assert task.name == "mine"
    assert len(task.item("train", 0).question) == 3
    with pytest.raises(UserError, match=r"task\.args\.width=2"):
        make_task(f"{source}:Mine", {"width": 2})


@pytest.mark.processes
def test_naming_the_tasks_imports_none_of_them():
    code = (
        "import sys, rlcore.tasks as tasks\n"
        "heavy = ('torch', 'vllm', 'ray', 'transformers', 'sympy', 'pyarrow')\n"
        "named = {where.split(':')[0] for where in tasks.TASKS.values()}\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in heavy or m in named))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=deadline(60),
    )
    assert run.stdout.strip() == "[]"
    assert set(TASKS) >= {"digits", "arithmetic", "countdown", "sudoku4x4", "gsm8k", "math", "file"}
