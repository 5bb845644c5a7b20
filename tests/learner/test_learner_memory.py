"""What the memory table counts for a rank is what real ranks hold."""

import memory_jobs
import pytest

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_counted_for_a_rank_is_within_a_tenth_of_what_it_holds(world):
    found = memory_jobs.compared(world)
    assert len(found) == len(memory_jobs.CASES)
    for case, (counted, held) in found.items():
        assert held > 40 and abs(counted / held - 1) < 0.1, (case, counted, held)
