"""The table of `make demo` over several seeds: what counts as a gain, what is not run again."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.speed import demo

RUN = {
    "steps": 60,
    "greedy before": 0.2,
    "greedy after": 0.6,
    "sampled before": 0.1,
    "sampled after": 0.5,
    "fetch seconds": 15.2,
    "seconds": 1200.4,
    "memory GiB": 7.31,
}


def test_a_gain_is_counted_in_its_standard_errors():
    # two shares of 0.5: a standard error of sqrt(2 * 0.25 / 200) = 0.05
    assert demo.gain_in_errors(0.4, 0.6, 240) == pytest.approx(0.2 / 0.044721, rel=1e-3)
    assert demo.gain_in_errors(0.5, 0.5, 256) == 0
    assert 0 < demo.gain_in_errors(0.0, 1.0, 4) < 10  # no spread of their own, and yet few answers


def test_a_seed_that_has_a_line_is_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []

    def one_run(seed, folder, words):
        ran.append(seed)
        return {"seed": seed, **RUN}

    monkeypatch.setattr(demo, "one_run", one_run)
    (tmp_path / "runs.jsonl").write_text(json.dumps({"seed": 1, **RUN}) + "\n")
    monkeypatch.setattr("sys.argv", ["demo.py", "--folder", str(tmp_path)])
    demo.main()
    demo.main()
    assert ran == [0, 2]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in table[-3:]] == ["| 0", "| 1", "| 2"]
    assert "0.200 to 0.600" in table[-1]


def test_the_script_counts_the_prompts_that_the_experiment_evaluates():
    experiments = Path(__file__).parents[2] / "configs" / "experiment"
    config = yaml.safe_load((experiments / "demo.yaml").read_text())
    assert config["evaluation"]["prompts"] == demo.PROMPTS
