"""Parts of `check.py` without an engine: the sparse decode kernel, the learner's LM-head pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from setting import NO_LIGER, Row, Setting

from rlcore.errors import UserError

DIM = 128


def attention(s: Setting, shape: dict[str, int]) -> None:
    """One row for each context length; heads have 128 dimensions."""
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    for batch in s.batches:
        for context in s.contexts:
            if batch * context <= 2**20:  # 4 GiB of keys and values
                s.add("kernel", kernel_row(s, context, heads, kv_heads, batch))


def kernel_row(s: Setting, context: int, heads: int, kv_heads: int, batch: int) -> Row:
    """One layer's decode attention on random keys, dense and sparse, both from CUDA graphs."""
    import rlcore.rollout.engines.vllm  # noqa: F401  sets vLLM's environment variables

    # isort: split
    from vllm.v1.attention.backends import fa_utils

    from rlcore.attention.block_topk import page_summaries
    from rlcore.rollout.engines.vllm import sparse_rows_gpu as rows_gpu
    from rlcore.rollout.engines.vllm.sparse_kernel_gpu import select_blocks

    version = fa_utils.get_flash_attn_version()

    def flash(
        q: Any, k: Any, v: Any, out: Any, start: Any, lens: Any, table: Any, max_q: int, max_k: int
    ) -> None:
        # vLLM may split dense decode over the GPU; the few selected pages need no split
        fa_utils.flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=start,
            max_seqlen_q=max_q,
            seqused_k=lens,
            max_seqlen_k=max_k,
            softmax_scale=1 / math.sqrt(DIM),
            causal=True,
            block_table=table,
            fa_version=version,
            num_splits=0 if max_k == context else 1,
        )

    torch.manual_seed(context)
    pages, size = context // s.rule.block_size, s.rule.block_size
    kv = torch.randn(
        batch * pages + 1, kv_heads, size, 2 * DIM, device="cuda", dtype=torch.bfloat16
    )
    table = (1 + torch.randperm(batch * pages, device="cuda")).view(batch, pages).int()
    lens = torch.randint(context // 2, context + 1, (batch,), device="cuda", dtype=torch.int32)
    query = torch.randn(batch, heads, DIM, device="cuda", dtype=torch.bfloat16)
    summaries = page_summaries(kv[..., :DIM]).to(kv.dtype)
    buffers = rows_gpu.DecodeBuffers(s.rule, batch, pages, "cuda")
    rows, _ = buffers.fill(lens, table)
    out, dense_out = torch.empty_like(query), torch.empty_like(query)
    start = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    k, v = kv.transpose(1, 2).split(DIM, dim=-1)

    def sparse() -> None:
        rows_gpu.attend_rows(query, kv, summaries, table, rows, out, flash, select_blocks)

    graph = captured(sparse)
    # the graph must follow what changes in the memory of its capture
    lens.copy_(torch.randint(1, context + 1, (batch,), device="cuda", dtype=torch.int32))
    query.normal_()
    buffers.fill(lens, table)
    graph.replay()
    replayed = float((out.float() - plain_torch(query, kv, summaries, table, rows)).abs().max())
    chosen = select_blocks(query, summaries, table, rows, 0, batch)
    same = chosen == rows_gpu.kept_blocks(query, summaries, table, rows, 0, batch)
    kept = torch.arange(rows.width, device="cuda") < rows.budget[:, None, None]  # beyond: padding
    dense_ms = milliseconds(lambda: flash(query, k, v, dense_out, start, lens, table, 1, context))
    sparse_ms = milliseconds(sparse)
    return {
        "batch": batch,
        "context": context,
        "max error of a replay with other lengths": replayed,
        "dense ms": dense_ms,
        "sparse ms": sparse_ms,
        "of it selection ms": milliseconds(
            lambda: select_blocks(query, summaries, table, rows, 0, batch)
        ),
        "speed-up": dense_ms / sparse_ms,
        "pages chosen as by the rule": float(same[kept.expand_as(same)].float().mean()),
        "max output error": float(
            (out.float() - plain_torch(query, kv, summaries, table, rows)).abs().max()
        ),
    }


def plain_torch(query: Any, kv: Any, summaries: Any, table: Any, rows: Any) -> Any:
    """Decode attention over the selected pages in float32, one request and head at a time."""
    from rlcore.rollout.engines.vllm import sparse_rows_gpu as rows_gpu

    kept = rows_gpu.kept_blocks(query, summaries, table, rows, 0, len(query)).long()
    out = torch.empty_like(query, dtype=torch.float32)
    flat, group = kv.reshape(-1, *kv.shape[2:]).float(), query.shape[1] // kv.shape[1]
    for r in range(len(query)):
        length = int(rows.kept_len[r])
        for h in range(kv.shape[1]):
            k, v = flat[kept[r, h]].flatten(0, 1)[:length].split(query.shape[2], dim=-1)
            mine = slice(group * h, group * (h + 1))
            out[r, mine] = (
                torch.softmax(query[r, mine].float() @ k.T / math.sqrt(query.shape[2]), -1) @ v
            )
    return out


def milliseconds(run: Callable[[], Any], repeats: int = 50) -> float:
    """Mean time of `run`, replayed from a CUDA graph."""
    graph = captured(run)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def varlen(s: Setting, shape: dict[str, int]) -> None:
    """One layer over packed sequences of unequal lengths: outputs and gradients against SDPA, by
    torch's kernel and by the FlashAttention 4 of vLLM's wheel."""
    torch.manual_seed(0)
    lengths = [4096, 17, 1, 2048, 300]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    inputs = [
        torch.randn(1, h, sum(lengths), DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]
    weight = torch.randn(1, sum(lengths), heads, DIM, device="cuda")
    want = None
    for name, attend in packed_attention(lengths).items():
        begun = time.monotonic()
        try:
            out = attend(*inputs)
        except (
            ImportError,
            RuntimeError,
            TypeError,
            UserError,
        ) as e:  # such as a wheel without that kernel
            s.add("varlen", {"by": name, "what": f"failed: {type(e).__name__}: {str(e)[:120]}"})
            continue
        got = [out, *torch.autograd.grad((out.float() * weight).sum(), inputs)]
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun
        if want is None:
            want = got
            continue
        gaps = [float((a - b).detach().abs().max()) for a, b in zip(got, want)]
        names = ("output", "dq", "dk", "dv")
        row: Row = {f"max error of {n}": g for n, g in zip(names, gaps)}
        s.add("varlen", {"by": name, **row, "first call s": seconds})


def packed_attention(lengths: list[int]) -> dict[str, Callable[..., Any]]:
    """[1, H, T, 128] -> [1, T, H, 128] each; the first is what the others are compared with."""
    from torch.nn.functional import scaled_dot_product_attention

    from rlcore.attention.varlen import Sequences, attend_packed, by_fa4, by_torch

    sequences = Sequences.of(torch.cat([torch.arange(n) for n in lengths])[None].cuda())

    def each(*inputs: Any) -> Any:
        parts = zip(*(x.split(lengths, dim=2) for x in inputs))
        found = [scaled_dot_product_attention(*p, is_causal=True, enable_gqa=True) for p in parts]
        return torch.cat(found, dim=2).transpose(1, 2)

    def packed(kernel: Any, *inputs: Any) -> Any:
        return attend_packed(kernel, None, *inputs, None, sequences=sequences)[0]

    return {
        "SDPA": each,
        "torch": partial(packed, by_torch),
        "FlashAttention 4": partial(packed, by_fa4),
    }


def nccl(s: Setting, shape: dict[str, int]) -> None:
    """A communicator of one rank. vLLM's makes none then, which is said; torch's all-reduces."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    s.add("nccl", {"version": version, "sum of one rank": float(one)})
    dist.destroy_process_group()


def head(s: Setting, shape: dict[str, int]) -> None:
    """Forward and backward of the log-probs of `n` tokens: plain, in chunks with rounded and with
    exact logits, and by Liger's fused kernel, each against those of float32."""
    torch.manual_seed(0)
    n, d, v = 64 if s.small else 8192, shape["hidden_size"], shape["vocab_size"]
    hidden = torch.randn(n, d, device=s.device, dtype=s.dtype, requires_grad=True)
    weight = (torch.randn(v, d, device=s.device) / d**0.5).to(s.dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), device=s.device)
    exact = exact_logp(hidden.detach(), weight.detach(), targets)
    for name, run in head_passes(hidden, weight, targets).items():
        if name.startswith("Liger") and not s.has_liger:
            s.add("head", {"pass": name, "what": NO_LIGER})
            continue
        try:
            run().mean().backward()  # compilation and workspaces
        except (ImportError, RuntimeError) as e:  # such as Liger's kernel for another card
            s.add("head", {"pass": name, "what": f"failed: {type(e).__name__}: {str(e)[:120]}"})
            continue
        hidden.grad = weight.grad = None
        before, begun = _memory(s.device, start=True), time.monotonic()
        logp = run()
        logp.mean().backward()
        peak, seconds = _memory(s.device) - before, time.monotonic() - begun
        hidden.grad = weight.grad = None
        row: Row = {"pass": name, "seconds": seconds}
        if s.device == "cuda":
            row["peak extra GiB"] = peak / 2**30
        apart = (logp.detach() - exact).abs()
        s.add(
            "head", row | {"mean |dlogp|": float(apart.mean()), "max |dlogp|": float(apart.max())}
        )
        del logp


def exact_logp(hidden: Any, weight: Any, targets: Any) -> Any:
    """Log-probs from float32 products, a few rows at a time."""
    rows = zip(hidden.float().split(512), targets.split(512))
    wide = weight.float()
    return torch.cat([(h @ wide.t()).log_softmax(-1).gather(1, t[:, None])[:, 0] for h, t in rows])


def head_passes(hidden: Any, weight: Any, targets: Any) -> dict[str, Callable[[], Any]]:
    from rlcore.learner.lm_head import HeadSpec, head_pass
    from rlcore.learner.specs import LearnerSpec

    def plain() -> Any:
        return (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def chunked(*, fp32: bool, fused: bool = False) -> Any:
        spec = HeadSpec(1.0, LearnerSpec().head_chunk_tokens, topk=20, fp32=fp32, fused=fused)
        return head_pass(hidden, weight, targets, spec).logp

    def liger() -> Any:
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
            LigerFusedLinearScaledCrossEntropyFunction as Fused,
        )

        return -Fused.apply(hidden, weight, targets, return_entropy=True)[0]

    return {
        "plain": plain,
        "chunked": lambda: chunked(fp32=False),
        "chunked, exact logits": lambda: chunked(fp32=True),
        "one kernel, exact logits": lambda: chunked(fp32=True, fused=True),
        "Liger, without top k": liger,
    }


def _memory(device: str, *, start: bool = False) -> int:
    """With `start`: bytes allocated now, and reset the peak; without: the peak since then. 0 on
    CPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    if not start:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
