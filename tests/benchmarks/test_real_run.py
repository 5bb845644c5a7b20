"""What is said of a run's processes and of the parts of its steps."""

import pytest

from benchmarks.harness import role
from benchmarks.speed.real_run import memory, seconds


@pytest.mark.parametrize(
    "command, name",
    [
        (["ray::LearnerActor.train_step"], "LearnerActor"),
        (["ray::RolloutActor", "", ""], "RolloutActor"),
        (["/x/bin/python3.11", "/x/bin/rlcore", "train", "seed=1"], "rlcore"),
        (["/x/ray/core/raylet", "--port=1"], "raylet"),
        (["/x/bin/python", "-u", "/x/dashboard.py"], "dashboard.py"),
        ([], "ended"),
    ],
)
def test_a_process_is_named_by_what_it_is_for(command, name):
    assert role(command) == name


def test_small_processes_are_added_up():
    found = memory({"raylet 7": 19e6, "LearnerActor 9": 2**31, "sh 3": 1e6})
    assert [row["process"] for row in found] == ["LearnerActor", "2 smaller ones"]
    assert found[0]["GiB"] == 2 and found[1]["GiB"] == pytest.approx(20e6 / 2**30)


def test_the_steps_that_start_things_up_do_not_count():
    rows = [{"time/step_s": 9.0}, {"time/step_s": 9.0}, *({"time/step_s": s} for s in (1.0, 3.0))]
    rows[-1]["time/learn_s"] = 5.0
    assert seconds(rows) == [
        {"part": "time/learn_s", "seconds": 2.5},
        {"part": "time/step_s", "seconds": 2.0},
    ]
