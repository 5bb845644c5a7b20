"""Ranks whose compute threads follow the load of the machine's cores."""

import numpy as np
import pytest
import thread_jobs as jobs
from learner_helpers import on_ranks, small_model


@pytest.mark.ranks
def test_threads_that_change_within_a_step_change_no_gradient(tmp_path):
    for name, found in on_ranks(1, jobs.threads_that_change, small_model(tmp_path / "m"))[
        0
    ].items():
        plain, row, gradients, its_row, threads = found
        assert set(threads) == {1, 3}, name
        assert plain.keys() == gradients.keys()
        apart, norm = (
            sum(float((g.astype(np.float64) ** 2).sum()) for g in tensors) ** 0.5
            for tensors in ([g - plain[n] for n, g in gradients.items()], plain.values())
        )
        limit = 1e-2 if name == "bfloat16" else 1e-5
        assert norm > 1e-3 and apart / norm < limit, name
        assert its_row == pytest.approx(row, rel=limit, abs=limit), name


@pytest.mark.ranks
def test_ranks_with_different_threads_keep_the_same_weights(tmp_path):
    """At ZeRO 0 each rank computes the norm that clips, and the step, by itself."""
    found = on_ranks(2, jobs.threads_of_each, small_model(tmp_path / "m"))
    assert [set(threads) for _, threads in found] == [{1, 4}, {1}]
    (first, _), (second, _) = found
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, second[name], err_msg=name)
