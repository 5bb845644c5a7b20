"""The grader, task and correction that docs/extending.md shows work as they stand there."""

import shlex
from pathlib import Path

import pytest
import torch
from run_documented import blocks, files
from torch.testing import assert_close

from rlcore.cli import main
from rlcore.config.compose import load
from rlcore.corrections.functional import tis
from rlcore.corrections.numerics import OneRank
from rlcore.corrections.pipeline import build
from rlcore.errors import UserError
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.tasks import make_task
from rlcore.types import StepTensors

PAGE = "docs/extending.md"
FILES = files(PAGE)
COMMANDS = [shlex.split(line) for block in blocks(PAGE) for line in block.lines()]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "train.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n' * 3)
    monkeypatch.chdir(tmp_path)


def test_the_page_is_read():
    assert list(FILES) == ["graders.py", "tasks.py", "stages.py", "corrections.py"]
    assert [words[1] for words in COMMANDS] == ["try", "try", "train", "train"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "shown"), [(COMMANDS[0], "correct 1"), (COMMANDS[1], "worked answer 1 (3)")]
)
def test_tries_grade_known_answers_right(words, shown, capsys):
    assert main(words[1:]) == 0
    told = capsys.readouterr().out
    assert shown in told and "0 failed scores" in told


@pytest.mark.parametrize("words", COMMANDS[2:])
def test_runs_compose(words):
    assert load(words[2:]).run_dir.startswith(str(Path.cwd()))


def test_the_tasks_splits_share_no_problem():
    task = make_task("tasks.py:Reverse", {"length": 3})
    train, held_out = (
        {task.item(split, i).question for i in range(200)} for split in ("train", "heldout")
    )
    assert not train & held_out and task.item("train", 7) == task.item("train", 7)


def test_the_engines_own_setting_divides_layers(tmp_path):
    (tmp_path / "engine.py").write_text(f"""{FILES["stages.py"]}
from rlcore.learner.protocols import TrainEngine

Stages = type("Stages", (TrainEngine,), dict.fromkeys(TrainEngine.__abstractmethods__, print))
Stages.facts = StagesFacts
""")
    words = ["experiment=quickstart", "run_dir=r", "learner.step_bound=null", "learner.ranks=2"]
    words += ["learner.engine=engine.py:Stages", "learner.engine_args.stages=2"]
    assert load(words).learner.shares == 1
    with pytest.raises(UserError, match=r"learner\.engine_args\.stages=2 divides the layers"):
        load([*words, "learner.lora={rank: 4}"])


def test_the_correction_weighs_by_a_power_of_the_ratio():
    config = load(COMMANDS[3][2:])
    assert config.correction.names == ("mine",)
    pipeline = build(config.correction.chosen(), 0, ObjectiveSpec())
    inf = torch.tensor([[-1.0, -2.0, -0.5]])
    ref = torch.tensor([[-0.9, -3.0, -0.5]])
    mask = torch.tensor([[True, True, False]])
    ones, sample = torch.ones(1, 3), torch.zeros(1, dtype=torch.int64)
    step = StepTensors(mask, inf, ref, ref, ones[0, :1], sample, ones, sample[:, None], sample, 0)
    weight = pipeline.correct(step, OneRank(), measure=False).weight
    assert_close(weight[mask], tis(ref, inf, mask, cap=2.0)[mask] ** 0.7)
