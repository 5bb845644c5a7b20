"""Engine runs for test_sparse_backend.py, in a process of their own: the sparse backend replaces
vLLM's for the rest of the process.

Usage: python sparse_engine_runs.py FOLDER. Writes FOLDER/runs.json: for each run its samples as
{prompt, prompt_len, tokens, logp, switch}, `switch` being the tokens sampled before the weights
changed.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import rlcore.rollout.engines.vllm  # noqa: F401  sets vLLM's environment

# isort: split
import vllm._custom_ops as ops

ops._supports_onednn = False  # weights stay where load_weights finds them

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.attention.selector import _cached_get_attn_backend  # noqa: E402

from rlcore.attention.specs import SparseSpec  # noqa: E402
from rlcore.models.fresh import build_fresh_model  # noqa: E402
from rlcore.models.specs import FreshModelSpec  # noqa: E402
from rlcore.rollout.engines.vllm import PROMPT_LEN, RULE  # noqa: E402
from rlcore.rollout.engines.vllm import sparse_cpu as sparse  # noqa: E402
from rlcore.types import PageRule  # noqa: E402

MAX_LEN = 512
RULES = {
    "small": SparseSpec(blocks=4),
    "share": SparseSpec(share=0.3, prompt="block", prompt_block=48),
    "dense_prompt": SparseSpec(blocks=3, prompt="dense"),
    "by_length": SparseSpec(blocks_by_length=(3, 5), length_step=64),
    # the stock backend has no pages of 16
    "covering": SparseSpec(block_size=32, blocks=MAX_LEN // 32),
    # covers what is sampled, not all that could be
    "covering_seen": SparseSpec(block_size=32, blocks=MAX_LEN // 32 - 4),
}
# what requests of "by_length" bring, in turn: the engine's own rule, and two others
OWN = (None, PageRule(1, 48, (2, 3, 4, 6)), PageRule(2, 160, (4, 12)))


def prompts() -> list[list[int]]:
    """32 prompts of 30 to 150 tokens; every second one shares its first 48 with the one before
    it."""
    gen = torch.Generator().manual_seed(5)
    drawn: list[list[int]] = []
    for i in range(32):
        ids = torch.randint(
            3, 60, (int(torch.randint(30, 150, (1,), generator=gen)),), generator=gen
        ).tolist()
        drawn.append(drawn[-1][:48] + ids if i % 2 else ids)
    return [ids[:150] for ids in drawn]


def engine(folder: Path, rule: SparseSpec | None) -> LLM:
    if rule is not None:
        sparse.install(rule)
        _cached_get_attn_backend.cache_clear()  # the dense engine of this process was first
    page = 32 if rule is None else rule.block_size
    llm = LLM(
        model=str(folder / "a"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LEN,
        block_size=page,
        max_num_seqs=24,
        max_num_batched_tokens=160,  # prompts come in chunks, beside decoding requests
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        num_gpu_blocks_override=4800 // page,  # too few for 24 requests: some are preempted
        seed=7,
    )
    if rule is not None:
        llm.llm_engine.collective_rpc(lambda worker: sparse.bind(worker.model_runner))
    return llm


def generate(
    llm: LLM,
    texts: list,
    new_tokens: int,
    lens: list[int],
    switch_at: int | None = None,
    weights=None,
    rules=(None,),
) -> list:
    """Sample all prompts, loading `weights` between two steps once `switch_at` tokens were sampled
    of the first. `rules`: the requests' own, in turn."""
    core, samples = llm.llm_engine, {}
    for i, ids in enumerate(texts):
        rule = rules[i % len(rules)]
        asked = {PROMPT_LEN: lens[i]} if lens[i] != len(ids) else {}
        asked |= {} if rule is None else {RULE: rule}
        params = SamplingParams(
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args=asked or None,
        )
        prompt = {"prompt_token_ids": ids}
        if rule is not None:  # as `RequestBook` does
            prompt["cache_salt"] = str(rule)
        core.add_request(str(i), prompt, params)
        samples[str(i)] = {
            "prompt": ids,
            "prompt_len": lens[i],
            "tokens": [],
            "logp": [],
            "switch": 0,
        }
    switched = switch_at is None
    while core.has_unfinished_requests():
        for out in core.step():
            tokens, found = list(out.outputs[0].token_ids), out.outputs[0].logprobs
            samples[out.request_id] |= {
                "tokens": tokens,
                "logp": [d[t].logprob for d, t in zip(found, tokens)],
            }
        if not switched and len(samples["0"]["tokens"]) >= switch_at:
            for sample in samples.values():
                sample["switch"] = len(sample["tokens"])
            core.collective_rpc(
                lambda worker: worker.model_runner.model.load_weights(weights.items())
            )
            llm.reset_prefix_cache(reset_running_requests=True)
            switched = True
    return list(samples.values())


def main(folder: Path) -> None:
    spec = FreshModelSpec(
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=64,
    )
    for seed, name in enumerate("ab"):
        build_fresh_model(folder / name, "0123456789", spec, seed=seed, max_len=MAX_LEN)
    later = load_file(folder / "b" / "model.safetensors")
    texts = prompts()
    lens = [len(t) for t in texts]
    runs = {}
    for name in ("dense", "covering", "covering_seen"):
        llm = engine(folder, RULES.get(name))
        runs[name] = generate(llm, texts[:6], 100, lens)
        del llm
        gc.collect()
    for name, new_tokens in (
        ("small", 160),
        ("share", 100),
        ("dense_prompt", 160),
        ("by_length", 160),
    ):
        llm = engine(folder, RULES[name])
        rules = OWN if name == "by_length" else (None,)
        runs[name] = generate(llm, texts, new_tokens, lens, rules=rules)
        # one prompt goes on with part of its response as prompt, as after an aborted request
        longer = [s["prompt"] + s["tokens"][:90] for s in runs[name][:4]]
        runs[name + "_resubmitted"] = generate(llm, longer, 80, lens[:4], rules=rules)
        runs[name + "_in_flight"] = generate(llm, texts, 100, lens, 50, later, rules)
        del llm
        gc.collect()
    (folder / "runs.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
