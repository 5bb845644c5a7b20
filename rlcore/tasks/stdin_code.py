"""Programs that read standard input and print, judged by their output: rows as in APPS, TACO and
LiveCodeBench."""

from __future__ import annotations

import base64
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlcore.graders.sandbox import ProgramTests, Sandbox, available
from rlcore.tasks import proof
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.code import CodeTask, own_frames
from rlcore.tasks.grades import weighted
from rlcore.tasks.row_tasks import Record, RowError, pick, pick_text
from rlcore.types import Grade, Item

# Run in the judge; `answer` is the sandbox's.
TESTS = """
from sandbox import outputs
cases = {cases!r}
def result(given):
    return {call}
outputs.judge(result, cases, outputs.{same}, {tolerance!r})
"""
PASSED = re.compile(r"AssertionError: passed (\d+) of (\d+) tests")
MOST_UNPACKED = 1 << 30  # bytes of a row's tests


class StdinCode(CodeTask):
    """Rows with `question`, `solutions` and `input_output`, JSON of {"inputs", "outputs"}, with
    "fn_name" for functions; or a list of {"input", "output"} as in LiveCodeBench, whose private
    tests are compressed. tests_field may name several columns, whose tests are joined. The
    function of a row without "fn_name" is at function_field, where it has that.

    A program that reads and prints runs in its own process for each test. Outputs are compared
    by their tokens, numbers with a point with `tolerance`; an output that is a list of texts names
    several that are accepted. A program has timeout_s seconds for all its tests.
    partial_credit: the reward is the share of tests passed; a program that exceeds a limit has
    none.
    """

    name = "stdin_code"

    def __init__(
        self,
        *,
        question_field: str = "question",
        tests_field: str | Sequence[str] = "input_output",
        function_field: str = "metadata.func_name",
        worked_field: str | None = "solutions",
        partial_credit: bool = False,
        tolerance: float = 1e-6,
        **other: Any,
    ) -> None:
        if not isinstance(partial_credit, bool):
            raise ArgumentError("partial_credit", partial_credit, "is not true or false.")
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or tolerance < 0:
            raise ArgumentError("tolerance", tolerance, "is not accepted: give a number from 0 on.")
        if not {"tmpfs", "landlock"} & set(available()):
            raise ArgumentError(
                "confinement",
                other.get("confinement", "full"),
                "does not help here: a program writes its output to a file, which needs tmpfs or "
                "landlock, and this machine has neither; grade on another machine.",
            )
        self._partial = partial_credit
        self._tolerance = float(tolerance)
        self._tests_fields = [tests_field] if isinstance(tests_field, str) else list(tests_field)
        if not all(isinstance(f, str) for f in (*self._tests_fields, function_field)):
            raise ArgumentError("tests_field", tests_field, "does not name columns.")
        self._function_field = function_field
        super().__init__(
            question_field=question_field,
            tests_field=", ".join(self._tests_fields),
            worked_field=worked_field,
            **other,
        )

    def record(self, row: dict[str, Any]) -> Record:
        question, tests_field, worked, _ = self._fields
        named = _function(row, self._function_field)
        try:
            found = [_cases(_unpacked(pick(row, f, answer=True))) for f in self._tests_fields]
            function = next((name for _, name in found if name), named)
            cases = _read([case for listed, _ in found for case in listed], function)
        except RowError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            why = (
                f'field {tests_field} is not {{"inputs", "outputs"}} with as many of each: {error}'
            )
            raise RowError(why, missing_answer=True) from error
        solutions = _json(row.get(worked)) if worked else None
        listed = solutions if isinstance(solutions, list) else [solutions]
        solution = next((s for s in listed if isinstance(s, str) and s.strip()), None)
        return Record(
            pick_text(row, question),
            solution or "",
            None if solution is None else f"```python\n{solution.strip()}\n```",
            {"tests": self._tests(cases, function, solution or "")},
        )

    def _tests(self, cases: list[Any], function: str, solution: str) -> ProgramTests:
        method = "class Solution" in solution or not solution
        call, same = "answer(given)", "same_output"
        if function:
            own = f"Solution().{function}" if method else function
            call, same = f"{own}(*given)", "same_value"
        source = TESTS.format(cases=cases, call=call, same=same, tolerance=self._tolerance)
        if not function:
            return ProgramTests(source, script=True)
        names = ("Solution" if method else function,)
        return ProgramTests(source, names, ("Solution",) if method else ())

    def claim(self, record: Record) -> proof.Claim:
        tests, reference = record.meta["tests"], record.answer or None
        content = json.dumps([asdict(self._limits), reference, asdict(tests)])

        def check(sandbox: Sandbox) -> proof.RowProof:
            if not tests.script:
                return proof.proven(sandbox, reference, tests)
            if reference is not None:
                outcome = proof.patiently(sandbox, reference, tests)
                if not outcome.passed:
                    return proof.RowProof(f"its reference fails: {outcome.why.splitlines()[0]}")
            if sandbox.run("pass", tests).passed:
                return proof.RowProof("its tests pass a program that prints nothing")
            return proof.RowProof()

        return proof.Claim(content, check)

    def attempt(self, item: Item, response: str) -> tuple[Grade, str]:
        outcome, fenced = self._outcome(item, response)
        passed = outcome.passed and bool(outcome.calls)
        counted = PASSED.match(outcome.why)
        share = int(counted[1]) / int(counted[2]) if counted else float(passed)
        grade = weighted(passed, fenced, self._format_reward, passed=share)
        if self._partial:
            reward = grade.reward + (1 - self._format_reward) * (share - passed)
            grade = Grade(reward, grade.parts)
        why = "" if passed else f"{own_frames(outcome.output)}\n{outcome.why}".strip()
        return grade, why


def _json(value: Any) -> Any:
    """A value that a column may hold as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _unpacked(value: Any) -> Any:
    """The tests of a column: plain, as JSON text, or as LiveCodeBench compresses its private ones,
    base64 of zlib of a pickled text of JSON. Raises ValueError."""
    value = _json(value)
    if not isinstance(value, str):
        return value
    try:
        inflate = zlib.decompressobj()
        pickled = inflate.decompress(base64.b64decode(value, validate=True), MOST_UNPACKED)
        text = _pickled_text(pickled)
    except (ValueError, zlib.error) as error:
        raise ValueError("it is neither JSON nor compressed JSON") from error
    if not inflate.eof:
        raise ValueError(f"its compressed content is not text of at most {MOST_UNPACKED >> 20} MiB")
    return json.loads(text)


# The operations of a pickle that is one text. Nothing is executed: only the text is read.
_TEXT = frozenset(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"))
_AROUND = frozenset(("PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP"))


def _pickled_text(data: bytes) -> str:
    """The text that was pickled. Raises ValueError for a pickle of anything else."""
    found = [(op.name, value) for op, value, _ in pickletools.genops(data)]
    texts = [str(value) for name, value in found if name in _TEXT]
    others = {name for name, _ in found} - _TEXT - _AROUND
    if len(texts) != 1 or others:
        raise ValueError("it is not pickled text")
    return texts[0]


def _function(row: Mapping[str, Any], path: str) -> str:
    """The name at a dotted path, whose first part may be a record as JSON text; "": none is."""
    first, _, rest = path.partition(".")
    value = _json(row.get(first))
    for part in rest.split(".") if rest else ():
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def _cases(given: Any) -> tuple[list[Any], str]:
    """([(input, output)], name of the function, "" where none is named). Raises ValueError,
    KeyError or TypeError."""
    if isinstance(given, list):
        function = next((c["fn_name"] for c in given if c.get("fn_name")), "")
        return [(case["input"], case["output"]) for case in given], function
    pairs = list(zip(given["inputs"], given["outputs"], strict=True))
    return pairs, given.get("fn_name") or ""


def _read(pairs: Sequence[Any], function: str) -> list[Any]:
    """[(input, accepted outputs)], of calls where there is a function. Raises ValueError or
    TypeError."""
    if not pairs:
        raise ValueError("there are no tests")
    if function:
        if not function.isidentifier():
            raise ValueError(f"fn_name {function!r} is not a name")
        return [(_arguments(i), _accepted(_json(o))) for i, o in pairs]
    return [(_text(i), [_text(o)] if isinstance(o, str) else list(map(_text, o))) for i, o in pairs]


def _arguments(given: Any) -> list[Any]:
    """Arguments of a call: a list, or a JSON value a line as in LiveCodeBench."""
    if isinstance(given, str):
        return [_json(line) for line in given.split("\n") if line.strip()]
    return list(given)


def _accepted(output: Any) -> list[Any]:
    """The accepted values: a returned value, and where it is a list of one, as APPS writes it, its
    element."""
    return [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value
