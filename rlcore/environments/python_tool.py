"""A task's problem with a Python tool: programs run in the sandbox of the code graders."""

from __future__ import annotations

from rlcore.environments.protocol import (
    Action,
    Environment,
    Opening,
    Reply,
    answer_calls,
    tool_schema,
)
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.code import confining_layers
from rlcore.tasks.grades import grade_text
from rlcore.tasks.sandbox import Limits, Sandbox
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
