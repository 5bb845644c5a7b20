"""The process that environments come from: `python -m rlcore.environments.server <socket fd>`.

It builds the task and imports the environment once, and then forks a child for every episode that
is played at once, so that an instance is alone in its process and starts in milliseconds. Over the
control socket come first the settings, answered by {"ready": true} or {"fatal": sentence}; then
datagrams: "new" with the child's end of a link, and "kill PID". A child answers JSON lines on its
link, and ends when the link does. Nothing of an environment runs in this process itself."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rlcore.environments import environment_maker
from rlcore.environments.protocol import Action, Environment, Opening, Reply, ToolCall
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.tasks import make_task, parse_prompt_id
from rlcore.tasks.grades import as_grade
from rlcore.tasks.grading_worker import (
    POLL_S,
    adopt_orphans,
    children,
    die_with_parent,
    end,
    end_descendants,
)

MAX_ERROR = 300  # characters
MAX_TEXT = 1 << 16  # characters of a message that leave the process; tokens are counted later
CUT = " [cut: {} more characters]"
MAX_DATAGRAM = 1 << 16


def main(fd: int) -> None:
    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)
    # Until the start is over: later, the thread that started this process may end before it.
    die_with_parent(signal.SIGKILL)
    first = control.recv(MAX_DATAGRAM)
    if not first:
        return
    settings = json.loads(first)
    try:
        spec = EnvironmentSpec(**settings["environment"])
        task = make_task(settings["task"], settings["task_args"], label=settings["label"])
        make = environment_maker(spec, task)
    except UserError as error:
        control.send(json.dumps({"fatal": str(error)}).encode())
        return
    die_with_parent(0)
    gc.collect()
    gc.freeze()  # so that children share these pages
    control.send(b'{"ready": true}')
    ForkServer(control, task, make, spec).run()


class ForkServer:
    """Forks children and ends them."""

    def __init__(
        self,
        control: socket.socket,
        task: Task,
        make: Callable[[], Environment],
        spec: EnvironmentSpec,
    ) -> None:
        self._control = control
        self._task = task
        self._make = make
        self._spec = spec
        self._children: set[int] = set()  # process ids

    def run(self) -> None:
        """Until the other end of the control socket is closed; then every child is killed, with
        all that it started."""
        adopt_orphans()
        while self._take():
            self._reap()
            end(children() - self._children)  # started by a child that has ended
        for pid in self._children:
            _kill(pid)
        end_descendants()

    def _take(self) -> bool:
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._control, select.POLLIN)
        if not poll.poll(1000 * POLL_S):
            return True
        data, fds, _, _ = socket.recv_fds(self._control, MAX_DATAGRAM, 1)
        if not data:
            return False
        word, _, pid = data.decode().partition(" ")
        if word == "new":
            self._fork(fds[0])
        elif int(pid) in self._children:
            _kill(int(pid))
        return True

    def _fork(self, link: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid:
            os.close(link)
            self._children.add(pid)
            return
        # Nothing may return into the server's code.
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            adopt_orphans()  # until it ends: then they are the server's
            if os.getppid() == server:
                self._control.close()
                self._serve(socket.socket(fileno=link))
        finally:
            os._exit(0)

    def _reap(self) -> None:
        for pid in list(self._children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what it has started and left behind
                self._children.discard(pid)

    def _serve(self, link: socket.socket) -> None:
        """In the child: one episode after the other, each with an instance of its own."""
        limit = self._spec.memory_mib << 20
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        environment: Environment | None = None
        own = os.getpid()
        link.sendall(_line({"pid": os.getpid()}))
        for line in link.makefile("rb"):
            call = json.loads(line)
            try:
                if environment is None or call["call"] == "reset":
                    environment = self._make()
                answer = _line({**self._answer(environment, call), "id": call["id"]})
            except BaseException as error:  # sys.exit() in an environment is a failed score too
                text = " ".join(str(error).split())
                what = f"{call['call']} raised {type(error).__name__}: {text}"
                answer = _line({"error": what[:MAX_ERROR], "id": call["id"]})
            if os.getpid() != own:  # an environment has forked: the first process answers
                os._exit(0)
            link.sendall(answer)
            if call["call"] == "grade":
                end_descendants()  # nothing that an episode started is there in the next one

    def _answer(self, environment: Environment, call: dict[str, Any]) -> dict[str, Any]:
        if call["call"] == "reset":
            _, split, index = parse_prompt_id(call["prompt_id"])
            hosts = getattr(environment, "hosts_program", False)
            if hosts:
                environment.told(call["sampling"])  # type: ignore[attr-defined]
            opening = environment.reset(self._task.item(split, index), call["seed"])
            limit = {"max_tokens": opening.max_tokens, "hosts_program": hosts}
            return {**_opening(opening), **limit}
        if call["call"] == "step":
            calls = tuple(ToolCall(c["name"], c["arguments"]) for c in call["tool_calls"])
            told = {"finish_reason": call["finish_reason"], "tokens": tuple(call["tokens"])}
            return _reply(environment.step(Action(call["text"], calls, **told)))
        if "limit" in call and hasattr(environment, "limited"):
            environment.limited(call["limit"])
        grade = as_grade(environment.grade(), by_turn=True)
        if hasattr(environment, "close"):
            environment.close()
        return asdict(grade)


def _opening(opening: Opening) -> dict[str, Any]:
    return {"messages": _texts(opening.messages), "tools": list(opening.tools)}


def _reply(reply: Reply) -> dict[str, Any]:
    opening, max_tokens = reply.opening, reply.max_tokens
    if opening is not None:
        max_tokens = opening.max_tokens
    return {
        "messages": _texts(reply.messages),
        "over": bool(reply.over),
        "parts": {str(name): float(value) for name, value in reply.parts.items()},
        "reward": None if reply.reward is None else float(reply.reward),
        "opening": None if opening is None else _opening(opening),
        "conversation": reply.conversation,
        "max_tokens": max_tokens,
    }


def _line(message: dict[str, Any]) -> bytes:
    """Raises TypeError or ValueError for what is no JSON."""
    return json.dumps(message, allow_nan=False).encode() + b"\n"


def _texts(messages: Any) -> list[dict[str, Any]]:
    """Messages whose text is short enough to be read by the process that plays the episode."""
    out = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str) or not isinstance(message["role"], str):
            raise TypeError("a message has a role and a content, both of them text")
        if len(content) > MAX_TEXT:
            content = content[:MAX_TEXT] + CUT.format(len(content) - MAX_TEXT)
        out.append({**message, "content": content})
    return out


def _kill(pid: int) -> None:
    """A child with everything that it started: it leads a session of its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its session yet
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
