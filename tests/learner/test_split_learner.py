"""Ranks that hold parts of the same sequences, layers or experts: the step is that of one
rank."""

import numpy as np
import pytest
import split_jobs as jobs
from learner_helpers import ALPHABET, on_ranks, small_model
from tiny_mixture import tiny_mixture

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With one key head, which two ranks have copies of."""
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """With layers that two ranks divide."""
    sizes = {"heads": 4, "kv_heads": 2, "intermediate_size": 64}
    return small_model(tmp_path_factory.mktemp("even"), **sizes)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two layers of four experts."""
    folder = tmp_path_factory.mktemp("mixture")
    tiny_mixture(folder, ALPHABET, seed=3)
    return str(folder)


def _difference(a, b):
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def _mean_difference(a, b):
    """The largest mean over a tensor. Adam divides rounding by small gradients: an element whose
    gradient is nearly 0 may go anywhere within its learning rate of 1e-3, a few in a thousand."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).mean()) for name in a)


def _check_same(one, ranks):
    for table in ranks:
        for name, (gradients, rows, moments, weights) in table.items():
            reference, expected, its_moments, after = one[name]
            largest = max(float(np.abs(g).max()) for g in reference.values())
            assert largest > 1e-3, name
            # parts are added in another order
            assert _difference(gradients, reference) < 1e-6, name
            assert _difference(moments, its_moments) < 1e-6, name
            if weights:  # the first rank publishes
                assert _mean_difference(weights, after) < 1e-5, name
            for row, its in zip(rows, expected):
                # padding is each share's own
                for key in its.keys() - {"train/positions"}:
                    assert row[key] == pytest.approx(its[key], rel=1e-4, abs=1e-6), (name, key)


USUAL = ["stage 3", "packed", "full kl"]


def test_two_ranks_with_parts_of_sequences_take_the_step_of_one(model):
    one = on_ranks(1, jobs.steps, model, {}, USUAL)[0]
    _check_same(one, on_ranks(2, jobs.steps, model, {"sequence_parallel": 2}, USUAL))


@pytest.mark.slow
def test_parts_of_sequences_beside_shares_of_a_batch_change_nothing(model):
    names = [name for name in jobs.VARIANTS if name not in jobs.ROUNDED]
    one = on_ranks(1, jobs.steps, model, {}, names)[0]
    for world in (2, 4):
        _check_same(one, on_ranks(world, jobs.steps, model, {"sequence_parallel": 2}, names))


def test_two_ranks_with_parts_of_layers_take_the_step_of_one(even):
    usual = ["stage 0", "stage 2"]
    one = on_ranks(1, jobs.steps, even, {}, usual)[0]
    _check_same(one, on_ranks(2, jobs.steps, even, {"tensor_parallel": 2}, usual))


@pytest.mark.slow
def test_parts_of_layers_beside_shares_of_a_batch_change_nothing(even):
    one = on_ranks(1, jobs.steps, even, {}, jobs.OF_LAYERS)[0]
    for world in (2, 4):
        _check_same(one, on_ranks(world, jobs.steps, even, {"tensor_parallel": 2}, jobs.OF_LAYERS))


def test_two_ranks_with_parts_of_experts_take_the_step_of_one(mixture):
    usual = ["stage 0", "clipped 2"]
    one = on_ranks(1, jobs.steps, mixture, {}, usual)[0]
    _check_same(one, on_ranks(2, jobs.steps, mixture, {"expert_parallel": 2}, usual))


@pytest.mark.slow
def test_parts_of_experts_beside_others_of_the_same_change_nothing(mixture):
    one = on_ranks(1, jobs.steps, mixture, {}, jobs.OF_EXPERTS)[0]
    for world, count in ((2, 2), (4, 2), (4, 4)):
        parts = {"expert_parallel": count}
        _check_same(one, on_ranks(world, jobs.steps, mixture, parts, jobs.OF_EXPERTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "key", "world"),
    [
        ("mixture", "expert_parallel", 2),
        ("model", "sequence_parallel", 2),
        ("model", "sequence_parallel", 4),
    ],
)
def test_parts_differ_by_rounding_in_bfloat16(request, folder, key, world):
    """Sums in another order differ by their last bit, and so do weights: a norm's, just below 1, by
    2^-8. The second step begins with them."""
    model = request.getfixturevalue(folder)
    one = on_ranks(1, jobs.steps, model, {}, jobs.ROUNDED)[0]
    found = on_ranks(world, jobs.steps, model, {key: 2}, jobs.ROUNDED)[0]
    for name in jobs.ROUNDED:
        for mine, its in zip((found[name][0], found[name][2]), (one[name][0], one[name][2])):
            for n in its:
                assert np.abs(mine[n] - its[n]).max() < 0.05 * np.abs(its[n]).max(), (name, n)
        assert _mean_difference(found[name][3], one[name][3]) < 3e-4, name
        assert found[name][1][0]["grad_norm"] == pytest.approx(one[name][1][0]["grad_norm"], 2e-3)


@pytest.mark.slow
def test_a_state_of_one_rank_opens_in_parts_of_experts(mixture, tmp_path):
    saved = on_ranks(1, jobs.save, mixture, str(tmp_path), {})[0]
    alone = on_ranks(1, jobs.load, mixture, str(tmp_path), {})[0]
    opened = on_ranks(2, jobs.load, mixture, str(tmp_path), {"expert_parallel": 2})[0]
    assert _difference(opened["weights"], saved["weights"]) == 0.0
    assert _difference(opened["after"], alone["after"]) < 1e-6


KEYS = ["tensor_parallel"]
KEYS += [
    pytest.param(key, marks=pytest.mark.slow) for key in ("sequence_parallel", "expert_parallel")
]


@pytest.mark.parametrize("key", KEYS)
def test_a_state_of_parts_opens_on_one_rank(even, mixture, tmp_path, key):
    even = mixture if key == "expert_parallel" else even
    saved = on_ranks(2, jobs.save, even, str(tmp_path), {key: 2})
    assert all(np.array_equal(saved[0]["scores"], rank["scores"]) for rank in saved)
    opened = on_ranks(1, jobs.load, even, str(tmp_path), {})[0]
    assert opened["steps"] == 2 and _difference(opened["weights"], saved[0]["weights"]) == 0.0
    np.testing.assert_allclose(opened["scores"], saved[0]["scores"], atol=2e-6)
    again = on_ranks(2, jobs.load, even, str(tmp_path), {key: 2})[0]
    assert _difference(again["after"], opened["after"]) < 1e-6
    assert _difference(opened["after"], opened["weights"]) > 1e-4
