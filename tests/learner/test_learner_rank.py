"""One learner rank or two, on real DeepSpeed: what a step computes, refuses and publishes."""

import math

import numpy as np
import pytest
import rank_jobs as jobs
import torch
from learner_helpers import make_groups, on_ranks, small_model

from rlcore.errors import UserError

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def test_gradient_equals_plain_torch(model):
    from transformers import AutoModelForCausalLM

    gradients, norm = on_ranks(1, jobs.plain_gradient, model)[0]
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    groups = make_groups(5)
    tokens = sum(g.tokens for g in groups)
    loss = torch.zeros(())
    for g in groups:
        mean = np.mean([e.score.reward for e in g.episodes])
        for e in g.episodes:
            t = e.parts[0]
            logp = torch.log_softmax(lm(torch.tensor(t.token_ids)[None]).logits[0] / 0.8, -1)
            targets = torch.tensor(t.sampled_ids)[:, None].long()
            chosen = logp[len(t.prompt_ids) - 1 : -1].gather(1, targets).sum()
            loss = loss - float(e.score.reward - mean) * chosen / tokens
    loss.backward()
    plain = {name: p.grad.numpy() for name, p in lm.named_parameters()}
    assert gradients.keys() == plain.keys()
    for name in plain:
        np.testing.assert_allclose(gradients[name], plain[name], atol=2e-6, rtol=1e-4)
    assert norm > 0.05


@pytest.mark.parametrize("world", [1, 2])
def test_bad_numbers_and_odd_shares(model, world):
    for out in on_ranks(world, jobs.oddities, model):
        row = out["nan_logp_inf"]
        assert row["mismatch/nonfinite_share"] == pytest.approx(1 / out["tokens"])
        assert row["correction/kept_share"] == pytest.approx(1 - 1 / out["tokens"])
        assert all(map(math.isfinite, row.values()))
        assert out["empty_share"]["train/sequences"] == 9 * (world if world == 1 else 1)
        assert out["empty_share"]["grad_norm"] > 0
        assert out["nothing_left"]["grad_norm"] == 0 and out["nothing_left"]["loss/policy"] == 0
        assert "optimizer step 3 was not taken" in out["nan_policy"] and "nan" in out["nan_policy"]
        assert out["unchanged"] and out["steps"] == 3


def test_p_ref_from_the_differentiated_pass_changes_nothing(model):
    (weights, row), (again, its_row) = on_ranks(1, jobs.one_pass_and_two, model)[0]
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    assert row.keys() == its_row.keys()
    assert all(row[key] == pytest.approx(its_row[key], abs=1e-6) for key in row)


def test_metrics_by_kind_are_those_of_a_probe_of_each_kind(model):
    mixed, probes = on_ranks(1, jobs.kinds_and_probes, model)[0]
    for kind, probe in probes.items():
        own = {n.removesuffix(f"@{kind}"): v for n, v in mixed.items() if n.endswith(f"@{kind}")}
        assert {"mismatch/ratio_p5", "mismatch/ess", "correction/kept_share"} <= own.keys()
        assert {n: probe[n] for n in own} == pytest.approx(own, rel=1e-6, abs=1e-9), kind
    fp8, bf16 = (probes[kind]["mismatch/kl_k3"] for kind in ("fp8", "bf16"))
    assert fp8 > 2 * bf16 and bf16 < mixed["mismatch/kl_k3"] < fp8


def test_matched_distributions_make_every_correction_the_identity(model):
    results = on_ranks(1, jobs.identity, model)[0]
    plain, row = results.pop("none")
    assert row["mismatch/abs_dlogp_max"] == 0.0 and row["grad_norm"] > 0.05
    cut, its_row = results.pop("jackpot cut")
    for name, (weights, row) in results.items():
        assert row["correction/kept_share"] == 1.0, name
        assert all(np.array_equal(weights[n], plain[n]) for n in plain), name
    # dropping the tail may cost what lies in it, and the run says how much that was
    assert 0 < its_row["correction/jackpot/dropped_mass"] < 1
    assert its_row["correction/jackpot/z_approx"] == pytest.approx(
        1 - its_row["correction/jackpot/dropped_mass"], abs=1e-6
    )
    assert any(not np.array_equal(cut[n], plain[n]) for n in plain)


def test_supervised_steps_learn_and_the_export_is_a_model(model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, other = on_ranks(2, jobs.learn_to_copy, model, str(tmp_path / "out"))
    assert out["losses"] == other["losses"]
    assert out["losses"][-1] < 0.15 * out["losses"][0]
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 1
    logp = torch.log_softmax(lm(torch.tensor([[5, 7, 14, 5, 7]])).logits[0], -1)
    expected = logp[2:].gather(1, torch.tensor([[5], [7], [1]]))[:, 0]
    np.testing.assert_allclose(out["scores"][0], expected.detach().numpy(), atol=1e-5)
    assert expected.exp().min() > 0.5
    assert set(out["bf16"].values()) == {"torch.bfloat16"} and "lm_head.weight" not in out["bf16"]
    assert not other["bf16"]  # rank 0 publishes


def test_bfloat16_accumulates_in_float32_at_every_sharded_stage(model):
    one = on_ranks(1, jobs.bfloat16, model)[0]
    two = on_ranks(2, jobs.bfloat16, model)[0]
    _, _, weights = one[1]
    for out in (one, two):
        for stage, (whole, split, its_weights) in out.items():
            assert whole == pytest.approx(split, rel=0.02), stage
            assert max(float(np.abs(its_weights[n] - weights[n]).max()) for n in weights) < 0.01


def _refuse(rank, world, port, model):
    messages = []
    for over in ({"model": "/nowhere"}, {"engine": "nothing"}):
        try:
            jobs.learner(rank, world, port, **({"model": model} | over))
        except UserError as e:
            messages.append(str(e))
    return messages


def test_refusals_name_the_key(model):
    messages = on_ranks(1, _refuse, model)[0]
    keys = ["model.path=/nowhere", "learner.engine=nothing"]
    assert [key in message for key, message in zip(keys, messages)] == [True] * 2, messages
