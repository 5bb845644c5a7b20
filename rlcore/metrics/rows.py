"""metrics.jsonl and details.jsonl: one JSON object a learner step, without duplicates, readable
while they are being written. There are gaps only where rows were lost before a resume."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlcore.errors import NoSpace, StageError, UserError
from rlcore.files import FULL, replace_file

Row = dict[str, float | int | None]


class RowFile:
    """Appends rows. Each is on disk (fsync) when `log` returns, so that no checkpoint is newer than
    the file.

    Opening an existing file drops an incomplete last line and continues after the last step.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        rows = read_rows(self.path)
        _require_rising(rows, self.path)
        self.last_step: int | None = None
        if rows:
            self.last_step = int(rows[-1]["step"])  # type: ignore[arg-type]
        self._rewrite(rows)
        self._file: BinaryIO | None = None

    def log(self, row: Row) -> None:
        """Write one sanitized row. Raises ValueError for a repeated or skipped step, NoSpace if the
        disk is full, StageError if it refuses otherwise; nothing of the row is written then."""
        step = row.get("step")
        if not isinstance(step, int):
            raise ValueError(f"a row of {self.path.name} needs an integer step, not {step!r}")
        if self.last_step is not None and step != self.last_step + 1:
            raise ValueError(
                f"{self.path.name} ends at step {self.last_step}: step {step} cannot follow"
            )
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            self._append(line)
        except OSError as e:
            self.close()
            said = f"{self.path} could not be written: {e.strerror} ({len(line)} bytes are needed)"
            raise (NoSpace(said) if e.errno in FULL else StageError(said)) from e
        self.last_step = step

    def _append(self, line: bytes) -> None:
        """All of a line, or nothing of it."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        before = self._file.tell()
        try:
            if (written := self._file.write(line)) != len(line):
                self._file.write(line[written:])  # raises what cut the first one short
            # A checkpoint that is newer than its rows would leave a gap between them.
            os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise

    def truncate_after(self, step: int, copy: str | Path | None = None) -> str:
        """Keep rows up to `step`, the last one before a resumed run; missing rows are taken from a
        `copy` of the file, if there is one. Returns a sentence about missing rows, which cost their
        curves and nothing else; "" otherwise."""
        self.close()
        own, copied = (
            {int(r["step"]): r for r in read_rows(path) if r["step"] <= step}  # type: ignore
            for path in (self.path, copy or self.path)
        )
        kept = copied | own
        self._rewrite([kept[s] for s in sorted(kept)])
        self.last_step = step
        last, news = max(kept, default=0), []
        if filled := len(kept) - len(own):
            news.append(f"{filled} rows were missing from {self.path}: they are of the checkpoint")
        if last < step:
            lost = f"has no rows of steps {last + 1} to {step}: the run goes on without"
            news.append(f"{self.path} {lost}")
        return "; ".join(news)

    def close(self) -> None:
        """Close the file; `log` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, rows: list[Row]) -> None:
        text = "".join(json.dumps(r) + "\n" for r in rows)
        before = ""
        if self.path.exists():
            before = self.path.read_text(encoding="utf-8", errors="replace")
        if before == text:
            return  # the usual case: no line was cut off
        replace_file(self.path, text, durable=True)


class RowTail:
    """Reads the rows of a file while another process writes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read = 0  # bytes
        self._lines = 0
        self._file = 0  # inode

    def rewritten(self) -> bool:
        """Return whether the file was replaced since it was read: the run was resumed, and rows
        beyond its checkpoint were dropped."""
        try:
            return self._replaced(self.path.stat())
        except FileNotFoundError:
            return self._read > 0

    def new(self) -> list[Row]:
        """The whole rows written since the last call; none of a file that was rewritten.

        Raises UserError for a broken line.
        """
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if self._replaced(found):
                    return []
                self._file = found.st_ino
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        lines = data.decode(errors="replace").split("\n")[:-1]
        rows = _parsed(lines, self.path, self._lines)
        self._read += len(data)
        self._lines += len(lines)
        return rows

    def _replaced(self, found: os.stat_result) -> bool:
        return self._read > 0 and (found.st_ino != self._file or found.st_size < self._read)


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file that may still be written: an incomplete last line is ignored.

    Raises UserError for a broken line elsewhere.
    """
    return RowTail(path).new()


METRICS = "metrics.jsonl"  # of a run directory; also of the copy in each checkpoint
DETAILS = "details.jsonl"  # the other columns of its rows, with logging.detail=full


def run_rows(folder: str | Path) -> list[Row]:
    """The rows of a run directory with all their columns, while they may still be written.

    Raises UserError for a broken line.
    """
    folder = Path(folder)
    further = {row["step"]: row for row in read_rows(folder / DETAILS)}
    return [{**row, **further.get(row["step"], {})} for row in read_rows(folder / METRICS)]


def _parsed(lines: Sequence[str], path: Path, before: int) -> list[Row]:
    """Rows of whole lines; `before`: lines of the file that come before them."""
    rows: list[Row] = []
    for place, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            if place == len(lines):
                break  # cut off by a crash and completed with a newline since
            raise UserError(
                f"{path}:{before + place} is not a JSON object ({line[:60]!r}): delete the line."
            ) from e
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(
                f"{path}:{before + place} is not a metrics row, since it has no integer step: "
                "delete the line."
            )
        rows.append(row)
    return rows


def sanitize(row: Mapping[str, Any]) -> Row:
    """Plain JSON numbers: step and policy_version first, NaN and infinities as null and counted."""
    head = {k: row[k] for k in ("step", "policy_version") if k in row}
    clean: Row = {}
    nonfinite = 0
    for name, value in {**head, **row}.items():
        number = value.item() if hasattr(value, "item") else value
        if number is not None and not isinstance(number, int | float):
            raise TypeError(f"metric {name} is a {type(value).__name__}, not a number")
        if isinstance(number, float) and not math.isfinite(number):
            nonfinite += 1
            number = None
        clean[name] = number
    clean["metrics/nonfinite"] = nonfinite
    return clean


def _require_rising(rows: list[Row], path: Path) -> None:
    for before, after in itertools.pairwise(rows):
        if after["step"] <= before["step"]:  # type: ignore[operator]
            raise UserError(
                f"{path} is damaged: step {after['step']} follows step {before['step']}. Delete "
                "one of the two lines."
            )
