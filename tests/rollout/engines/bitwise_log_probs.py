"""An engine whose log-probs are the learner's, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from rlcore.attention.bitwise import hold
from rlcore.learner.cpu.norms import own_norms
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.packing import pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.learner.sequences import TokenSequence
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def learner_logp(model, found, tokens, *, bitwise=True):
    """Log-probs of each trajectory, in micro-batches of other sizes than the engine's steps."""
    lm = load_causal_lm(str(model.path), "float32", "sdpa")
    own_norms(lm)
    if bitwise:
        hold(lm, 256)
    policy = Policy(lm)
    answers = [(t.prompt_ids.tolist(), t.sampled_ids.tolist()) for t in found]
    out = [np.zeros(0, np.float32)] * len(found)
    episodes = [(TokenSequence.of_answer(*answer),) for answer in answers]
    for mb in pack(episodes, tokens, "sorted"):
        logp = policy(mb, None, HeadSpec(1.0, 1024, invariant=bitwise))[1]
        for row, index in enumerate(mb.episodes.tolist()):
            out[index] = logp[mb.row == row].numpy()
    return out


def test_log_probs_are_equal_to_the_bit(start, model_a, model_b, ask, finish):
    engine = start(model_a, bitwise=True, max_num_seqs=12)
    # steps of 1 to 12 requests, prompts with a common prefix, several blocks of the cache
    long = [5 + i % 20 for i in range(150)]
    engine.add(ask(20, group=80, max_new_tokens=30))
    engine.add(ask(3, group=81, prompt=long, max_new_tokens=40, seed=7))
    found = finish(engine)
    tokens = sum(len(t.logp_inf) for t in found)
    assert tokens > 300
    for budget in (200, 2000):
        for t, logp in zip(found, learner_logp(model_a, found, budget), strict=True):
            assert np.array_equal(t.logp_inf, logp)
    plain = learner_logp(model_a, found, 2000, bitwise=False)
    differ = sum((t.logp_inf != logp).sum() for t, logp in zip(found, plain))
    assert differ > tokens / 4  # what other kernels leave

    engine.update_weights(1, whole(model_b.tensors), "in_flight")
    engine.add(ask(5, group=82, max_new_tokens=30))
    found = finish(engine)
    for t, logp in zip(found, learner_logp(model_b, found, 500), strict=True):
        assert np.array_equal(t.logp_inf, logp)
        assert np.array_equal(t.topk_logp[:, 0], t.topk_logp.max(axis=1))
