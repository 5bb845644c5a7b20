"""The process that runs graders: `python -m rlcore.tasks.grading_worker <socket fd>`.

It exchanges JSON lines with `rlcore.tasks.scoring`. First comes {tasks, timeout_s, memory_mib},
answered by {"ready": true} or {"fatal": sentence}. Then comes a line with a list of [number of the
item, prompt id, response, number of its tokens, their texts]. It is answered by one line for every
item as it is done, with the item's number as "id". It dies with its parent, and loads neither
models nor tensors.

Its first process only watches the one that grades: it becomes the parent of the processes that
graders leave behind, in any session, and ends them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.tasks import make_task, parse_prompt_id
from rlcore.tasks.grades import as_grade, dense, wants_tokens
from rlcore.types import Grade, Item

EXIT_OUT_OF_MEMORY = 77
MAX_ERROR = 300  # characters
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.5
END_S = 10.0  # for what was killed to end
KEPT_ITEMS = 256
KEPT_CHARACTERS = 2000  # of an item: a grader's memory is limited
Verdict = dict[str, Any]


def die_with_parent(sign: int) -> None:
    """Have the kernel send a signal when the thread that started this process ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, sign)


def adopt_orphans() -> None:
    """Become the parent of processes that this process's children leave behind, in any session."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Process ids of the children of this process; none where the kernel does not list them."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def resident(roots: Iterable[int]) -> dict[int, int]:
    """Resident bytes of processes, each with all that it has started; pages that several of them
    share count in each."""
    parents, sizes = {}, {}
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended
            fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
            parents[int(entry)], sizes[int(entry)] = int(fields[1]), int(fields[21]) * page
    totals = dict.fromkeys(roots, 0)
    for pid, size in sizes.items():
        above, steps = pid, 0
        while above not in totals and above in parents and steps < len(parents):
            above, steps = parents[above], steps + 1
        if above in totals:
            totals[above] += size
    return totals


def end(pids: Iterable[int]) -> None:
    """End children; their children become children of this process, if it adopts orphans."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def end_descendants() -> None:
    """End all processes that this one has started, in a process that adopts orphans."""
    deadline = time.monotonic() + END_S
    while (left := children()) and time.monotonic() < deadline:
        end(left)
        time.sleep(0.01)


def watched(fd: int) -> None:
    """Go on in a child. This process stays, ends the processes that the child leaves behind, and at
    last all that it started; it ends with the child's exit code, or on SIGTERM. `fd`: used by the
    child alone."""
    told = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    watcher, worker = os.getpid(), os.fork()
    if not worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, told)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != watcher:
            os._exit(0)
        return
    os.close(fd)
    status, ended = 0, 0
    while not ended:
        got = signal.sigtimedwait(told, POLL_S)
        if got is not None and got.si_signo == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)  # one that is about to end has the code it chose
            _, status = os.waitpid(worker, 0)
            break
        end(children() - {worker})
        ended, status = os.waitpid(worker, os.WNOHANG)
    end_descendants()
    if os.WIFSIGNALED(status):
        # SIGTERM stays blocked: of a caller that reads the end of the child, it may be pending
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {os.WTERMSIG(status)})
        os.kill(watcher, os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


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
    watched(fd)
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
    own, graders = os.getpid(), _Graders(tasks, settings["timeout_s"])
    for line in lines:
        for number, *asked in json.loads(line):
            verdict = graders.verdict(*asked)
            if os.getpid() != own:  # a grader has forked: the first process answers
                os._exit(0)
            _send(link, {"id": number, **verdict})


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


class _Graders:
    """The tasks of this process, and the small problems of the last groups. The answers of a group
    are of one problem, which can take longer to make than an answer to grade."""

    def __init__(self, tasks: dict[str, Task], timeout_s: float) -> None:
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._wants_tokens: dict[str, bool] = {}  # by task
        self._items: dict[str, Item] = {}  # by prompt id

    def verdict(self, prompt_id: str, response: str, tokens: int, pieces: list[str]) -> Verdict:
        """A verdict in the words of JSON; whatever a grader raises becomes a status."""
        start = time.monotonic()
        try:
            # Set anew each time: a grader may have installed its own alarm.
            with _Alarm(self._timeout_s):
                grade = self._grade(prompt_id, response, pieces)
                reward, by_token = dense(grade, tokens)
            verdict: Verdict = {"status": "ok", "reward": reward, "parts": grade.parts}
            if by_token:
                verdict["token_rewards"] = by_token
            if grade.answer:
                verdict["answer"] = grade.answer
        except _Deadline:
            verdict = {"status": "timeout"}
        except MemoryError:
            # Earlier items may have used the memory up: a fresh process decides.
            os._exit(EXIT_OUT_OF_MEMORY)
        except BaseException as error:  # sys.exit() in a grader is a failed score too
            text = " ".join(str(error).split())
            verdict = {"status": "error", "error": f"{type(error).__name__}: {text}"[:MAX_ERROR]}
        seconds = time.monotonic() - start
        if verdict["status"] == "ok" and seconds > self._timeout_s:
            verdict = {"status": "timeout"}
        return {**verdict, "seconds": seconds}

    def _grade(self, prompt_id: str, response: str, pieces: list[str]) -> Grade:
        label, split, index = parse_prompt_id(prompt_id)
        task = self._tasks[label]
        if label not in self._wants_tokens:
            self._wants_tokens[label] = wants_tokens(task.grade)
        item = self._items.get(prompt_id)
        if item is None:
            item = task.item(split, index)
            self._keep(prompt_id, item)
        else:
            item = replace(item, meta={})  # of this answer alone: a grader may write into it
        further = {"tokens": pieces} if self._wants_tokens[label] else {}
        return as_grade(task.grade(item, response, **further))

    def _keep(self, prompt_id: str, item: Item) -> None:
        plain = type(item) is Item and not item.meta and not item.messages
        if plain and len(item.question) + len(item.answer) <= KEPT_CHARACTERS:
            if len(self._items) >= KEPT_ITEMS:
                self._items.clear()
            self._items[prompt_id] = item


if __name__ == "__main__":
    main(int(sys.argv[1]))
