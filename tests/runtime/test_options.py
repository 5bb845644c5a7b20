"""Keys reach the parts that they govern."""

import torch

from rlcore.config.compose import load
from rlcore.objectives.shaping import overlong_penalty
from rlcore.runtime import options


def test_a_grader_s_limits_are_those_of_its_task():
    config = load(["run_dir=runs/x", "task.grade_timeout_s=3", "task.grader_memory_mib=512", "task.grader_processes=2"])
    limits = options.scorer(config)
    assert (limits["timeout_s"], limits["memory_mib"], limits["processes"]) == (3.0, 512, 2)


def described(*overrides):
    config = load(["run_dir=runs/x", *overrides])
    ((label, actor),) = config.actor.items()
    return options.describe_actor(label, actor, config.model.max_len)


def test_a_sparse_actor_whose_budget_covers_every_context_is_said_to_be_dense():
    assert "NOTHING IS SPARSE" not in described("actor=sparse")  # by default it is sparse on the default model
    assert "model.max_len=128: NOTHING IS SPARSE" in described("actor=sparse", "actor.sparse.sparse.blocks=8")
    assert "NOTHING" not in described("actor=sparse", "actor.sparse.sparse.blocks=7")


def test_an_fp8_cache_goes_with_bf16_weights_too():
    gpu = ("actor.bf16.num_gpus=1", "actor.bf16.fp8_kv_cache=true")
    config = load(["run_dir=runs/x", *gpu])
    engine = options.engine(config, "bf16", config.actor["bf16"], "model", "bf16-0")
    assert (engine["quantization"], engine["kv_cache_dtype"]) == (None, "fp8")
    assert described(*gpu).endswith("the policy in bfloat16, FP8 KV cache")


def test_dapo_punishes_answers_that_near_the_limit():
    config = load(["run_dir=runs/x", "algorithm=dapo"])
    given = options.learner(config, "model", 0, ("127.0.0.1", 1), 0)
    assert (given["max_response_len"], given["overlong_buffer"]) == (64, 13)  # a fifth, as in the paper
    lengths = torch.tensor([50, 51, 52, 64])
    punished = overlong_penalty(
        lengths, max_len=given["max_response_len"], buffer=given["overlong_buffer"], penalty=given["overlong_penalty"]
    )
    assert (punished < 0).tolist() == [False, False, True, True] and punished[-1] == -1.0
