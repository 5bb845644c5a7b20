"""Programming problems judged by running their tests: LeetCode-style and MBPP-style rows."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import json
import logging
import re
import symtable
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.interfaces import Split
from rlcore.tasks import proof
from rlcore.tasks.arguments import ArgumentError, integer, one_of, share
from rlcore.tasks.fences import defined_names, find_program
from rlcore.tasks.grades import weighted
from rlcore.tasks.records import Record, RecordTask, RowError, pick, pick_text
from rlcore.tasks.sandbox import LAYERS, Limits, ProgramTests, Sandbox, SandboxError, available
from rlcore.types import Grade, Item


class BadTests(ValueError):
    """Tests that cannot judge a program; the message says why."""


# Modules that tests name the program by, in `from solution import f`.
PROGRAM_MODULES = frozenset(
    {"solution", "solutions", "your_solution", "program", "submission", "answer", "candidate"}
    | {"main", "your_module", "my_module", "your_code"}
)
ALIASES = {"np": "numpy", "numpy": "numpy"}
NOT_LIBRARY = frozenset({"antigravity", "this", "__main__", "tkinter", "turtle", "idlelib"})
CLASS_NAME = re.compile(r"[A-Z]+[a-z0-9]+(?:[A-Z]+[a-z0-9]*)*")


def program_tests(source: str, reference: str, given: Collection[str]) -> ProgramTests:
    """Tests with the names that the program must define.

    These are what the reference solution defines, and what neither Python nor the preamble (its
    names are `given`) nor the tests themselves define, nor an import of the reference or a module
    of the library that the tests name. Everything else in the tests, `set`, `sorted` and `np` among
    it, has Python's own meaning, whatever the program does to it.

    Without a reference a function under test may have the name of one that is given (`gcd`): if
    there is no other candidate, it is what the tests call first. Raises BadTests for tests that
    are not Python or that use nothing of a program.
    """
    try:
        source, asked = _without_program_imports(source)
        used = _free_names(source) | asked
    except (SyntaxError, ValueError) as error:
        raise BadTests(f"not Python: {error}") from error
    own = defined_names(reference) & used
    imports = {n: text for n, text in _imports(reference).items() if n in used - own - asked}
    imports |= {
        name: _library(source, name)
        for name in used - own - set(given) - set(imports) - asked
        if _library(source, name)
    }
    known = set(given) | set(dir(builtins)) | set(imports)
    found = own | asked | (used - known)
    if not found:
        called = [name for name in _called(source) if name in used]
        found = set([*(n for n in called if n in given or n in imports), *called][:1])
    if not found:
        raise BadTests("they use no name that a program could define")
    classes = _classes(reference) if own else {n for n in found if CLASS_NAME.fullmatch(n)}
    return ProgramTests(
        source,
        tuple(sorted(found)),
        tuple(sorted(found & classes)),
        "\n".join(sorted({text for name, text in imports.items() if name not in found})),
    )


def _without_program_imports(source: str) -> tuple[str, set[str]]:
    """Tests without imports of the program, and the names that these gave them."""
    tree = ast.parse(source)
    asked: set[str] = set()
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES:
            asked |= {alias.name for alias in node.names if alias.name != "*"}
            renamed = [f"{a.asname} = {a.name}" for a in node.names if a.asname]
            tree.body[at] = ast.parse("; ".join(renamed) or "pass").body[0]
    # the text unchanged, with its own lines, where nothing is left out
    return (ast.unparse(tree) if asked else source), asked


def _imports(source: str) -> dict[str, str]:
    """The statement that imports a name, for each import at the top level of a solution."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return {}
    found = {}
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = ast.unparse(ast.Import([alias]))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                text = ast.unparse(ast.ImportFrom(node.module, [alias], 0))
                names = _public(node.module) if alias.name == "*" else [alias.asname or alias.name]
                found |= dict.fromkeys(names, text)
    return found


def _public(module: str) -> list[str]:
    """Names that a star import of a library module gives; none of any other module."""
    if module.partition(".")[0] not in sys.stdlib_module_names - NOT_LIBRARY:
        return []
    found = importlib.import_module(module)
    return list(getattr(found, "__all__", [n for n in vars(found) if not n.startswith("_")]))


def _library(source: str, name: str) -> str:
    """The statement that imports a library module which the tests use without importing it: a name
    that only has its attributes read, all of which the module has; "" for any other name."""
    module = ALIASES.get(name, name)
    if module not in sys.stdlib_module_names - NOT_LIBRARY and name not in ALIASES:
        return ""
    tree = ast.parse(source)
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
    bases = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.value in reads]
    if len(bases) != len(reads) or importlib.util.find_spec(module) is None:
        return ""
    found = importlib.import_module(module)
    whole = all(hasattr(found, base.attr) for base in bases)
    return (f"import {module} as {name}" if module != name else f"import {name}") if whole else ""


def _classes(source: str) -> set[str]:
    try:
        return {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    except (SyntaxError, ValueError):
        return set()


def _free_names(source: str) -> set[str]:
    """Names that the source reads and does not define."""
    top = symtable.symtable(source, "<tests>", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    read = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    for table in _nested(top):
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                read.add(symbol.get_name())
            elif symbol.is_declared_global() and symbol.is_assigned():
                bound.add(symbol.get_name())
    return read - bound


def _nested(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _nested(child)


def _called(source: str) -> list[str]:
    """Names that are called, in the order of the source."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]


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
    goes before them. Tests and program run in processes of their own: see `sandbox`. A program that
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
        tests = item.meta["tests"]
        program, fenced = find_program(response, tests.names)
        try:
            outcome = self._started().run(program, tests)
        except BaseException:
            self._sandbox = None  # it has closed itself
            raise
        passed, why = outcome.passed, ""
        if not passed:
            why = f"{own_frames(outcome.output)}\n{outcome.why}".strip()
        elif not outcome.calls:
            passed, why = False, UNCALLED
        return weighted(passed, fenced, self._format_reward), why

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
            f"needs {', '.join(missing)}, which this machine does not have (seccomp: x86_64 only; "
            "landlock: Linux 5.13 or newer, switched on; tmpfs: root that may mount, or user "
            "namespaces): choose reduced to run programs that a "
            f"model wrote under {', '.join(layers)} alone, or grade on another machine.",
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
