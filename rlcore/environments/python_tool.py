"""A task's problem with a tool: Python programs in the sandbox of the graders, or a calculator."""

from __future__ import annotations

import random
import re

from rlcore.environments.protocol import (
    Action,
    Environment,
    Opening,
    Reply,
    answer_calls,
    tool_schema,
)
from rlcore.errors import UserError
from rlcore.graders.sandbox import Limits, Sandbox
from rlcore.interfaces import Task
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.code import confining_layers
from rlcore.tasks.grades import grade_text
from rlcore.types import Grade, Item

# Runs in the confined process. What ends it early is shown without the frames of the sandbox, and
# the value of a last expression is shown as an interpreter does.
HARNESS = """
import ast, contextlib, io, os, sys, traceback
earlier, program = {earlier!r}, {program!r}
names = {{"__name__": "__main__"}}

def run(source):
    tree = ast.parse(source)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<program>", "exec"), names)
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), "<program>", "eval"), names)
        if value is not None:
            print(repr(value))

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for source in earlier:
        run(source)
try:
    run(program)
except BaseException as error:
    print("".join(traceback.format_exception_only(error)).strip())
    sys.stdout.flush()
    os._exit(1)
"""
NOTHING = "(no output)"


class PythonTool(Environment):
    """Any task whose answers may be computed: the tool `python` runs programs, and the first turn
    that does not call it is the answer, which the task grades.

    A session lasts over the turns: programs find the names of those before them, because these are
    run again first, without their output. A program that fails leaves nothing behind. Each has
    `timeout_s` seconds, those before it included. confinement: as in the tasks of programs.
    """

    asks_task = True

    offers_tools = True

    def __init__(
        self,
        task: Task,
        *,
        timeout_s: float = 5.0,
        memory_mib: int = 512,
        confinement: str = "full",
    ) -> None:
        self._task = task
        self._limits = Limits(timeout_s=float(timeout_s), memory_mib=memory_mib)
        try:
            self._layers = confining_layers("environment python_tool", confinement)
        except ArgumentError as error:
            raise UserError(error.sentence("environment.args")) from error
        self._sandbox: Sandbox | None = None

    def reset(self, item: Item, seed: int) -> Opening:
        self._item = item
        self._answer = ""
        self._earlier: list[str] = []  # programs that ran to their end
        self._runs = 0
        self._failed = 0
        return Opening(item.opening(), [tool_schema(self.python)])

    def step(self, action: Action) -> Reply:
        if not action.tool_calls:
            self._answer = action.text
            return Reply(over=True)
        return Reply(answer_calls({"python": self.python}, action.tool_calls))

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Names stay defined for later calls."""
        if self._sandbox is None:
            self._sandbox = Sandbox(self._limits, layers=self._layers)
        self._runs += 1
        outcome = self._sandbox.run(HARNESS.format(earlier=self._earlier, program=code))
        shown = outcome.output.strip()
        if outcome.passed:
            self._earlier.append(code)
            return shown or NOTHING
        self._failed += 1
        # an exception is in the output; a limit is not
        return shown if outcome.why.startswith("exit code") and shown else f"Error: {outcome.why}"

    def grade(self) -> Grade:
        verdict = grade_text(self._task, self._item, self._answer)
        counts = {"programs": float(self._runs), "failed_programs": float(self._failed)}
        return Grade(verdict.reward, {**verdict.parts, **counts})

    def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


FORMULA = re.compile(r"(-?[0-9]{1,15})([-+*])(-?[0-9]{1,15})")
UNREADABLE = "="  # the answer to a formula that cannot be read, for a fresh model


def calculate(expression: str) -> str:
    """Compute a sum, a difference or a product of two whole numbers, such as 17*25."""
    found = FORMULA.fullmatch(expression.replace(" ", ""))
    if found is None:
        raise ValueError(f"{expression[:40]!r} is not two whole numbers with + - or * between them")
    a, op, b = int(found[1]), found[2], int(found[3])
    return str(a + b if op == "+" else a - b if op == "-" else a * b)


class Calculator(Environment):
    """Any task whose answers may be computed, with the tool `calculate`; the first turn that does
    not call it is the answer, which the task grades.

    `plain`: for fresh models, which have no form of tool calls. A turn that begins with `=` is then
    the call, as in a spreadsheet: `12*34=` may be answered by `=12*34`, and this by `408=`. Of the
    worked episodes the share `taught` calls the tool; the others answer at once.
    """

    asks_task = True

    def __init__(self, task: Task, *, plain: bool = False, taught: float = 1.0) -> None:
        if not 0 <= taught <= 1:
            raise ValueError("taught must be a share from 0 to 1")
        self._task = task
        self._plain = plain
        self._taught = taught

    def reset(self, item: Item, seed: int) -> Opening:
        self._item = item
        self._answer = ""
        self._calls = self._failed = 0
        self._shows = random.Random(seed).random() < self._taught
        return Opening(item.opening(), [] if self._plain else [tool_schema(calculate)])

    def step(self, action: Action) -> Reply:
        if self._plain and action.text.startswith("="):
            return Reply([{"role": "user", "content": self._computed(action.text[1:])}])
        if action.tool_calls:
            self._calls += len(action.tool_calls)
            return Reply(answer_calls({"calculate": calculate}, action.tool_calls))
        self._answer = action.text
        return Reply(over=True)

    def _computed(self, formula: str) -> str:
        self._calls += 1
        try:
            return f"{calculate(formula)}="
        except ValueError:
            self._failed += 1
            return UNREADABLE

    def grade(self) -> Grade:
        verdict = grade_text(self._task, self._item, self._answer)
        counts = {"calls": float(self._calls)}
        if self._plain:
            counts["failed_calls"] = float(self._failed)
        return Grade(verdict.reward, {**verdict.parts, **counts})

    def worked(self) -> str | None:
        answer = self._task.worked_answer(self._item)
        if self._plain and self._shows and not self._calls:
            return f"={self._item.question.removesuffix('=')}"
        return answer
