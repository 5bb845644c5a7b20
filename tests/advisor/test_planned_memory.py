from dataclasses import replace

import pytest

from rlcore.learner.engines.deepspeed_facts import (
    BUCKET,
    learner_host,
    learner_rank,
    waiting_rank,
)
from rlcore.learner.specs import LearnerSpec
from rlcore.models.sizes import LayerSizes, ModelSizes, total
from rlcore.rollout.engines.vllm_facts import VllmFacts
from rlcore.rollout.specs import ActorSpec

SIZES = ModelSizes(8e9, 6e8, 152_000, LayerSizes(36, 4096, 4096, 1024, 12288, True))
ON_GPUS = {"num_gpus": 1, "dtype": "bfloat16", "micro_batch_tokens": 8192}


def spec(**settings):
    return LearnerSpec(**{**ON_GPUS, "gradient_checkpointing": True, **settings})


@pytest.mark.parametrize("ranks", [4, 16])
def test_what_is_divided_shrinks_with_the_ranks_and_what_is_not_stays(ranks):
    one = {stage: learner_rank(SIZES, spec(zero_stage=stage)) for stage in (1, 2, 3)}
    many = {stage: learner_rank(SIZES, spec(zero_stage=stage, ranks=ranks)) for stage in one}
    for stage in (1, 2, 3):
        state = "masters and moments"
        assert many[stage][state] == one[stage][state] / ranks == 12 * 8e9 / ranks
        assert many[stage]["activations"] == one[stage]["activations"]
        weights = 2 * 8e9 / (ranks if stage == 3 else 1)
        assert many[stage]["weights"] == weights
    assert total(many[3]) < total(many[2]) < total(many[1])


def test_ranks_with_parts_of_a_sequence_hold_parts_of_its_activations():
    whole, half = (
        learner_rank(SIZES, spec(zero_stage=3, ranks=8, sequence_parallel=n)) for n in (1, 2)
    )
    assert half["activations"] == whole["activations"] / 2 and half["logits"] == whole["logits"] / 2
    assert half["weights"] == whole["weights"]


def test_ranks_with_parts_of_layers_hold_parts_of_all_but_the_ends():
    sizes = replace(SIZES, ends=1.2e9)
    whole, half = (
        learner_rank(sizes, spec(zero_stage=1, ranks=8, tensor_parallel=n), kl=True) for n in (1, 2)
    )
    held = 1.2e9 + (8e9 - 1.2e9) / 2
    assert half["weights"] == 2 * held and half["masters and moments"] == 12 * held / 4
    assert half["frozen policy"] == whole["frozen policy"] == 2 * 8e9
    assert half["activations"] < whole["activations"] and half["logits"] == whole["logits"]


def test_ranks_with_parts_of_experts_hold_the_rest_whole():
    sizes = replace(SIZES, experts=7e9)
    whole, half = (
        learner_rank(sizes, spec(zero_stage=2, ranks=8, expert_parallel=n), kl=True) for n in (1, 4)
    )
    assert half["weights"] == 2 * (1e9 + 7e9 / 4)
    # fewer ranks hold the same experts, and there are fewer of them to divide
    assert half["masters and moments"] == whole["masters and moments"] == 12 * 8e9 / 8
    assert half["frozen policy"] == whole["frozen policy"] == 2 * 8e9


def test_zero_1_holds_a_bucket_of_gradients_at_the_end_of_a_pass():
    few = replace(SIZES, parameters=9.4e7, largest=1e6, layer=LayerSizes(6, 64, 64, 64, 64, True))
    parts = learner_rank(few, spec(zero_stage=1, micro_batch_tokens=64, head_chunk_tokens=64))
    assert total(parts) == (2 + 12 + 4 + 2 + 4) * 9.4e7  # an H100 held 2.11 GiB of 2.10
    many = learner_rank(SIZES, spec(zero_stage=1))
    assert "activations" in many and "bucket of gradients" not in many


def test_the_reference_is_divided_as_the_policy_is():
    for stage in (2, 3):
        parts = learner_rank(SIZES, spec(zero_stage=stage, ranks=8), kl=True)
        assert parts["frozen policy"] == parts["weights"] == 2 * 8e9 / (8 if stage == 3 else 1)


def test_what_is_offloaded_leaves_the_device_for_the_host():
    both = {"optimizer": "cpu", "parameters": "cpu"}
    plain, moved = spec(zero_stage=3, ranks=8), spec(zero_stage=3, ranks=8, offload=both)
    device, less = (learner_rank(SIZES, one, kl=True) for one in (plain, moved))
    # masters and moments, gradients, and two models: no longer there, nor in a step
    assert total(device) - total(less) == pytest.approx((12 + 4 + 2 + 2) * 1e9)
    assert "activations" in less  # the most is held in a pass
    host = learner_host(SIZES, moved, bucket_bytes=2**29, kl=True)
    more = total(host) - total(learner_host(SIZES, plain, bucket_bytes=2**29, kl=True))
    assert more == pytest.approx((12 + 8 + 2 + 2) * 1e9)
    disk = {"optimizer": "nvme", "nvme_path": "/disk"}
    on_disk = learner_host(SIZES, spec(zero_stage=3, offload=disk), bucket_bytes=2**29)
    assert on_disk["states being updated"] == 4 * 4 * 1e9 and "states on the host" not in on_disk
    disks, hosts = (
        learner_rank(SIZES, spec(zero_stage=3, offload=places))
        for places in (disk, {"optimizer": "cpu"})
    )
    assert total(disks) - total(hosts) == 4 * BUCKET  # on an H100: 0.34 GiB for 94 M weights


def test_adapters_have_small_states():
    parts = learner_rank(SIZES, spec(zero_stage=3, ranks=8), trained=4e7)
    assert parts["masters and moments"] == 12 * 4e7 / 8 and parts["weights"] == 2e9


def test_a_host_holds_its_part_of_a_checkpoint_and_two_buckets():
    parts = learner_host(SIZES, spec(ranks=8), bucket_bytes=2**29)
    assert parts["checkpoint"] == 12 * 8e9 / 8
    assert parts["publication"] == 3 * 2 * 6e8  # the largest tensor is more than a bucket


def test_what_makes_room_for_engines_is_counted_on_the_host():
    own = {"zero_stage": 3, "ranks": 8, "offload_while_sampling": True}
    parts = learner_host(SIZES, spec(**own), bucket_bytes=2**29)
    assert parts["states in the engines' turn"] == (12 + 4) * 8e9 / 8
    device = waiting_rank(SIZES, spec(**own))
    assert "masters and moments" not in device and "gradients" not in device


def test_the_set_that_patches_are_made_against_is_counted():
    more, plain = (
        learner_host(SIZES, spec(ranks=8), bucket_bytes=2**29, kept_width=width) for width in (2, 0)
    )
    assert total(more) - total(plain) == more["weights as published"] == 2 * 8e9


def test_an_engine_rank_holds_its_share():
    actor = ActorSpec(num_gpus=1, tensor_parallel=2)
    parts = VllmFacts.actor_memory(SIZES, actor, bucket_bytes=2**29, max_len=32768)
    assert parts["weights"] == 8e9
    assert parts["keys of one sequence"] == 2 * 36 * 1024 * 2 * 32768 / 2
    fp8 = VllmFacts.actor_memory(
        SIZES, ActorSpec(kind="fp8", num_gpus=1), bucket_bytes=2**29, max_len=32768
    )
    assert fp8["weights"] == 8e9


def test_experts_count_stacked_as_a_rank_gathers_them():
    shapes = {"model.embed_tokens.weight": (100, 8)}
    for expert in range(16):
        for kind, shape in (("gate", (4, 8)), ("up", (4, 8)), ("down", (8, 4))):
            shapes[f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight"] = shape
    config = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"vocab_size": 100, "num_experts_per_tok": 3, "moe_intermediate_size": 4}
    sizes = ModelSizes.of(config, shapes)
    assert sizes.largest == 16 * 2 * 32 and sizes.layer.inner == 12
    assert sizes.parameters == 800 + 16 * 96 and sizes.experts == 16 * 96
