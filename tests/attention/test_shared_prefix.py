"""Attention over the nodes of a prefix tree equals attention over the sequences one by one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from rlcore.attention import shared_tree
from rlcore.attention.implementation import SparseRows, attend_rows
from rlcore.attention.shared_prefix import (
    SharedRows,
    TreeRow,
    UnsharedAttentionError,
    _attend,
    blocks_of,
)
from rlcore.attention.shared_tree import SharedTree
from rlcore.attention.specs import SparseSpec
from rlcore.learner.packing import PrefixTree
from rlcore.learner.sequences import TokenSequence

# few tokens, so that sequences begin alike, repeat and are prefixes of one another
TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=40)
HEADS = st.sampled_from([(2, 2, 4), (4, 1, 3), (6, 2, 8)])


def _tree(sequences):
    return PrefixTree.of([TokenSequence.of_answer(s[:1], s[1:]) for s in sequences])


def _rows(tree, kind=SharedRows):
    rows = [TreeRow(path, first) for path, first in zip(tree.paths, tree.firsts)]
    return kind.of(rows, len(tree.tokens))


@pytest.fixture
def flex_gradients(monkeypatch):
    """torch refuses gradients on CPUs by this check alone; its plain implementation has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()


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


def _one_by_one(tree, qkv, seen, scaling):
    """Outputs [U, H, D] of attention over the sequences one after another, and gradients."""
    expected = torch.zeros_like(seen)
    for path, first in zip(tree.paths, tree.firsts):
        at = torch.from_numpy(path)
        one = F.scaled_dot_product_attention(
            *(x[:, :, at] for x in qkv), is_causal=True, scale=scaling, enable_gqa=True
        )
        expected = expected.index_put((at[first:],), one[0].transpose(0, 1)[first:])
    return expected, torch.autograd.grad((expected * seen).sum(), qkv)


def _compared(tree, rows, heads, seed):
    """Outputs and gradients over the tree against those of the sequences."""
    torch.manual_seed(seed)
    h, kv, d = heads
    u = len(tree.tokens)
    qkv = [torch.randn(1, n, u, d, dtype=torch.float64, requires_grad=True) for n in (h, kv, kv)]
    seen = torch.randn(u, h, d, dtype=torch.float64)
    out, _ = _attend(None, *qkv, None, scaling=0.3, shared_prefix=rows)
    found = torch.autograd.grad((out[0] * seen).sum(), qkv)
    expected, plain = _one_by_one(tree, qkv, seen, 0.3)
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(found, plain)


@settings(max_examples=60, deadline=None)
@given(sequences=st.lists(TOKENS, min_size=1, max_size=9), heads=HEADS, seed=st.integers(0, 99))
def test_outputs_and_gradients_are_those_of_the_sequences(sequences, heads, seed):
    tree = _tree(sequences)
    _compared(tree, _rows(tree).ready(torch.float64), heads, seed)


@pytest.mark.parametrize("heads", [(2, 2, 4), (4, 1, 8), (6, 2, 8)])
def test_one_mask_over_the_nodes_gives_those_of_the_sequences(heads, flex_gradients):
    prompt = [n % 3 for n in range(150)]  # more than a block, so that whole blocks are seen
    answers = [[a, *[(a * n) % 3 for n in range(40 + 9 * a)]] for a in range(4)]
    tree = _tree([prompt + answer for answer in answers] + [[0, 1, 1, 0], prompt[:30]])
    _compared(tree, _rows(tree, SharedTree), heads, 1)


@settings(max_examples=30, deadline=None)
@given(
    sequences=st.lists(TOKENS, min_size=1, max_size=9),
    prompt=st.integers(0, 30),
    block=st.sampled_from([4, 16, 128]),
)
def test_blocks_of_a_tree_are_those_that_hold_a_visible_pair(sequences, prompt, block):
    tree = _tree([[1] * prompt + s for s in sequences])
    u = len(tree.tokens)
    sees = torch.zeros(u, u, dtype=torch.bool)
    for path in map(torch.from_numpy, tree.paths):
        sees[path[:, None], path] = torch.ones(len(path), len(path), dtype=torch.bool).tril()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tree, "BLOCK", block)
        mask = _rows(tree, SharedTree).mask
    at = torch.arange(u)
    assert torch.equal(mask.mask_mod(0, 0, at[:, None], at), sees)
    n = -(-u // block)
    grown = torch.zeros(n * block, n * block, dtype=torch.bool)
    grown[:u, :u] = sees
    # queries of padding are not read
    filled = grown | (torch.arange(n * block) >= u)[:, None]
    touched, whole = (x.unflatten(1, (n, block)).unflatten(0, (n, block)) for x in (grown, filled))
    touched, whole = touched.any(3).any(1), whole.all(3).all(1)
    whole &= ~torch.eye(n, dtype=torch.bool)  # a node sees nothing after it
    assert torch.equal(_dense(mask.kv_num_blocks, mask.kv_indices), touched & ~whole)
    assert torch.equal(_dense(mask.full_kv_num_blocks, mask.full_kv_indices), whole)


def _dense(counts, indices):
    """[n, n] bool of FlexAttention's lists."""
    listed = torch.arange(indices.shape[-1]) < counts[0, 0, :, None]
    found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    return found.scatter_(1, indices[0, 0].long(), listed)


def test_positions_beyond_the_nodes_are_padding_of_ranks_that_hold_parts():
    tree = _tree([[0, 1, 2, 0], [0, 1, 1, 2]])
    rows, qkv = _rows(tree, SharedTree), torch.randn(3, 1, 2, 7, 8)
    u = len(tree.tokens)
    out = rows.attend(*qkv, None)
    assert torch.equal(out, rows.attend(*(x[:, :, :u] for x in qkv), None)) and out.shape[1] == u


def test_a_tree_s_nodes_must_follow_each_other():
    rows = [TreeRow(np.array([0, 1, 3]), 0), TreeRow(np.array([0, 2]), 1)]
    with pytest.raises(ValueError, match="one stretch"):
        SharedTree.of(rows, 4)
    with pytest.raises(RuntimeError, match="densely"):
        SharedTree.of([TreeRow(np.arange(3), 0)], 3).by(SparseSpec(blocks=2))


@pytest.mark.slow
def test_a_compiled_kernel_that_skips_blocks_of_a_tree_gives_the_same(monkeypatch):
    """The plain implementation looks at every block; inductor's CPU kernel, forward only, at those
    that are listed."""
    # the kernel for any size, which a second size in one process asks for, is no valid C++
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    monkeypatch.setattr(shared_tree, "flex_kernel", lambda device: compiled)
    prompt = list(range(300))
    tree = _tree([[*prompt, *range(400 + 9 * a, 550 + 20 * a)] for a in range(4)])
    mask = _rows(tree, SharedTree).mask
    assert int(mask.full_kv_num_blocks.sum()) > 8
    assert mask.to_dense().float().mean() < 0.5
    qkv = [torch.randn(1, h, len(tree.tokens), 16) for h in (4, 2, 2)]
    with torch.no_grad():
        found, want = (
            _attend(None, *qkv, None, scaling=0.3, shared_prefix=rows)[0]
            for rows in (_rows(tree, SharedTree), _rows(tree).ready(torch.float32))
        )
    torch.testing.assert_close(found, want, atol=3e-6, rtol=1e-5)


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
    with pytest.raises(ValueError, match="prompt=dense"):
        _rows(_tree([[0, 1, 2], [0, 1, 1]])).by(SparseSpec(blocks=2, prompt="dense"))
