"""Classes written for TRL's `environment_factory`: tools, rows, rewards, and what is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from environment_fakes import ScriptedSampler, ask
from trl_fakes import Counter

from rlcore.config.compose import load
from rlcore.config.paths import absolute
from rlcore.environments import environment_maker
from rlcore.environments.play import Play
from rlcore.environments.protocol import Action, ToolCall
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.text import load_tokenizer
from rlcore.tasks import make_task
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.types import Item

FAKES = Path(__file__).with_name("trl_fakes.py")
PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
ITEM = Item("digits/train/0", "Count.", "3", {"step_size": 2})


def maker(name, **args):
    spec = EnvironmentSpec(name=f"{FAKES}:{name}", args=args)
    return environment_maker(spec, make_task("digits", {}))


def begun(name, item=ITEM, seed=0, **args):
    environment = maker(name, **args)()
    return environment, environment.reset(item, seed)


def call(environment, *calls):
    reply = environment.step(Action("", tuple(ToolCall(*c) for c in calls)))
    assert not reply.over and [m["role"] for m in reply.messages] == ["tool"] * len(calls)
    return [m["content"] for m in reply.messages]


def test_public_methods_are_tools_with_the_schema_that_trl_shows():
    _, opening = begun("Counter")
    tools = {t["function"]["name"]: t["function"] for t in opening.tools}
    assert sorted(tools) == ["add", "later", "parts"]
    assert tools["add"]["description"] == "Add to the counter."
    assert tools["add"]["parameters"]["properties"] == {
        "amount": {"type": "integer", "description": "What is added."},
        "times": {"type": "number", "description": "How often."},
    }
    assert tools["add"]["parameters"]["required"] == ["amount"]


def test_reset_receives_the_row_and_its_text_follows_the_question():
    _, opening = begun("Counter")
    assert opening.messages == [{"role": "user", "content": "Count. In steps of 2 to 3."}]
    _, opening = begun("Silent", rewards=[f"{FAKES}:total"])
    assert opening.messages == [{"role": "user", "content": "Count."}]


def test_a_conversation_is_the_row_s_prompt_and_text_follows_its_last_message():
    told = {"role": "system", "content": "Be brief."}
    asked = {"role": "user", "content": "Count."}
    item = replace(ITEM, messages=(told, asked))
    _, opening = begun("Prompted", item)
    assert opening.messages == [told, {"role": "user", "content": "Count. (system, user)"}]
    assert asked == {"role": "user", "content": "Count."}


def test_calls_are_checked_and_the_model_reads_what_is_wrong():
    environment, _ = begun("Counter")
    answers = call(
        environment,
        ("add", {"amount": 2}),
        ("add", {"amount": 1, "times": 2}),
        ("add", {"amount": "2"}),
        ("add", {}),
        ("add", {"amount": 1, "much": 1}),
        ("add", {"amount": -1}),
        ("_hidden", {}),
        ("get_reward", {}),
        ("later", {}),
        ("parts", {}),
    )
    assert answers == [
        "2.0",
        "4.0",
        "Error: ValueError: argument amount: Input should be a valid integer",
        "Error: TypeError: missing a required argument: 'amount'",
        "Error: TypeError: got an unexpected keyword argument 'much'",
        "Error: ValueError: nothing is taken off",
        "Error: there is no tool _hidden; choose one of: add, later, parts.",
        "Error: there is no tool get_reward; choose one of: add, later, parts.",
        "{'count': 4.0}",
        "one two",
    ]
    assert environment.step(Action("Done.")).over
    grade = environment.grade()
    assert grade.reward == 4.0
    assert grade.parts == {"Counter": 4.0, "tool_calls": 10.0, "failed_calls": 6.0}
    environment.close()


def test_an_instance_plays_one_episode():
    environment, _ = begun("Counter")
    call(environment, ("add", {"amount": 1}))
    environment.reset(ITEM, 0)
    assert environment.grade().reward == 0.0


def test_what_a_class_draws_is_the_same_for_a_group():
    draws = []
    for seed in (1, 1, 2):
        random.seed()
        _, opening = begun("Drawn", seed=seed)
        draws.append(opening.messages[0]["content"])
    assert draws[0] == draws[1] != draws[2]


def test_reward_functions_see_the_environment_and_what_was_said():
    functions = [f"{FAKES}:total", f"{FAKES}:said", f"{FAKES}:nothing"]
    environment, _ = begun("Counter", rewards=functions)
    call(environment, ("add", {"amount": 1}))
    environment.step(Action("Done."))
    grade = environment.grade()
    assert grade.reward == 1.0 + 10.0 + 3.0
    assert {n: grade.parts[n] for n in ("Counter", "total", "said")} == {
        "Counter": 1.0,
        "total": 10.0,
        "said": 3.0,  # the call, its answer, the last turn
    }
    assert "nothing" not in grade.parts


@pytest.mark.parametrize(
    ("functions", "words"),
    [(["nothing"], "no reward was given: nothing returned None"), (["many"], "not a list of one")],
)
def test_rewards_that_mean_nothing_fail_the_score(functions, words):
    environment, _ = begun("Silent", rewards=[f"{FAKES}:{name}" for name in functions])
    with pytest.raises(ValueError, match=words):
        environment.grade()


def test_images_are_not_text():
    environment, _ = begun("Painter")
    with pytest.raises(ValueError, match="content of type image"):
        environment.step(Action("", (ToolCall("paint", {}),)))


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        (
            "Silent",
            {},
            "lacks step(self, action: Action) -> Reply, grade(self) -> Grade; an environment",
        ),
        ("Counter", {"size": 3}, "TRL builds such a class without arguments"),
        ("Undocumented", {}, "guess cannot be described to the model"),
        ("Untyped", {}, "guess cannot be described to the model"),
        ("Needy", {}, "reset requires target, and a row of task digits has prompt, question"),
        ("Silent", {"rewards": f"{FAKES}:total"}, "is not accepted: give a list of functions"),
        ("Silent", {"rewards": [f"{FAKES}:totally"]}, "has no totally"),
        ("Silent", {"rewards": [f"{FAKES}:Counter"]}, "is not a function"),
        ("Silent", {"rewards": [f"{FAKES}:ids"]}, "requires completion_ids, which only TRL's"),
        ("Silent", {"rewards": [f"{FAKES}:total"] * 2}, "has a name that another reward has"),
        ("CHOICES", {}, "is a dictionary of environments"),
    ],
)
def test_what_cannot_be_mapped_is_refused_in_a_sentence(name, args, words):
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        maker(name, **args)
    assert str(refused.value).startswith("environment.")


def test_a_class_with_all_of_rlcore_s_methods_is_its_own():
    assert type(maker("Own")()).__name__ == "Own"


def test_reward_functions_are_found_from_every_node(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["environment=mine.py:Game", "environment.args.rewards=[mine.py:good,package:bad]"]
    args = absolute(load(["run_dir=DIR", *words])).environment.args
    assert args == {"rewards": [f"{tmp_path}/mine.py:good", "package:bad"]}


def test_the_class_itself_is_untouched():
    assert Counter().__dict__ == {"count": 0.0}


@pytest.mark.processes
def test_the_documented_class_plays_in_its_process(smollm2, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "guess.py").write_text(code)
    tokenizer = load_tokenizer(smollm2)
    spec = EnvironmentSpec(name=f"{tmp_path}/guess.py:Guess")
    job = EnvironmentJob(spec, EvalTaskSpec(name="arithmetic"), "digits", max_len=2048)
    right = int(make_task("arithmetic", {}).item("train", 0).answer)
    numbers = [right + 1, f'"{right}"', right]
    form = '<tool_call>{{"name": "guess", "arguments": {{"number": {}}}}}</tool_call>'
    turns = [*(form.format(n) for n in numbers), "Found."]
    play = Play(job, tokenizer, ("bf16-0", "bf16"))
    try:
        play.add(ask(1, max_new_tokens=64))
        ids = [[*tokenizer.encode(t), tokenizer.eos_token_id] for t in turns]
        (played,) = ScriptedSampler(play, ids).run()
    finally:
        play.close()
    assert played.score.reward == 1.0, played.score.error
    parts = played.score.parts
    assert (parts["turns"], parts["tool_calls"], parts["failed_calls"]) == (4.0, 3.0, 1.0)
    (record,) = played.parts
    text = tokenizer.decode(record.token_ids[~record.sampled].tolist())
    assert "The number you believe to be right." in text and "Call guess until" in text
    assert "too high" in text and "should be a valid integer" in text
