from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from rlcore.rollout.engines.vllm.cpu.quick_steps import SeededDraws

pytestmark = pytest.mark.engine


def generator(seed):
    made = torch.Generator()
    made.manual_seed(seed)
    return made


def runner(names, requests=None):
    batch = SimpleNamespace(req_ids=list(names))
    return SimpleNamespace(input_batch=batch, requests=dict.fromkeys(requests or names))


def test_tokens_and_log_probs_are_those_of_vllm():
    current_platform.import_kernels()
    vllm = TopKTopPSampler(logprobs_mode="processed_logprobs")
    ours = SeededDraws(runner("abc"))
    theirs, mine = ({i: generator(7 + i) for i in range(3)} for _ in range(2))
    for step in range(40):  # more than are drawn ahead
        logits = torch.randn(3, 50, generator=generator(step))
        truncated = (torch.tensor([5, 50, 50]), None) if step % 2 else (None, None)
        expected = vllm.forward_cpu(logits.clone(), theirs, *truncated)
        found = ours.sample(logits.clone(), mine, *truncated)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_request_keeps_its_numbers_when_rows_move_and_others_leave():
    model_runner = runner("ab", requests=["a", "b"])
    draws = SeededDraws(model_runner)
    own = [torch.randint(0, 2**31, (1,), generator=g).item() for g in [generator(5)] * 3]
    g = generator(5)
    assert draws.seeds({0: g, 1: generator(6)}, 2)[0] == own[0]
    model_runner.input_batch.req_ids = ["b", "a"]
    assert draws.seeds({0: generator(6), 1: g}, 2)[1] == own[1]
    # 100 others come and go while it is preempted
    for i in range(100):
        model_runner.input_batch.req_ids = [f"other{i}"]
        draws.seeds({0: generator(i)}, 1)
    model_runner.input_batch.req_ids = ["a"]
    assert draws.seeds({0: g}, 1)[0] == own[2]
    assert len(draws._ahead) < 100
