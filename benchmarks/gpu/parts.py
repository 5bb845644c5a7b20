"""What `check.py` runs, a process a part: python parts.py PART FOLDER SHAPE DEVICE CONTEXTS ROWS."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 32}
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4, **TINY},
    "qwen3-1.7b": {
        "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16, **QWEN
    },
    "qwen3-4b": {
        "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32, **QWEN
    },
}  # fmt: skip
LOGPROBS_K = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """What all parts share, so that their rows can be compared."""

    folder: Path
    shape: str
    device: str
    contexts: tuple[int, ...]
    rows: Path

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def batch(self) -> int:
        return 4 if self.small else 16

    @property
    def new_tokens(self) -> int:
        return 16 if self.small else 128

    @property
    def rule(self) -> Any:
        """Block top-k with a budget that every context exceeds."""
        from rlcore.attention.block_topk import BlockTopK

        return BlockTopK(blocks=3 if self.small else 32)

    @property
    def dtype(self) -> Any:
        import torch

        return torch.float32 if self.small else torch.bfloat16

    def add(self, part: str, row: Row) -> None:
        """Append a row; it stays, whatever comes of the part after it."""
        with self.rows.open("a") as file:
            file.write(json.dumps({"part": part, **row}) + "\n")


def write_model(s: Setting) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlcore.models import build_char_tokenizer

    torch.manual_seed(0)
    shape = SHAPES[s.shape]
    spread = 2 / math.sqrt(shape["hidden_size"])  # wider than the usual 0.02, whose outputs are nearly uniform
    config = Qwen3Config(
        max_position_embeddings=max(s.contexts) + 512, tie_word_embeddings=True, initializer_range=spread, **shape
    )
    with torch.device(s.device):
        model = Qwen3ForCausalLM(config)
    model.to(s.dtype).save_pretrained(s.model)
    build_char_tokenizer("0123456789").save_pretrained(s.model)
    s.add("model", {"parameters": sum(p.numel() for p in model.parameters())})


def prompts(count: int, length: int) -> list[Any]:
    import numpy as np

    return [np.random.default_rng(i).integers(3, 500, length).astype(np.int32) for i in range(count)]


def engine(s: Setting, kind: str, *, model: str | None = None, eager: bool = False, memory: float = 0.8) -> Any:
    """An actor of `kind` as a run has it, but for the prefix cache: a prompt seen before would cost nothing."""
    from rlcore.rollout.vllm_engine import VllmEngine

    fp8: Row = {"rounding": "fp8"} if s.small else {"quantization": "fp8"}  # on CPU: emulated
    options: dict[str, Row] = {
        "bf16": {},
        "sparse": {"sparse": s.rule},
        "fp8": fp8,
        "fp8 + fp8 kv": fp8 | {"kv_cache_dtype": "fp8"},
    }
    return VllmEngine(
        model_path=model or s.model,
        actor_id="check",
        actor_kind=kind.split()[0],  # type: ignore[arg-type]
        max_len=max(s.contexts) + 256,
        max_num_seqs=s.batch,
        kv_cache_gib=0.1,
        gpu_memory_utilization=memory,
        enforce_eager=s.small or eager,
        prefix_caching=False,
        logprobs_k=LOGPROBS_K,
        **options[kind],
    )


def generate(llm: Any, asked: list[Any], new_tokens: int) -> tuple[list[Any], float]:
    """Finished trajectories by sample, and seconds."""
    from rlcore.types import Request, SamplingSpec

    spec = SamplingSpec(max_new_tokens=new_tokens, logprobs_k=LOGPROBS_K)
    llm.add([Request(0, i, "check/train/0", p, spec, seed=i) for i, p in enumerate(asked)])
    start, done = time.monotonic(), []
    while llm.unfinished():
        done += llm.step()
    return sorted(done, key=lambda t: t.sample_index), time.monotonic() - start


def rollout(s: Setting, kind: str) -> None:
    """Rates at every context, then log-probs against a forward of transformers, or of the learner when sparse."""
    name = f"{kind} (emulated)" if s.small and kind == "fp8" else kind
    start = time.monotonic()
    llm = engine(s, kind)
    s.add(kind, {"actor": name, "start s": time.monotonic() - start})
    length = 96 if s.small else 768  # beyond the sparse budget
    samples, _ = generate(llm, prompts(4, length), s.new_tokens // 2)  # first: also what warms the engine up
    s.add(kind, {"actor": name, **distances(s, samples, kind)})
    for context in s.contexts:
        batch = prompts(s.batch, context)
        first, prefill_s = generate(llm, batch, 1)
        done, whole_s = generate(llm, batch, s.new_tokens)
        # the difference of two runs leaves decoding alone
        decoded = sum(len(t.response_ids) for t in done) - len(first)
        s.add(
            kind,
            {
                "actor": name,
                "context": context,
                "decode tokens/s": decoded / max(whole_s - prefill_s, 1e-9),
                "prefill s": prefill_s,
                "tokens/s with prefill": sum(len(t.response_ids) for t in done) / whole_s,
            },
        )
    llm.close()


def distances(s: Setting, samples: list[Any], kind: str) -> Row:
    """|log-prob of the actor - log-prob of a plain forward| over the sampled tokens.

    FP8 against unquantised weights is the mismatch to be corrected, not an error; see `update` for that. A sparse
    actor's distance to the dense forward is what its rule changes, the scale for its distance to the learner.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from rlcore.attention.learner import SparseRows, register

    model = AutoModelForCausalLM.from_pretrained(s.model, dtype=s.dtype, attn_implementation=register())
    model.to(s.device).eval()
    row: Row = {}
    for against in ("learner", "dense") if kind == "sparse" else ("transformers",):
        gaps = []
        for t in samples:
            n = len(t.prompt_ids)
            ids = torch.tensor([[*t.prompt_ids.tolist(), *t.response_ids.tolist()]], device=s.device)
            extra = {"sparse_rows": SparseRows(s.rule, [n])} if against == "learner" else {}
            with torch.no_grad():
                logp = model(ids, use_cache=False, **extra).logits[0, n - 1 : -1].float().log_softmax(-1)
            gaps.append((logp.gather(1, ids[0, n:, None])[:, 0].cpu() - torch.tensor(t.logp_inf)).abs())
        gap = torch.cat(gaps)
        row |= {f"mean |dlogp| to {against}": float(gap.mean()), f"max to {against}": float(gap.max())}
    return row


def update(s: Setting) -> None:
    """FP8 weights replaced in place, against an engine that started with them: the same tokens, the same log-probs."""
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

    from rlcore.rollout.model_folder import read_weights

    asked = prompts(s.batch, min(256, min(s.contexts)))
    # eager and small: two engines share the GPU if the first does not give back all of its memory
    llm = engine(s, "fp8", eager=True, memory=0.4)
    before, _ = generate(llm, asked, s.new_tokens // 2)
    weights = read_weights(other)
    start = time.monotonic()
    llm.update_weights(1, weights, "in_flight")
    seconds = time.monotonic() - start
    updated, _ = generate(llm, asked, s.new_tokens // 2)
    llm.close()
    fresh, _ = generate(engine(s, "fp8", model=other, eager=True, memory=0.4), asked, s.new_tokens // 2)

    def same(a: list[Any], b: list[Any]) -> list[bool]:
        return [np.array_equal(x.response_ids, y.response_ids) for x, y in zip(a, b)]

    gaps = [np.abs(a.logp_inf - b.logp_inf).max() for a, b, s in zip(updated, fresh, same(updated, fresh)) if s]
    row = {
        "update s": seconds,
        "same as a fresh engine": f"{sum(same(updated, fresh))}/{len(fresh)}",
        "same as before it": f"{sum(same(updated, before))}/{len(fresh)}",
    }
    s.add("update", row | ({"max |dlogp| where same": float(max(gaps))} if gaps else {}))


def main() -> None:
    part, folder, shape, device, contexts, rows = sys.argv[1:]
    s = Setting(Path(folder), shape, device, tuple(map(int, contexts.split(","))), Path(rows))
    if part == "model":
        write_model(s)
    elif part == "update":
        update(s)
    elif part in ("kernel", "head"):
        import kernels

        (kernels.attention if part == "kernel" else kernels.head)(s, SHAPES[shape])
    else:
        rollout(s, part)


if __name__ == "__main__":
    main()
