"""Shortcuts are compared with the plain way on the model at hand: those that are right are taken,
the others are left off or refused."""

import copy
import json

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from learner_helpers import PlainEngine, make_job
from tiny_mixture import tiny_mixture

from rlcore.attention.implementation import register
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError
from rlcore.learner import build, probes
from rlcore.learner.engines.model_parallel import check_layers
from rlcore.learner.parts.replay import Replay
from rlcore.learner.policy import Policy
from rlcore.learner.probes import (
    CPU,
    against_layers,
    against_merging,
    against_packing,
    against_replay,
    against_rule,
    laid_out,
    odd_attention,
    refuse_odd_passes,
    short_model,
)
from rlcore.learner.recurrent import SequenceRows, separate
from rlcore.learner.specs import LoraSpec

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "ssm_state_size": 16,
    "chunk_size": 8,
}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 2,
    "mamba_d_state": 8,
}
RECURRENT = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | MOE,
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "nemotron_h": NEMOTRON,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "jamba": JAMBA,
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 8},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
}


def random_model(kind, **options):
    """A random float32 model whose states show beside rounding."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SMALL | options))
    lm = transformers.AutoModelForCausalLM.from_config(config).float()
    for p in lm.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return lm


@pytest.mark.parametrize("kind", RECURRENT)
def test_packed_rows_of_recurrent_layers_are_those_of_single_sequences(kind):
    lm = random_model(kind, **RECURRENT[kind])
    assert separate(lm)
    assert against_packing(lm) is None


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_are_not_divided_among_ranks(kind):
    lm = random_model(kind, **RECURRENT[kind])
    with pytest.raises(UserError, match=r"learner\.tensor_parallel=2 .* does not know how"):
        check_layers(lm, 2)
    # nor are sequences (learner.sequence_parallel): `hold_in_parts` refuses what this finds
    assert "not every layer attends" in odd_attention(lm)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_their_gradients_are_too(checkpointing):
    lm = random_model("qwen3_5_text", **DELTA).double().train()
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy, found = Policy(lm), {}
    for layout in ("sorted", "packed"):
        lm.zero_grad()
        mb = laid_out(policy, layout)
        weights = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1)).double()
        (policy.hidden(mb) * mb.flat(weights)).sum().backward()
        found[layout] = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    assert found["packed"].keys() == found["sorted"].keys()
    for name, expected in found["sorted"].items():
        apart = float((found["packed"][name] - expected).abs().max())
        # transformers computes the delta rule in float32, whatever the model's dtype
        assert apart <= 1e-5 * float(expected.abs().max()), name


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_rows_of_sequences_hold_every_position_once(lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    rows = SequenceRows.of(positions)
    if len(lengths) == 1:
        assert rows is None
        return
    assert rows.rows.shape == (len(lengths), max(lengths))
    packed = torch.arange(sum(lengths))
    assert torch.equal(packed[rows.rows].flatten()[rows.back], packed)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    assert torch.equal(rows.rows[:, 0], starts)


@pytest.fixture
def leaking(monkeypatch):
    """Granite's hybrid without the mask that rlcore gives it: transformers makes it without
    positions."""
    monkeypatch.setattr("rlcore.learner.policy._WITHOUT_POSITIONS", ())
    return random_model("granitemoehybrid", **RECURRENT["granitemoehybrid"])


def test_a_model_that_leaks_between_packed_sequences_is_found(leaking):
    assert "hidden states differ" in against_packing(leaking)
    assert "hidden states differ" in against_packing(short_model(leaking))


@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_a_wrong_layout_is_left_or_refused(monkeypatch, layout, leaking):
    monkeypatch.setattr(build, "load_causal_lm", lambda *_, **__: leaking)
    models = build._Models(make_job("M", layout=layout), PlainEngine, None, CPU)
    models.layout = "packed"  # as auto chooses with a kernel of a GPU
    if layout == "packed":
        with pytest.raises(UserError, match=r"layout=packed is wrong for model.path=M,.*=sorted"):
            models._load("M", None)
        return
    models._load("M", None)
    assert models.layout == "sorted"
    (verdict,) = models.verdicts.values()
    assert not verdict.taken and "hidden states differ" in str(verdict)


def test_windows_shorter_than_a_probe_are_tried():
    """The model's own window is longer than the sequences of the probe."""
    lm = random_model("gemma3_text", sliding_window=128)
    small = short_model(lm)
    assert small.config.sliding_window == 3
    kinds = set(lm.config.layer_types)
    assert set(small.config.layer_types) == kinds
    assert against_packing(lm) is None


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("granite", {"logits_scaling": 8.0}, "not one product"),
        ("gemma2", {"final_logit_softcapping": 3.0}, "not one product"),
        (
            "gemma2",
            {"final_logit_softcapping": None, "attn_logit_softcapping": 1.0},
            "attention does not come from transformers",
        ),
        ("phimoe", {"num_local_experts": 4, "router_jitter_noise": 0.5}, "two passes .* differ"),
        ("qwen3", {}, None),
        ("gemma3_text", {}, None),
    ],
)
def test_odd_heads_and_passes_that_do_not_repeat_are_refused(kind, options, why):
    lm = random_model(kind, **options)
    if why is None:
        refuse_odd_passes(lm, "M", divided=False, device=CPU)
        return
    for divided in (False, True):
        with pytest.raises(UserError, match=f"model.path=M is not supported: .*{why}"):
            refuse_odd_passes(lm, "M", divided=divided, device=CPU)


@pytest.mark.parametrize(
    ("kind", "options", "odd"),
    [
        # its files have "backbone." where the model has "model."
        ("nemotron_h", NEMOTRON, "backbone.embeddings.weight of .* is no parameter"),
        ("gpt_neox", {}, "embed_out.weight of .* is no parameter"),
        # a bias of the router, which is a buffer
        ("glm4_moe", {"n_routed_experts": 4, "n_group": 1}, "e_score_correction_bias of .* is no"),
        ("qwen3_moe", MOE, None),
        ("gemma3_text", {}, None),
        ("qwen3_5_text", DELTA, None),
    ],
)
def test_a_model_whose_weights_have_other_names_in_its_files_is_refused(
    tmp_path, kind, options, odd
):
    lm = random_model(kind, **options)
    lm.save_pretrained(tmp_path)
    if odd is None:
        build.refuse_other_names(lm, str(tmp_path))
        return
    with pytest.raises(UserError, match=f"{tmp_path} is not supported: weight .*{odd}"):
        build.refuse_other_names(lm, str(tmp_path))


def test_a_rule_that_changes_nothing_is_found():
    rule = SparseSpec(blocks=4)
    lm = random_model("qwen3")
    assert "attend to everything" in against_rule(lm, rule)
    lm.set_attn_implementation(register("sdpa"))
    assert against_rule(lm, rule) is None


def test_experts_that_are_not_replayed_are_found(tmp_path, monkeypatch):
    lm = tiny_mixture(tmp_path, "0123456789+=", seed=3)
    assert against_replay(lm, CPU) is None
    monkeypatch.setattr(Replay, "_choose", lambda self, router, args, output: output)
    assert against_replay(lm, CPU) == "other experts change nothing"


def test_adapters_that_merge_otherwise_than_they_compute_are_found(monkeypatch):
    lm, spec = random_model("qwen3"), LoraSpec(rank=4)
    assert against_merging(lm, spec, CPU) is None
    monkeypatch.setattr(probes, "merged", lambda weight, layer: weight.clone())
    assert "hidden states differ" in against_merging(lm, spec, CPU)


def test_layers_with_other_results_are_found():
    lm = random_model("qwen3")
    assert against_layers(lm, lambda _: None, CPU) is None

    def halve(small):
        small.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out / 2)

    assert "hidden states differ" in against_layers(lm, halve, CPU)
    assert not copy.deepcopy(lm).model.layers[0].mlp._forward_hooks


def test_a_rank_says_what_it_found(tmp_path):
    """As a run's about.json has it."""
    from learner_helpers import small_model

    models = build._Models(make_job(small_model(tmp_path), lora={}), PlainEngine, None, CPU)
    models.policy()
    found = {v.shortcut: v.taken for v in models.verdicts.values()}
    assert found == {"learner.share_prefix=auto": True, "learner.lora.publish=merged": True}
    assert json.dumps([str(v) for v in models.verdicts.values()])
