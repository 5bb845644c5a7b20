"""The selection rule against its definition, written out in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlcore.attention.block_topk import (
    group_queries,
    page_budget,
    page_mask,
    page_summaries,
    select_pages,
    tree_sum,
)
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError


def defined(scores: list[float], pages: int, budget: int) -> list[int]:
    """First and own page, then the best of the rest, older first among equals."""
    always = {0, pages - 1}
    rest = sorted((j for j in range(pages) if j not in always), key=lambda j: (-scores[j], j))
    return sorted([*always, *rest[: budget - len(always)]])


# few values, so that equal scores are common; the two zeros are equal too
SCORES = st.lists(
    st.sampled_from([-3.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, 2.0000002, 7e30]), min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(SCORES, st.data())
def test_selection_is_the_definition(scores, data):
    pages = data.draw(st.integers(1, len(scores)))
    budget = data.draw(st.integers(min(2, pages), pages))
    width = budget + data.draw(st.integers(0, 3))
    kept = select_pages(torch.tensor(scores), torch.tensor(pages), torch.tensor(budget), width)
    want = defined(scores, pages, budget)
    assert kept.tolist() == want + [len(scores)] * (width - len(want))


def test_rows_of_a_batch_do_not_mix():
    gen = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, 20, generator=gen)
    pages = torch.tensor([2, 5, 9, 20, 13])[:, None]
    budget = torch.tensor([2, 4, 3, 6, 13])[:, None]
    kept = select_pages(scores, pages, budget, 13)
    mask = page_mask(kept, 20)
    for i in range(5):
        for h in range(3):
            want = defined(scores[i, h].tolist(), int(pages[i]), int(budget[i]))
            assert [p for p in kept[i, h].tolist() if p < 20] == want
            assert mask[i, h].nonzero()[:, 0].tolist() == want


def test_summaries_have_the_same_bits_in_every_layout():
    keys = torch.randn(7, 16, 32)
    stored = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as the engine's cache has them
    want = page_summaries(keys)
    assert torch.equal(page_summaries(stored), want)
    assert torch.equal(torch.stack([page_summaries(k) for k in keys]), want)
    torch.testing.assert_close(want, keys.mean(1))
    # rounded to the keys' dtype, as an engine stores them
    rounded = keys.bfloat16().float().mean(1).bfloat16().float()
    torch.testing.assert_close(page_summaries(keys.bfloat16()), rounded, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17])
def test_tree_sum_sums(n):
    x = torch.randint(-9, 9, (4, n, 3)).float()
    assert torch.equal(tree_sum(x, 1), x.sum(1))


def test_query_groups_are_adjacent_heads():
    query = torch.arange(8.0).view(1, 4, 2)
    assert group_queries(query, 2).tolist() == [[[1.0, 2.0], [5.0, 6.0]]]


@pytest.mark.parametrize(
    "rule",
    [
        SparseSpec(blocks=2),
        SparseSpec(blocks=7),
        SparseSpec(share=0.1),
        SparseSpec(share=0.28),
        SparseSpec(share=0.75),
    ],
)
def test_budget_and_dense_positions_agree(rule):
    pages = torch.arange(1, 200)
    budget = page_budget(rule, pages)
    assert bool((budget <= pages).all()) and bool(
        (budget >= torch.minimum(pages, torch.tensor(2))).all()
    )
    assert budget.tolist() == [rule.max_budget(p) for p in pages.tolist()]
    covered = int((budget == pages).sum())
    assert (
        bool((budget[:covered] == pages[:covered]).all())
        and rule.dense_positions == covered * rule.block_size
    )


def test_share_is_rounded_up_without_rounding_noise():
    assert page_budget(SparseSpec(share=0.1), torch.tensor([1, 10, 30, 31])).tolist() == [
        1,
        2,
        3,
        4,
    ]
    rule = SparseSpec(share=0.28)
    assert 0.28 * 25 > 7 and page_budget(rule, torch.tensor([25])).tolist() == [7]
    assert rule.max_budget(25) == 7
    assert SparseSpec(share=1.0).dense_positions > 10**9


@pytest.mark.parametrize("given", [{}, {"blocks": 4, "share": 0.5}])
def test_exactly_one_kind_of_budget_is_given(given):
    with pytest.raises(UserError, match=r"actor\.sparse\.blocks=.*exactly one"):
        SparseSpec(**given).check("actor.sparse")


@pytest.mark.parametrize(
    ("given", "name"),
    [({"blocks": 1}, "blocks"), ({"share": 0.0}, "share"), ({"block_size": 0}, "block_size")],
)
def test_settings_out_of_range_are_refused(given, name):
    with pytest.raises(ValidationError, match=name):
        SparseSpec(**given)
