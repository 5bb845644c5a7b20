"""Programs that call the model as an endpoint, over a real engine."""

from __future__ import annotations

import importlib
import queue
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import model_logp
from timing import deadline

from rlcore.agents.families import family_of, read_turn
from rlcore.environments.player import EpisodePlayer, Exits
from rlcore.environments.protocol import ToolCall, tool_schema
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.text import load_tokenizer
from rlcore.rollout.worker import RolloutWorker
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.testing.records import make_sampling
from rlcore.types import Request
from rlcore.weights.manifest import make_manifest
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine

FAKES = Path(__file__).parents[2] / "agents" / "agent_fakes.py"
TURNS = 3


@pytest.fixture
def begin(engine, model_a, monkeypatch):
    """Plays a program of agent_fakes; gives the player and the queue of finished episodes."""
    monkeypatch.syspath_prepend(str(FAKES.parent))
    tokenizer = load_tokenizer(model_a.path)
    tokenizer.chat_template = importlib.import_module("agent_fakes").TEMPLATE
    started = []

    def make(program, **settings):
        spec = EnvironmentSpec(name="endpoint", args={"program": f"{FAKES}:{program}"}, **settings)
        job = EnvironmentJob(spec, EvalTaskSpec(name="digits"), "digits", max_len=256)
        played = queue.Queue()
        exits = Exits(lambda es: [played.put(e) for e in es], lambda ts: None)
        player = EpisodePlayer(job, tokenizer, ("bf16-0", "bf16"), exits)
        worker = RolloutWorker(engine, player.finished, flush_interval_s=0.01)
        started.append((player, worker))
        player.start(worker)
        return player, worker, played

    yield make
    for player, worker in started:
        player.close()
        worker.close()


def ask(count, *, group=0, **sampling):
    spec, nothing = make_sampling(**{"max_new_tokens": 12, **sampling}), np.zeros(0, np.int32)
    return [
        Request(group, i, f"digits/train/{group}", nothing, spec, seed=50 + i) for i in range(count)
    ]


def collect(finished, count):
    return [finished.get(timeout=deadline(90)) for _ in range(count)]


@pytest.mark.parametrize("program", ["plain", "with_openai"])
def test_every_token_that_a_program_asked_for_has_its_log_prob(begin, model_a, program):
    player, _, played = begin(program)
    player.submit(ask(6))
    for episode in collect(played, 6):
        assert episode.score.status == "ok", episode.score.error
        (t,) = episode.parts
        assert len(t.turn_starts) == TURNS and episode.score.parts["conversations"] == 1
        np.testing.assert_allclose(t.logp_inf, model_logp(model_a, t), atol=1e-5)
        assert t.topk_ids.shape == (len(t.sampled_ids), 20)
        observed = np.split(~t.sampled, t.turn_starts)[1:]
        assert [bool(turn.any()) for turn in observed] == [True, True, False]
    counts = {"episodes": 6, "turns": 18, "failed_episodes": 0}
    assert player.status() | counts == player.status()


def test_weights_may_change_within_and_between_calls(begin, model_a, model_b):
    player, worker, played = begin("plain")
    manifest = make_manifest(1, model_b.tensors, full=True, seed=0)
    player.submit(ask(24, max_new_tokens=60))
    while player.status()["turns"] < 12:
        assert not player.error
    update = worker.update_weights(
        1, whole(model_b.tensors), "in_flight", manifest=manifest, timeout_s=60
    )
    update.result(deadline(60))
    seen = set()
    for episode in collect(played, 24):
        # a turn that its length cuts at <pad> or <unk>, which no template writes, ends its part
        for t in episode.parts:
            for version, model in ((0, model_a), (1, model_b)):
                own = t.token_version == version
                np.testing.assert_allclose(t.logp_inf[own], model_logp(model, t)[own], atol=1e-5)
            seen.add(tuple(sorted(set(t.token_version.tolist()))))
    assert (0, 1) in seen


def test_conversations_at_once_have_their_log_probs_part_by_part(begin, model_a):
    player, _, played = begin("at_once")
    player.submit(ask(3))
    for episode in collect(played, 3):
        assert episode.score.status == "ok", episode.score.error
        assert sorted(len(t.turn_starts) for t in episode.parts) == [2, 2, 2]
        for t in episode.parts:
            np.testing.assert_allclose(t.logp_inf, model_logp(model_a, t), atol=1e-5)


def test_programs_that_fail_hold_up_nobody(begin, engine):
    player, _, played = begin("moody", step_timeout_s=deadline(6))
    player.submit([r for group in range(5) for r in ask(2, group=group)])
    done = {(e.score.group_id, e.score.sample_index): e.score for e in collect(played, 10)}
    status = [{done[group, i].status for i in (0, 1)} for group in range(5)]
    assert status == [{"ok"}, {"timeout"}, {"timeout"}, {"error"}, {"ok"}]
    assert all((s.reward is None) == (s.status != "ok") for s in done.values())
    assert player.status()["failed_episodes"] == 6
    assert engine.unfinished() == 0 and played.empty()


def test_parsers_of_vllm_read_calls_by_name(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKES.parent))
    fakes = importlib.import_module("family_fakes")
    tokenizer = fakes.tokenizer_with(fakes.QWEN)
    schema = tool_schema(fakes.add)
    missing = family_of(fakes.UNKNOWN, tokenizer, "deepseek_v31")
    with pytest.raises(RuntimeError):  # no mistake of the model's, who would be told of it
        read_turn(missing, "4", tools=[schema])
    marks = ["calls▁begin", "call▁begin", "call▁end", "calls▁end"]
    marks = [f"<｜tool▁{mark}｜>" for mark in marks]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    texts = {  # a call as DeepSeek V3.1 and Llama 4 write it
        "deepseek_v31": "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "pythonic": "[add(a=2)]",
    }
    for name, text in texts.items():
        family = family_of(fakes.UNKNOWN, tokenizer, name)
        said = read_turn(family, text, tools=[schema])
        assert said.calls == (ToolCall("add", {"a": 2}),), (name, said)
        assert read_turn(family, "It is 4.", tools=[schema]).content == "It is 4."
    with pytest.raises(UserError, match=r"model\.tool_parser=mine is not a form"):
        family_of(fakes.UNKNOWN, tokenizer, "mine")
