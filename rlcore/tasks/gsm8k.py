"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with a number for an
answer."""

from __future__ import annotations

import re
from typing import Any

from rlcore.tasks.arguments import share
from rlcore.tasks.grades import weighted
from rlcore.tasks.math_answers import final_number, is_number, number_text
from rlcore.tasks.records import Record, RecordTask, RowError, pick_question, pick_text
from rlcore.types import Grade, Item

CALCULATOR = re.compile(r"<<[^<>]*>>")


class Gsm8k(RecordTask):
    """Columns `question` and `answer`, the answer ending in `#### N`, as published.

    The response's number is the one after its last `####`, else in its last \\boxed{}, else its
    last number, read as `math` reads answers. reward = (1 - format_reward) * correct +
    format_reward * (the number was marked by #### or \\boxed). The worked answer is the
    published solution without its calculator marks.
    """

    name = "gsm8k"

    def __init__(
        self,
        *,
        question_field: str = "question",
        answer_field: str = "answer",
        format_reward: float = 0.0,
        **files: Any,
    ) -> None:
        self._fields = question_field, answer_field
        self._format_reward = share("format_reward", format_reward)
        super().__init__(**files)

    def record(self, row: dict[str, Any]) -> Record:
        question_field, answer_field = self._fields
        solution = pick_text(row, answer_field, answer=True)
        _, mark, final = solution.rpartition("####")
        number = number_text(final)
        if not mark or number is None:
            raise RowError(
                f"field {answer_field} does not end in '#### <number>'", missing_answer=True
            )
        asked = pick_question(row, question_field)
        worked = CALCULATOR.sub("", solution)
        return Record(asked.question, number, worked, messages=asked.messages)

    def grade(self, item: Item, response: str) -> Grade:
        found = final_number(response)
        return weighted(is_number(item.answer, found), found.marked, self._format_reward)
