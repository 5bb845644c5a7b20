"""Episodes of several turns over a real engine: tokens, log-probs and versions of every turn."""

from __future__ import annotations

import queue

import numpy as np
import pytest
from engine_helpers import model_logp
from timing import deadline

from rlcore.environments.player import Exits, Players
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.models.text import load_tokenizer
from rlcore.rollout.worker import RolloutWorker
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.testing.records import make_sampling
from rlcore.types import Request
from rlcore.weights.manifest import make_manifest
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine

TURNS = 3
SPEC = EnvironmentSpec(name="higher_lower", args={"guesses": 99}, max_turns=TURNS)
TASK = EvalTaskSpec(name="higher_lower", args={"digits": 3})
JOB = EnvironmentJob(SPEC, TASK, "higher_lower", max_len=256)


@pytest.fixture
def played():
    return queue.Queue()


@pytest.fixture
def answers():
    return queue.Queue()


@pytest.fixture
def player(engine, model_a, played, answers):
    exits = Exits(lambda es: [played.put(e) for e in es], lambda ts: [answers.put(t) for t in ts])
    player = Players([JOB], [load_tokenizer(model_a.path)], ("bf16-0", "bf16"), exits)
    worker = RolloutWorker(engine, player.finished, flush_interval_s=0.01)
    player.start(worker)
    player.worker = worker
    yield player
    player.close()
    worker.close()


def ask(count, *, group=0, label="higher_lower", prompt=(), **sampling):
    spec = make_sampling(**{"max_new_tokens": 12, **sampling})
    ids = np.array(prompt, np.int32)
    return [
        Request(group, i, f"{label}/train/{group}", ids, spec, seed=50 + i) for i in range(count)
    ]


def collect(finished, count):
    return [finished.get(timeout=deadline(60)) for _ in range(count)]


def test_every_sampled_token_of_every_turn_has_its_log_prob(player, played, model_a):
    player.submit(ask(8))
    for episode in collect(played, 8):
        assert episode.score.status == "ok" and episode.score.parts["turns"] == TURNS
        (t,) = episode.parts
        assert len(t.turn_starts) == TURNS
        np.testing.assert_allclose(t.logp_inf, model_logp(model_a, t), atol=1e-5)
        assert t.topk_ids.shape == (len(t.sampled_ids), 20)
        turns = np.split(t.sampled, t.turn_starts)[1:]
        # a turn, then its answer of one character; the last turn has none
        for last, turn in zip([False, False, True], turns, strict=True):
            assert turn[: len(turn) - (not last)].all() and bool(turn[-1]) is last
    counts = player.status()
    assert counts["episodes"] == 8 and counts["turns"] == 24 and not counts["failed_episodes"]


def test_episodes_are_reproducible_whatever_runs_beside_them(player, played):
    runs = []
    for beside in (0, 20):
        player.submit([*ask(8), *ask(beside, group=1)])
        done = [e.parts[0] for e in collect(played, 8 + beside)]
        own = sorted((t for t in done if t.group_id == 0), key=lambda t: t.sample_index)
        runs.append([t.token_ids.tolist() for t in own])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("mode", ["in_flight", "abort", "finish"])
def test_weights_may_change_within_and_between_turns(player, played, model_a, model_b, mode):
    manifest = make_manifest(1, model_b.tensors, full=True, seed=0)
    player.submit(ask(24, max_new_tokens=60))
    while player.status()["turns"] < 12:
        assert not player.error
    update = player.worker.update_weights(
        1, whole(model_b.tensors), mode, manifest=manifest, timeout_s=60
    )
    update.result(deadline(60))
    seen = set()
    for episode in collect(played, 24):
        (t,) = episode.parts
        assert np.all(np.diff(t.token_version) >= 0)
        for version, model in ((0, model_a), (1, model_b)):
            own = t.token_version == version
            np.testing.assert_allclose(t.logp_inf[own], model_logp(model, t)[own], atol=1e-5)
        seen.add(tuple(sorted(set(t.token_version.tolist()))))
    assert (0, 1) in seen


def test_other_tasks_are_answered_in_one_turn_beside_them(player, played, answers):
    player.submit(ask(2))
    player.worker.submit(ask(2, group=1, label="digits", prompt=[5, 9])).result(deadline(30))
    assert {t.group_id for t in collect(answers, 2)} == {1}
    assert {e.score.group_id for e in collect(played, 2)} == {0}


def test_a_dropped_episode_leaves_nothing_behind(player, played, engine):
    player.submit(ask(4, max_new_tokens=200))
    while player.status()["open"] < 4:
        assert not player.error
    player.abort([f"train:0:{i}" for i in range(3)])
    assert collect(played, 1)[0].score.sample_index == 3
    assert played.empty() and engine.unfinished() == 0
