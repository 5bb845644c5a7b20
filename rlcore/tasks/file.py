"""A user's data file with a user's reward functions: a task that is a data file and a function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.errors import Faults
from rlcore.tasks.arguments import ArgumentError, one_of
from rlcore.tasks.reward_functions import GROUND_TRUTH, OWN, RewardFunction, weighted_sum
from rlcore.tasks.row_files import fault
from rlcore.tasks.row_tasks import (
    Record,
    RecordTask,
    RowError,
    pick,
    pick_answers,
    pick_question,
    pick_text,
)
from rlcore.types import Grade, Item

BY_FORM = "auto"  # the first of the columns that the grader's form names


class FileTask(RecordTask):
    """`grader` is "package.module:function" or "path/to/file.py:function", or a list of them, whose
    rewards are added up with `grader_weights`; `grader_args` are keyword arguments of every call.

    A function has one of the forms of `reward_functions.py`. rlcore's own is called as
    function(item, response), and with tokens=[...], the text of every sampled token, if it has that
    parameter. It returns a number, a list with one for every token, either of them as (it, {part:
    number}), or a `Grade`. It raises when it cannot judge.

    `question_field` holds a text or the messages of a conversation; None: the column question,
    prompt or messages. `answer_field` may be None if the grader needs no reference. A list in it
    holds accepted answers: item.answer is the first, item.meta["answers"] are all. `meta_fields`
    are columns (JSON-able values, also null) that the grader finds in `item.meta`; columns that a
    function of another trainer asks for need not be listed. `completions` is the form in which
    TRL's functions get responses: "text", "messages", or "auto", as the question has it.
    `worked_field` is a column of full answers for supervised warm-up; without it, a conversation's
    last turn is one, if it is the assistant's.
    """

    name = "file"

    def __init__(
        self,
        *,
        grader: str | Sequence[str],
        grader_weights: Sequence[float] | None = None,
        grader_args: Mapping[str, Any] | None = None,
        completions: str = "auto",
        question_field: str | None = None,
        answer_field: str | None = BY_FORM,
        worked_field: str | None = None,
        meta_fields: Sequence[str] = (),
        **files: Any,
    ) -> None:
        sources, faults = [grader] if isinstance(grader, str) else list(grader), Faults()
        found = [faults.of(RewardFunction.load, str(s), grader_args or {}) for s in sources]
        self._functions = [function for function in found if function is not None]
        if len(self._functions) == len(found):
            self._weights = faults.of(_weights, grader_weights, self._functions) or []
        chosen = faults.of(one_of, "completions", completions, ("auto", "text", "messages"))
        self._messages = None if chosen == "auto" else chosen == "messages"
        if isinstance(meta_fields, str):
            why = "is not accepted: give a list of column names."
            faults.add(ArgumentError("meta_fields", meta_fields, why))
            meta_fields = []
        self._fields = question_field, answer_field, worked_field
        self._meta_fields = list(meta_fields)
        faults.of(super().__init__, **files)
        faults.end()

    def record(self, row: dict[str, Any]) -> Record:
        question, _, worked = self._fields
        asked = pick_question(row, question)
        if self._messages is None and asked.field is not None:
            self._messages = not isinstance(pick(row, asked.field), str)
        answers, raw = self._reference(row)
        meta = self._columns(row, asked.field, {"answer"} if answers[0] else set())
        meta |= {name: pick(row, name, empty=True) for name in self._meta_fields}
        return Record(
            asked.question,
            answers[0],
            pick_text(row, worked) if worked else asked.answer,
            meta if raw is None else {**meta, GROUND_TRUTH: raw},
            asked.messages,
            tuple(answers) if len(answers) > 1 else (),
        )

    def _reference(self, row: dict[str, Any]) -> tuple[list[str], Any]:
        """(accepted answers, the row's own value where functions of other trainers are given
        it)."""
        if not self._functions:  # none could be loaded, which is said
            return [""], None
        path, form = self._fields[1], self._functions[0].form
        if path == BY_FORM:
            path = next((p for p in form.answers if not p or _has(row, p)), "answer")
        if not path:
            return [""], None
        if form is OWN:
            return pick_answers(row, path), None
        value = pick(row, path, answer=True)
        if isinstance(value, str):
            return [value], None
        return [json.dumps(value, ensure_ascii=False)], value

    def _columns(
        self, row: dict[str, Any], question: str | None, known: set[str]
    ) -> dict[str, Any]:
        """The columns that the functions take; `known`: parameters that need no column."""
        named = set().union(*(f.columns() for f in self._functions))
        missing = set().union(*(f.needed() for f in self._functions)) - row.keys() - known
        if missing:
            raise RowError(
                f"it has no {', '.join(sorted(missing))}, which the grader takes (the row has: "
                f"{', '.join(map(str, row))})"
            )
        if any(f.all_columns for f in self._functions):
            named |= {name for name, value in row.items() if fault(value, name) is None}
        skipped = {question, "prompt", "completion", "completion_ids"}
        return {name: row[name] for name in row if name in named and name not in skipped}

    def grade(self, item: Item, response: str, tokens: Sequence[str] = ()) -> Grade:
        messages = bool(self._messages)
        graded = [f.grade(item, response, tokens, messages) for f in self._functions]
        return weighted_sum(self._functions, self._weights, graded)

    def remarks(self) -> list[str]:
        called = [
            f"the grader {f.source} is called as {f.form.call}"
            for f in self._functions
            if f.form is not OWN
        ]
        return [*called, *super().remarks()]


def _weights(given: Sequence[float] | None, functions: Sequence[RewardFunction]) -> Sequence[float]:
    names = [f.name for f in functions]
    twice = {name for name in names if names.count(name) > 1}
    if not names or twice:
        listed = [f.source for f in functions]
        why = f"names {min(twice)} twice." if twice else "names no function."
        raise ArgumentError("grader", listed, why)
    if given is None:
        return [1.0] * len(names)
    numbers = not isinstance(given, str) and all(
        isinstance(w, int | float) and not isinstance(w, bool) for w in given
    )
    if not numbers or len(given) != len(names):
        why = f"is not accepted: give a number for each of {', '.join(names)}."
        raise ArgumentError("grader_weights", given, why)
    return list(given)


def _has(row: dict[str, Any], path: str) -> bool:
    try:
        return pick(row, path, empty=True) is not None
    except RowError:
        return False
