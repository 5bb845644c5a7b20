"""One part of `check.py` in a process of its own.

python parts.py PART FOLDER SHAPE DEVICE CONTEXTS BATCHES ROWS
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from setting import SHAPES, Setting


def write_model(s: Setting) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlcore.models.fresh import build_char_tokenizer

    torch.manual_seed(0)
    shape = SHAPES[s.shape]
    config = Qwen3Config(
        max_position_embeddings=max(s.contexts) + 512, tie_word_embeddings=False, **shape
    )
    with torch.device(s.device):
        model = Qwen3ForCausalLM(config)
        # A nearly uniform output would show no error. The head alone is wide: wide layers turn
        # the rounding of bfloat16 into four times the error (0.10 against 0.026 nats in 28 layers).
        torch.nn.init.normal_(model.lm_head.weight, std=2 / math.sqrt(config.hidden_size))
    model.to(s.dtype).save_pretrained(s.model)
    build_char_tokenizer("0123456789").save_pretrained(s.model)
    s.add("model", {"parameters": sum(p.numel() for p in model.parameters())})


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
    part, folder, shape, device, contexts, batches, rows = sys.argv[1:]
    lengths, sizes = (tuple(map(int, x.split(","))) if x else () for x in (contexts, batches))
    s = Setting(Path(folder), shape, device, lengths, sizes, Path(rows))
    if part == "model":
        write_model(s)
    elif part == "imports":
        imports(s)
    elif part == "loop":
        from loop import loop

        loop(s)
    elif part.startswith("experts"):
        from experts import experts, with_graphs

        experts(s) if part == "experts" else with_graphs(s)
    elif part in ("colocated", "pair"):
        import loop as runs

        runs.colocated(s) if part == "colocated" else runs.pair(s)
    elif part == "layer":
        from layers import layer

        layer(s, SHAPES[shape])
    elif part in ("offload", "attention"):
        import offload

        offload.offload(s) if part == "offload" else offload.attention(s)
    elif part in ("flex", "tree"):
        import sparse_forward

        (sparse_forward.flex if part == "flex" else sparse_forward.tree)(s, SHAPES[shape])
    elif part in ("kernel", "head", "varlen", "nccl"):
        import kernels

        run = {"kernel": kernels.attention}.get(part) or getattr(kernels, part)
        run(s, SHAPES[shape])
    else:
        import rollouts

        whole = {name: getattr(rollouts, name) for name in ("update", "logprobs", "speculate")}
        whole[part](s) if part in whole else rollouts.rollout(s, part)


if __name__ == "__main__":
    main()
