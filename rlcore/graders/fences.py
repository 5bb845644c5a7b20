"""Marks in responses: where a fenced block begins and ends, and which block is the program; the
text between the tags of an answer."""

from __future__ import annotations

import ast
import re
import symtable
import textwrap
import warnings
from collections.abc import Collection
from dataclasses import dataclass

OPENING = re.compile(r"(.*?)(`{3,}|~{3,})[ \t]*\{?\.?([\w+#.-]*)[^`]*")
PYTHON = re.compile(r"(?:python|py)[\d.]*|ipython\d*|python-repl", re.IGNORECASE)
BYTE_ORDER_MARK = re.compile("^\ufeff", re.MULTILINE)  # which a file of Python may begin with
MOST_ENDS = 30  # of one block that are tried


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """A fenced block of a response."""

    tag: str
    source: str

    @property
    def python(self) -> bool:
        return bool(PYTHON.fullmatch(self.tag))


def find_program(response: str, names: Collection[str] = ()) -> tuple[str, bool]:
    """(the program of a response, whether it is fenced).

    The last block that is tagged as Python and defines one of the names, else an untagged one that
    does. Else the last that is tagged as Python, else the last untagged one that does more than
    state a value. Else the last block, else the whole response.
    """
    response = BYTE_ORDER_MARK.sub("", response)
    blocks = fenced_blocks(response.replace("\r\n", "\n").replace("\r", "\n"))
    untagged = [block for block in blocks if not block.tag]
    tagged = [block for block in blocks if block.python]
    defining = [
        [b for b in group if names and defined_names(b.source) & set(names)]
        for group in (tagged, untagged)
    ]
    working = [block for block in untagged if _does_something(block.source)]
    for group in (*defining, tagged, working, untagged, blocks):
        if group:
            return group[-1].source, True
    return response, False


def fenced_blocks(text: str) -> list[FencedBlock]:
    """Blocks between fences, whose last may be unclosed. A block ends at the first fence up to
    which it is Python, so that one may have fences in its strings; if none is, at the first."""
    lines = text.split("\n")
    blocks, at = [], 0
    while at < len(lines):
        opening = OPENING.fullmatch(lines[at])
        at += 1
        if opening is None or (opening[1].strip() and not PYTHON.fullmatch(opening[3])):
            continue
        source, at = _block(lines, at, opening[2])
        blocks.append(FencedBlock(opening[3].lower(), textwrap.dedent(source)))
    return blocks


def _block(lines: list[str], start: int, fence: str) -> tuple[str, int]:
    """(text of a block, line after it)."""
    ends: list[tuple[str, int]] = []
    for at in range(start, len(lines)):
        head, found, rest = lines[at].partition(fence)
        if found and (not head.strip() or not rest.strip(fence[0]).strip()):
            body = "\n".join([*lines[start:at], *([head] if head.strip() else [])])
            # a fence with a tag begins another block
            following = at if not head.strip() and rest.strip() else at + 1
            ends.append((body, following))
            if len(ends) == 1 and not body.strip():
                return ends[0]
            if _parses(textwrap.dedent(body)):
                return ends[-1]
            if len(ends) == MOST_ENDS:
                break
    whole = ("\n".join(lines[start:]), len(lines))
    return ends[0] if ends and not _parses(textwrap.dedent(whole[0])) else whole


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in a model's strings
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _does_something(source: str) -> bool:
    """Return whether it is Python, and more than values: a program's output is often values
    alone."""
    if not _parses(source):
        return False
    values = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp)
    body = ast.parse(source).body
    return any(not (isinstance(n, ast.Expr) and isinstance(n.value, values)) for n in body)


def defined_names(source: str) -> set[str]:
    """Names that a solution defines at its top level, imports aside; none if it is not Python."""
    try:
        table = symtable.symtable(source, "<reference>", "exec")
    except (SyntaxError, ValueError):
        return set()
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() and not s.is_imported()}


def tagged_answer(response: str) -> str | None:
    """Text inside the last <answer>...</answer>, None without one."""
    head, close, _ = response.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer.strip() if close and opened else None
