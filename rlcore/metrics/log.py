"""log.jsonl of a run directory: all messages of a run, one JSON object a line.

{"time": "2026-01-31T12:00:05.250Z", "role": "driver", "level": "info", "event": "note",
"text": "continuing from step_000005"}

`event` is "note", "activity", "step" (the console's line of it), or "failed" (with its traceback).
Or it is "alarm" (a warning; also with its `rule` and `step`) or "step_bound" (that it shortens
steps; with its `step`). "stderr" is what a process of the run wrote there; `role` is its name and
process id. `level` is "error" of what ended the run alone: libraries write progress to standard
error, too.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rich.console import Console

from rlcore.metrics.console import ConsoleSink
from rlcore.metrics.health import Alarm
from rlcore.metrics.rows import Row
from rlcore.metrics.sinks import Sink

NAME = "log.jsonl"
BEFORE = "log.1.jsonl"  # the entries from before the file was begun anew
MOST = 50_000_000  # bytes of a file
DRIVER = "driver"
Level = Literal["info", "warning", "error"]


class LogSink(Sink):
    """Appends to log.jsonl, and begins it anew at MOST bytes; the previous file is kept next to
    it."""

    title = NAME

    def __init__(self, run_dir: Path, total_steps: int, *, most: int = MOST) -> None:
        self._path = run_dir / NAME
        self._most = most
        self._lock = threading.Lock()  # standard error comes from another thread
        self._lines = ConsoleSink(
            run_dir=run_dir, total_steps=total_steps, live=False, console=Console(quiet=True)
        )
        self._ended = False

    def log(self, row: Row) -> None:
        self._lines.digest.add(row)
        self._write("step", self._lines.line(row))

    def note(self, text: str) -> None:
        self._write("note", text, level="warning" if text.startswith("warning: ") else "info")

    def alarm(self, alarm: Alarm) -> None:
        facts = {"rule": alarm.rule, "step": alarm.step}
        self._write("alarm", alarm.text, level="warning", facts=facts)

    def told(self, event: str, step: int, text: str) -> None:
        self._write(event, text, facts={"step": step})

    def activity(self, name: str, waits_for: str, step: int) -> None:
        waits = f", waits for {waits_for}" if waits_for else ""
        self._write("activity", f"after step {step}: {name}{waits}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write("note", f"the run ended: {json.dumps(dict(summary), default=str)}")

    def failed(self, error: Exception) -> None:
        self._write("failed", "".join(traceback.format_exception(error)).strip(), level="error")

    def stderr(self, role: str, text: str) -> None:
        """Append text that a process of the run wrote to its standard error. Safe from any thread;
        if the disk refuses, the text is lost."""
        try:
            self._write("stderr", text, role=role)
        except OSError:
            return  # the next note of the run says that the file cannot be written

    def _write(
        self,
        event: str,
        text: str,
        *,
        role: str = DRIVER,
        level: Level = "info",
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        said = {"time": at, "role": role, "level": level, "event": event, "text": text, **facts}
        line = json.dumps(said, ensure_ascii=False) + "\n"
        with self._lock:
            if self._path.exists() and self._path.stat().st_size + len(line) > self._most:
                self._path.replace(self._path.with_name(BEFORE))
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line)


def read_log(run_dir: Path, after: int = 0) -> tuple[list[dict[str, Any]], int]:
    """(entries of log.jsonl beyond `after` bytes, where they end). A file that was begun anew is
    read from its beginning; a line that is not an entry is left out."""
    try:
        with (run_dir / NAME).open("rb") as file:
            size = file.seek(0, 2)
            start = after if after <= size else 0
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    data = data[: data.rfind(b"\n") + 1]
    return list(_entries(data)), start + len(data)


def _entries(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.decode(errors="replace").split("\n"):
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            yield {"time": "", "role": "", "level": "", "event": "", "text": "", **found}


def shown(entry: Mapping[str, Any]) -> str:
    """An entry as a line of text."""
    return f"{entry['time']} {entry['role']} {entry['event']}: {entry['text']}"
