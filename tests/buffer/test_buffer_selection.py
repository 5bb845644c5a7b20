"""What happens to a group when its last sample has arrived."""

import pytest
import torch
from buffer_helpers import deliver, fill, give_up, groups_of, ids_of, make_buffer, sample
from hypothesis import given
from hypothesis import strategies as st

from rlcore.buffer import journal, store
from rlcore.buffer.admission import Candidate, StalenessBound, WaitingGroups
from rlcore.buffer.batches import Sampler
from rlcore.buffer.ledger import highest
from rlcore.buffer.specs import BatchingSpec, SelectionSpec, TaskShare
from rlcore.corrections.numerics import ONE_RANK
from rlcore.errors import UserError
from rlcore.objectives.protocols import Rewards
from rlcore.serialization import dump_trajectory
from rlcore.testing.records import make_score, make_trajectory


def one(group_rewards, **settings):
    """A one-group buffer after a whole group arrived, None standing for a failed score."""
    n = len(group_rewards)
    buffer = make_buffer(1, n, **settings)
    buffer.admit(["digits/train/0"])
    statuses = ["error" if r is None else "ok" for r in group_rewards]
    samples = [sample(0, i, reward=r, status=statuses[i]) for i, r in enumerate(group_rewards)]
    deliver(buffer, *reversed(samples))
    return buffer


def kept(buffer):
    (group,) = groups_of(buffer, 0, buffer.take(0))
    return [e.sample_index for e in group.episodes]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8))
def test_the_highest_rewards_are_kept_and_ties_go_to_the_lower_index(rewards, count):
    picked = highest(rewards, count)
    assert picked == sorted(picked) and len(picked) == min(count, len(rewards))
    for out in set(range(len(rewards))) - set(picked):
        assert all(
            rewards[i] > rewards[out] or (rewards[i] == rewards[out] and i < out) for i in picked
        )


def test_all_samples_are_kept_in_order_by_default():
    assert kept(one([0.0, 0.0, 1.0])) == [0, 1, 2]


def test_rewards_that_differ_by_rounding_alone_are_equal():
    """Their advantages are 0, so that nothing could be learned from the group."""
    sums = [0.1 + 0.2, 0.3, 0.3]
    assert one(sums, dynamic_sampling=True).ledger.evicted == {"filtered_equal_rewards": 1}
    values, ids = torch.tensor(sums, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    assert not Rewards(values, ids, ONE_RANK).group_centred.any()
    assert kept(one([0.3, 0.3 + 1e-9], dynamic_sampling=True)) == [0, 1]


def test_equal_rewards_are_filtered_only_if_asked():
    filtered = one([1.0, 1.0], dynamic_sampling=True)
    assert filtered.ledger.evicted == {"filtered_equal_rewards": 1}
    assert one([1.0, 1.0]).ready(0)
    assert one([1.0, 0.0], dynamic_sampling=True).ready(0)


def test_episodes_of_several_parts_that_are_all_filtered_leave_nothing_and_end_the_run():
    buffer = make_buffer(1, 2, dynamic_sampling=True, filter_limit=3)
    turns = ((((3, 4), (5, 6)),), (((3,), (7,)), ((8,), (9,))))
    for group_id in range(3):
        assert buffer.admit(["game/train/0"]) == [group_id]
        for i in range(2):
            names = {"part": 0, "parts": 2, "prompt_id": "game/train/0"}
            first = make_trajectory(group_id, i, turns=turns[0], **names)
            second = make_trajectory(group_id, i, turns=turns[1], **{**names, "part": 1})
            # what single turns were rewarded with does not matter: the episodes' rewards are equal
            score = make_score(first, 1.0, turn_rewards=(i / 2, 1 - i / 2, 0.0))
            deliver(buffer, (dump_trajectory(second), score))
            buffer.add_records([dump_trajectory(first)])
    assert buffer.ledger.evicted == {"filtered_equal_rewards": 3}
    assert buffer.live.bytes == 0 and not buffer.ready(0)
    with pytest.raises(UserError, match=r"filtered the last 3 groups of task game.*filter_limit=3"):
        buffer.admit(["game/train/1"])


def test_dynamic_sampling_judges_what_would_be_trained_on():
    mixed = one([0.0, 1.0, 0.0, 1.0], dynamic_sampling=True, train_on_best=2)
    assert mixed.ledger.evicted == {"filtered_equal_rewards": 1}
    assert kept(one([0.0, 1.0, 0.0, 0.0], dynamic_sampling=True, train_on_best=2)) == [0, 1]


def test_dynamic_sampling_of_one_kept_sample_is_refused():
    with pytest.raises(UserError, match=r"algorithm\.train_on_best=1 .* would filter every group"):
        SelectionSpec(dynamic_sampling=True, train_on_best=1).check("algorithm")
    SelectionSpec(dynamic_sampling=True, train_on_best=2).check("algorithm")


def test_what_the_learner_chooses_by_acceptance_leaves_the_buffer_whole():
    by_learner = {"train_on_best": 2, "train_on_best_by": "acceptance"}
    assert kept(one([0.0, 1.0, 0.5, 1.0], **by_learner)) == [0, 1, 2, 3]
    spec = SelectionSpec(**by_learner)
    assert spec.kept_by_learner == 2 and SelectionSpec(train_on_best=2).kept_by_learner is None
    with pytest.raises(UserError, match="dynamic_sampling=true"):
        SelectionSpec(dynamic_sampling=True, **by_learner).check("algorithm")
    with pytest.raises(UserError, match=r"set algorithm\.train_on_best"):
        SelectionSpec(train_on_best_by="acceptance").check("algorithm")


def test_oversampling_keeps_the_best_and_frees_the_rest():
    buffer = one([0.0, 1.0, 0.5, 1.0], train_on_best=2)
    size = len(sample(0, 0)[0])
    assert store.metrics(buffer)["buffer/bytes"] == 2 * size
    batch = buffer.take(0)
    (group,) = groups_of(buffer, 0, batch)
    assert [e.sample_index for e in group.episodes] == [1, 3]
    assert batch.metrics["reward/mean"] == 0.625  # of all that was sampled
    assert batch.metrics["reward/selected_mean"] == 1.0
    assert batch.groups == [(0, 4)]  # tokens of what is trained on


def test_failed_scores_are_left_out_and_counted_never_read_as_zero():
    buffer = one([None, 1.0, 0.5])
    assert buffer.ledger.score_errors == 1
    batch = buffer.take(0)
    (group,) = groups_of(buffer, 0, batch)
    assert [e.sample_index for e in group.episodes] == [1, 2]
    assert batch.metrics["reward/mean"] == 0.75


@pytest.mark.parametrize("rewards", [[None, 1], [None, None, 1], [None]])
def test_too_few_usable_samples_fail_the_group(rewards):
    buffer = one(rewards)
    assert buffer.ledger.failed == {"too_few_samples": 1}
    assert buffer.room() == 1 and store.metrics(buffer)["buffer/bytes"] == 0


def test_a_group_of_one_sample_is_enough_where_groups_have_one():
    assert one([1.0]).ready(0)


def test_by_task_shares_follow_the_weights_whatever_the_mix_of_arrivals():
    buffer = make_buffer(
        4,
        1,
        max_staleness=9,
        sampling="by_task",
        tasks={"a": TaskShare(1, 3.0), "b": TaskShare(1, 1.0)},
    )
    drawn = []
    for step in range(5):
        prompts = [f"{'a' if i % 2 else 'b'}/train/{i}" for i in range(buffer.room())]
        for g, prompt in zip(buffer.admit(prompts), prompts):
            fill(buffer, [g], 1, prompt_id=prompt, version=step)
        groups = groups_of(buffer, step, buffer.take(step))
        drawn += [g.prompt_id[0] for g in groups]
        buffer.commit(step)
        buffer.set_versions(step + 1, step + 1)
    assert drawn.count("a") == 15 and drawn.count("b") == 5


def test_weights_of_tasks_are_not_negative():
    with pytest.raises(ValueError, match="weights of tasks must not be negative"):
        make_buffer(sampling="by_task", tasks={"a": TaskShare(1, -1.0)})


def test_by_task_waits_for_a_task_in_flight_and_goes_on_without_an_absent_one():
    buffer = make_buffer(2, 1, max_staleness=1, sampling="by_task")
    buffer.admit(["a/train/0", "a/train/1", "b/train/2"])
    deliver(buffer, *(sample(g, 0, prompt_id=f"a/train/{g}") for g in (0, 1)))
    assert not buffer.ready(0)
    give_up(buffer, 2)
    assert ids_of(buffer.take(0)) == [0, 1]


def test_uniform_replay_trains_on_a_group_up_to_max_uses_and_then_lets_it_go():
    buffer = make_buffer(2, 1, steps_per_publish=4, sampling="uniform", max_uses=2)
    assert buffer.room() == 4  # 8 places, each group good for two
    ids = buffer.admit([f"a/train/{i}" for i in range(4)])
    for i in ids:
        fill(buffer, [i], 1, prompt_id=f"a/train/{i}")
    used = []
    for step in range(3):
        used += ids_of(buffer.take(step))
        buffer.commit(step)
        store.metrics(buffer)
    assert max(used.count(i) for i in ids) == 2
    assert buffer.ledger.consumed == sum(used.count(i) == 2 for i in ids)
    buffer.set_versions(4, 4)  # past the cap: used groups leave as consumed, unused ones as stale
    assert buffer.ledger.consumed == len(set(used))
    assert buffer.ledger.evicted.get("stale", 0) == 4 - len(set(used))


def test_uniform_draws_of_each_step_and_run_are_their_own():
    pool = WaitingGroups(Candidate(i, 9, True, "digits", 1) for i in range(200))

    def draw(run_seed, step):
        batching = BatchingSpec(groups_per_step=20, max_staleness=9, sampling="uniform")
        sampler = Sampler(StalenessBound.of(batching), batching, run_seed, None)
        return sampler.draw(pool, step, pool_complete=False)

    assert draw(0, 3) == draw(0, 3)
    assert len({tuple(draw(seed, step)) for seed in range(2) for step in range(5)}) == 10


def test_by_task_gives_a_place_to_the_task_that_it_would_leave_furthest_behind():
    heavier = {"a": TaskShare(1, 1.0), "b": TaskShare(1, 3.0)}
    only_b = {"b": TaskShare(1, 1.0)}  # a has no weight: it comes when nothing else waits
    for shares in (heavier, only_b):
        buffer = make_buffer(1, 1, max_staleness=9, sampling="by_task", tasks=shares)
        for group_id, prompt in enumerate(("a/train/0", "b/train/1")):
            assert buffer.admit([prompt]) == [group_id]
            fill(buffer, [group_id], 1, prompt_id=prompt)
        assert ids_of(buffer.take(0)) == [1]


def test_a_batch_that_is_put_back_counts_once_towards_the_shares_of_tasks():
    def tasks(rolled_back):
        shares = {"a": TaskShare(1, 1.0), "b": TaskShare(1, 1.0)}
        buffer = make_buffer(1, 1, max_staleness=9, sampling="by_task", tasks=shares)
        prompts = [f"{'ab'[i % 2]}/train/{i}" for i in range(8)]
        for group_id, prompt in zip(buffer.admit(prompts), prompts):
            fill(buffer, [group_id], 1, prompt_id=prompt)
        buffer.take(0)
        for _ in range(rolled_back):
            buffer.rollback(0)
            buffer.take(0)
        return [prompts[ids_of(buffer.take(step))[0]][0] for step in range(1, 6)]

    assert tasks(rolled_back=3) == tasks(rolled_back=0) == ["b", "a", "b", "a", "b"]


def test_under_new_weights_by_task_does_not_make_up_for_what_was_not_due_before():
    def buffer(a, b):
        shares = {"a": TaskShare(1, a), "b": TaskShare(1, b)}
        return make_buffer(4, 1, max_staleness=9, sampling="by_task", tasks=shares)

    def step(buffer, number):
        prompts = [f"{'a' if i % 2 else 'b'}/train/{i}" for i in range(buffer.room())]
        for g, prompt in zip(buffer.admit(prompts), prompts):
            fill(buffer, [g], 1, prompt_id=prompt, version=number)
        groups = groups_of(buffer, number, buffer.take(number))
        buffer.commit(number)
        buffer.set_versions(number + 1, number + 1)
        return sorted(g.prompt_id[0] for g in groups)

    first = buffer(1.0, 3.0)
    assert [step(first, n) for n in range(3)] == [["a", "b", "b", "b"]] * 3
    same, other = buffer(1.0, 3.0), buffer(1.0, 1.0)
    for resumed in (same, other):
        journal.restore(resumed, journal.snapshot(journal.cut(first)))
    assert step(same, 3) == ["a", "b", "b", "b"]
    assert [step(other, n) for n in (3, 4)] == [["a", "a", "b", "b"]] * 2
