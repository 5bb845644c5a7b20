"""DistillSparse on real ranks: phi learns, theta is as without it, and theta + phi is published."""

import json

import numpy as np
import pytest
from distill_jobs import RULE, distill_once, distill_only, score_sparse, train_sparse
from learner_helpers import on_ranks, small_model
from safetensors.numpy import load_file

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _same(a, b):
    return {n for n in a if np.array_equal(a[n], b[n])}


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2)])
def test_the_copy_is_theta_plus_phi_and_theta_is_untouched_by_it(model, tmp_path, world, stage):
    out = on_ranks(world, distill_once, model, stage, str(tmp_path))[0]
    assert _same(out["plain"], out["policy"]) == set(out["plain"])  # to the bit
    adapted = {n for n in out["policy"] if any(t in n for t in ("q_proj", "v_proj", "down_proj"))}
    assert adapted and set(out["policy"]) - _same(out["policy"], out["copy"]) == adapted
    assert _same(out["copy"], out["resumed"]) == set(out["copy"])
    row = out["rows"][1]
    assert row["distill/grad_norm"] > 1e-4 and row["loss/distill_kl"] != 0.0
    assert np.abs(out["dense"][0] - out["sparse"][0]).max() > 1e-3

    # both exports open as plain models: one attends densely, the other by the rule
    exported = tmp_path / "export"
    for mine, theirs in zip(on_ranks(1, score_sparse, str(exported), None)[0], out["dense"]):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
    for mine, theirs in zip(
        on_ranks(1, score_sparse, str(exported / "sparse"), RULE)[0], out["sparse"]
    ):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
    recorded = json.loads((exported / "sparse" / "rlcore.json").read_text())["sparse"]
    assert recorded == RULE.model_dump() and not (exported / "rlcore.json").exists()
    adapter = load_file(exported / "sparse" / "adapter" / "adapter_model.safetensors")
    assert adapter and all(".lora_" in n for n in adapter)


def test_one_rank_and_two_take_the_same_step(model, tmp_path):
    one = on_ranks(1, distill_once, model, 0, str(tmp_path / "one"))[0]
    two = on_ranks(2, distill_once, model, 0, str(tmp_path / "two"))[0]
    for key in (
        "loss/sparse_policy",
        "loss/distill_kl",
        "distill/grad_norm",
        "distill/actor_abs_dlogp_mean",
    ):
        assert [r[key] for r in one["rows"]] == pytest.approx(
            [r[key] for r in two["rows"]], rel=2e-3, abs=1e-6
        ), key


def test_every_estimator_pulls_the_copy_to_the_policy(model):
    rows = on_ranks(1, distill_only, model)[0]
    for kl in ("full", "topk"):
        values = [r["loss/distill_kl"] for r in rows[kl]]
        assert values[-1] < 0.5 * values[0], (kl, values)
    assert rows["topk"][0]["loss/distill_kl"] <= rows["full"][0]["loss/distill_kl"] + 1e-6
    # k1 and k3 see the same gradient, whatever value they report
    assert rows["k1"][0]["distill/grad_norm"] == pytest.approx(
        rows["k3"][0]["distill/grad_norm"], rel=1e-5
    )
    assert rows["k1"][0]["distill/grad_norm"] > 1e-4
    assert all(abs(r["loss/sparse_policy"]) < 1e-6 for r in rows["full"])


def test_the_policy_itself_can_be_trained_sparsely(model):
    out = on_ranks(1, train_sparse, model)[0]
    assert out["row"]["grad_norm"] > 0.01
    assert abs(out["row"]["loss/kl"]) < 1e-9  # the starting policy attends sparsely too
    assert out["row"]["mismatch/abs_dlogp_mean"] != pytest.approx(
        out["dense"]["mismatch/abs_dlogp_mean"], rel=1e-4
    )
