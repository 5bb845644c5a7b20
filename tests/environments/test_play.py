"""Episodes between two turns: with real environment processes and a scripted model."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from environment_fakes import ScriptedSampler, ask, make_job
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import deadline, wait_until

from rlcore.environments.episode_processes import Link
from rlcore.environments.play import Play
from rlcore.errors import StageError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.seeding import derive_seed

pytestmark = pytest.mark.processes

ALPHABET = "0123456789="
EOS = 1


def ids(text):
    return build_char_tokenizer(ALPHABET).encode(text)


@pytest.fixture
def start():
    plays = []

    def make(job, turns=None, tokenizer=None):
        plays.append(Play(job, tokenizer or build_char_tokenizer(ALPHABET), ("bf16-0", "bf16")))
        turns = turns or [(*ids("12"), EOS), (*ids("3"), EOS)]
        return ScriptedSampler(plays[-1], [list(t) for t in turns])

    yield make
    for play in plays:
        play.close()


def test_a_turn_begins_with_the_tokens_of_the_turns_before_it(start):
    sampler = start(make_job())
    sampler.play.add(ask(2))
    first, second = sampler.run()
    assert first.score.status == "ok" and first.score.reward == 3.0
    (record,) = first.parts
    question = record.prompt_ids.tolist()
    answers = [*ids("12"), EOS], [*ids("3"), EOS], [*ids("12"), EOS]
    expected = [*question, *answers[0], *ids("12"), *answers[1], *ids("3"), *answers[2]]
    assert record.token_ids.tolist() == expected
    assert record.sampled_ids.tolist() == [t for answer in answers for t in answer]
    prompts = [r.prompt_ids.tolist() for r in sampler.asked if r.sample_index == 0]
    assert prompts == [expected[: int(at)] for at in record.turn_starts]
    assert record.token_version.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert record.purpose == first.answer.purpose == "train"
    assert {record.draw_id} == {first.answer.draw_id, first.score.draw_id}
    assert record.draw_id != second.parts[0].draw_id
    assert {n: v for n, v in first.score.parts.items() if n in ("steps", "turns")} == {
        "steps": 3.0,
        "turns": 3.0,
    }


def test_seeds_follow_from_the_run_the_purpose_and_the_index(start):
    sampler = start(make_job())
    sampler.play.add([*ask(2), *ask(1, group=-1, purpose="eval/5/digits/greedy")])
    *_, evaluated = runs = sampler.run()
    played = {(p.score.group_id, p.score.sample_index): p.score.parts["seed"] for p in runs}
    assert played[0, 0] == played[0, 1] != played[-1, 0]
    assert played[-1, 0] == derive_seed(3, "environment", "eval", "digits/train/1") % 1000
    seeds = [r.seed for r in sampler.asked if (r.group_id, r.sample_index) == (0, 1)]
    assert seeds == [8, derive_seed(8, "turn", 1), derive_seed(8, "turn", 2)]
    assert evaluated.answer.prompt or runs[0].answer.prompt


@pytest.mark.parametrize(
    ("args", "turns"),
    [
        ({"rewards": [0.5, None, -1.0]}, (0.5, 0.0, 2.0)),
        ({"late": [0.25, 0.5, 1.0]}, (0.25, 0.5, 4.0)),
        ({"rewards": [0.5, 0.5, None], "late": [1.0, 1.0, 1.0]}, (1.5, 1.5, 4.0)),
        ({"rewards": [None, None, None]}, ()),
    ],
)
def test_rewards_of_turns_and_of_the_grade_add_up(start, args, turns):
    sampler = start(make_job(args=args))
    sampler.play.add(ask(1))
    (played,) = sampler.run()
    assert played.score.turn_rewards == turns
    assert played.score.reward == (sum(turns) if turns else 3.0)
    assert played.score.parts.get("turn_rewards", 0.0) == (sum(turns) - 3.0 if turns else 0.0)


def test_a_list_has_a_reward_for_every_turn_or_for_every_token(start):
    """Of three turns of three, two and three tokens."""
    tokens = [0.0, 0.25, 0.5, 1.0, 0.0, 0.0, 0.0, 2.0]
    args = {"listed": tokens, "rewards": [None, 4.0, None]}
    sampler = start(make_job(args=args))
    sampler.play.add(ask(1))
    (played,) = sampler.run()
    assert played.score.token_rewards == (0.0, 0.25, 0.5, 1.0, 4.0, 0.0, 0.0, 2.0)
    assert played.score.reward == 7.75 and not played.score.turn_rewards
    sampler = start(make_job(args={"listed": [0.5, 0.0, 1.0]}))
    sampler.play.add(ask(1))
    (played,) = sampler.run()
    assert played.score.turn_rewards == (0.5, 0.0, 1.0) and not played.score.token_rewards


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"listed": [1.0, 2.0]}, "rewards 2 tokens or turns, of 8 tokens and 3 turns"),
        ({"late": [1.0, 2.0]}, "grade rewards 2 turns, of 3 that it saw"),
        ({"rewards": ["inf"] * 3}, "step raised ValueError: Out of range float values"),
        ({"rewards": ["a lot"] * 3}, "step raised ValueError"),
    ],
)
def test_rewards_of_turns_that_mean_nothing_fail_the_episode(start, args, words):
    sampler = start(make_job(args=args))
    sampler.play.add(ask(1))
    (played,) = sampler.run()
    assert played.score.status == "error" and words in played.score.error, played.score.error


def test_limits_end_an_episode_and_it_is_graded(start):
    turns = start(make_job(max_turns=2))
    room = start(make_job(max_len=14, args={"turns": 9}))
    for sampler in (turns, room):
        sampler.play.add(ask(1))
    (by_turns,), (by_room,) = turns.run(), room.run()
    assert by_turns.score.reward == 2.0 and by_turns.answer.finish_reason == "stop"
    assert by_room.score.status == "ok" and by_room.answer.finish_reason == "length"
    assert max(len(r.prompt_ids) for r in room.asked) < 14


def test_a_long_observation_is_cut(start):
    sampler = start(make_job(max_observation_tokens=1, max_turns=2))
    sampler.play.add(ask(1))
    ((record,),) = [p.parts for p in sampler.run()]
    first, second = (int(at) for at in record.turn_starts)
    assert record.token_ids[first + 3 : second].tolist() == ids("1")


@pytest.mark.parametrize("at", ["reset", "step", "grade"])
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("raise", "error", "raised ValueError: it has a fault"),
        ("exit", "error", "died during"),
        ("hang", "timeout", "passed environment.step_timeout_s="),
        ("memory", "error", "raised MemoryError"),
    ],
)
def test_an_environment_that_fails_costs_its_own_episode(start, at, fault, status, words):
    args, limit_s = {"fault": fault, "at": at}, deadline(1)
    job = make_job(args=args, step_timeout_s=limit_s, memory_mib=2048)
    sampler = start(job)
    sampler.play.add(ask(2))
    for played in sampler.run():
        assert played.score.status == status and played.score.reward is None
        assert words in played.score.error and at in played.score.error
        (record,) = played.parts
        assert (record.group_id, record.sample_index) == (0, played.score.sample_index)
        assert len(record.logp_inf) == {"reset": 0, "step": 3, "grade": 8}[at]


def test_a_gigabyte_of_output_and_a_huge_observation_harm_nobody(start):
    printing = start(make_job(args={"fault": "print", "turns": 1}))
    huge = start(make_job(args={"fault": "big", "turns": 9}, max_observation_tokens=4, max_turns=2))
    for sampler in (printing, huge):
        sampler.play.add(ask(1))
        (played,) = sampler.run()
        assert played.score.status == "ok", played.score.error


def test_an_environment_that_is_killed_in_the_middle_of_a_step_is_noticed(start):
    sampler = start(make_job(args={"fault": "slow", "seconds": 10**6}))
    play = sampler.play
    play.add(ask(1))
    play.begin_waiting()
    while not play.to_sample:
        play.wait(1.0)
    sampler.asked += play.to_sample
    play.sampled(sampler.turn(play.to_sample.pop()))
    (episode,) = play.open.values()
    os.kill(episode.link._pid, signal.SIGKILL)
    (played,) = sampler.run()
    assert played.score.error == "the environment's process died during step"


def test_a_slow_environment_does_not_hold_up_the_others(start):
    sampler = start(make_job(args={"fault": "slow", "seconds": 0.5, "turns": 1}))
    play = sampler.play
    play.add(ask(8))
    play.begin_waiting()
    while len(play.to_sample) < 8:
        play.wait(1.0)
    sampler.asked += play.to_sample
    for request in play.to_sample:
        play.sampled(sampler.turn(request))
    play.to_sample = []
    assert [e.waits_for for e in play.open.values()] == ["step"] * 8  # all of them at once
    assert len(sampler.run()) == 8


def test_an_episode_has_a_deadline_of_its_own(start):
    sampler = start(make_job(episode_timeout_s=deadline(1), step_timeout_s=deadline(1)))
    sampler.play.add(ask(1))
    while not sampler.play.to_sample:
        sampler.play.begin_waiting()
        sampler.play.wait(1.0)
    asked = sampler.play.to_sample.pop()
    while not sampler.play.done:  # the engine never answers
        sampler.play.wait(0.1)
        sampler.play.check_deadlines()
    (played,) = sampler.play.done
    assert played.score.status == "timeout"
    assert "environment.episode_timeout_s=" in played.score.error
    assert sampler.play.to_abort == [asked.request_id]


def test_a_late_turn_of_a_dropped_episode_is_no_turn_of_the_next(start):
    sampler = start(make_job())
    play = sampler.play
    play.add(ask(1))
    while not play.to_sample:
        play.begin_waiting()
        play.wait(1.0)
    stale = play.to_sample.pop()
    play.drop({"train:0:0"})
    assert play.to_abort == [stale.request_id] and not play.busy
    play.add(ask(1))
    while not play.to_sample:
        play.begin_waiting()
        play.wait(1.0)
    sampler.asked.append(stale)
    play.sampled(sampler.turn(stale))
    assert len(play.open) == 1 and next(iter(play.open.values())).count == 0


def test_no_more_episodes_are_open_than_there_are_places(start):
    sampler = start(make_job(concurrency=3))
    sampler.play.add(ask(8))
    sampler.play.begin_waiting()
    assert len(sampler.play.open) == 3
    assert len(sampler.run()) == 8


def test_no_process_outlives_the_server(start):
    sampler = start(make_job(args={"fault": "hang"}))
    sampler.play.add(ask(2))
    while len(sampler.play.to_sample) < 2:
        sampler.play.begin_waiting()
        sampler.play.wait(1.0)
    pids = [e.link._pid for e in sampler.play.open.values()]
    assert all(pids)
    sampler.play.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/cwd") for pid in pids), 10, "their end")


def test_the_server_is_started_again(start):
    sampler = start(make_job())
    sampler.play.add(ask(1))
    sampler.run()
    os.killpg(sampler.play._server._process.pid, signal.SIGKILL)
    sampler.play._server._process.wait()
    # its children end after it
    wait_until(lambda: not any(link.alive for link in sampler.play._idle), 10, "their end")
    sampler.play.add(ask(1))
    assert [p.score.status for p in sampler.run()] == ["ok"]


class DyingServer:
    """In the place of the environments' process: it ends after one episode."""

    def __init__(self, job):
        self.lives = True

    def open(self):
        if not self.lives:
            raise StageError("the environments' process has ended")
        self.lives = False
        return SimpleNamespace(call=lambda *args, **named: None, episodes=0, kill=lambda: None)

    def close(self):
        pass


@pytest.mark.parametrize(("apart_s", "most"), [(1.0, 4), (1201.0, 20), (1199.0, 4)])
def test_three_restarts_an_hour_are_allowed(monkeypatch, apart_s, most):
    monkeypatch.setattr("rlcore.environments.play.EnvironmentServer", DyingServer)
    now = itertools.count(0.0, apart_s)
    play = Play(make_job(), build_char_tokenizer(ALPHABET), ("bf16-0", "bf16"), lambda: next(now))
    begun = 0
    with contextlib.suppress(StageError):
        for request in ask(20):
            play.add([request])
            play.begin_waiting()
            begun += 1
    assert begun == most


def test_a_process_serves_another_episode_only_after_one_that_ended_well(start):
    sampler = start(make_job(concurrency=1))
    sampler.play.add(ask(2))
    assert len({p.score.parts["process"] for p in sampler.run()}) == 1
    failing = start(make_job(concurrency=1, args={"fault": "raise", "at": "grade"}))
    failing.play.add(ask(1))
    failing.run()
    assert not failing.play._idle


def test_a_task_is_an_environment_of_one_turn(start):
    from rlcore.tasks import make_task

    item = make_task("digits", {}).item("train", 0)
    right, wrong = ids(item.answer), ids("0")
    rewards = []
    for answer in (right, wrong):
        sampler = start(make_job("task"), [(*answer, EOS)])
        sampler.play.add(ask(1))
        (played,) = sampler.run()
        rewards.append(played.score.reward)
        assert played.parts[0].prompt_ids.tolist() == ids(item.question)
        assert sampler.asked[0].seed == 7  # as a request of one turn has it
        assert np.array_equal(played.parts[0].turn_starts, [len(ids(item.question))])
    assert rewards == [1.0, 0.0]


def test_what_an_environment_started_in_another_session_ends_with_its_episode(start, tmp_path):
    job = make_job(args={"fault": "daemon", "at": "grade", "listed": str(tmp_path / "pid")})
    sampler = start(job)
    sampler.play.add(ask(1))
    assert [p.score.status for p in sampler.run()] == ["error"]
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid), 20, "the daemon's end")


def test_what_an_episode_started_is_gone_when_its_process_serves_the_next(start, tmp_path):
    listed = tmp_path / "pid"
    job = make_job(concurrency=1, args={"fault": f"leave {listed}", "at": "grade"})
    sampler = start(job)
    sampler.play.add(ask(2))
    played = sampler.run()
    assert len({p.score.parts["process"] for p in played}) == 1  # one process, two episodes
    first, *_ = map(int, listed.read_text().split())
    wait_until(lambda: not psutil.pid_exists(first), 20, "the end of the first")
    assert sampler.play._idle, "its process goes on"


class OddServer:
    """In the place of an environments' process: one that answers every call by `answer(call)`, with
    bytes as they are."""

    def __init__(self, answer):
        self._answer = answer
        self.closed = 0

    def open(self):
        return Link(self)

    def fork(self, theirs):
        threading.Thread(target=self._serve, args=(theirs.dup(),), daemon=True).start()

    def _serve(self, link):
        with link, contextlib.suppress(OSError):
            link.sendall(b'{"pid": 1}\n')
            for line in link.makefile("rb"):
                link.sendall(self._answer(json.loads(line)))

    def kill(self, pid):
        self.closed += 1

    def close(self):
        pass


GRADE = {"reward": 1.0, "parts": {}, "turn_rewards": [], "token_rewards": [], "unread": []}
ANSWERS = {
    "reset": {
        "messages": [{"role": "user", "content": "12="}],
        "tools": [],
        "max_tokens": None,
        "hosts_program": False,
    },
    "step": {
        "messages": [{"role": "user", "content": "3"}],
        "over": True,
        "parts": {},
        "reward": None,
        "opening": None,
        "conversation": None,
        "max_tokens": None,
    },
    "grade": GRADE,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
) | st.sampled_from([1e308, 10**400, "9" * 200])


@st.composite
def odd_answers(draw):
    """(call, what it is answered with): the fields of a good answer with others among them, or
    bytes of any kind."""
    call = draw(st.sampled_from(list(ANSWERS)))
    names = [*ANSWERS[call], "error", "id", "pid"]
    changed = draw(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=2))
    deep, raw = st.just(b"[" * 100_000 + b"\n"), st.binary(max_size=20).map(lambda b: b + b"\n")
    return call, draw(st.just(changed) | deep | raw)


@settings(max_examples=150, deadline=None)
@given(odd_answers())
def test_whatever_an_environment_answers_its_episode_alone_has_one_verdict(odd):
    call, said = odd
    twice = set()

    def answer(asked):
        fields = {**ANSWERS[asked["call"]], "id": asked["id"]}
        # the first sample's environment is the odd one, in the first call of that name
        if asked["call"] == call and call not in twice:
            twice.add(call)
            if isinstance(said, bytes):
                return said + json.dumps(fields).encode() + b"\n"
            fields |= said
        return json.dumps(fields).encode() + b"\n"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlcore.environments.play.EnvironmentServer", lambda job: OddServer(answer))
        play = Play(make_job(concurrency=1), build_char_tokenizer(ALPHABET), ("bf16-0", "bf16"))
    sampler = ScriptedSampler(play, [[*ids("12"), EOS]])
    play.add(ask(3))
    played = sampler.run()
    assert [(p.score.group_id, p.score.sample_index) for p in played] == [(0, i) for i in range(3)]
    assert all(p.score.draw_id == p.answer.draw_id == p.parts[0].draw_id for p in played)
    assert all(p.score == p.score.checked() for p in played)
    assert [p.score.status for p in played[1:]] == ["ok", "ok"]
