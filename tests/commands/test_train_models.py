"""Whole runs by model: a mixture of experts, hybrids, masked diffusion."""

import json

import pytest
import torch
from conftest import rows, without_times
from test_train_tasks import processes
from tiny_mixture import tiny_mixture

from benchmarks.models.model_families import FAMILIES, write_folder
from rlcore.cli import main
from rlcore.commands import start_checks
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

GRADER = "def grade(item, response):\n    return min(1.0, response.count('1') / 4)\n"


OTHERS = ("schedule.colocated=true", "environment=attempts", "learner.activation_cache_mib=64")


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.parametrize(
    "word",
    ["environment=none", *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_what_is_trained_is_what_the_engine_serves(word, command, tmp_path):
    """Every publication is checked tensor by tensor, and engine and learner agree on the log-probs
    of experts that training has changed."""
    folder, run_dir = tmp_path / "mixture", tmp_path / "run"
    tiny_mixture(folder, "0123456789+=", seed=3)
    (tmp_path / "mine.py").write_text(GRADER)
    data = [json.dumps({"question": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(data))
    run = command(
        "train",
        "experiment=quickstart",
        "model=path",
        f"model.path={folder}",
        "model.max_len=64",
        "task=file",
        f"task.args.train_path={tmp_path / 'rows.jsonl'}",
        f"task.args.grader={tmp_path / 'mine.py'}:grade",
        "schedule=on_policy",
        word,
        "schedule.steps=4",
        "schedule.groups_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=12",
        "learner.lr=3e-3",
        "learner.router_replay=true",
        "cluster.verify_weights=full",
        "cluster.object_store_mib=128",
        "evaluation.every=0",
        "evaluation.at_start=false",
        "logging=quiet",
        f"run_dir={run_dir}",
    )
    assert run.wait() == 0, run.text[-3000:]
    steps = rows(run_dir)
    assert [row["policy_version"] for row in steps] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 1e-3 for row in steps)
    assert max(row["mismatch/abs_dlogp_max"] for row in steps) < 1e-5
    # the same experts, to those whose scores tie in float32
    assert max(row["mismatch/routes_differ"] for row in steps) < 0.01

    out = tmp_path / "exported"
    assert command("export", f"run_dir={run_dir}", f"out={out}").wait() == 0
    _experts_moved(folder, out)


def _experts_moved(before, after):
    """The exported folder loads in transformers, and at least two experts of a layer moved."""
    from transformers import AutoModelForCausalLM

    old, new = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (before, after)
    )
    for layer, other in zip(old.model.layers, new.model.layers, strict=True):
        moved = (layer.mlp.experts.down_proj - other.mlp.experts.down_proj).abs().amax(dim=(1, 2))
        assert (moved > 1e-4).sum() >= 2


# Whole runs of hybrid models, in which most layers have a state: one learns digits, the same in
# both layouts of the learner's rows; others combine what only a whole run has.


WORDS = (
    "experiment=quickstart",
    "model=path",
    "model.max_len=64",
    "task.args.op=copy",
    "task.args.min_digits=1",
    "task.args.max_digits=1",
    "schedule=on_policy",
    "rollout.max_new_tokens=1",
    "learner.lr=3e-3",
    "learner.lr_schedule=constant",
    "cluster.verify_weights=full",
    "cluster.object_store_mib=128",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "logging=quiet",
)
# Nats between an engine's log-probs and the learner's. Two float32 passes differ by up to 2.5e-3 at
# single positions (docs/models.md), a wrong state by more than 0.1.
ROUNDING = 1e-2


@pytest.fixture
def train(command, tmp_path):
    def started(family, name, *words):
        folder = tmp_path / family
        if not folder.exists():
            write_folder(FAMILIES[family], folder)
        return command(
            "train", *WORDS, f"model.path={folder}", *words, f"run_dir={tmp_path / name}"
        )

    return started


def finished(run, folder):
    assert run.wait(1000.0) == 0, run.text[-3000:]
    found = rows(folder)
    assert max(row["mismatch/abs_dlogp_max"] for row in found) < ROUNDING
    return found


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_tiny_qwen3_5_learns_digits_in_both_layouts(train, tmp_path):
    batch = ("schedule.groups_per_step=16", "rollout.samples_per_prompt=16")
    found = {
        name: finished(train("qwen3_5", name, *batch, *words), tmp_path / name)
        for name, words in {
            "sorted": ("learner.layout=sorted", "schedule.steps=16"),
            "packed": ("learner.layout=packed", "schedule.steps=16"),
            "other": ("learner.layout=sorted", "schedule.steps=5", "seed=1"),
        }.items()
    }
    one, packed, other = found.values()
    rewards = [row["reward/mean"] for row in one]
    # one digit for every prompt would earn 0.1, and a random token less
    assert rewards[0] < 0.1 and sum(rewards[-5:]) / 5 > 0.4
    # before a step both layouts have seen the same tokens: they differ by rounding alone
    for name in ("grad_norm", "entropy", "reward/mean"):
        assert packed[0][name] == pytest.approx(one[0][name], rel=1e-5), name
    # Adam makes rounding larger, until a token is drawn otherwise: until then the layouts differ
    # less than a tenth of what two seeds do
    for name in ("grad_norm", "entropy"):
        apart, noise = (
            sum(abs(row[name] - its[name]) for row, its in zip(one[:5], rows_, strict=False))
            for rows_ in (packed, other)
        )
        assert apart < 0.1 * noise, (name, apart, noise)


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_two_engines_of_which_one_is_lost_take_deltas_of_merged_adapters(train, tmp_path):
    """On policy, so that log-probs differ by rounding alone; `test_hybrid_engines.py` updates
    engines while they sample."""
    words = (
        "schedule.groups_per_step=8",
        "schedule.steps=6",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=12",
        "algorithm.entropy_coef=0.1",  # a gradient without rewards
        "actor.bf16.count=2",
        "cluster.full_weights_every=3",
        "cluster.heartbeat_s=1",
        "learner.lora={}",
    )
    run = train("qwen3_5", "run", *words)
    run.wait_for(lambda: len(rows(tmp_path / "run")) >= 2, what="two steps")
    processes(run, "RolloutActor")[0].kill()
    found = finished(run, tmp_path / "run")
    assert [row["step"] for row in found] == list(range(1, 7))
    assert found[-1]["rollout/replacements"] == 1
    assert all(row["grad_norm"] > 0 for row in found)


# Whole runs of a masked-diffusion model: the diffusion engine, real DeepSpeed.


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
