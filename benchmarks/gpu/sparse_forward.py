"""The part `flex` of `check.py`: the learner's sparse attention by FlexAttention on a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from setting import Row, Setting

DIM = 128
REPEATS = 5
MANY = 16  # sequences of a micro-batch, as short answers are packed
Attend = Callable[[Any, Any, Any], Any]


def flex(s: Setting, shape: dict[str, int]) -> None:
    """One layer, forward and backward: against masked SDPA by the same rule on two packed sequences
    with dense and sparse prompts, then milliseconds and memory at every context."""
    from rlcore.attention.implementation import SparseRows, attend_rows, attend_rows_by_blocks
    from rlcore.attention.specs import SparseSpec

    for sparse_prompt in (True, False):
        rule = SparseSpec(blocks=s.rule.blocks, sparse_prompt=sparse_prompt)
        rows = SparseRows(rule, [700, 300], [0, 2500, 4000])
        q, k, v = tensors(shape, 4000)
        begun = time.monotonic()
        got = outputs(lambda *x, r=rows: attend_rows_by_blocks(*x, r), q, k, v)
        seconds = time.monotonic() - begun
        want = outputs(lambda *x, r=rows: attend_rows(*x, r), q, k, v)
        names = ("output", "dq", "dk", "dv")
        gaps = {
            f"max error of {n}": float((a - b).abs().max()) for n, a, b in zip(names, got, want)
        }
        s.add("flex", {"sparse_prompt": sparse_prompt, **gaps, "first call s": seconds})
    for context, sequences in [(c, 1) for c in s.contexts] + [(s.contexts[-1], MANY)]:
        row = {"context": context, "sequences": sequences}
        bounds = list(range(0, context + 1, context // sequences))
        s.add("flex", row | {"mask ms": mask_ms(s, tensors(shape, context), bounds)})
        for name, run in contenders(s, bounds).items():
            s.add("flex", row | {"by": name, **cost(run, tensors(shape, context))})


def contenders(s: Setting, bounds: list[int]) -> dict[str, Attend]:
    """Sparse attention both ways, and dense attention for scale, of sequences of equal lengths."""
    from rlcore.attention.implementation import SparseRows, attend_rows, attend_rows_by_blocks
    from rlcore.attention.varlen import Sequences, _attend

    rows = SparseRows(s.rule, None, bounds)
    places = (torch.arange(bounds[-1], device="cuda") % bounds[1])[None]
    dense = Sequences.of(places)
    return {
        "FlexAttention": lambda q, k, v: attend_rows_by_blocks(q, k, v, rows),
        "masked SDPA": lambda q, k, v: attend_rows(q, k, v, rows),
        "dense varlen": lambda q, k, v: _attend(None, q, k, v, None, sequences=dense)[0],
    }


def mask_ms(s: Setting, inputs: list[torch.Tensor], bounds: list[int]) -> float:
    """Milliseconds to find FlexAttention's blocks: median of a few."""
    from rlcore.attention.implementation import make_block_mask

    query, key, _ = inputs
    rules = [s.rule] * (len(bounds) - 1)
    return median_ms(lambda: make_block_mask(query, key, rules, bounds, None))


def tensors(shape: dict[str, int], length: int) -> list[torch.Tensor]:
    """Random query [1, H, T, 128], key and value [1, Hk, T, 128] that take gradients."""
    torch.manual_seed(length)
    heads = (shape["num_attention_heads"], *[shape["num_key_value_heads"]] * 2)
    return [
        torch.randn(1, h, length, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in heads
    ]


def outputs(attend: Attend, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of a fixed weighting of it, in float32."""
    out = attend(*inputs)
    torch.manual_seed(1)
    weight = torch.randn(out.shape, device=out.device)
    grads = torch.autograd.grad((out.float() * weight).sum(), inputs)
    return [x.detach().float() for x in (out, *grads)]


def cost(attend: Attend, inputs: list[torch.Tensor]) -> Row:
    """Milliseconds forward and with backward (median of a few); peak memory beyond the inputs."""
    gc.collect()
    torch.cuda.empty_cache()
    found: Row = {}
    for name, run in (
        ("forward ms", lambda: attend(*inputs)),
        ("forward and backward ms", lambda: outputs(attend, *inputs)),
    ):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found[name] = median_ms(run)
        found["peak extra GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def median_ms(run: Callable[[], Any], *, synchronise: bool = True) -> float:
    """`synchronise`: on a GPU, whose work is waited for."""
    times = []
    for _ in range(1 + REPEATS):  # the first compiles
        begun = time.monotonic()
        run()
        if synchronise:
            torch.cuda.synchronize()
        times.append(1000 * (time.monotonic() - begun))
    return sorted(times[1:])[REPEATS // 2]
