"""A user's data file with a user's grader function: a task that is a data file and a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.registry import LoadError, load_object
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.grades import as_grade, wants_tokens
from rlcore.tasks.records import (
    Record,
    RecordTask,
    pick,
    pick_answers,
    pick_question,
    pick_text,
)
from rlcore.types import Grade, Item


class FileTask(RecordTask):
    """`grader` is "package.module:function" or "path/to/file.py:function", called as function(item,
    response), and with tokens=[...], the text of every sampled token, if it has that parameter.

    `question_field` holds a text or the messages of a conversation; None: the column question,
    prompt or messages. The function returns a number, a list with one for every token, either of
    them as (it, {part: number}), or a `Grade`, and raises when it cannot judge. `answer_field` may
    be None if the grader needs no reference. A list in it holds accepted answers: item.answer is
    the first, item.meta["answers"] are all. `meta_fields` are columns (JSON-able values, also null)
    that the grader finds in `item.meta`; `worked_field` is a column of full answers for supervised
    warm-up; without it, a conversation's last turn is one, if it is the assistant's.
    """

    name = "file"

    def __init__(
        self,
        *,
        grader: str,
        question_field: str | None = None,
        answer_field: str | None = "answer",
        worked_field: str | None = None,
        meta_fields: Sequence[str] = (),
        **files: Any,
    ) -> None:
        try:
            self._grader = load_object(str(grader))
        except LoadError as error:
            raise ArgumentError("grader", grader, str(error)) from error
        if not callable(self._grader):
            raise ArgumentError("grader", grader, "is not a function.")
        if isinstance(meta_fields, str):
            raise ArgumentError(
                "meta_fields", meta_fields, "is not accepted: give a list of column names."
            )
        self._fields = question_field, answer_field, worked_field
        self._meta_fields = list(meta_fields)
        super().__init__(**files)

    def record(self, row: dict[str, Any]) -> Record:
        question, answer, worked = self._fields
        asked = pick_question(row, question)
        answers = pick_answers(row, answer) if answer else [""]
        return Record(
            asked.question,
            answers[0],
            pick_text(row, worked) if worked else asked.answer,
            {name: pick(row, name, empty=True) for name in self._meta_fields},
            asked.messages,
            tuple(answers) if len(answers) > 1 else (),
        )

    def grade(self, item: Item, response: str, tokens: Sequence[str] = ()) -> Grade:
        further = {"tokens": tokens} if wants_tokens(self._grader) else {}
        return as_grade(self._grader(item, response, **further))
