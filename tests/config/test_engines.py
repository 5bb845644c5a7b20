"""Engines of a user's own: what they do not read is refused or named, and nothing is claimed."""

import os
from typing import get_args

import pytest

from rlcore.config.checks import check
from rlcore.config.compose import load
from rlcore.config.groups import groups
from rlcore.config.resuming import check_resume
from rlcore.config.unread import unread
from rlcore.errors import UserError
from rlcore.learner import specs as learner
from rlcore.registry import load_object
from rlcore.rollout import specs as rollout
from rlcore.types import ActorKind

OWN = """
from rlcore.engine_facts import EngineFacts
from rlcore.interfaces import RolloutEngine
from rlcore.learner.protocols import TrainEngine
from rlcore.spec import Fixed, Spec, Unread, refuse, setting


def _no(*args, **kwargs):
    raise NotImplementedError


class Reads(EngineFacts):
    reads = frozenset({"zero_stage", "tensor_parallel", "kind", "rounding"})


class Own(Spec):
    fixed = {"stages": Fixed.WEIGHTS}
    unread = (Unread(("cache",), lambda spec: spec.stages == 1, "stages=1 keeps nothing"),)
    stages: int = setting(1, "parts of the model, one after the other", gt=0)
    cache: str | None = setting(None, "folder", names="path")

    def check(self, key):
        refuse(self.stages > 4, f"{key}.stages={self.stages} is above 4: use 4 or less.")


class Declares(EngineFacts):
    settings = Own


Train = type("Train", (TrainEngine,), dict.fromkeys(TrainEngine.__abstractmethods__, _no))
TrainParts = type("TrainParts", (Train,), {"facts": Reads})
TrainOwn = type("TrainOwn", (Train,), {"facts": Declares})
Sample = type("Sample", (RolloutEngine,), dict.fromkeys(RolloutEngine.__abstractmethods__, _no))
SampleOwn = type("SampleOwn", (Sample,), {"facts": Declares})
SampleLow = type("SampleLow", (Sample,), {"facts": Reads})
"""


@pytest.fixture
def begun(tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def made(*words):  # words given later win
        own = [w.replace("own:", f"{tmp_path}/own.py:") for w in words]
        return load(
            [f"run_dir={tmp_path}/r", "experiment=quickstart", "learner.step_bound=null", *own]
        )

    return made


def test_every_shipped_engine_has_facts_and_every_engines_setting_a_reader():
    for specs, section in ((learner, learner.LearnerSpec), (rollout, rollout.ActorSpec)):
        assert {*specs.ENGINE_FACTS} == {*specs.ENGINES}, {*specs.ENGINES} ^ {*specs.ENGINE_FACTS}
        read = {name for where in specs.ENGINE_FACTS.values() for name in load_object(where).reads}
        assert read == {*section.engine_settings}, read ^ {*section.engine_settings}
        assert read <= {*section.model_fields}


def test_every_kind_of_actor_is_reported_and_has_an_option():
    kinds = {*get_args(rollout.ActorSpec.model_fields["kind"].annotation)}
    assert kinds <= {*get_args(ActorKind)}, kinds - {*get_args(ActorKind)}
    assert kinds == {*groups()["actor"]}, kinds ^ {*groups()["actor"]}


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        (
            ["learner.engine=own:Train", "learner.ranks=2", "learner.tensor_parallel=2"],
            "learner.tensor_parallel=2",
            ["learner.engine=own:TrainParts", "learner.ranks=2", "learner.tensor_parallel=2"],
        ),
        (
            ["learner.engine=own:TrainParts", "learner.ranks=2", "learner.expert_parallel=2"],
            "learner.expert_parallel=2",
            ["learner.engine=own:TrainParts", "learner.ranks=2"],
        ),
        (
            ["actor=fp8", "actor.fp8.engine=own:Sample"],
            "actor.fp8.kind=fp8",
            ["actor=fp8", "actor.fp8.engine=own:SampleLow"],
        ),
        (
            ["actor.bf16.engine=own:SampleLow", "actor.bf16.logit_noise=0.1"],
            "actor.bf16.logit_noise=0.1",
            ["actor.bf16.engine=own:SampleLow"],
        ),
    ],
)
def test_what_an_engine_would_ignore_is_refused_or_read(begun, words, key, remedy):
    with pytest.raises(UserError) as refused:
        begun(*words)
    assert str(refused.value).startswith(f"{key} is not read by "), refused.value
    check(begun(*remedy))


OWN_SECTIONS = [
    ("learner.engine=own:TrainOwn", "learner.engine_args"),
    ("actor.bf16.engine=own:SampleOwn", "actor.bf16.engine_args"),
]


@pytest.mark.parametrize(("engine", "key"), OWN_SECTIONS)
def test_an_engine_declares_its_own_settings(begun, engine, key):
    for wrong, said in (
        ("stages=two", "valid integer; it has stages, cache."),
        ("stages=0", "greater than 0; it has stages, cache."),
        ("depth=2", "not a setting of it; it has stages, cache."),
    ):
        with pytest.raises(UserError, match=said) as refused:
            begun(engine, f"{key}.{wrong}")
        assert str(refused.value).startswith(f"{key}.{wrong.partition('=')[0]} is not accepted by ")
    with pytest.raises(UserError, match=r"stages=5 is above 4"):
        begun(engine, f"{key}.stages=5")
    config = begun(engine, f"{key}.stages=2", f"{key}.cache=kept")
    section = config.learner if key.startswith("learner") else config.actor["bf16"]
    assert section.engine_args == {"stages": 2, "cache": os.path.abspath("kept")}
    assert section.own_sections(key)["engine_args"].stages == 2
    said = unread(begun(engine, f"{key}.cache=kept"))
    assert any(f"{key}.cache=" in s and "stages=1 keeps nothing" in s for s in said), said
    check_resume(config, begun(engine, f"{key}.stages=2"))  # cache may change
    with pytest.raises(UserError, match=rf"{key}\.stages=3 cannot be resumed with"):
        check_resume(config, begun(engine, f"{key}.stages=3"))


@pytest.mark.parametrize(("section", "name"), [("learner", "deepspeed"), ("actor.bf16", "vllm")])
def test_settings_of_an_engine_without_any_are_refused(begun, section, name):
    with pytest.raises(UserError) as refused:
        begun(f"{section}.engine_args.stages=2")
    said = f'{section}.engine_args={{"stages": 2}} is not read by {section}.engine={name}, '
    assert str(refused.value).startswith(said)


def test_what_changes_no_result_is_named_as_not_read(begun):
    said = unread(begun("learner.engine=own:Train", "learner.ranks=2", "learner.zero_stage=3"))
    assert any(
        s.startswith("learner.zero_stage=3 is not read, since learner.engine=") for s in said
    )
    said = unread(begun("learner.engine=own:TrainParts", "learner.zero_stage=3"))
    assert not any("zero_stage" in sentence for sentence in said)
    said = unread(begun("actor.bf16.engine=own:Sample", "actor.bf16.max_num_seqs=8"))
    assert any(s.startswith("actor.bf16.max_num_seqs=8 is not read") for s in said)


def test_rules_of_deepspeed_are_not_another_engines(begun):
    half = ["learner.dtype=bfloat16", "learner.zero_stage=0"]
    with pytest.raises(UserError, match="would accumulate gradients in bfloat16"):
        begun(*half)
    begun(*half, "learner.engine=own:Train")


@pytest.mark.parametrize("word", ["bitwise=true", "schedule.colocated=true"])
def test_what_an_engine_does_not_provide_is_refused(begun, word):
    words = ["actor.bf16.engine=own:SampleLow", "schedule=on_policy", word]
    with pytest.raises(UserError, match=r"engine="):
        begun(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learner.step_bound=0.5"], "learner.step_bound=0.5 needs rate and hold of a training"),
        (["critic=value_head", "algorithm.advantage=gae"], "critic.kind=value_head needs outputs"),
    ],
)
def test_a_training_engine_without_an_optional_method_is_refused_before_a_start(begun, words, said):
    with pytest.raises(UserError) as refused:
        begun("learner.engine=own:Train", *words)
    assert str(refused.value).startswith(said), refused.value
    begun(*words)


def test_an_engine_that_cannot_be_loaded_is_named_with_its_key(begun):
    with pytest.raises(UserError, match=r"^actor\.bf16\.engine=\S+:None cannot|^actor\.bf16"):
        begun("actor.bf16.engine=own:Absent")
