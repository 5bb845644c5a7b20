"""Plain data between a program and its tests, as JSON: one process encodes values, the other
rebuilds them with its exact types. Standard library only.

    None, bool, int, float, str, list    as themselves
    {"t": [...]}                         tuple; "s" set, "f" frozenset, "q" deque
    {"d": [[key, value], ...]}           dict; "C" Counter, "O" OrderedDict
    {"E": [factory, [key, value], ...]}  defaultdict of a built-in factory
    {"m": [name, fields, values]}        named tuple
    {"b": hex}  {"h": hex}  {"c": [re, im]}  bytes, bytearray, complex
    {"T": [kind, numbers, zone]}         date, time, datetime, timedelta, timezone
    {"N": [dtype, shape, hex]}           numpy array; shape null: a scalar of numpy
    {"B": name}                          a type, function or exception of Python's own, see BUILTINS
    {"I": [...]}                         an iterator over these
    {"D": text} {"F": [n, d]}            Decimal, Fraction
    {"g": [start, stop, step]}           range
    {"n": [values]}                      linked list of the preamble's ListNode
    {"r": [[value] or null, ...]}        tree of TreeNode: level by level, null for no child
    {"x": number}                        an object that stays where it is; further tags of this kind
                                         are those of the side that refers (`program`, `judge`)

Instances of a subclass cross as their base type, so that no method of theirs decides a comparison.
"""

from __future__ import annotations

import builtins
import datetime
import functools
import importlib
import json
import os
import re
import socket
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

SCALARS = frozenset({type(None), bool, int, float, str})
MAX_FRAME = 64 << 20  # bytes of one message
LENGTH = struct.Struct(">I")
# Type, its tag and how the base class itself reads an instance, whatever a subclass overrides.
SEQUENCES: list[tuple[type, str, Callable[[Any], Iterable[Any]]]] = [
    (tuple, "t", tuple.__iter__),
    (set, "s", set.__iter__),
    (frozenset, "f", frozenset.__iter__),
    (deque, "q", deque.__iter__),
]
BASES: list[tuple[type, Callable[[Any], Any]]] = [
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
]
BUILD: dict[str, Callable[[list[Any]], Any]] = {
    "t": tuple,
    "s": set,
    "f": frozenset,
    "q": deque,
    "c": lambda parts: complex(*parts),
    "F": lambda parts: Fraction(*parts),
    "g": lambda parts: range(*parts),
    "I": iter,
}
# Types and functions that compute from their arguments alone: each side uses its own.
BUILTINS = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(range, object, type, slice, enumerate, zip, map, filter, reversed, abs, all, any, bin),
        *(chr, divmod, format, hex, len, max, min, oct, ord, pow, repr, round, sorted, sum),
        *(callable, hash, ascii),
    )
} | {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
NAMED = {id(value): name for name, value in BUILTINS.items()}
ARRAY_TYPE = re.compile(r"[<>|=]?[biufcSUmM]\d*(\[\w+\])?")  # without references to objects
LONGEST_ITERATOR = 100_000
# Data for an object that is not plain; and the object of such data: its tag, its content.
Refer = Callable[[Any], dict[str, Any]]
Resolve = Callable[[str, Any], Any]


class Closed(BaseException):
    """The other side has ended. Not an Exception, so that tests that catch exceptions end, too."""


class Channel:
    """Messages over a stream: a length, then JSON. Read and write calls alone, since the sandbox
    allows no others on a socket."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, message: Any) -> None:
        """Raises Closed if the other side has ended."""
        data = json.dumps(message, separators=(",", ":")).encode()
        left = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> Any:
        """The next message. Raises Closed at the end, ValueError for what is not a message."""
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if size > MAX_FRAME:
            raise ValueError(f"a message of {size} bytes")
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = os.read(self.fd, min(size - len(data), 1 << 20))
            except OSError as error:
                raise Closed(str(error)) from error
            if not piece:
                raise Closed("end of messages")
            data += piece
        return bytes(data)


def send_line(fd: int, message: Any) -> None:
    """One JSON line to the parent."""
    left = memoryview(json.dumps(message).encode() + b"\n")
    while left:
        left = left[os.write(fd, left) :]


def receive_line(link: socket.socket, descriptors: int) -> tuple[Any, list[int]]:
    """The next line of the parent, with its descriptors; (None, []) at the end."""
    data = b""
    fds: list[int] = []
    while not data.endswith(b"\n"):
        piece, more, _, _ = socket.recv_fds(link, 1 << 16, descriptors)
        if not piece:
            return None, []
        data += piece
        fds += more
    return json.loads(data), fds


def encode(value: Any, refer: Refer, nodes: Iterable[str]) -> Any:
    """`value` as JSON data. `refer` names an object that is not plain data; `nodes`: class names
    that cross as lists and trees. Raises TypeError for an iterator that is too long."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is list:
        if SCALARS.issuperset(map(type, value)):
            return value
        return [encode(v, refer, nodes) for v in value]
    if isinstance(value, dict):
        return _encode_dict(value, refer, nodes)
    if kind.__module__ == "numpy":
        found = _encode_numpy(value, refer)
        return refer(value) if found is None else found
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        values = [encode(v, refer, nodes) for v in tuple.__iter__(value)]
        return {"m": [kind.__name__, list(kind._fields), values]}
    for base, tag, items in SEQUENCES:
        if isinstance(value, base):
            return {tag: [encode(v, refer, nodes) for v in items(value)]}
    if isinstance(value, list):
        return [encode(v, refer, nodes) for v in list.__iter__(value)]
    for base, plain in BASES:
        if isinstance(value, base):
            return plain(value)
    if kind.__name__ in nodes:
        return _encode_node(value, refer, nodes)
    return _encode_other(value, refer)


def _encode_dict(value: dict[Any, Any], refer: Refer, nodes: Iterable[str]) -> Any:
    ordered = isinstance(value, OrderedDict)
    items = OrderedDict.items(value) if ordered else dict.items(value)  # type: ignore[arg-type]
    pairs = [[encode(k, refer, nodes), encode(v, refer, nodes)] for k, v in items]
    if isinstance(value, defaultdict) and id(value.default_factory) in NAMED:
        return {"E": [NAMED[id(value.default_factory)], *pairs]}
    if isinstance(value, Counter):
        return {"C": pairs}
    return {"O": pairs} if ordered else {"d": pairs}


def _encode_other(value: Any, refer: Refer) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"b" if isinstance(value, bytes) else "h": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, Decimal):
        return {"D": Decimal.__str__(value)}
    if isinstance(value, Fraction):
        return {"F": [value.numerator, value.denominator]}
    if isinstance(value, range):
        return {"g": [value.start, value.stop, value.step]}
    if NAMED.get(id(value)) is not None:
        return {"B": NAMED[id(value)]}
    return _encode_time(value) or refer(value)


def _encode_numpy(value: Any, refer: Refer) -> Any:
    """Data of an array or a scalar; None for anything else of numpy."""
    numpy = sys.modules["numpy"]
    if not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    array = numpy.asarray(value)
    if not ARRAY_TYPE.fullmatch(array.dtype.str):
        return None
    shape = list(array.shape) if isinstance(value, numpy.ndarray) else None
    return {"N": [array.dtype.str, shape, array.tobytes().hex()]}


def _encode_time(value: Any) -> Any:
    """Data of a value of the module datetime; None for any other, and for a time whose zone has no
    offset."""
    if isinstance(value, datetime.timedelta):
        return {"T": ["timedelta", [value.days, value.seconds, value.microseconds], None]}
    if isinstance(value, datetime.timezone):
        return {"T": ["timezone", [], [value.utcoffset(None).total_seconds(), str(value)]]}
    if not isinstance(value, datetime.date | datetime.time):
        return None
    day = [value.year, value.month, value.day] if isinstance(value, datetime.date) else []
    if day and not isinstance(value, datetime.datetime):
        return {"T": ["date", day, None]}
    return _encode_moment(value, day)


def _encode_moment(value: Any, day: list[int]) -> Any:
    moment = [value.hour, value.minute, value.second, value.microsecond]
    zone: Any = None
    if value.tzinfo is not None:
        offset = value.utcoffset()
        zone = getattr(value.tzinfo, "key", None) or (
            offset if offset is None else [offset.total_seconds(), str(value.tzname())]
        )
        if zone is None:
            return None
    return {"T": ["datetime" if day else "time", [*day, *moment, value.fold], zone]}


def _encode_node(node: Any, refer: Refer, nodes: Iterable[str]) -> Any:
    """A chain of `next`, or a tree of `left` and `right`. Raises ValueError for a cycle."""
    seen: set[int] = set()
    if hasattr(node, "next"):
        values = []
        while node is not None:
            _once(node, seen)
            values.append(encode(node.val, refer, nodes))
            node = node.next
        return {"n": values}
    level: list[Any] = []
    queue = deque([node])
    while queue:
        node = queue.popleft()
        if node is None:
            level.append(None)
            continue
        _once(node, seen)
        level.append([encode(node.val, refer, nodes)])
        queue += [node.left, node.right]
    while level and level[-1] is None:
        level.pop()
    return {"r": level}


def _once(node: Any, seen: set[int]) -> None:
    if id(node) in seen:
        raise ValueError("a cycle of nodes")
    seen.add(id(node))


def decode(data: Any, resolve: Resolve, nodes: Mapping[str, type]) -> Any:
    """The inverse of `encode`. Raises ValueError, TypeError or KeyError for what `encode` does not
    write."""
    if type(data) is list:
        if SCALARS.issuperset(map(type, data)):
            return data
        return [decode(v, resolve, nodes) for v in data]
    if type(data) is not dict:
        return data
    ((tag, content),) = data.items()
    if tag in DIRECT:
        return DIRECT[tag](content)
    if tag in PAIRED:
        return PAIRED[tag](
            (decode(k, resolve, nodes), decode(v, resolve, nodes)) for k, v in content
        )
    if tag == "E":
        factory, *pairs = content
        return defaultdict(cast(Any, BUILTINS[factory]), decode({"d": pairs}, resolve, nodes))
    if tag == "m":
        name, fields, values = content
        return _named_tuple(name, tuple(fields))(*(decode(v, resolve, nodes) for v in values))
    if tag == "n":
        return _linked([decode(v, resolve, nodes) for v in content], nodes["ListNode"])
    if tag == "r":
        values = [None if v is None else (decode(v[0], resolve, nodes),) for v in content]
        return _tree(values, nodes["TreeNode"])
    if tag in BUILD:
        return BUILD[tag]([decode(v, resolve, nodes) for v in content])
    return resolve(tag, content)


@functools.lru_cache(256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)  # refuses names that are no identifiers


def _decode_numpy(content: list[Any]) -> Any:
    kind, shape, data = content
    if not ARRAY_TYPE.fullmatch(kind):
        raise ValueError(f"an array of {kind}")
    numpy = importlib.import_module("numpy")
    values = numpy.frombuffer(bytes.fromhex(data), numpy.dtype(kind))
    return values[0] if shape is None else values.reshape(shape).copy()


def _decode_time(content: list[Any]) -> Any:
    kind, numbers, zone = content
    if kind in ("timedelta", "date"):
        return {"timedelta": datetime.timedelta, "date": datetime.date}[kind](*numbers)
    at: Any = None
    if isinstance(zone, str):
        import zoneinfo

        at = zoneinfo.ZoneInfo(zone)
    elif zone is not None:
        at = datetime.timezone(datetime.timedelta(seconds=zone[0]), str(zone[1]))
    if kind == "timezone":
        return at
    *moment, fold = numbers
    made = {"datetime": datetime.datetime, "time": datetime.time}[kind]
    return made(*moment, tzinfo=at, fold=fold)


DIRECT: dict[str, Callable[[Any], Any]] = {
    "b": bytes.fromhex,
    "h": bytearray.fromhex,
    "D": Decimal,
    "B": BUILTINS.__getitem__,
    "N": _decode_numpy,
    "T": _decode_time,
}
PAIRED: dict[str, Callable[[Iterator[tuple[Any, Any]]], Any]] = {
    "d": dict,
    "C": lambda pairs: Counter(dict(pairs)),
    "O": OrderedDict,
}


def _linked(values: list[Any], node: type) -> Any:
    head = None
    for value in reversed(values):
        made = node(value)
        made.next = head
        head = made
    return head


def _tree(values: list[Any], node: type) -> Any:
    made = [None if value is None else node(value[0]) for value in values]
    children = iter(made[1:])
    for parent in made:
        if parent is not None:
            parent.left = next(children, None)
            parent.right = next(children, None)
    return made[0] if made else None
