"""Micro-batches: nothing lost, nothing over budget, and both layouts give what the plain model gives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import small_model

from rlcore.learner.head import HeadSpec
from rlcore.learner.packing import Tokens, dummy, pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.types import TokenScores

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=20)


def _sequences(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [Tokens(rng.integers(3, 15, p), rng.integers(3, 15, t)) for p, t in lengths]


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 60), layout=st.sampled_from(["sorted", "packed"]))
def test_every_response_token_once_and_within_budget(lengths, budget, layout):
    sequences = _sequences(lengths)
    batches = pack(sequences, budget, layout)
    seen = {}
    for mb in batches:
        assert mb.tokens <= budget or len(mb.sequences) == 1
        flat = mb.input_ids.flatten()
        for row, column, target, at in zip(*(x.tolist() for x in (mb.row, mb.column, mb.targets, mb.predict))):
            i = int(mb.sequences[row])
            seen[i, column] = target
            before = np.concatenate([sequences[i].prompt_ids, sequences[i].response_ids])
            assert flat[at] == before[len(sequences[i].prompt_ids) + column - 1]
            assert mb.position_ids.flatten()[at] == len(sequences[i].prompt_ids) + column - 1
    expected = {(i, c): t for i, s in enumerate(sequences) for c, t in enumerate(s.response_ids.tolist())}
    assert seen == expected
    again = pack(sequences, budget, layout)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(batches, again))


def test_sorting_by_length_wastes_little_of_a_long_tail():
    lengths = [(4, int(t)) for t in np.random.default_rng(0).exponential(40, 200) + 1]
    sequences = _sequences(lengths)
    padded = sum(mb.tokens for mb in pack(sequences, 1024, "sorted"))
    assert padded < 1.15 * sum(map(len, sequences))


def test_a_sequence_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="without a prompt"):
        Tokens(np.array([], dtype=np.int32), np.array([1]))


def test_layouts_equal_the_plain_model(tmp_path):
    lm = load_causal_lm(small_model(tmp_path), "float32", "sdpa").eval()
    policy = Policy(lm)
    sequences = _sequences([(p, t) for p in (1, 3, 6) for t in (1, 2, 7)])
    plain = {}
    for i, s in enumerate(sequences):
        ids = torch.tensor(np.concatenate([s.prompt_ids, s.response_ids]))
        logp = torch.log_softmax(lm(ids[None]).logits[0] / 0.7, -1)
        plain[i] = logp[len(s.prompt_ids) - 1 : -1].gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
    for layout in ("sorted", "packed"):
        for budget in (10, 10_000):
            done = []
            for mb in pack(sequences, budget, layout):
                scores = TokenScores(*policy(mb, None, HeadSpec(temperature=0.7))[1:])
                dense = mb.dense(scores.logp, 7)
                for row, i in enumerate(mb.sequences.tolist()):
                    torch.testing.assert_close(dense[row, : len(plain[i])], plain[i], atol=2e-6, rtol=1e-5)
                    assert (dense[row, len(plain[i]) :] == 0).all()
                    done.append(i)
            assert sorted(done) == list(plain)


def test_a_dummy_has_a_position_and_no_sequence():
    mb = dummy()
    assert len(mb.sequences) == 0 and len(mb.targets) == 1 and mb.tokens == 1
