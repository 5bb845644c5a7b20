"""Every admitted group leaves exactly once."""

import pytest
from buffer_helpers import Run, make_buffer
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.buffer import store
from rlcore.buffer.ledger import Ledger, LedgerError


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["consume", "evict", "fail"])), max_size=12
    )
)
def test_a_group_leaves_once_or_the_ledger_refuses(departures):
    ledger, gone = Ledger(), set()
    ids = [ledger.admit() for _ in range(5)]
    for group_id, verb in departures:
        argument = 3 if verb == "consume" else "reason"
        if group_id in gone or group_id not in ids:
            with pytest.raises(LedgerError, match=f"group {group_id} cannot leave"):
                getattr(ledger, verb)(group_id, argument)
        else:
            getattr(ledger, verb)(group_id, argument)
            gone.add(group_id)
        ledger.check()
    metrics = ledger.metrics()
    assert metrics["ledger/live"] == 5 - len(gone)
    assert (
        len(gone)
        == metrics["ledger/consumed"] + metrics["ledger/evicted"] + metrics["ledger/failed"]
    )


def test_sums_that_do_not_match_are_an_error():
    ledger = Ledger()
    ledger.admit()
    ledger.live.clear()
    with pytest.raises(LedgerError, match=r"1 admitted, but 0 consumed \+ 0 live"):
        ledger.check()
    with pytest.raises(LedgerError):
        Ledger.from_state(ledger.state())


def test_a_second_departure_names_the_first():
    ledger = Ledger()
    ledger.consume(ledger.admit(), step=4)
    with pytest.raises(LedgerError, match="consumed by step 4"):
        ledger.fail(0, "timeout")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3))
def test_accounts_of_a_whole_run_match_what_happened(seed, eta):
    buffer = make_buffer(2, 3, max_staleness=eta, dynamic_sampling=True)
    run = Run(buffer, seed, steps=8, bad_scores=0.3).play()
    m = store.metrics(buffer)
    left = {g: how for g, how in buffer.ledger.recent}
    assert {g for g, how in left.items() if how.startswith("consumed")} == {
        g for batch in run.batches for g in batch
    }
    assert (
        m["ledger/failed/too_few_samples"]
        == sum(how == "failed: too_few_samples" for how in left.values())
        > 0
    )
    assert (
        m["ledger/evicted/filtered_equal_rewards"]
        == sum("filtered" in how for how in left.values())
        > 0
    )
    assert m["ledger/admitted"] == len(left) + m["ledger/live"]
    assert m["ledger/live"] == m["buffer/groups"] + m["buffer/in_flight"]
