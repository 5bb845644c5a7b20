"""The table of peers.py: ratios within a round, a file that is continued, marks of the README."""

import json

import peers
import pytest

WHO = {"TRL": 3.0, peers.ASYNC: 1.5, peers.ON_POLICY: 2.4}


def found(round_, who, step_s, busy=0.1):
    line = {"round": round_, "load": "short and even", "who": who, "step_s": step_s, "busy": busy}
    return line | {"tokens": 3700.0, "wait_s": 1.0, "learn_s": 1.2}


def test_a_ratio_is_that_of_one_round():
    # the machine is twice as slow in the second round: both slow down, and the ratio stays
    lines = [found(r, who, s * (1 + r)) for r in range(2) for who, s in WHO.items()]
    row = peers.short_table(lines, ["TRL"]).splitlines()[-1]
    assert row.endswith("| 4.50 (3.00 to 6.00) | 2.25 (1.50 to 3.00) | 2.00 (2.00 to 2.00) |")


def test_the_limit_is_the_larger_of_engine_and_learner_alone():
    lines = [found(0, who, s) for who, s in WHO.items()]
    row = peers.details(lines, "short and even", ["TRL"])
    assert (row["limit"], row["limit / asynchronous"], row["times faster"]) == (
        "1.20",
        "0.80",
        "1.60",
    )


@pytest.mark.parametrize("busy, valid", [(0.2, True), (8.0, False)])
def test_figures_of_a_busy_machine_are_called_that(busy, valid):
    text = peers.page([found(0, who, s, busy) for who, s in WHO.items()], ["TRL"])
    assert ("these figures do not count" in text) is not valid


def test_a_run_that_is_in_the_file_is_not_repeated(tmp_path):
    calls = []

    class Fake:
        name = "fake"

        def run(self, job, steps, place):
            calls.append(steps)
            return {"step_s": [9.0, 2.0, 4.0], "tokens": [1, 2, 2], "version": "1"}

    load, job = peers.LOADS[0], {"load": "short and even", "problems": [], "words": []}
    runs = peers.Runs(tmp_path / "runs.jsonl")
    for who in (peers.ASYNC, peers.ON_POLICY):  # rlcore's own are there
        runs.add({**found(0, who, 1.0), "job": peers.digest(job)})
    for _ in range(2):
        peers.measure(peers.Runs(tmp_path / "runs.jsonl"), 0, load, job, [Fake()], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    # once, without its first step
    assert calls == [load.steps["peer"]] and lines[-1]["step_s"] == 3.0


def test_only_what_is_between_the_marks_is_replaced(tmp_path):
    page = tmp_path / "figures.md"
    page.write_text(f"above\n{peers.BEGIN}\nold\n{peers.END}\nbelow\n")
    peers.put(page, "new")
    assert page.read_text() == f"above\n{peers.BEGIN}\n\nnew\n\n{peers.END}\nbelow\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no"):
        peers.put(page, "new")
