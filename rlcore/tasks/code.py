"""Programming problems judged by running their tests: LeetCode-style and MBPP-style rows."""

from __future__ import annotations

import re
from typing import Any

from rlcore.errors import UserError
from rlcore.tasks.arguments import ArgumentError, integer, share
from rlcore.tasks.grades import weighted
from rlcore.tasks.records import Record, RecordTask, RowError, pick, pick_text
from rlcore.tasks.sandbox import Limits, Sandbox, SandboxError
from rlcore.types import Grade, Item

FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)
PREAMBLE = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
pow = __builtins__["pow"] if isinstance(__builtins__, dict) else __builtins__.pow
sys.setrecursionlimit(20000)
"""
LEETCODE_TYPES = """\
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right

def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head

def is_same_list(a, b):
    while a and b and a.val == b.val:
        a, b = a.next, b.next
    return a is None and b is None

def tree_node(values):
    nodes = [None if value is None else TreeNode(value) for value in values]
    children = iter(nodes[1:])
    for node in nodes:
        if node is not None:
            node.left, node.right = next(children, None), next(children, None)
    return nodes[0] if nodes else None

def is_same_tree(a, b):
    if a is None or b is None:
        return a is b
    return a.val == b.val and is_same_tree(a.left, b.left) and is_same_tree(a.right, b.right)
"""


class CodeTask(RecordTask):
    """A response's program is its last fenced block, or all of it; it is correct if its tests run to their end.

    `tests_field` holds Python source, or a list of sources (assertions); `setup_field` source that goes before them.
    A program that exceeds a limit is wrong; a sandbox that fails raises. reward = (1 - format_reward) * correct +
    format_reward * (there is a fenced block). A program has timeout_s seconds, memory_mib MiB, no network, no children.
    """

    preamble = PREAMBLE  # run before the program

    def __init__(
        self,
        *,
        question_field: str,
        tests_field: str,
        worked_field: str | None,
        setup_field: str | None = None,
        timeout_s: float = 5.0,
        memory_mib: int = 512,
        format_reward: float = 0.0,
        **files: Any,
    ) -> None:
        self._fields = question_field, tests_field, worked_field, setup_field
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ArgumentError("timeout_s", timeout_s, "is not accepted: give a number of seconds above 0.")
        self.timeout_s = float(timeout_s)  # of a program; grading one takes longer
        self._limits = Limits(timeout_s=self.timeout_s, memory_mib=integer("memory_mib", memory_mib, 64, 1 << 20))
        self._format_reward = share("format_reward", format_reward)
        self._sandbox: Sandbox | None = None
        super().__init__(**files)
        try:
            self._run("", "")
        except SandboxError as error:
            why = f"task {self.name} cannot confine programs on this machine: {error}"
            raise UserError(f"{why}; it needs x86_64 Linux with Landlock and seccomp.") from error
        finally:
            self.close()

    def record(self, row: dict[str, Any]) -> Record:
        question, tests_field, worked, setup_field = self._fields
        tests = pick(row, tests_field, answer=True)
        tests = "\n".join(map(str, tests)) if isinstance(tests, list | tuple) else tests
        if not isinstance(tests, str) or not tests.strip():
            raise RowError(f"field {tests_field} is not Python source or a list of it", missing_answer=True)
        setup = row.get(setup_field) if setup_field else None
        tests = f"{setup}\n{tests}" if isinstance(setup, str) and setup.strip() else tests
        solution = pick_text(row, worked) if worked else None
        return Record(
            pick_text(row, question),
            solution or "",
            None if solution is None else f"```python\n{solution.strip()}\n```",
            {"tests": tests},
        )

    def grade(self, item: Item, response: str) -> Grade:
        blocks = FENCE.findall(response)
        passed = self._run(blocks[-1] if blocks else response, item.meta["tests"])
        return weighted(passed, bool(blocks), self._format_reward)

    def _run(self, program: str, tests: str) -> bool:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._limits)
        try:
            return self._sandbox.run(self.preamble, program, tests).passed
        except BaseException:
            self._sandbox = None  # it has closed itself
            raise

    def close(self) -> None:
        """End the sandbox's server; the next grading starts another."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


class Leetcode(CodeTask):
    """Rows with `problem`, `solutions` and `tests.functional`, source that defines and calls `check`.

    The site's ListNode and TreeNode, and the tests' helpers for them, are there; level-order lists stand for trees.
    """

    name = "leetcode"
    preamble = PREAMBLE + LEETCODE_TYPES

    def __init__(
        self,
        *,
        question_field: str = "problem",
        tests_field: str = "tests.functional",
        worked_field: str | None = "solutions",
        **other: Any,
    ) -> None:
        super().__init__(question_field=question_field, tests_field=tests_field, worked_field=worked_field, **other)


class Mbpp(CodeTask):
    """Rows as in MBPP (Austin et al. 2021, arXiv:2108.07732): `text`, `code`, `test_list`, `test_setup_code`.

    The first assertion is shown after the text: without it the function's name is not known.
    """

    name = "mbpp"

    def __init__(
        self,
        *,
        question_field: str = "text",
        tests_field: str = "test_list",
        worked_field: str | None = "code",
        setup_field: str | None = "test_setup_code",
        **other: Any,
    ) -> None:
        super().__init__(
            question_field=question_field,
            tests_field=tests_field,
            worked_field=worked_field,
            setup_field=setup_field,
            **other,
        )

    def record(self, row: dict[str, Any]) -> Record:
        record = super().record(row)
        tests = pick(row, self._fields[1])
        shown = tests[0] if isinstance(tests, list | tuple) else str(tests).splitlines()[0]
        return Record(f"{record.question}\nYour code must pass: {shown}", record.answer, record.worked, record.meta)
