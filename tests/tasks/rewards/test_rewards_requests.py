"""Rewards behind HTTP, asked of real servers on loopback that misbehave."""

import re
import threading
import time

import pytest
from timing import deadline

from rlcore.errors import UserError
from rlcore.tasks.rewards.protocols import RewardQuery
from rlcore.tasks.rewards.requests import RequestThread
from rlcore.tasks.rewards.specs import RewardSpec
from rlcore.tasks.rewards.weighted import make_reward
from rlcore.testing.reward_server import HttpReply, RewardServer, judgement, rewards

QUICK = {"retry_wait_s": 0.01, "request_timeout_s": 20.0, "deadline_s": 30.0, "retries": 0}
KEY = "secret-key-0123"


def http(server, **settings):
    return RewardSpec.model_validate({"http": {"url": server.url, **QUICK, **settings}})


def judge(server, **settings):
    own = {"url": f"{server.url}/v1", "model": "wise", "rubric": "Be strict."}
    return RewardSpec.model_validate({"judge": {**own, **QUICK, **settings}})


def ask(spec, samples, *, notes=None, in_turn=False, gap_s=0.0):
    """Verdicts on samples (Asked, or responses), in their order. in_turn: one after the other;
    gap_s: between two that are submitted."""
    thread = RequestThread()
    verdicts = {}
    arrived = threading.Condition()

    def tell(index, verdict):
        with arrived:
            verdicts[index] = verdict
            arrived.notify_all()

    def await_count(count):
        with arrived:
            done = arrived.wait_for(lambda: len(verdicts) >= count, deadline(60))
            assert done, f"{len(verdicts)} of {count} verdicts came"

    try:
        note = (notes if notes is not None else []).append
        reward = make_reward("task.rewards.r", spec, thread, note)
        for i, sample in enumerate(samples):
            asked = sample if isinstance(sample, RewardQuery) else RewardQuery("q?", "a", sample)
            reward.submit(asked, lambda verdict, i=i: tell(i, verdict))
            time.sleep(gap_s)
            if in_turn:
                await_count(i + 1)
        await_count(len(samples))
        reward.check()
        reward.close()
    finally:
        thread.close()
    return [verdicts[i] for i in range(len(samples))]


def test_a_grader_is_asked_in_openrlhfs_form():
    def answer(body, number):
        logs = {
            "words": [3, 4],
            "share": 0.5,
            "why": ["a", "b"],
            "odd": [None, 2],
            "no/metric": [1, 2],
        }
        return HttpReply(body={"rewards": [0.25, [1]], "scores": [0, 1], "extra_logs": logs})

    samples = [RewardQuery("2+2=", "4", "5"), RewardQuery("1+1=", "2", "2")]
    with RewardServer(answer) as server:
        first, second = ask(http(server, batch_size=2, batch_wait_s=deadline(5)), samples)
    (seen,) = server.seen
    assert seen.body == {
        "query": ["2+2=5", "1+1=2"],
        "prompts": ["2+2=", "1+1="],
        "labels": ["4", "2"],
    }
    assert seen.authorization == ""
    assert (first.status, first.value) == ("ok", 0.25)
    assert (second.status, second.value) == ("ok", 1.0)
    assert first.parts == {"words": 3.0, "share": 0.5, "score": 0.0}
    assert second.parts == {"words": 4.0, "share": 0.5, "odd": 2.0, "score": 1.0}


def test_idle_workers_leave_a_batch_together():
    with RewardServer(rewards(lambda response, label: float(response))) as server:
        spec = http(server, batch_size=4, batch_wait_s=deadline(10), concurrency=4)
        found = ask(spec, [str(i) for i in range(8)], gap_s=0.02)
    assert [v.value for v in found] == [float(i) for i in range(8)]
    assert [len(seen.body["query"]) for seen in server.seen] == [4, 4]


def test_samples_travel_in_batches_and_requests_at_the_same_time():
    release = threading.Event()

    def answer(body, number):
        if server.under_way >= 3:
            release.set()
        release.wait(deadline(20))
        return rewards(lambda response, label: float(response))(body, number)

    with RewardServer(answer) as server:
        spec = http(server, batch_size=4, batch_wait_s=0.0, concurrency=3)
        found = ask(spec, [str(i) for i in range(40)])
    assert [v.value for v in found] == [float(i) for i in range(40)]
    assert max(len(seen.body["query"]) for seen in server.seen) == 4
    assert server.most_under_way == 3


BROKEN = {
    "status": (HttpReply(503, {"detail": "busy"}), "error", 'answered status 503: \'{"detail"'),
    "not json": (HttpReply(body=b"<html>hello</html>"), "error", "is not JSON: '<html>hello"),
    "count": (HttpReply(body={"rewards": [1.0, 1.0]}), "error", 'has 2 "rewards" for 1 samples'),
    "scores": (
        HttpReply(body={"rewards": [1], "scores": []}),
        "error",
        'has 0 "score" for 1 samples',
    ),
    "no list": (HttpReply(body={"rewards": 1.0}), "error", 'not an object with a list "rewards"'),
    "text": (HttpReply(body="x"), "error", 'not an object with a list "rewards"'),
    "logs": (
        HttpReply(body={"rewards": [1], "extra_logs": [1]}),
        "error",
        '"extra_logs" that are not',
    ),
    "cut": (HttpReply(body={"rewards": [1.0]}, cut=True), "error", "ClientPayloadError"),
    "moved": (HttpReply(302, {}, headers=(("Location", "/x"),)), "error", "answered status 302"),
    "nan": (HttpReply(body=b'{"rewards": [NaN]}'), "error", "is nan, not a finite number"),
    "null": (HttpReply(body={"rewards": [None]}), "error", "is None, not a finite number"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_reply_is_a_failed_score(fault):
    reply, status, said = BROKEN[fault]
    with RewardServer(lambda body, number: reply) as server:
        (verdict,) = ask(http(server), ["x"])
    assert (verdict.status, verdict.value, verdict.parts) == (status, None, {})
    assert said in verdict.error and "\n" not in verdict.error


def test_a_reward_that_is_no_number_fails_its_sample_alone():
    with RewardServer(lambda b, n: HttpReply(body=b'{"rewards": [1, NaN, 0]}')) as server:
        found = ask(http(server, batch_wait_s=deadline(5), batch_size=3), ["a", "b", "c"])
    assert [v.value for v in found] == [1.0, None, 0.0]


@pytest.mark.parametrize(
    "slow", [HttpReply(after_s=10.0**6), HttpReply(body={"rewards": [1]}, drip_s=deadline(0.2))]
)
def test_a_slow_server_is_left_at_the_deadline(slow):
    # A byte now and then does not move the deadline.
    with RewardServer(lambda body, number: slow) as server:
        (verdict,) = ask(http(server, request_timeout_s=deadline(0.5)), ["x"])
        assert verdict.status == "timeout" and "did not answer within" in verdict.error
        spec = http(server, request_timeout_s=deadline(0.3), deadline_s=deadline(0.7), retries=50)
        (verdict,) = ask(spec, ["x"])
    assert verdict.status == "timeout" and re.search(
        r"within deadline_s=\S+, after: ", verdict.error
    )


def test_nobody_listens():
    with RewardServer(lambda body, number: HttpReply()) as server:
        spec = http(server, retries=2)
    (verdict,) = ask(spec, ["x"])
    assert verdict.status == "error"
    assert "tried 3 times, the last: " in verdict.error and "Cannot connect" in verdict.error


@pytest.mark.parametrize(
    "fault",
    [
        HttpReply(500),
        HttpReply(429, headers=(("Retry-After", "0"),)),
        HttpReply(body=[1] * 99, cut=True),
    ],
)
def test_what_may_pass_is_tried_again(fault):
    good = rewards(lambda response, label: 0.5)
    with RewardServer(lambda b, n: fault if n < 2 else good(b, n)) as server:
        (verdict,) = ask(http(server, retries=2), ["x"])
    assert (verdict.value, len(server.seen)) == (0.5, 3)


@pytest.mark.parametrize(
    "fault", [HttpReply(401), HttpReply(404), HttpReply(body=b"{"), HttpReply(body={})]
)
def test_what_will_not_pass_is_tried_once(fault):
    with RewardServer(lambda body, number: fault) as server:
        (verdict,) = ask(http(server, retries=5), ["x"])
    assert verdict.status == "error" and len(server.seen) == 1


def test_a_retry_waits_as_long_as_the_server_asks():
    busy = HttpReply(429, headers=(("Retry-After", "3600"),))
    with RewardServer(lambda body, number: busy) as server:
        spec = http(server, retries=9, request_timeout_s=deadline(1), deadline_s=deadline(1))
        (verdict,) = ask(spec, ["x"])
    assert verdict.status == "timeout" and len(server.seen) == 1
    assert "answered status 429" in verdict.error


def test_the_breaker_opens_and_fails_at_once():
    notes = []
    with RewardServer(lambda body, number: HttpReply(503)) as server:
        spec = http(server, breaker_failures=3, breaker_rest_s=600.0)
        found = ask(spec, ["x"] * 8, notes=notes, in_turn=True)
    assert len(server.seen) == 3
    assert [v.status for v in found] == ["error"] * 8
    assert "circuit breaker is open after 3 failed requests in a row, the last: " in found[7].error
    assert len(notes) == 1 and "task.rewards.r.http is open: 3 requests in a row" in notes[0]
    assert "answered status 503" in notes[0] and "every 600 s one request is tried" in notes[0]


def test_the_breaker_closes_when_a_request_succeeds():
    good = rewards(lambda response, label: 1.0)
    notes = []
    with RewardServer(lambda b, n: good(b, n) if n >= 4 else HttpReply(503)) as server:
        # With a rest that is over at once, every request is a trial.
        spec = http(server, breaker_failures=2, breaker_rest_s=1e-6)
        found = ask(spec, ["x"] * 6, notes=notes, in_turn=True)
    assert [v.status for v in found] == ["error"] * 4 + ["ok"] * 2
    assert len(notes) == 2 and "is open: 2 requests" in notes[0] and "answers again" in notes[1]


def test_a_key_is_sent_and_shown_nowhere(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", KEY)

    def answer(body, number):
        if number == 0:
            return HttpReply(401, {"error": f"wrong key {KEY}"})
        return HttpReply(body={"rewards": [1.0], "extra_logs": {KEY: 1.0}})

    notes = []
    with RewardServer(answer) as server:
        spec = http(server, api_key_env="REWARD_KEY", breaker_failures=1, breaker_rest_s=1e-6)
        bad, good = ask(spec, ["x", "y"], notes=notes, in_turn=True)
    assert {seen.authorization for seen in server.seen} == {f"Bearer {KEY}"}
    assert "wrong key ***" in bad.error and "wrong key ***" in notes[0]
    assert good.value == 1.0
    assert KEY not in f"{bad} {good} {notes} {spec}"


def test_a_key_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("REWARD_KEY", raising=False)
    spec = {"http": {"url": "http://127.0.0.1:9", "api_key_env": "REWARD_KEY"}}
    with pytest.raises(UserError, match=r"r\.http\.api_key_env=REWARD_KEY names a variable"):
        ask(RewardSpec.model_validate(spec), ["x"])


def test_a_judge_reads_the_rubric_and_scores():
    judgements = [
        "Good.\nScore: 7.5",
        "**Score:** 10",
        "score = 0",
        "First Score: 9, then Score: 2",
    ]
    with RewardServer(lambda body, number: judgement(judgements[number])) as server:
        found = ask(judge(server), ["r0", "r1", "r2", "r3"], in_turn=True)
    assert [v.value for v in found] == [0.75, 1.0, 0.0, 0.2]
    seen = server.seen[0]
    assert seen.path == "/v1/chat/completions"
    assert (seen.body["model"], seen.body["temperature"]) == ("wise", 0.0)
    system, user = seen.body["messages"]
    assert system["role"] == "system" and system["content"].startswith("Be strict.\n")
    assert "from 0 (worst) to 10 (best)" in system["content"]
    assert user["content"] == (
        "<question>\nq?\n</question>\n\n<reference>\na\n</reference>\n\n<response>\nr0\n</response>"
    )


def test_a_judge_without_a_score_is_a_failed_score_and_no_fault_of_the_service():
    said = ["I cannot say.", "Score: 11", "Score: -1", None]
    notes = []
    with RewardServer(lambda body, number: judgement(said[number])) as server:
        spec = judge(server, breaker_failures=1)
        found = ask(spec, ["x"] * 4, in_turn=True, notes=notes)
    assert [v.status for v in found] == ["error"] * 4 and notes == []
    assert "no 'Score: N': 'I cannot say.'" in found[0].error
    assert "score 11 is outside 0 to 10" in found[1].error


def test_the_reference_can_be_kept_from_the_judge():
    with RewardServer(lambda body, number: judgement("Score: 3")) as server:
        spec = judge(server, reference=False, lowest=1, highest=5)
        assert [v.value for v in ask(spec, ["x"])] == [0.5]
        (verdict,) = ask(judge(server), [RewardQuery("q", "", "r")])
    assert all("<reference>" not in str(seen.body) for seen in server.seen)
    assert verdict.value == pytest.approx(0.3)


def test_a_reply_of_another_service_is_no_judgement():
    with RewardServer(lambda body, number: HttpReply(body={"choices": []})) as server:
        (verdict,) = ask(judge(server), ["x"])
    assert "/v1/chat/completions is not a chat completion" in verdict.error
