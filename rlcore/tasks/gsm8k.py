"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with a number for an
answer."""

from __future__ import annotations

import re
from typing import Any

from rlcore.graders.mathematics.math_answers import final_number, is_number, number_text, spelled
from rlcore.tasks.arguments import share
from rlcore.tasks.grades import weighted
from rlcore.tasks.row_tasks import (
    Record,
    RecordTask,
    RowError,
    accepted,
    pick_answers,
    pick_question,
)
from rlcore.types import Grade, Item

CALCULATOR = re.compile(r"<<[^<>]*>>")


class Gsm8k(RecordTask):
    """Columns `question` (or `prompt`, `messages`) and `answer`, the answer ending in `#### N`, as
    published.

    The response's number is the one after its last `####`, else in its last \\boxed{}, else its
    last number, read as `math` reads answers. reward = (1 - format_reward) * correct +
    format_reward * (the number was marked by #### or \\boxed). The worked answer is the
    published solution without its calculator marks.
    """

    name = "gsm8k"

    def __init__(
        self,
        *,
        question_field: str | None = None,
        answer_field: str = "answer",
        format_reward: float = 0.0,
        **files: Any,
    ) -> None:
        self._fields = question_field, answer_field
        self._format_reward = share("format_reward", format_reward)
        super().__init__(**files)

    def record(self, row: dict[str, Any]) -> Record:
        question_field, answer_field = self._fields
        solutions = pick_answers(row, answer_field)
        numbers = [_number(solution, answer_field) for solution in solutions]
        asked = pick_question(row, question_field)
        worked = CALCULATOR.sub("", solutions[0])
        alternatives = tuple(numbers) if len(numbers) > 1 else ()
        return Record(
            asked.question, numbers[0], worked, messages=asked.messages, accepted=alternatives
        )

    def grade(self, item: Item, response: str) -> Grade:
        found = final_number(response)
        correct = any(is_number(answer, found) for answer in accepted(item))
        answer = spelled(found.texts)
        return weighted(correct, found.marked, self._format_reward, answer=answer)


def _number(solution: str, answer_field: str) -> str:
    """The number that a published solution ends in. Raises RowError for one without."""
    _, mark, final = solution.rpartition("####")
    number = number_text(final)
    if not mark or number is None:
        raise RowError(f"field {answer_field} does not end in '#### <number>'", missing_answer=True)
    return number
