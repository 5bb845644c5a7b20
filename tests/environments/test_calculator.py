"""The calculator: calls as text and as tool calls, the grade, and the worked episodes."""

import pytest

from rlcore.agents.renderers import worked_episode
from rlcore.config.compose import load
from rlcore.environments import environment_maker
from rlcore.environments.protocol import Action, ToolCall
from rlcore.environments.python_tool import Calculator, calculate
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.tasks import make_task
from rlcore.tasks.specs import EvalTaskSpec

ARGS = {"ops": "*", "min_digits": 2, "max_digits": 2}
TASK = make_task("arithmetic", ARGS)
ITEM = TASK.item("train", 0)


def begun(**args):
    environment = Calculator(TASK, **args)
    return environment, environment.reset(ITEM, 3)


def test_a_turn_that_begins_with_the_sign_is_computed_and_the_next_one_graded():
    game, opening = begun(plain=True)
    assert not opening.tools and opening.messages[0]["content"] == ITEM.question
    reply = game.step(Action(f"={ITEM.question[:-1]}"))
    assert reply.messages[0]["content"] == f"{ITEM.answer}=" and not reply.over
    assert game.step(Action("=12*")).messages[0]["content"] == "="
    assert game.step(Action(ITEM.answer)).over
    grade = game.grade()
    assert grade.reward == 1.0
    assert grade.parts == {"correct": 1.0, "calls": 2.0, "failed_calls": 1.0}


def test_a_chat_model_calls_a_tool():
    game, opening = begun()
    assert opening.tools[0]["function"]["name"] == "calculate"
    calls = ToolCall("calculate", {"expression": "12 * -3"}), ToolCall("calculate", {})
    computed, failed = game.step(Action("", calls)).messages
    assert computed["content"] == "-36" and failed["content"].startswith("Error: TypeError")
    assert game.step(Action("0")).over and game.grade().reward == 0.0


@pytest.mark.parametrize(
    ("text", "value"), [("17+5", "22"), ("5-17", "-12"), ("-3--4", "1"), ("99 * 99", "9801")]
)
def test_sums_differences_and_products_are_computed(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text", ["", "1", "1*", "2**9", "1" * 16 + "*1", "__import__('os')", "1/2"]
)
def test_nothing_else_is_computed(text):
    with pytest.raises(ValueError, match="is not two whole numbers"):
        calculate(text)


def test_the_warm_up_calls_the_tool_in_the_share_that_is_taught():
    spec = load(["run_dir=DIR", "experiment=tools_quickstart"]).environment
    task = EvalTaskSpec(name="arithmetic", args=ARGS)
    job = EnvironmentJob(spec, task, "arithmetic", max_len=128)
    tokenizer = build_char_tokenizer(TASK.alphabet())
    make, called = environment_maker(spec, TASK), 0
    for i in range(200):
        item = TASK.item("train", i)
        ids, sampled = worked_episode(job, make(), item, tokenizer)
        text = tokenizer.decode(ids)
        question, answer = item.question, item.answer
        calls = f"{question}={question[:-1]}<eos>{answer}={answer}<eos>"
        assert text in (calls, f"{question}{answer}<eos>")
        called += text == calls
        assert sampled.sum() == len(tokenizer.encode(text)) - len(question) - (
            len(answer) + 1 if text == calls else 0
        )
    assert 15 <= called <= 50  # of 200, at 0.15


def test_a_share_is_refused_that_is_none():
    with pytest.raises(UserError, match="taught must be a share"):
        environment_maker(
            load(["run_dir=DIR", "experiment=tools_quickstart"]).environment.model_copy(
                update={"args": {"taught": 2}}
            ),
            TASK,
        )
