"""Words of the command line whose values are texts, and interpolations."""

import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError

BASE = ("run_dir=r", "experiment=quickstart")
TEXTS = (
    "x=1 means one",
    'He said "yes"',
    "it's fine",
    "\u7528\u4e2d\u6587\u56de\u7b54\uff1a\u6700\u540e\u3002",
    "Think in <think></think>, please: then answer!",
    "Use \\boxed{}",
    "(yes/no) #1 & more; 100%",
    "{x}",
    "[1,2]",
    "5",
    "true",
    "a, b",
    "first\nsecond",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_taken_as_it_stands(text):
    assert load([*BASE, f"model.system_prompt={text}"]).model.system_prompt == text


@pytest.mark.parametrize("word", ["'x=1'", '"x=1"'])
def test_quotes_around_a_whole_text_are_the_grammars(word):
    assert load([*BASE, f"model.system_prompt={word}"]).model.system_prompt == "x=1"


@pytest.mark.parametrize("text", ["2", "010", "1e3", "24:00:00", "true"])
def test_an_option_of_sbatch_is_taken_as_it_stands(text):
    loaded = load([*BASE, "cluster=slurm", f"+cluster.launch.sbatch.nice={text}"])
    assert loaded.cluster.launch.sbatch == {"nice": text}


def test_null_and_other_types_stay_what_they_are():
    assert load([*BASE, "model.system_prompt=null"]).model.system_prompt is None
    assert load([*BASE, "task.args.instruction=y=2"]).task.args["instruction"] == "y=2"
    for word, said in (
        ("learner.lr=1=2", "learner.lr=1=2 is not accepted"),
        ("rollout.stop=[a=b]", "cannot be read"),
        ("learner.lr=1e-4,1e-3", "asks for several runs"),
    ):
        with pytest.raises(UserError, match=said):
            load([*BASE, word])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learner.lr", "1e-4", 1e-4),
        ("schedule.steps", "7", 7),
        ("evaluation.at_start", "false", False),
        ("evaluation.at_start", "True", True),
        ("learner.betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("model.system_prompt", "1e-4", "1e-4"),
    ],
)
def test_a_value_from_the_environment_has_the_type_of_its_key(monkeypatch, key, text, value):
    monkeypatch.setenv("RLCORE_TRIED", text)
    found = load([*BASE, f"{key}=${{oc.env:RLCORE_TRIED}}"])
    section, name = key.split(".")
    assert getattr(getattr(found, section), name) == value
    with pytest.raises(UserError, match=r"learner\.lr=soon is not accepted"):
        monkeypatch.setenv("RLCORE_TRIED", "soon")
        load([*BASE, "learner.lr=${oc.env:RLCORE_TRIED}"])


def test_a_key_at_its_default_can_be_named():
    plain = load(BASE)
    found = load([*BASE, "evaluation.samples=${rollout.samples_per_prompt}"])
    assert found.evaluation.samples == plain.rollout.samples_per_prompt
    own = load(
        [*BASE, "rollout.samples_per_prompt=6", "evaluation.samples=${rollout.samples_per_prompt}"]
    )
    assert own.evaluation.samples == 6
    actor = load([*BASE, "learner.num_cpus=${actor.bf16.num_cpus}"])
    assert actor.learner.num_cpus == plain.actor["bf16"].num_cpus
    with pytest.raises(UserError, match=r"'rollout\.nope' not found"):
        load([*BASE, "evaluation.samples=${rollout.nope}"])
