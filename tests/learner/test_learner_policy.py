"""What the learner reads of a model folder."""

import json

import pytest
import torch
from learner_helpers import PlainEngine
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rlcore.errors import UserError
from rlcore.learner.policy import FrozenPolicy, Policy, load_causal_lm
from rlcore.learner.specs import LearnerSpec
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

SPEC = FreshModelSpec(
    hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=32
)
IDS = torch.tensor([[3, 4, 3, 3, 4]])


def test_weights_that_would_have_to_be_unpickled_are_not_read(tmp_path):
    folder = build_fresh_model(tmp_path, "01", SPEC, seed=0, max_len=32)
    load_causal_lm(folder, "float32", "sdpa")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.path=.* holds no loadable model"):
        load_causal_lm(folder, "float32", "sdpa")


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (
            "gpt_oss",
            {"num_local_experts": 2},
            "learner.attention=sdpa: GptOss.* does not support an",
        ),
        ("t5gemma", {}, "Unrecognized configuration class"),
        ("gemma2", {"final_logit_softcapping": None}, r"attn_logit_softcapping=50\)"),
        ("gemma2", {}, "LM head has final_logit_softcapping"),
        ("granite", {"logits_scaling": 8.0}, "LM head has logits_scaling"),
        ("granite", {"logits_scaling": 1.0}, None),
    ],
)
def test_models_that_the_learner_would_compute_otherwise_are_refused(tmp_path, kind, options, why):
    config = AutoConfig.for_model(kind, **(SIZES | options))
    if kind == "t5gemma":
        config.save_pretrained(tmp_path)
    else:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if why is None:
        load_causal_lm(tmp_path, "float32", "sdpa")
        return
    with pytest.raises(UserError, match=f"model.path={tmp_path} .*{why}") as refused:
        load_causal_lm(tmp_path, "float32", "sdpa")
    assert "http" not in str(refused.value)


def _with_attention_dropout(folder):
    build_fresh_model(folder, "01", SPEC, seed=0, max_len=32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))


def _gpt2(folder):
    shape = {"vocab_size": 8, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, attn_pdrop=0.5, embd_pdrop=0.5)).save_pretrained(folder)


@pytest.mark.parametrize("make", [_with_attention_dropout, _gpt2])
def test_two_passes_over_one_policy_agree_whatever_dropout_its_folder_asks_for(tmp_path, make):
    make(tmp_path)
    lm = load_causal_lm(tmp_path, "float32", "sdpa").train()
    assert torch.equal(lm(IDS).logits, lm(IDS).logits)


def test_a_folder_with_other_names_is_read_whole_where_it_would_be_divided(tmp_path, caplog):
    folder = build_fresh_model(tmp_path, "01", SPEC, seed=0, max_len=32)
    expected = load_causal_lm(folder, "float32", "sdpa")
    weights = load_file(folder / "model.safetensors")
    plain = {name.removeprefix("model."): w for name, w in weights.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    asked = []
    with caplog.at_level("INFO", logger="rlcore.learner.policy"):
        lm = load_causal_lm(folder, "float32", "sdpa", split=asked.append)
    assert "reads the whole model in every rank" in caplog.text and not asked
    assert torch.equal(lm(IDS).logits, expected(IDS).logits)


def test_an_engine_that_divides_nothing_holds_the_frozen_policy_whole(tmp_path):
    folder = build_fresh_model(tmp_path, "01", SPEC, seed=0, max_len=32)
    policy = Policy(load_causal_lm(folder, "float32", "sdpa"))
    assert PlainEngine.splitter(LearnerSpec()) is None
    frozen = PlainEngine.frozen(policy, LearnerSpec(), torch.device("cpu"))
    assert isinstance(frozen, FrozenPolicy) and frozen.policy is policy
    assert not any(p.requires_grad for p in policy.parameters())
