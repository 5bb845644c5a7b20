"""Back-pressure by bytes: what is admitted before and after the size of a group is known."""

import random
from itertools import count

from buffer_helpers import PROMPT, deliver, fill, make_buffer, sample
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlcore.buffer.admission import MIB, ByteLimit

LONGEST = 40  # tokens of a sample by its limits


def size(tokens):
    """Bytes of a sample's record."""
    return len(sample(1000, 1, tokens=tokens)[0])


def limited(total, groups_per_step=1, samples=1, **schedule):
    limit = ByteLimit(total, sample=size(LONGEST))
    return make_buffer(groups_per_step, samples, limit=limit, **schedule)


def test_before_a_size_is_known_as_much_is_admitted_as_would_fit_at_full_length():
    buffer = limited(5 * size(LONGEST), max_staleness=9)
    assert buffer.room() == 5  # by staleness it would be 10
    buffer.admit([PROMPT] * 3)
    assert buffer.room() == 2
    fill(buffer, [0], 1)  # of 2 tokens
    assert buffer.room() == 7


def test_a_sample_is_expected_to_take_a_mebibyte_at_least():
    """An engine may add to records what no limit on tokens says."""
    assert ByteLimit(72 * MIB).sample == MIB
    buffer = make_buffer(8, 4, max_bytes=72 * MIB, max_staleness=4)
    assert len(buffer.admit([PROMPT] * 99)) == 18


def test_a_phase_is_admitted_whole_however_large_its_samples_may_be():
    buffer = limited(5, groups_per_step=3, max_staleness=9)
    assert buffer.room() == 3


def test_a_group_in_flight_is_expected_to_take_all_of_its_samples():
    """Selection drops some of them, but only when the last has arrived."""
    one = size(2)
    buffer = make_buffer(1, 4, max_bytes=12 * one, max_staleness=9, train_on_best=1)
    fill(buffer, buffer.admit([PROMPT]), 4)
    assert buffer.live.bytes < 2 * one
    assert buffer.room() == 2


def test_groups_that_are_filtered_tell_how_large_others_are():
    buffer = make_buffer(1, 2, max_bytes=6 * size(2), max_staleness=9, dynamic_sampling=True)
    fill(buffer, buffer.admit([PROMPT]), 2, rewards=[1.0, 1.0])
    assert buffer.live.bytes == 0 and buffer.room() == 3


def test_beside_a_batch_that_is_trained_on_only_what_fits_is_admitted():
    buffer = limited(3 * size(2), groups_per_step=2, max_staleness=9)
    fill(buffer, buffer.admit([PROMPT] * 2), 1)
    buffer.take(0)
    assert len(buffer.admit([PROMPT] * 9)) == 1
    buffer.commit(0)
    assert len(buffer.admit([PROMPT] * 9)) == 2


@given(
    seed=st.integers(0, 2**32),
    schedule=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)),
    phases_of_room=st.floats(1.0, 3.0),
    tokens=st.integers(1, LONGEST) | st.none(),
)
@example(seed=0, schedule=(3, 1, 4), phases_of_room=1.3, tokens=LONGEST)
@example(seed=2422819684, schedule=(2, 1, 2), phases_of_room=1.0, tokens=7)  # ids of two digits
@settings(max_examples=60, deadline=None)
def test_bytes_stay_within_the_limit_and_every_step_gets_its_batch(
    seed, schedule, phases_of_room, tokens
):
    """Groups of one size never exceed the limit (records differ by digits of their ids), and those
    of any size do not before the first is whole. `tokens`: None: of any length."""
    rng = random.Random(seed)
    groups, phase, staleness = schedule
    total = int(phases_of_room * groups * phase * 2 * size(LONGEST))
    buffer = limited(
        total, groups, 2, steps_per_phase=phase, max_staleness=staleness, steps_per_publish=phase
    )
    flying, trained, taken, known = [], 0, 0, False
    for turn in count():
        ids = buffer.admit([PROMPT] * 99)
        flying += [(group_id, index) for group_id in ids for index in (0, 1)]
        if flying:
            at = rng.randrange(len(flying))
            group_id, index = flying.pop(at)
            length = tokens or rng.randint(1, LONGEST)
            version = buffer.live.entries[group_id].admitted_version
            deliver(buffer, sample(group_id, index, version=version, tokens=length))
        if tokens or not known:
            assert buffer.live.bytes <= total + 2 * 8 * len(buffer.live.entries)
        known = buffer.live.arrived_bytes[0] > 0
        if taken < trained + 2 * phase and buffer.ready(taken):
            buffer.take(taken)
            taken += 1
        elif trained < taken and rng.random() < 0.3:
            buffer.commit(trained)
            trained += 1
            buffer.set_versions(trained - trained % phase, trained)
        if trained == 8:
            return
        assert turn < 2000, "the run stands still"
