"""Competition mathematics (MATH, AIME, AMC and the like), judged by equivalence of answers."""

from __future__ import annotations

from typing import Any

from rlcore.graders.mathematics.math_answers import equivalent, final_answer, last_boxed, spelled
from rlcore.tasks.arguments import share
from rlcore.tasks.grades import weighted
from rlcore.tasks.row_tasks import (
    Record,
    RecordTask,
    accepted,
    pick_answers,
    pick_question,
    pick_text,
)
from rlcore.types import Grade, Item


class Math(RecordTask):
    """Columns `problem` and `answer` by default. A response's answer is its last \\boxed{} that
    holds something, together with the boxes that only "and", "or" or a comma separates from it.
    Without one it is what follows its last ####, then "the answer is", then its last formula or
    number.

    A list of answers in a row are alternatives, each of which is right.
    reward = (1 - format_reward) * correct + format_reward * (there is a \\boxed answer). An answer
    that cannot be read or compared is wrong. `worked_field` names a column with full solutions,
    used for supervised warm-up; without it the worked answer is the boxed reference.
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
        reference, *others = pick_answers(row, answer)
        solution = pick_text(row, worked) if worked else ""
        # Published solutions do not always box their answer.
        if "\\boxed" not in solution or last_boxed(solution) != reference:
            solution = f"{solution}\n\\boxed{{{reference}}}".lstrip()
        asked = pick_question(row, question)
        return Record(
            asked.question,
            reference,
            solution,
            messages=asked.messages,
            accepted=(reference, *others) if others else (),
        )

    def grade(self, item: Item, response: str) -> Grade:
        found = final_answer(response)
        correct = any(equivalent(answer, found.texts) for answer in accepted(item))
        answer = spelled(found.texts)
        return weighted(correct, found.boxed, self._format_reward, answer=answer)
