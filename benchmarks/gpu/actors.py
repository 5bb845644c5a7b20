"""Checks and timings of the actor kinds and of the learner's kernels on one CUDA GPU. UNPROVEN: no GPU has run it yet.

    python benchmarks/gpu/actors.py [--parts learner rollout update] [--json FILE]

rollout  vLLM tokens per second (prefill included) in bf16, FP8 and FP8 with an FP8 KV cache at 4K, 8K and 16K of
         context; log-probs of each against a bfloat16 forward of transformers on the same tokens
update   after an update in place: log-probs against those of an engine freshly started with the same weights
learner  the chunked LM-head pass against the plain one at vocabulary 151,936: peak memory, time, largest difference

Sparse attention has a script of its own (sparse_attention.py). Models have random weights of Qwen3-1.7B's shape, so
nothing is downloaded; each engine has a process of its own. Parts whose packages are missing are skipped, saying so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sparse_attention import CONTEXTS, make_model, show

Row = dict[str, Any]
KINDS: dict[str, Row] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8, channel": {"quantization": "fp8", "scales": "channel"},
    "fp8, block": {"quantization": "fp8", "scales": "block"},
    "fp8 + fp8 kv": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def prompts(count: int, length: int, vocab: int = 512) -> list[Any]:
    import numpy as np

    return [np.random.default_rng(i).integers(3, vocab, length).astype(np.int32) for i in range(count)]


def engine(model: str, max_len: int, kind: str) -> Any:
    from rlcore.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        model_path=model,
        actor_id="gpu",
        actor_kind="fp8" if "fp8" in kind else "bf16",
        dtype="bfloat16",
        max_len=max_len,
        max_num_seqs=64,
        enforce_eager=False,
        logprobs_k=20,
        **KINDS[kind],
    )


def generate(llm: Any, asked: list[Any], new_tokens: int) -> tuple[list[Any], float]:
    """Finished trajectories by sample, and seconds."""
    from rlcore.types import Request, SamplingSpec

    spec = SamplingSpec(max_new_tokens=new_tokens, logprobs_k=20)
    llm.add([Request(0, i, "gpu/train/0", p, spec, seed=i) for i, p in enumerate(asked)])
    start, done = time.monotonic(), []
    while llm.unfinished():
        done += llm.step()
    return sorted(done, key=lambda t: t.sample_index), time.monotonic() - start


def rollout_child(model: str, kind: str) -> list[Row]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    llm = engine(model, max(CONTEXTS) + 320, kind)
    rows = []
    for context in CONTEXTS:
        batch = prompts(16, context)
        generate(llm, batch, 8)
        done, seconds = generate(llm, batch, 256)
        rows.append({"kind": kind, "context": context, "tokens/s": sum(len(t.response_ids) for t in done) / seconds})
    done, _ = generate(llm, prompts(4, 256), 64)
    llm.close()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    gaps = []
    for t in done:
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids])).long().cuda()[None]
        with torch.no_grad():
            logp = reference(ids).logits[0, len(t.prompt_ids) - 1 : -1].float().log_softmax(-1)
        mine = logp.gather(1, ids[0, len(t.prompt_ids) :, None])[:, 0].cpu().numpy()
        gaps.append(np.abs(mine - t.logp_inf))
    gap = np.concatenate(gaps)
    return [{**row, "mean |dlogp|": float(gap.mean()), "max |dlogp|": float(gap.max())} for row in rows]


def update_child(model: str, other: str, kind: str) -> list[Row]:
    """Log-probs after an update in place, and those of a fresh engine, on the same seeds."""
    import numpy as np
    from safetensors.torch import load_file

    asked = prompts(8, 256)
    llm = engine(model, 1024, kind)
    generate(llm, asked, 16)
    weights = {n: t for path in sorted(Path(other).glob("*.safetensors")) for n, t in load_file(path).items()}
    start = time.monotonic()
    llm.update_weights(1, weights, "in_flight")
    seconds = time.monotonic() - start
    updated, _ = generate(llm, asked, 64)
    llm.close()
    fresh, _ = generate(engine(other, 1024, kind), asked, 64)
    same = [np.array_equal(a.response_ids, b.response_ids) for a, b in zip(updated, fresh)]
    gaps = [np.abs(a.logp_inf - b.logp_inf).max() for a, b, s in zip(updated, fresh, same) if s]
    return [
        {
            "kind": kind,
            "update s": seconds,
            "same tokens": f"{sum(same)}/{len(same)}",
            "max |dlogp| where same": float(max(gaps, default=float("nan"))),
        }
    ]


def learner_child() -> list[Row]:
    import torch

    from rlcore.learner.head import HeadSpec, head_pass

    torch.manual_seed(0)
    n, d, v = 8192, 2048, 151936
    hidden = torch.randn(n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(v, d, device="cuda") / d**0.5).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(0, v, (n,), device="cuda")

    def measure(name: str, run: Any) -> tuple[Row, Any]:
        hidden.grad = weight.grad = None
        run()[0].backward()  # warm-up: compilation and cuBLAS workspaces
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.monotonic()
        loss, logp = run()
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return {"pass": name, "seconds": time.monotonic() - start, "peak extra GiB": peak / 2**30}, logp.detach()

    def plain() -> Any:
        logp = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return -logp.mean(), logp

    def chunked() -> Any:
        logp = head_pass(hidden, weight, targets, HeadSpec(topk=20)).logp
        return -logp.mean(), logp

    (first, a), (second, b) = measure("plain", plain), measure("chunked", chunked)
    return [first, {**second, "max |dlogp|": float((a - b).abs().max())}]


def write_models(small: str, other: str, large: str) -> None:
    """Two small models with different weights and a large one, each with a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlcore.models import build_char_tokenizer

    make_model(small, "small", max(CONTEXTS) + 512)
    make_model(large, "qwen3-1.7b", max(CONTEXTS) + 512)
    moved = AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.01 * torch.randn_like(p))
    moved.save_pretrained(other)
    for folder in (small, other, large):
        build_char_tokenizer("0123456789").save_pretrained(folder)


def child(*words: str) -> list[Row]:
    """The rows of one part, from a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--child", *words], capture_output=True, text=True, timeout=240)
    if done.returncode:
        return [{"failed": " ".join(words), "why": done.stderr.strip().splitlines()[-1][:200]}]
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["learner", "rollout", "update"])
    parser.add_argument("--json", default=None)
    parser.add_argument("--child", nargs="+", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        part, *rest = args.child
        run = {"rollout": rollout_child, "update": update_child, "learner": learner_child}[part]
        print(json.dumps(run(*rest)))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: nothing was run")
    print(torch.cuda.get_device_name(), torch.__version__)
    results: dict[str, list[Row]] = {}
    if "learner" in args.parts:
        results["learner"] = child("learner")
        show("learner", results["learner"])
    if importlib.util.find_spec("vllm") is None:
        print("rollout and update are skipped: vllm is not installed")
    else:
        with tempfile.TemporaryDirectory() as folder:
            small, other, large = (str(Path(folder) / n) for n in ("small", "other", "large"))
            write_models(small, other, large)
            for part in ("rollout", "update"):
                if part not in args.parts:
                    continue
                words = [(large,)] if part == "rollout" else [(small, other)]
                results[part] = [row for kind in KINDS for w in words for row in child(part, *w, kind)]
                show(part, results[part])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
