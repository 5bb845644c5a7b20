"""`rlcore plan measure` as a user calls it, on the directory of a run."""

import json

import pytest

from rlcore.advisor.planner.specs import Rates
from rlcore.cli import main
from rlcore.config.compose import load, to_yaml

ROW = {
    "train/tokens": 512,
    "train/sequences": 64,
    "train/sequence_positions": 512 + 64 * 6,
    "response_length/mean": 8.0,
    "response_length/max": 15,
    "response_length/truncated_share": 0.0,
    "time/learn_s": 0.5,
    "time/learner_ref_s": 0.01,
    "time/wait_data_s": 0.2,
    "time/step_s": 0.9,
    "time/checkpoint_s": 0.0,
    "time/publish_s": 0.15,
    "time/publish_receive_s": 0.01,
    "time/publish_stop_s": 0.04,
    "time/publish_drain_s": 0.0,
    "engine/bf16/step_s": 0.004,
    "engine/bf16/request_s": 1e-5,
    "engine/bf16/context_s": 0.0,
    "engine/bf16/prompt_s": 2e-6,
}


def run_dir(folder, *words):
    """A run of twelve equal steps."""
    folder.mkdir()
    config = load(["experiment=quickstart", f"run_dir={folder}", *words])
    (folder / "config.yaml").write_text(to_yaml(config))
    rows = [{"step": step, **ROW} for step in range(1, 13)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_rates_of_a_run_are_written_for_the_planner(tmp_path, capsys):
    run, out = run_dir(tmp_path / "a"), tmp_path / "rates.json"
    assert main(["plan", "measure", f"runs={run}", f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert "engine step    4 ms, 10 us a request" in said and "give a second run" in said
    rates = Rates.model_validate_json(out.read_text())
    assert rates.lengths.prompt == 7 and rates.actor.max_running == 512
    assert 1e-6 < rates.grade_s < 0.05  # the graders were run
    quick = ["experiment=quickstart", "run_dir=unused", "schedule.groups_per_step=8"]
    assert main(["plan", *quick, f"rates={out}"]) == 0


@pytest.mark.parametrize("words, sentence", [
    (["out=x"], "runs= is missing"),
    (["runs=x"], "out= is missing"),
    (["runs=/nowhere", "out=x"], "runs=/nowhere is not a run directory"),
    (["gpu=h100"], "gpu=h100 is not a key of rlcore plan measure"),
])  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert main(["plan", "measure", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_with_several_kinds_of_actors_is_refused(tmp_path, capsys):
    run = run_dir(tmp_path / "a", "actor=[bf16,fp8]")
    assert main(["plan", "measure", f"runs={run}", f"out={tmp_path / 'r'}"]) == 2
    assert "has actors of several kinds (bf16, fp8)" in capsys.readouterr().err
