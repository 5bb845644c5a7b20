"""The process of an untrusted program: runs it, then answers calls to what it defined.

Nothing here is trusted by the judge: once the program runs it may change any of this. It only
decides which values reach the judge, as any program does.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from .values import Channel, Closed, decode, encode

MENTIONED = "numpy"  # imported for programs that mention it: too slow for every one
MUTABLE = (list, dict, set)
NODES = ("ListNode", "TreeNode")


class Program:
    """The names that the program sees and defines, and the objects of its own that the judge
    knows by number."""

    def __init__(self, channel: Channel, names: dict[str, Any], nodes: tuple[str, ...]) -> None:
        self._channel = channel
        self._names = names
        self._nodes = nodes
        self._node_classes = {name: names[name] for name in nodes}
        self._told = False  # one traceback is enough
        self._objects: list[Any] = []
        self._verbs: dict[str, Callable[..., Any]] = {
            "call": lambda function, args, keywords: function(*args, **keywords),
            "get": getattr,
            "set": setattr,
            "item": lambda container, key: container[key],
            "put": lambda container, key, value: container.__setitem__(key, value),
            "items": list,
            "length": len,
            "text": str,
        }

    def run(self) -> None:
        """Run the source that the judge sends, then serve until the judge has ended."""
        self._channel.send("confined")
        source, names, numpy = self._channel.receive()
        if numpy:
            import_numpy(self._names)
        for name in names:  # the preamble must not stand in for what is to be tested
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
            if verb == "affect":  # a call for its effect on its arguments
                function, args, keywords = values
                function(*args, **keywords)
                return {"value": [self._encode(a) if self._mutable(a) else None for a in args]}
            return {"value": self._encode(self._verbs[verb](*values))}
        except Closed:
            raise
        except BaseException as error:  # whatever the program raises is its answer
            if not self._told:
                traceback.print_exc()
            self._told = True
            return {"raised": [type(error).__name__, str(error)[:300]]}

    def _mutable(self, value: Any) -> bool:
        return isinstance(value, MUTABLE) or type(value).__name__ in self._nodes

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer, self._nodes)

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _decode(self, data: Any) -> Any:
        # a program's own class of that name takes the place of the preamble's
        given = self._node_classes
        classes = {name: self._names.get(name, given[name]) for name in self._nodes}
        return decode(data, self._objects.__getitem__, classes)


def prepare(settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(names that the preamble defines, those of node classes among them). Lets the packages be
    found that programs may import."""
    sys.meta_path.append(Packages(settings["packages"]))
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(settings["preamble"], "<preamble>", "exec"), names)
    return names, tuple(name for name in NODES if name in names)


class Packages:
    """Finds the packages named, and no others: there is no site-packages here to search."""

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
    """The whole life of a program's process. Never returns."""
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
