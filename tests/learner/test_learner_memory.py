"""What is counted for a rank is what real ranks hold; ranks decide by it together."""

import memory_jobs
import pytest
from learner_helpers import on_ranks, small_model

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_counted_for_a_rank_is_within_a_tenth_of_what_it_holds(world):
    found = memory_jobs.compared(world)
    assert len(found) == len(memory_jobs.CASES)
    for case, (counted, held) in found.items():
        assert held > 40 and abs(counted / held - 1) < 0.1, (case, counted, held)


def test_ranks_keep_passes_only_where_they_fit_on_all_of_them(tmp_path):
    found = on_ranks(2, memory_jobs.unequal_shares, small_model(tmp_path))
    count = found[0][0]
    # the first step finds out with its first micro-batch, the second one knows
    assert count > 1 and found == [[count, 2 * count + 1, 2 * count]] * 2
