"""The Python tool: a session over turns, what it answers, and the task's own grade at the end."""

import pytest
from timing import deadline

from rlcore.environments.protocol import Action, ToolCall
from rlcore.environments.python_tool import NOTHING, PythonTool
from rlcore.errors import UserError
from rlcore.tasks import make_task

pytestmark = pytest.mark.processes


@pytest.fixture
def begun():
    task = make_task("arithmetic", {})
    environment = PythonTool(task, timeout_s=deadline(1))
    environment.item = task.item("train", 0)
    opening = environment.reset(environment.item, 0)
    assert opening.tools[0]["function"]["name"] == "python"
    yield environment
    environment.close()


def test_names_stay_and_earlier_output_is_not_repeated(begun):
    assert begun.python("x = 20\nprint('first')\n'shown'") == "first\n'shown'"
    assert begun.python("def twice(n):\n    return 2 * n") == NOTHING
    assert begun.python("twice(x) + 2") == "42"


def test_a_program_that_fails_says_why_and_leaves_nothing_behind(begun):
    assert begun.python("y = 1\nprint('so far')\n1 / 0") == (
        "so far\nZeroDivisionError: division by zero"
    )
    assert begun.python("y") == "NameError: name 'y' is not defined"
    assert "SyntaxError" in begun.python("def f(:")
    assert begun.python("while True: pass").startswith("Error: time limit of")
    assert "PermissionError" in begun.python("import socket; socket.socket()")
    assert begun.python("raise SystemExit") == "SystemExit"
    assert begun.python("1 + 1") == "2"


def test_the_first_turn_without_a_call_is_the_answer(begun):
    reply = begun.step(Action("", (ToolCall("python", {"code": "6 * 7"}), ToolCall("shell", {}))))
    assert not reply.over
    assert [m["content"] for m in reply.messages] == [
        "42",
        "Error: there is no tool shell; choose one of: python.",
    ]
    assert begun.step(Action(begun.item.answer)).over
    grade = begun.grade()
    assert grade.reward == 1.0
    assert (grade.parts["programs"], grade.parts["failed_programs"]) == (1.0, 0.0)


def test_an_episode_that_a_limit_ends_has_no_answer(begun):
    begun.step(Action("", (ToolCall("python", {"code": "1 / 0"}),)))
    assert begun.grade().reward == 0.0 and begun.grade().parts["failed_programs"] == 1.0


def test_a_confinement_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"environment\.args\.confinement=none"):
        PythonTool(make_task("arithmetic", {}), confinement="none")
