"""Attention over the nodes of a prefix tree equals attention over the sequences one by one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.attention.implementation import SparseRows, attend_rows
from rlcore.attention.shared_prefix import (
    SharedRows,
    TreeRow,
    UnsharedAttentionError,
    _attend,
    blocks_of,
)
from rlcore.attention.specs import SparseSpec
from rlcore.learner.packing import PrefixTree
from rlcore.learner.sequences import TokenSequence

# few tokens, so that sequences begin alike, repeat and are prefixes of one another
TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=40)
HEADS = st.sampled_from([(2, 2, 4), (4, 1, 3), (6, 2, 8)])


def _tree(sequences):
    return PrefixTree.of([TokenSequence.of_answer(s[:1], s[1:]) for s in sequences])


def _rows(tree):
    rows = [TreeRow(path, first) for path, first in zip(tree.paths, tree.firsts)]
    return SharedRows.of(rows, len(tree.tokens))


@settings(max_examples=80, deadline=None)
@given(sequences=st.lists(TOKENS, min_size=1, max_size=9))
def test_a_tree_has_one_node_for_each_distinct_prefix(sequences):
    tree = _tree(sequences)
    inputs = [tuple(s[:-1]) for s in sequences]  # the last token is predicted alone
    prefixes = {i[: n + 1] for i in inputs for n in range(len(i))}
    assert len(tree.tokens) == len(tree.depths) == len(prefixes)
    for one, path in zip(inputs, tree.paths):
        assert tree.tokens[path].tolist() == list(one)
        assert tree.depths[path].tolist() == list(range(len(one)))
    own = [n for path, first in zip(tree.paths, tree.firsts) for n in path[first:]]
    assert sorted(own) == list(range(len(prefixes)))


@settings(max_examples=60, deadline=None)
@given(sequences=st.lists(TOKENS, min_size=1, max_size=9), heads=HEADS, seed=st.integers(0, 99))
def test_outputs_and_gradients_are_those_of_the_sequences(sequences, heads, seed):
    torch.manual_seed(seed)
    h, kv, d = heads
    tree = _tree(sequences)
    u = len(tree.tokens)
    q, k, v = (
        torch.randn(1, n, u, d, dtype=torch.float64, requires_grad=True) for n in (h, kv, kv)
    )
    seen = torch.randn(u, h, d, dtype=torch.float64)
    rows = _rows(tree).ready(torch.float64)
    out, _ = _attend(None, q, k, v, None, scaling=0.3, shared_prefix=rows)
    found = torch.autograd.grad((out[0] * seen).sum(), (q, k, v))
    expected = torch.zeros(u, h, d, dtype=torch.float64)
    for path, first in zip(tree.paths, tree.firsts):
        at = torch.from_numpy(path)
        one = F.scaled_dot_product_attention(
            *(x[:, :, at] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
        )
        expected = expected.index_put((at[first:],), one[0].transpose(0, 1)[first:])
    torch.testing.assert_close(out[0], expected)
    plain = torch.autograd.grad((expected * seen).sum(), (q, k, v))
    torch.testing.assert_close(found, plain)


def test_rows_of_like_size_share_a_block_and_short_answers_to_long_prompts_are_masked():
    sizes = [(420, 420), (420, 120), (418, 118), (60, 50), (5, 0), (58, 40)]
    shapes = [(b.rows, b.keys, b.queries, b.square) for b in blocks_of(sizes)]
    assert shapes == [
        ((0,), 420, 420, True),
        ((3, 5), 60, 60, True),
        ((1, 2), 420, 120, False),
    ]


def test_keys_gradients_of_many_rows_do_not_lose_small_terms_in_bfloat16():
    one, rows = [0, *range(30)], 600
    tree = _tree([[*one, 40 + i, 1] for i in range(rows)])
    u = len(tree.tokens)
    q, k = (torch.zeros(1, 1, u, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    v = torch.zeros(1, 1, u, 8, dtype=torch.bfloat16, requires_grad=True)
    shared = _rows(tree).ready(torch.bfloat16)
    out, _ = _attend(None, q, k, v, None, scaling=1.0, shared_prefix=shared)
    last = torch.from_numpy(np.array([path[-1] for path in tree.paths]))
    out[0, last].float().sum().backward()
    # every answer's one query weighs all of its 32 keys alike
    assert float(v.grad[0, 0, 5, 0]) == pytest.approx(rows / 32, rel=0.01)


@pytest.mark.parametrize("odd", [{"sliding_window": 8}, {"softcap": 30.0}, {"dropout": 0.1}])
def test_what_shared_rows_do_not_follow_is_refused(odd):
    tree = _tree([[0, 1, 2], [0, 1, 1]])
    x = torch.zeros(1, 1, len(tree.tokens), 4)
    with pytest.raises(UnsharedAttentionError, match=next(iter(odd))):
        _attend(None, x, x, x, None, shared_prefix=_rows(tree), **odd)


def test_masked_rows_must_be_made_ready():
    tree = _tree([[0] * 40 + [1], [0] * 39 + [2, 1]])
    x = torch.zeros(1, 1, len(tree.tokens), 4)
    with pytest.raises(RuntimeError, match="ready"):
        _attend(None, x, x, x, None, shared_prefix=_rows(tree))


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2), max_size=50),
    answers=st.lists(TOKENS, min_size=1, max_size=9),
    heads=HEADS,
    rule=st.sampled_from([{"blocks": 2}, {"blocks": 3}, {"share": 0.5}]),
    seed=st.integers(0, 99),
)
def test_sparse_outputs_and_gradients_are_those_of_the_sequences(
    prompt, answers, heads, rule, seed
):
    torch.manual_seed(seed)
    sequences = [prompt + answer for answer in answers]
    h, kv, d = heads
    sparse = SparseSpec(block_size=4, **rule)
    tree = _tree(sequences)
    u = len(tree.tokens)
    q, k, v = (
        torch.randn(1, n, u, d, dtype=torch.float64, requires_grad=True) for n in (h, kv, kv)
    )
    seen = torch.randn(u, h, d, dtype=torch.float64)
    out, _ = _attend(None, q, k, v, None, scaling=0.3, shared_prefix=_rows(tree).by(sparse))
    found = torch.autograd.grad((out[0] * seen).sum(), (q, k, v))
    expected = torch.zeros(u, h, d, dtype=torch.float64)
    for path, first in zip(tree.paths, tree.firsts):
        at = torch.from_numpy(path)
        one = attend_rows(*(x[:, :, at] for x in (q, k, v)), SparseRows(sparse), 0.3)
        expected = expected.index_put((at[first:],), one[0].transpose(0, 1)[first:])
    torch.testing.assert_close(out[0], expected)
    plain = torch.autograd.grad((expected * seen).sum(), (q, k, v))
    torch.testing.assert_close(found, plain)


def test_sparse_rows_with_dense_prompts_are_refused():
    with pytest.raises(ValueError, match="sparse_prompt"):
        _rows(_tree([[0, 1, 2], [0, 1, 1]])).by(SparseSpec(blocks=2, sparse_prompt=False))
