"""A whole run with two tasks, by the command of docs/mixtures.md, and its exact resume."""

import json
import shlex

import pytest
from conftest import rows, without_times
from run_documented import blocks

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


def documented():
    """The words of the page's first command, but its run_dir."""
    words = shlex.split(blocks("docs/mixtures.md")[0].lines()[0])
    assert words[:2] == ["rlcore", "train"]
    return [w for w in words[1:] if not w.startswith("run_dir=")]


def test_a_mixture_trains_and_resumes_exactly(command, small, tmp_path):
    # of `small`, what is about a single task is not this run's
    settings = [w for w in small if not w.startswith(("task.", "experiment="))]
    words = [*documented(), *settings, "schedule=on_policy", "task.arithmetic.args.max_digits=1"]
    words += ["task.digits.samples_per_prompt=6", "task.arithmetic.advantage=reinforce"]
    # partial credit and short numbers, so that rewards are mixed
    words += ["task.digits.args={min_digits: 2, max_digits: 3, credit: digits}"]
    words += ["task.digits.difficulty={problems: 6, resample_rate: 0.5}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = command(*words, f"run_dir={whole}", "schedule.steps=4")
    assert first.wait() == 0, first.text[-3000:]
    second = command(*words, f"run_dir={parts}", "schedule.steps=2")
    assert second.wait() == 0, second.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=4")
    assert third.wait() == 0, third.text[-3000:]
    assert [without_times(r) for r in rows(parts)] == [without_times(r) for r in rows(whole)]
    for row in rows(whole):
        assert row["task/digits/groups"] + row["task/arithmetic/groups"] == 8
        assert (
            row["train/sequences"]
            == 6 * row["task/digits/groups"] + 4 * (row["task/arithmetic/groups"])
        )
        assert row["task/arithmetic/response_length_max"] <= 8
    assert any(row["grad_norm"] > 0 for row in rows(whole))
    last = rows(whole)[-1]
    assert last["task/digits/consumed"] > last["task/arithmetic/consumed"] > 0
    assert last["task/digits/seen"] == 6
    assert {"eval/digits/greedy", "eval/arithmetic/greedy"} <= last.keys()
    shown = (whole / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt_id"].split("/")[0] for line in shown} == {
        "digits",
        "arithmetic",
    }
    report = (whole / "report.html").read_text()
    assert "<h3>Tasks</h3>" in report and "Reward by task" in report


@pytest.mark.slow
def test_tasks_of_one_run_are_played_in_their_own_environments(command, small, tmp_path):
    own = [w for w in small if not w.startswith(("experiment=", "task."))]
    run = command(
        *("train", "experiment=agent_quickstart", *own, f"run_dir={tmp_path}/run"),
        *("task=[higher_lower,digits,arithmetic]", "environment=none", "schedule.steps=4"),
        "task.higher_lower.environment=higher_lower",
        *("task.arithmetic.environment=attempts", "task.arithmetic.args.max_digits=1"),
        *("task.arithmetic.temperature=0.8", "task.arithmetic.max_new_tokens=5"),
        *("task.digits.args={min_digits: 2, max_digits: 2}", "rollout.max_new_tokens=4"),
        "algorithm.turn_share=0.5",
    )
    assert run.wait() == 0, run.text[-3000:]
    found = rows(tmp_path / "run")
    assert [r["step"] for r in found] == [1, 2, 3, 4]
    turns = {
        label: max(r.get(f"task/{label}/reward_parts/turns", 0.0) for r in found)
        for label in ("higher_lower", "digits", "arithmetic")
    }
    assert turns["digits"] == 0 and 1 < turns["higher_lower"] <= 3 and 1 < turns["arithmetic"] <= 3
    for row in found:
        # the learner scores every task's tokens at the temperature that sampled them
        assert row["mismatch/abs_dlogp_mean"] < 0.05
    assert found[0]["mismatch/abs_dlogp_mean"] < 1e-4
    assert {f"eval/{label}/greedy" for label in turns} <= found[-1].keys()
    assert found[-1]["ledger/score_errors"] == 0
