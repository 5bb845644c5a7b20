"""The page of the agent quickstart: what is not run again, and what it says of the target."""

import contextlib
import json

from benchmarks.speed import agents


def run(kind, seed, **changes):
    return {
        "kind": kind,
        "seed": seed,
        "words": [],
        "machine": "2 cores",
        "seconds": 300.0,
        "start": 0.3,
        "end": 0.65,
        "greedy start": 0.1,
        "greedy end": 0.7,
        "best of several at the end": 0.27 if kind == "one turn" else None,
        "steps": 180,
        "sampled tokens": 1000,
        "episodes": 200,
        "turns at the end": 2.5,
        "staleness": 1,
        "failed scores": 0.0,
        "curve": [],
        **changes,
    }


def test_a_finished_run_is_kept_and_not_made_again(tmp_path, monkeypatch, capsys):
    made = []

    def measured(kind, seed, words):
        made.append((kind, seed))
        if len(made) == 3:
            raise KeyboardInterrupt
        return run(kind, seed)

    monkeypatch.setattr(agents, "measured", measured)
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["agents.py", "--seeds", "1", "2", "--page", str(page)])
    with contextlib.suppress(KeyboardInterrupt):
        agents.main()
    agents.main()
    every = [(kind, seed) for kind in agents.KINDS for seed in (1, 2)]
    assert made == [*every[:3], *every[2:]]
    lines = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    assert [(line["kind"], line["seed"]) for line in lines] == every
    assert agents.wanted(lines, [1, 2, 3], []) == [("several turns", 3), ("one turn", 3)]
    assert len(agents.wanted(lines, [1], ["learner.lr=1"])) == 2


def test_the_page_says_how_often_the_target_was_met():
    several = [run("several turns", 1), run("several turns", 2, seconds=500.0)]
    several.append(run("several turns", 3, end=0.5))
    text = agents.page_of([*several, run("one turn", 1, end=0.1)])
    assert "met by 1 of 3 runs with sampled guesses, by 2 with greedy ones" in text
    row = next(line for line in text.splitlines() if line.startswith("| one turn"))
    assert "| 0.1 |" in row and "0.27" in row
