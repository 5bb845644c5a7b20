"""A whole run of a hybrid model, of which three layers in four have a state: it learns digits, and
what it measures does not depend on the layout of the learner's rows."""

import pytest
from conftest import rows

from benchmarks.models.model_families import FAMILIES, write_folder

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.nightly]


@pytest.mark.timeout(3000)
def test_a_tiny_qwen3_5_learns_digits_in_both_layouts(command, tmp_path):
    write_folder(FAMILIES["qwen3_5"], tmp_path / "hybrid")
    found = {}
    for layout in ("sorted", "packed"):
        run = command(
            "train",
            "experiment=quickstart",
            "model=path",
            f"model.path={tmp_path / 'hybrid'}",
            "model.max_len=64",
            "task.args.op=copy",
            "task.args.min_digits=1",
            "task.args.max_digits=1",
            "schedule=on_policy",
            "schedule.steps=16",
            "schedule.groups_per_step=16",
            "rollout.samples_per_prompt=16",
            "rollout.max_new_tokens=1",
            "learner.lr=3e-3",
            "learner.lr_schedule=constant",
            f"learner.layout={layout}",
            "actor.bf16.dtype=float32",
            "cluster.verify_weights=full",
            "cluster.object_store_mib=128",
            "evaluation.every=0",
            "evaluation.at_start=false",
            "logging=quiet",
            f"run_dir={tmp_path / layout}",
        )
        assert run.wait(1000.0) == 0, run.text[-3000:]
        found[layout] = rows(tmp_path / layout)
        assert max(row["mismatch/abs_dlogp_max"] for row in found[layout]) < 2e-4
    one, other = found["sorted"], found["packed"]
    rewards = [[row["reward/mean"] for row in steps] for steps in (one, other)]
    assert sum(rewards[0][-5:]) / 5 > 0.4 > 10 * rewards[0][0]
    # rounding grows by steps of Adam, until a token is drawn otherwise: after ten steps here
    assert rewards[1][:8] == pytest.approx(rewards[0][:8], abs=0.01)
    for name in ("grad_norm", "entropy"):
        assert other[0][name] == pytest.approx(one[0][name], rel=1e-5)
        for row, its in zip(one[:5], other[:5], strict=True):
            assert its[name] == pytest.approx(row[name], rel=1e-2), (row["step"], name)
