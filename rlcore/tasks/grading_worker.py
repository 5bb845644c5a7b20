"""The process that runs graders: `python -m rlcore.tasks.grading_worker <socket fd>`.

It exchanges JSON lines with `rlcore.tasks.scoring`: first {tasks, timeout_s, memory_mib}, answered
by {"ready": true} or {"fatal": sentence}; then a line with a list of [number of the item, prompt
id, response, number of its tokens, their texts], answered by one line for every item as it is done,
with the item's number as "id". It dies with its parent, and loads neither models nor tensors."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.tasks import make_task, parse_prompt_id
from rlcore.tasks.grades import as_grade, dense, wants_tokens

EXIT_OUT_OF_MEMORY = 77
MAX_ERROR = 300  # characters
PR_SET_PDEATHSIG = 1


class _Deadline(BaseException):
    """Not an Exception, so that a grader's own `except Exception` does not swallow it."""


class _Alarm:
    """An interval timer that raises in the main thread while armed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._armed = False
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, signum: int, frame: object) -> None:
        if self._armed:
            raise _Deadline

    def __enter__(self) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *exc: object) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(fd: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(fd, False)  # a program that a grader starts must not keep the link open
    link = socket.socket(fileno=fd)
    lines = link.makefile("rb")
    first = lines.readline()
    if not first:  # the parent was gone before the death signal was set
        return
    settings = json.loads(first)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = settings["memory_mib"] * 2**20
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        tasks = {
            label: make_task(name, args, label=label)
            for label, (name, args) in settings["tasks"].items()
        }
    except UserError as error:
        _send(link, {"fatal": str(error)})
        return
    _send(link, {"ready": True})
    own = os.getpid()
    for line in lines:
        for number, *asked in json.loads(line):
            verdict = _verdict(tasks, asked, settings["timeout_s"])
            if os.getpid() != own:  # a grader has forked: the first process answers
                os._exit(0)
            _send(link, {"id": number, **verdict})


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def _verdict(tasks: dict[str, Task], asked: list[Any], timeout_s: float) -> dict[str, Any]:
    prompt_id, response, tokens, pieces = asked
    start = time.monotonic()
    try:
        # Set anew each time: a grader may have installed its own alarm.
        with _Alarm(timeout_s):
            label, split, index = parse_prompt_id(prompt_id)
            task = tasks[label]
            further = {"tokens": pieces} if wants_tokens(task.grade) else {}
            grade = as_grade(task.grade(task.item(split, index), response, **further))
            reward, by_token = dense(grade, tokens)
        verdict: dict[str, Any] = {"status": "ok", "reward": reward, "parts": grade.parts}
        if by_token:
            verdict["token_rewards"] = by_token
        if grade.answer:
            verdict["answer"] = grade.answer
    except _Deadline:
        verdict = {"status": "timeout"}
    except MemoryError:
        # Earlier items may have used the memory up: a fresh process will tell.
        os._exit(EXIT_OUT_OF_MEMORY)
    except BaseException as error:  # sys.exit() in a grader is a failed score too
        text = " ".join(str(error).split())
        verdict = {"status": "error", "error": f"{type(error).__name__}: {text}"[:MAX_ERROR]}
    seconds = time.monotonic() - start
    if verdict["status"] == "ok" and seconds > timeout_s:
        verdict = {"status": "timeout"}
    return {**verdict, "seconds": seconds}


if __name__ == "__main__":
    main(int(sys.argv[1]))
