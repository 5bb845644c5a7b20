"""The staleness bound under random orders of events, on the real buffer."""

import random
from collections import Counter

import pytest
from buffer_helpers import PROMPT, Run, deliver, fill, give_up, ids_of, make_buffer, sample
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlcore.buffer import journal, store
from rlcore.buffer.admission import Candidate, StalenessBound, WaitingGroups
from rlcore.buffer.specs import Phases
from rlcore.errors import UserError

runs = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32)


@runs
@given(
    seeds, st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(0, 8), st.booleans()
)
def test_bound_holds_and_nothing_stalls_or_ages_out(
    seed, per_step, per_publish, eta, lag, filtering
):
    buffer = make_buffer(
        per_step, 3, steps_per_publish=per_publish, max_staleness=eta, dynamic_sampling=filtering
    )
    run = Run(buffer, seed, steps=10, lag=lag).play()
    used = [g for batch in run.batches for g in batch]
    assert len(used) == len(set(used)) == 10 * per_step
    assert all(batch == sorted(batch) for batch in run.batches)
    assert store.metrics(buffer)["ledger/consumed"] == len(used)
    assert "stale" not in buffer.ledger.evicted


@runs
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 2)]),
    st.integers(0, 4),
    st.sampled_from(["fifo", "uniform"]),
    st.booleans(),
)
def test_every_group_is_used_once_an_epoch_and_consumed_once(
    seed, epochs, batches, publish, eta, sampling, filtering
):
    """Any phases, publishes within and between them, losses of actors, restarts anywhere."""
    phase = batches * epochs
    above, below = publish
    schedule = {
        "steps_per_phase": batches,
        "epochs": epochs,
        "steps_per_publish": phase * above if phase % below else phase // below * above,
        "max_staleness": eta,
        "sampling": sampling,
        "dynamic_sampling": filtering,
        "run_seed": seed,
    }
    assume(not (phase % schedule["steps_per_publish"] and schedule["steps_per_publish"] % phase))

    def make():
        return make_buffer(2, 2, **schedule)

    run = Run(make(), seed, steps=3 * phase, restart=0.05, rebuilt=make).play()
    used = Counter(g for batch in run.batches for g in batch)
    assert set(used.values()) == {epochs} and len(used) == 3 * batches * 2
    for start in range(0, 3 * phase, phase):
        first = run.batches[start : start + batches]
        assert run.batches[start : start + phase] == first * epochs
    assert run.buffer.ledger.consumed == len(used)
    assert sampling == "uniform" or "stale" not in run.buffer.ledger.evicted


@runs
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(["uniform", "by_task"]),
    st.integers(1, 3),
)
def test_other_orders_keep_the_cap_and_do_not_stall(
    seed, per_step, per_publish, eta, sampling, max_uses
):
    uses = max_uses if sampling == "uniform" else 1
    buffer = make_buffer(
        per_step,
        2,
        steps_per_publish=per_publish,
        max_staleness=eta,
        sampling=sampling,
        max_uses=uses,
        run_seed=seed,
    )
    run = Run(buffer, seed, steps=10, tasks=("a", "b", "b", "c")).play()
    used = [g for batch in run.batches for g in batch]
    assert max(used.count(g) for g in used) <= uses
    assert all(len(set(batch)) == per_step for batch in run.batches)


@pytest.mark.parametrize(
    ("sampling", "uses"), [("fifo", 1), ("uniform", 1), ("uniform", 2), ("by_task", 1)]
)
@pytest.mark.parametrize("per_publish", [1, 3])
def test_synchronous_draws_do_not_depend_on_timing(sampling, uses, per_publish):
    def batches(seed):
        buffer = make_buffer(
            2,
            3,
            steps_per_publish=per_publish,
            sampling=sampling,
            max_uses=uses,
            dynamic_sampling=True,
        )
        return Run(buffer, seed, steps=9, tasks=("a", "b")).play().batches

    first = batches(0)
    assert all(batches(seed) == first for seed in range(1, 6))


def test_groups_wait_for_a_straggler_only_when_its_deadline_is_at_stake():
    buffer = make_buffer(1, 1, max_staleness=2)
    buffer.admit(["digits/train/0"] * 3)
    fill(buffer, [1, 2], 1)
    assert ids_of(buffer.take(0)) == [1]  # group 0 may still be used by step 2
    buffer.commit(0)
    assert ids_of(buffer.take(1)) == [2]
    buffer.commit(1)
    buffer.set_versions(2, 2)
    buffer.admit(["digits/train/0"] * 2)
    fill(buffer, [3, 4], 1, version=2)
    assert not buffer.ready(2)  # only now group 0 has to come first
    fill(buffer, [0], 1)
    assert ids_of(buffer.take(2)) == [0]


def test_the_bound_is_reached_so_admission_is_not_stricter_than_it_must_be():
    buffer = make_buffer(2, 2, steps_per_publish=2, max_staleness=3)
    ages = Run(buffer, 1, steps=40, death=0.0).play().staleness
    assert max(ages) == buffer.batches.bound.cap == 4


def test_a_synchronous_buffer_replaces_a_dropped_group():
    buffer = make_buffer(2, 2, dynamic_sampling=True)
    buffer.admit(["digits/train/0"] * 2)
    assert buffer.room() == 0
    fill(buffer, [0], 2, rewards=[1.0, 1.0])
    assert buffer.room() == 1
    give_up(buffer, 1)
    assert buffer.room() == 2


def test_every_group_filtered_keeps_asking_for_more():
    buffer = make_buffer(2, 2, dynamic_sampling=True)
    for _ in range(20):
        ids = buffer.admit(["digits/train/0"] * buffer.room())
        fill(buffer, ids, 2, rewards=[0.0, 0.0])
    assert buffer.ledger.evicted == {"filtered_equal_rewards": 40} and not buffer.ready(0)


def idle_share(eta):
    """Share of ticks in which the learner waits. Actors finish 10% more than the learner uses, in
    random order."""
    buffer, rng = make_buffer(4, 2, max_staleness=eta), random.Random(0)
    flight, version, busy, idle, credit, step_ticks = [], 0, 0, 0, 0.0, 8
    for _ in range(1200):
        room = buffer.room()
        flight += [(g, i) for g in buffer.admit(["digits/train/0"] * room) for i in range(2)]
        credit = min(credit + 1.1, 3.0)
        while credit >= 1 and flight:
            group, index = flight.pop(rng.randrange(min(len(flight), 16)))
            deliver(buffer, sample(group, index, version=version))
            credit -= 1
        if busy == 0 and buffer.ready(version):
            buffer.take(version)
            busy = step_ticks
        elif busy == 0:
            idle += 1
        if busy:
            busy -= 1
            if busy == 0:
                buffer.commit(version)
                version += 1
                buffer.set_versions(version, version)
    return idle / 1200


def test_with_staleness_allowed_the_learner_rarely_waits():
    assert idle_share(eta=0) > 0.3
    assert idle_share(eta=4) < 0.05


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_released_batches_leave_a_schedule_that_meets_every_deadline(groups, per_step, step):
    """Against the definition: for every d, at most (d - step) * G of the rest are due by d."""
    bound = StalenessBound(per_step, 1, 5, Phases(1, 1))
    waiting = [Candidate(i, deadline, finished) for i, (deadline, finished) in enumerate(groups)]
    batch = bound.release(WaitingGroups(waiting), step, strict=False)
    finished = sorted((c for c in waiting if c.finished), key=lambda c: (c.deadline, c.group_id))[
        :per_step
    ]
    rest = [c.deadline for c in waiting if c not in finished]
    fits = all(sum(r <= d for r in rest) <= max(0, d - step) * per_step for d in range(8))
    assert (batch is not None) == (len(finished) == per_step and fits)


def test_tokens_older_than_the_admission_are_refused():
    buffer = make_buffer(1, 1)
    buffer.set_versions(3, 3)
    buffer.admit(["digits/train/0"])
    with pytest.raises(
        ValueError, match=r"tokens of version 2.*admitted at published version 3.*bf16-0"
    ):
        deliver(buffer, sample(0, 0, version=2))


def test_a_shorter_bound_after_a_resume_evicts_what_is_too_old():
    old = make_buffer(1, 1, max_staleness=3)
    old.admit(["digits/train/0"] * 4)
    fill(old, [1], 1)
    new = make_buffer(1, 1, max_staleness=1)
    journal.restore(new, journal.snapshot(journal.cut(old)))
    assert new.ledger.evicted == {"stale": 2}
    assert ids_of(new.take(0)) == [1]


def test_a_group_of_two_epochs_stays_until_its_second_use_is_committed():
    buffer = make_buffer(1, 1, epochs=2)
    buffer.admit([PROMPT])
    fill(buffer, [0], 1)
    assert ids_of(buffer.take(0)) == [0]
    buffer.commit(0)
    buffer.set_versions(0, 1)
    assert buffer.ledger.consumed == 0 and buffer.room() == 0
    assert ids_of(buffer.take(1)) == [0]
    buffer.commit(1)
    assert buffer.ledger.consumed == 1 and list(buffer.ledger.recent) == [(0, "consumed by step 1")]


def test_the_rest_of_a_phase_is_put_back_and_taken_again_as_it_was():
    buffer = make_buffer(1, 1, steps_per_phase=2, epochs=2, max_staleness=9)
    buffer.admit([PROMPT] * 4)
    fill(buffer, range(4), 1)
    batches = [ids_of(buffer.take(step)) for step in range(5)]
    assert batches == [[0], [1], [0], [1], [2]]
    buffer.commit(0)
    buffer.rollback(1)
    assert [ids_of(buffer.take(step)) for step in range(1, 5)] == batches[1:]


def test_a_buffer_that_cannot_hold_a_phase_says_so_instead_of_waiting():
    """No step is taken, and so no byte freed, before all batches of a phase are there."""
    size = len(sample(0, 0)[0])
    buffer = make_buffer(1, 1, steps_per_phase=3, max_bytes=int(1.5 * size))
    with pytest.raises(UserError, match=r"2 groups fill it, and an update phase needs 3 at once"):
        for group in range(3):
            buffer.room()
            buffer.live.admit(PROMPT)
            fill(buffer, [group], 1)
            buffer.take(group)


def test_samples_of_a_phases_first_batch_can_be_read_when_all_of_it_is_taken():
    buffer = make_buffer(1, 1, steps_per_phase=4)
    buffer.admit([PROMPT] * 4)
    fill(buffer, range(4), 1)
    for step in range(4):
        buffer.take(step)
    (shown,) = buffer.peek(0, 1)
    assert shown.score.group_id == 0 and buffer.peek(3, 1) == []
