"""FlexAttention against masked SDPA: the same outputs and gradients, and block lists that leave out
exactly what no query sees. By torch's plain implementation of the operator, as CPUs have no
compiled backward pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.attention import implementation
from rlcore.attention.implementation import (
    SparseRows,
    attend_rows,
    attend_rows_by_blocks,
    choosing_of,
    make_block_mask,
    pages_seen,
    summaries_of,
    tokens_seen,
)
from rlcore.attention.specs import SparseSpec
from rlcore.types import PageRule

PROMPTS_DENSE = SparseSpec(block_size=16, blocks=2, prompt="dense")
BY_BLOCKS = SparseSpec(block_size=8, blocks=3, prompt="block", prompt_block=24)
SHAPES = {  # rows, heads, KV heads, tokens, rule, rows' description
    "padded, grouped": (2, 4, 2, 200, SparseSpec(block_size=16, blocks=3), {}),
    "one head a group": (1, 3, 3, 96, SparseSpec(block_size=8, share=0.3), {}),
    "one KV head": (2, 4, 1, 77, SparseSpec(block_size=4, blocks=4), {}),
    "dense prompts": (2, 4, 2, 150, PROMPTS_DENSE, {"prompt_lens": [70, 20]}),
    "prompts by blocks": (2, 4, 2, 150, BY_BLOCKS, {"prompt_lens": [130, 75]}),
    "packed, prompts by blocks": (
        1,
        4,
        2,
        310,
        BY_BLOCKS,
        {"cu_seqlens": [0, 5, 218, 310], "prompt_lens": [3, 150, 70]},
    ),
    "packed": (
        1,
        4,
        2,
        300,
        SparseSpec(block_size=16, blocks=2),
        {"cu_seqlens": [0, 131, 172, 300]},
    ),
    "packed, dense prompts": (
        1,
        4,
        2,
        210,
        PROMPTS_DENSE,
        {"cu_seqlens": [0, 5, 118, 210], "prompt_lens": [3, 60, 9]},
    ),
    "everything seen": (1, 2, 2, 60, SparseSpec(block_size=16, blocks=9), {}),
}
cases = pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
OWN = {
    "prompt_lens": [3, 60, 9],
    "rules": [PROMPTS_DENSE.under(PageRule(1, 32, b)) for b in ((2, 3, 4), (3,), (2, 2, 5))],
}
BLOCKS_OWN = [BY_BLOCKS.under(PageRule(1, 24, b)) for b in ((2, 3, 4), (3,), (2, 2, 5))]
OWN_RULES = {
    "packed, own rules, prompts by blocks": (
        1,
        4,
        2,
        310,
        BY_BLOCKS,
        {"cu_seqlens": [0, 5, 218, 310], "prompt_lens": [3, 150, 70], "rules": BLOCKS_OWN},
    ),
    "packed, own rules": (1, 4, 2, 210, PROMPTS_DENSE, {"cu_seqlens": [0, 5, 118, 210], **OWN}),
    "padded, own rules": (3, 4, 2, 90, PROMPTS_DENSE, OWN),
}


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch):
    """torch refuses gradients on CPUs by this check alone; its plain implementation has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()


def tensors(case):
    b, heads, kv_heads, t, rule, how = case
    gen = torch.Generator().manual_seed(t)
    q, k, v = (torch.randn(b, h, t, 16, generator=gen) for h in (heads, kv_heads, kv_heads))
    return [x.requires_grad_() for x in (q, k, v)], SparseRows(rule, **how)


@pytest.mark.parametrize("case", (SHAPES | OWN_RULES).values(), ids=SHAPES | OWN_RULES)
def test_outputs_and_gradients_are_those_of_masked_sdpa(case):
    inputs, rows = tensors(case)
    outputs, gradients = [], []
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    for attend in (attend_rows, attend_rows_by_blocks):
        out = attend(*inputs, rows, 0.3)
        outputs.append(out.detach())
        gradients.append(torch.autograd.grad(out, inputs, weights))
    torch.testing.assert_close(*outputs, atol=3e-6, rtol=1e-5)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@cases
@pytest.mark.parametrize(("block", "chunk"), [(16, 512), (32, 50), (128, 512)])
def test_blocks_are_left_out_where_no_query_sees_a_key(case, block, chunk, monkeypatch):
    monkeypatch.setattr(implementation, "BLOCK", block)
    monkeypatch.setattr(implementation, "QUERY_CHUNK", chunk)
    (q, k, _), rows = tensors(case)
    bounds = list(rows.cu_seqlens or [0, q.shape[2]])
    until = None
    if rows.rule.needs_prompts:
        until = torch.tensor(rows.prompt_lens).view(q.shape[0], -1)
    mask = make_block_mask(q, k, [rows.rule] * (len(bounds) - 1), bounds, until)
    seen = whole_mask(q, k, rows, bounds, until)
    n = -(-q.shape[2] // block)
    grown = torch.zeros(*seen.shape[:2], n * block, n * block, dtype=torch.bool)
    grown[..., : q.shape[2], : q.shape[2]] = seen
    touched = grown.unflatten(-1, (n, block)).any(-1).unflatten(2, (n, block)).any(3)
    touched = touched.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    assert torch.equal(mask.to_dense().bool(), touched)
    # what the backward pass reads: the same by columns
    counts = torch.zeros_like(mask.q_num_blocks) + touched.sum(2)
    assert torch.equal(mask.q_num_blocks, counts.int())
    if rows.rule.blocks == 2 and block == 16 and not rows.rule.needs_prompts:
        assert touched.float().mean() < 0.4  # there is something to skip


def test_many_sequences_take_as_many_steps_as_one():
    """On a GPU each step is a kernel to launch, in every layer."""

    class Steps(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    rule, found = SparseSpec(block_size=16, blocks=4), {}
    for sequences in (1, 16):
        (q, k, _), _ = tensors((1, 4, 2, 1600, rule, {}))
        bounds = list(range(0, 1601, 1600 // sequences))
        make_block_mask(q, k, [rule] * sequences, bounds, None)  # what all layers share
        with Steps() as steps:
            make_block_mask(q, k, [rule] * sequences, bounds, None)
        found[sequences] = steps.count
    assert found[16] <= found[1], found


@pytest.mark.slow
def test_a_compiled_kernel_that_skips_blocks_gives_the_same(monkeypatch):
    """The plain implementation looks at every block; inductor's CPU kernel, forward only, at those
    that are listed."""
    monkeypatch.setattr(
        implementation,
        "flex_kernel",
        lambda device: torch.compile(torch_flex.flex_attention, dynamic=False),
    )
    rule = SparseSpec(block_size=16, blocks=2)
    (q, k, v), rows = tensors((1, 4, 2, 900, rule, {"cu_seqlens": [0, 211, 900]}))
    mask = make_block_mask(q, k, [rule] * 2, [0, 211, 900], None)
    assert mask.to_dense().float().mean() < 0.45  # a causal mask alone: 0.56
    with torch.no_grad():
        got, want = attend_rows_by_blocks(q, k, v, rows), attend_rows(q, k, v, rows)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)


def whole_mask(q, k, rows, bounds, until):
    """[B, Hk, T, T], sequence by sequence."""
    seen = torch.zeros(q.shape[0], k.shape[1], q.shape[2], q.shape[2], dtype=torch.bool)
    for i, (a, z) in enumerate(pairwise(bounds)):
        summaries = summaries_of(k[:, :, a:z], rows.rule.block_size)
        own, query = None if until is None else until[:, i], q[:, :, a:z]
        choosing = None
        if rows.rule.prompt == "block":
            choosing = choosing_of(query, rows.rule, k.shape[1])
        pages = pages_seen(query, summaries, rows.rule, 0, own, choosing)
        seen[:, :, a:z, a:z] = tokens_seen(pages, rows.rule.block_size, 0)
    return seen


def test_rows_that_do_not_fit_are_refused():
    inputs, _ = tensors(SHAPES["packed"])
    with pytest.raises(ValueError, match="boundaries"):
        attend_rows_by_blocks(*inputs, SparseRows(PROMPTS_DENSE, [1], [0, 5]))
    with pytest.raises(ValueError, match="2 sequences need"):
        attend_rows_by_blocks(*inputs, SparseRows(PROMPTS_DENSE, [1], [0, 5, 300]))
