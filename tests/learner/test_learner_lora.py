"""Adapters on the policy: what is published computes what was trained, and nothing but adapters moves."""

import numpy as np
import pytest
import torch
from learner_helpers import on_ranks, small_model
from lora_jobs import LORA, SEQUENCES, train_adapters
from safetensors.torch import load_file

from rlcore.errors import UserError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _logp(lm, prompt, response):
    logp = torch.log_softmax(lm(torch.tensor([[*prompt, *response]])).logits[0] / 0.8, -1)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(response)[:, None])[:, 0].detach().numpy()


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_merged_weights_are_the_adapter_model(model, tmp_path, world, stage):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = on_ranks(world, train_adapters, model, stage, str(tmp_path))[0]

    assert out["gradients"] and all(".lora_A." in n or ".lora_B." in n for n in out["gradients"])
    assert max(float(np.abs(g).max()) for n, g in out["gradients"].items() if ".lora_B." in n) > 1e-5
    changed = {n for n in out["before"] if not np.array_equal(out["before"][n], out["after"][n])}
    assert changed == {n for n in out["before"] if any(f".{t}.weight" in n for t in LORA["targets"])}

    # the published tensors, loaded into a plain model, score as the adapter model did
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    fresh = [_logp(lm, *s) for s in SEQUENCES]
    lm.load_state_dict({n: torch.from_numpy(w) for n, w in out["after"].items()}, strict=False)
    for mine, theirs, start in zip([_logp(lm, *s) for s in SEQUENCES], out["scores"], fresh):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
        assert np.abs(mine - start).max() > 1e-3

    # the exported adapter on the starting model is the exported merged model
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(np.array_equal(exported[n].numpy(), w) for n, w in out["after"].items())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    for sequence, theirs in zip(SEQUENCES, out["scores"]):
        np.testing.assert_allclose(_logp(adapted, *sequence), theirs, atol=2e-6)

    # a checkpoint holds adapters and their moments, nothing else, and continues exactly
    saved = load_file(tmp_path / "state" / "learner-00000.safetensors")
    assert saved and all(".lora_" in n for n in saved)
    assert all(np.array_equal(out["after"][n], out["resumed"][n]) for n in out["after"])
    assert out["norms"][0] == out["norms"][1]


def _unknown_target(rank, world, port, model):
    from rank_jobs import learner

    try:
        learner(rank, world, port, model, lora={**LORA, "targets": ["nothing"]})
    except UserError as e:
        return str(e)


def test_targets_that_match_nothing_are_refused(model):
    assert "learner.lora.targets=['nothing']" in on_ranks(1, _unknown_target, model)[0]
