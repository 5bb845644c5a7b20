"""status.json: what a run does or waits for at this moment, for those who watch from outside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rlcore.files import replace_file
from rlcore.metrics.sinks import Sink

FINAL = ("ended", "failed")  # phases after which nothing more comes


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """What status.json says, or None before it is written."""
    try:
        return json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def age_s(status: Mapping[str, Any]) -> float:
    """Seconds since the run began what it does, by this machine's clock."""
    since = datetime.fromisoformat(status["since"])
    return max(0.0, time.time() - since.timestamp())


class StatusSink(Sink):
    """One JSON object on one line, replaced whole at every change.

    Example: {"phase": "rollout", "step": 11, "steps": 150, "waits_for": "a training batch",
    "since": "2026-01-31T12:00:05Z", "pid": 4242}
    """

    title = "status.json"

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        """`total_steps`: of the whole run."""
        self._path = run_dir / "status.json"
        self._total = total_steps
        self._shown = ("start", "", 0)
        self._ended = False

    def activity(self, name: str, waits_for: str, step: int) -> None:
        if (name, waits_for, step) == self._shown:
            return  # `since` is when it began
        self._shown = (name, waits_for, step)
        self._write()

    def resume_at(self, step: int) -> None:
        # An earlier command may have left "ended" or "failed", and connecting takes a while.
        self.activity("start", "the cluster", step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._ended = True
        self.activity("ended", "", int(summary.get("steps", self._shown[2])))

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self.activity("failed", "", self._shown[2])

    def _write(self) -> None:
        phase, waits_for, step = self._shown
        status = {
            "phase": phase,
            "step": step,
            "steps": self._total,
            "waits_for": waits_for,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "pid": os.getpid(),
        }
        replace_file(self._path, json.dumps(status) + "\n")
