"""A game that reads what the model says, in a confined process."""

from __future__ import annotations

import socket

import pytest
from environment_fakes import make_job
from timing import deadline

from rlcore.environments.episode_processes import EnvironmentServer

pytestmark = pytest.mark.processes


@pytest.fixture
def ask():
    """Calls of an episode of `Evaluating`, in order."""
    server = EnvironmentServer(make_job("Evaluating"))
    link = server.open()
    link.socket.settimeout(deadline(20))

    def ask(name, **arguments):
        link.call(name, **arguments)
        while (answer := link.receive()) is None:
            pass
        return answer

    yield ask
    link.kill()
    server.close()


def say(ask, text):
    turn = {"tool_calls": [], "finish_reason": "stop", "reasoning": "", "whole": text, "tokens": []}
    return ask("step", text=text, **turn)


def test_turns_are_evaluated_as_arithmetic(ask):
    assert ask("reset", prompt_id="digits/train/0", seed=1)["once"] is True
    assert say(ask, "2 + 3 * abs(-4)")["messages"][0]["content"] == "14"
    assert "NameError" in say(ask, "environment")["error"]
    assert ask("grade")["reward"] == 1.0


@pytest.mark.parametrize("kind", ["file", "connection", "process", "frames"])
def test_a_turn_that_would_be_executed_ends_the_episode_without_reward(ask, tmp_path, kind):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        texts = {
            "file": f"open({str(tmp_path / 'written')!r}, 'w')",
            "connection": f"__import__('socket').create_connection(('127.0.0.1', {port}))",
            "process": "__import__('os').system('true')",
            "frames": "__import__('sys')._getframe(1).f_locals['self']",
        }
        ask("reset", prompt_id="digits/train/0", seed=1)
        assert say(ask, texts[kind])["over"] is True
        grade = ask("grade")
        assert (grade["reward"], grade["parts"]) == (0.0, {"correct": 0.0, "executed": 1.0})
    assert not (tmp_path / "written").exists()
