"""Tasks whose problems are the rows of local data files, all validated when the task is built."""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import ceil
from typing import Any

from rlcore.errors import Faults
from rlcore.interfaces import Split, Task
from rlcore.seeding import derive_seed
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import ArgumentError, one_of
from rlcore.tasks.row_files import Meaningless, Row, fault, rows
from rlcore.types import Grade, Item, Message


@dataclass(frozen=True, slots=True)
class Record:
    """One validated row."""

    question: str
    answer: str
    worked: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # the whole conversation, where it is more than the question
    accepted: tuple[str, ...] = ()  # all answers that are right, where there are several
    row: int = 0  # its number in the file, from 1


class RowError(ValueError):
    """A row that cannot be used; `missing_answer` if the only fault is that it has no answer."""

    def __init__(self, why: str, missing_answer: bool = False) -> None:
        super().__init__(why)
        self.missing_answer = missing_answer


class RecordTask(Task, ABC):
    """`train_path` and `heldout_path` name a data file each, a list or a pattern of several, or a
    folder (`row_files.py`); one may be None, its split is then empty. `train_split` and
    `heldout_split` choose one of several splits in such a folder. Without held-out rows,
    `heldout_share` of the training rows are held out, by the hashes of their questions.

    A field is a column name or a dotted path into it (`reward_model.ground_truth`,
    `prompt.0.content`). `instruction` is appended to every question, on its own line, which is
    the last message of a conversation. missing_answer="skip" leaves
    rows without an answer out and counts them in `skipped`.
    """

    name: str

    def __init__(
        self,
        *,
        train_path: str | Sequence[str] | None = None,
        heldout_path: str | Sequence[str] | None = None,
        train_split: str | None = None,
        heldout_split: str | None = None,
        heldout_share: float = 0.0,
        instruction: str = "",
        missing_answer: str = "error",
    ) -> None:
        if train_path is None and heldout_path is None:
            raise ArgumentError(
                "train_path",
                None,
                "and task.args.heldout_path=None leave no data: give one of them.",
            )
        if not isinstance(instruction, str):
            raise ArgumentError("instruction", instruction, "is not accepted: give a text.")
        self._instruction = instruction
        self._skip = one_of("missing_answer", missing_answer, ("error", "skip")) == "skip"
        self._paths: dict[Split, str | Sequence[str] | None] = {
            "train": train_path,
            "heldout": heldout_path,
        }
        self._splits: dict[Split, str | None] = {"train": train_split, "heldout": heldout_split}
        # rows left out because they have no answer
        self.skipped: dict[Split, int] = {"train": 0, "heldout": 0}
        faults = Faults()
        self._records: dict[Split, list[Record]] = {
            split: faults.of(self._load, split) or [] for split in self._paths
        }
        faults.end()
        self._hold_out(heldout_share)

    @abstractmethod
    def record(self, row: Row) -> Record:
        """Validate one row. Raises RowError."""

    @abstractmethod
    def grade(self, item: Item, response: str) -> Grade:
        """See `rlcore.interfaces.Task`."""

    def keeps(self, split: Split, row: Row) -> bool:
        """Return whether a row of a split's file belongs to the split."""
        return True

    def _load(self, split: Split) -> list[Record]:
        path = self._paths[split]
        if path is None:
            return []
        argument, records = f"{split}_path", []
        for number, row in rows(argument, path, self._splits[split]):
            if not self.keeps(split, row):
                continue
            try:
                records.append(replace(self.record(row), row=number))
            except RowError as error:
                if not (error.missing_answer and self._skip):
                    skips = "; task.args.missing_answer=skip leaves such rows out"
                    why = f"{error}{skips if error.missing_answer else ''}"
                    raise _bad_row(argument, path, number, why) from error
                self.skipped[split] += 1
            except Exception as error:  # of any kind: a task may be a user's own
                why = f"{type(error).__name__}: {error}"
                raise _bad_row(argument, path, number, why) from error
        if not records:
            raise ArgumentError(
                argument, path, "is an empty data set: it has no row with an answer."
            )
        return records

    def _hold_out(self, share: float) -> None:
        """Move a share of the questions, at least one, from training to the held-out rows, those
        with the smallest hashes; rows of one question stay together."""
        if share == 0:
            return
        numeric = isinstance(share, int | float) and not isinstance(share, bool)
        if not numeric or not 0 < share < 1:
            raise ArgumentError(
                "heldout_share", share, "is not accepted: give a number between 0 and 1."
            )
        if self._paths["heldout"] is not None:
            raise ArgumentError(
                "heldout_share", share, "has a file in its place: leave it or heldout_path out."
            )
        rows = self._records["train"]
        asked = sorted({_asked(row) for row in rows}, key=lambda q: derive_seed(0, "heldout", q))
        held = set(asked[: ceil(share * len(asked))])
        if len(held) == len(asked):
            raise ArgumentError(
                "heldout_share", share, "leaves no question to train on: give more rows."
            )
        self._records["heldout"] = [r for r in rows if _asked(r) in held]
        self._records["train"] = [r for r in rows if _asked(r) not in held]

    def size(self, split: Split) -> int | None:
        return len(self._records[split])

    def item(self, split: Split, index: int) -> Item:
        records = self._records[split]
        if not records:
            raise ArgumentError(
                f"{split}_path", None, f"leaves the {split} split empty: name a file of problems."
            )
        record = records[index % len(records)]
        question = (
            f"{record.question}\n{self._instruction}" if self._instruction else record.question
        )
        meta = dict(record.meta)
        if record.worked is not None:
            meta["worked"] = record.worked
        if record.accepted:
            meta[ACCEPTED] = list(record.accepted)
        return Item(
            format_prompt_id(self.name, split, index),
            question,
            record.answer,
            meta,
            (*record.messages[:-1], {**record.messages[-1], "content": question})
            if record.messages
            else (),
        )

    def worked_answer(self, item: Item) -> str | None:
        return item.meta.get("worked")

    def alphabet(self) -> str | None:
        return None

    def remarks(self) -> list[str]:
        found = {split: count for split, count in self.skipped.items() if count}
        said = [f"{n} {split} rows without an answer are left out" for split, n in found.items()]
        return [*said, *self._contradictions()]

    def _contradictions(self) -> list[str]:
        """A line on questions that rows ask again with another answer: a policy cannot learn both,
        and no grader is right about both."""
        asked: dict[str, list[tuple[str, Record]]] = {}
        for split, records in self._records.items():
            for record in records:
                asked.setdefault(_asked(record), []).append((split, record))
        found = [
            same
            for same in asked.values()
            if len(same) > 1 and len({(r.answer, r.accepted) for _, r in same}) > 1
        ]
        if not found:
            return []
        shown = ["; ".join(_place(split, r) for split, r in same[:4]) for same in found[:3]]
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        count = "one question stands" if len(found) == 1 else f"{len(found)} questions stand"
        return [f"{count} in several rows with different answers: {' | '.join(shown)}{more}"]


def _asked(record: Record) -> str:
    return json.dumps(record.messages or record.question, sort_keys=True).strip()


def _place(split: str, record: Record) -> str:
    answer = record.answer if len(record.answer) <= 40 else f"{record.answer[:37]}..."
    return f"{split} row {record.row} ({answer!r})"


def _bad_row(argument: str, path: object, number: int, why: str) -> ArgumentError:
    first = why.splitlines()[0].rstrip(".")
    return ArgumentError(argument, path, f"has a bad row: row {number}: {first}.")


def accepted(item: Item) -> list[str]:
    """The answers of an item that are right."""
    return item.meta.get(ACCEPTED) or [item.answer]


def pick(row: Row, path: str, *, answer: bool = False, empty: bool = False) -> Any:
    """The value at a dotted path of a row. Raises RowError naming the path if it is absent, has no
    meaning, or, without `empty`, is null or blank."""
    value: Any = row
    for part in [path] if path in row else path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and part.isdecimal()
            and int(part) < len(value)
        ):
            value = value[int(part)]
        elif isinstance(value, Meaningless):
            break
        else:
            raise RowError(
                f"field {path} is absent (the row has: {', '.join(map(str, row))})", answer
            )
    why = fault(value, path)
    if why is not None:
        raise RowError(why, answer and why.endswith("is NaN"))  # as pandas writes a missing value
    if not empty and (value is None or (isinstance(value, str) and not value.strip())):
        raise RowError(f"field {path} is empty", answer)
    return value


def pick_text(row: Row, path: str, *, answer: bool = False) -> str:
    """Text at a dotted path; numbers are written out, whole floats without their `.0`."""
    return _written(pick(row, path, answer=answer), path)


def pick_answers(row: Row, path: str) -> list[str]:
    """The accepted answers at a dotted path: one, or a list of them."""
    try:
        value = pick(row, path, answer=True)
    except RowError as error:
        found = _elsewhere(row) if f"field {path} is absent" in str(error) else None
        if found is None:
            raise
        raise RowError(f"{error}: try task.args.answer_field={found}", True) from error
    if not isinstance(value, list):
        return [_written(value, path)]
    if not value:
        raise RowError(f"field {path} is an empty list", missing_answer=True)
    return [pick_text(row, f"{path}.{i}", answer=True) for i in range(len(value))]


def _elsewhere(row: Row) -> str | None:
    """The dotted path that is likely to hold the answer, in a row without the column it should
    have, such as one of verl's; None if nothing is named so."""
    nested = [(f"{n}.{k}", v) for n, x in row.items() if isinstance(x, dict) for k, v in x.items()]
    places = {path: v for path, v in [*row.items(), *nested] if isinstance(v, str | int | float)}
    by_name = ((path, name) for name in ANSWERS for path in places)
    return next((path for path, name in by_name if path.rpartition(".")[2] == name), None)


def _written(value: Any, path: str) -> str:
    if isinstance(value, float) and value.is_integer():
        # int(1e23) has other digits; -0.0 is 0
        value = format(Decimal(repr(value + 0.0)), "f").removesuffix(".0")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"field {path} is {type(value).__name__}, not text or a number")
    return str(value)


ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = ("question", "prompt", "messages")  # looked for where no column is named
ANSWERS = (
    *("answer", "solution", "ground_truth", "final_answer", "label", "target"),
    *("completion", "output", "response"),
)
ACCEPTED = "answers"  # in an item's meta: the accepted answers, where there are several
_STORED = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
_BEGUN = ("prefix", "partial", "prefill", "continue_final_message")  # keys that mark a prefill


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a row. Example: Question("2+2?", ({"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"}), "4")"""

    question: str  # the last message
    messages: tuple[Message, ...] = ()  # (): a single question
    answer: str | None = None  # the last turn, where it is the assistant's
    # the column, or path, that it was found in
    field: str | None = dataclasses.field(default=None, compare=False)


def pick_question(row: Row, path: str | None) -> Question:
    """The question at a dotted path; None: in the first of COLUMNS that the row has.

    A conversation ends with what the model is asked; a last turn of the assistant is its answer.
    Raises RowError.
    """
    field = path or next((name for name in COLUMNS if row.get(name) is not None), None)
    if field is None:
        raise RowError(
            f"it has none of the fields {', '.join(COLUMNS)} (the row has: "
            f"{', '.join(map(str, row))}): name one with task.args.question_field"
        )
    value = _turned(_unpacked(pick(row, field), field))
    if not isinstance(value, list):
        return Question(pick_text(row, field), field=field)
    messages = [_message(m, f"{field}.{i}") for i, m in enumerate(value)]
    answer = _answer(messages.pop(), field) if messages and _said(messages[-1]) else None
    if not messages:
        raise RowError(f"field {field} holds no message before the assistant's")
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        raise RowError(f"field {field} ends with a {last['role']} turn: the model is asked nothing")
    if not last["content"].strip():
        raise RowError(f"field {field} ends with an empty {last['role']} turn")
    plain = len(messages) == 1 and set(last) == {"role", "content"} and last["role"] == "user"
    return Question(last["content"], () if plain else tuple(messages), answer, field)


def _said(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _answer(message: Message, field: str) -> str:
    """The text of a last turn of the assistant, which is a whole answer. Raises RowError for one
    that is only begun, since every answer is sampled from its beginning."""
    text = str(message["content"])
    begun = next((f"the key {key}" for key in _BEGUN if message.get(key) is True), None)
    opened = re.search(r"<[A-Za-z_]+>\s*$", text)
    if begun is None and opened:
        begun = f"it ends with {opened[0].strip()}"
    if begun is None and text.count("<think>") > text.count("</think>"):
        begun = "its <think> is not closed"
    if begun is None and text.count("```") % 2:
        begun = "its last code block is not closed"
    if begun is None and not text.strip():
        begun = "it has no text"
    if begun is not None:
        raise RowError(
            f"field {field} ends with an assistant turn that is begun and not finished ({begun}): "
            "answers are sampled from their beginning, so leave this turn out"
        )
    return text


def _unpacked(value: Any, field: str) -> Any:
    """The messages of a conversation, decoded where it is stored as JSON text. Raises RowError for
    another form."""
    listed = field == "messages" and isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
    if not isinstance(value, str) or not (listed or _STORED.match(value)):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"field {field} holds the messages of a conversation as text that is not JSON"
        ) from error
    why = fault(found, field)
    if why is not None:
        raise RowError(why)
    return found


def _turned(value: Any) -> Any:
    """Messages that Arrow holds by column, {"role": [...], "content": [...]}, one by one."""
    lists = (
        isinstance(value, Mapping) and value and all(isinstance(v, list) for v in value.values())
    )
    if not lists:
        return value
    return [dict(zip(value, turn)) for turn in zip(*value.values())]


def _message(value: Any, where: str) -> Message:
    """One message with a role and a text. Keys that are null, as Arrow fills them, are dropped; the
    others are the template's to read."""
    if not isinstance(value, Mapping):
        raise RowError(f"field {where} is {type(value).__name__}, not a message")
    message = {str(key): part for key, part in value.items() if part is not None}
    role = message.get("role")
    if role not in ROLES:
        raise RowError(
            f"field {where} has role {role!r}, not one of {', '.join(ROLES)} (the message has: "
            f"{', '.join(message) or 'nothing'})"
        )
    return {**message, "content": _text(message, where)}


def _text(message: Message, where: str) -> str:
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
        if any(kind != "text" for kind in kinds):
            raise RowError(f"field {where} has parts other than text: {kinds}")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RowError(f"field {where} has no text as its content")
    return content
