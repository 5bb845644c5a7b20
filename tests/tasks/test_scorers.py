"""Every scorer that the project calls, tried for real: docs/scorers.md."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import scorers_page

LOCK = Path(__file__).parents[2] / "requirements/scorers.lock"
# no right answer of any data set, but where it is the reference
_WRONG = (
    "nan inf -inf 1e999 nani nan+nanj {} [] () [[]] null None banana 9**9**9 [nan] - exit() "
    "entry['answer'] oracle_answer integrate(1) (lambda:1)() __import__('os').listdir()"
)
WRONG = _WRONG.split(" ")
PROBLEMS = 3


@pytest.mark.nightly
@pytest.mark.processes
def test_own_scorers_and_reward_functions_are_proven(tmp_path):
    rows = [scorers_page.own(name, task) for name, task in scorers_page.tasks(tmp_path)]
    assert [row for row in rows if row.verdict != "proven"] == []
    page = scorers_page.PAGE.read_text()
    assert [row.name for row in rows if f"| {row.name} | {row.found} |" not in page] == []


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package reasoning-gym, installed for this module where it is not installed."""
    if importlib.util.find_spec("reasoning_gym") is not None:
        yield
        return
    folder = tmp_path_factory.mktemp("reasoning-gym")
    install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "-r", str(LOCK)]
    subprocess.run([sys.executable, *install], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_every_data_set_of_reasoning_gym_is_proven_or_refused_by_name(package, tmp_path):
    page = scorers_page.PAGE.read_text()
    faults = []
    for name in scorers_page.names():
        row, task = scorers_page.reasoning_gym(name, str(tmp_path))
        if f"| {name} | {row.found} | {row.verdict} |" not in page:
            faults.append(f"docs/scorers.md has another row for {row}")
        if task is not None:
            faults += _faults(name, task)
            task.close()
    assert faults == []


def _faults(name, task):
    """Right answers without full credit, and wrong ones with it."""
    for index in range(PROBLEMS):
        item = task.item("train", index)
        if item.answer and task.grade(item, task.worked_answer(item)).reward < 1.0:
            yield f"{name}: the reference {item.answer!r} is not right"
        for text in WRONG:
            reward = task.grade(item, f"<answer>{text}</answer>").reward
            if reward >= 1.0 and text != item.answer:
                yield f"{name}: {text} has {reward} where {item.answer!r} is right"
