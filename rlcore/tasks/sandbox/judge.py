"""The process that runs the tests: with its own builtins, apart from the program that they test.

The names under test are proxies. A call crosses to the program as plain data, and what comes back
is plain data of exact types, compared here. What cannot cross stays an opaque object of the
program, which is equal to nothing and neither true nor false. Expected values never leave this
process.
"""

from __future__ import annotations

import ast
import builtins
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from .confinement import LIBC, PR_SET_PDEATHSIG, Confinement
from .program import import_numpy, prepare
from .values import Channel, Closed, decode, encode, receive_line, send_line

RECVMSG = 47  # x86_64: how a descriptor arrives
AFFECT = "__affect__"
ENDED = "the program ended before its tests"
# Exceptions that mean something to the machinery of Python would end loops and generators of the
# tests as if they were complete; a program that raises one has failed.
CONTROL = (StopIteration, StopAsyncIteration)


class ProgramError(Exception):
    """The program raised an exception of a type that is none of Python's own."""


class NotConfined(Exception):
    """The program's process failed before it ran anything: that says nothing about the program."""


class Remote:
    """An object of the program. Opaque, except for the operations below, which the program does."""

    __slots__ = ("_judge", "_number")

    def __init__(self, judge: Judge, number: int) -> None:
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return _ask(self, "call", args, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "put", key, value)

    def __iter__(self) -> Iterator[Any]:
        items = _ask(self, "items")
        if type(items) is not list:
            raise TypeError("the program's object has no items")
        return iter(items)

    def __len__(self) -> int:
        return _ask(self, "length")

    def __str__(self) -> str:
        return _ask(self, "text")

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        raise TypeError("an object of the program was compared: only plain data can be")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def _ask(remote: Remote, verb: str, *arguments: Any) -> Any:
    return object.__getattribute__(remote, "_judge").ask(verb, remote, *arguments)


class Judge:
    """Runs one set of tests against one program."""

    def __init__(self, program: Channel, names: dict[str, Any], nodes: tuple[str, ...]) -> None:
        self._program = program
        self._names = names
        self._nodes = nodes
        self._classes = {name: names[name] for name in nodes}
        self._ended = ""  # why no more can be asked
        self.clean = True  # whether this process may run further tests

    def run(self, job: dict[str, Any]) -> str:
        """Why the program did not pass; "" if it did. Raises Closed if it ended, NotConfined if it
        never began."""
        try:
            self._program.receive()  # "confined", before any code of the program's
        except Closed as error:
            raise NotConfined("the program's process ended before it was confined") from error
        self._program.send([job["program"], job["names"], job["numpy"]])
        if self._receive() != "ready":
            return "the program did not run to its end"
        try:
            self._test(job)
            # Tests may swallow exceptions: an end in the middle of them is no success.
            self._reply("defined", [])
        except Closed:
            raise
        except MemoryError:
            self.clean = False  # what holds the memory is unknown
            return "MemoryError"
        except BaseException as error:  # whatever the tests raise is a failure of the program
            return f"{type(error).__name__}: {error}"[:300]
        return ""

    def _test(self, job: dict[str, Any]) -> None:
        if job["numpy"]:
            import_numpy(self._names)
        tree = _Effects().visit(ast.parse(job["tests"]))
        code = compile(ast.fix_missing_locations(tree), "<tests>", "exec", dont_inherit=True)
        defined = self._reply("defined", job["names"])
        for name in job["names"]:
            self._names.pop(name, None)
            if name in defined:
                self._names[name] = self._decode(defined[name])
            elif hasattr(builtins, name):  # which must not stand in for it
                raise NameError(f"name {name!r} is not defined")
        self._names[AFFECT] = self._affect
        exec(code, self._names)

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Have the program do something; raises what it raised."""
        return self._decode(self._reply(verb, *(self._encode(a) for a in arguments)))

    def _affect(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        """A call whose value is discarded: what counts is what it does to its arguments."""
        if type(function) is not Remote:
            return function(*args, **keywords)
        sent = (self._encode(a) for a in (function, args, keywords))
        changed = self._reply("affect", *sent)
        for argument, after in zip(args, changed, strict=True):
            if after is not None:
                _become(argument, self._decode(after))
        return None

    def _reply(self, *request: Any) -> Any:
        self._program.send(request)
        reply = self._receive()
        if "raised" not in reply:
            return reply["value"]
        name, text = reply["raised"]
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            if issubclass(kind, Exception) and kind not in CONTROL:
                raise kind(str(text))
            raise self._close(f"the program raised {name}")
        raise ProgramError(f"{name}: {text}")

    def _receive(self) -> Any:
        if self._ended:
            raise Closed(self._ended)
        try:
            return self._program.receive()
        except Closed as error:
            raise self._close(ENDED) from error
        except ValueError as error:
            raise self._close(f"the program sent what is no answer: {error}") from error

    def _close(self, why: str) -> Closed:
        self._ended = why
        return Closed(why)

    def _encode(self, value: Any) -> Any:
        return encode(value, _number, self._nodes)

    def _decode(self, data: Any) -> Any:
        return decode(data, lambda number: Remote(self, number), self._classes)


def _number(value: Any) -> int:
    if type(value) is not Remote:
        raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the program")
    return object.__getattribute__(value, "_number")


def _become(old: Any, new: Any) -> None:
    """Give a mutable argument the content that the program left in its copy."""
    if type(old) is list and type(new) is list:
        old[:] = new
    elif type(old) is type(new) and isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif type(old) is type(new) and hasattr(old, "__dict__"):
        vars(old).update(vars(new))


class _Effects(ast.NodeTransformer):
    """Calls whose value is discarded go through `_affect`."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call):
            call.args.insert(0, call.func)
            call.func = ast.Name(AFFECT, ast.Load())
        return node


def main(fd: int) -> None:
    """Judge programs, one at a time, until the parent closes the socket."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    link = socket.socket(fileno=fd)
    settings, _ = receive_line(link, 0)
    sys.set_int_max_str_digits(0)
    names, nodes = prepare(settings)
    try:
        confine(settings)
        answer: dict[str, Any] = {"ready": True}
    except OSError as error:
        answer = {"fault": str(error)}
    send_line(fd, answer)
    given = dict(vars(builtins))
    while True:
        job, fds = receive_line(link, 1)
        if job is None:
            return
        verdict = _verdict(job, fds[0], dict(names), nodes)
        os.close(fds[0])
        # Tests that change Python itself must not change it for the tests after them.
        if given != vars(builtins) or sys.stdout is not sys.__stdout__:
            verdict["clean"] = False
        send_line(fd, verdict)


def _verdict(
    job: dict[str, Any], fd: int, names: dict[str, Any], nodes: tuple[str, ...]
) -> dict[str, Any]:
    """{"passed", "why", "ended": whether the program did, "clean": whether this process may go
    on}."""
    judge = Judge(Channel(fd), names, nodes)
    try:
        why = judge.run(job)
    except Closed as closed:
        why = str(closed)
    except NotConfined as error:
        return {"fault": str(error)}
    return {"passed": not why, "why": why, "ended": why == ENDED, "clean": judge.clean}


def confine(settings: dict[str, Any]) -> None:
    """No folder, no limit of CPU seconds (it serves many programs), messages with descriptors."""
    limits = {"RLIMIT_AS": settings["limits"]["memory_mib"] << 20, "RLIMIT_FSIZE": 0}
    limits |= {"RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
    layers, packages = settings["layers"], settings["packages"]
    confinement = Confinement(layers, limits, folder=None, packages=packages, calls=[RECVMSG])
    os.chdir("/")
    confinement.apply(confinement.rules)
