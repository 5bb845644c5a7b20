"""The kernel of the rule for GPUs equals plain torch's, under Triton's interpreter."""

from __future__ import annotations

import pytest

CHECK = """
import torch
from rlcore.attention.block_topk import page_budget, page_mask, select_pages
from rlcore.attention.kept_pages_gpu import kept_mask
from rlcore.attention.specs import SparseSpec

gen = torch.Generator().manual_seed(3)
for n in (1, 2, 37):
    for rule in (SparseSpec(blocks=2), SparseSpec(blocks=6), SparseSpec(share=0.3)):
        for tied in (False, True):
            pages = torch.arange(max(1, n - 9), n + 1)
            scores = torch.randn(2, 3, len(pages), n, generator=gen)
            if tied:  # zeros of both signs too
                scores = scores.round()
            budget = page_budget(rule, pages)
            want = page_mask(select_pages(scores, pages, budget, rule.max_budget(n)), n)
            got = kept_mask(scores, pages, budget)
            assert got.dtype == torch.bool and torch.equal(got, want), (n, rule, tied)
print("equal")
"""


@pytest.mark.processes
def test_the_kernel_keeps_the_pages_of_the_shared_rule(under_interpreter):
    under_interpreter(CHECK)
