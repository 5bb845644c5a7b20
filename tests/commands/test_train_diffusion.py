"""Whole runs of a masked-diffusion model: the diffusion engine, real DeepSpeed."""

import json

import pytest
from conftest import rows, without_times

from rlcore.cli import main
from rlcore.commands import start_checks
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

SMALL = (
    "experiment=diffusion",
    "model.fresh={hidden_size: 32, heads: 2, kv_heads: 2, head_dim: 16, layers: 2, "
    "intermediate_size: 64}",
    "model.warmup={steps: 60, batch_size: 32}",
    "task.args={min_digits: 1, max_digits: 2}",
    "rollout.max_new_tokens=4",
    "rollout.samples_per_prompt=4",
    "schedule.groups_per_step=8",
    "evaluation.prompts=8",
    "evaluation.every=2",
    "logging.wandb=disabled",
    "cluster.object_store_mib=128",
)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_a_masked_diffusion_run_trains_and_resumes_exactly(command, warm_cache, tmp_path):
    words = (
        "train",
        *SMALL,
        f"model.warmup.cache_dir={warm_cache}",
        "schedule.max_staleness=0",
        "learner.lr_warmup_steps=2",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = command(*words, f"run_dir={whole}", "schedule.steps=4", "learner.lr_decay_steps=4")
    assert first.wait() == 0, first.text[-3000:]
    found = rows(whole)
    assert [r["step"] for r in found] == [1, 2, 3, 4]
    for row in found:
        assert row["correction/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["mismatch/abs_dlogp_max"] < 1e-3
        assert row["estimate/token_variance"] >= 0
    assert sum(r["grad_norm"] for r in found) > 0
    assert found[-1]["eval/policy_version"] == 4
    second = command(*words, f"run_dir={parts}", "schedule.steps=2", "learner.lr_decay_steps=4")
    assert second.wait() == 0, second.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=4")
    assert third.wait() == 0, third.text[-3000:]
    # the last row of the stopped run reports its final publish and evaluation too
    again = rows(parts)
    assert [without_times(again[i]) for i in (0, 2, 3)] == [
        without_times(found[i]) for i in (0, 2, 3)
    ]


def test_the_paper_s_settings_for_llada_pass_a_dry_run(tmp_path, capsys, monkeypatch):
    """With a small folder of LLaDA's form in its place, and no look at the cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_checks, "check_cluster", lambda *args, **kwargs: None)
    shape = FreshModelSpec(hidden_size=32, layers=1, heads=2, kv_heads=2, head_dim=16)
    characters = "".join(map(chr, range(32, 127)))
    build_fresh_model(tmp_path / "m", characters, shape, seed=0, max_len=4096, masked=True)
    row = json.dumps({"question": "1+1", "answer": "so #### 2"})
    (tmp_path / "d.jsonl").write_text("\n".join([row] * 1400))
    data = [f"task.args.{part}_path={tmp_path}/d.jsonl" for part in ("train", "heldout")]
    words = ["experiment=paper/ais_llada", f"model.path={tmp_path}/m", *data, "run_dir=x"]
    assert main(["train", "dry_run=true", *words]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    for part in (
        "fp8 emulated",
        "4 x diffusion, 1 CPU and 1 GPU",
        "4 ranks of deepspeed",
        "ais: cap=5 delta=0.02 gamma=1.2 beta=1",
        "7700 steps of 12 prompts x 8 samples",
    ):
        assert part in shown, (part, shown)
