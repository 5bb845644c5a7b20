"""What a teacher is combined with, what is refused, and that every option is read."""

import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError

SELF = ["algorithm=distill", "teacher=policy"]
MODEL = ["algorithm=distill", "teacher=frozen", "teacher.path=folder"]
ENGINE = ["algorithm=distill", "teacher=engine", "teacher.path=folder"]
DRAFT = ["algorithm=distill", "teacher=engine", "actor=[bf16,draft]", "actor.draft.draft_path=d"]
TURNS = ["schedule=on_policy", "schedule.colocated=true", "cluster.transport=object_store"]
SAMPLED = "teacher.tail=sampled"
REFUSED = [  # words; parts that the sentence must hold
    (["algorithm=distill"], ["algorithm.reward_weight=0", "teacher=frozen"]),
    (["teacher=frozen"], ["teacher.kind=frozen", "teacher.context=none", "algorithm.kl_coef"]),
    (["teacher=policy", "teacher.context=none"], ["teacher.kind=policy", "led to itself"]),
    (["teacher=policy", "teacher.path=folder"], ["teacher.path", "teacher.kind=policy"]),
    ([*MODEL, "teacher.paths={digits: a}"], ["teacher.path=folder", "teacher.paths"]),
    (["teacher=frozen", "teacher.paths={maths: a}"], ["maths", "digits"]),
    ([*SELF, "teacher.top_k=null"], ["teacher.top_k=null", "teacher.context"]),
    (
        ["teacher=frozen", "teacher.paths={digits: a}", "teacher.top_k=null"],
        ["teacher.top_k=null", "teacher.paths"],
    ),
    ([*MODEL, SAMPLED, "teacher.divergence=js"], [SAMPLED, "teacher.divergence=js"]),
    ([*MODEL, "teacher.top_k=0"], ["teacher.top_k=0", SAMPLED]),
    ([*MODEL, SAMPLED, "rollout.top_p=0.9"], [SAMPLED, "rollout.top_p"]),
    ([*MODEL, SAMPLED, "correction=[dvp]"], [SAMPLED, "correction=dvp"]),
    ([*SELF, "rollout.samples_per_prompt=1"], ["context=best", "samples_per_prompt=1"]),
    ([*SELF, "teacher.context=feedback"], ["context=feedback", "digits", "attempts"]),
    (
        [*MODEL, "algorithm.kl_coef=0.1", "algorithm.kl_estimator=full"],
        ["kl_estimator=full", "teacher.kind=frozen"],
    ),
    ([*MODEL, "learner.ranks=2", "learner.sequence_parallel=2"], ["learner.sequence_parallel=2"]),
    ([*MODEL, "learner.ranks=2", "learner.tensor_parallel=2"], ["learner.tensor_parallel=2"]),
    ([*MODEL, "actor=sparse", "learner.train_sparse=true"], ["learner.train_sparse=true"]),
    ([*MODEL, "actor=sparse", "learner.distill={}"], ["teacher.kind=frozen", "learner.distill"]),
    (
        ["algorithm=ppo", "critic=model", "teacher=frozen", "teacher.path=folder"],
        ["critic.kind=model", "teacher=none"],
    ),
    (
        [*MODEL, "actor.bf16.rounding=int3", "learner.round_as=bf16"],
        ["teacher.kind=frozen", "learner.round_as=bf16"],
    ),
    (["teacher=engine"], ["teacher.kind=engine", "teacher.path"]),
    ([*ENGINE, "teacher.actor=bf16"], ["teacher.kind=engine", "either teacher.path"]),
    ([*DRAFT, "teacher.actor=bf16"], ["teacher.actor=bf16", "has draft", "teacher=policy"]),
    ([*ENGINE[:2], "teacher.actor=other"], ["teacher.actor=other", "has none"]),
    ([*MODEL, "teacher.actor=draft"], ["teacher.actor", "teacher.kind=frozen"]),
    ([*ENGINE, "teacher.context=best"], ["context=best", "teacher.kind=engine"]),
    ([*ENGINE, "teacher.top_k=null"], ["top_k=null", "teacher.kind=engine"]),
    ([*ENGINE, "rollout.temperature=0.7"], ["rollout.temperature=0.7", "teacher=frozen"]),
    ([*ENGINE, *TURNS], ["schedule.colocated=true", "teacher.kind=engine"]),
    (
        [*ENGINE, "teacher.engine.timeout_s=600"],
        ["teacher.engine.timeout_s=600", "rollout.request_timeout_s=600"],
    ),
    ([*ENGINE, "teacher.engine.tensor_parallel=2"], ["teacher.engine.tensor_parallel=2"]),
    ([*MODEL, "teacher.engine.count=2"], ["teacher.engine", "teacher.kind=frozen"]),
    (["teacher=previous", "learner.zero_stage=3"], ["kind=previous", "learner.zero_stage=3"]),
]


def _load(words):
    return load(["run_dir=/tmp/x", *words])


@pytest.mark.parametrize(("words", "parts"), REFUSED, ids=lambda v: " ".join(map(str, v))[:60])
def test_what_does_not_fit_a_teacher_is_refused_in_a_sentence(words, parts) -> None:
    with pytest.raises(UserError) as refused:
        _load(words)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        SELF,
        [*MODEL, "rollout.samples_per_prompt=1", "teacher.top_k=null"],
        [*MODEL, SAMPLED, "teacher.top_k=0", "correction=[mis]"],
        ["algorithm=grpo", "teacher=previous", "teacher.weight=0.1", "algorithm.kl_coef=0.01"],
        [*SELF, "environment=attempts", "task=arithmetic", "teacher.context=feedback"],
        [*ENGINE, "teacher.engine.count=2", SAMPLED, "correction=[tis]"],
        [*DRAFT, "teacher.actor=draft"],
        [*MODEL, "learner=lora", "learner.zero_stage=3"],
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_combinations_that_are_accepted(words) -> None:
    assert _load(words).teacher.used


def test_the_folder_of_a_draft_that_teaches_is_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _load([*DRAFT, "teacher.actor=draft"]).teacher_folder == str(tmp_path / "d")
    assert _load(ENGINE).teacher_folder == str(tmp_path / "folder")


def test_the_folders_of_teachers_are_absolute(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _load(MODEL).teacher.path == str(tmp_path / "folder")
    paths = _load(["teacher=frozen", "teacher.paths={digits: here}"]).teacher.paths
    assert paths == {"digits": str(tmp_path / "here")}
