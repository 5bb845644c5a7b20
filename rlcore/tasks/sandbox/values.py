"""Plain data between a program and its tests, as JSON: what one process encodes, the other rebuilds
of its own exact types. Standard library only.

    None, bool, int, float, str, list    as themselves
    {"t": [...]}                         tuple; "s" set, "f" frozenset, "q" deque
    {"d": [[key, value], ...]}           dict
    {"b": hex}  {"c": [re, im]}          bytes, complex
    {"D": text} {"F": [n, d]}            Decimal, Fraction
    {"g": [start, stop, step]}           range
    {"n": [values]}                      linked list of the preamble's ListNode
    {"r": [[value] or null, ...]}        tree of TreeNode: level by level, null for no child
    {"x": number}                        an object that stays where it is

Instances of a subclass cross as their base type, so that no method of theirs decides a comparison.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

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
}
Refer = Callable[[Any], int]


class Closed(BaseException):
    """The other side has ended. Not an Exception, so that tests that catch those go no further."""


class Channel:
    """Messages over a stream: a length, then JSON. Read and write calls alone, since the sandbox
    allows no others on a socket."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, message: Any) -> None:
        """Raises Closed if the other side has ended."""
        data = json.dumps(message, separators=(",", ":")).encode()
        left = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> Any:
        """The next message. Raises Closed at the end, ValueError for what is no message."""
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if size > MAX_FRAME:
            raise ValueError(f"a message of {size} bytes")
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = os.read(self._fd, min(size - len(data), 1 << 20))
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
    that cross as lists and trees."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is list:
        if SCALARS.issuperset(map(type, value)):
            return value
        return [encode(v, refer, nodes) for v in value]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"d": [[encode(k, refer, nodes), encode(v, refer, nodes)] for k, v in pairs]}
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


def _encode_other(value: Any, refer: Refer) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, Decimal):
        return {"D": Decimal.__str__(value)}
    if isinstance(value, Fraction):
        return {"F": [value.numerator, value.denominator]}
    if isinstance(value, range):
        return {"g": [value.start, value.stop, value.step]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), refer, ())
    return {"x": refer(value)}


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


def decode(data: Any, resolve: Callable[[int], Any], nodes: Mapping[str, type]) -> Any:
    """The inverse of `encode`. Raises ValueError or TypeError for what `encode` does not write."""
    if type(data) is list:
        if SCALARS.issuperset(map(type, data)):
            return data
        return [decode(v, resolve, nodes) for v in data]
    if type(data) is not dict:
        return data
    ((tag, content),) = data.items()
    if tag == "x":
        return resolve(content)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "D":
        return Decimal(content)
    if tag == "d":
        return {decode(k, resolve, nodes): decode(v, resolve, nodes) for k, v in content}
    if tag == "n":
        return _linked([decode(v, resolve, nodes) for v in content], nodes["ListNode"])
    if tag == "r":
        values = [None if v is None else (decode(v[0], resolve, nodes),) for v in content]
        return _tree(values, nodes["TreeNode"])
    return BUILD[tag]([decode(v, resolve, nodes) for v in content])


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
