"""A sparse actor through the engine wrapper, in a process of its own: its attention replaces vLLM's for good."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlcore.attention.block_topk import BlockTopK
from rlcore.attention.learner import SparseRows, register

RULE = BlockTopK(blocks=3, sparse_prompt=False)
ACTOR = """
import json, sys
import numpy as np
from rlcore.attention.block_topk import BlockTopK
from rlcore.rollout.model_folder import read_weights
from rlcore.rollout.vllm_engine import VllmEngine
from rlcore.types import Request, SamplingSpec

folder, rule, out = sys.argv[1], BlockTopK(**json.loads(sys.argv[2])), sys.argv[3]
engine = VllmEngine(model_path=folder, actor_id="s", actor_kind="sparse", max_len=256, max_num_seqs=8,
                    kv_cache_gib=0.1, sparse=rule)
spec = SamplingSpec(max_new_tokens=90, logprobs_k=0)
prompts = [np.array([3 + (7 * i + j) % 25 for j in range(90)], np.int32) for i in range(8)]
engine.add([Request(0, i, "p", p, spec, seed=i) for i, p in enumerate(prompts)])
done = [t for _ in range(6) for t in engine.step()]
engine.update_weights(1, read_weights(folder), "abort")  # resubmitted: its own tokens stay response, not prompt
while engine.unfinished():
    done += engine.step()
np.savez(out, **{f"{i}_{n}": getattr(t, n) for i, t in enumerate(done) for n in
                 ("prompt_ids", "response_ids", "logp_inf", "token_version")})
"""


def test_a_sparse_actor_samples_by_its_rule_also_after_a_resubmission(model_a, tmp_path):
    out = tmp_path / "out.npz"
    done = subprocess.run(
        [sys.executable, "-c", ACTOR, str(model_a.path), json.dumps(asdict(RULE)), str(out)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sparse = AutoModelForCausalLM.from_pretrained(model_a.path, dtype=torch.float32, attn_implementation=register())
    data, gaps, dense_gaps, spanning = np.load(out), [], [], 0
    for i in range(8):
        prompt, response, logp, version = (
            data[f"{i}_{n}"] for n in ("prompt_ids", "response_ids", "logp_inf", "token_version")
        )
        ids = torch.tensor(np.concatenate([prompt, response])[None].astype(np.int64))
        spanning += len(set(version)) == 2
        for model, kept, extra in (
            (sparse, gaps, {"sparse_rows": SparseRows(RULE, [len(prompt)])}),
            (model_a.hf, dense_gaps, {}),
        ):
            with torch.no_grad():
                scores = model(ids, use_cache=False, **extra).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            kept.append(np.abs(scores.numpy()[np.arange(len(response)), response] - logp))
    assert spanning >= 4
    assert np.quantile(np.concatenate(gaps), 0.99) < 1e-4
    assert np.median(np.concatenate(dense_gaps)) > 1e-3  # the rule does change what is sampled
