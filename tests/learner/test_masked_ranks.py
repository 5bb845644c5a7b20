"""Masked-diffusion policies on real DeepSpeed ranks: identity, sharding, resume."""

import masked_jobs as jobs
import numpy as np
import pytest
from learner_helpers import on_ranks
from masked_models import drawn, masked_engine, masked_requests, sharp_folder

from rlcore.testing.records import make_group

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sharp_folder(tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def groups(model):
    done = drawn(masked_engine(model), masked_requests(12, temperature=0.8))
    for i, t in enumerate(done):
        t.group_id = i // 4
        t.sample_index = i % 4
    return [make_group(done[i : i + 4], [0.0, 1.0, 0.5, 0.0]) for i in (0, 4, 8)]


def test_two_sharded_ranks_have_the_gradient_of_one(model, groups):
    ((whole, row),) = on_ranks(1, jobs.first_gradient, model, groups, {})
    sharded = {"zero_stage": 3, "micro_batch_tokens": 40}
    for gradients, its_row in on_ranks(2, jobs.first_gradient, model, groups, sharded):
        for name, g in whole.items():
            np.testing.assert_allclose(gradients[name], g, atol=2e-6, rtol=1e-3)
        assert its_row["correction/weight_mean"] == pytest.approx(1.0, abs=2e-5)
    assert row["correction/weight_mean"] == pytest.approx(1.0, abs=2e-5)
    assert row["mismatch/abs_dlogp_max"] < 2e-5
    assert row["grad_norm"] > 0.01
    assert row["estimate/token_variance"] > 0 and row["estimate/sequence_variance"] > 0


@pytest.mark.slow  # adapters at ZeRO-3 are tested with a causal policy
def test_adapters_of_two_sharded_ranks_have_the_gradient_of_one(model, groups):
    lora = {"lora": {"rank": 2, "targets": ("q_proj", "up_proj")}}
    ((whole, _),) = on_ranks(1, jobs.first_gradient, model, groups, lora)
    assert whole and all("lora" in name for name in whole)
    for gradients, _ in on_ranks(2, jobs.first_gradient, model, groups, {"zero_stage": 3, **lora}):
        for name, g in whole.items():
            np.testing.assert_allclose(gradients[name], g, atol=2e-6, rtol=1e-3)


def test_a_resumed_learner_goes_on_exactly(model, groups, tmp_path):
    ((weights, row), (again, its_row)) = on_ranks(
        1, jobs.resumed_step, model, groups, str(tmp_path / "saved")
    )[0]
    assert row == its_row
    for name, w in weights.items():
        np.testing.assert_array_equal(w, again[name])
