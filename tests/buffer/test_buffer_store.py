"""Arrival, duplicates, two-phase consumption, back-pressure and statistics of the buffer."""

import numpy as np
import pytest
from buffer_helpers import fill, trajectory

from rlcore.buffer import Missing, ReplayBuffer
from rlcore.errors import UserError
from rlcore.serialization import dump_trajectory

PROMPT = "digits/train/0"


def test_samples_as_objects_and_as_bytes_come_back_the_same():
    buffer = ReplayBuffer(1, 2)
    buffer.admit([PROMPT], 0)
    first, second = trajectory(0, 0, reward=0.25), trajectory(0, 1, reward=1.0, tokens=5)
    buffer.add([dump_trajectory(second)])
    assert not buffer.ready(0)
    buffer.set_versions(0, 0)
    buffer.add([first])
    (group,) = buffer.take(0)
    assert [t.reward for t in group.trajectories] == [0.25, 1.0]
    np.testing.assert_array_equal(group.trajectories[1].response_ids, second.response_ids)
    assert (group.group_id, group.prompt_id, group.admitted_version) == (0, PROMPT, 0)


def test_arrival_version_is_the_learner_version_when_the_last_sample_came():
    buffer = ReplayBuffer(1, 2, max_staleness=3)
    buffer.admit([PROMPT, PROMPT], 0)
    fill(buffer, [0], 2)
    buffer.add([trajectory(1, 0)])
    assert buffer.take(0)[0].arrival_version == 0
    buffer.commit(0)
    buffer.set_versions(0, 1)
    buffer.add([trajectory(1, 1)])
    assert buffer.take(1)[0].arrival_version == 1


def test_second_copies_and_samples_of_departed_groups_are_counted_and_ignored():
    buffer = ReplayBuffer(1, 2)
    buffer.admit([PROMPT], 0)
    buffer.add([trajectory(0, 0, reward=0.0), trajectory(0, 0, reward=1.0), trajectory(0, 1, reward=1.0)])
    assert [t.reward for t in buffer.take(0)[0].trajectories] == [0.0, 1.0]
    buffer.commit(0)
    buffer.add([trajectory(0, 1)])
    metrics = buffer.metrics()
    assert (metrics["buffer/duplicates"], metrics["buffer/late"], metrics["buffer/arrived_samples"]) == (1, 1, 2)
    buffer.check()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (trajectory(0, 2), "never asked for"),
        (trajectory(9, 0), "never asked for"),
        (trajectory(0, 0, prompt_id="digits/train/1"), "is of digits/train/1, its group of digits/train/0"),
        (trajectory(0, 0, status="pending"), "not a scored training sample"),
        (trajectory(0, 0, purpose="eval"), "not a scored training sample"),
        (trajectory(0, 0, reward=float("nan")), "a failed score"),
        (b"junk", "malformed"),
    ],
)
def test_a_bad_sample_is_refused_with_all_that_came_along(bad, message):
    buffer = ReplayBuffer(1, 2)
    buffer.admit([PROMPT], 0)
    with pytest.raises(ValueError, match=message):
        buffer.add([trajectory(0, 1), bad])
    assert buffer.reissue() == [Missing(0, PROMPT, 0, (0, 1))]


def test_reissue_names_what_is_still_missing():
    buffer = ReplayBuffer(3, 2)
    buffer.admit([PROMPT, "digits/train/1", PROMPT], 0)
    fill(buffer, [0], 2)
    buffer.add([trajectory(1, 1, prompt_id="digits/train/1")])
    buffer.fail_group(2, "gave_up")
    assert buffer.reissue([0, 1, 2, 1]) == buffer.reissue() == [Missing(1, "digits/train/1", 0, (0,))]
    assert not buffer.fail_group(0, "late timeout") and not buffer.fail_group(2, "again")
    assert buffer.ledger.failed == {"gave_up": 1}


def test_admitting_more_than_there_is_room_for_is_an_error():
    buffer = ReplayBuffer(2, 1)
    with pytest.raises(ValueError, match="3 groups for a room of 2 at version 0"):
        buffer.admit([PROMPT] * 3, 0)
    assert buffer.admit([PROMPT] * 2, 0) == [0, 1]


def test_steps_are_taken_in_order_and_kept_until_committed():
    buffer = ReplayBuffer(1, 1, max_staleness=2)
    buffer.admit([PROMPT] * 3, 0)
    fill(buffer, [0, 1, 2], 1)
    with pytest.raises(ValueError, match="step 1 is out of order, the next one to take is 0"):
        buffer.take(1)
    assert [buffer.take(s)[0].group_id for s in (0, 1)] == [0, 1]  # the next batch may be fetched early
    assert buffer.metrics()["ledger/consumed"] == 0
    buffer.commit(0)
    assert buffer.metrics()["ledger/consumed"] == 1 and buffer.metrics()["buffer/groups"] == 2
    with pytest.raises(KeyError):
        buffer.commit(0)


def test_a_dead_learner_gets_the_same_batches_again():
    buffer = ReplayBuffer(1, 1, max_staleness=3)
    buffer.admit([PROMPT] * 4, 0)
    fill(buffer, [2, 3], 1)
    batches = [buffer.take(s)[0].group_id for s in (0, 1)]
    fill(buffer, [0, 1], 1)  # earlier groups finish meanwhile
    room = buffer.room(0)
    buffer.rollback(0)
    assert buffer.room(0) == room == 0
    assert [buffer.take(s)[0].group_id for s in (0, 1)] == batches == [2, 3]
    buffer.commit(0)
    buffer.commit(1)
    assert [buffer.take(s)[0].group_id for s in (2, 3)] == [0, 1]
    buffer.check()


def test_over_the_byte_limit_nothing_is_admitted_until_a_batch_is_committed():
    size = len(dump_trajectory(trajectory(0, 0)))
    buffer = ReplayBuffer(1, 1, max_staleness=9, max_bytes=3 * size)
    fill(buffer, buffer.admit([PROMPT], 0), 1)
    assert buffer.room(0) == 2  # by staleness it would be 9
    ids = buffer.admit([PROMPT] * 2, 0)
    assert buffer.room(0) == 0  # those in flight are reckoned in
    fill(buffer, ids, 1)
    assert buffer.metrics()["buffer/bytes"] == 3 * size and buffer.room(0) == 0
    buffer.take(0)
    assert buffer.room(0) == 0
    buffer.commit(0)
    assert buffer.room(0) == 1


def test_a_limit_too_small_for_one_step_is_refused_by_its_key():
    buffer = ReplayBuffer(3, 1, max_bytes=900)
    fill(buffer, buffer.admit([PROMPT], 0), 1)
    with pytest.raises(UserError, match=r"cluster\.buffer_mib=0\.00085\S* is too small: 1 groups fill it"):
        buffer.room(0)


def test_a_step_that_just_fits_is_not_held_up_by_the_limit():
    size = len(dump_trajectory(trajectory(0, 0)))
    buffer = ReplayBuffer(3, 1, max_bytes=int(2.5 * size))
    for step in range(4):
        while not buffer.ready(step):
            fill(buffer, buffer.admit([PROMPT] * buffer.room(step), step), 1, version=step)
        buffer.take(step)
        buffer.commit(step)
        buffer.set_versions(step + 1, step + 1)


def test_statistics_of_a_batch():
    buffer = ReplayBuffer(2, 2)
    buffer.admit([PROMPT, PROMPT], 0)
    buffer.add([
        trajectory(0, 0, reward=0.0, tokens=2, reward_parts={"format": 1.0}),
        trajectory(0, 1, reward=1.0, tokens=6, finish_reason="length", reward_parts={"format": 0.0}),
        trajectory(1, 0, reward=1.0, tokens=4),
        trajectory(1, 1, reward=0.0, tokens=4),
    ])  # fmt: skip
    buffer.take(0)
    assert buffer.batch_metrics(0) == {
        "reward/mean": 0.5, "reward/std": 0.5, "response_length/mean": 4.0, "response_length/max": 6.0,
        "response_length/truncated_share": 0.25, "reward_parts/format": 0.5,
    }  # fmt: skip
    metrics = buffer.metrics()
    assert metrics["buffer/arrived_tokens"] == 16 and metrics["buffer/arrived_reward_mean"] == 0.5
    assert metrics["buffer/arrived_reward_std"] == 0.5 and metrics["buffer/arrived_response_length_mean"] == 4


def test_peek_shows_samples_of_the_newest_batches_even_after_the_commit():
    buffer = ReplayBuffer(2, 2, max_staleness=2)
    buffer.admit([PROMPT] * 6, 0)
    fill(buffer, range(6), 2)
    for step in range(3):
        ids = {g.group_id for g in buffer.take(step)}
        buffer.commit(step)
        shown = buffer.peek(step, 5)
        assert {t.group_id for t in shown} == ids
        assert len(buffer.peek(step, 1)) == 1
    assert buffer.peek(1, 5) and not buffer.peek(0, 5)


def test_what_a_wait_lacks_is_said_in_one_line():
    buffer = ReplayBuffer(2, 2)
    buffer.admit([PROMPT, PROMPT], 0)
    fill(buffer, [1], 2)
    buffer.add([trajectory(0, 1)])
    assert buffer.waiting_for(0) == (
        "step 0 needs 2 groups: 1 finished, 1 in flight; the oldest in flight is group 0 (digits/train/0),"
        " with 1 of 2 samples missing"
    )
