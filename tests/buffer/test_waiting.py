"""What waits in the buffer, followed from change to change, against the plain rules over all."""

import random

import pytest
from buffer_helpers import PROMPT, deliver, make_buffer, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.buffer import store
from rlcore.buffer.admission import Candidate, StalenessBound, WaitingGroups
from rlcore.buffer.ledger import LedgerError
from rlcore.buffer.specs import Phases


def plain_release(bound, groups, step, strict):
    """As the rule is defined, over the sorted list of all that waits."""
    order = sorted(groups, key=lambda c: (c.deadline, c.group_id))
    batch = [c for c in order if strict or c.finished][: bound.groups_per_step]
    if len(batch) < bound.groups_per_step or not all(c.finished for c in batch):
        return None
    rest = sorted(c.deadline for c in order if c not in batch)
    following = bound.phases.batches_before(step) + 1
    for i, deadline in enumerate(rest):
        if bound.phases.first_use(following + i // bound.groups_per_step) > deadline:
            return None
    return sorted(c.group_id for c in batch)


@given(
    st.integers(1, 4),
    st.tuples(st.integers(1, 3), st.integers(1, 2)),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["new", "finish", "leave", "back"]), st.integers(0, 99))),
)
@settings(max_examples=300, deadline=None)
def test_batches_are_those_of_the_plain_rule_after_any_changes(per_step, phases, strict, changes):
    bound = StalenessBound(per_step, 1, 5, Phases(*phases))
    waiting, plain, gone = WaitingGroups(), {}, {}
    for kind, number in changes:
        known = sorted(plain)
        if kind == "new":
            group_id = len(plain) + len(gone)
            plain[group_id] = Candidate(
                group_id, group_id // 3 + number % 3, False, "abc"[number % 3]
            )
            waiting.put(plain[group_id])
        elif kind == "back" and gone:
            group_id = sorted(gone)[number % len(gone)]
            plain[group_id] = gone.pop(group_id)
            waiting.put(plain[group_id])
        elif known:
            group_id = known[number % len(known)]
            c = plain[group_id]
            if kind == "finish":
                plain[group_id] = Candidate(group_id, c.deadline, True, c.task)
                waiting.put(plain[group_id])
            elif kind == "leave":
                gone[group_id] = plain.pop(group_id)
                waiting.remove(group_id)
        for step in (0, 2, 5):
            expected = plain_release(bound, plain.values(), step, strict)
            assert bound.release(waiting, step, strict=strict) == expected
    assert waiting.candidates() == [plain[g] for g in sorted(plain)]
    assert waiting.finished == sum(waiting.finished_of.values())
    assert waiting.finished == sum(c.finished for c in plain.values())


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_staleness": 2},
        {"max_staleness": 0, "steps_per_publish": 2},
        {"max_staleness": 3, "steps_per_phase": 2, "epochs": 2},
        {"max_staleness": 3, "sampling": "uniform", "max_uses": 2},
        {"max_staleness": 2, "sampling": "by_task"},
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_counts_of_a_run_are_those_found_anew_after_every_call(schedule, seed):
    """Batches taken, committed and put back, in random order with arrivals and losses."""
    rng = random.Random(seed)
    buffer = make_buffer(2, 1, **schedule)
    flying, taken, version, batches = set(), [], 0, 0
    for _ in range(150):
        kind = rng.choice(["admit", "arrive", "arrive", "arrive", "lose", "take", "commit", "back"])
        if kind == "admit":
            flying |= set(buffer.admit([f"{rng.choice('ab')}/train/{i}" for i in range(3)]))
        elif kind in ("arrive", "lose") and flying:
            group_id = flying.pop()
            entry = buffer.live.entries.get(group_id)
            if entry is not None and kind == "arrive":
                one = sample(group_id, 0, prompt_id=entry.prompt_id, version=entry.admitted_version)
                deliver(buffer, one)
            elif entry is not None:
                buffer.lost([group_id], 1)
        elif kind == "take" and buffer.ready(buffer.next_step):
            taken.append(buffer.next_step)
            assert len(buffer.take(buffer.next_step).groups) == 2
            batches += 1
        elif kind == "commit" and taken:
            buffer.commit(taken.pop(0))
            version += 1
            at = version - version % schedule.get("steps_per_publish", 1)
            buffer.set_versions(at, version)
        elif kind == "back" and len(taken) > 1:
            buffer.rollback(taken.pop())
        store.audit(buffer)
        # all of them, and in the same order as if they were found anew
        assert buffer.batches.waiting().candidates() == buffer.batches._look()
    assert batches > 3


def test_groups_that_landed_are_named_once():
    buffer = make_buffer(2, 1, max_staleness=3)
    buffer.admit([PROMPT] * 4)
    deliver(buffer, sample(2, 0), sample(0, 0))
    buffer.lost([1], 1)
    assert buffer.live.take_landed() == [2, 0, 1] and buffer.live.take_landed() == []
    buffer.take(0)
    buffer.commit(0)  # they had landed before
    assert buffer.live.take_landed() == []


def test_a_wrong_count_is_noticed():
    buffer = make_buffer(2, 1, max_staleness=3)
    buffer.admit([PROMPT] * 4)
    buffer.batches.waiting().remove(3)
    with pytest.raises(LedgerError, match="not the ones that were counted"):
        store.audit(buffer)
    buffer.live.waited_for -= 1
    with pytest.raises(LedgerError, match="3 groups in flight counted, not 4"):
        store.metrics(buffer)


def test_every_group_is_looked_at_within_a_round():
    buffer = make_buffer(2, 1, max_staleness=3)
    buffer.admit([PROMPT] * 4)
    deliver(buffer, *(sample(g, 0) for g in range(4)))
    for _ in range(4):
        store.audit(buffer, 1)
    seen = [buffer.live.next_audited(3), buffer.live.next_audited(3)]
    assert sorted(e.group_id for found in seen for e in found) == [0, 1, 2, 3]
    for wrong in range(4):
        entry = buffer.live.entries[wrong]
        entry.held += 1
        buffer.live.bytes += 1
        with pytest.raises(LedgerError, match=f"bytes counted of group {wrong}"):
            for _ in range(4):
                store.audit(buffer, 1)
        entry.held -= 1
        buffer.live.bytes -= 1
