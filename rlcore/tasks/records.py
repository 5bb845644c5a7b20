"""Tasks whose problems are the rows of local data files, all validated when the task is built."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.interfaces import Split, Task
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import ArgumentError, one_of
from rlcore.types import Grade, Item, Message

Row = dict[str, Any]
# What `datasets.save_to_disk` writes: beside the files of one split, and above those of several.
STATE, SPLITS = "state.json", "dataset_dict.json"


def rows(argument: str, path: str) -> Iterator[tuple[int, Row]]:
    """(row number from 1, row) of a file, or of a folder that `save_to_disk` wrote; in a JSONL file
    the row number is the line number. Raises ArgumentError for `argument`."""
    file = Path(str(path)).expanduser()
    if file.is_dir():
        yield from enumerate(_saved(argument, file), 1)
        return
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".arrow": _arrow}
    if file.suffix not in readers:
        raise ArgumentError(
            argument,
            path,
            "is not accepted: give a .jsonl, .parquet or .arrow file, or a folder that a Hugging "
            "Face data set was saved to.",
        )
    if not file.is_file():
        raise ArgumentError(argument, path, f"names no file (looked for {file.absolute()}).")
    yield from readers[file.suffix](argument, file)


def _saved(argument: str, folder: Path) -> Iterator[Row]:
    """Rows of a split's folder, in the order of its state."""
    if (folder / SPLITS).is_file():
        splits = sorted(p.name for p in folder.iterdir() if (p / STATE).is_file())
        raise ArgumentError(
            argument,
            folder,
            f"holds the splits {', '.join(splits) or 'of a data set, but none of their folders'}: "
            f"name one of them, such as {folder / splits[0] if splits else folder / 'train'}.",
        )
    if not (folder / STATE).is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise ArgumentError(
            argument,
            folder,
            f"is no folder that a Hugging Face data set was saved to: it has no {STATE} (it has: "
            f"{found or 'nothing'}).",
        )
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(argument, folder, f"has a {STATE} that cannot be read.") from error
    for name in files:
        for _, row in _arrow(argument, folder / name):
            yield row


def _jsonl(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ArgumentError(
                            argument, file, f"has a bad row: row {number} is not a JSON object."
                        )
                    yield number, row
    except json.JSONDecodeError as error:
        raise ArgumentError(
            argument, file, f"has a bad row: row {number} is not JSON ({error.msg})."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(argument, file, f"cannot be read: {error}.") from error


def _parquet(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from enumerate(pyarrow.parquet.read_table(file).to_pylist(), 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise ArgumentError(argument, file, f"cannot be read as Parquet: {error}.") from error


def _arrow(argument: str, file: Path) -> Iterator[tuple[int, Row]]:
    """Of Arrow's stream format, which `datasets` writes, or its file format."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(file)) as source:
            seekable = source.read(6) == b"ARROW1"
            source.seek(0)
            opened = pyarrow.ipc.open_file if seekable else pyarrow.ipc.open_stream
            table = opened(source).read_all()
            yield from enumerate(table.to_pylist(), 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise ArgumentError(argument, file, f"cannot be read as Arrow: {error}.") from error


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
        """Return whether a row of a split's file belongs to the split."""
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


ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = ("question", "prompt", "messages")  # looked for where no column is named


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a row. Example: Question("2+2?", ({"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"}), "4")"""

    question: str  # the last message
    messages: tuple[Message, ...] = ()  # (): a single question
    answer: str | None = None  # the last turn, where it is the assistant's


def pick_question(row: dict[str, Any], path: str | None) -> Question:
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
    value = _turned(pick(row, field))
    if not isinstance(value, list):
        return Question(pick_text(row, field))
    messages = [_message(m, f"{field}.{i}") for i, m in enumerate(value)]
    answer = messages.pop()["content"] if len(messages) and _said(messages[-1]) else None
    if not messages:
        raise RowError(f"field {field} holds no message before the assistant's")
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        raise RowError(f"field {field} ends with a {last['role']} turn: the model is asked nothing")
    if not last["content"].strip():
        raise RowError(f"field {field} ends with an empty {last['role']} turn")
    plain = len(messages) == 1 and set(last) == {"role", "content"} and last["role"] == "user"
    return Question(last["content"], () if plain else tuple(messages), answer)


def _said(message: Message) -> bool:
    return bool(message["role"] == "assistant")


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
