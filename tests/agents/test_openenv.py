"""OpenEnv: against a stand-in of its server, and against openenv-core where it is installed.

RLCORE_OPENENV_PYTHON names the Python of an environment with openenv-core.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from timing import free_port, listens, wait_until

from rlcore.environments import environment_maker
from rlcore.environments.protocol import Action
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.tasks import make_task

HERE = Path(__file__).parent
REAL = os.environ.get("RLCORE_OPENENV_PYTHON")


@pytest.fixture(scope="module", params=["stand_in", "real"])
def url(request):
    """The address of a server, in a process and an environment of its own."""
    if request.param == "real" and not REAL:
        pytest.skip("RLCORE_OPENENV_PYTHON names no Python with openenv-core")
    port = free_port()
    python = REAL if request.param == "real" else sys.executable
    server = subprocess.Popen([python, str(HERE / f"openenv_{request.param}.py"), str(port)])
    wait_until(lambda: listens(port) or server.poll() is not None, 120, "the server to start")
    assert server.poll() is None
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def game(url, **args):
    given = {"url": url, "action": "guess", "shown": "told", **args}
    spec = EnvironmentSpec(name="openenv", args=given)
    return environment_maker(spec, make_task("digits", {}))()


def item():
    return make_task("digits", {}).item("train", 0)


@pytest.mark.processes
def test_a_session_is_an_episode_and_its_rewards_are_those_of_its_turns(url):
    first, second = game(url, prompt="Play: {question}"), game(url, shown=None)
    opening = first.reset(item(), 7)
    assert opening.messages == [
        {"role": "user", "content": f"Play: {item().question}\n\nGuess from 0 to 4."}
    ]
    (shown,) = second.reset(item(), 13).messages
    assert '"told": "Guess from 0 to 4."' in shown["content"]
    replies = [first.step(Action(text)) for text in ("1", "2")]
    assert [(r.reward, r.over) for r in replies] == [(-0.25, False), (1.0, True)]
    assert replies[0].messages == [{"role": "user", "content": "wrong"}]
    assert second.step(Action("3")).over  # an instance of its own
    for played in (first, second):
        assert (played.grade().reward, played.grade().parts) == (0.0, {"finished": 1.0})
        played.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"action": "message"}, "answers step with VALIDATION_ERROR"),
        ({"shown": "text"}, "environment.args.shown=text is not a field of the observation"),
    ],
)
def test_fields_that_the_server_has_not_fail_the_episode(url, args, words):
    wrong = game(url, **args)
    with pytest.raises((RuntimeError, KeyError), match=words):
        wrong.reset(item(), 7)
        wrong.step(Action("1"))
    wrong.close()


@pytest.mark.processes
def test_a_server_that_is_full_says_so(url):
    opened = [game(url), game(url)]
    for one in opened:
        one.reset(item(), 7)
    full = game(url)
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
        full.reset(item(), 7)
    for one in (*opened, full):
        one.close()


def test_no_server_and_no_reward_are_failed_scores():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = game(f"http://127.0.0.1:{probe.getsockname()[1]}")
        with pytest.raises(ConnectionError, match=r"args\.url=ws://.* does not answer"):
            nobody.reset(item(), 7)
    with pytest.raises(ValueError, match="has given no reward"):
        nobody.grade()


@pytest.mark.parametrize("url", ["http://example.com:8000", "https://example.com", "8000", "ws://"])
def test_an_address_elsewhere_is_refused_in_a_sentence(url):
    with pytest.raises(UserError, match=re.escape(f"environment.args.url={url} is not accepted")):
        game(url)


@pytest.mark.processes
def test_a_server_elsewhere_plays_where_it_is_asked_for(url, monkeypatch):
    """A name that is not this machine's, though the server is on it."""
    resolved, found = socket.getaddrinfo, []

    def resolve(host, *args, **options):
        found.append(host)
        return resolved("127.0.0.1" if host == "games.example" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setenv("OPENENV_TOKEN", "mine")
    elsewhere = url.replace("127.0.0.1", "games.example")
    with pytest.raises(UserError, match=r"environment\.args\.remote=true has it play"):
        game(elsewhere)
    played = game(elsewhere, remote=True)
    played.reset(item(), 7)
    assert played.step(Action("2")).reward == 1.0 and "games.example" in found
    played.close()


def test_a_secure_address_is_a_secure_socket():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = game(f"https://127.0.0.1:{probe.getsockname()[1]}")
        with pytest.raises(ConnectionError, match=r"args\.url=wss://.* does not answer"):
            nobody.reset(item(), 7)
