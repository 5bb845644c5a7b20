"""A teacher's engine gives the log-probs of a plain forward, of tokens that it did not sample."""

import copy

import numpy as np
import pytest
import torch
from engine_helpers import make_job

from rlcore.rollout.specs import start_teacher
from rlcore.testing.records import make_trajectory

pytestmark = pytest.mark.engine
K = 5
POSITIONS = 512  # of the model


def test_scores_are_those_of_a_float64_forward(model_a):
    engine = start_teacher(make_job(model_a, logprobs_k=K, max_len=POSITIONS, max_num_seqs=1))
    one = make_trajectory(0, 0, turns=[((3, 4, 5), (6, 7, 8, 1))])
    played = make_trajectory(0, 1, turns=[((9, 3), (4, 5)), ((8, 8, 3), (10, 11, 12, 1))])
    longest = make_trajectory(0, 2, turns=[((3,), tuple(3 + i % 20 for i in range(POSITIONS - 1)))])
    too_long = make_trajectory(0, 3, turns=[((3,), (3,) * POSITIONS)])
    outside = make_trajectory(0, 4, turns=[((3,), (10**6,))])
    given = [(t.token_ids, t.sampled) for t in (one, too_long, played, outside, longest)]
    found = engine.score(given)
    assert found[1] is None and found[3] is None
    exact = copy.deepcopy(model_a.hf).double()
    for t, answer in zip((one, played, longest), (found[0], found[2], found[4])):
        ids, logp_at, logp = answer
        expected = _log_probs(exact, t)
        at = np.arange(len(t.sampled_ids))
        assert ids.dtype == np.int32 and logp_at.dtype == logp.dtype == np.float32
        np.testing.assert_allclose(logp, expected[at, t.sampled_ids], atol=2e-5)
        likeliest = np.sort(expected, 1)[:, ::-1][:, :K]
        np.testing.assert_allclose(logp_at, likeliest, atol=2e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), logp_at, atol=2e-5)
    # to the bit, whatever comes with it: records arrive together by chance
    for alone, among in zip(engine.score([given[2]])[0], found[2]):
        np.testing.assert_array_equal(alone, among)


def _log_probs(model, t):
    """[S, V]: at every sampled position."""
    with torch.no_grad():
        logits = model(torch.tensor(t.token_ids[None].astype(np.int64))).logits[0]
    return logits.log_softmax(-1)[np.flatnonzero(t.sampled) - 1].numpy()
