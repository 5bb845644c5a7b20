"""The process that runs the tests: with its own builtins, apart from the program that they test.

The names under test are proxies. A call is sent to the program as plain data, and its result comes
back as plain data of exact types, compared here. Other values stay opaque objects of the program,
which are equal to nothing and neither true nor false. Expected values never leave this process.
"""

from __future__ import annotations

import builtins
import itertools
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from . import layouts, outputs
from .confinement import LIBC, PR_SET_PDEATHSIG, Confinement
from .program import ARRAY, import_numpy, prepare
from .values import LONGEST_ITERATOR, Channel, Closed, decode, encode, receive_line, send_line

RECVMSG = 47  # x86_64: how a descriptor arrives
ENDED = "the program ended before its tests"
# Exceptions that mean something to the machinery of Python would end loops and generators of the
# tests as if they were complete; a program that raises one has failed.
CONTROL = (StopIteration, StopAsyncIteration)


class NotConfined(BaseException):
    """The program's process failed before it ran anything, which is not the program's fault."""


class Remote:
    """An object of the program. Opaque, except for the operations below, which the program does.

    `own`: the tests made it, out of a class that they test. Its operators and comparisons with
    other objects of the program are the class's; of any other object they would let a returned
    value decide its own comparison.
    """

    __slots__ = ("_judge", "_number", "_own")

    def __init__(self, judge: Judge, number: int) -> None:
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_own", False)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return _judge(self).call(self, args, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in SHOWN:
            raise AttributeError(name)
        found = _ask(self, "get", name)
        if _judge(self).tests_class(self):  # a member of an enumeration
            _own(found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "put", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "remove", key)

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask(self, "iterate")
        if type(iterator) is not Remote:
            raise TypeError("the program's object has no items")
        while item := _ask(iterator, "next"):
            yield item[0]

    def __next__(self) -> Any:
        item = _ask(self, "next")
        if not item:
            raise StopIteration
        return item[0]

    def __len__(self) -> int:
        return _ask(self, "length")

    def __str__(self) -> str:
        return _ask(self, "text")

    def __repr__(self) -> str:
        return _ask(self, "shown")

    def __enter__(self) -> Any:
        return _ask(self, "enter")

    def __exit__(self, *raised: object) -> None:
        _ask(self, "get", "__exit__")(None, None, None)

    def __bool__(self) -> bool:
        if not _is_own(self):
            raise TypeError("an object of the program is neither true nor false")
        return _plain(_ask(self, "truth"), bool)

    def __contains__(self, item: Any) -> bool:
        if not _is_own(self):
            return any(item == found for found in self)
        return _plain(_ask(self, "contains", item), bool)

    def __hash__(self) -> int:
        if not _is_own(self):
            raise TypeError("an object of the program was hashed: only plain data can be")
        return _plain(_ask(self, "hash"), int)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and _plain(_ask(value, "is_instance", self), bool)

    def __subclasscheck__(self, value: Any) -> bool:
        return type(value) is Remote and _plain(_ask(value, "is_subclass", self), bool)

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        if self is other and _is_own(self):
            return True
        return _compare("eq", self, other)

    def __ne__(self, other: object) -> bool:
        if other is None:
            return True
        return _compare("ne", self, other)


# Attributes with such names that the tests may read.
SHOWN = frozenset({"__name__", "__doc__", "__dict__", "__class__", "__annotations__"})


def _judge(remote: Remote) -> Judge:
    return object.__getattribute__(remote, "_judge")


def _is_own(value: Any) -> bool:
    return type(value) is Remote and object.__getattribute__(value, "_own")


def _own(value: Any) -> Any:
    if type(value) is Remote:
        object.__setattr__(value, "_own", True)
    return value


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program's object gave no {kind.__name__}")
    return value


def _ask(remote: Remote, verb: str, *arguments: Any) -> Any:
    return _judge(remote).ask(verb, remote, *arguments)


def _compare(name: str, left: Remote, right: Any) -> bool:
    """A comparison of two objects of the program, one of them made by the tests."""
    both = type(left) is Remote and type(right) is Remote
    if not (both and (_is_own(left) or _is_own(right))):
        raise TypeError("an object of the program was compared: only plain data can be")
    if name == "eq" and _judge(left).equals_anything(left, right):
        raise TypeError("an object of the program is equal to anything")
    return _plain(_judge(left).ask("operate", name, left, right), bool)


def _operator(name: str, swapped: bool = False) -> Any:
    """A method of Remote: an operator of an object that the tests made."""

    def operate(self: Remote, *others: Any) -> Any:
        if not any(map(_is_own, (self, *others))):
            raise TypeError("an object of the program was computed with: only plain data can be")
        values = (*others, self) if swapped else (self, *others)
        return _own(_judge(self).ask("operate", name, *values))

    return operate


def _ordering(name: str) -> Any:
    return lambda self, other: _compare(name, self, other)


for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _ordering(_name))
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
):
    _called = f"{_name}_" if _name in ("and", "or") else _name
    setattr(Remote, f"__{_name}__", _operator(_called))
    setattr(Remote, f"__r{_name}__", _operator(_called, swapped=True))
for _name in ("neg", "pos", "invert", "abs"):
    setattr(Remote, f"__{_name}__", _operator(_name))


class Raised(Exception):
    """Base of the classes that stand for exception classes of the program; `said`: its text."""

    said: str | None = None

    def __str__(self) -> str:
        return super().__str__() if self.said is None else self.said


class Judge:
    """Runs one set of tests against one program."""

    def __init__(self, program: Channel, names: dict[str, Any], nodes: tuple[str, ...]) -> None:
        self._program = program
        self._names = names
        self._nodes = nodes
        self._classes = {name: names[name] for name in nodes}
        self._ended = ""  # why no more can be asked
        self._remotes: dict[int, Remote] = {}
        self._raises: dict[int, type] = {}  # classes that stand for the program's exceptions
        self._lent: list[Any] = []  # functions of the tests that the program may call
        self._tested: list[Any] = []  # classes that the tests test
        self._effects = Effects()
        self._keeps = False  # whether used calls change their arguments, too
        self.calls = 0  # that reached the program
        self.clean = True  # whether this process may run further tests

    def run(self, job: dict[str, Any]) -> str:
        """The reason why the program did not pass; "" if it did. Raises Closed if it ended,
        NotConfined if it never began."""
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
        except (Closed, NotConfined):
            raise
        except MemoryError:
            self.clean = False  # it is unknown which object holds the memory
            return "MemoryError"
        except BaseException as error:  # whatever the tests raise is a failure of the program
            return f"{type(error).__name__}: {error}"[:300]
        return ""

    def _test(self, job: dict[str, Any]) -> None:
        exec(compile(job["imports"], "<imports>", "exec", dont_inherit=True), self._names)
        if job["numpy"]:
            import_numpy(self._names)
        if job["helpers"]:  # which call what the reference defines
            scope = dict(self._names)
            exec(compile(job["reference"], "<reference>", "exec", dont_inherit=True), scope)
            self._names |= {name: scope[name] for name in job["helpers"]}
        self._keeps = job["effects"]
        code = layouts.compiled(job["tests"])
        if job["script"]:
            self._names["answer"] = self.answer
        defined = self._reply("defined", job["names"])
        for name in job["names"]:
            self._names.pop(name, None)
            if name in defined:
                self._names[name] = self._decode(defined[name])
            elif hasattr(builtins, name):  # which must not stand in for it
                raise NameError(f"name {name!r} is not defined")
        self._tested = [self._names.get(name) for name in job["classes"]]
        layouts.run(code, self._names, affect=self._affect, settle=self._effects.settle)

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Have the program carry out a request; raises the program's exception."""
        return self._decode(self._reply(verb, *(self._encode(a) for a in arguments))["value"])

    def call(self, function: Remote, args: Any, keywords: Any, *, at_once: bool = False) -> Any:
        """Call a function of the program. Its changes to mutable arguments are made here after the
        comparison that the call is part of, or `at_once`."""
        self.calls += 1
        keeps = at_once or self._keeps
        sent = [self._encode(a) for a in (function, args, keywords)]
        reply = self._reply("call", *sent, keeps)
        value = self._decode(reply["value"])
        if keeps:
            given = [*args, *keywords.values()]
            frame = None if at_once else sys._getframe(2)
            for argument, after in zip(given, reply["changed"], strict=True):
                for content in after:
                    self._effects.add(frame, argument, self._decode(content))
        return _own(value) if self.tests_class(function) else value

    def answer(self, text: str) -> str:
        """The output of a program that reads `text`. Raises outputs.Failed if it has none."""
        self.calls += 1
        self._program.send(["answer", text])
        reply = self._receive()
        if "fault" in reply:
            raise NotConfined(reply["fault"])
        if "failed" in reply:
            raise outputs.Failed(reply["failed"])
        return reply["value"]

    def tests_class(self, value: Any) -> bool:
        """Return whether it is a class of the program that the tests test."""
        return any(value is tested for tested in self._tested)

    def equals_anything(self, left: Remote, right: Remote) -> bool:
        """Return whether an object is equal to a thing that no class can know."""
        for value in (left, right):
            try:
                if self.ask("operate", "eq", value, os.urandom(8).hex()) is not False:
                    return True
            except Closed:
                raise
            except Exception:  # a class may refuse to compare itself with a text
                continue
        return False

    def _affect(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        """A call whose value is discarded: only its changes to its arguments count."""
        if type(function) is not Remote:
            return function(*args, **keywords)
        return self.call(function, args, keywords, at_once=True)

    def _reply(self, *request: Any) -> Any:
        self._program.send(request)
        while "borrowed" in (reply := self._receive()):
            self._program.send(self._call_back(*reply["borrowed"]))
        if "raised" not in reply:
            return reply if "value" in reply and request[0] != "defined" else reply["value"]
        raise self._exception(*reply["raised"])

    def _call_back(self, number: int, args: Any, keywords: Any) -> list[Any]:
        """The program calls a function that the tests have given it."""
        try:
            value = self._lent[number](*self._decode(args), **self._decode(keywords))
            return ["returned", self._encode(value)]
        except Exception as error:
            return ["raised", type(error).__name__, str(error)[:300]]

    def _exception(self, kind: Any, text: str, args: list[Any], own: dict[str, Any]) -> Exception:
        """Return the program's exception; closes the program for one that is not its error."""
        raised = self._decode(kind)
        if not issubclass(raised, Exception) or issubclass(raised, CONTROL):
            raise self._close(f"the program raised {raised.__name__}")
        try:
            error = raised(*(self._decode(a) for a in args))
        except TypeError:  # it wants other arguments than it keeps
            error = raised.__new__(raised, text)
        for name, value in own.items():
            vars(error)[name] = self._decode(value)
        if isinstance(error, Raised):
            error.said = str(text)
        return error

    def _receive(self) -> Any:
        if self._ended:
            raise Closed(self._ended)
        try:
            return self._program.receive()
        except Closed as error:
            raise self._close(ENDED) from error
        except ValueError as error:
            raise self._close(f"the program sent what is not an answer: {error}") from error

    def _close(self, why: str) -> Closed:
        self._ended = why
        return Closed(why)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer, self._nodes)

    def _refer(self, value: Any) -> dict[str, Any]:
        if type(value) is Remote:
            return {"x": object.__getattribute__(value, "_number")}
        for number, kind in self._raises.items():
            if value is kind:
                return {"x": number}
        if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
            items = list(itertools.islice(value, LONGEST_ITERATOR + 1))
            if len(items) > LONGEST_ITERATOR:
                raise TypeError("an endless iterator of the tests cannot be given to the program")
            return {"I": [self._encode(item) for item in items]}
        if callable(value) and not any(value is kept for kept in KEPT):
            self._lent.append(value)
            return {"k": len(self._lent) - 1}
        raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the program")

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve, self._classes)

    def _resolve(self, tag: str, content: Any) -> Any:
        if tag == "x":
            if type(content) is not int:
                raise TypeError("an object of the program has no number")
            return self._remotes.setdefault(content, Remote(self, content))
        if tag == "k":
            return self._lent[content]
        if tag == "M":
            return _library_exception(*content)
        if tag == "e":
            return self._own_exception(*content)
        raise ValueError(f"an unknown tag {tag!r}")

    def _own_exception(self, number: int, name: str, bases: list[Any]) -> type:
        if number not in self._raises:
            found = [kind for kind in map(self._decode, bases) if _is_exception(kind)]
            ours = tuple(found or [BaseException])
            mixed = ours if any(issubclass(b, Raised) for b in ours) else (*ours, Raised)
            if not all(issubclass(base, Exception) for base in ours):
                mixed = ours
            self._raises[number] = type(str(name), mixed, {})
        return self._raises[number]


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _library_exception(module: str, name: str) -> type:
    """An exception class of a module that the tests could have named."""
    kind = getattr(sys.modules.get(module), name, Exception)
    library = module.partition(".")[0] in sys.stdlib_module_names
    return kind if library and _is_exception(kind) else Exception


# Would run or change what the program chooses, if it could call them here.
KEPT = (eval, exec, compile, open, __import__, getattr, setattr, delattr, input, breakpoint)


class Effects:
    """Changes by calls to arguments of the tests, until the comparison they are in is over.

    `assert f(xs) == sorted(xs)` compares with what `xs` held, whatever `f` does to it.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Any, Any]] = []

    def add(self, frame: Any, old: Any, new: Any) -> None:
        """`frame`: of the tests, which made the call; None: nothing else reads its value."""
        if frame is None:
            _become(old, new)
        else:
            self._waiting.append((frame, old, new))

    def settle(self, value: Any = None) -> Any:
        """Apply all effects except of calls that a caller's comparison still needs; returns
        the value."""
        if self._waiting:
            callers = []
            frame = sys._getframe(1).f_back
            while frame is not None:
                callers.append(frame)
                frame = frame.f_back
            waiting, self._waiting = self._waiting, []
            for entry in waiting:
                if any(entry[0] is caller for caller in callers):
                    self._waiting.append(entry)
                else:
                    _become(*entry[1:])
        return value


def _become(old: Any, new: Any) -> None:
    """Give a mutable argument the content that the program left in its copy."""
    if type(old) is not type(new):
        return
    if type(old) is list:
        for i, (was, now) in enumerate(zip(old, new)):
            if type(was) is type(now) and isinstance(was, list | dict | set):
                _become(was, now)
                new[i] = was
        old[:] = new
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif type(old).__name__ == ARRAY:
        if old.shape == new.shape:
            old[...] = new
    elif hasattr(old, "__dict__"):
        vars(old).update(vars(new))


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
    """{"passed", "why", "calls": that reached the program, "ended": whether the program did,
    "clean": whether this process may go on}."""
    judge = Judge(Channel(fd), names, nodes)
    try:
        why = judge.run(job)
    except Closed as closed:
        why = str(closed)
    except NotConfined as error:
        return {"fault": str(error)}
    verdict = {"passed": not why, "why": why, "calls": judge.calls}
    return verdict | {"ended": why == ENDED, "clean": judge.clean}


def confine(settings: dict[str, Any]) -> None:
    """No folder, no limit of CPU seconds (it serves many programs), messages with descriptors."""
    limits = {"RLIMIT_AS": settings["limits"]["memory_mib"] << 20, "RLIMIT_FSIZE": 0}
    limits |= {"RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
    layers, packages = settings["layers"], settings["packages"]
    confinement = Confinement(layers, limits, folder=None, packages=packages, calls=[RECVMSG])
    os.chdir("/")
    confinement.apply(confinement.rules())
