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
from rlcore.types import PAGE_RULE, PageRule


def defined(scores: list[float], pages: int, budget: int) -> list[int]:
    """First and own page, then the best of the rest, older first among equals."""
    always = {0, pages - 1}
    rest = sorted((j for j in range(pages) if j not in always), key=lambda j: (-scores[j], j))
    return sorted([*always, *rest[: budget - len(always)]])


def test_minus_zero_ties_with_zero() -> None:
    """The older page is kept, whichever of the two zeros it has."""
    for middle in ([-0.0, 0.0], [0.0, -0.0]):
        scores = torch.tensor([1.0, *middle, 1.0])
        kept = select_pages(scores, torch.tensor(4), torch.tensor(3), 3)
        assert kept.tolist() == [0, 1, 3]


def test_a_page_s_summary_is_one_that_an_engine_stores() -> None:
    keys = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    summaries = page_summaries(keys)
    assert summaries.dtype == torch.float32
    assert torch.equal(summaries, summaries.bfloat16().float())
    torch.testing.assert_close(summaries, keys.float().mean(1), rtol=0.01, atol=1e-3)


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
        SparseSpec(blocks_by_length=(3,), length_step=64),
        SparseSpec(blocks_by_length=(2, 7, 20), length_step=64),
        SparseSpec(blocks_by_length=(4, 8, 9, 40), length_step=64),
        SparseSpec(blocks_by_length=(9, 12, 12), length_step=128),
        SparseSpec(blocks=5).under(PageRule(2, 48, (3, 4, 60))),
    ],
)
def test_budget_and_dense_positions_agree(rule):
    pages = torch.arange(1, 200)
    budget = page_budget(rule, pages)
    assert bool((budget <= pages).all()) and bool(
        (budget >= torch.minimum(pages, torch.tensor(2))).all()
    )
    assert budget.tolist() == [rule.max_budget(p) for p in pages.tolist()]
    # by length, a budget may cover a later stretch again
    covered = int((budget == pages).cumprod(0).sum())
    assert rule.dense_positions == covered * rule.block_size
    assert rule.blocks_by_length is not None or covered == int((budget == pages).sum())


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


def test_a_budget_by_length_grows_where_its_positions_say():
    """Sparrow's form (arXiv 2606.08446): an entry for each stretch of positions."""
    rule = SparseSpec(blocks_by_length=(2, 4, 9), length_step=64)
    assert page_budget(rule, torch.arange(1, 15)).tolist() == [1, 2, 2, 2, 4, 4, 4, 4, *[9] * 6]


@given(st.lists(st.integers(2, 5000), min_size=1, max_size=32).map(sorted), st.integers(1, 9))
def test_the_rule_of_a_record_is_read_as_it_was_written(blocks, version):
    rule = PageRule(version, 16 * version, tuple(blocks))
    assert PageRule.of_record({PAGE_RULE: rule.array()}) == rule
    assert PageRule.of_record({}) is None
    spec = SparseSpec(share=0.5, prompt="dense")
    assert spec.under(None) is spec and spec.under(rule) is spec.under(rule)
    spec.under(rule).check("actor.sparse.sparse")
    assert spec.under(rule).prompt == "dense" and spec.under(rule).blocks_by_length == rule.blocks


@pytest.mark.parametrize(
    ("blocks", "step", "named"),
    [((4, 3), 1024, "must not fall"), ((1, 3), 1024, "must not fall"), ((4,), 24, "multiple of")],
)
def test_a_budget_by_length_that_cannot_be_is_refused(blocks, step, named):
    with pytest.raises(UserError, match=named):
        SparseSpec(blocks_by_length=blocks, length_step=step).check("actor.sparse")


@pytest.mark.parametrize(
    "given", [{}, {"blocks": 4, "share": 0.5}, {"blocks": 4, "blocks_by_length": (4,)}]
)
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
