"""Settings of rewards beside a task's own grader: what is accepted, and what is refused."""

import pytest

from rlcore.config.compose import load, to_yaml
from rlcore.errors import UserError

URL = "task.rewards.style.http.url=http://127.0.0.1:9/reward"
JUDGE = (
    "task.rewards.j={weight: 0.5, judge: {url: 'http://127.0.0.1:9/v1', model: m, rubric: 'a: b'}}"
)
KEY = "sk-live-0123456789"


def run(*words):
    return load(["run_dir=runs/x", *words])


def test_rewards_are_by_label_and_every_task_may_have_its_own():
    config = run(
        URL,
        "task.rewards.style.weight=-0.5",
        JUDGE,
        "task@evaluation.tasks.sums=arithmetic",
        "evaluation.tasks.sums.rewards.rm.classifier.path=models/rm",
    )
    assert [(label, r.kind) for label, r in config.task.rewards.items()] == [
        ("style", "http"),
        ("j", "judge"),
    ]
    assert config.task.rewards["style"].weight == -0.5 and config.task.grade_weight == 1.0
    classifier = config.evaluation.tasks["sums"].rewards["rm"].classifier
    assert classifier is not None and classifier.path.startswith("/")
    assert classifier.path.endswith("/models/rm")


def test_each_of_several_tasks_has_rewards_of_its_own():
    style = "task.digits.rewards.style={http: {url: 'http://127.0.0.1:9/'}}"
    config = run("task=[digits,arithmetic]", style, "task.arithmetic.grade_weight=2")
    assert list(config.tasks["digits"].rewards) == ["style"]
    assert config.tasks["arithmetic"].rewards == {} and config.tasks["arithmetic"].weighed
    with pytest.raises(UserError, match=r"task\.digits\.rewards\.style\.http\.deadline_s=900"):
        run("task=[digits,arithmetic]", style, "task.digits.rewards.style.http.deadline_s=900")


def test_only_the_name_of_a_key_is_in_the_configuration(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", KEY)
    text = to_yaml(run(URL, "task.rewards.style.http.api_key_env=REWARD_KEY"))
    assert "api_key_env: REWARD_KEY" in text and KEY not in text


@pytest.mark.parametrize(
    "word",
    [
        f"task.rewards.style.http.api_key_env={KEY}",
        "task.rewards.style.http.api_key_env=${oc.env:REWARD_KEY}",
        f"task.rewards.style.http.url=https://me:{KEY}@host/reward",
        f"task.rewards.style.http.url='https://host/reward?api_key={KEY}'",
    ],
)
def test_a_key_in_the_configuration_is_refused_and_not_repeated(word, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", KEY)
    with pytest.raises(UserError, match=r"api_key_env|credentials") as refused:
        run(URL, word)
    assert KEY not in str(refused.value)


REFUSED = [  # words; parts that the sentence must hold
    ([URL, "task.rewards.style.http.url=host"], ["style.http.url=host", "http://HOST:PORT"]),
    (["task.rewards.style.weight=2"], ["task.rewards.style has no kind", "style.classifier"]),
    ([URL, "task.rewards.style.classifier.path=x"], ["http and classifier", "one kind"]),
    (["task.grade_weight=null"], ["task.grade_weight=null", "leaves no reward"]),
    ([URL, "task.rewards.style.weight=0", "task.grade_weight=0"], ["leaves no reward"]),
    (["task.rewards.correct.http.url=http://h"], ["task.rewards.correct", "label"]),
    (["task.rewards.task.http.url=http://h"], ["task.rewards.task", "label"]),
    (["task.rewards.A-b.http.url=http://h"], ["task.rewards.A-b", "label"]),
    ([URL, "task.rewards.style.weight=inf"], ["task.rewards.style.weight", "finite"]),
    (
        [URL, "task.rewards.style.http.deadline_s=10"],
        ["request_timeout_s=30", "deadline_s=10", "lower the first"],
    ),
    (
        [URL, "task.rewards.style.http.deadline_s=900"],
        ["style.http.deadline_s=900", "evaluation.timeout_s=600"],
    ),
    (
        [URL, "task.rewards.style.http.deadline_s=500", "schedule.wait_data_timeout_s=400"],
        ["style.http.deadline_s=500", "schedule.wait_data_timeout_s=400"],
    ),
    (
        ["task.rewards.r={classifier: {path: m, timeout_s: 700}}"],
        ["task.rewards.r.classifier.timeout_s=700"],
    ),
    ([JUDGE, "task.rewards.j.judge.lowest=10"], ["judge.lowest=10", "judge.highest=10"]),
    (
        [URL, "task.rewards.style.http.api_key_env=K", "task.args.confinement=reduced"],
        ["task.args.confinement=reduced", "style.http.api_key_env", "confinement=full"],
    ),
    (
        [
            URL,
            "task.rewards.style.http.api_key_env=K",
            "environment=python_tool",
            "+environment.args.confinement=reduced",
        ],
        ["environment.args.confinement=reduced", "style.http.api_key_env"],
    ),
    (
        [
            URL,
            "task.rewards.style.http.api_key_env=K",
            "+evaluation.tasks.p={name: mbpp, args: {confinement: reduced}}",
        ],
        ["evaluation.tasks.p.args.confinement=reduced", "style.http.api_key_env"],
    ),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_makes_no_sense_is_refused_in_a_sentence(words, said):
    with pytest.raises(UserError) as refused:
        run(*words)
    assert all(part in str(refused.value) for part in said), str(refused.value)
