"""One part of `check.py` in a process of its own.

python parts.py PART FOLDER SHAPE DEVICE CONTEXTS ROWS
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

from setting import SHAPES, Row, Setting

LOGPROBS_K = 20


def write_model(s: Setting) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlcore.models.fresh import build_char_tokenizer

    torch.manual_seed(0)
    shape = SHAPES[s.shape]
    # wider than the usual 0.02, which gives a nearly uniform output distribution
    spread = 2 / math.sqrt(shape["hidden_size"])
    config = Qwen3Config(
        max_position_embeddings=max(s.contexts) + 512,
        tie_word_embeddings=True,
        initializer_range=spread,
        **shape,
    )
    with torch.device(s.device):
        model = Qwen3ForCausalLM(config)
    model.to(s.dtype).save_pretrained(s.model)
    build_char_tokenizer("0123456789").save_pretrained(s.model)
    s.add("model", {"parameters": sum(p.numel() for p in model.parameters())})


def prompts(count: int, length: int) -> list[Any]:
    import numpy as np

    return [
        np.random.default_rng(i).integers(3, 500, length).astype(np.int32) for i in range(count)
    ]


def engine(
    s: Setting, kind: str, *, model: str | None = None, eager: bool = False, memory: float = 0.8
) -> Any:
    """An actor of `kind` as in a run, without the prefix cache, which would make a repeated prompt
    free."""
    from rlcore.rollout.registry import start_engine
    from rlcore.rollout.specs import ActorSpec, EngineJob

    fp8: Row = {"kind": "fp8", "rounding": "fp8" if s.small else "none"}  # emulated on CPU
    options: dict[str, Row] = {
        "bf16": {},
        "sparse": {"kind": "sparse", "sparse": s.rule},
        "fp8": fp8,
        "fp8 + fp8 kv": fp8 | {"fp8_kv_cache": True},
    }
    actor = ActorSpec(
        num_gpus=0 if s.small else 1,
        max_num_seqs=s.batch,
        kv_cache_gib=0.1,
        gpu_memory_utilization=memory,
        enforce_eager=s.small or eager,
        prefix_caching=False,
        **options[kind],
    )
    max_len = max(s.contexts) + 256
    return start_engine(EngineJob(actor, "check-0", model or s.model, max_len, LOGPROBS_K))


def generate(llm: Any, asked: list[Any], new_tokens: int) -> tuple[list[Any], float]:
    """Finished trajectories by sample, and seconds."""
    from rlcore.testing.records import make_sampling
    from rlcore.types import Request

    spec = make_sampling(max_new_tokens=new_tokens, logprobs_k=LOGPROBS_K)
    llm.add([Request(0, i, "check/train/0", p, spec, seed=i) for i, p in enumerate(asked)])
    start, done = time.monotonic(), []
    while llm.unfinished():
        done += llm.step()
    return sorted(done, key=lambda t: t.sample_index), time.monotonic() - start


def rollout(s: Setting, kind: str) -> None:
    """Log-probs against a forward of transformers (sparse: of the learner), then rates at every
    context."""
    name = f"{kind} (emulated)" if s.small and kind == "fp8" else kind
    start = time.monotonic()
    llm = engine(s, kind)
    s.add(kind, {"actor": name, "start s": time.monotonic() - start})
    length = 96 if s.small else 768  # beyond the sparse budget
    samples, _ = generate(llm, prompts(4, length), s.new_tokens // 2)  # also warms the engine up
    s.add(kind, {"actor": name, **distances(s, samples, kind)})
    for context in s.contexts:
        batch = prompts(s.batch, context)
        first, prefill_s = generate(llm, batch, 1)
        done, whole_s = generate(llm, batch, s.new_tokens)
        # the difference of the two runs is decoding without prefill
        decoded = sum(len(t.logp_inf) for t in done) - len(first)
        s.add(
            kind,
            {
                "actor": name,
                "context": context,
                "decode tokens/s": decoded / max(whole_s - prefill_s, 1e-9),
                "prefill s": prefill_s,
                "tokens/s with prefill": sum(len(t.logp_inf) for t in done) / whole_s,
            },
        )
    llm.close()


def distances(s: Setting, samples: list[Any], kind: str) -> Row:
    """|log-prob of the actor - log-prob of a plain forward| over the sampled tokens.

    For FP8 actors this is the mismatch that corrections act on, not an error: `update` checks FP8
    for errors. For a sparse actor the distance to the dense forward shows the effect of its rule,
    as a scale for its distance to the learner.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from rlcore.attention.implementation import SparseRows, register

    model = AutoModelForCausalLM.from_pretrained(
        s.model, dtype=s.dtype, attn_implementation=register()
    )
    model.to(s.device).eval()
    row: Row = {}
    for against in ("learner", "dense") if kind == "sparse" else ("transformers",):
        gaps = []
        for t in samples:
            n = len(t.prompt_ids)
            ids = torch.tensor(t.token_ids, device=s.device).long()[None]
            extra = {"sparse_rows": SparseRows(s.rule, [n])} if against == "learner" else {}
            with torch.no_grad():
                logp = (
                    model(ids, use_cache=False, **extra)
                    .logits[0, n - 1 : -1]
                    .float()
                    .log_softmax(-1)
                )
            gaps.append(
                (logp.gather(1, ids[0, n:, None])[:, 0].cpu() - torch.tensor(t.logp_inf)).abs()
            )
        gap = torch.cat(gaps)
        row |= {
            f"mean |dlogp| to {against}": float(gap.mean()),
            f"max to {against}": float(gap.max()),
        }
    return row


def update(s: Setting) -> None:
    """FP8 weights loaded in place against an engine started with them: tokens and log-probs."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = str(s.folder / "other")
    moved = AutoModelForCausalLM.from_pretrained(s.model, dtype=s.dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.1 * p.abs().mean() * torch.randn_like(p))
    moved.save_pretrained(other)
    AutoTokenizer.from_pretrained(s.model).save_pretrained(other)

    from rlcore.models.folder import read_weights
    from rlcore.weights.stream import whole

    asked = prompts(s.batch, min(256, min(s.contexts)))
    # eager and small, because the first engine may not release all GPU memory when it closes
    llm = engine(s, "fp8", eager=True, memory=0.4)
    before, _ = generate(llm, asked, s.new_tokens // 2)
    weights = read_weights(other)
    start = time.monotonic()
    llm.update_weights(1, whole(weights), "in_flight")
    seconds = time.monotonic() - start
    updated, _ = generate(llm, asked, s.new_tokens // 2)
    llm.close()
    fresh, _ = generate(
        engine(s, "fp8", model=other, eager=True, memory=0.4), asked, s.new_tokens // 2
    )

    def same(a: list[Any], b: list[Any]) -> list[bool]:
        return [np.array_equal(x.sampled_ids, y.sampled_ids) for x, y in zip(a, b)]

    gaps = [
        np.abs(a.logp_inf - b.logp_inf).max()
        for a, b, s in zip(updated, fresh, same(updated, fresh))
        if s
    ]
    row = {
        "update s": seconds,
        "same as a fresh engine": f"{sum(same(updated, fresh))}/{len(fresh)}",
        "same as before it": f"{sum(same(updated, before))}/{len(fresh)}",
    }
    s.add("update", row | ({"max |dlogp| where same": float(max(gaps))} if gaps else {}))


MODULES = (
    "rlcore.attention.varlen",
    "rlcore.learner.engines.deepspeed",
    "rlcore.weights.group",
    "rlcore.rollout.engines.vllm.engine",
    "rlcore.weights.vllm_transfer",
    "rlcore.rollout.engines.vllm.sparse_rows_gpu",
    "rlcore.rollout.engines.vllm.sparse_kernel_gpu",
    "rlcore.rollout.engines.vllm.sparse_backend_gpu",
)


def imports(s: Setting) -> None:
    """Import what GPU paths import, one by one: a row for each."""
    import importlib

    for name in MODULES:
        try:
            importlib.import_module(name)
            found = "ok"
        except Exception as e:  # whatever it is, the next one is tried
            found = f"failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        s.add("imports", {"module": name, "found": found})


def main() -> None:
    part, folder, shape, device, contexts, rows = sys.argv[1:]
    s = Setting(Path(folder), shape, device, tuple(map(int, contexts.split(","))), Path(rows))
    if part == "model":
        write_model(s)
    elif part == "update":
        update(s)
    elif part == "imports":
        imports(s)
    elif part in ("kernel", "head", "varlen", "nccl"):
        import kernels

        run = {"kernel": kernels.attention}.get(part) or getattr(kernels, part)
        run(s, SHAPES[shape])
    else:
        rollout(s, part)


if __name__ == "__main__":
    main()
