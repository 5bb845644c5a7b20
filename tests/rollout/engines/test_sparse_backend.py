"""The sparse actor against the learner: the same text, the same rule, the same log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from timing import deadline
from transformers import AutoModelForCausalLM

from rlcore.attention.implementation import SparseRows, register
from rlcore.attention.specs import SparseSpec
from rlcore.rollout.engines.vllm.arguments import engine_args
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.types import PageRule

pytestmark = pytest.mark.engine

RULES = {  # as in sparse_engine_runs.py
    "small": SparseSpec(blocks=4),
    "share": SparseSpec(share=0.3, prompt="block", prompt_block=48),
    "dense_prompt": SparseSpec(blocks=3, prompt="dense"),
    "by_length": SparseSpec(blocks_by_length=(3, 5), length_step=64),
}
# of the requests of "by_length", in turn
OWN = (None, PageRule(1, 48, (2, 3, 4, 6)), PageRule(2, 160, (4, 12)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sparse")
    script = Path(__file__).with_name("sparse_engine_runs.py")
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=deadline(280),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return path


@pytest.fixture(scope="module")
def runs(folder):
    return json.loads((folder / "runs.json").read_text())


@pytest.fixture(scope="module")
def models(folder):
    name = register()
    return [
        AutoModelForCausalLM.from_pretrained(
            folder / n, dtype=torch.float32, attn_implementation=name
        )
        for n in "ab"
    ]


def learner_logp(model, samples, rule: SparseSpec | None) -> list[np.ndarray]:
    """Log-probs of the sampled tokens, rows right-padded in batches of 8."""
    out: list[np.ndarray] = []
    for i in range(0, len(samples), 8):
        part = samples[i : i + 8]
        texts = [torch.tensor(s["prompt"] + s["tokens"]) for s in part]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(t) for t in texts], batch_first=True
        )
        rows = None if rule is None else SparseRows(rule, [s["prompt_len"] for s in part])
        if rule is not None and rule.blocks_by_length is not None:
            own = [rule.under(OWN[n % len(OWN)]) for n in range(i, i + len(part))]
            rows = replace(rows, rules=own)
        extra = {} if rows is None else {"sparse_rows": rows}
        with torch.no_grad():
            logp = model(
                input_ids=ids, attention_mask=mask, use_cache=False, **extra
            ).logits.log_softmax(-1)
        for s, row in zip(part, logp):
            first, last = len(s["prompt"]), len(s["prompt"]) + len(s["tokens"])
            out.append(
                row[first - 1 : last - 1]
                .gather(1, torch.tensor(s["tokens"])[:, None])[:, 0]
                .numpy()
            )
    return out


def gaps(samples, logp) -> np.ndarray:
    return np.concatenate([np.abs(np.array(s["logp"]) - x) for s, x in zip(samples, logp)])


def gaps_by_sample(samples, logp) -> list[float]:
    return [float(np.abs(np.array(s["logp"]) - x).mean()) for s, x in zip(samples, logp)]


def assert_same(gap: np.ndarray) -> None:
    """Equal to float32 rounding; pages with equal scores to the last bits may change places, so not
    each single one."""
    assert np.median(gap) < 2e-6 and np.quantile(gap, 0.998) < 1e-4, (
        np.median(gap),
        np.sort(gap)[-20:],
    )


@pytest.mark.parametrize("name", ["covering", "covering_seen"])
def test_covering_budget_is_dense(runs, name):
    for got, want in zip(runs[name], runs["dense"]):
        assert got["tokens"] == want["tokens"]
        assert got["logp"] == want["logp"]


@pytest.mark.parametrize("name", list(RULES))
def test_actor_and_learner_agree_and_differ_from_dense(runs, models, name):
    samples = runs[name]
    assert len(samples) == 32 and {len(s["tokens"]) for s in samples} == {
        100 if name == "share" else 160
    }
    assert_same(gaps(samples, learner_logp(models[0], samples, RULES[name])))
    dense = gaps(samples, learner_logp(models[0], samples, None))
    assert dense.mean() > 1e-2 and np.quantile(dense, 0.9) > 3e-2


def test_requests_with_pages_of_their_own_follow_no_other_rule(runs, models):
    """With the engine's rule for all, those that brought their own differ."""
    samples = runs["by_length"]
    found = gaps_by_sample(samples, learner_logp(models[0], samples, SparseSpec(blocks=5)))
    assert min(found) > 1e-3


@pytest.mark.parametrize("name", ["dense_prompt", "share"])
def test_prompts_by_other_rules_are_not_sparse_ones(runs, models, name):
    rule = RULES[name].model_copy(update={"prompt": "sparse"})
    samples = runs[name]
    assert gaps(samples, learner_logp(models[0], samples, rule)).mean() > 1e-3


@pytest.mark.parametrize("name", list(RULES))
def test_recomputed_positions_keep_their_rule(runs, models, name):
    samples = runs[name + "_in_flight"]
    before, after = (learner_logp(m, samples, RULES[name]) for m in models)
    switch = [s["switch"] for s in samples]
    assert sum(40 < n < 130 for n in switch) >= 8, switch
    mixed = [np.concatenate([b[:n], a[n:]]) for b, a, n in zip(before, after, switch)]
    assert_same(gaps(samples, mixed))
    assert gaps(samples, before).mean() > 1e-2


@pytest.mark.parametrize("name", list(RULES))
def test_resubmitted_requests_keep_their_prompt_length(runs, models, name):
    samples = runs[name + "_resubmitted"]
    assert all(s["prompt_len"] == len(s["prompt"]) - 90 for s in samples)
    assert_same(gaps(samples, learner_logp(models[0], samples, RULES[name])))
    if RULES[name].needs_prompts:
        longer = [s | {"prompt_len": len(s["prompt"])} for s in samples]
        assert gaps(samples, learner_logp(models[0], longer, RULES[name])).mean() > 1e-3


def test_on_a_gpu_the_backend_that_is_replaced_is_asked_for_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 8}')
    rule = SparseSpec(block_size=32, blocks=4)
    for gpus, backend in ((1, "FLASH_ATTN"), (0, "None")):
        actor = ActorSpec(kind="sparse", sparse=rule, num_gpus=gpus)
        job = EngineJob(actor, "sparse-0", str(tmp_path), max_len=64, logprobs_k=1)
        args = engine_args(job, vocab=8)
        assert args.block_size == 32
        assert str(args.attention_backend).rpartition(".")[2] == backend
