"""The Triton kernel of page selection equals the shared rule, under Triton's interpreter."""

from __future__ import annotations

import pytest

CHECK = """
import itertools
import torch
from rlcore.attention.specs import SparseSpec
from rlcore.rollout.engines.vllm.sparse_kernel_gpu import select_blocks, summarise_blocks
from rlcore.rollout.engines.vllm.sparse_rows_gpu import (
    Rows, decode_rows, kept_blocks, summarise_pages
)

gen = torch.Generator().manual_seed(5)
BS, N = 16, 75  # pages: no power of two
rules = [SparseSpec(blocks=2), SparseSpec(blocks=7), SparseSpec(blocks=80), SparseSpec(share=0.3)]
for rule, (heads, kv, dim), tied, dtype in itertools.product(
    rules, [(4, 2, 32), (6, 2, 24), (5, 1, 16)], (False, True), (torch.float32, torch.bfloat16)
):
    lens = [0, 1, 16, 17, 33, 200, 511, 1024, N * BS]
    table = 1 + torch.randperm(len(lens) * N, generator=gen).view(len(lens), N).int()
    query = torch.randn(len(lens), heads, dim, generator=gen)
    summaries = torch.randn(1 + len(lens) * N, kv, dim, generator=gen)
    if tied:  # few, small integers: sums are exact and many scores equal, zeros of both signs too
        query = torch.where(torch.rand(query.shape, generator=gen) < 0.5, 0.0, query.sign() * heads)
        summaries = (summaries * 0.7).round()
    query, summaries = query.to(dtype), summaries.to(dtype)
    rows, _ = decode_rows(rule, torch.tensor(lens, dtype=torch.int32), table, N)
    want = kept_blocks(query, summaries, table, rows, 0, len(lens))
    got = select_blocks(query, summaries, table, rows, 0, len(lens))
    for r, keep in enumerate(rows.budget.tolist()):
        assert torch.equal(got[r, :, :keep], want[r, :, :keep]), (rule, heads, lens[r], tied)
    assert got.min() >= 0 and got.max() < summaries.shape[0] * kv
    picked = torch.tensor([8, 5, 8])  # rows of several tokens of a request, as in prompts
    some = Rows(
        None, picked, rows.pages[picked], rows.budget[picked], rows.kept_len[picked], N, rows.width
    )
    want = kept_blocks(query[1:3], summaries, table, some, 1, 3)
    got = select_blocks(query[1:3], summaries, table, some, 1, 3)
    for r, keep in enumerate(some.budget[1:].tolist()):
        assert torch.equal(got[r, :, :keep], want[r, :, :keep])
for size, dim, dtype in itertools.product((16, 32, 48), (24, 32), (torch.float32, torch.bfloat16)):
    # head-major, as vLLM lays a cache out, with more than this layer in a block
    kv = torch.randn(9, 2, 3, size, 2 * dim, generator=gen).to(dtype)[:, 1]
    blocks = torch.tensor([0, 7, 2, 0, 5])
    got, want = (torch.full((9, 3, dim), float("nan"), dtype=dtype) for _ in range(2))
    summarise_pages(kv, want, blocks[blocks > 0])
    summarise_blocks(kv, got, blocks if size != 48 else blocks[blocks > 0])
    assert torch.equal(got.float().nan_to_num(99.0), want.float().nan_to_num(99.0)), (size, dtype)
    assert int(got.isnan().all(-1).sum()) == 6 * 3
print("equal")
"""


@pytest.mark.processes
def test_the_kernel_selects_as_the_shared_rule_does(under_interpreter):
    under_interpreter(CHECK)
