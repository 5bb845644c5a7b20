"""The step bound in ranks of the learner."""

import bound_jobs as jobs
import pytest
from learner_helpers import make_groups, on_ranks, small_model

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def test_a_row_has_the_kl_of_an_answer_above_that_of_fresh_tokens(model):
    one, (left, right) = (on_ranks(n, jobs.stale_rows, model) for n in (1, 2))
    groups = make_groups(6)
    length = sum(g.tokens for g in groups) / sum(len(g.episodes) for g in groups)
    fresh, *stale = one[0]
    assert fresh["step_bound/answer_kl"] == 0
    assert fresh["step_bound/floor"] == pytest.approx(fresh["mismatch/kl_k3"], rel=1e-4)
    for row, steps in zip(stale, (1, 2)):
        above = row["mismatch/kl_k3"] - fresh["mismatch/kl_k3"]
        assert row["step_bound/answer_kl"] == pytest.approx(max(0.0, above) * length, rel=1e-3)
        assert row["step_bound/moved"] == pytest.approx(1e-3 * steps)
    assert stale[-1]["step_bound/answer_kl"] > 0
    for a, b in zip(left, right):
        own = {n: v for n, v in a.items() if n.startswith("step_bound/")}
        assert own == {n: v for n, v in b.items() if n in own} and len(own) >= 4
