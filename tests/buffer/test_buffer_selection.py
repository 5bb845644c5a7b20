"""What happens to a group when its last sample has come."""

import pytest
from buffer_helpers import fill, trajectory
from hypothesis import given
from hypothesis import strategies as st

from rlcore.buffer import ReplayBuffer
from rlcore.buffer.selection import SelectionPolicy, keep_best
from rlcore.errors import UserError


def one(group_rewards, **settings):
    """A one-group buffer after a whole group arrived, None standing for a failed score."""
    n = len(group_rewards)
    buffer = ReplayBuffer(1, n, **settings)
    buffer.admit(["digits/train/0"], 0)
    statuses = ["error" if r is None else "ok" for r in group_rewards]
    buffer.add([trajectory(0, i, reward=r, status=statuses[i]) for i, r in reversed(list(enumerate(group_rewards)))])
    return buffer


def kept(buffer):
    return [t.sample_index for t in buffer.take(0)[0].trajectories]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8))
def test_keep_best_keeps_the_highest_and_breaks_ties_by_index(rewards, keep):
    picked = keep_best(rewards, keep)
    assert picked == sorted(picked) and len(picked) == min(keep, len(rewards))
    for out in set(range(len(rewards))) - set(picked):
        assert all(rewards[i] > rewards[out] or (rewards[i] == rewards[out] and i < out) for i in picked)


def test_all_samples_are_kept_in_order_by_default():
    assert kept(one([0.0, 0.0, 1.0])) == [0, 1, 2]


def test_equal_rewards_are_filtered_only_if_asked():
    assert one([1.0, 1.0], filter_equal=True).ledger.evicted == {"filtered_equal_rewards": 1}
    assert one([1.0, 1.0]).ready(0)
    assert one([1.0, 0.0], filter_equal=True).ready(0)


def test_oversampling_keeps_the_best_and_frees_the_rest():
    buffer = one([0.0, 1.0, 0.5, 1.0], keep_best=2)
    assert buffer.metrics()["buffer/bytes"] == sum(e.size for e in one([1.0, 1.0])._entries.values())
    assert kept(buffer) == [1, 3]
    assert buffer.batch_metrics(0)["reward/mean"] == 0.625  # of all that was sampled
    assert buffer.batch_metrics(0)["reward/kept_mean"] == 1.0


def test_a_select_function_sees_usable_rewards_only():
    buffer = one([0.0, None, 1.0, 0.5], select=lambda rewards: [i for i, r in enumerate(rewards) if r > 0.2])
    assert kept(buffer) == [2, 3]


@pytest.mark.parametrize("positions", [[], [0, 0], [2], [-1]])
def test_a_select_function_that_answers_nonsense_is_an_error(positions):
    with pytest.raises(ValueError, match="select returned"):
        SelectionPolicy(select=lambda rewards: positions).judge([0.0, 1.0])


def test_failed_scores_are_left_out_and_counted_never_read_as_zero():
    buffer = one([None, 1.0, 0.5])
    assert buffer.ledger.score_errors == 1
    assert kept(buffer) == [1, 2]
    assert buffer.batch_metrics(0)["reward/mean"] == 0.75


@pytest.mark.parametrize(("rewards", "settings"), [([None, 1], {}), ([None, 1, 0], {"min_samples": 3}), ([None], {})])
def test_too_few_usable_samples_fail_the_group(rewards, settings):
    buffer = one(rewards, **settings)
    assert buffer.ledger.failed == {"too_few_samples": 1}
    assert buffer.room(0) == 1 and buffer.metrics()["buffer/bytes"] == 0


def test_groups_of_one_sample_are_enough_when_asked_for():
    assert one([1.0]).ready(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": 5}, r"algorithm\.keep_best=5 .* choose 1 to rollout\.samples_per_prompt=2"),
        ({"sampling": "newest"}, r"schedule\.sampling=newest .* fifo, uniform, by_task"),
        ({"max_uses": 2}, r"schedule\.max_uses=2 .* schedule\.sampling=uniform"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(UserError, match=message):
        ReplayBuffer(1, 2, **settings)


def test_by_task_shares_follow_the_weights_whatever_the_mix_of_arrivals():
    buffer = ReplayBuffer(4, 1, max_staleness=9, sampling="by_task", task_weights={"a": 3.0, "b": 1.0})
    drawn = []
    for step in range(5):
        prompts = [f"{'a' if i % 2 else 'b'}/train/{i}" for i in range(buffer.room(step))]
        for g, prompt in zip(buffer.admit(prompts, step), prompts):
            fill(buffer, [g], 1, prompt_id=prompt, version=step)
        drawn += [g.prompt_id[0] for g in buffer.take(step)]
        buffer.commit(step)
        buffer.set_versions(step + 1, step + 1)
    assert drawn.count("a") == 15 and drawn.count("b") == 5


def test_by_task_waits_for_a_task_on_its_way_and_goes_on_without_an_absent_one():
    buffer = ReplayBuffer(2, 1, max_staleness=1, sampling="by_task")
    buffer.admit(["a/train/0", "a/train/1", "b/train/2"], 0)
    buffer.add([trajectory(0, 0, prompt_id="a/train/0"), trajectory(1, 0, prompt_id="a/train/1")])
    assert not buffer.ready(0)
    buffer.fail_group(2, "timeout")
    assert [g.group_id for g in buffer.take(0)] == [0, 1]


def test_uniform_replay_trains_on_a_group_up_to_max_uses_and_then_lets_it_go():
    buffer = ReplayBuffer(2, 1, steps_per_publish=4, sampling="uniform", max_uses=2)
    assert buffer.room(0) == 4  # 8 places, each group good for two
    ids = buffer.admit([f"a/train/{i}" for i in range(4)], 0)
    for i in ids:
        fill(buffer, [i], 1, prompt_id=f"a/train/{i}")
    used = []
    for step in range(3):
        used += [g.group_id for g in buffer.take(step)]
        buffer.commit(step)
        buffer.check()
    assert max(used.count(i) for i in ids) == 2
    assert buffer.ledger.consumed == sum(used.count(i) == 2 for i in ids)
    buffer.set_versions(4, 4)  # past the cap: used groups leave as consumed, unused ones as stale
    assert buffer.ledger.consumed == len(set(used)) and buffer.ledger.evicted.get("stale", 0) == 4 - len(set(used))
