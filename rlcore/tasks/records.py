"""Tasks whose problems are the rows of local data files, all validated when the task is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.interfaces import Split, Task
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import ArgumentError, one_of
from rlcore.tasks.row_files import rows
from rlcore.types import Grade, Item, Message


@dataclass(frozen=True, slots=True)
class Record:
    """One validated row."""

    question: str
    answer: str
    worked: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # the whole conversation, where it is more than the question


class RowError(ValueError):
    """A row that cannot be used; `missing_answer` if the only fault is that it has no answer."""

    def __init__(self, why: str, missing_answer: bool = False) -> None:
        super().__init__(why)
        self.missing_answer = missing_answer


class RecordTask(Task, ABC):
    """`train_path` and `heldout_path` name a .jsonl, .parquet or .arrow file each, or a folder that
    a Hugging Face data set was saved to; one may be None, its split is then empty.

    A field is a column name or a dotted path into it (`reward_model.ground_truth`,
    `prompt.0.content`). `instruction` is appended to every question, on a line of its own, which is
    the last message of a conversation. missing_answer="skip" leaves
    rows without an answer out and counts them in `skipped`.
    """

    name: str

    def __init__(
        self,
        *,
        train_path: str | None = None,
        heldout_path: str | None = None,
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
        self._paths: dict[Split, str | None] = {"train": train_path, "heldout": heldout_path}
        # rows left out because they have no answer
        self.skipped: dict[Split, int] = {"train": 0, "heldout": 0}
        self._records: dict[Split, list[Record]] = {
            split: self._load(split) for split in self._paths
        }

    @abstractmethod
    def record(self, row: dict[str, Any]) -> Record:
        """Validate one row. Raises RowError."""

    @abstractmethod
    def grade(self, item: Item, response: str) -> Grade:
        """See `rlcore.interfaces.Task`."""

    def keeps(self, split: Split, row: dict[str, Any]) -> bool:
        """Whether a row of a split's file belongs to the split."""
        return True

    def _load(self, split: Split) -> list[Record]:
        path = self._paths[split]
        if path is None:
            return []
        argument, records = f"{split}_path", []
        for number, row in rows(argument, path):
            if not self.keeps(split, row):
                continue
            try:
                records.append(self.record(row))
            except RowError as error:
                if not (error.missing_answer and self._skip):
                    hint = (
                        "; task.args.missing_answer=skip leaves such rows out"
                        if error.missing_answer
                        else ""
                    )
                    raise ArgumentError(
                        argument, path, f"has a bad row: row {number}: {error}{hint}."
                    ) from error
                self.skipped[split] += 1
        if not records:
            raise ArgumentError(
                argument, path, "is an empty data set: it has no row with an answer."
            )
        return records

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
        meta = (
            {**record.meta, "worked": record.worked} if record.worked is not None else record.meta
        )
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


def pick(row: dict[str, Any], path: str, *, answer: bool = False) -> Any:
    """The value at a dotted path of a row. Raises RowError naming the path if it is absent, null or
    blank."""
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
        else:
            raise RowError(
                f"field {path} is absent (the row has: {', '.join(map(str, row))})", answer
            )
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError(f"field {path} is empty", answer)
    return value


def pick_text(row: dict[str, Any], path: str, *, answer: bool = False) -> str:
    """Text at a dotted path; numbers are written out, whole floats without their `.0`."""
    value = pick(row, path, answer=answer)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"field {path} is {type(value).__name__}, not text or a number")
    return str(value)
