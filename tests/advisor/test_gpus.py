"""Rates of GPUs against the cost model of the sparse-attention paper, appendix B."""

import pytest

from rlcore.advisor.planner.gpus import (
    GPUS,
    SHAPES,
    EngineShape,
    actor_rates,
    learner_rates,
)
from rlcore.config.parts.part_facts import Work

H100, MODEL = GPUS["h100"], SHAPES["qwen3-8b"]


def rates(context=2048.0, **engine):
    return actor_rates(H100, MODEL, EngineShape(**engine), context=context)


def test_decoding_reads_weights_once_and_the_keys_of_each_request():
    dense = rates()
    one, two = dense.step_seconds(1, 1000.0), dense.step_seconds(2, 4000.0)
    keys = MODEL.kv_bytes(2)
    assert keys == 2 * 36 * 8 * 128 * 2
    assert two - one == pytest.approx(dense.decode_request_s + 3000 * dense.decode_context_s)
    # bytes over the same bandwidth: a token's keys against all weights
    weights_s = dense.decode_s - 0.002
    assert dense.decode_context_s / weights_s == pytest.approx(keys / (2 * MODEL.parameters))


def test_fp8_halves_the_weights_that_are_read_and_a_second_gpu_halves_them_again():
    plain, fp8 = rates().decode_s - 0.002, rates(fp8=True).decode_s - 0.002
    assert fp8 == pytest.approx(plain / 2)
    assert rates(fp8=True, gpus=2).decode_s - 0.002 == pytest.approx(plain / 4)


def test_a_sparse_engine_reads_no_more_of_a_context_than_its_budget():
    sparse, dense = rates(budget=512), rates()
    assert sparse.reads(300.0) == dense.reads(300.0) == 300
    assert sparse.reads(16_384.0) == 512 and dense.reads(16_384.0) == 16_384


def test_what_fits_shrinks_with_the_context_and_a_model_that_does_not_fit_is_refused():
    assert rates(context=1024).max_running > rates(context=16_384).max_running >= 1
    with pytest.raises(ValueError, match="do not fit 1 GPUs"):
        actor_rates(H100, SHAPES["qwen3-32b"], EngineShape(memory_share=0.7), context=4096)


def test_the_learner_takes_three_times_its_pass_without_gradient_and_scales_with_its_gpus():
    one, four = learner_rates(H100, MODEL, 1), learner_rates(H100, MODEL, 4)
    assert one.token_s == pytest.approx(3 * one.ref_token_s) == pytest.approx(4 * four.token_s)


def test_a_critic_of_the_policy_s_size_doubles_the_work_of_a_step():
    plain, size = learner_rates(H100, MODEL, 2), MODEL.parameters
    critic = learner_rates(H100, MODEL, 2, Work(size, 6 * size, 2 * size))
    assert critic.token_s == pytest.approx(2 * plain.token_s)
    assert critic.step_s - 0.05 == pytest.approx(2 * (plain.step_s - 0.05))
    assert critic.phase_token_s == pytest.approx(plain.ref_token_s) and plain.phase_token_s == 0
