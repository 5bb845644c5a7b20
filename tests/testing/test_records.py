"""Builders of records: what they make is consistent, and each field can be given."""

import numpy as np
import pytest

from rlcore.testing.records import (
    make_answer,
    make_group,
    make_sampling,
    make_score,
    make_trajectory,
)


def test_a_trajectory_of_two_turns():
    t = make_trajectory(
        4, 1, turns=(((3, 4), (5, 6)), ((7,), (8, 9, 1))), version=(0, 0, 1, 1, 1), k=3
    )
    assert t.token_ids.tolist() == [3, 4, 5, 6, 7, 8, 9, 1]
    assert t.sampled.tolist() == [False, False, True, True, False, True, True, True]
    assert t.turn_starts.tolist() == [2, 5]
    assert t.prompt_ids.tolist() == [3, 4] and t.sampled_ids.tolist() == [5, 6, 8, 9, 1]
    assert t.token_version.tolist() == [0, 0, 1, 1, 1]
    assert t.topk_ids.shape == t.topk_logp.shape == (5, 3) and t.logp_inf.shape == (5,)
    assert t.request_id == "train:4:1"


def test_any_field_can_be_given():
    t = make_trajectory(draw_id="x", logp_inf=np.array([-1, -2], np.float32), purpose="eval/0/a/b")
    assert (t.draw_id, t.logp_inf.tolist(), t.purpose) == ("x", [-1, -2], "eval/0/a/b")
    assert make_sampling(temperature=0.0).temperature == 0.0
    assert make_answer(1, text="42", prompt_id="t/train/1").prompt_id == "t/train/1"


def test_scores_and_answers_belong_to_the_record_of_the_same_indices():
    t = make_trajectory(3, 2)
    for other in (make_score(t), make_answer(3, 2)):
        assert (other.group_id, other.sample_index, other.draw_id) == (3, 2, t.draw_id)
    assert make_score(t, status="error").reward is None


def test_a_group_needs_a_trajectory():
    group = make_group([make_trajectory(2, i) for i in range(2)], [0.0, 1.0], admitted_version=1)
    assert (group.group_id, group.admitted_version, group.tokens) == (2, 1, 4)
    assert [e.score.reward for e in group.episodes] == [0.0, 1.0]
    with pytest.raises(ValueError, match="at least one"):
        make_group([], [])
