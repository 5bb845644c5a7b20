"""Shell scripts read without running them: the words of their commands, with variables, arrays and
sums put in their places."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_BRACED = re.compile(r"(\w+)(?:(:?)([-=+?])(.*))?", re.DOTALL)
_STARTS = re.compile(r".*\.py|-m|grpo|rloo")  # words behind which the trainer's own begin
_COMMAND = "$(command)"  # in the place of what only running it would give
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def settings(text: str) -> Iterator[tuple[str, Any]]:
    """Words `a.b=value` (verl, SkyRL) and `--key value ...` (TRL, OpenRLHF) of a script's commands.

    Raises ValueError for quotes that are not closed."""
    given: dict[str, Any] = {}
    key = ""
    for word in _words(text):
        dotted = re.fullmatch(r"\+{0,2}([\w]+(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if dotted:
            given[dotted[1]], key = value_of(dotted[2]), ""
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            given[key] = value_of(value) if equals else True
        elif not key and _STARTS.fullmatch(word):
            given.clear()
        elif key and word not in ("--", "$@", "python", "python3", "-m"):
            given[key] = _joined(given[key], value_of(word))
        elif word in ("python", "python3", "-m"):
            given.clear()
            key = ""
    yield from given.items()


def _words(text: str) -> Iterator[str]:
    variables: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    filling: list[str] | None = None
    for word in shlex.split(_whole(text.replace("\\\n", " ")), comments=True):
        assigned = _ASSIGNED.fullmatch(word)
        if filling is not None:
            ends = word.endswith(")") and word.count("(") < word.count(")")
            filling += [w for w in [word[:-1] if ends else word] if w]
            filling = None if ends else filling
        elif assigned and assigned[2].startswith("("):
            filling = arrays[assigned[1]] = [w for w in [assigned[2][1:].rstrip(")")] if w]
            filling = None if assigned[2].endswith(")") else filling
        elif assigned:
            variables[assigned[1]] = _expanded(assigned[2], variables)
        else:
            array = _ARRAY.fullmatch(word)
            listed = arrays.get(array[1], []) if array else [word]
            yield from (_expanded(w, variables) for w in listed)


def _whole(text: str) -> str:
    """Sums without blanks, so that each stays in its word, and `$(command)` for other commands."""
    parts, position = [], 0
    for found in re.finditer(r"\$\(", text):
        if found.start() < position:
            continue
        end = _closing(text, found.end() - 1, "()")
        inner = text[found.start() : end]
        parts.append(text[position : found.start()])
        parts.append(re.sub(r"\s+", "", inner) if inner.startswith("$((") else _COMMAND)
        position = end
    return "".join([*parts, text[position:]])


def _closing(text: str, start: int, pair: str) -> int:
    """The place behind the bracket that closes the one at `start`; the end if nothing does."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if depth == 0:
            return at + 1
    return len(text)


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Put variables and sums in their places; what is not known is left."""
    done, at = "", 0
    while at < len(word):
        rest = word[at:]
        end = at + 1
        if rest.startswith("$(("):
            end = _closing(word, at + 1, "()")
            done += _sum(word[at:end], variables)
        elif rest.startswith("${"):
            end = _closing(word, at + 1, "{}")
            done += _braced(word[at:end], variables)
        elif name := re.match(r"\$(\w+)", rest):
            end = at + name.end()
            known = _known(name[1], variables)
            done += name[0] if known is None else known
        else:
            done += word[at]
        at = end
    return done


def _known(name: str, variables: Mapping[str, str]) -> str | None:
    return variables.get(name, os.environ.get(name))


def _braced(text: str, variables: dict[str, str]) -> str:
    """`${NAME}`, `${NAME:-default}` and its kin, defaults of defaults among them."""
    form = _BRACED.fullmatch(text[2:-1])
    if form is None:
        return text
    name, colon, how, other = form.groups()
    known = _known(name, variables)
    if how == "+":
        return _expanded(other, variables) if known else ""
    if how is None or how == "?":
        return text if known is None else known
    if known is not None and (known or not colon):
        return known
    value = _expanded(other.strip('"'), variables)
    if how == "=":
        variables[name] = value
    return value


def _sum(text: str, variables: Mapping[str, str]) -> str:
    """A sum of whole numbers, `$((A * 2))`; left if a name in it is not known."""
    inner = text[3:-2]
    for _ in range(8):  # names of names
        inner = re.sub(
            r"\$?\{?\b([A-Za-z_]\w*)\b(?::-(\w+))?\}?",
            lambda found: f"({_known(found[1], variables) or found[2] or '_'})",
            inner,
        )
        if not re.search(r"[A-Za-z]", inner):
            break
    try:
        return str(integer(ast.parse(inner.replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return text


def integer(node: ast.expr) -> int:
    """The value of a sum of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -integer(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](integer(node.left), integer(node.right))
    raise ValueError(ast.unparse(node))


def _joined(before: Any, value: Any) -> Any:
    """Several words after one option are a list."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def value_of(text: str) -> Any:
    """The value that YAML reads, or the text."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)  # YAML reads 1e-6 as a text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | str | list | None) else text
