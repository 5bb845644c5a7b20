"""The step bound in ranks of the learner."""

import bound_jobs as jobs
import pytest
from learner_helpers import make_groups, on_ranks, small_model

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def untimed(row):
    """A row without what it took."""
    return {name: value for name, value in row.items() if not name.startswith("time/")}


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


def test_a_held_step_leaves_weights_and_moments_and_only_counts(model, tmp_path):
    """What follows is to the bit as if its batch had never been there, also after a load."""
    for found in on_ranks(2, jobs.held, model, str(tmp_path)):
        for stage, out in found.items():
            assert out["steps"] == 4, stage
            assert out["states"] and out["same"] == [True, True], stage
            assert out["rows"][0] == out["rows"][1] == out["rows"][2] > 0, stage


def test_a_resumed_learner_takes_the_same_steps(model, tmp_path):
    for out in on_ranks(2, jobs.resumed, model, str(tmp_path / "state")):
        scales = [row["step_bound/scale"] for row in out["rows"]]
        # the first is one of three in flight, of which nothing can be known yet
        assert scales[0] == pytest.approx(1 / 3) and min(scales) < 0.5 and max(scales[3:]) < 1.0
        for row, again in zip(out["rows"][3:], out["again"], strict=True):
            assert untimed(row) == untimed(again)
            assert row["lr"] == 2e-2 * row["step_bound/scale"]
        assert out["same"]
        assert all(row["correction/centre/tail_mass"] > 0.5 for row in out["rows"])
        assert "mismatch/drift" in out["rows"][-1]  # of sums that the state has, too
        assert untimed(out["replayed"][0]) == untimed(out["rows"][3])
        assert out["replayed"][0]["step_bound/scale"] < 1.0


def test_a_correction_and_the_bound_shorten_a_step_together(model):
    rows = on_ranks(1, jobs.composed, model)[0]
    assert min(row["correction/vcpo/step_scale"] for row in rows) < 0.99
    assert min(row["step_bound/scale"] for row in rows) < 0.5
    for row in rows:
        factors = row["correction/vcpo/step_scale"] * row["step_bound/scale"]
        assert row["lr"] == pytest.approx(2e-2 * factors)
        if row["step_bound/scale"] < 1:  # with the steps in flight, what all of them may be
            whole = (row["step_bound/bound"] / row["step_bound/kappa"]) ** 0.5
            assert row["lr"] + row["step_bound/moved"] <= max(
                whole * (1 + 1e-6), row["step_bound/moved"]
            )


@pytest.mark.parametrize(("lag", "lr"), [(0, 2e-2), (jobs.LAG, 1e-5)], ids=["fresh", "near"])
def test_where_it_does_not_act_a_run_is_equal_to_the_bit(model, lag, lr):
    """40 steps: on fresh samples at any rate, on late ones while they agree with the policy."""
    (rows, weights), (free, others) = on_ranks(1, jobs.unbounded, model, lag, lr)[0]
    assert [row["step_bound/scale"] for row in rows] == [1.0] * 40
    assert (max(row["step_bound/answer_kl"] for row in rows) > 0) == (lag > 0)
    assert [row["lr"] for row in rows] == [row["lr"] for row in free]
    assert jobs.same(weights, others)


def test_a_kind_of_actors_that_is_far_by_itself_has_a_floor(model):
    """Such actors shorten no step on fresh samples, and D of their late ones is about that of exact
    actors: what the steps did."""
    found = on_ranks(1, jobs.noisy, model)[0]
    for row in found[0]:
        assert row["step_bound/scale"] == 1.0 and row["step_bound/answer_kl"] == 0
        assert 0.02 < row["step_bound/floor@sparse"] < 0.1
        assert row["step_bound/floor@bf16"] < 1e-4
    late = found[jobs.LAG]
    assert min(row["step_bound/scale"] for row in late) < 0.9
    exact, far = (
        sum(row[f"step_bound/answer_kl@{kind}"] for row in late[jobs.LAG :])
        for kind in ("bf16", "sparse")
    )
    assert 0.5 * exact < far < 2 * exact
