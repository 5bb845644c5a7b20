"""A sparse actor through the engine, in a process of its own: its attention replaces vLLM's for the
rest of the process."""

from __future__ import annotations

import forked
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.attention.implementation import SparseRows, register
from rlcore.attention.specs import SparseSpec
from rlcore.models.folder import read_weights
from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine
from rlcore.testing.records import make_sampling
from rlcore.types import Request
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine

RULE = SparseSpec(blocks=3, prompt="dense")


def sample(folder: str, rule: SparseSpec, out: str) -> None:
    """Trajectories of eight requests, resubmitted once, into a file of arrays."""
    actor = ActorSpec(kind="sparse", sparse=rule, max_num_seqs=8, kv_cache_gib=0.1)
    engine = start_engine(EngineJob(actor, "sparse-0", folder, max_len=256, logprobs_k=0))
    spec = make_sampling(max_new_tokens=90, logprobs_k=0)
    prompts = [np.array([3 + (7 * i + j) % 25 for j in range(90)], np.int32) for i in range(8)]
    engine.add([Request(0, i, "p", p, spec, seed=i) for i, p in enumerate(prompts)])
    done = [t for _ in range(6) for t in engine.step()]
    # resubmitted: the tokens they have stay response, not prompt
    engine.update_weights(1, whole(read_weights(folder)), "abort")
    while engine.unfinished():
        done += engine.step()
    names = ("prompt_ids", "sampled_ids", "logp_inf", "token_version")
    np.savez(out, **{f"{i}_{n}": getattr(t, n) for i, t in enumerate(done) for n in names})


def test_a_sparse_actor_samples_by_its_rule_also_after_a_resubmission(model_a, tmp_path):
    out = tmp_path / "out.npz"
    forked.call(sample, str(model_a.path), RULE, str(out), seconds=200)
    sparse = AutoModelForCausalLM.from_pretrained(
        model_a.path, dtype=torch.float32, attn_implementation=register()
    )
    data, gaps, dense_gaps, spanning = np.load(out), [], [], 0
    for i in range(8):
        prompt, response, logp, version = (
            data[f"{i}_{n}"] for n in ("prompt_ids", "sampled_ids", "logp_inf", "token_version")
        )
        ids = torch.tensor(np.concatenate([prompt, response])[None].astype(np.int64))
        spanning += len(set(version)) == 2
        for model, kept, extra in (
            (sparse, gaps, {"sparse_rows": SparseRows(RULE, [len(prompt)])}),
            (model_a.hf, dense_gaps, {}),
        ):
            with torch.no_grad():
                scores = (
                    model(ids, use_cache=False, **extra)
                    .logits[0, len(prompt) - 1 : -1]
                    .log_softmax(-1)
                )
            kept.append(np.abs(scores.numpy()[np.arange(len(response)), response] - logp))
    assert spanning >= 4
    assert np.quantile(np.concatenate(gaps), 0.99) < 1e-4
    assert np.median(np.concatenate(dense_gaps)) > 1e-3  # the rule does change what is sampled
