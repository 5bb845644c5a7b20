"""Micro-batches: nothing lost, nothing over budget, and both layouts give what the plain model
gives."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import small_model
from transformers import AutoModelForCausalLM

from rlcore.attention.specs import SparseSpec
from rlcore.attention.varlen import Sequences
from rlcore.errors import UserError
from rlcore.extras.diffusion.llada import LladaConfig
from rlcore.learner.batch import build_batch
from rlcore.learner.build import layer_sizes
from rlcore.learner.limits import ROOM, LayerSizes, most_positions
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.packing import PassCosts, dummy, pack
from rlcore.learner.policy import Policy, load_causal_lm, sparse_rows
from rlcore.learner.recurrent import SequenceRows
from rlcore.learner.sequences import TokenSequence, read_next_tokens
from rlcore.learner.specs import LearnerSpec
from rlcore.testing.records import make_group, make_trajectory
from rlcore.types import PAGE_RULE, PageRule, TokenScores

TURN = st.tuples(st.integers(1, 9), st.integers(0, 12))  # tokens observed, tokens sampled
EPISODES = st.lists(
    st.lists(st.lists(TURN, min_size=1, max_size=3), min_size=1, max_size=3), max_size=12
)
COSTS = PassCosts(position=10.0, score=1.0, key=0.0, query=0.0, batch=40.0)
DEAR = PassCosts(position=1.0, score=0.0, key=0.0, query=0.0, batch=1e6)
LAYOUTS = st.sampled_from(["sorted", "packed"])


def _sequence(rng, turns):
    """A sequence of (tokens observed, tokens sampled) turns."""
    sampled = np.concatenate([np.repeat([False, True], turn) for turn in turns])
    return TokenSequence(rng.integers(3, 15, len(sampled)), sampled)


def _episodes(shape, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(_sequence(rng, turns) for turns in parts) for parts in shape]


def _single(lengths):
    return _episodes([[[turn]] for turn in lengths])


@settings(max_examples=60, deadline=None)
@given(
    shape=EPISODES,
    budget=st.integers(1, 60),
    layout=LAYOUTS,
    tight=st.sampled_from([None, COSTS, DEAR]),
)
def test_every_sampled_token_once_and_within_budget(shape, budget, layout, tight):
    episodes = _episodes(shape)
    batches = pack(episodes, budget, layout, tight=tight)
    seen = {}
    for mb in batches:
        assert mb.tokens <= budget or len(mb.episodes) == 1
        ids, positions = mb.input_ids.flatten(), mb.position_ids.flatten()
        columns = (x.tolist() for x in (mb.row, mb.column, mb.targets, mb.predict))
        for row, column, target, at in zip(*columns):
            seen[int(mb.episodes[row]), column] = (target, int(ids[at]), int(positions[at]))
    expected = {}
    for i, parts in enumerate(episodes):
        flat = [(s, int(place)) for s in parts for place in np.flatnonzero(s.sampled)]
        for column, (s, place) in enumerate(flat):
            before = int(s.token_ids[place - 1])
            expected[i, column] = (int(s.token_ids[place]), before, place - 1)
    assert seen == expected
    again = pack(episodes, budget, layout, tight=tight)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(batches, again))


@settings(max_examples=40, deadline=None)
@given(shape=EPISODES, budget=st.integers(1, 60), layout=LAYOUTS)
def test_the_parts_of_an_episode_share_a_micro_batch(shape, budget, layout):
    batches = pack(_episodes(shape), budget, layout)
    places = [int(i) for mb in batches for i in mb.episodes]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_a_micro_batch_is_filled_up_to_its_budget(layout):
    episodes = _single([(2, 3)] * 4)
    (one,) = pack(episodes[:1], 100, layout)
    assert [len(mb.episodes) for mb in pack(episodes, 2 * one.tokens, layout)] == [2, 2]


def test_what_comes_after_the_last_sampled_token_is_no_input():
    sequence = TokenSequence(np.array([5, 6, 7, 8, 9]), np.array([0, 1, 0, 0, 0], bool))
    (mb,) = pack([(sequence,)], 100, "packed")
    assert mb.input_ids.tolist() == [[5]] and mb.targets.tolist() == [6]


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_sequences_and_episodes_without_sampled_tokens_are_left_out(layout):
    rng = np.random.default_rng(0)
    empty, full = _sequence(rng, [(3, 0)]), _sequence(rng, [(2, 2), (3, 1)])
    (mb,) = pack([(empty,), (empty, full), ()], 100, layout)
    assert mb.episodes.tolist() == [1] and mb.tokens == len(full) == 7
    assert mb.column.tolist() == [0, 1, 2] and mb.prompt_lens == (2,)


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_sparse_attention_sees_each_sequence_and_its_first_observation(layout):
    episodes = _episodes([[[(3, 2), (2, 2)], [(5, 1)]], [[(4, 4)]]])
    (mb,) = pack(episodes, 100, layout)
    rows = sparse_rows(mb, SparseSpec(blocks=2, prompt="dense"))
    lengths = [len(s) for i in mb.episodes.tolist() for s in episodes[i]]
    prompts = [s.prompt_len for i in mb.episodes.tolist() for s in episodes[i]]
    assert list(rows.prompt_lens) == prompts and sorted(prompts) == [3, 4, 5]
    if layout == "packed":
        assert list(rows.cu_seqlens) == np.cumsum([0, *lengths]).tolist()
    else:
        assert rows.cu_seqlens is None and mb.input_ids.shape == (3, max(lengths))


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_each_sequence_is_computed_by_the_pages_that_sampled_it(layout):
    rule, own = SparseSpec(blocks=2), PageRule(3, 32, (2, 5))
    records = [make_trajectory(0, i, turns=[((3, 4), [5] * n)]) for i, n in enumerate((2, 7, 4))]
    records[1].extras[PAGE_RULE] = own.array()
    (mb,) = pack([(read_next_tokens(t),) for t in records], 100, layout)
    rules = {n: rule.under(own) if n == 1 else rule for n in range(3)}
    assert sparse_rows(mb, rule).rules == [rules[i] for i in mb.episodes.tolist()]
    (plain,) = pack([(read_next_tokens(records[0]),)], 100, layout)
    assert sparse_rows(plain, rule).rules is None


def test_tokens_belong_to_the_stretch_of_the_position_that_predicts_them():
    two = make_trajectory(0, 0, turns=[((3,) * 14, [5] * 6), ((4, 4), [5] * 30)])
    two.extras[PAGE_RULE] = PageRule(0, 16, (2, 2, 2)).array()
    group = make_group([two, make_trajectory(0, 1, turns=[((3,), [5] * 4)])], [0.0, 1.0])
    sent = build_batch([group], with_topk=False, device=torch.device("cpu"), by_position=True).sent
    # queries 13 to 18, then 21 to 50
    assert sent.stretch[0].tolist() == [0] * 3 + [1] * 3 + [1] * 11 + [2] * 19
    assert (sent.stretch[1] == -1).all()
    without = build_batch([group], with_topk=False, device=torch.device("cpu")).sent
    assert without.stretch is None


def test_sorting_by_length_wastes_little_of_a_long_tail():
    lengths = [(4, int(t)) for t in np.random.default_rng(0).exponential(40, 200) + 1]
    episodes = _single(lengths)
    padded = sum(mb.tokens for mb in pack(episodes, 1024, "sorted"))
    assert padded < 1.15 * sum(len(s) for parts in episodes for s in parts)


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), max_size=8),
    budget=st.integers(1, 80),
    costs=st.sampled_from([COSTS, DEAR]),
)
def test_no_division_of_rows_costs_less(items, budget, costs):
    items = sorted(items, key=lambda item: -item[0])
    lengths, rows = [n for n, _ in items], [r for _, r in items]

    def work(ends):
        """None: a micro-batch of several items is beyond the budget."""
        total = 0.0
        for a, b in itertools.pairwise([0, *ends]):
            if b - a > 1 and sum(rows[a:b]) * lengths[a] > budget:
                return None
            total += costs.batch + costs.plain(sum(rows[a:b]), lengths[a])
        return total

    inner = range(1, len(items))
    ways = (c for n in range(len(items)) for c in itertools.combinations(inner, n))
    every = [work([*way, len(items)]) for way in ways] if items else [0.0]
    found = work(costs.cuts(lengths, rows, budget))
    assert found == pytest.approx(min(w for w in every if w is not None))


def test_division_by_cost_pads_less_under_a_large_budget():
    lengths = [(4, int(t)) for t in np.random.default_rng(0).exponential(40, 200) + 1]
    episodes = _single(lengths)
    costs = PassCosts(position=2e6, score=1e3, key=0.0, query=0.0, batch=4e7)
    filled, tight = (pack(episodes, 4096, "sorted", tight=t) for t in (None, costs))
    real = sum(len(s) for parts in episodes for s in parts)
    assert sum(mb.tokens for mb in filled) > 1.15 * real > sum(mb.tokens for mb in tight)


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(("hidden", "fits"), [(16, "most"), (1024, None), (65536, "least")])
def test_auto_is_as_many_positions_as_fit(gpus, hidden, fits):
    layers = 1 if gpus == 0 else 4
    sizes = LayerSizes(layers, hidden, hidden, hidden, 4 * hidden, True)
    settings = {"micro_batch_tokens": "auto", "num_gpus": gpus, "dtype": "float32"}
    auto, room = (
        most_positions(LearnerSpec(**settings), lambda: sizes),
        ROOM["cuda" if gpus else "cpu"],
    )
    each = layers * sizes.position_bytes(4)
    if fits:
        assert auto == getattr(room, fits)
    else:
        assert auto * each <= room.bytes < (auto + 1) * each
    checkpointed = LearnerSpec(**settings, gradient_checkpointing=True)
    assert most_positions(checkpointed, lambda: sizes) >= auto
    assert most_positions(LearnerSpec(micro_batch_tokens=77), lambda: sizes) == 77


def test_no_position_at_all_is_refused():
    with pytest.raises(UserError, match="micro_batch_tokens=0 must be above 0, or auto"):
        LearnerSpec(micro_batch_tokens=0).check("learner")


@pytest.mark.parametrize("masked", [False, True])
def test_sizes_are_found_in_a_model_of_either_kind(tmp_path, masked):
    if masked:
        lm = AutoModelForCausalLM.from_config(LladaConfig(d_model=32, n_heads=2, n_layers=3))
        expected = LayerSizes(3, 32, 32, 32, 384, False)
    else:
        lm = load_causal_lm(small_model(tmp_path), "float32", "sdpa")
        expected = LayerSizes(2, 66, 32, 16, 63, True)
    assert layer_sizes(lm) == expected
    assert PassCosts.of(lm).batch > 0


def test_a_sequence_needs_an_observation_first():
    with pytest.raises(ValueError, match="begins with a sampled token"):
        TokenSequence.of_answer([], [1])
    with pytest.raises(ValueError, match="2 tokens has a mask of 1"):
        TokenSequence(np.array([1, 2]), np.array([False]))


def test_layouts_equal_the_plain_model(tmp_path):
    lm = load_causal_lm(small_model(tmp_path), "float32", "sdpa").eval()
    policy = Policy(lm)
    shape = [[[(p, t)]] for p in (1, 3, 6) for t in (1, 2, 7)]
    shape += [[[(2, 3), (4, 2)]], [[(3, 2)], [(4, 1), (1, 1)]]]
    episodes = _episodes(shape)
    plain = {}
    for i, parts in enumerate(episodes):
        rows = []
        for s in parts:
            logp = torch.log_softmax(lm(torch.tensor(s.token_ids)[None]).logits[0] / 0.7, -1)
            at = torch.tensor(s.predicting)
            rows.append(logp[at].gather(1, torch.tensor(s.targets)[:, None])[:, 0])
        plain[i] = torch.cat(rows)
    for layout in ("sorted", "packed"):
        for budget in (10, 10_000):
            done = []
            for mb in pack(episodes, budget, layout):
                scores = TokenScores(*policy(mb, None, HeadSpec(0.7, 1024))[1:])
                dense = mb.dense(scores.logp, 7)
                for row, i in enumerate(mb.episodes.tolist()):
                    n = len(plain[i])
                    torch.testing.assert_close(dense[row, :n], plain[i], atol=2e-6, rtol=1e-5)
                    assert (dense[row, n:] == 0).all()
                    done.append(i)
            assert sorted(done) == list(plain)


def test_a_dummy_has_a_position_and_no_episode():
    mb = dummy()
    assert len(mb.episodes) == 0 and len(mb.targets) == 1 and mb.tokens == 1


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_the_host_knows_where_sequences_begin_without_asking_the_device(layout):
    episodes = _episodes([[[(3, 2), (2, 2)], [(5, 1)]], [[(4, 4)]]])
    (mb,) = pack(episodes, 100, layout)
    if layout == "sorted":
        assert mb.starts is None
        return
    assert list(mb.starts) == torch.nonzero(mb.position_ids[0] == 0)[:, 0].tolist()
    by_value, known = Sequences.of(mb.position_ids), Sequences.of(mb.position_ids, mb.starts)
    assert by_value.longest == known.longest and torch.equal(by_value.bounds, known.bounds)
    rows, same = SequenceRows.of(mb.position_ids), SequenceRows.of(mb.position_ids, mb.starts)
    assert torch.equal(rows.rows, same.rows) and torch.equal(rows.back, same.back)
    # of a tensor without memory nothing can be read
    nowhere = mb.position_ids.to("meta")
    assert Sequences.of(nowhere, mb.starts).longest == known.longest
    assert SequenceRows.of(nowhere, mb.starts).rows.shape == rows.rows.shape
    with pytest.raises((NotImplementedError, RuntimeError)):
        Sequences.of(nowhere)
