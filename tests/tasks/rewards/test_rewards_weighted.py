"""Weighted sums of rewards: parts, failures, faults of one reward among several."""

import itertools
import json
import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import deadline

from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.tasks import make_task
from rlcore.tasks.graders import make_scorer
from rlcore.tasks.rewards.protocols import Reward, RewardVerdict
from rlcore.tasks.rewards.weighted import WeightedScorer, total
from rlcore.tasks.scoring import Scorer
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.testing.records import make_answer
from rlcore.testing.reward_server import HttpReply, RewardServer, judgement, rewards

QUICK = {"retry_wait_s": 0.01, "retries": 0}


def task(name="digits", **fields):
    return EvalTaskSpec.model_validate({"name": name, **fields})


def http(server, weight=1.0, **settings):
    return {"weight": weight, "http": {"url": server.url, **QUICK, **settings}}


def answers(texts, label="digits"):
    ids = [f"{label}/train/{i}" for i in range(len(texts))]
    return [make_answer(i, 0, text, prompt_id=ids[i]) for i, text in enumerate(texts)]


def right(count):
    digits = make_task("digits", {})
    return [digits.item("train", i).answer for i in range(count)]


def scores(tasks, submitted, notes=None):
    """Their scores, in the order of their groups, after closing the scorer."""
    found = []
    note = (notes if notes is not None else []).append
    scorer = make_scorer(tasks, GradingSpec(), on_scored=found.extend, note=note)
    try:
        scorer.submit(submitted)
        scorer.drain(90)
    finally:
        scorer.close()
    by_group = {s.group_id: s for _, s in found}
    assert len(found) == len(submitted) == len(by_group) and scorer.unfinished == 0
    statuses = [s.status for s in by_group.values()]
    counts = [statuses.count(status) for status in ("ok", "error", "timeout")]
    assert [scorer.scored, scorer.errors, scorer.timeouts] == counts
    return [by_group[i] for i in range(len(submitted))]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMED = st.dictionaries(st.sampled_from(["rewards", "scores", "extra_logs", "choices"]), JSON)
DEEP = b"[" * 100_000
ODD_REPLIES = [
    DEEP,
    b'{"rewards": [1' + b"0" * 400 + b"]}",
    b'{"rewards": [1' + b"0" * 5000 + b"]}",
    b'{"rewards": [1e308]}',
    b'{"rewards": [NaN]}',
    b'{"rewards": [1], "extra_logs": {"a": ' + DEEP + b"}}",
    b'{"rewards": [1], "extra_logs": {"a": [' + b"[" * 900 + b"]" * 900 + b"]}}",
    b'{"rewards": [1], "extra_logs": {"a": [1' + b"0" * 400 + b"]}}",
    b'{"rewards": [1], "scores": {"a": 1}}',
    b'{"rewards": [1], "scores": [1e308]}',
    b'{"choices": [{"message": {"content": "Score: 1' + b"0" * 400 + b'"}}]}',
    b'{"choices": [[]]}',
    b"\xff\xfe",
    b"",
]


@pytest.mark.parametrize("kind", ["http", "judge"])
def test_whatever_a_service_answers_each_sample_has_one_score_and_scoring_goes_on(kind):
    said = [b""]
    found = []
    with RewardServer(lambda body, number: HttpReply(body=said[0])) as server:
        own = {"url": server.url, "breaker_failures": 10**6, **QUICK}
        own |= {"model": "m", "rubric": "r"} if kind == "judge" else {}
        spec = task(grade_weight=None, rewards={"r": {"weight": 10.0, kind: own}})
        scorer = make_scorer({"digits": spec}, GradingSpec(), on_scored=found.extend, note=print)

        def score_of(body, number):
            said[0], before = body, len(found)
            answer = make_answer(number, 0, "x", prompt_id="digits/train/0")
            scorer.submit([answer])
            scorer.drain(deadline(60))
            ((asked, score),) = found[before:]
            assert (asked.group_id, asked.draw_id) == (score.group_id, score.draw_id)
            assert score.group_id == number and score == score.checked()
            return score

        numbers = itertools.count()

        @settings(max_examples=60, deadline=None)
        @given(st.sampled_from(ODD_REPLIES) | st.binary(max_size=40) | (NAMED | JSON).map(encoded))
        def check(body):
            score_of(body, next(numbers))

        try:
            for body in ODD_REPLIES:
                score_of(body, next(numbers))
            check()
            good = b'{"rewards": [0.5], "choices": [{"message": {"content": "Score: 5"}}]}'
            assert score_of(good, next(numbers)).reward == 5.0  # it is still in order
        finally:
            scorer.close()


def encoded(value):
    return json.dumps(value).encode()


class OddReward(Reward):
    """Does with a sample what its response says."""

    def submit(self, asked, tell):
        if asked.response == "raise":
            raise ValueError("it has a fault")
        for told in ODD_VERDICTS[asked.response]:
            tell(told)

    def check(self):
        pass

    def close(self):
        pass


FINE = RewardVerdict("ok", 1.0)
ODD_VERDICTS = {
    "fine": [FINE],
    "twice": [FINE, RewardVerdict("error", error="again")],
    "nothing": [None],
    "number": [0.5],
    "inf": [RewardVerdict("ok", math.inf)],
    "text": [RewardVerdict("ok", "1")],
    "none": [RewardVerdict("ok", None)],
    "parts": [RewardVerdict("ok", 1.0, {"p": "q"})],
    "status": [RewardVerdict("odd", None)],
}


def test_whatever_a_reward_of_ones_own_does_is_one_score_of_its_sample():
    own = {"name": f"{__file__}:OddReward"}
    spec = task(grade_weight=None, rewards={"r": {"own": own}})
    texts = [*ODD_VERDICTS, "raise", "fine"]
    found = scores({"digits": spec}, answers(texts))
    right = {"fine", "twice"}
    assert [s.reward for s in found] == [1.0 if text in right else None for text in texts]
    assert all(s.status == "error" for text, s in zip(texts, found) if text not in right)


@pytest.mark.processes
def test_rewards_add_up_with_their_weights_and_each_is_a_part():
    good, bad = right(1)[0], "x"
    length = rewards(lambda response, label: float(len(response) == len(label)))
    says = {good: "Score: 10", bad: "Score: 5"}

    def judged(body, number):
        text = body["messages"][1]["content"]
        return judgement(next(score for shown, score in says.items() if f"\n{shown}\n</r" in text))

    with RewardServer(length) as grader, RewardServer(judged) as judge:
        style = {"url": judge.url, "model": "m", "rubric": "r", **QUICK}
        spec = task(
            grade_weight=0.5,
            rewards={"length": http(grader, -2.0), "style": {"weight": 0.25, "judge": style}},
        )
        first, second = scores({"digits": spec}, answers([good, bad]))
    assert first.reward == 0.5 - 2.0 + 0.25
    assert first.parts["task"] == first.parts["correct"] == 1.0
    assert {k: first.parts[k] for k in ("length", "length.score", "style")} == {
        "length": 1.0,
        "length.score": 1.0,
        "style": 1.0,
    }
    assert second.reward == 0.25 * 0.5
    assert (second.parts["task"], second.parts["length"], second.parts["style"]) == (0.0, 0.0, 0.5)


def test_a_reward_replaces_the_tasks_own_grader():
    with RewardServer(rewards(lambda response, label: len(response))) as server:
        spec = task(grade_weight=None, rewards={"length": http(server)})
        (score,) = scores({"digits": spec}, answers(["12345"]))
    assert score.reward == 5.0
    assert score.parts == {"length": 5.0, "length.score": 5.0}


@pytest.mark.processes
def test_tasks_without_rewards_are_graded_beside_those_that_have_some():
    with RewardServer(rewards(lambda response, label: 3.0)) as server:
        tasks = {"digits": task(rewards={"more": http(server)}), "plain": task()}
        own, plain = answers(right(2), "digits")[:1], answers(right(2), "plain")[1:]
        first, second = scores(tasks, own + plain)
    assert (first.reward, second.reward) == (4.0, 1.0)
    assert len(server.seen) == 1


@pytest.mark.processes
def test_a_failed_reward_fails_the_sample_and_no_other():
    good = right(3)

    def answer(body, number):
        grade = rewards(lambda response, label: 1.0)
        return HttpReply(500) if body["labels"][0] == good[1] else grade(body, number)

    with RewardServer(answer) as server:
        spec = task(rewards={"more": http(server, batch_size=1)})
        found = scores({"digits": spec}, answers(good))
    assert [s.status for s in found] == ["ok", "error", "ok"]
    assert [s.reward for s in found] == [2.0, None, 2.0]
    assert found[1].parts == {}
    assert found[1].error.startswith("reward more: ") and "answered status 500" in found[1].error


@pytest.mark.processes
def test_a_failed_grader_of_the_task_fails_the_sample(tmp_path):
    (tmp_path / "g.py").write_text("def grade(item, response):\n    raise ValueError('no')\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    args = {"train_path": str(tmp_path / "rows.jsonl"), "grader": f"{tmp_path}/g.py:grade"}
    with RewardServer(rewards(lambda response, label: 1.0)) as server:
        spec = task("file", args=args, rewards={"more": http(server)})
        (score,) = scores({"digits": spec}, answers(["x"]))
    assert (score.status, score.reward, score.error) == ("error", None, "ValueError: no")


def test_a_dead_service_costs_scores_and_the_breaker_says_so_once():
    with RewardServer(rewards(lambda response, label: 1.0)) as server:
        gone = http(server, breaker_failures=2, breaker_rest_s=600.0, batch_size=1)
    notes = []
    spec = task(grade_weight=None, rewards={"more": gone})
    found = scores({"digits": spec}, answers(["x"] * 40), notes)
    assert [s.status for s in found] == ["error"] * 40
    assert len(notes) == 1 and "circuit breaker of task.rewards.more.http is open" in notes[0]


def verdicts(**values):
    return {name: RewardVerdict("ok", value) for name, value in values.items()}


def test_a_weight_of_zero_is_shown_and_not_added():
    spec = task(grade_weight=0, rewards={"more": {"weight": 2.0}, "shown": {"weight": 0}})
    found = total(make_answer(), spec, verdicts(task=1.0, more=3.0, shown=9.0))
    assert found.reward == 6.0
    assert found.parts == {"task": 1.0, "more": 3.0, "shown": 9.0, "correct": 1.0}


def test_a_task_may_weigh_its_own_grader_alone():
    spec = task(grade_weight=3.0)
    own = {"task": RewardVerdict("ok", 0.5, {"correct": 0.0, "format": 1.0})}
    found = total(make_answer(), spec, own)
    assert found.reward == 1.5
    assert found.parts == {"task": 0.5, "correct": 0.0, "format": 1.0}
    assert spec.weighed


def test_a_part_that_is_named_as_a_reward_is_a_failed_score():
    spec = task(rewards={"format": {"weight": 2.0}})
    own = {**verdicts(format=1.0), "task": RewardVerdict("ok", 1.0, {"format": 1.0})}
    found = total(make_answer(), spec, own)
    assert found.status == "error" and "named as the reward format" in found.error


def test_the_first_reward_that_failed_gives_the_status():
    spec = task(rewards={"a": {}, "b": {}})
    late, broken = (
        RewardVerdict("timeout", error="late", seconds=3.0),
        RewardVerdict("error", error="broken"),
    )
    found = total(make_answer(), spec, {**verdicts(task=1.0), "a": late, "b": broken})
    assert (found.status, found.error, found.seconds) == ("timeout", "reward a: late", 3.0)


def test_the_same_answer_may_be_submitted_twice():
    with RewardServer(rewards(lambda response, label: 1.0)) as server:
        spec = task(grade_weight=None, rewards={"more": http(server)})
        found = []
        scorer = make_scorer(
            {"digits": spec}, GradingSpec(), on_scored=found.extend, note=[].append
        )
        (one,) = answers(["x"])
        scorer.submit([one, one])
        scorer.drain(30)
        scorer.close()
    assert [score.reward for _, score in found] == [1.0, 1.0]


def test_an_open_request_does_not_hold_up_closing():
    release = threading.Event()

    def never(body, number):
        release.wait(deadline(60))
        return HttpReply()

    with RewardServer(never) as server:
        spec = task(grade_weight=None, rewards={"more": http(server)})
        scorer = make_scorer({"digits": spec}, GradingSpec(), on_scored=print, note=print)
        scorer.submit(answers(["x"]))
        with pytest.raises(DeadlineExceeded, match="1 answers were not graded within"):
            scorer.drain(0.2)
        scorer.close()
        release.set()
    with pytest.raises(StageError, match="closed"):
        scorer.submit(answers(["x"]))


def test_failures_of_the_caller_end_the_scorer_with_a_reason():
    def broken(done):
        raise RuntimeError("nowhere to put it")

    with RewardServer(rewards(lambda response, label: 1.0)) as server:
        spec = task(grade_weight=None, rewards={"more": http(server)})
        scorer = make_scorer({"digits": spec}, GradingSpec(), on_scored=broken, note=print)
        scorer.submit(answers(["x"]))
        with pytest.raises(StageError, match="nowhere to put it"):
            scorer.drain(30)
        with pytest.raises(StageError, match="nowhere to put it"):
            scorer.close()


def test_a_task_that_cannot_rebuild_its_problem_fails_the_sample(tmp_path):
    (tmp_path / "t.py").write_text(
        "from rlcore.tasks.digits import Digits\n\n\nclass Odd(Digits):\n"
        "    def item(self, split, index):\n        raise KeyError('lost')\n"
    )
    spec = task(f"{tmp_path}/t.py:Odd", grade_weight=None, rewards={"more": {"http": {"url": "x"}}})
    (score,) = scores({"digits": spec}, answers(["x"]))
    assert score.status == "error" and "KeyError: 'lost'" in score.error


def test_unknown_labels_and_missing_keys_are_refused_at_the_door(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with RewardServer(rewards(lambda response, label: 1.0)) as server:
        spec = task(grade_weight=None, rewards={"more": http(server)})
        scorer = make_scorer({"digits": spec}, GradingSpec(), on_scored=print, note=print)
        with pytest.raises(ValueError, match="no task is labelled 'other'"):
            scorer.submit(answers(["x"], "other"))
        scorer.close()
        keyed = task(grade_weight=None, rewards={"m": http(server, api_key_env="NO_SUCH_KEY")})
        with pytest.raises(UserError, match=r"task\.rewards\.m\.http\.api_key_env=NO_SUCH_KEY"):
            make_scorer({"digits": keyed}, GradingSpec(), on_scored=print, note=print)


@pytest.mark.processes
def test_a_task_without_rewards_keeps_the_plain_scorer():
    scorer = make_scorer({"digits": task()}, GradingSpec(), on_scored=print, note=print)
    scorer.close()
    assert isinstance(scorer, Scorer) and not isinstance(scorer, WeightedScorer)


def test_rewards_of_tokens_are_weighed_and_the_other_rewards_are_the_last_token_s():
    spec = task(grade_weight=2.0, rewards={"more": {"weight": 0.5}})
    own = RewardVerdict("ok", 0.75, token_rewards=(0.25, 0.5))
    found = total(make_answer(), spec, {"task": own, "more": RewardVerdict("ok", 3.0)})
    assert found.reward == 3.0 and found.token_rewards == (0.5, 2.5)
