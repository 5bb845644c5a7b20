"""The process of an untrusted program: runs it, then answers calls of the functions that it
defined.

Nothing here is trusted by the judge: once the program runs it may change any of this. It only
decides which values reach the judge, as any program does.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import copy
import importlib.util
import itertools
import operator
import os
import sys
import traceback
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .values import Channel, Closed, decode, encode

MENTIONED = "numpy"  # imported for programs that mention it: too slow for every one
MUTABLE = (list, dict, set, bytearray, deque)
ARRAY = "ndarray"
DEEPEST = 20  # bases above an exception class that are described
NODES = ("ListNode", "TreeNode")
SCRIPT, MODULE = "main.py", "solution"


class Program:
    """The names that the program sees and defines, and its objects that the judge numbers."""

    def __init__(self, channel: Channel, names: dict[str, Any], nodes: tuple[str, ...]) -> None:
        self._channel = channel
        self._names = names
        self._nodes = nodes
        self._node_classes = {name: names[name] for name in nodes}
        self._told = False  # one traceback is enough
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id: the list keeps them alive
        self._verbs: dict[str, Callable[..., Any]] = {
            "get": getattr,
            "set": setattr,
            "item": lambda container, key: container[key],
            "put": lambda container, key, value: container.__setitem__(key, value),
            "remove": lambda container, key: container.__delitem__(key),
            "iterate": iter,
            "length": len,
            "text": str,
            "shown": repr,
            "truth": bool,
            "hash": hash,
            "contains": lambda container, item: item in container,
            "is_instance": isinstance,
            "is_subclass": issubclass,
            "enter": lambda context: context.__enter__(),
            "operate": lambda name, *values: getattr(operator, name)(*values),
        }

    def run(self) -> None:
        """Run the source that the judge sends, then serve until the judge has ended."""
        self._channel.send("confined")
        source, names, numpy = self._channel.receive()
        if numpy:
            import_numpy(self._names)
        # its name stays: what a program does as a script is not done
        sys.modules["__main__"] = sys.modules[MODULE]
        for name in names:  # the preamble must not define the names that are tested
            self._names.pop(name, None)
        exec(compile(source, "<program>", "exec", dont_inherit=True), self._names)
        self._reply("ready")
        while True:
            self._reply(self._serve(*self._channel.receive()))

    def _reply(self, message: Any) -> None:
        sys.stdout.flush()  # before the judge may have all that it needs
        self._channel.send(message)

    def _serve(self, verb: str, *arguments: Any) -> dict[str, Any]:
        try:
            if verb == "defined":
                found = [name for name in arguments[0] if name in self._names]
                return {"value": {name: self._encode(self._names[name]) for name in found}}
            values = [self._decode(a) for a in arguments]
            if verb == "call":
                return self._call(arguments, *values)
            if verb == "next":  # [item], or [] at the end
                return {"value": [self._encode(item) for item in itertools.islice(values[0], 1)]}
            return {"value": self._encode(self._verbs[verb](*values))}
        except Closed:
            raise
        except BaseException as error:  # any exception of the program is its answer
            if not self._told:
                traceback.print_exc()
            self._told = True
            return self._raised(error)

    def _call(
        self, sent: Sequence[Any], function: Any, args: Any, keywords: Any, effects: bool
    ) -> dict[str, Any]:
        """The value, and with `effects` every mutable argument that the call has changed."""
        if not effects:
            return {"value": self._encode(function(*args, **keywords))}
        # plain lists are decoded as they were sent
        before = copy.deepcopy([*sent[1]["t"], *(pair[1] for pair in sent[2]["d"])])
        value = self._encode(function(*args, **keywords))
        given = [*args, *keywords.values()]
        return {"value": value, "changed": [self._changed(*pair) for pair in zip(given, before)]}

    def _changed(self, value: Any, before: Any) -> list[Any]:
        if not isinstance(value, MUTABLE) and type(value).__name__ not in (*self._nodes, ARRAY):
            return []
        after = self._encode(value)
        return [] if after == before else [after]

    def _raised(self, error: BaseException) -> dict[str, Any]:
        own = {str(k): self._encode(v) for k, v in vars(error).items()}
        args = [self._encode(a) for a in error.args]
        return {"raised": [self._class(type(error)), str(error)[:300], args, own]}

    def _class(self, kind: type, depth: int = 0) -> dict[str, Any]:
        """An exception class: Python's own by name, the program's by number, with its bases."""
        if getattr(builtins, kind.__name__, None) is kind:
            return {"B": kind.__name__}
        module = sys.modules.get(kind.__module__)
        library = kind.__module__.partition(".")[0] in sys.stdlib_module_names
        if library and getattr(module, kind.__name__, None) is kind:
            return {"M": [kind.__module__, kind.__name__]}
        bases = [b for b in kind.__bases__ if issubclass(b, BaseException)]
        known = [self._class(b, depth + 1) for b in bases] if depth < DEEPEST else []
        return {"e": [self._number(kind), kind.__name__, known]}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer, self._nodes)

    def _refer(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Borrowed):
            return {"k": value.number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._class(value)
        return {"x": self._number(value)}

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _decode(self, data: Any) -> Any:
        # a program's own class of that name takes the place of the preamble's
        given = self._node_classes
        classes = {name: self._names.get(name, given[name]) for name in self._nodes}
        return decode(data, self._resolve, classes)

    def _resolve(self, tag: str, content: Any) -> Any:
        return Borrowed(self, content) if tag == "k" else self._objects[content]

    def borrow(self, number: int, args: Any, keywords: Any) -> Any:
        """Have the judge call a function of the tests, and serve its requests meanwhile."""
        self._reply({"borrowed": [number, self._encode(args), self._encode(keywords)]})
        while True:
            verb, *content = self._channel.receive()
            if verb == "returned":
                return self._decode(content[0])
            if verb == "raised":
                raise getattr(builtins, content[0], RuntimeError)(content[1])
            self._reply(self._serve(verb, *content))


class Borrowed:
    """A function of the tests that was given to the program: the judge calls it."""

    def __init__(self, program: Program, number: int) -> None:
        self._program = program
        self.number = number

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._program.borrow(self.number, args, keywords)


def prepare(settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(names that the preamble defines, node classes among them). Lets the packages be
    found that programs may import."""
    sys.meta_path.append(Packages(settings["packages"]))
    sys.argv[:] = [SCRIPT]
    sys.orig_argv[:] = [sys.executable, SCRIPT]
    builtins.help = _sitebuiltins._Helper()  # of an interpreter that has site-packages
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    # a module, made before any fork: names that a fork copies are memory that it does not share
    module = sys.modules[MODULE] = types.ModuleType(MODULE)
    names = vars(module)
    exec(compile(settings["preamble"], "<preamble>", "exec"), names)
    return names, tuple(name for name in NODES if name in names)


class Packages:
    """Finds the packages named, and no others: site-packages does not exist here."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        folder = self._folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def import_numpy(names: dict[str, Any]) -> None:
    """Define numpy and np, if it is installed."""
    try:
        numpy = importlib.import_module(MENTIONED)
    except ImportError:  # not installed: programs that need it fail with that error
        return
    names.setdefault("numpy", numpy)
    names.setdefault("np", numpy)


def main(channel: Channel, names: dict[str, Any], nodes: tuple[str, ...]) -> None:
    """Run a program's process from start to end. Never returns."""
    try:
        Program(channel, names, nodes).run()
    except Closed:
        os._exit(0)
    except BaseException:  # of the program
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(1)
