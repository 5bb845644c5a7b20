"""Adapters on the policy: what is published computes what was trained, and nothing but adapters
moves."""

import numpy as np
import pytest
import torch
from learner_helpers import on_ranks, small_model
from lora_jobs import LORA, PAIRS, published_adapter, published_bfloat16, train_adapters
from safetensors.torch import load_file

from rlcore.errors import UserError
from rlcore.weights.adapters import AdapterShape, adapter_shapes, factor_names

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _logp(lm, prompt, response):
    logp = torch.log_softmax(lm(torch.tensor([[*prompt, *response]])).logits[0] / 0.8, -1)[
        len(prompt) - 1 : -1
    ]
    return logp.gather(1, torch.tensor(response)[:, None])[:, 0].detach().numpy()


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_merged_weights_are_the_adapter_model(model, tmp_path, world, stage):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = on_ranks(world, train_adapters, model, stage, str(tmp_path))[0]

    assert out["gradients"] and all(".lora_A." in n or ".lora_B." in n for n in out["gradients"])
    assert (
        max(float(np.abs(g).max()) for n, g in out["gradients"].items() if ".lora_B." in n) > 1e-5
    )
    changed = {n for n in out["before"] if not np.array_equal(out["before"][n], out["after"][n])}
    assert changed == {
        n for n in out["before"] if any(f".{t}.weight" in n for t in LORA["targets"])
    }

    # the published tensors, loaded into a plain model, score as the adapter model did
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    fresh = [_logp(lm, *s) for s in PAIRS]
    lm.load_state_dict({n: torch.from_numpy(w) for n, w in out["after"].items()}, strict=False)
    for mine, theirs, start in zip([_logp(lm, *s) for s in PAIRS], out["scores"], fresh):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
        assert np.abs(mine - start).max() > 1e-3

    # the exported adapter on the starting model is the exported merged model
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(np.array_equal(exported[n].numpy(), w) for n, w in out["after"].items())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    for sequence, theirs in zip(PAIRS, out["scores"]):
        np.testing.assert_allclose(_logp(adapted, *sequence), theirs, atol=2e-6)

    # a checkpoint holds adapters and their moments, nothing else, and continues exactly
    saved = load_file(tmp_path / "state" / "learner-00000-00000.safetensors")
    assert saved and all(".lora_" in n for n in saved)
    assert all(np.array_equal(out["after"][n], out["resumed"][n]) for n in out["after"])
    assert out["norms"][0] == out["norms"][1]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3)])
def test_an_adapter_published_alone_is_what_the_merged_weights_gained(model, world, stage):
    out = on_ranks(world, published_adapter, model, stage, "float32")[0]
    base = load_file(f"{model}/model.safetensors")
    adapter = AdapterShape(LORA["rank"], tuple(LORA["targets"]))
    # what an actor works out from its model's folder alone
    expected = adapter_shapes({n: tuple(w.shape) for n, w in base.items()}, adapter)
    assert out["adapter shapes"] == expected
    assert {n: w.shape for n, w in out["adapter"].items()} == expected
    for kind in ("adapter", "merged"):
        assert list(out[kind]) == list(out[f"{kind} shapes"])
        assert out[f"{kind} some"] == list(out[kind])[1:3]
    changed = 0
    for name, merged in out["merged"].items():
        a, b = (out["adapter"].get(n) for n in factor_names(name))
        gained = 0.0 if a is None else b @ a
        np.testing.assert_allclose(merged, base[name].numpy() + gained, atol=1e-6)
        changed += a is not None and np.abs(gained).max() > 1e-3
    assert changed == len(expected) // 2
    for mine, other in zip(out["adapter scores"], out["merged scores"]):
        np.testing.assert_allclose(mine, other, atol=2e-6)


@pytest.mark.parametrize(("world", "stage"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3)])
def test_in_bfloat16_an_adapter_published_alone_is_not_rounded_into_the_weights(
    model, world, stage
):
    """The learner then computes as the engine does: the product of the adapter beside that of the
    weights."""
    from transformers import AutoModelForCausalLM

    out = on_ranks(world, published_adapter, model, stage, "bfloat16")[0]
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    factors = {n: torch.from_numpy(w).bfloat16() for n, w in out["adapter"].items()}
    for name, layer in lm.named_modules():
        a, b = (factors.get(n) for n in factor_names(f"{name}.weight"))
        if a is not None:
            layer.register_forward_hook(lambda _, args, y, a=a, b=b: y + (args[0] @ a.t() @ b.t()))
    for (prompt, answer), theirs in zip(PAIRS, out["adapter scores"]):
        with torch.no_grad():
            hidden = lm.base_model(torch.tensor([[*prompt, *answer]])).last_hidden_state[0]
            logits = (hidden @ lm.lm_head.weight.t()).float() / 0.8
        logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        mine = logp.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(mine, theirs, atol=2e-2)


@pytest.mark.parametrize(("world", "stage"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3)])
def test_in_bfloat16_the_learner_s_policy_is_the_published_one(model, world, stage):
    """The published sum is rounded, and a small update is lost in it: the learner computes with the
    same sum."""
    from transformers import AutoModelForCausalLM

    out = on_ranks(world, published_bfloat16, model, stage)[0]
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    start = {n: w.float().numpy() for n, w in lm.state_dict().items()}
    assert any(not np.array_equal(out["weights"][n], start[n]) for n in out["weights"])
    state = {n: torch.from_numpy(w).bfloat16() for n, w in out["weights"].items()}
    lm.load_state_dict(state, strict=False)
    for pair, theirs in zip(PAIRS, out["scores"]):
        prompt, answer = pair
        with torch.no_grad():
            hidden = lm.base_model(torch.tensor([[*prompt, *answer]])).last_hidden_state[0]
            logits = (hidden @ lm.lm_head.weight.t()).float() / 0.8
        logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        mine = logp.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(mine, theirs, atol=2e-3)


def _unknown_target(rank, world, port, model):
    from rank_jobs import learner

    try:
        learner(rank, world, port, model, lora={**LORA, "targets": ["nothing"]})
    except UserError as e:
        return str(e)


def test_targets_that_match_nothing_are_refused(model):
    assert "learner.lora.targets=['nothing']" in on_ranks(1, _unknown_target, model)[0]
