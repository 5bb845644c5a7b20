"""`rlcore doctor run=DIR`: the rates that a run's own rows allow."""

import json

import pytest
from run_rows import recorded

from rlcore.cli import main
from rlcore.config.compose import load, to_yaml


@pytest.fixture
def run(tmp_path):
    """A folder with the rows of a recorded run, and a configuration of its schedule."""
    words = ["experiment=quickstart", f"run_dir={tmp_path}", "learner.lr=5e-5", "schedule=async"]
    config = load([*words, "schedule.max_staleness=8"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    def written(name):
        rows = recorded()[name]
        text = "".join(
            json.dumps({**r, "lr": r["lr"] * min(1, r["step"] / 3)}) + "\n" for r in rows
        )
        (tmp_path / "metrics.jsonl").write_text(text)
        return tmp_path

    return written


def test_a_lost_run_says_the_rate_that_would_have_held(run, capsys):
    folder = run("async")
    before = sorted(folder.iterdir())
    assert main(["doctor", f"run={folder}", "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"]["2"] == 7.5e-6 and found["staleness_at_lr"] == 0
    assert found["staleness_bound"] == 8 and found["lr"] == 5e-5 and found["bound"] == 0.5
    assert main(["doctor", f"run={folder}"]) == 0
    text = capsys.readouterr().out
    assert "learner.lr=5e-05 fits no late samples" in text
    assert "     2  7.5e-06\n" in text and "the most that this run allows" in text
    assert sorted(folder.iterdir()) == before


def test_a_run_on_fresh_samples_says_that_nothing_is_known(run, capsys):
    assert main(["doctor", f"run={run('on policy')}"]) == 0
    assert "no row has samples from before a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run=nowhere"], "run=nowhere holds no run"),
        (["run=nowhere", "learner.lr=1e-5"], "leave out learner.lr=1e-5"),
        (["run=nowhere", "start=false"], "leave out start=false"),
    ],
)
def test_other_words_are_refused(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
