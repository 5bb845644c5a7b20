"""A draw becomes a record: its tokens, log-probs and versions in their places."""

from __future__ import annotations

import numpy as np
import pytest
from rollout_fakes import ask

from rlcore.rollout.segments import Draw
from rlcore.serialization import dump_trajectory, load_trajectory


def draw(**changes) -> Draw:
    fields = {"request": ask(1, **changes)[0], "draw_id": "bf16-0:1:0", "budget": 9, "version": 3}
    return Draw(**fields)


def rows(*tokens: int, k: int = 2) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([[t, *range(10, 10 + k)] for t in tokens], np.int32)
    return ids, -np.arange(1, ids.size + 1, dtype=np.float32).reshape(ids.shape)


def test_a_record_is_the_prompt_as_observation_and_one_sampled_turn():
    d = draw(prompt=(5, 9))
    d.extend([4, 7], rows(4, 7))
    d.switch(4)
    d.extend([1], rows(1))
    t = d.finish("stop", "bf16-0", "bf16")
    assert t.token_ids.tolist() == [5, 9, 4, 7, 1] and t.token_ids.dtype == np.int32
    assert t.sampled.tolist() == [False, False, True, True, True]
    assert t.turn_starts.tolist() == [2] and t.prompt_ids.tolist() == [5, 9]
    assert t.logp_inf.tolist() == [-1, -4, -1] and t.logp_inf.dtype == np.float32
    assert t.topk_ids.tolist() == [[10, 11]] * 3
    assert t.topk_logp.tolist() == [[-2, -3], [-5, -6], [-2, -3]]
    assert t.token_version.tolist() == [3, 3, 4] and t.token_version.dtype == np.int32
    assert (t.draw_id, t.part, t.parts, t.finish_reason) == ("bf16-0:1:0", 0, 1, "stop")
    assert t.timings["queue_s"] >= 0 and t.timings["generate_s"] >= 0


def test_tokens_outside_the_support_and_missing_columns_are_padding():
    d = draw(logprobs_k=4)
    ids, logp = rows(4, 7, k=3)
    logp[1, 2:] = -np.inf  # cut off by top-p
    d.extend([4, 7], (ids, logp))
    t = d.finish("length", "bf16-0", "bf16")
    assert t.topk_ids.tolist() == [[10, 11, 12, -1], [10, -1, -1, -1]]
    assert np.isneginf(t.topk_logp).tolist() == [[False] * 3 + [True], [False] + [True] * 3]


def test_rows_with_ids_of_eight_bytes_give_a_record_that_can_be_sent():
    """vLLM's second runner, which GPU actors run on, gives such rows."""
    d = draw(logprobs_k=20)
    ids, logp = rows(4, 7, k=20)
    d.extend([4, 7], (ids.astype(np.int64), logp))
    t = load_trajectory(dump_trajectory(d.finish("length", "bf16-0", "bf16")))
    assert t.topk_ids.dtype == np.int32 and t.topk_ids.tolist() == [list(range(10, 30))] * 2


def test_a_wider_row_than_asked_for_is_cut():
    d = draw(logprobs_k=1)
    d.extend([4], rows(4, k=3))
    d.extend([7], rows(7, k=1))
    assert d.finish("length", "bf16-0", "bf16").topk_ids.tolist() == [[10], [10]]


def test_without_log_probs_they_are_nan_and_without_tokens_the_record_is_the_prompt():
    d = draw(logprobs_k=-1)
    d.extend([4, 7], None)
    t = d.finish("length", "bf16-0", "bf16")
    assert np.isnan(t.logp_inf).all() and t.topk_ids.shape == (2, 0)
    empty = draw().finish("abort", "bf16-0", "bf16")
    assert empty.token_ids.tolist() == [5, 9] and not empty.sampled.any()
    assert empty.topk_ids.shape == (0, 2) and empty.turn_starts.tolist() == [2]


@pytest.mark.parametrize("given", [None, rows(5), rows(4, 7)])
def test_rows_that_do_not_match_the_tokens_are_an_error(given):
    d = draw()
    d.extend([4], given)
    with pytest.raises(RuntimeError, match=r"train:0:0: the engine"):
        d.finish("stop", "bf16-0", "bf16")


def test_a_long_response_keeps_its_rows_in_order():
    d = draw()
    for token in range(700):
        d.extend([token], rows(token))
    t = d.finish("length", "bf16-0", "bf16")
    assert t.sampled_ids.tolist() == list(range(700)) and t.topk_logp.shape == (700, 2)
