"""A critic on real DeepSpeed ranks: it learns, resumes exactly, and steps alike over ranks."""

import numpy as np
import pytest
from critic_jobs import critic_once
from learner_helpers import on_ranks, small_model

from rlcore.learner.specs import CriticSpec, LoraSpec
from rlcore.types import POLICY

pytestmark = pytest.mark.ranks

MODEL = CriticSpec(kind="model", lr=5e-4)
HEAD = CriticSpec(kind="value_head", lr=5e-4)
LORA = CriticSpec(kind="model", lr=5e-4, lora=LoraSpec(rank=2, targets=("q_proj", "up_proj")))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """Of one rank without ZeRO, by kind."""
    folder = tmp_path_factory.mktemp("alone")
    kinds = {"model": MODEL, "value_head": HEAD}
    return {
        kind: on_ranks(1, critic_once, model, 0, spec, str(folder / kind))[0]
        for kind, spec in kinds.items()
    }


@pytest.mark.parametrize("kind", ["model", "value_head"])
def test_a_critic_learns_its_targets_and_is_resumed_to_the_bit(alone, kind):
    out = alone[kind]
    rows = out["rows"]
    # the epochs have one batch each and the same targets
    assert rows[2]["loss/value"] < rows[0]["loss/value"]
    assert rows[3]["loss/value"] < rows[1]["loss/value"]
    assert rows[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)  # all values are 0
    assert rows[2]["critic/target_mean"] == rows[0]["critic/target_mean"]
    assert out["published"] == (POLICY,)
    assert out["again"] == out["rows"][3]
    for what in ("policy", "critic"):
        for name, weight in out[what].items():
            np.testing.assert_array_equal(weight, out[f"{what} again"][name], err_msg=name)
    moved = {
        n for n, w in out["critic"].items() if n in out["policy"] and (w != out["policy"][n]).any()
    }
    assert bool(moved) == (kind == "model")


@pytest.mark.parametrize(("stage", "spec"), [(2, MODEL), (1, HEAD)])
def test_two_ranks_take_the_steps_of_one(model, alone, tmp_path, stage, spec):
    _same_steps(model, alone, tmp_path, stage, spec)


@pytest.mark.slow  # the stages in between are ranks' and not the critic's
@pytest.mark.parametrize(
    ("stage", "spec"), [(0, MODEL), (1, MODEL), (3, MODEL), (0, HEAD), (2, HEAD)]
)
def test_every_stage_takes_the_steps_of_one_rank(model, alone, tmp_path, stage, spec):
    _same_steps(model, alone, tmp_path, stage, spec)


def _same_steps(model, alone, tmp_path, stage, spec):
    one, two = alone[spec.kind], on_ranks(2, critic_once, model, stage, spec, str(tmp_path))[0]
    for key in ("loss/value", "loss/policy", "critic/grad_norm", "grad_norm", "critic/target_mean"):
        expected = [row[key] for row in one["rows"]]
        assert [row[key] for row in two["rows"]] == pytest.approx(expected, rel=5e-3, abs=1e-5), key
    assert two["again"] == two["rows"][3]


@pytest.mark.slow  # adapters and their engine are tested with the policy
def test_adapters_learn_on_a_copy_that_is_frozen(model, tmp_path):
    out = on_ranks(1, critic_once, model, 0, LORA, str(tmp_path))[0]
    assert out["rows"][2]["loss/value"] < out["rows"][0]["loss/value"]
    assert out["again"] == out["rows"][3]
