"""Programming problems judged by running their tests: LeetCode-style and MBPP-style rows."""

from __future__ import annotations

import logging
import re
from typing import Any

from rlcore.errors import UserError
from rlcore.tasks import code_preamble
from rlcore.tasks.arguments import ArgumentError, integer, one_of, share
from rlcore.tasks.code_names import BadTests, names_under_test
from rlcore.tasks.grades import weighted
from rlcore.tasks.records import Record, RecordTask, RowError, pick, pick_text
from rlcore.tasks.sandbox import LAYERS, Limits, Sandbox, SandboxError, available
from rlcore.types import Grade, Item

FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)
TRACEBACK = "Traceback (most recent call last):\n"
PROGRAM_FRAME = '  File "<program>"'
logger = logging.getLogger(__name__)


class CodeTask(RecordTask):
    """A response's program is its last fenced block, or all of it; it is correct if its tests run
    to their end.

    `tests_field` holds Python source, or a list of sources (assertions); `setup_field` source that
    goes before them. Tests and program run in processes of their own: see `sandbox`. A program that
    exceeds a limit is wrong; a sandbox that fails raises. reward = (1 - format_reward) * correct +
    format_reward * (there is a fenced block). A program has timeout_s seconds, memory_mib MiB, no
    network, no children. confinement "full" refuses a machine that cannot confine programs by every
    layer (`sandbox.confinement`), "reduced" goes on with those that it has, and says so.
    """

    preamble = code_preamble.COMMON  # names that programs and tests find

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

    def record(self, row: dict[str, Any]) -> Record:
        question, tests_field, worked, setup_field = self._fields
        tests = pick(row, tests_field, answer=True)
        tests = "\n".join(map(str, tests)) if isinstance(tests, list | tuple) else tests
        if not isinstance(tests, str) or not tests.strip():
            raise RowError(
                f"field {tests_field} is not Python source or a list of it", missing_answer=True
            )
        setup = row.get(setup_field) if setup_field else None
        tests = f"{setup}\n{tests}" if isinstance(setup, str) and setup.strip() else tests
        solution = pick_text(row, worked) if worked else None
        try:
            names = names_under_test(tests, solution or "", self._given)
        except BadTests as error:
            raise RowError(f"field {tests_field}: {error}", missing_answer=True) from error
        return Record(
            pick_text(row, question),
            solution or "",
            None if solution is None else f"```python\n{solution.strip()}\n```",
            {"tests": tests, "names": names},
        )

    def grade(self, item: Item, response: str) -> Grade:
        return self.attempt(item, response)[0]

    def attempt(self, item: Item, response: str) -> tuple[Grade, str]:
        """The grade, and what a program that has not passed failed at: "" if it passed."""
        blocks = FENCE.findall(response)
        program = blocks[-1] if blocks else response
        try:
            outcome = self._started().run(program, item.meta["tests"], item.meta["names"])
        except BaseException:
            self._sandbox = None  # it has closed itself
            raise
        why = f"{_own_frames(outcome.output)}\n{outcome.why}".strip() if outcome.why else ""
        return weighted(outcome.passed, bool(blocks), self._format_reward), why

    def _started(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._limits, preamble=self.preamble, layers=self._layers)
        return self._sandbox

    def close(self) -> None:
        """End the sandbox's server; the next grading starts another."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def _own_frames(output: str) -> str:
    """A program's output without the sandbox's frames in its traceback."""
    before, found, trace = output.partition(TRACEBACK)
    at = trace.find(PROGRAM_FRAME)
    return f"{before}{TRACEBACK}{trace[at:]}" if found and at >= 0 else output


def confining_layers(name: str, confinement: str) -> tuple[str, ...]:
    """Layers of confinement to use on this machine, "full" or "reduced". `name`: who asks. Raises
    ArgumentError, says what is missing."""
    one_of("confinement", confinement, ("full", "reduced"))
    layers = available()
    missing = [layer for layer in LAYERS if layer not in layers]
    if missing and confinement == "full":
        raise ArgumentError(
            "confinement",
            confinement,
            f"needs {', '.join(missing)}, which this machine does not have (seccomp: x86_64 only; "
            "landlock: Linux 5.13 or newer, switched on): choose reduced to run programs that a "
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
    preamble = code_preamble.LEETCODE + code_preamble.LEETCODE_NODES

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
