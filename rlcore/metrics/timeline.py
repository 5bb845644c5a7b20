"""timeline.jsonl: who worked and who waited in the last steps of a run, one JSON object a step."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.files import replace_file
from rlcore.interfaces import Span
from rlcore.metrics.sinks import Sink

KEPT = 100  # steps; the file holds at most twice as many


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The steps of a file that may still be written: {"step": 12, "spans": [[who, what, start s,
    end s, share], ...]}. Empty where there is no file; a line that is cut off is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


class TimelineSink(Sink):
    """Appends each step; now and then, steps that are too old are dropped from the file."""

    title = "timeline.jsonl"

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "timeline.jsonl"
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._written = 0  # lines of the file; 0: written anew with the next

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        line = json.dumps({"step": step, "spans": spans}, separators=(",", ":")) + "\n"
        self._lines.append(line)
        written, self._written = self._written, 0  # a line that was cut off is written anew
        if 0 < written < 2 * KEPT:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        else:
            replace_file(self._path, "".join(self._lines))
            written = len(self._lines) - 1
        self._written = written + 1

    def resume_at(self, step: int) -> None:
        kept = [found for found in read_timeline(self._path) if found["step"] <= step]
        lines = [json.dumps(found, separators=(",", ":")) + "\n" for found in kept]
        self._lines = deque(lines, maxlen=KEPT)
        self._written = 0
