"""The audit after a fault compares the buffer's ledger with the learner's own log."""

import json

import pytest

from benchmarks.faults.job import recount, trained_on


def record(tmp_path, *lines):
    path = tmp_path / "trained.jsonl"
    path.write_text(
        "".join(json.dumps({"step": s, "rank": r, "groups": g}) + "\n" for s, r, g in lines)
    )
    return path


def ledger(consumed, live=(), admitted=None):
    recent = [[g, f"consumed by step {g // 2}"] for g in consumed]
    named = len(consumed) + len(live) if admitted is None else admitted
    return {
        "admitted": named,
        "consumed": len(consumed),
        "recent": recent,
        "live": list(live),
        "evicted": {},
        "failed": {},
    }


def test_a_recovery_replaces_the_steps_after_its_checkpoint(tmp_path):
    lines = (0, 0, [0]), (0, 1, [1]), (1, 0, [2]), (1, 1, [3]), (2, 0, [4])  # rank 1 dies in step 2
    again = (1, 0, [3]), (1, 1, [2]), (2, 1, [5]), (2, 0, [4])
    assert sorted(trained_on(record(tmp_path, *lines, *again), 3)) == [0, 1, 2, 3, 4, 5]
    assert sorted(trained_on(record(tmp_path, *lines, *again), 2)) == [0, 1, 2, 3]


def test_a_step_without_a_record_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match=r"without a record: \[1\]"):
        trained_on(record(tmp_path, (0, 0, [0]), (2, 0, [2])), 3)


@pytest.mark.parametrize(
    "trained, lost, twice",
    [
        ([0, 1, 2, 3], 0, 0),
        # the ledger is consistent, but the learner trained on one group twice and never on another
        ([0, 1, 2, 2], 1, 1),
        ([0, 1, 2, 3, 0], 0, 1),
        ([0, 1, 2, 3, 4], 0, 1),  # trained on, and would be assigned again
    ],
)
def test_what_the_learner_was_given_counts(trained, lost, twice):
    found = recount(ledger([0, 1, 2, 3], live=[4, 5]), trained, 1.0)
    assert (found.lost, found.twice) == (lost, twice)
