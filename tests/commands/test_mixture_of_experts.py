"""A whole run of a small mixture of experts: trained with the experts that its actor chose,
published after every step, exported."""

import json

import pytest
import torch
from conftest import rows

from rlcore.testing.experts import tiny_mixture

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

GRADER = "def grade(item, response):\n    return min(1.0, response.count('1') / 4)\n"


OTHERS = ("schedule.colocated=true", "environment=attempts", "learner.activation_cache_mib=64")


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
