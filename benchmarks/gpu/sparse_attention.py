"""Checks and timings of block top-k sparse attention on one CUDA GPU; prints a table for each part.

    python benchmarks/gpu/sparse_attention.py [--parts kernel engine throughput] [--json FILE]

kernel      page scores against a reference; decode attention over the kept pages against plain PyTorch; time of one
            layer's decode attention, dense and sparse, captured in CUDA graphs, at 4K, 8K and 16K
engine      vLLM's log-probs: a covering budget against dense; a small budget against the learner's attention
throughput  decode tokens per second of vLLM, dense and sparse, at those lengths

Models have random weights (Qwen3-1.7B's shape for throughput), so nothing is downloaded. Each engine has a process of
its own. Parts whose packages are missing are skipped with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXTS = (4096, 8192, 16384)
BLOCKS = 32
SHAPES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024, "vocab_size": 512},
    "qwen3-1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "vocab_size": 151936},
}
Row = dict[str, Any]


def make_model(folder: str, shape: str, max_len: int) -> None:
    """A Qwen3 model with random weights, 16 query and 8 KV heads of 128, bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(max_position_embeddings=max_len, tie_word_embeddings=True, **heads, **SHAPES[shape])
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def milliseconds(run: Callable[[], Any], repeats: int = 50) -> float:
    """Mean time of `run`, replayed from a CUDA graph."""
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def kernel_row(context: int, batch: int = 32) -> Row:
    """One layer's decode attention on random keys."""
    import torch
    from vllm.v1.attention.backends import fa_utils

    from rlcore.attention.block_topk import BlockTopK, group_queries, page_summaries
    from rlcore.rollout import sparse_rows_gpu as rows_gpu

    version = fa_utils.get_flash_attn_version()

    def flash(q: Any, k: Any, v: Any, out: Any, start: Any, lens: Any, table: Any, max_q: int, max_k: int) -> None:
        # the pages kept need no splitting; dense decode may be split over the GPU, as vLLM lets it
        fa_utils.flash_attn_varlen_func(
            q=q, k=k, v=v, out=out, cu_seqlens_q=start, max_seqlen_q=max_q, seqused_k=lens, max_seqlen_k=max_k,
            softmax_scale=1 / math.sqrt(128), causal=True, block_table=table, fa_version=version,
            num_splits=0 if max_k == context else 1,
        )  # fmt: skip

    torch.manual_seed(context)
    pages = context // 16
    kv = torch.randn(batch * pages + 1, 8, 16, 256, device="cuda", dtype=torch.bfloat16)
    table = (1 + torch.randperm(batch * pages, device="cuda")).view(batch, pages).int()
    lens = torch.randint(context // 2, context + 1, (batch,), device="cuda", dtype=torch.int32)
    query = torch.randn(batch, 16, 128, device="cuda", dtype=torch.bfloat16)
    summaries = page_summaries(kv[..., :128])
    rows, _ = rows_gpu.decode_rows(BlockTopK(blocks=BLOCKS), lens, table, pages)
    out, dense_out = torch.empty_like(query), torch.empty_like(query)
    start = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    k, v = kv.transpose(1, 2).split(128, dim=-1)

    def sparse() -> None:
        rows_gpu.attend_rows(query, kv, summaries, table, rows, out, flash, rows_gpu.page_scores)

    sparse()
    grouped = group_queries(query, 8)
    got = rows_gpu.page_scores(grouped, summaries, table, rows.pages)
    want = rows_gpu.page_scores_reference(grouped, summaries, table, rows.pages)
    inside = (torch.arange(pages, device="cuda") < rows.pages[:, None])[:, None].expand_as(got)
    return {
        "context": context,
        "score error": float((got - want)[inside].abs().max()),
        "output error": float((out.float() - reference(query, kv, summaries, table, rows)).abs().max()),
        "dense ms": milliseconds(lambda: flash(query, k, v, dense_out, start, lens, table, 1, context)),
        "sparse ms": milliseconds(sparse),
        "selection ms": milliseconds(
            lambda: rows_gpu.kept_blocks(query, summaries, table, rows, 0, batch, rows_gpu.page_scores)
        ),
    }


def reference(query: Any, kv: Any, summaries: Any, table: Any, rows: Any) -> Any:
    """Decode attention over the kept pages in float32, request and head at a time."""
    import torch

    from rlcore.rollout import sparse_rows_gpu as rows_gpu

    kept = rows_gpu.kept_blocks(query, summaries, table, rows, 0, len(query), rows_gpu.page_scores_reference).long()
    out = torch.empty_like(query, dtype=torch.float32)
    flat = kv.reshape(-1, *kv.shape[2:]).float()
    for r in range(len(query)):
        length = int(rows.kept_len[r])
        for h in range(kv.shape[1]):
            k, v = flat[kept[r, h]].flatten(0, 1)[:length].split(128, dim=-1)
            q = query[r, 2 * h : 2 * h + 2].float()
            out[r, 2 * h : 2 * h + 2] = torch.softmax(q @ k.T / math.sqrt(128), -1) @ v
    return out


def engine_child(model: str, rule: Row | None, lengths: list[int], batch: int, new_tokens: int, keep: bool) -> Row:
    """Runs in a process of its own: samples `batch` prompts of each length; times, and the samples if `keep`."""
    import rlcore.rollout  # noqa: F401  sets vLLM's environment, before vLLM is imported

    # isort: split
    from vllm import LLM, SamplingParams

    from rlcore.attention.block_topk import BlockTopK
    from rlcore.rollout import sparse_backend_gpu as sparse

    if rule is not None:
        sparse.install(BlockTopK(**rule))
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(lengths) + new_tokens,
        max_num_seqs=batch,
        block_size=16,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        gpu_memory_utilization=0.8,
        attention_config={"backend": "FLASH_ATTN"},
        seed=0,
    )
    if rule is not None:
        llm.llm_engine.collective_rpc(lambda worker: sparse.bind(worker.model_runner))
    result: Row = {"rates": {}, "samples": []}
    for length in lengths:
        prompts: list[Any] = [
            {"prompt_token_ids": [(i * 31 + j * j * 7) % 500 + 3 for j in range(length)]} for i in range(batch)
        ]
        # the difference of two runs leaves decoding alone
        seconds = {}
        for n in (1, new_tokens):
            params = SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0 if keep else None, detokenize=False)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds[n] = time.perf_counter() - start
        result["rates"][length] = batch * (new_tokens - 1) / (seconds[new_tokens] - seconds[1])
        for out in outputs if keep else []:
            tokens = list(out.outputs[0].token_ids)
            logp = [d[t].logprob for d, t in zip(out.outputs[0].logprobs or [], tokens)]
            result["samples"].append({"prompt": out.prompt_token_ids, "tokens": tokens, "logp": logp})
    return result


def engine(**settings: Any) -> Row:
    """`engine_child` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(settings)], capture_output=True, text=True, timeout=400
    )
    if done.returncode:
        raise RuntimeError(f"engine {settings['rule']} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def engine_part() -> list[Row]:
    """bfloat16 throughout: the dense actor against the dense learner is the scale of what rounding alone does."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlcore.attention.block_topk import BlockTopK
    from rlcore.attention.learner import SparseRows, register

    small: list[Row | None] = [{"blocks": 4}, {"share": 0.3}, {"blocks": 4, "sparse_prompt": False}]
    found = []
    with tempfile.TemporaryDirectory() as model:
        make_model(model, "small", 1024)
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation=register()).cuda()
        for rule in [None, {"blocks": 64}, *small]:
            samples = engine(model=model, rule=rule, lengths=[200], batch=16, new_tokens=300, keep=True)["samples"]
            row: Row = {"actor": json.dumps(rule) if rule else "dense"}
            for name, attend in (("own", rule), ("dense", None)):
                gap = []
                for s in samples:
                    ids = torch.tensor([s["prompt"] + s["tokens"]], device="cuda")
                    extra = {"sparse_rows": SparseRows(BlockTopK(**attend), [len(s["prompt"])])} if attend else {}
                    with torch.no_grad():
                        logits = net(input_ids=ids, use_cache=False, **extra).logits[0, len(s["prompt"]) - 1 : -1]
                    logp = logits.float().log_softmax(-1).gather(1, ids[0, len(s["prompt"]) :, None])[:, 0]
                    gap.append((logp - torch.tensor(s["logp"], device="cuda")).abs())
                row[f"mean |dlogp| to {name} learner"] = float(torch.cat(gap).mean())
                row[f"99.9% to {name} learner"] = float(torch.cat(gap).quantile(0.999))
            found.append(row)
    return found


def throughput_part() -> list[Row]:
    """Whole-engine decoding."""
    with tempfile.TemporaryDirectory() as model:
        make_model(model, "qwen3-1.7b", max(CONTEXTS) + 200)
        settings = {"model": model, "lengths": list(CONTEXTS), "batch": 32, "new_tokens": 128, "keep": False}
        # prompts dense on both sides: what is compared is decoding
        sparse = engine(rule={"blocks": BLOCKS, "sparse_prompt": False}, **settings)["rates"]
        captured = engine(rule={"blocks": BLOCKS}, **settings)["rates"]
        dense = engine(rule=None, **settings)["rates"]
    return [
        {
            "context": c,
            "dense tok/s": dense[str(c)],
            "sparse tok/s": sparse[str(c)],
            "sparse captured tok/s": captured[str(c)],
            "speed-up": max(sparse[str(c)], captured[str(c)]) / dense[str(c)],
        }
        for c in CONTEXTS
    ]


PARTS: dict[str, Callable[[], list[Row]]] = {
    "kernel": lambda: [kernel_row(c) for c in CONTEXTS],
    "engine": engine_part,
    "throughput": throughput_part,
}


def show(name: str, rows: list[Row]) -> None:
    print(f"\n{name}")
    print(" | ".join(f"{k:>14}" for k in rows[0]))
    for row in rows:
        print(
            " | ".join(f"{v:>{max(14, len(k))}.4g}" if isinstance(v, float) else f"{v!s:>14}" for k, v in row.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", help="also write the rows here")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: nothing to check")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, budget {BLOCKS} pages of 16")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name in args.parts:
        try:
            result[name] = PARTS[name]()
        except ImportError as e:
            print(f"\n{name}: skipped, {e}")
            continue
        show(name, result[name])
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(engine_child(**json.loads(sys.argv[2]))))
    else:
        main()
