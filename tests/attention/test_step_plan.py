"""The plan of an engine step against a token-by-token reading of the rule."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.attention.block_topk import page_budget, plan_step
from rlcore.attention.specs import SparseSpec
from rlcore.types import PageRule

RULES = (
    st.builds(
        SparseSpec,
        block_size=st.just(4),
        blocks=st.integers(2, 5),
        prompt=st.sampled_from(["sparse", "block", "dense"]),
        prompt_block=st.sampled_from([4, 12]),
    )
    | st.builds(
        SparseSpec,
        block_size=st.just(4),
        share=st.sampled_from([0.2, 0.5, 0.9]),
        prompt=st.sampled_from(["sparse", "block", "dense"]),
        prompt_block=st.sampled_from([4, 12]),
    )
    | st.builds(
        SparseSpec,
        block_size=st.just(4),
        blocks_by_length=st.lists(st.integers(2, 12), min_size=1, max_size=4)
        .map(sorted)
        .map(tuple),
        length_step=st.sampled_from([8, 20]),
        prompt=st.sampled_from(["sparse", "block", "dense"]),
        prompt_block=st.sampled_from([4, 12]),
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
            pages, first = t // 4 + 1, -1
            if rule.prompt == "block" and t < p:
                first = t // rule.prompt_block * rule.prompt_block // 4
            chooser = t if first < 0 else first * 4
            budget = int(page_budget(rules[r], torch.tensor(chooser // 4 + 1)))
            budget += t // 4 - chooser // 4
            covered = chooser < rules[r].dense_positions
            if covered or (rule.prompt == "dense" and t < p):
                dense.setdefault(r, []).append((token, t))
            else:
                sparse[token] = (r, pages, budget, (budget - 1) * 4 + t % 4 + 1, first)
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
        last, begins = rows_of(list(sparse.values()))
        assert list(columns) == [sparse[[*sparse][i]][:4] for i in last]
        assert rows.width == max(b for _, _, b, _, _ in sparse.values())
        if rows.together is None:
            assert all(first < 0 for *_, first in sparse.values())
        else:
            assert rows.together.bounds.tolist() == [*begins, len(sparse)]
            values = [*sparse.values()]
            assert rows.together.first.tolist() == [values[i][4] for i in begins]
            chosen = [n for n, i in enumerate(begins) if at_start(values[i])]
            assert rows.together.chooses.tolist() == chosen
            for heads in (1, 3):
                check_order(rows.together, heads)
        for request, first, end, pages in rows.spans:
            assert set(rows.requests[first:end].tolist()) == {request} and pages == int(
                rows.pages[first:end].max()
            )
        assert sum(end - first for _, first, end, _ in rows.spans) == len(rows.requests)


def rows_of(tokens):
    """(last token, first token) of each row: those of a request with a block in common."""
    begins = [
        i
        for i, t in enumerate(tokens)
        if i == 0 or t[4] < 0 or (t[0], t[4]) != (tokens[i - 1][0], tokens[i - 1][4])
    ]
    return [i - 1 for i in [*begins[1:], len(tokens)]], begins


def at_start(token):
    """A token that is the first position of its block: it sees one key of the block's page."""
    _, pages, budget, kept, first = token
    return first == pages - 1 and kept == (budget - 1) * 4 + 1


def check_order(together, heads):
    """A row of each head after the other, its tokens in order."""
    bounds = together.bounds.tolist()
    wanted = [
        token * heads + head
        for a, z in pairwise(bounds)
        for head in range(heads)
        for token in range(a, z)
    ]
    assert together.by_head(heads).tolist() == wanted


def test_dense_prompts_need_prompt_lengths():
    with pytest.raises(RuntimeError, match="prompt length"):
        plan_step(SparseSpec(blocks=2, prompt="dense"), torch.tensor([0, 3]), torch.tensor([3]))
