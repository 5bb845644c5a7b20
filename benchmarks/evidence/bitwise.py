"""Which operations of vLLM's CPU engine keep it from the learner's log-probs, to the bit.

    python -m benchmarks.evidence.bitwise [--out benchmarks/results/bitwise_cpu.md]

One engine with `bitwise=true` samples; the learner's policy scores the same tokens by the same
weights. Then one operation at a time is vLLM's own again, then all of them, and the log-probs that
differ are counted. One process, one thread, a few minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import machine, table
from rlcore.attention.bitwise import hold
from rlcore.interfaces import RolloutEngine
from rlcore.learner.cpu.norms import own_norms
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.packing import pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.learner.sequences import TokenSequence
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.rollout.specs import ActorSpec, EngineJob, RolloutSpec
from rlcore.types import Request, Trajectory

ALPHABET = "0123456789abcdefghijklmnop =+-"
MAX_LEN = 128
_SILU = torch.nn.functional.silu
SHAPE = {"hidden_size": 192, "layers": 4, "heads": 6, "kv_heads": 3, "head_dim": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measured(sharp_model(Path(folder) / "model")))
    text = page(rows)
    print(text)
    if args.out:
        args.out.write_text(text)


def sharp_model(folder: Path) -> str:
    """A fresh model whose distributions are far from flat."""
    from safetensors.torch import load_file, save_file

    spec = FreshModelSpec(intermediate_size=512, vocab_size=64, **SHAPE)
    build_fresh_model(folder, ALPHABET, spec, seed=3, max_len=MAX_LEN)
    file = folder / "model.safetensors"
    sharp = {n: t * 4 if t.ndim == 2 else t for n, t in load_file(file).items()}
    save_file(sharp, file, metadata={"format": "pt"})
    return str(folder)


def measured(model: str) -> Iterator[dict[str, Any]]:
    """A row for each operation that is vLLM's."""
    from rlcore.rollout.engines.vllm.engine import VllmEngine

    actor = ActorSpec(max_num_seqs=64, kv_cache_gib=0.1)
    job = EngineJob(actor, "bf16-0", model, max_len=MAX_LEN, logprobs_k=4, bitwise=True)
    engine = VllmEngine(job)
    policy = policies(model)
    variants = {"none": ()} | {name: (swap,) for name, swap in SWAPS.items()}
    variants["all of them"] = tuple(SWAPS.values())
    for name, swaps in variants.items():
        with ExitStack() as stack:
            for swap in swaps:
                stack.enter_context(swap())
            found = sample(engine)
        engine.core.forget_prefixes()
        yield {"vLLM's own": name, **differences(policy, found)}


def sample(engine: RolloutEngine) -> list[Trajectory]:
    """Answers of 4 to 67 tokens, so that steps have 64 requests at first and one in the end."""
    sampling = [RolloutSpec(max_new_tokens=4 + i, logprobs_k=4).sampling() for i in range(64)]
    prompts = [np.array([3 + i % 8, 7, 11, 5, 9 + i % 3], np.int32)[: 2 + i % 4] for i in range(64)]
    pairs = enumerate(zip(prompts, sampling, strict=True))
    asked = [Request(0, i, f"x/train/{i}", prompt, spec, i) for i, (prompt, spec) in pairs]
    engine.add(asked)
    found: list[Trajectory] = []
    while len(found) < len(asked):
        found += engine.step()
    return found


def policies(model: str) -> Policy:
    lm = load_causal_lm(model, "float32", "sdpa")
    own_norms(lm)
    hold(lm, MAX_LEN)
    return Policy(lm)


@torch.no_grad()
def differences(policy: Policy, found: list[Trajectory]) -> dict[str, Any]:
    """Log-probs of the sampled tokens that differ, and by how much."""
    answers = [(t.prompt_ids.tolist(), t.sampled_ids.tolist()) for t in found]
    episodes = [(TokenSequence.of_answer(*answer),) for answer in answers]
    apart: list[np.ndarray] = []
    for mb in pack(episodes, 900, "sorted"):
        scores = policy(mb, None, HeadSpec(1.0, 1024, invariant=True))[1]
        for row, index in enumerate(mb.episodes.tolist()):
            apart.append(scores[mb.row == row].numpy() - found[index].logp_inf)
    gaps = np.abs(np.concatenate(apart))
    return {
        "tokens": len(gaps),
        "differ": f"{np.mean(gaps > 0):.1%}",
        "mean abs": float(gaps.mean()),
        "largest": float(gaps.max()),
    }


@contextmanager
def replaced(name: str, by: Callable[..., Any]) -> Iterator[None]:
    with patch(f"rlcore.rollout.engines.vllm.cpu.bitwise_decoder.{name}", by):
        yield


def norm(self: Any, x: Tensor) -> Tensor:
    """vLLM's kernel."""
    out = torch.empty_like(x := x.contiguous())
    torch.ops._C.rms_norm.default(out, x, self.weight, self.eps)
    return out


def silu(gate: Tensor) -> Tensor:
    """torch's, on the columns of a product, as vLLM has them."""
    both = torch.cat((gate, gate), -1)
    return _SILU(both.chunk(2, dim=-1)[0])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """vLLM's kernel, for [n, heads, d]."""
    n, heads, d = x.shape
    tables = torch.cat((cos[:, 0, : d // 2], sin[:, 0, : d // 2]), -1).contiguous()
    out = x.reshape(n, heads * d).clone()
    other = torch.zeros(n, d)
    torch.ops._C.rotary_embedding.default(torch.arange(n), out, other, d, tables, True)
    return out.view(n, heads, d)


def attended(self: Any, q: Tensor, step: Any, part: slice) -> Tensor:
    """vLLM's kernel over its own cache, once for all tokens of a step."""
    from rlcore.rollout.engines.vllm.cpu.decoder import Cache

    if part.start:
        return q[:0]
    attention, its = self.attention, step.its
    impl, cache, ops = attention.impl, Cache.of(attention), torch.ops._C
    scales = attention._k_scale_float, attention._v_scale_float, impl.kv_cache_dtype
    k, v = self.keys[step.stored], self.values[step.stored]
    stored = cache.keys, cache.values
    ops.cpu_attn_reshape_and_cache.default(k, v, *stored, its.slot_mapping, attention.isa, *scales)
    out = torch.empty_like(q := q.contiguous())
    ops.cpu_attention_with_kv_cache.default(
        *(q, *stored, out, its.query_start_loc, its.seq_lens, impl.scale, its.causal),
        *(impl.alibi_slopes, impl.sliding_window, its.block_table, impl.logits_soft_cap),
        *(its.scheduler_metadata, impl.sinks, its.dynamic_causal, *scales),
    )
    return out


#: operation -> what makes it vLLM's; an embedding is a row that is read
SWAPS: dict[str, Callable[[], Any]] = {
    "RMS norm": lambda: replaced("_Norm.__call__", norm),
    "products of fewer than 8 rows": lambda: replaced("linear", torch.nn.functional.linear),
    "rotation": lambda: replaced("rotated", rotated),
    "attention": lambda: replaced("_Layer._rows", attended),
    "SiLU of the MLP": lambda: replaced("F.silu", silu),
    "log-softmax": lambda: replaced("log_probs", lambda z: z.log_softmax(-1)),
}


def page(rows: list[dict[str, Any]]) -> str:
    return f"""# What keeps vLLM's CPU engine from the learner's log-probs

`benchmarks/evidence/bitwise.py` on {machine()}, one thread, float32: a Qwen3 of four layers and
width 192. The engine is that of `bitwise=true`; in each row one operation is vLLM's own again, and
the log-probs of the same sampled tokens are compared with the learner's, by the same weights. An
embedding is a row that is read, and is the same everywhere.

{table(rows)}

Products of eight rows and more are equal to the bit whatever else is in the step. The SiLU is the
same where the MLP's width is a multiple of 32, and `bitwise=true` refuses others.
"""


if __name__ == "__main__":
    main()
