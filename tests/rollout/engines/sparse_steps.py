"""A test that `test_second_runner.py` runs in a process of its own, on vLLM's second runner."""

from __future__ import annotations

import numpy as np

from rlcore.attention.specs import SparseSpec
from rlcore.patching import Patch
from rlcore.rollout.engines.vllm.patches import SECOND_RUNNER_STEPS
from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine
from rlcore.testing.records import make_sampling
from rlcore.types import Request


def test_the_token_that_the_prefix_cache_leaves_of_a_prompt_is_no_response(model_a, monkeypatch):
    steps, replace = [], Patch.replace

    def recorded(patch, by, of=None):
        def gathered(*args):
            state, each = by(*args)
            if state is not None:
                computed, new = state.num_computed_prefill_tokens_np, state.num_scheduled_tokens
                steps.append((computed.tolist(), new.tolist(), each))
            return state, each

        return replace(patch, gathered if patch is SECOND_RUNNER_STEPS else by, of)

    monkeypatch.setattr(Patch, "replace", recorded)
    rule = SparseSpec(blocks=3, prompt="dense")
    actor = ActorSpec(kind="sparse", sparse=rule, max_num_seqs=8, kv_cache_gib=0.1)
    engine = start_engine(EngineJob(actor, "sparse-0", str(model_a.path), 256, logprobs_k=0))
    sampling = make_sampling(max_new_tokens=8, logprobs_k=0)
    prompt = np.array([3 + j % 20 for j in range(97)], np.int32)  # six pages and a token
    for i in range(2):
        engine.add([Request(0, i, "p", prompt, sampling, seed=i)])
        while engine.unfinished():
            engine.step()
    engine.close()
    steps = steps[[computed for computed, *_ in steps].index([0]) :]  # vLLM's own come first
    assert steps[0] == ([0], [97], None) and ([96], [1], None) in steps
    assert {each for computed, _, each in steps if computed == [97]} == {1}
