"""Arrival and pairing, duplicates, two-phase consumption, back-pressure and statistics."""

import math
from dataclasses import replace

import pytest
from buffer_helpers import (
    PROMPT,
    deliver,
    fill,
    give_up,
    groups_of,
    ids_of,
    make_buffer,
    sample,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.buffer import store
from rlcore.buffer.admission import check_capacity
from rlcore.buffer.specs import BatchingSpec
from rlcore.errors import UserError
from rlcore.serialization import dump_trajectory, dump_unusable, load_trajectory, record_bytes
from rlcore.testing.records import make_score, make_trajectory
from rlcore.types import MOST_REWARD


def test_records_and_scores_in_either_order_become_the_group():
    buffer = make_buffer(1, 2)
    buffer.admit([PROMPT])
    first, second = sample(0, 0, reward=0.25), sample(0, 1, reward=1.0, tokens=5)
    buffer.add_scores([second[1]])
    buffer.add_records([first[0], second[0]])
    assert not buffer.ready(0) and buffer.in_flight() == {0: (PROMPT, (0,))}
    buffer.add_scores([first[1]])
    batch = buffer.take(0)
    assert batch.groups == [(0, 7)]
    (stored,) = buffer.stored(0, [0])
    assert [e.records for e in stored.episodes] == [(first[0],), (second[0],)]  # the very bytes
    (group,) = groups_of(buffer, 0, batch)
    assert [e.score.reward for e in group.episodes] == [0.25, 1.0]
    assert (group.group_id, group.prompt_id, group.admitted_version) == (0, PROMPT, 0)


def test_a_sample_of_several_parts_arrives_with_the_last_of_them():
    buffer = make_buffer(1, 1)
    buffer.admit([PROMPT])
    turns = (((3, 4), (5, 6)), ((7,), (8,)))
    parts = [make_trajectory(0, 0, turns=turns, part=p, parts=2, draw_id="d") for p in range(2)]
    buffer.add_scores([make_score(parts[0])])
    buffer.add_records([dump_trajectory(parts[1])])
    assert not buffer.ready(0)
    buffer.add_records([dump_trajectory(parts[1]), dump_trajectory(parts[0])])
    batch = buffer.take(0)
    assert batch.groups == [(0, 6)]  # sampled tokens, without the observation between the turns
    assert batch.metrics["response_length/mean"] == 6.0
    (group,) = groups_of(buffer, 0, batch)
    assert [t.part for t in group.episodes[0].parts] == [0, 1]


def test_halves_of_two_drawings_do_not_make_a_sample_and_the_first_whole_one_counts():
    buffer = make_buffer(1, 1)
    buffer.admit([PROMPT])
    lost = sample(0, 0, reward=0.0, draw_id="bf16-0:1")
    second = sample(0, 0, reward=1.0, draw_id="bf16-1:7", tokens=3)
    third = sample(0, 0, reward=0.5, draw_id="bf16-1:8")
    buffer.add_records([lost[0]])  # its score died with the graders
    buffer.add_scores([second[1], third[1]])
    assert not buffer.ready(0)
    held = store.metrics(buffer)["buffer/bytes"]
    buffer.add_records([second[0]])
    assert store.metrics(buffer)["buffer/bytes"] == held - len(lost[0]) + len(second[0])
    batch = buffer.take(0)
    (group,) = groups_of(buffer, 0, batch)
    assert group.episodes[0].score.draw_id == "bf16-1:7" and batch.groups == [(0, 3)]
    buffer.add_records([third[0]])
    buffer.add_scores([lost[1]])
    metrics = store.metrics(buffer)
    assert (metrics["buffer/duplicates"], metrics["buffer/arrived_samples"]) == (2, 1)


def test_arrival_version_is_the_learner_version_when_the_last_sample_arrived():
    buffer = make_buffer(1, 2, max_staleness=3)
    buffer.admit([PROMPT, PROMPT])
    fill(buffer, [0], 2)
    deliver(buffer, sample(1, 0))
    assert groups_of(buffer, 0, buffer.take(0))[0].arrival_version == 0
    buffer.commit(0)
    buffer.set_versions(0, 1)
    deliver(buffer, sample(1, 1))
    assert groups_of(buffer, 1, buffer.take(1))[0].arrival_version == 1


def test_second_copies_and_samples_of_departed_groups_are_counted_and_ignored():
    buffer = make_buffer(1, 2)
    buffer.admit([PROMPT])
    deliver(buffer, sample(0, 0, reward=0.0))
    deliver(buffer, sample(0, 0, reward=1.0))
    deliver(buffer, sample(0, 1, reward=1.0))
    (group,) = groups_of(buffer, 0, buffer.take(0))
    assert [e.score.reward for e in group.episodes] == [0.0, 1.0]
    buffer.commit(0)
    deliver(buffer, sample(0, 1))
    metrics = store.metrics(buffer)
    assert (
        metrics["buffer/duplicates"],
        metrics["buffer/late"],
        metrics["buffer/arrived_samples"],
    ) == (1, 1, 2)


def test_a_failed_score_keeps_no_record():
    buffer = make_buffer(1, 2)
    buffer.admit([PROMPT])
    deliver(buffer, sample(0, 0, status="timeout", error="the grader passed its deadline of 10 s"))
    metrics = store.metrics(buffer)
    assert metrics["buffer/bytes"] == 0 and metrics["ledger/score_timeouts"] == 1
    assert metrics["buffer/arrived_tokens"] == 2
    failed, alike, sentence = store.failed_scores(buffer)
    assert failed == alike == 1 and sentence == (
        "1 of 1 samples so far could not be scored (0 errors, 1 timeouts), the last: "
        "digits/train/0: the grader passed its deadline of 10 s"
    )


def test_samples_that_all_fail_alike_from_the_first_on_are_told_apart_from_others():
    def alike(*errors):
        buffer = make_buffer(1, 4)
        buffer.admit([PROMPT])
        for i, error in enumerate(errors):
            status = {"status": "error", "error": error} if error else {}
            deliver(buffer, sample(0, i, **status))
        return store.failed_scores(buffer)[1]

    raised = "reset raised TemplateError: no role tool at {}"
    assert alike(*map(raised.format, (1, 22, 3))) == 3
    assert alike(raised, raised, "reset passed its deadline") == 0
    assert alike(raised, None, raised) == alike(None, raised) == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(7, 0)[0], "train:7:0 was never asked for"),
        (sample(0, 2)[0], "train:0:2 was never asked for"),
        (sample(-1, 0)[0], "was never asked for"),
        (sample(0, 0, prompt_id="digits/train/9")[0], "is of digits/train/9, its group of"),
        (sample(0, 0, purpose="eval/0/digits/greedy")[0], "is not of a training sample"),
    ],
)
def test_a_bad_record_is_refused_with_all_that_came_along(bad, message):
    buffer = make_buffer(1, 2)
    buffer.admit([PROMPT])
    good = sample(0, 1)
    with pytest.raises(ValueError, match=message):
        buffer.add_records([good[0], bad])
    buffer.add_scores([good[1]])
    assert buffer.in_flight() == {0: (PROMPT, (0, 1))}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(7, 0)[1], "sample 0 of group 7 was never asked for"),
        (sample(0, 2)[1], "sample 2 of group 0 was never asked for"),
    ],
)
def test_a_bad_score_is_refused_with_all_that_came_along(bad, message):
    buffer = make_buffer(1, 2)
    buffer.admit([PROMPT])
    good = sample(0, 1)
    with pytest.raises(ValueError, match=message):
        buffer.add_scores([good[1], bad])
    buffer.add_records([good[0]])
    assert buffer.in_flight() == {0: (PROMPT, (0, 1))}


def damaged(record, places):
    """A record in which the bytes at these places are others."""
    data = bytearray(record)
    for at, byte in places:
        data[at % len(data)] ^= byte
    return bytes(data)


PLACES = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 255)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=300)
@given(PLACES, st.sampled_from([0, 8, 200, None]))
def test_a_damaged_record_costs_its_sample_and_no_other(places, end):
    """It is taken, fails its sample, is counted as one of no sample, or names another sample, which
    is the message's fault."""
    buffer = make_buffer(1, 2)
    buffer.admit([PROMPT])
    bad, good = sample(0, 0), sample(0, 1)
    try:
        buffer.add_records([damaged(bad[0], places)[:end], good[0]])
    except ValueError as e:
        assert "buffer: record" in str(e)
        return
    buffer.add_scores([good[1], bad[1]])
    counts = store.metrics(buffer)
    _, missing = buffer.in_flight().get(0, (PROMPT, ()))
    assert counts["buffer/arrived_samples"] == 2 - len(missing)
    assert missing == (0,) or (missing == () and not counts["buffer/unreadable"])


@pytest.mark.parametrize("change", ["shape", "problem"])
def test_a_record_that_nothing_can_be_trained_on_fails_its_sample(change):
    buffer = make_buffer(1, 3)
    buffer.admit([PROMPT])
    good, (record, score) = [sample(0, 1), sample(0, 2)], sample(0, 0)
    if change == "shape":
        bad = record.replace(b'"shape":[2]', b'"shape":[4]', 1)
    else:
        bad = dump_unusable(make_trajectory(prompt_id=PROMPT), "bf16-0 gave nonsense")
    deliver(buffer, (bad, score), *good)
    (group,) = groups_of(buffer, 0, buffer.take(0))
    assert [e.sample_index for e in group.episodes] == [1, 2]
    failed, _, sentence = store.failed_scores(buffer)
    assert failed == 1 and ("nonsense" in sentence or "of shape [4]" in sentence)


NUMBERS = st.floats() | st.integers() | st.sampled_from([10**400, 1e308, -1e308, 1e12])


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=2))
def test_a_score_of_odd_numbers_fails_its_sample_and_no_sum(numbers):
    buffer = make_buffer(1, 2)
    buffer.admit([PROMPT])
    for i, (reward, part, turn) in enumerate(numbers):
        record, score = sample(0, i, reward=reward, parts={"p": part})
        buffer.add_records([record])
        buffer.add_scores([replace(score, turn_rewards=(turn,))])
    odd = sum(any(not abs(n) <= MOST_REWARD for n in each) for each in numbers)
    assert buffer.ledger.score_errors == odd
    assert buffer.in_flight() == {}  # one verdict each
    assert all(math.isfinite(value) for value in store.metrics(buffer).values())
    if buffer.ready(0):
        assert all(math.isfinite(v) for v in buffer.take(0).metrics.values())


def test_in_flight_names_the_samples_that_have_not_arrived():
    buffer = make_buffer(3, 2)
    buffer.admit([PROMPT, "digits/train/1", PROMPT])
    fill(buffer, [0], 2)
    deliver(buffer, sample(1, 1, prompt_id="digits/train/1"))
    give_up(buffer, 2)
    assert buffer.in_flight([0, 1, 2, 1]) == buffer.in_flight() == {1: ("digits/train/1", (0,))}
    give_up(buffer, 0)  # finished: not in flight, so it cannot be lost
    give_up(buffer, 2)
    assert buffer.ledger.failed == {"lost_1_times": 1}


def test_a_group_that_is_lost_too_often_is_given_up():
    buffer = make_buffer(2, 1)
    buffer.admit([PROMPT, "digits/train/1"])
    assert buffer.lost([0, 1, 0], limit=2) == (
        {0: (PROMPT, (0,)), 1: ("digits/train/1", (0,))},
        {},
    )
    fill(buffer, [0], 1)
    assert buffer.lost([0, 1], limit=2) == ({}, {1: "digits/train/1"})
    assert buffer.ledger.failed == {"lost_2_times": 1}


def test_as_many_groups_are_admitted_as_there_is_room_for():
    buffer = make_buffer(2, 1)
    prompts = [f"digits/train/{i}" for i in range(3)]
    assert buffer.admit(prompts) == [0, 1]
    assert buffer.in_flight() == {g: (prompts[g], (0,)) for g in (0, 1)}
    assert buffer.admit(prompts) == []


def test_a_whole_run_and_a_wave_limit_the_room():
    buffer = make_buffer(2, 1, max_staleness=1)
    assert buffer.room() == 4 and buffer.room(total=3) == 3
    buffer.admit([PROMPT] * 2)
    assert buffer.room(total=3) == 1
    assert buffer.room(all_done=True) == 0
    fill(buffer, [0, 1], 1)
    assert buffer.room(all_done=True, total=3) == 1
    assert buffer.ready(0) and not buffer.ready(0, wave=3)  # a third group is still to be admitted
    assert buffer.ready(0, wave=2)


def test_steps_are_taken_in_order_and_kept_until_committed():
    buffer = make_buffer(1, 1, max_staleness=2)
    buffer.admit([PROMPT] * 3)
    fill(buffer, [0, 1, 2], 1)
    with pytest.raises(ValueError, match="step 1 is out of order, the next one to take is 0"):
        buffer.take(1)
    # the next batch may be fetched early
    assert [ids_of(buffer.take(s)) for s in (0, 1)] == [[0], [1]]
    assert store.metrics(buffer)["ledger/consumed"] == 0
    with pytest.raises(ValueError, match=r"groups \[2\] are not in a taken batch 1"):
        buffer.stored(1, [1, 2])
    buffer.commit(0)
    metrics = store.metrics(buffer)
    assert metrics["ledger/consumed"] == 1 and metrics["buffer/groups"] == 2
    with pytest.raises(ValueError, match="step 0 was not taken, or is committed"):
        buffer.commit(0)
    with pytest.raises(ValueError, match="are not in a taken batch 0"):
        buffer.stored(0, [0])


def test_a_batch_that_is_not_ready_is_not_taken():
    buffer = make_buffer(1, 1)
    with pytest.raises(ValueError, match="step 0 was asked for before it was ready"):
        buffer.take(0)


def test_a_dead_learner_gets_the_same_batches_again():
    buffer = make_buffer(1, 1, max_staleness=3)
    buffer.admit([PROMPT] * 4)
    fill(buffer, [2, 3], 1)
    batches = [ids_of(buffer.take(s)) for s in (0, 1)]
    fill(buffer, [0, 1], 1)  # earlier groups finish meanwhile
    room = buffer.room()
    buffer.rollback(0)
    assert buffer.room() == room == 0
    assert [ids_of(buffer.take(s)) for s in (0, 1)] == batches == [[2], [3]]
    buffer.commit(0)
    buffer.commit(1)
    assert [ids_of(buffer.take(s)) for s in (2, 3)] == [[0], [1]]
    store.metrics(buffer)


def test_over_the_byte_limit_nothing_is_admitted_until_a_batch_is_committed():
    size = len(sample(0, 0)[0])
    buffer = make_buffer(1, 1, max_staleness=9, max_bytes=3 * size)
    fill(buffer, buffer.admit([PROMPT]), 1)
    assert buffer.room() == 2  # by staleness it would be 9
    ids = buffer.admit([PROMPT] * 2)
    assert buffer.room() == 0  # those in flight are expected to take as much
    fill(buffer, ids, 1)
    assert store.metrics(buffer)["buffer/bytes"] == 3 * size and buffer.room() == 0
    buffer.take(0)
    assert buffer.room() == 0
    buffer.commit(0)
    assert buffer.room() == 1


def test_an_arrival_between_room_and_admission_admits_fewer_and_ends_nothing():
    size = len(sample(0, 0)[0])
    buffer = make_buffer(1, 1, max_staleness=9, max_bytes=4 * size)
    fill(buffer, buffer.admit([PROMPT]), 1)
    (late,) = buffer.admit([PROMPT])
    assert buffer.room() == 2
    deliver(buffer, sample(late, 0, tokens=300))
    assert buffer.admit([PROMPT] * 2) == []
    buffer.take(0)
    buffer.commit(0)
    buffer.take(1)
    buffer.commit(1)
    assert len(buffer.admit([PROMPT] * 2)) == 1


def test_a_limit_too_small_for_one_step_is_refused_by_its_key():
    buffer = make_buffer(3, 1, max_bytes=600)
    fill(buffer, buffer.admit([PROMPT]), 1)
    with pytest.raises(
        UserError, match=r"cluster\.buffer_mib=0\.00057\S* is too small: 1 groups fill it"
    ):
        buffer.room()


def test_a_limit_below_one_step_at_full_length_is_refused_before_a_start():
    def check(max_bytes):
        schedule = BatchingSpec(groups_per_step=4)
        check_capacity(max_bytes, schedule, samples_per_group=8, longest=longest)

    longest = record_bytes(2048, 1024, 20)
    written = dump_trajectory(make_trajectory(turns=((range(1024), range(1024)),), k=20))
    assert len(written) <= longest < len(written) + 1000
    needed = 4 * 8 * longest
    check(needed)
    with pytest.raises(UserError, match=r"^cluster\.buffer_mib=5 is too small: .* use 6 or more"):
        check(5 << 20)
    assert 5 << 20 < needed < 6 << 20


def test_a_step_that_just_fits_is_not_held_up_by_the_limit():
    size = len(sample(0, 0)[0])
    buffer = make_buffer(3, 1, max_bytes=int(2.5 * size))
    for step in range(4):
        for _ in range(3):  # one group at a time at the worst
            fill(buffer, buffer.admit([PROMPT] * 3), 1, version=step)
        assert ids_of(buffer.take(step)) == [3 * step, 3 * step + 1, 3 * step + 2]
        buffer.commit(step)
        buffer.set_versions(step + 1, step + 1)
    assert store.metrics(buffer)["ledger/consumed"] == 12


def test_statistics_of_a_batch():
    buffer = make_buffer(2, 2)
    buffer.admit([PROMPT, PROMPT])
    deliver(
        buffer,
        sample(0, 0, reward=0.0, tokens=2, parts={"format": 1.0}),
        sample(0, 1, reward=1.0, tokens=6, finish_reason="length", parts={"format": 0.0}),
        sample(1, 0, reward=1.0, tokens=4),
        sample(1, 1, reward=0.0, tokens=4),
    )
    assert buffer.take(0).metrics == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "response_length/mean": 4.0,
        "response_length/max": 6.0,
        "response_length/truncated_share": 0.25,
        "reward_parts/format": 0.5,
        "reward/equal_share": 0.0,
    }
    metrics = store.metrics(buffer)
    assert metrics["buffer/arrived_tokens"] == 16 and metrics["buffer/arrived_reward_mean"] == 0.5
    assert metrics["buffer/arrived_reward_std"] == 0.5
    assert metrics["buffer/arrived_response_length_mean"] == 4


def test_peek_shows_samples_of_the_newest_batches_even_after_the_commit():
    buffer = make_buffer(2, 2, max_staleness=2)
    buffer.admit([PROMPT] * 6)
    fill(buffer, range(6), 2)
    for step in range(3):
        ids = set(ids_of(buffer.take(step)))
        buffer.commit(step)
        shown = buffer.peek(step, 5)
        assert {load_trajectory(e.records[0]).group_id for e in shown} == ids
        whole, *others = (e.score.group_id for e in shown)
        assert others[0] == whole != others[1] and {whole, others[1]} == ids
        assert [e.score.sample_index for e in buffer.peek(step, 1)] == [0, 1]
    assert buffer.peek(1, 5) and not buffer.peek(0, 5)


def test_the_group_that_is_shown_whole_is_one_whose_rewards_differ():
    buffer = make_buffer(3, 2, max_staleness=0)
    buffer.admit([PROMPT] * 3)
    for group, rewards in enumerate(([1.0, 1.0], [0.0, 1.0], [0.0, 0.0])):
        fill(buffer, [group], 2, rewards=rewards)
    buffer.take(0)
    assert [e.score.group_id for e in buffer.peek(0, 1)] == [1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_every_task_are_shown(seed):
    buffer = make_buffer(4, 2, max_staleness=0, keep_samples=2, run_seed=seed)
    buffer.admit([PROMPT] * 3 + ["sums/train/0"])
    fill(buffer, range(3), 2)
    fill(buffer, [3], 2, prompt_id="sums/train/0")
    buffer.take(0)
    assert {e.score.group_id == 3 for e in buffer.peek(0, 2)} == {True, False}


def test_which_samples_are_shown_depends_on_the_run_and_the_step():
    def shown(run_seed, step):
        buffer = make_buffer(40, 1, max_staleness=2, run_seed=run_seed)
        fill(buffer, buffer.admit([PROMPT] * 80), 1)
        for taken in range(2):
            buffer.take(taken)
            buffer.commit(taken)
        return tuple(e.score.group_id % 40 for e in buffer.peek(step, 8))

    assert shown(0, 0) == shown(0, 0)
    assert len({shown(run_seed, step) for run_seed in range(3) for step in range(2)}) == 6


def test_what_a_wait_lacks_is_said_in_one_line():
    buffer = make_buffer(2, 2)
    buffer.admit([PROMPT, PROMPT])
    fill(buffer, [1], 2)
    deliver(buffer, sample(0, 1))
    assert store.waiting_for(buffer, 0) == (
        "step 0 needs 2 groups: 1 finished, 1 in flight; the oldest in flight is group 0 "
        "(digits/train/0), with 1 of 2 samples missing"
    )
