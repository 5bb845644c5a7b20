"""The plan of an engine step against a token-by-token reading of the rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.attention.block_topk import page_budget, plan_step
from rlcore.attention.specs import SparseSpec
from rlcore.types import PageRule

RULES = (
    st.builds(
        SparseSpec, block_size=st.just(4), blocks=st.integers(2, 5), sparse_prompt=st.booleans()
    )
    | st.builds(
        SparseSpec,
        block_size=st.just(4),
        share=st.sampled_from([0.2, 0.5, 0.9]),
        sparse_prompt=st.booleans(),
    )
    | st.builds(
        SparseSpec,
        block_size=st.just(4),
        blocks_by_length=st.lists(st.integers(2, 12), min_size=1, max_size=4)
        .map(sorted)
        .map(tuple),
        length_step=st.sampled_from([8, 20]),
        sparse_prompt=st.booleans(),
    )
)
# (tokens computed before, tokens of this step, prompt length)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 70)), min_size=1, max_size=5
)
OWN = [None, PageRule(1, 8, (2, 3, 9)), PageRule(2, 12, (5,))]


@settings(max_examples=150, deadline=None)
@given(RULES, REQUESTS, st.lists(st.sampled_from(OWN), min_size=5, max_size=5), st.booleans())
def test_every_token_attends_as_its_position_asks(rule, requests, own, given_rules):
    rules = [rule.under(o) if given_rules else rule for o in own]
    computed, count, prompt = (torch.tensor(x) for x in zip(*requests))
    start = torch.cat([torch.zeros(1, dtype=torch.long), count.cumsum(0)])
    lengths = (computed + count).int()
    plan = plan_step(
        rule, start.int(), lengths, prompt, rules[: len(requests)] if given_rules else None
    )
    dense, sparse, done, token = {}, {}, [], 0
    for r, (before, new, p) in enumerate(requests):
        for t in range(before, before + new):
            pages = t // 4 + 1
            budget = int(page_budget(rules[r], torch.tensor(pages)))
            if t < rules[r].dense_positions or (not rule.sparse_prompt and t < p):
                dense.setdefault(r, []).append((token, t))
            else:
                sparse[token] = (r, pages, budget, (budget - 1) * 4 + t % 4 + 1)
            if t % 4 == 3:
                done.append((r, t // 4))
            token += 1
    assert list(zip(plan.done_requests.tolist(), plan.done_pages.tolist())) == done
    assert (plan.dense is None) == (not dense) and (plan.sparse is None) == (not sparse)
    if plan.dense is not None:
        places = [x for spans in dense.values() for x, _ in spans]
        assert (
            list(range(token)) if plan.dense.tokens is None else plan.dense.tokens.tolist()
        ) == places
        assert plan.dense.requests.tolist() == list(dense)
        assert plan.dense.query_start.diff().tolist() == [len(s) for s in dense.values()]
        assert plan.dense.seq_lens.tolist() == [s[-1][1] + 1 for s in dense.values()]
    if plan.sparse is not None:
        rows = plan.sparse
        assert (list(range(token)) if rows.tokens is None else rows.tokens.tolist()) == list(sparse)
        columns = zip(
            *(x.tolist() for x in (rows.requests, rows.pages, rows.budget, rows.kept_len))
        )
        assert list(columns) == list(sparse.values())
        assert rows.width == max(b for _, _, b, _ in sparse.values())
        for request, first, end, pages in rows.spans:
            assert set(rows.requests[first:end].tolist()) == {request} and pages == int(
                rows.pages[first:end].max()
            )
        assert sum(end - first for _, first, end, _ in rows.spans) == len(sparse)


def test_dense_prompts_need_prompt_lengths():
    with pytest.raises(RuntimeError, match="prompt length"):
        plan_step(
            SparseSpec(blocks=2, sparse_prompt=False), torch.tensor([0, 3]), torch.tensor([3])
        )
