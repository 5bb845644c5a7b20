"""The parts `flex` and `tree` of `check.py`: the learner's attention by FlexAttention, sparse and
over shared prefixes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from setting import Row, Setting

REPEATS = 5
MANY = 16  # sequences of a micro-batch, as short answers are packed
ANSWERS = 8  # to one prompt
Attend = Callable[[Any, Any, Any], Any]


def flex(s: Setting, shape: dict[str, int]) -> None:
    """One layer, forward and backward: against masked SDPA by the same rule on two packed sequences
    with sparse, block and dense prompts, then milliseconds and memory at every context."""
    from rlcore.attention.implementation import SparseRows, attend_rows, attend_rows_by_blocks
    from rlcore.attention.specs import SparseSpec

    for prompt in ("sparse", "block", "dense"):
        rule = SparseSpec(blocks=s.rule.blocks, prompt=prompt)
        rows = SparseRows(rule, [700, 300], [0, 2500, 4000])
        q, k, v = tensors(s, shape, 4000)
        begun = time.monotonic()
        got = outputs(lambda *x, r=rows: attend_rows_by_blocks(*x, r), q, k, v)
        seconds = time.monotonic() - begun
        want = outputs(lambda *x, r=rows: attend_rows(*x, r), q, k, v)
        row = {"prompt": prompt, **gaps(got, want), "first call s": seconds}
        s.add("flex", row)
    for context, sequences in [(c, 1) for c in s.contexts] + [(s.contexts[-1], MANY)]:
        row = {"context": context, "sequences": sequences}
        bounds = list(range(0, context + 1, context // sequences))
        s.add("flex", row | {"mask ms": mask_ms(s, tensors(s, shape, context), bounds)})
        for name, run in contenders(s, bounds).items():
            s.add("flex", row | {"by": name, **cost(s, run, tensors(s, shape, context))})


def tree(s: Setting, shape: dict[str, int]) -> None:
    """One layer over a group's answers to one prompt, which is half of the longest context: by one
    mask over the tree of their prefixes against the CPU's way, gathered rows under SDPA, forward
    and backward; then the cost of both, and of attention that computes the prompt for each answer.
    On a CPU forward alone: FlexAttention has no backward pass there.
    """
    from rlcore.attention.shared_prefix import SharedRows, TreeRow
    from rlcore.attention.shared_tree import SharedTree

    prompt, own = s.contexts[-1] // 2, s.contexts[-1] // 8
    ends = [prompt + own * (i + 1) for i in range(ANSWERS)]
    paths = [np.r_[0:prompt, end - own : end] for end in ends]
    rows = [TreeRow(path, prompt if i else 0) for i, path in enumerate(paths)]
    masks = SharedTree.of(rows, ends[-1], s.device)
    gathered = SharedRows.of(rows, ends[-1], s.device).ready(s.dtype)
    inputs = tensors(s, shape, ends[-1])
    ways: dict[str, Attend] = {
        "FlexAttention": lambda q, k, v: masks.attend(q, k, v, None),
        "gathered SDPA": lambda q, k, v: gathered.attend(q, k, v, None),
    }
    begun = time.monotonic()
    got = outputs(ways["FlexAttention"], *inputs)
    seconds = time.monotonic() - begun
    row = gaps(got, outputs(ways["gathered SDPA"], *inputs))
    s.add("tree", {"nodes": ends[-1], **row, "first call s": seconds})
    making = median_ms(lambda: SharedTree.of(rows, ends[-1], s.device), synchronise=not s.small)
    s.add("tree", {"nodes": ends[-1], "mask ms": making})
    for name, run in ways.items():
        s.add("tree", {"nodes": ends[-1], "by": name, **cost(s, run, inputs)})
    if not s.small:  # whose kernel has no CPU build
        anew = contenders(s, list(range(0, ANSWERS * (prompt + own) + 1, prompt + own)))
        many = tensors(s, shape, ANSWERS * (prompt + own))
        row = {"nodes": many[0].shape[2], "by": "each prompt anew, varlen"}
        s.add("tree", row | cost(s, anew["dense varlen"], many))


def gaps(got: list[torch.Tensor], want: list[torch.Tensor]) -> Row:
    """Largest differences of the output, and of the gradients where there are some."""
    names = ("output", "dq", "dk", "dv")
    return {f"max error of {n}": float((a - b).abs().max()) for n, a, b in zip(names, got, want)}


def contenders(s: Setting, bounds: list[int]) -> dict[str, Attend]:
    """Sparse attention both ways, and dense attention for scale, of sequences of equal lengths."""
    from rlcore.attention.implementation import SparseRows, attend_rows, attend_rows_by_blocks
    from rlcore.attention.varlen import Sequences, attend_packed, by_torch

    rows = SparseRows(s.rule, None, bounds)
    places = (torch.arange(bounds[-1], device="cuda") % bounds[1])[None]
    dense = Sequences.of(places)
    return {
        "FlexAttention": lambda q, k, v: attend_rows_by_blocks(q, k, v, rows),
        "masked SDPA": lambda q, k, v: attend_rows(q, k, v, rows),
        "dense varlen": lambda q, k, v: attend_packed(
            by_torch, None, q, k, v, None, sequences=dense
        )[0],
    }


def mask_ms(s: Setting, inputs: list[torch.Tensor], bounds: list[int]) -> float:
    """Milliseconds to find FlexAttention's blocks: median of a few."""
    from rlcore.attention.implementation import make_block_mask

    query, key, _ = inputs
    rules = [s.rule] * (len(bounds) - 1)
    return median_ms(lambda: make_block_mask(query, key, rules, bounds, None))


def tensors(s: Setting, shape: dict[str, int], length: int) -> list[torch.Tensor]:
    """Random query [1, H, T, D], key and value [1, Hk, T, D]; on a GPU they take gradients."""
    torch.manual_seed(length)
    heads = (shape["num_attention_heads"], *[shape["num_key_value_heads"]] * 2)
    return [
        torch.randn(1, h, length, shape["head_dim"], device=s.device, dtype=s.dtype).requires_grad_(
            not s.small
        )
        for h in heads
    ]


def outputs(attend: Attend, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of a fixed weighting of it where inputs take some, in
    float32."""
    out = attend(*inputs)
    if not out.requires_grad:
        return [out.float()]
    torch.manual_seed(1)
    weight = torch.randn(out.shape, device=out.device)
    grads = torch.autograd.grad((out.float() * weight).sum(), inputs)
    return [x.detach().float() for x in (out, *grads)]


def cost(s: Setting, attend: Attend, inputs: list[torch.Tensor]) -> Row:
    """Milliseconds forward and with backward (median of a few); peak memory beyond the inputs. On a
    CPU forward alone."""
    if s.small:
        return {"forward ms": median_ms(lambda: attend(*inputs), synchronise=False)}
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
