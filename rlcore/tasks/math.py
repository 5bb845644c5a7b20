"""Competition mathematics (MATH, AIME, AMC and the like), judged by equivalence with
math-verify."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from rlcore.tasks.arguments import share
from rlcore.tasks.conversations import pick_question
from rlcore.tasks.grades import weighted
from rlcore.tasks.records import Record, RecordTask, pick_text
from rlcore.types import Grade, Item

# math-verify's own limits use the alarm signal, which the scorer's deadline needs; it warns that
# they are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)
REFERENCE = (LatexExtractionConfig(),)
RESPONSE = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


class Math(RecordTask):
    """Columns `problem` and `answer` by default. A response's answer is its last \\boxed{}, else
    its last formula.

    reward = (1 - format_reward) * correct + format_reward * (there is a \\boxed answer).
    `worked_field` names a column with full solutions, used for supervised warm-up; without it the
    worked answer is the boxed reference.
    """

    name = "math"

    def __init__(
        self,
        *,
        question_field: str = "problem",
        answer_field: str = "answer",
        worked_field: str | None = None,
        format_reward: float = 0.0,
        **files: Any,
    ) -> None:
        self._fields = question_field, answer_field, worked_field
        self._format_reward = share("format_reward", format_reward)
        super().__init__(**files)

    def record(self, row: dict[str, Any]) -> Record:
        question, answer, worked = self._fields
        reference = pick_text(row, answer, answer=True)
        solution = pick_text(row, worked) if worked else ""
        if last_boxed(solution) != reference:  # published solutions do not always box their answer
            solution = f"{solution}\n\\boxed{{{reference}}}".lstrip()
        asked = pick_question(row, question)
        return Record(asked.question, reference, solution, messages=asked.messages)

    def grade(self, item: Item, response: str) -> Grade:
        boxed = last_boxed(response)
        return weighted(
            _equivalent(item.answer, response, boxed), boxed is not None, self._format_reward
        )


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{...}, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7 : i]
    return None


def _equivalent(reference: str, response: str, boxed: str | None) -> bool:
    if boxed is not None and "".join(boxed.split()) == "".join(reference.split()):
        return True
    answer = math_verify.parse(
        response if boxed is None else f"\\boxed{{{boxed}}}",
        extraction_config=RESPONSE,
        parsing_timeout=None,
    )
    # Errors are raised: an answer that could not be compared is a failed score, not a wrong answer.
    return math_verify.verify(_parsed(reference), answer, timeout_seconds=None, raise_on_error=True)


@lru_cache(maxsize=4096)
def _parsed(reference: str) -> list[Any]:
    """Parsed forms of the reference; none if it is not a formula, which then equals only the same
    text."""
    return math_verify.parse(f"${reference}$", extraction_config=REFERENCE, parsing_timeout=None)
