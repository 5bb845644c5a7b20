"""The episodes of two tasks beside one engine, each in its own environment."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from environment_fakes import ask, make_job
from timing import deadline

from rlcore.environments.player import Exits, Players
from rlcore.models.fresh import build_char_tokenizer
from rlcore.testing.records import make_trajectory

pytestmark = pytest.mark.processes


class Engine:
    """Answers every request with the same two tokens, at once."""

    def __init__(self):
        self.dropped = []

    def submit(self, requests):
        self.players.finished([self.answer(r) for r in requests])
        return done()

    def abort(self, request_ids):
        self.dropped += request_ids
        return done()

    def answer(self, request):
        return make_trajectory(
            request.group_id,
            request.sample_index,
            turns=[(request.prompt_ids.tolist(), [4, 1])],
            k=request.sampling.logprobs_k,
            purpose=request.purpose,
            prompt_id=request.prompt_id,
            timings={"queue_s": 0.0, "generate_s": 1.0},
        )


def done():
    future = Future()
    future.set_result(None)
    return future


def of_task(label, requests):
    return [replace(r, prompt_id=f"{label}/train/{r.group_id}") for r in requests]


@pytest.fixture
def start():
    made = []

    def make(jobs):
        played, others = queue.Queue(), queue.Queue()
        exits = Exits(lambda es: [played.put(e) for e in es], others.put)
        tokenizers = [build_char_tokenizer("0123456789=") for _ in jobs]
        players = Players(jobs, tokenizers, ("bf16-0", "bf16"), exits)
        made.append(players)
        engine = Engine()
        engine.players = players
        players.start(engine)
        return players, engine, played, others

    yield make
    for players in made:
        players.close()


def test_each_task_s_episodes_are_played_in_its_own_environment(start):
    short = make_job(args={"turns": 1})
    long = replace(make_job(args={"turns": 3}), label="long")
    players, engine, played, others = start([short, long])
    requests = [*ask(4), *of_task("long", ask(4, group=1)), *of_task("plain", ask(2, group=2))]
    assert [players.plays(r) for r in requests] == [True] * 8 + [False] * 2
    players.submit(requests[:8])
    found = [played.get(timeout=deadline(60)) for _ in range(8)]
    turns = {(p.answer.prompt_id, p.score.parts["turns"]) for p in found}
    assert turns == {("digits/train/0", 1.0), ("long/train/1", 3.0)}
    assert all(p.score.status == "ok" for p in found)
    figures = players.status()
    assert (figures["episodes"], figures["turns"], figures["failed_episodes"]) == (8, 16, 0)
    assert figures["open"] == figures["waiting"] == figures["errors"] == figures["timeouts"] == 0
    assert figures["calls"] >= 16 and figures["environment_s"] > 0
    plain = [replace(r, prompt_ids=np.array([5], np.int32)) for r in requests[8:]]
    engine.submit(plain)
    assert [t.prompt_id for t in others.get(timeout=deadline(5))] == ["plain/train/2"] * 2


def test_an_environment_that_hangs_holds_up_no_other_task(start):
    hung = make_job(args={"fault": "hang"}, step_timeout_s=3600)
    quick = replace(make_job(), label="quick")
    players, _, played, _ = start([hung, quick])
    players.submit([*ask(2), *of_task("quick", ask(2, group=1))])
    found = [played.get(timeout=deadline(20)) for _ in range(2)]
    assert {p.answer.prompt_id for p in found} == {"quick/train/1"}
    players.abort([r.request_id for r in ask(2)])
    assert played.empty() and players.error is None
