"""A teacher on real DeepSpeed ranks: the policy comes nearer, resumes exactly, over ranks alike."""

import numpy as np
import pytest
from learner_helpers import on_ranks, small_model
from lora_jobs import LORA
from teacher_jobs import taught_once

from rlcore.objectives.specs import TeacherSpec
from rlcore.types import POLICY

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """By name; the teacher of `whole` and `top k` has another width than the policy."""
    folder = small_model(tmp_path_factory.mktemp("teacher"), hidden=32)
    return {
        "whole": TeacherSpec(kind="frozen", path=folder, top_k=None),
        "top k": TeacherSpec(kind="frozen", path=folder, top_k=4),
        "previous": TeacherSpec(kind="previous", refresh_steps=1, context="best", top_k=4),
        "policy": TeacherSpec(kind="policy", context="best", top_k=4),
    }


@pytest.fixture(scope="module")
def alone(model, specs, tmp_path_factory):
    """Of one rank without ZeRO, by name of the specification."""
    found = {}

    def of(name):
        if name not in found:
            folder = str(tmp_path_factory.mktemp("alone"))
            found[name] = on_ranks(1, taught_once, model, 0, specs[name], folder)[0]
        return found[name]

    return of


@pytest.mark.parametrize("name", ["whole", "previous"])
def test_a_policy_is_resumed_to_the_bit(alone, name):
    _resumes(alone(name))


@pytest.mark.slow  # what differs from those above is tested on plain engines
@pytest.mark.parametrize("name", ["top k", "policy"])
def test_with_every_teacher_a_policy_is_resumed_to_the_bit(alone, name):
    _resumes(alone(name))


def test_a_policy_comes_nearer_to_a_frozen_teacher(alone):
    """The epochs have one batch each and the same targets."""
    rows = alone("whole")["rows"]
    assert rows[2]["loss/teacher"] < rows[0]["loss/teacher"]
    assert rows[3]["loss/teacher"] < rows[1]["loss/teacher"]


@pytest.mark.slow  # two runs of which one serves no other quick test
def test_the_previous_policy_is_the_policy_where_it_is_refreshed_every_step(alone):
    assert alone("previous")["rows"] == alone("policy")["rows"]


@pytest.mark.slow  # adapters are the engine's; kind=previous alone reads them merged
def test_with_adapters_the_previous_policy_is_the_policy_to_rounding(model, specs, tmp_path):
    found = {
        name: on_ranks(1, taught_once, model, 0, specs[name], str(tmp_path / name), LORA)[0]
        for name in ("previous", "policy")
    }
    for out in found.values():
        _resumes(out)
    losses = [[row["loss/teacher"] for row in out["rows"]] for out in found.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and min(losses[0]) > 0


def _resumes(out):
    assert out["published"] == (POLICY,)
    assert out["again"] == out["rows"][3]
    for name, weight in out["policy"].items():
        np.testing.assert_array_equal(weight, out["policy again"][name], err_msg=name)


@pytest.mark.parametrize(("stage", "name"), [(3, "whole"), (2, "previous")])
def test_two_ranks_take_the_steps_of_one(model, specs, alone, tmp_path, stage, name):
    _same_steps(model, specs, alone, tmp_path, stage, name)


@pytest.mark.slow  # the stages in between are ranks' and not the teacher's
@pytest.mark.parametrize(
    ("stage", "name"), [(0, "whole"), (1, "top k"), (3, "top k"), (3, "policy"), (1, "previous")]
)
def test_every_stage_takes_the_steps_of_one_rank(model, specs, alone, tmp_path, stage, name):
    _same_steps(model, specs, alone, tmp_path, stage, name)


def _same_steps(model, specs, alone, tmp_path, stage, name):
    one, two = alone(name), on_ranks(2, taught_once, model, stage, specs[name], str(tmp_path))[0]
    for key in ("loss/teacher", "grad_norm", "teacher/divergence", "teacher/token_share"):
        expected = [row[key] for row in one["rows"]]
        assert [row[key] for row in two["rows"]] == pytest.approx(expected, rel=5e-3, abs=1e-5), key
    assert two["again"] == two["rows"][3]
