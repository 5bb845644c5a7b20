"""Decode time by context length: vLLM's CPU attention against block top-k at a fixed page budget.

    python -m benchmarks.speed.sparse_decode [--model FOLDER] [--blocks 32] [--batch 8]
        [--json FILE]
                                       [--contexts 1024 2048 4096 8192]

Without `--model` the model has random weights and the attention shape of Qwen3-0.6B and 1.7B (16
query and 8 KV heads of 128), with few and narrow layers, so that attention dominates. Each kind
runs in its own process.
"step" is a whole engine step, "attention" the attention of one layer, of which "selection" scores
and selects pages; medians over steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import again

LAYERS = 4  # of the model that is made


def timed(owner: type, method: str, into: list[float]) -> None:
    """Replace a method by one that appends its seconds to `into`."""
    inner: Callable[..., Any] = getattr(owner, method)

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = inner(*args, **kwargs)
        into.append(time.perf_counter() - start)
        return out

    setattr(owner, method, run)


def measure(
    kind: str, model: str, contexts: list[int], batch: int, blocks: int, steps: int
) -> list[dict[str, float]]:
    """In the child process: one row of milliseconds for each context length."""
    import rlcore.rollout.engines.vllm  # noqa: F401  sets vLLM's environment variables

    # isort: split
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from rlcore.attention.specs import SparseSpec
    from rlcore.models.folder import read_config
    from rlcore.rollout.engines.vllm import sparse_cpu
    from rlcore.rollout.engines.vllm.sparse_cpu import SparseCPUImpl

    layers = int(read_config(model)["num_hidden_layers"])
    attention: list[float] = []
    selection: list[float] = []
    extra: dict[str, Any] = {}
    if kind == "sparse":
        sparse_cpu.install(SparseSpec(blocks=blocks, prompt="dense"))
        extra["block_size"] = 16
        timed(SparseCPUImpl, "_select", selection)
    timed(SparseCPUImpl if kind == "sparse" else CPUAttentionBackendImpl, "forward", attention)
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(contexts) + steps + 16,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        **extra,
    )
    if kind == "sparse":
        llm.llm_engine.collective_rpc(lambda worker: sparse_cpu.bind(worker.model_runner))
    engine, rows = llm.llm_engine, []
    for length in contexts:
        for i in range(batch):
            prompt = {"prompt_token_ids": [(i * 31 + j * 7) % 250 + 3 for j in range(length)]}
            params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, detokenize=False)
            engine.add_request(f"{length}-{i}", prompt, params)
        whole, per_step = [], []
        while engine.has_unfinished_requests():
            attention.clear(), selection.clear()
            start = time.perf_counter()
            done = engine.step()
            if len(done) == batch and len(attention) == layers:
                whole.append(time.perf_counter() - start)
                per_step.append((sum(attention), sum(selection)))
        # the first decode steps may include the end of a prompt
        per_step, whole = per_step[-steps + 4 :], whole[-steps + 4 :]
        rows.append(
            {
                "context": length,
                "step": 1e3 * statistics.median(whole),
                "attention": 1e3 * statistics.median(a for a, _ in per_step) / layers,
                "selection": 1e3 * statistics.median(s for _, s in per_step) / layers,
            }
        )
    return rows


def make_model(folder: str, max_len: int) -> None:
    """Write a model with random weights; nothing is downloaded."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=512,
        max_position_embeddings=max_len,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def run_kind(kind: str, args: argparse.Namespace, model: str) -> list[dict[str, float]]:
    """Measure one kind in a process of its own; its rows."""
    settings = vars(args) | {"kind": kind, "model": model}
    env = {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib)} | os.environ
    command = [*again(__spec__), "--child", json.dumps(settings)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout_s)
    if done.returncode:
        sys.exit(f"the {kind} run failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def show(rows: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    print(
        f"\nbatch {args.batch}, budget {args.blocks} pages of 16 = {args.blocks * 16} tokens; "
        "milliseconds"
    )
    print(
        f"{'context':>8} {'step':>17} {'':>6} {'attention, a layer':>20} {'':>6} {'selection':>10}"
    )
    print(
        f"{'':>8} {'dense':>8} {'sparse':>8} {'x':>6} {'dense':>11} {'sparse':>8} {'x':>6} {'':>10}"
    )
    for d, s in zip(rows["dense"], rows["sparse"]):
        step = f"{d['step']:8.2f} {s['step']:8.2f} {d['step'] / s['step']:6.2f}"
        attention = (
            f"{d['attention']:11.2f} {s['attention']:8.2f} {d['attention'] / s['attention']:6.2f}"
        )
        print(f"{d['context']:8.0f} {step} {attention} {s['selection']:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder; by default one is made")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument(
        "--steps", type=int, default=36, help="decode steps measured at each length"
    )
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("--json", help="also write the rows here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(folder, max(args.contexts) + args.steps + 16)
        rows = {kind: run_kind(kind, args, args.model or folder) for kind in ("dense", "sparse")}
    show(rows, args)
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        given = json.loads(sys.argv[2])
        names = ("kind", "model", "contexts", "batch", "blocks", "steps")
        print(json.dumps(measure(*(given[name] for name in names))))
    else:
        main()
