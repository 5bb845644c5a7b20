"""What cannot be sampled from is refused before an engine starts, in one sentence."""

from __future__ import annotations

import json

import pytest

from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.rollout.checks import (
    attention_heads,
    check_heads,
    check_length,
    check_recurrent,
    check_vocabulary,
    check_width,
    refuse_with_states,
)
from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine


def model_folder(path, alphabet="abc", vocab_size=8, **config):
    build_char_tokenizer(alphabet).save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size, **config}))
    return path


def test_more_positions_than_the_model_has():
    with pytest.raises(UserError, match=r"model\.max_len=513 .*at most 512"):
        check_length({"max_position_embeddings": 512}, 513)
    check_length({"max_position_embeddings": 512}, 512)
    check_length({}, 10**6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default"},
                "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64},
            }
        },
    ],
)
def test_factors_that_depend_on_the_longest_sequence_are_refused(rope):
    config = {"max_position_embeddings": 512, **rope}
    with pytest.raises(UserError, match=r"longrope.*choose at most 64"):
        check_length(config, 65)
    check_length(config, 64)
    check_length(config | {"rope_parameters": {"rope_type": "yarn"}}, 512)


def test_a_factor_that_engines_do_not_read_is_refused():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0}
    config = {"max_position_embeddings": 512, "rope_parameters": rope}
    with pytest.raises(UserError, match=r"factor=4 .*take for 512/64.*remove the factor"):
        check_length(config, 64)
    for given in ({"factor": 8.0}, {"factor": None}):
        check_length(config | {"rope_parameters": rope | given}, 64)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bamba", "layer_types": ["mamba", "attention"]}, "since 0.23"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "selective_scan_fwd"),
        ({"model_type": "another", "mamba_d_state": 16}, "not compared with transformers"),
        ({"model_type": "mamba2", "state_size": 16}, "not compared.*all attend, or one of falcon"),
        ({"model_type": "minimax", "layer_types": ["linear_attention"]}, "not compared"),
        ({"model_type": "rwkv", "rescale_every": 6}, "not compared"),
        ({"model_type": "xlstm", "chunkwise_kernel": "chunkwise--native_autograd"}, "not compared"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}, "not compared"),
    ],
)
def test_recurrent_layers_in_an_engine_on_a_cpu(config, why):
    kind = config["model_type"]
    with pytest.raises(UserError, match=rf"a\.b\.engine=vllm .* M on a CPU.*={kind}\).*{why}"):
        check_recurrent(config, ActorSpec(), key="a.b", path="M")
    check_recurrent(config, ActorSpec(num_gpus=1), key="a.b", path="M")
    with pytest.raises(UserError, match=r"a\.b\.tensor_parallel=2 is not proven with recurrent"):
        check_recurrent(config, ActorSpec(num_gpus=1, tensor_parallel=2), key="a.b", path="M")


HYBRIDS = (
    {"model_type": "lfm2", "full_attn_idxs": [2]},
    {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]},
    {"model_type": "qwen3_next", "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
)


@pytest.mark.parametrize("config", HYBRIDS)
def test_families_with_recurrent_layers_that_an_engine_on_a_cpu_serves(config):
    check_recurrent(config, ActorSpec(), key="a.b", path="M")


@pytest.mark.parametrize(
    ("actor", "setting"),
    [
        ({"speculate": {"path": "D"}}, "speculate is not proven .* M has: remove it"),
        ({"fp8_kv_cache": True, "num_gpus": 0}, "fp8_kv_cache=true is not .*: use false"),
        ({"kind": "fp8", "num_gpus": 1}, "kind=fp8 is not .*: choose actor=bf16"),
        ({"activations": "int8"}, "activations=int8 is not .*: use none"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16 is not .*: use float32"),
        ({"kv_on_update": "keep"}, "kv_on_update=keep is not .*: use recompute"),
        (
            {"kind": "sparse", "sparse": {"block_size": 16, "blocks": 4}},
            "kind=sparse is not .*: choose actor=bf16",
        ),
    ],
)
@pytest.mark.parametrize("config", HYBRIDS)
def test_settings_that_were_not_compared_with_recurrent_layers(config, actor, setting):
    with pytest.raises(UserError, match=rf"a\.b\.{setting}"):
        check_recurrent(config, ActorSpec(**actor), key="a.b", path="M")
    check_recurrent({"model_type": "llama"}, ActorSpec(**actor), key="a.b", path="M")


def test_settings_of_a_run_that_were_not_compared_with_recurrent_layers():
    used = {"learner.fp8=row": False, "bitwise=true": "use false"}
    with pytest.raises(UserError, match=r"bitwise=true is not proven .* M has: use false"):
        refuse_with_states(HYBRIDS[0], "M", used)
    refuse_with_states(HYBRIDS[0], "M", {"bitwise=true": False})
    refuse_with_states({"model_type": "llama"}, "M", used)


def test_a_family_that_an_engine_on_a_cpu_computes_wrong():
    config = {"model_type": "cohere2"}
    with pytest.raises(UserError, match=r"a\.b\.engine=vllm .* M .*cohere2.*nats off"):
        check_recurrent(config, ActorSpec(), key="a.b", path="M")
    check_recurrent(config, ActorSpec(num_gpus=1), key="a.b", path="M")


SIXTEEN = {"num_attention_heads": 4, "hidden_size": 64, "model_type": "llama"}


@pytest.mark.parametrize("config", [SIXTEEN, SIXTEEN | {"head_dim": 48}, {"head_dim": 16}])
def test_heads_of_a_width_that_an_engine_on_a_cpu_lacks(config):
    with pytest.raises(UserError, match=r"a\.b\.engine=vllm cannot serve M .* (16|48) wide .* 64"):
        check_width(config, ActorSpec(), key="a.b", path="M")
    check_width(config, ActorSpec(num_gpus=1), key="a.b", path="M")


def test_heads_of_a_width_that_an_engine_on_a_cpu_has():
    for more in ({"head_dim": 32}, {"hidden_size": 256}, {"kv_lora_rank": 8}, {"head_dim": None}):
        check_width({**SIXTEEN, "hidden_size": 128, **more}, ActorSpec(), key="a.b", path="M")
    check_width({"model_type": "rwkv"}, ActorSpec(), key="a.b", path="M")


@pytest.mark.parametrize(
    ("kind", "name", "computed", "other"),
    [
        ("lfm2", "tie_word_embeddings", True, False),
        ("olmoe", "norm_topk_prob", False, True),
        ("olmoe", "clip_qkv", None, 8.0),
        ("olmoe", "rms_norm_eps", 1e-5, 1e-6),
        ("qwen2_moe", "use_sliding_window", False, True),
        ("qwen2_moe", "qkv_bias", True, False),
        ("granitemoehybrid", "mamba_n_groups", 1, 2),
        ("falcon_h1", "time_step_limit", [0.0, {"__float__": "Infinity"}], [0.0, 0.1]),
        ("granitemoehybrid", "time_step_limit", [0.0, float("inf")], [0.001, 0.1]),
        ("granitemoehybrid", "partial_rotary_factor", 1.0, 0.5),
        ("qwen3_5_text", "output_gate_type", "swish", "sigmoid"),
        ("qwen3_next", "attn_output_gate", True, False),
        ("qwen3_next", "tie_word_embeddings", False, True),
        ("qwen3_next", "mlp_only_layers", None, [1]),
        ("qwen3_5_text", "rope_parameters", {"rope_type": "default"}, {"rope_type": "yarn"}),
    ],
)
def test_a_setting_that_an_engine_does_not_read(kind, name, computed, other):
    for gpus in (0, 1):
        actor, config = ActorSpec(num_gpus=gpus), {"model_type": kind, name: other}
        with pytest.raises(UserError, match=r"a\.b\.engine=vllm .* with \w+=.*: choose another"):
            check_recurrent(config, actor, key="a.b", path="M")
        check_recurrent(config | {name: computed}, actor, key="a.b", path="M")
        check_recurrent({"model_type": kind}, actor, key="a.b", path="M")


def test_settings_that_an_engine_reads_elsewhere_or_with_others():
    falcon, lfm2 = {"model_type": "falcon_h1"}, {"model_type": "lfm2"}
    for config, name in (
        (falcon | {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        (lfm2 | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ):
        with pytest.raises(UserError, match=rf"a\.b\.engine=vllm .* {name}=.*: choose another"):
            check_recurrent(config, ActorSpec(), key="a.b", path="M")
    for config in (
        falcon | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        falcon | {"mamba_rms_norm": False, "mamba_norm_before_gate": True},
        lfm2 | {"rope_parameters": {"rope_type": "default"}},
    ):
        check_recurrent(config, ActorSpec(), key="a.b", path="M")


def test_attention_alone_is_no_recurrent_layer():
    for kinds in (["full_attention"], ["sliding_attention", "full_attention"], None):
        config = {"model_type": "gemma3_text", "layer_types": kinds}
        check_recurrent(config, ActorSpec(), key="a.b", path="M")


@pytest.mark.parametrize(("ranks", "heads"), [(3, (4, 2)), (4, (12, 3))])
def test_heads_that_cannot_be_divided(ranks, heads):
    with pytest.raises(UserError, match=rf"a\.tensor_parallel={ranks} .*{heads[0]} attention"):
        check_heads(heads, ranks, key="a")


def test_heads_that_can_be_divided_or_copied():
    for ranks, heads in ((4, (8, 2)), (2, (8, 2)), (1, (7, 7))):
        check_heads(heads, ranks)
    assert attention_heads({"num_attention_heads": 8, "num_key_value_heads": 2}) == (8, 2)
    assert attention_heads({"num_attention_heads": 8}) == (8, 8)


def test_a_vocabulary_that_is_not_the_policy_s(tmp_path):
    policy = model_folder(tmp_path / "policy", "abc")
    check_vocabulary(policy, policy)
    check_vocabulary(model_folder(tmp_path / "same", "abc"), policy)
    for other in (
        model_folder(tmp_path / "letters", "xyz"),
        model_folder(tmp_path / "larger", "abc", vocab_size=9),
    ):
        with pytest.raises(UserError, match="another vocabulary"):
            check_vocabulary(other, policy)


def test_a_tokenizer_of_more_tokens_than_the_model(tmp_path):
    with pytest.raises(UserError, match="token id 8, its model only 8 tokens"):
        check_vocabulary(model_folder(tmp_path / "m", "abcdef"), None)


def test_an_engine_is_named_or_a_users_own(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from rlcore.extras.diffusion.engine import DiffusionEngine\n\n\n"
        "class Echo(DiffusionEngine):\n    def __init__(self, job):\n        self.job = job\n"
    )
    job = EngineJob(ActorSpec(engine=f"{own}:Echo"), "mine-0", "m", max_len=8, logprobs_k=0)
    assert start_engine(job).job is job
    wrong = EngineJob(ActorSpec(engine="sglang"), "mine-0", "m", max_len=8, logprobs_k=0)
    with pytest.raises(UserError, match=r"actor\.mine\.engine=sglang .*vllm"):
        start_engine(wrong)
