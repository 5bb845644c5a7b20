"""Tools of servers of the Model Context Protocol: a stand-in, and the package in an environment of
its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from timing import deadline

from rlcore.agents.mcp import McpTools, ServerFailed
from rlcore.environments import environment_maker
from rlcore.environments.protocol import Action, ToolCall
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.tasks import make_task

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
STAND_IN = f"{sys.executable} {HERE}/mcp_stand_in.py"
TASK = make_task("arithmetic", {})
ITEM = TASK.item("train", 0)


@pytest.fixture
def begun():
    made = []

    def make(**args):
        made.append(McpTools(TASK, **{"command": STAND_IN, **args}))
        return made[-1], made[-1].reset(ITEM, 0)

    yield make
    for environment in made:
        environment.close()


def called(environment, *calls):
    reply = environment.step(Action("", tuple(ToolCall(*call) for call in calls)))
    return [message["content"] for message in reply.messages]


def test_the_tools_of_a_server_are_shown_called_and_counted(begun):
    environment, opening = begun()
    names = [tool["function"]["name"] for tool in opening.tools]
    assert names == ["add", "fail", "draw", "end", "garbage"]
    assert opening.tools[0]["function"]["parameters"]["properties"]["a"] == {"type": "integer"}
    answers = called(
        environment, ("add", {"a": 2, "b": 3}), ("fail", {}), ("draw", {}), ("sub", {}), ("add", {})
    )
    assert answers[:2] == ["5", "Error: it is broken"]
    assert "only text is read" in answers[2] and "there is no tool sub" in answers[3]
    assert answers[4] == "Error: lacks 'a'"
    assert environment.step(Action(ITEM.answer)).over
    grade = environment.grade()
    assert grade.reward == 1.0
    assert (grade.parts["calls"], grade.parts["failed_calls"]) == (5.0, 4.0)


@pytest.mark.parametrize("name", ["end", "garbage"])
def test_a_server_that_ends_or_breaks_the_protocol_fails_the_episode(begun, name):
    environment, _ = begun()
    with pytest.raises(ServerFailed, match=r"environment\.args\.command"):
        called(environment, (name, {}))


def test_only_the_named_tools_are_shown(begun):
    environment, opening = begun(tools=["add"])
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    assert called(environment, ("fail", {}))[0].startswith("Error: there is no tool fail")
    with pytest.raises(UserError, match="the server has no sub; choose out of: add, fail"):
        begun(tools=["sub"])


def test_a_server_that_is_not_there_is_refused_in_a_sentence(begun):
    with pytest.raises(UserError, match="cannot be started"):
        begun(command="no-such-server --now")
    with pytest.raises(UserError, match=r"environment\.args\.command is missing"):
        environment_maker(EnvironmentSpec(name="mcp"), TASK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_of_the_package_in_an_environment_of_its_own(begun, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = [python, "-m", "pip", "install", "-q", "mcp>=2,<3"]
    installed = subprocess.run(install, check=False, timeout=deadline(300), capture_output=True)
    if installed.returncode:
        pytest.skip("the package mcp cannot be installed: no package registry is reached")
    environment, opening = begun(command=f"{python} {HERE}/mcp_real.py")
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "fail"]
    assert opening.tools[0]["function"]["description"] == "Add two numbers."
    answers = called(environment, ("add", {"a": 2, "b": 3}), ("fail", {}), ("add", {"a": "x"}))
    assert answers[0] == "5"
    assert all(answer.startswith("Error") for answer in answers[1:])
