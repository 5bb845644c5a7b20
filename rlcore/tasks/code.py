"""Programming problems judged by running their tests: LeetCode-style and MBPP-style rows."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.graders.fences import find_program
from rlcore.graders.programs.program_names import BadTests, program_tests
from rlcore.graders.sandbox import LAYERS, Limits, Outcome, Sandbox, SandboxError, available
from rlcore.interfaces import Split
from rlcore.tasks import proof
from rlcore.tasks.arguments import ArgumentError, integer, one_of, share
from rlcore.tasks.grades import weighted
from rlcore.tasks.row_tasks import Record, RecordTask, RowError, pick, pick_text
from rlcore.types import Grade, Item

# Names of the modules that solutions use most, for any task.
COMMON = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
import sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
from builtins import pow
sys.setrecursionlimit(20000)
"""
# The imports of LeetCode's own environment before a Python solution, in that order; a later name
# hides an earlier one. numpy is added for programs that mention it.
LEETCODE = """\
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json, decimal, fractions, queue, threading, time
from typing import *
try:
    import sortedcontainers
    from sortedcontainers import *
except ImportError:  # not installed here
    pass
sys.setrecursionlimit(20000)
"""
# The site's node classes, and helpers of the tests. They cross between a program and its tests as
# the values that they hold (`sandbox.values`).
LEETCODE_NODES = """\
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right

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
UNCALLED = "its tests called nothing of the program"
TRACEBACK = "Traceback (most recent call last):\n"
PROGRAM_FRAME = '  File "<program>"'
logger = logging.getLogger(__name__)


class CodeTask(RecordTask):
    """A response's program is a fenced block of it (`find_program`), or all of it; it is correct if
    its tests call it and run to their end.

    `tests_field` holds Python source, or a list of sources (assertions); `setup_field` source that
    goes before them. Tests and program run in their own processes: see `sandbox`. A program that
    exceeds a limit is wrong; a sandbox that fails raises. reward = (1 - format_reward) * correct +
    format_reward * (there is a fenced block). A program has timeout_s seconds, memory_mib MiB, no
    network, no children. confinement "full" refuses a machine that cannot confine programs by every
    layer (`sandbox.confinement`), "reduced" uses the layers that the machine has, and says so.

    Rows are proven when the task is built (`proof`), once: proofs are kept in proof_cache, the
    user's cache folder if None. unproven_rows="skip" leaves out rows that are not proven and counts
    them in `unproven`; "refuse" refuses the file.
    """

    preamble = COMMON  # names that programs and tests find

    # A task's arguments are its constructor's: `make_task` reads them off here.
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
        confinement: str = "full",
        unproven_rows: str = "refuse",
        proof_cache: str | None = None,
        **files: Any,
    ) -> None:
        self._fields = question_field, tests_field, worked_field, setup_field
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ArgumentError(
                "timeout_s", timeout_s, "is not accepted: give a number of seconds above 0."
            )
        self.timeout_s = float(timeout_s)  # of a program; grading one takes longer
        self._limits = Limits(
            timeout_s=self.timeout_s, memory_mib=integer("memory_mib", memory_mib, 64, 1 << 20)
        )
        self._format_reward = share("format_reward", format_reward)
        self._layers = confining_layers(f"task {self.name}", confinement)
        self._sandbox: Sandbox | None = None
        try:
            self._given = self._started().names
        except SandboxError as error:
            raise UserError(
                f"task {self.name} cannot confine programs on this machine: {error}."
            ) from error
        try:
            super().__init__(**files)
        finally:
            self.close()
        self._skips_unproven = one_of("unproven_rows", unproven_rows, ("refuse", "skip")) == "skip"
        self.unproven: dict[Split, int] = {"train": 0, "heldout": 0}  # rows left out
        folder = Path(proof_cache).expanduser() if proof_cache else proof.default_folder()
        for split, records in self._records.items():
            if records:
                self._records[split] = self._proven(split, records, folder)

    def _proven(self, split: Split, records: list[Record], folder: Path) -> list[Record]:
        """The rows whose tests pass their reference and fail a mutant. Raises ArgumentError for
        unproven rows, unless they are to be left out, and if none is left."""
        claims = [self.claim(record) for record in records]
        proofs = proof.prove(self.name, claims, self._sandboxed, folder)
        numbered = [(record.row, found) for record, found in zip(records, proofs)]
        kept = [self.settled(r, found) for r, found in zip(records, proofs) if not found.why]
        self.unproven[split] = len(records) - len(kept)
        if self.unproven[split] and not (self._skips_unproven and kept):
            hint = "" if not kept else "; task.args.unproven_rows=skip leaves them out"
            why = f"has {proof.unproven(numbered)}{hint}."
            raise ArgumentError(f"{split}_path", self._paths[split], why)
        return kept

    def claim(self, record: Record) -> proof.Claim:
        """The row as it is to be proven."""
        tests, reference = record.meta["tests"], record.answer or None
        content = json.dumps([self.preamble, asdict(self._limits), reference, asdict(tests)])
        return proof.Claim(content, lambda sandbox: proof.proven(sandbox, reference, tests))

    def settled(self, record: Record, found: proof.RowProof) -> Record:
        """A proven row, with the results of its proof."""
        tests = replace(record.meta["tests"], effects=found.effects)
        return replace(record, meta={**record.meta, "tests": tests})

    def remarks(self) -> list[str]:
        return [
            f"{count} {split} rows whose tests prove nothing are left out"
            for split, count in self.unproven.items()
            if count
        ]

    def record(self, row: dict[str, Any]) -> Record:
        question, tests_field, worked, setup_field = self._fields
        tests = pick(row, tests_field, answer=True)
        tests = "\n".join(map(str, tests)) if isinstance(tests, list | tuple) else tests
        if not isinstance(tests, str) or not tests.strip():
            raise RowError(
                f"field {tests_field} is not Python source or a list of it", missing_answer=True
            )
        setup = pick(row, setup_field, empty=True) if setup_field and setup_field in row else None
        tests = f"{setup}\n{tests}" if isinstance(setup, str) and setup.strip() else tests
        solution = pick_text(row, worked) if worked else None
        try:
            judged = program_tests(tests, solution or "", self._given)
        except BadTests as error:
            raise RowError(f"field {tests_field}: {error}", missing_answer=True) from error
        return Record(
            pick_text(row, question),
            solution or "",
            None if solution is None else f"```python\n{solution.strip()}\n```",
            {"tests": judged},
        )

    def grade(self, item: Item, response: str) -> Grade:
        return self.attempt(item, response)[0]

    def attempt(self, item: Item, response: str) -> tuple[Grade, str]:
        """The grade, and the reason why a program did not pass: "" if it passed."""
        outcome, fenced = self._outcome(item, response)
        passed, why = outcome.passed, ""
        if not passed:
            why = f"{own_frames(outcome.output)}\n{outcome.why}".strip()
        elif not outcome.calls:
            passed, why = False, UNCALLED
        return weighted(passed, fenced, self._format_reward), why

    def _outcome(self, item: Item, response: str) -> tuple[Outcome, bool]:
        """The outcome of the response's program, and whether it was fenced."""
        tests = item.meta["tests"]
        program, fenced = find_program(response, tests.names)
        try:
            return self._started().run(program, tests), fenced
        except BaseException:
            self._sandbox = None  # it has closed itself
            raise

    def _sandboxed(self) -> Sandbox:
        return Sandbox(self._limits, preamble=self.preamble, layers=self._layers)

    def _started(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self._sandboxed()
        return self._sandbox

    def close(self) -> None:
        """End the sandbox's server; the next grading starts another."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def own_frames(output: str) -> str:
    """A program's output without the sandbox's frames in its traceback."""
    before, found, trace = output.partition(TRACEBACK)
    at = trace.find(PROGRAM_FRAME)
    return f"{before}{TRACEBACK}{trace[at:]}" if found and at >= 0 else output


def confining_layers(name: str, confinement: str) -> tuple[str, ...]:
    """Layers of confinement to use on this machine, "full" or "reduced". `name`: the task that
    asks. Raises ArgumentError, which names the missing layers."""
    one_of("confinement", confinement, ("full", "reduced"))
    layers = available()
    missing = [layer for layer in LAYERS if layer not in layers]
    if missing and confinement == "full":
        raise ArgumentError(
            "confinement",
            confinement,
            f"needs {', '.join(missing)}, which this machine does not have (seccomp: x86_64; "
            "landlock: Linux 5.13, switched on; tmpfs: root that may mount, or user namespaces): "
            f"choose reduced, which is {', '.join(layers)} alone, or grade on another machine.",
        )
    if missing:
        logger.warning(
            "%s: programs are confined by %s alone, without %s (confinement=reduced)",
            name,
            ", ".join(layers),
            ", ".join(missing),
        )
    return layers


class Leetcode(CodeTask):
    """Rows with `problem`, `solutions` and `tests.functional`, source that defines and calls
    `check`.

    Programs find the names that the site's own environment imports for them, its ListNode and
    TreeNode among them, and tests the helpers for these; level-order lists stand for trees.
    """

    name = "leetcode"
    preamble = LEETCODE + LEETCODE_NODES

    def __init__(
        self,
        *,
        question_field: str = "problem",
        tests_field: str = "tests.functional",
        worked_field: str | None = "solutions",
        **other: Any,
    ) -> None:
        super().__init__(
            question_field=question_field,
            tests_field=tests_field,
            worked_field=worked_field,
            **other,
        )


class Mbpp(CodeTask):
    """Rows as in MBPP (Austin et al. 2021, arXiv:2108.07732): `text`, `code`, `test_list`,
    `test_setup_code`.

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
        return Record(
            f"{record.question}\nYour code must pass: {shown}",
            record.answer,
            record.worked,
            record.meta,
        )
