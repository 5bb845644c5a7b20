"""The process that environments come from: `python -m rlcore.environments.server <socket fd>`.

It builds the task and imports the environment once. It then forks a child for every episode that is
played at once, so that an instance is alone in its process and starts in milliseconds. Over the
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
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from rlcore.environments import environment_maker
from rlcore.environments.protocol import Action, Environment, Opening, Reply, ToolCall
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.rooms import from_room
from rlcore.tasks import make_task, parse_prompt_id
from rlcore.tasks.grades import as_grade
from rlcore.tasks.grading_worker import (
    POLL_S,
    adopt_orphans,
    children,
    die_with_parent,
    end,
    end_descendants,
    resident,
)
from rlcore.tasks.isolation.confine import confine
from rlcore.tasks.isolation.executed import ArithmeticOnly
from rlcore.types import Grade

if TYPE_CHECKING:
    from rlcore.agents.endpoint import Endpoint, ProgramCalls

MAX_ERROR = 300  # characters
MAX_TEXT = 1 << 16  # characters of a message that leave the process; tokens are counted later
CUT = " [cut: {} more characters]"
MAX_DATAGRAM = 1 << 16
MEMORY_S = 1.0  # between two looks at the memory of children


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
        self._looked = 0.0  # at their memory; monotonic seconds
        # folders of theirs, which go when they end
        self._folders = tempfile.TemporaryDirectory(prefix="rlcore-environments-")
        os.environ[from_room("program_root")] = self._folders.name

    def run(self) -> None:
        """Until the other end of the control socket is closed; then every child is killed, with
        all that it started."""
        adopt_orphans()
        while self._take():
            self._reap()
            self._check_memory()
            end(children() - self._children)  # started by a child that has ended
        for pid in self._children:
            _kill(pid)
        end_descendants()
        self._folders.cleanup()

    def _check_memory(self) -> None:
        """End children that hold, with all that they have started, more than
        `environment.memory_mib`, and say so before their links close."""
        now = time.monotonic()
        if now - self._looked < MEMORY_S or not self._children:
            return
        self._looked, most = now, self._spec.memory_mib
        for pid, size in resident(self._children).items():
            if size >> 20 > most:
                why = (
                    f"the environment's processes held {size >> 20} MiB, more than "
                    f"environment.memory_mib={most}"
                )
                with contextlib.suppress(BlockingIOError):  # nobody reads: the episode is over
                    said = json.dumps({"pid": pid, "why": why}).encode()
                    self._control.send(said, socket.MSG_DONTWAIT)
                _kill(pid)

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
                from_room("put_away")(pid, self._spec.args.get("keep"))

    def _serve(self, link: socket.socket) -> None:
        """In the child: one episode after the other, each with its own instance."""
        limit = self._spec.memory_mib << 20
        # Of each process, what it may write to: an allocation that is too large fails at once.
        # Address space that is only reserved, as JavaScript and Go do, is not counted.
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        environment: Environment | None = None
        rule: ArithmeticOnly | None = None  # of a confined environment
        own = os.getpid()
        link.sendall(_line({"pid": os.getpid()}))
        calls = AskedCalls(link)
        while (call := calls.next()) is not None:
            try:
                if environment is None or call["call"] == "reset":
                    environment = self._make()
                    calls.overlap(environment)
                elif rule is None and getattr(environment, "confined", False):
                    rule = confine()  # before it reads what the model says
                answer = _line({**self._answered(environment, call, rule), "id": call["id"]})
            except BaseException as error:  # sys.exit() in an environment is a failed score too
                text = " ".join(str(error).split())
                what = f"{call['call']} raised {type(error).__name__}: {text}"
                answer = _line({"error": what[:MAX_ERROR], "id": call["id"]})
            if os.getpid() != own:  # an environment has forked: the first process answers
                os._exit(0)
            link.sendall(answer)
            if call["call"] == "grade" and rule is None:  # confined, it has started nothing
                end_descendants()  # nothing that an episode started is there in the next one

    def _answered(
        self, environment: Environment, call: dict[str, Any], rule: ArithmeticOnly | None
    ) -> dict[str, Any]:
        """The answer to a call. A turn that a confined environment would have executed ends the
        episode, with reward 0."""
        try:
            answer = self._answer(environment, call)
        except Exception:  # of any kind: the package's own code
            if rule is None or not rule.why:
                raise
            answer = _reply(Reply(over=True))
        if rule is not None and rule.why and call["call"] == "grade":
            answer = {**asdict(Grade(0.0, {"correct": 0.0, "executed": 1.0})), "unread": []}
        return answer

    def _answer(self, environment: Environment, call: dict[str, Any]) -> dict[str, Any]:
        if call["call"] == "reset":
            _, split, index = parse_prompt_id(call["prompt_id"])
            hosts = getattr(environment, "hosts_program", False)
            item = self._task.item(split, index)
            if hosts:
                program = cast("Endpoint", environment)
                program.told(call["sampling"])
                return {**_calls(program.reset(item, call["seed"])), "hosts_program": True}
            opening = environment.reset(item, call["seed"])
            limit = {"max_tokens": opening.max_tokens, "hosts_program": False}
            once = getattr(environment, "confined", False)
            return {**_opening(opening), **limit, "once": once}
        if call["call"] == "step":
            calls = tuple(ToolCall(c["name"], c["arguments"]) for c in call["tool_calls"])
            told = {name: call[name] for name in ("finish_reason", "reasoning", "whole")}
            action = Action(call["text"], calls, tokens=tuple(call["tokens"]), **told)
            if getattr(environment, "hosts_program", False):
                return _calls(cast("Endpoint", environment).step(action, call["conversation"]))
            return _reply(environment.step(action))
        if call["call"] == "refuse":
            refused = cast("Endpoint", environment).limited(call["conversation"], call["limit"])
            return _calls(refused)
        if call["call"] == "listen":
            return _calls(cast("Endpoint", environment).listen())
        grade = as_grade(environment.grade(), by_turn=True)
        unread = getattr(environment, "unread", ())
        if hasattr(environment, "close"):
            environment.close()
        return {**asdict(grade), "unread": list(unread)}


class AskedCalls:
    """The calls that a child is asked for, in order."""

    def __init__(self, link: socket.socket) -> None:
        self._lines = link.makefile("rb")
        self._waiting: deque[dict[str, Any]] = deque()  # read ahead, while one is being answered
        self._arrived = threading.Condition()
        self._ahead = False

    def overlap(self, environment: Environment) -> None:
        """From now on tell an environment that hosts a program of calls that arrive while it still
        answers one."""
        if not getattr(environment, "hosts_program", False):
            return
        program = cast("Endpoint", environment)
        program.listens(lambda: bool(self._waiting))
        if not self._ahead:
            self._ahead = True
            reader = threading.Thread(
                target=self._read, args=(program.interrupt,), name="calls", daemon=True
            )
            reader.start()

    def _read(self, interrupt: Callable[[], None]) -> None:
        for line in self._lines:
            with self._arrived:
                self._waiting.append(json.loads(line))
                self._arrived.notify()
            interrupt()
        os._exit(0)  # nobody waits for an answer any more

    def next(self) -> dict[str, Any] | None:
        """The next call; None: there is none to come."""
        if not self._ahead:
            line = self._lines.readline()
            return json.loads(line) if line else None
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting)
            return self._waiting.popleft()


def _calls(made: ProgramCalls) -> dict[str, Any]:
    calls = []
    for reply in made.calls:
        asked = _reply(reply)
        calls.append({n: asked[n] for n in ("messages", "opening", "conversation", "max_tokens")})
    return {"calls": calls, "over": made.over}


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
    """Raises TypeError or ValueError for what is not JSON."""
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
    """A child with everything that it started: it leads its own session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its session yet
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
