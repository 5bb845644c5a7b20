"""The table of peers.py: ratios within a round, a file that is continued, marks of the README."""

import json
from dataclasses import replace

import pytest

from benchmarks.peers import peer_loads, peers

WHO = {"TRL": 3.0, peers.ASYNC: 1.5, peers.ON_POLICY: 2.4}


def found(round_, who, step_s, busy=0.1, machine="two cores"):
    line = {"round": round_, "load": "short and even", "who": who, "step_s": step_s, "busy": busy}
    return line | {"tokens": 3700.0, "wait_s": 1.0, "learn_s": 1.2, "machine": machine}


class Fake:
    """A peer whose steps take the time that is given for each micro-batch."""

    name = "fake"

    def __init__(self, by_rows):
        self.by_rows = by_rows
        self.calls = []

    def run(self, job, steps, place):
        self.calls.append((job["rows"], steps))
        return {"step_s": [9.0, *[self.by_rows[job["rows"]]] * (steps - 1)], "version": "1"}


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


JOB = {"load": "short and even", "problems": [], "words": []}


def test_the_fastest_micro_batch_is_searched_once_and_used(tmp_path):
    load = peer_loads.LOADS[0]
    fake = Fake({8: 5.0, 16: 3.0, 32: 2.0, 64: 2.5, 128: 4.0, 256: 1.0})
    for _ in range(2):
        runs = peers.Runs(tmp_path / "runs.jsonl")
        peers.search(runs, load, JOB, fake, tmp_path, limit_s=1e9)
    # two in a row that are slower end it
    assert fake.calls == [(rows, 2) for rows in (8, 16, 32, 64, 128)]
    assert peers.best_rows(runs, load, JOB, fake) == 32
    few = replace(load, groups=4)  # a micro-batch is at most a step
    fake.calls.clear()
    peers.search(peers.Runs(tmp_path / "other.jsonl"), few, JOB, fake, tmp_path, limit_s=1e9)
    assert [rows for rows, _ in fake.calls] == [8, 16, 32]


def test_a_search_ends_when_its_time_is_over(tmp_path):
    fake = Fake(dict.fromkeys(peers.ROWS, 1.0))
    runs = peers.Runs(tmp_path / "runs.jsonl")
    peers.search(runs, peer_loads.LOADS[0], JOB, fake, tmp_path, limit_s=-1.0)
    assert fake.calls == []


def test_a_run_that_is_in_the_file_is_not_repeated(tmp_path):
    fake, load = Fake({64: 3.0}), peer_loads.LOADS[0]
    runs = peers.Runs(tmp_path / "runs.jsonl")
    digest = peers.digest(JOB)
    for who in (peers.ASYNC, peers.ON_POLICY):  # rlcore's own are there
        runs.add({**found(0, who, 1.0), "job": digest})
    runs.add({"tried": 64, "load": load.name, "who": "fake", "job": digest, "step_s": 3.0})
    for _ in range(2):
        peers.measure(peers.Runs(tmp_path / "runs.jsonl"), 0, load, JOB, [fake], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    # once, without its first step
    assert fake.calls == [(64, load.steps["peer"])]
    assert lines[-1]["step_s"] == 3.0 and lines[-1]["rows"] == 64
    assert [f["who"] for f in peers.Runs(tmp_path / "runs.jsonl").of({load.name: JOB})] == [
        peers.ASYNC,
        peers.ON_POLICY,
        "fake",
    ]


def test_tables_of_other_machines_are_kept_and_of_the_same_one_replaced():
    said = {
        "machine": "old cores",
        "load": "long-tailed",
        "said": {"TRL, s a step": "12.15", "rlcore, s a step": "2.27", "times": "5.35"},
        "parts": {"a": 1},
    }
    before = [said, *(found(0, who, 9 * s) for who, s in WHO.items())]
    after = peers.merged(before, [found(0, who, s) for who, s in WHO.items()])
    text = peers.page(after, ["TRL"])
    assert text.index("## old cores") < text.index("## two cores")
    table = peers.short_table(after, ["TRL"]).splitlines()
    assert len(table) == 4 and table[2].endswith("| 5.35 |")
    assert table[3].endswith("| 3.00 | 1.50 | 2.00 |")


def test_loads_differ_in_what_they_are_called_for(tmp_path, monkeypatch):
    loads = {load.key: load for load in peer_loads.LOADS}
    assert len(loads) == len(peer_loads.LOADS) == len({load.name for load in peer_loads.LOADS})
    job = peer_loads.job_of(loads["prompts"], tmp_path, [])
    assert {len(p["prompt"]) for p in job["problems"]} == {peer_loads.LONG_PROMPT}
    assert len({p["prompt"] for p in job["problems"]}) == len(job["problems"])
    config = peer_loads.composed(loads["prompts"], job["words"])
    assert config.tasks["file"].args["train_path"].endswith("long-prompts.jsonl")
    assert job["lora"] is None
    whole, adapted = (
        peer_loads.composed(loads[key], loads[key].words).learner.lora
        for key in ("whole", "adapter")
    )
    assert whole is None and adapted is not None


def test_only_what_is_between_the_marks_is_replaced(tmp_path):
    page = tmp_path / "figures.md"
    page.write_text(f"above\n{peers.BEGIN}\nold\n{peers.END}\nbelow\n")
    peers.put(page, "new")
    assert page.read_text() == f"above\n{peers.BEGIN}\n\nnew\n\n{peers.END}\nbelow\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no"):
        peers.put(page, "new")
