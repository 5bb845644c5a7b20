"""The run directory where a command names none: a new one under runs/, or the newest run there."""

import json
import os
import re

import pytest

from rlcore.cli import main
from rlcore.config.compose import load, to_yaml


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Makes runs under runs/ of the working directory, each newer than the one before."""
    monkeypatch.chdir(tmp_path)
    made = []

    def make(name):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        file = folder / "config.yaml"
        file.write_text(to_yaml(load([f"run_dir={folder}", "logging.wandb=disabled"])))
        made.append(folder)
        os.utime(file, (len(made), len(made)))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.25}) + "\n")
        return folder

    return make


def test_scale_report_and_watch_take_the_newest_run_and_say_so(runs, capsys):
    runs("old")
    newest = runs("sweep/seed-1")
    for words, code in ((["scale", "actor.bf16.count=2"], 2), (["report"], 0)):
        assert main(words) == code
        said = capsys.readouterr().err
        assert "run_dir=runs/sweep/seed-1 (the newest run)" in said
        assert ("no run is going on there" in said) == (code == 2)
    assert main(["watch", "once=true"]) == 0
    assert "run_dir=runs/sweep/seed-1 (the newest run)" in capsys.readouterr().err
    assert (newest / "report.html").is_file()
    older = runs("named").parent / "old"
    assert main(["scale", f"run_dir={older}", "actor.bf16.count=3"]) == 2
    said = capsys.readouterr().err
    assert "newest" not in said and f"run_dir={older}" in said


@pytest.mark.parametrize("words", [["eval"], ["export", "out=there"]])
def test_eval_and_export_take_the_newest_run(runs, words, capsys):
    runs("old")
    newest = runs("new")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"run_dir={newest} holds no valid checkpoint" in said and "(the newest run)" in said


def test_a_checkpoint_names_its_run(runs, capsys):
    checkpoint = runs("old") / "checkpoints" / "step_1"
    runs("new")
    assert main(["eval", f"checkpoint={checkpoint}"]) == 2
    said = capsys.readouterr().err
    assert "runs/old (of the checkpoint)" in said and "new" not in said


@pytest.mark.parametrize("verb", ["eval", "watch", "report", "scale"])
def test_without_a_run_the_key_is_asked_for(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([verb, *(["actor.bf16.count=1"] if verb == "scale" else [])]) == 2
    assert f"runs/ holds no run for rlcore {verb}" in capsys.readouterr().err


def test_a_new_run_is_named_by_its_experiment_and_the_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=quickstart", "dry_run=true"]) == 0
    shown = capsys.readouterr()
    folder = re.search(r"run_dir=(runs/quickstart-\d{8}-\d{6})\n", shown.err).group(1)
    assert f"{tmp_path}/{folder}/config.yaml" in shown.out and not (tmp_path / "runs").exists()
    assert main(["train", "experiment=quickstart", "resume=auto"]) == 2
    assert "run_dir= is missing: resume=auto" in capsys.readouterr().err
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.yaml").write_text(
        "defaults: [{model: tiny}, {task: digits}, {actor: [bf16]}, _self_]\nrun_dir: mine\n"
    )
    assert main(["train", f"config_dir={own}", "dry_run=true"]) == 0
    assert f"{tmp_path}/mine/config.yaml" in capsys.readouterr().out
