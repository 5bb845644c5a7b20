"""Reads dumps row by row: JSONL and Parquet. Files of torch.save are refused, since to read one is
to unpickle it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.dumps.layouts import Layout, layout_of
from rlcore.dumps.rows import Row, WrongRow, row_of
from rlcore.errors import UserError

AT_ONCE = 64  # rows of a Parquet file in memory
SHOWN = 8  # kinds of wrong rows that are named
Wrong = tuple[str, str]  # column, why


@dataclass(slots=True)
class Read:
    """Counts of what was read. Example: Read(["a.jsonl"], rows=100)"""

    files: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # by column and reason, without places
    first: dict[str, str] = field(default_factory=dict)  # where each reason was met first
    vocabularies: set[int] = field(default_factory=set)

    def leave_out(self, wrong: WrongRow, place: str) -> None:
        reason = f"{wrong.column} {_general(wrong.why)}"
        self.left_out[reason] += 1
        self.first.setdefault(reason, f"{place}: {wrong}")

    def told(self) -> list[str]:
        """A sentence for each reason, the most frequent first."""
        return [
            f"{count} row{'s' if count > 1 else ''} left out, the first {self.first[reason]}."
            for reason, count in self.left_out.most_common(SHOWN)
        ]


def _general(why: str) -> str:
    """A reason without the numbers of one row."""
    return " ".join("N" if any(c.isdigit() for c in word) else word for word in why.split())


def read(sources: Sequence[str | Path] | Any, counts: Read) -> Iterator[Row]:
    """The rows of files, or of a table or list of rows, in their order; wrong rows are counted in
    `counts` and left out. Raises UserError for a file that cannot be read at all, for one without
    any right row, and for rows of several vocabularies."""
    for name, found in _sources(sources):
        counts.files.append(name)
        layout: Layout | None = None
        before = counts.rows
        for number, fields in found:
            if isinstance(fields, WrongRow):
                counts.leave_out(fields, f"{name} row {number}")
                continue
            if layout is None:
                layout = layout_of(fields, name)
                counts.layouts.append(layout.name)
            yield from _rows(layout, fields, f"{name} row {number}", counts)
        if counts.rows == before:
            told = "; ".join(counts.told()) or "it is empty."
            raise UserError(f"{name} holds no row that can be read: {told}")


def _rows(layout: Layout, fields: Mapping[str, Any], place: str, counts: Read) -> Iterator[Row]:
    try:
        converted = layout.rows(fields)
    except WrongRow as wrong:
        counts.leave_out(wrong, place)
        return
    for one in converted:
        try:
            row = row_of(one)
        except WrongRow as wrong:
            counts.leave_out(wrong, place)
            continue
        if row.vocabulary is not None:
            counts.vocabularies.add(row.vocabulary)
        if len(counts.vocabularies) > 1:
            sizes = " and ".join(map(str, sorted(counts.vocabularies)))
            raise UserError(
                f"{place}: vocabulary={row.vocabulary} differs from the rows before it ({sizes}): "
                "log-probs of two models cannot be pooled; diagnose their files one by one."
            )
        counts.rows += 1
        yield row


Numbered = Iterator[tuple[int, Mapping[str, Any] | WrongRow]]


def _sources(sources: Any) -> Iterator[tuple[str, Numbered]]:
    if isinstance(sources, (str, Path)):
        sources = [sources]
    if hasattr(sources, "to_dict"):  # a DataFrame
        sources = sources.to_dict("records")
    elif hasattr(sources, "to_pylist"):  # a table of pyarrow
        sources = sources.to_pylist()
    paths = [source for source in sources if isinstance(source, (str, Path))]
    if not paths:
        yield "the rows", enumerate(sources, start=1)
        return
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"{path} is no file: give dumps in JSONL or Parquet.")
        if path.suffix in (".pt", ".pth", ".pkl", ".pickle"):
            raise UserError(
                f"{path} is a pickle, which may run code as it is read: have the trainer's own "
                "process write its columns (rlcore.dumps.rows.write; docs/diagnose.md)."
            )
        yield str(path), (_parquet if path.suffix == ".parquet" else _jsonl)(path)


def _jsonl(path: Path) -> Numbered:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as e:
                yield number, WrongRow("line", f"is no JSON: {str(e).splitlines()[0]}")
                continue
            if isinstance(fields, dict):
                yield number, fields
            else:
                yield number, WrongRow("line", f"is {type(fields).__name__} and not an object")


def _parquet(path: Path) -> Numbered:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise UserError(
            f"{path} needs the package pyarrow: pip install pyarrow, or write JSONL."
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=AT_ONCE):
                for fields in batch.to_pylist():
                    number += 1
                    yield number, fields
    except (OSError, ValueError) as e:  # pyarrow's errors are ValueErrors
        why = str(e).splitlines()[0].rstrip(".")
        raise UserError(f"{path} is no readable Parquet file ({why}): write it again.") from e
