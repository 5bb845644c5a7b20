"""Reads dumps row by row: JSONL and Parquet. Files of torch.save are refused, since to read one is
to unpickle it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlcore.dumps.layouts import Layout, layout_of
from rlcore.dumps.rows import Row, WrongRow, row_of
from rlcore.errors import UserError

AT_ONCE = 16  # rows of a Parquet file in memory
LONGEST_LINE = 128 << 20  # bytes
SHOWN = 8  # kinds of wrong rows that are named


@dataclass(slots=True)
class Read:
    """Counts of what was read. Example: Read(["a.jsonl"], rows=100)"""

    files: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # by column and reason, without places
    first: dict[str, str] = field(default_factory=dict)  # where each reason was met first
    vocabulary: int | None = None
    certain: int = 0  # rows that begin or end with log-probs of 0 in both columns

    def leave_out(self, wrong: WrongRow, place: str) -> None:
        reason = f"{wrong.column} {_general(wrong.why)}"
        self.left_out[reason] += 1
        self.first.setdefault(reason, f"{place}: {wrong}")

    def told(self) -> list[str]:
        """A sentence for each reason, the most frequent first."""
        told = [
            f"{count} row{'s' if count > 1 else ''} left out, the first {self.first[reason]}."
            for reason, count in self.left_out.most_common(SHOWN)
        ]
        if (more := len(self.left_out) - SHOWN) > 0:
            told.append(f"Rows were left out for {more} other reasons, too.")
        if self.certain:
            told.append(
                f"{self.certain} row{'s begin or end' if self.certain > 1 else ' begins or ends'} "
                "with tokens of which both log-probs are exactly 0: unless the policy is certain "
                "there, they are a prompt or padding, which mask leaves out."
            )
        return told


def _general(why: str) -> str:
    """A reason without the numbers of one row."""
    return " ".join("N" if any(c.isdigit() for c in word) else word for word in why.split())


def read(sources: Sequence[str | Path] | Any, counts: Read) -> Iterator[Row]:
    """The rows of files, or of a table or list of rows, in their order; wrong rows are counted in
    `counts` and left out. Rows of another vocabulary than the first's are wrong. Raises UserError
    for a file that cannot be read at all, and for one without any right row."""
    for name, found in _sources(sources):
        counts.files.append(name)
        layout: Layout | None = None
        before = counts.rows
        for number, fields in found:
            place = f"{name} row {number}"
            try:
                if isinstance(fields, WrongRow):
                    raise fields
                if not isinstance(fields, Mapping):
                    raise WrongRow("line", f"is {type(fields).__name__} and not an object")
                layout = layout_of(fields, layout)
                converted = layout.rows(fields)
            except WrongRow as wrong:
                counts.leave_out(wrong, place)
                continue
            if layout.name not in counts.layouts:
                counts.layouts.append(layout.name)
            yield from _rows(converted, place, counts)
        if counts.rows == before:
            told = " ".join(counts.told()) or "it is empty."
            raise UserError(f"{name} holds no row that can be read: {told}")


def _rows(converted: Sequence[Mapping[str, Any]], place: str, counts: Read) -> Iterator[Row]:
    for one in converted:
        try:
            row = row_of(one)
            own, first = row.vocabulary, counts.vocabulary
            if own is not None and first is not None and own != first:
                raise WrongRow(
                    "vocabulary",
                    f"is {own}, and {first} in rows before: log-probs of two models cannot be "
                    "pooled, diagnose their files one by one",
                )
        except WrongRow as wrong:
            counts.leave_out(wrong, place)
            continue
        counts.vocabulary = first if own is None else own
        counts.certain += row.certain
        counts.rows += 1
        yield row


Numbered = Iterator[tuple[int, Any]]  # each a mapping, or a WrongRow


def _sources(sources: Any) -> Iterator[tuple[str, Numbered]]:
    if isinstance(sources, (str, Path, Mapping)):
        sources = [sources]
    elif hasattr(sources, "iterrows"):  # a DataFrame
        sources = sources.to_dict("records")
    elif hasattr(sources, "to_pylist"):  # a table of pyarrow
        sources = sources.to_pylist()
    given = iter(sources)
    first = list(islice(given, 1))
    if not first or not isinstance(first[0], (str, Path)):
        yield "the rows", enumerate(chain(first, given), start=1)
        return
    for source in chain(first, given):
        path = Path(source)
        if not path.is_file():
            raise UserError(f"{path} is not a file: give dumps in JSONL or Parquet.")
        yield str(path), _reader(path)(path)


def _reader(path: Path) -> Callable[[Path], Numbered]:
    """The first bytes decide, since names of dumps are the trainers'. Raises UserError for what is
    not read."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1" or path.suffix == ".parquet":
        return _parquet
    pickled = start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))
    if pickled or path.suffix in (".pt", ".pth", ".pkl", ".pickle"):
        raise UserError(
            f"{path} is a pickle, which may run code as it is read: have the trainer's own "
            "process write its columns (rlcore.dumps.rows.write; docs/diagnose.md)."
        )
    if start.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zX")):
        raise UserError(f"{path} is compressed: decompress it first, such as by gunzip.")
    return _jsonl


def _jsonl(path: Path) -> Numbered:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                limit = f"has more than {LONGEST_LINE >> 20} MiB: write one answer a line"
                yield number, WrongRow("line", limit)
                continue
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as e:
                why = str(e).splitlines()[0]
                yield number, WrongRow("line", f"is not JSON ({why}): write one object a line")
                continue
            yield number, fields


def _parquet(path: Path) -> Numbered:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise UserError(
            f"{path} needs the package pyarrow: pip install pyarrow, or write JSONL."
        ) from None
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            number = 0
            for batch in file.iter_batches(batch_size=AT_ONCE):
                for own in range(batch.num_rows):  # as Python numbers a row has five times the size
                    number += 1
                    yield number, batch.slice(own, 1).to_pylist()[0]
    except (OSError, ValueError) as e:  # pyarrow's errors are ValueErrors
        why = str(e).splitlines()[0].rstrip(".")
        raise UserError(f"{path} is not a readable Parquet file ({why}): write it again.") from e
