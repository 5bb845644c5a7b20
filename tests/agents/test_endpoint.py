"""Programs that call the model as an endpoint: with real processes and a scripted model."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agent_fakes import TEMPLATE
from environment_fakes import ScriptedSampler, ask
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import deadline

from rlcore.agents.endpoint_forms import FORMS
from rlcore.agents.endpoint_http import (
    ROLES,
    Sampling,
    answered,
    read_request,
)
from rlcore.agents.endpoint_server import Answered, SessionServer
from rlcore.agents.renderers import check_template
from rlcore.config.compose import load
from rlcore.config.paths import absolute
from rlcore.environments import environment_maker
from rlcore.environments.play import Play
from rlcore.environments.protocol import Action
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import load_tokenizer
from rlcore.tasks import make_task
from rlcore.tasks.specs import EvalTaskSpec

FAKES = Path(__file__).with_name("agent_fakes.py")
EOS = 1
PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def chars():
    tokenizer = build_char_tokenizer("0123456789=+-")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids(text):
    return build_char_tokenizer("0123456789=+-").encode(text)


TURNS = [(*ids("12"), EOS), (*ids("3"), EOS)]


def endpoint_job(program, *, task="digits", max_len=512, **settings):
    settings = {"max_turns": 9, "step_timeout_s": 20.0, **settings}
    program = program if ":" in program else f"{FAKES}:{program}"
    spec = EnvironmentSpec(name="endpoint", args={"program": program}, **settings)
    return EnvironmentJob(spec, EvalTaskSpec(name=task), task, max_len=max_len, run_seed=3)


@pytest.fixture
def play():
    plays = []

    def run(program, *, count=1, turns=TURNS, **settings):
        tokenizer = settings.pop("tokenizer", None) or chars()
        asked = settings.pop("asked", None) or ask(count)
        sampler = settings.pop("sampler", ScriptedSampler)
        plays.append(Play(endpoint_job(program, **settings), tokenizer, ("bf16-0", "bf16")))
        sampler = sampler(plays[-1], [list(t) for t in turns])
        plays[-1].add(asked)
        return sampler.run(), sampler

    yield run
    for made in plays:
        made.close()


@pytest.mark.processes
@pytest.mark.parametrize("program", ["plain", "with_openai"])
def test_a_conversation_is_one_record_whose_sampled_tokens_stay(play, program):
    # "12" in two tokens, as the tokenizer writes it, and a turn that was cut off
    (played,), sampler = play(program, turns=[(*ids("12"), EOS), ids("345"), (*ids("6"), EOS)])
    assert played.score.status == "ok", played.score.error
    (record,) = played.parts
    question = make_task("digits", {}).item("train", 0).question
    told = ("2", "3") if program == "plain" else ("5", "5")
    text = f"+{question}-12<eos>+{told[0]}-345<eos>+{told[1]}-6<eos>"
    assert chars().decode(record.token_ids) == text
    assert record.sampled_ids.tolist() == [*ids("12"), EOS, *ids("345"), *ids("6"), EOS]
    prompts = [r.prompt_ids.tolist() for r in sampler.asked]
    assert prompts == [record.token_ids[:at].tolist() for at in record.turn_starts]
    assert record.token_version.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert played.score.parts["turns"] == 3 and played.score.parts["conversations"] == 1
    if program == "with_openai":  # the usage that it was told
        assert played.score.reward == len(record.token_ids)


@pytest.mark.processes
def test_conversations_at_once_are_parts_of_one_episode(play):
    (played,), _ = play("at_once", turns=[(*ids("4"), EOS)])
    assert played.score.status == "ok", played.score.error
    assert [len(r.turn_starts) for r in played.parts] == [2, 2, 2]
    texts = sorted(chars().decode(r.token_ids) for r in played.parts)
    assert texts == [f"+{i}-4<eos>+6-4<eos>" for i in "123"]
    assert [(r.part, r.parts) for r in played.parts] == [(0, 3), (1, 3), (2, 3)]
    assert {r.draw_id for r in played.parts} == {played.score.draw_id}


class SlowFor9(ScriptedSampler):
    """Answers the question 9 after `others` further calls."""

    others = 3

    def ready(self, waiting):
        if len(self.asked) > self.others:
            return waiting
        return [r for r in waiting if chars().decode(r.prompt_ids) != "+9-"]


class SlowUntilLast(SlowFor9):
    others = 2


@pytest.mark.processes
def test_a_conversation_goes_on_while_another_call_is_sampled(play):
    (played,), sampler = play("one_beside", turns=[(*ids("4"), EOS)], sampler=SlowFor9)
    assert played.score.status == "ok", played.score.error
    texts = sorted(chars().decode(r.token_ids) for r in played.parts)
    assert texts == ["+1-4<eos>+6-4<eos>+6-4<eos>", "+9-4<eos>"]
    assert len({r.seed for r in sampler.asked}) == 4


@pytest.mark.processes
def test_an_answer_that_nobody_read_is_counted_and_not_in_the_record(play):
    (played,), sampler = play("unread", turns=[(*ids("4"), EOS)], sampler=SlowUntilLast)
    assert played.score.status == "ok", played.score.error
    assert sorted(chars().decode(r.token_ids) for r in played.parts) == ["+1-4<eos>", "+2-4<eos>"]
    assert played.score.parts["unread_answers"] == 1 and played.score.parts["turns"] == 2
    assert len(sampler.asked) == 3


@pytest.mark.processes
def test_a_call_without_room_is_refused_alone(play):
    (played,), _ = play("too_long", max_len=60)
    assert played.score.status == "ok", played.score.error
    assert played.answer.finish_reason == "stop"
    assert played.score.parts["turns"] == 2 and played.score.parts["refused_calls"] == 2


def test_the_models_state_their_length(session):
    link = http.client.HTTPConnection("127.0.0.1", session.server_port, timeout=deadline(60))
    with contextlib.closing(link):
        link.request("GET", "/v1/models", headers={"Authorization": f"Bearer {session.api_key}"})
        with link.getresponse() as reply:
            assert json.loads(reply.read())["data"][0]["max_model_len"] == SAMPLING.max_len


@pytest.mark.processes
def test_a_stream_and_the_process_s_environment_serve_the_openai_client(play):
    item = make_task("digits", {}).item("train", 0)
    (played,), _ = play("streamed", turns=[(*ids(item.answer), EOS)])
    assert played.score.reward == 1.0, played.score.error


@pytest.mark.processes
@pytest.mark.parametrize(("program", "reward"), [("nothing", 0.0), ("own_words", 1.0)])
def test_the_task_grades_the_last_answer_or_the_program_s_words(play, program, reward):
    (played,), _ = play(program, turns=[(*ids("0"), EOS)])
    assert played.score.reward == reward, played.score.error


@pytest.mark.processes
def test_a_call_may_ask_for_fewer_tokens_than_the_run_allows(play):
    (played,), sampler = play("limited")
    assert played.score.status == "ok", played.score.error
    assert [r.sampling.max_new_tokens for r in sampler.asked] == [2, 6]
    assert len(played.parts) == 2  # the same question again is another conversation


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "turns", "finish"), [({"max_turns": 4}, 4, "stop"), ({"max_len": 40}, 5, "length")]
)
def test_a_limit_refuses_further_calls_and_the_program_still_rewards(play, settings, turns, finish):
    (played,), _ = play("until_refused", **settings)
    assert played.score.status == "ok", played.score.error
    assert played.score.reward == turns == played.score.parts["turns"]
    assert played.score.parts["by_turns"] == (finish == "stop")
    assert played.answer.finish_reason == finish
    assert played.score.parts["refused_calls"] == 2


@pytest.mark.processes
def test_what_the_run_does_not_do_is_refused_to_the_client(play):
    (played,), _ = play("refusals")
    assert played.score.status == "ok", played.score.error
    found = [played.score.parts[f"{i}"] for i in range(17)]
    assert found == [400] * 15 + [401, 404]
    assert played.score.parts["turns"] == 1


@pytest.mark.processes
def test_an_evaluation_samples_by_its_own_settings(play):
    asked = ask(1, group=-1, purpose="eval/5/digits/greedy", temperature=0.0)
    (played,), sampler = play("limited", asked=asked)
    assert played.score.status == "ok", played.score.error
    assert {r.sampling.temperature for r in sampler.asked} == {0.0}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("hangs", "timeout", "step passed environment.step_timeout_s="),
        ("leaves", "timeout", "passed environment.step_timeout_s="),
        ("never_calls", "timeout", "reset passed environment.step_timeout_s="),
        ("garbage", "error", "the program has ended without a call of the model"),
        ("raises", "error", "the program raised KeyError: 'what the program missed'"),
        ("exits", "error", "the program raised SystemExit: 3"),
        ("rewards_turns", "error", "rewards turns"),
        ("rewards_tokens", "error", "a program rewards whole episodes"),
    ],
)
def test_a_program_that_fails_costs_its_own_episode(play, program, status, words):
    done, _ = play(program, count=2, step_timeout_s=deadline(3))
    for played in done:
        assert (played.score.status, played.score.reward) == (status, None)
        assert words in played.score.error


@pytest.mark.processes
@pytest.mark.parametrize("program", ["gives_up", "half_a_body", "too_late"])
def test_clients_that_come_and_go_leave_the_episode_whole(play, program):
    done, sampler = play(program, count=3)
    for played in done:
        assert played.score.status == "ok", played.score.error
        assert played.score.reward is not None
    assert not sampler.play._idle  # a program's process serves no other episode


@pytest.mark.processes
def test_tools_are_called_in_openai_s_form(play, smollm2):
    tokenizer = load_tokenizer(smollm2)
    said = [
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
        '<tool_call>{"name": "add", ',
        "It is 5.",
    ]
    turns = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
    (played,), _ = play("tools", turns=turns, tokenizer=tokenizer, max_len=2048)
    assert played.score.status == "ok", played.score.error
    assert (played.score.parts["calls"], played.score.parts["stops"]) == (1, 2)
    (record,) = played.parts
    assert record.sampled_ids.tolist() == [t for turn in turns for t in turn]
    text = tokenizer.decode(record.token_ids)
    assert "<|im_start|>tool\n5<|im_end|>" in text and "Go on." in text


@pytest.mark.processes
@pytest.mark.parametrize("example", [0, 1])
def test_the_documented_programs_play(play, smollm2, tmp_path, example):
    (tmp_path / "my_agent.py").write_text(EXAMPLES[example])
    tokenizer = load_tokenizer(smollm2)
    right = make_task("arithmetic", {}).item("train", 0).answer
    said = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in ("none", right)]
    (played,), _ = play(
        f"{tmp_path}/my_agent.py:run",
        task="arithmetic",
        turns=said,
        tokenizer=tokenizer,
        asked=[replace(r, prompt_id="arithmetic/train/0") for r in ask(1)],
    )
    assert played.score.reward == 1.0, played.score.error
    assert played.score.parts["turns"] == 2 and len(played.parts) == 1


@pytest.mark.processes
def test_seeds_and_samples_are_those_of_any_environment(play):
    (first, second), sampler = play("plain", count=2)
    assert first.score.draw_id != second.score.draw_id
    assert {r.seed for r in sampler.asked if r.sample_index == 0}.isdisjoint(
        {r.seed for r in sampler.asked if r.sample_index == 1}
    )
    assert np.array_equal(first.parts[0].token_ids, second.parts[0].token_ids)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (None, "environment.args.program is missing"),
        ("nowhere.py:run", "environment.args.program=nowhere.py:run cannot be loaded"),
        (f"{FAKES}:run", "has no run; choose one of:"),
        (f"{FAKES}:TEMPLATE", "is not a function"),
        (f"{FAKES}:wants", "requires answer_key, and a program is given item, base_url, api_key"),
    ],
)
def test_a_program_that_cannot_be_called_is_refused_in_a_sentence(program, words):
    spec = EnvironmentSpec(name="endpoint", args={"program": program} if program else {})
    with pytest.raises(UserError, match=re.escape(words)):
        environment_maker(spec, make_task("digits", {}))


def test_a_program_is_found_from_every_node(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["environment=endpoint", "model=smollm2", "environment.args.program=mine.py:run"]
    environment = absolute(load(["run_dir=DIR", *words])).environment
    assert environment.args == {"program": f"{tmp_path}/mine.py:run"}


def test_a_tokenizer_without_a_template_is_refused_in_a_sentence():
    spec = EnvironmentSpec(name="endpoint")
    with pytest.raises(UserError, match="needs a tokenizer with a chat template"):
        check_template(spec, build_char_tokenizer("01"), TemplateSpec())
    check_template(spec, chars(), TemplateSpec())
    check_template(EnvironmentSpec(name="task"), build_char_tokenizer("01"), TemplateSpec())


SAMPLING = Sampling(evaluates=False, temperature=1.0, top_p=1.0, stop=["x"], max_len=512)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("messages", "tools", "max_tokens", "stop", "temperature", "n", "stream"),
        *("stream_options", "input", "instructions", "prompt", "system", "tool_choice", "text"),
    ]
)
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"arguments": JSON, "name": JSON})}
)
MESSAGES = st.dictionaries(
    st.sampled_from(
        ["role", "content", "tool_calls", "tool_call_id", "name", "type", "call_id", "arguments"]
    ),
    JSON | st.sampled_from(ROLES) | st.lists(CALLS, max_size=2),
)
BODIES = st.one_of(
    st.binary(max_size=40),
    st.dictionaries(FIELDS, JSON | st.lists(MESSAGES, max_size=3)).map(
        lambda b: json.dumps(b).encode()
    ),
    st.sampled_from(
        [
            b"[" * 100_000,
            b'{"temperature": 1' + b"0" * 400 + b"}",
            b'{"max_tokens": 1' + b"0" * 5000 + b"}",
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
            b'"arguments": "' + b"[" * 100_000 + b'"}}]}]}',
        ]
    ),
)


@pytest.fixture(scope="module")
def session():
    def complete(asked, waits):
        read_request(asked, SAMPLING)
        action = Action("3", (), finish_reason="stop", tokens=(1, 1))
        return Answered(answered(action, 0), lambda read: None)

    server = SessionServer(complete, SAMPLING.max_len)
    yield server
    server.close()


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(FORMS)), BODIES)
def test_whatever_a_program_sends_is_answered_and_the_endpoint_goes_on(session, path, body):
    link = http.client.HTTPConnection("127.0.0.1", session.server_port, timeout=deadline(60))
    headers = {"Authorization": f"Bearer {session.api_key}"}
    with contextlib.closing(link):
        link.request("POST", path, body, headers)
        with link.getresponse() as reply:
            said = reply.read()
            assert reply.status in (200, 400)
            if reply.status == 400:
                assert json.loads(said)["error"]["message"]
        link.request("POST", "/v1/chat/completions", GOOD, headers)
        with link.getresponse() as reply:
            assert json.loads(reply.read())["choices"][0]["message"]["content"] == "3"


GOOD = json.dumps({"messages": [{"role": "user", "content": "1+2"}]}).encode()
