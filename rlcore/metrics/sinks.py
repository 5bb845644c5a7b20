"""Where metrics go: the protocol, and the sinks that are files. The console and trackers have their
own modules."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rlcore.errors import UserError
from rlcore.files import replace_file
from rlcore.interfaces import Callback, Span
from rlcore.metrics.health import Alarm
from rlcore.metrics.names import split_row
from rlcore.metrics.rows import DETAILS, METRICS, Row, RowFile
from rlcore.metrics.specs import LoggingSpec

Decoded = Mapping[str, Any]  # a readable trajectory: prompt, response, reward, status, versions


class Sink(ABC):
    """One receiver. Every method is optional and ignores what it is given; a sink overrides the
    methods that it needs. Rows are sanitized (`rows.sanitize`) before they come here.

    A user's own is built as Class(run_dir, config), with the resolved configuration."""

    title = "a sink of logging.sinks"  # as messages call it, with the key that turns it off
    required = False  # a run ends rather than go on without it
    in_folder = True  # writes files of the run directory that each command on it writes
    retried = True  # after a failure; False: it is over for this command

    @classmethod
    def _require(cls) -> None:
        """Raise UserError for a package that is missing, before a run starts."""

    def log(self, row: Row) -> None:
        """One learner step."""

    def samples(self, name: str, decoded: Sequence[Decoded]) -> None:
        """Decoded trajectories under a name such as step_000012."""

    def note(self, text: str) -> None:
        """One line about the run's progress."""

    def alarm(self, alarm: Alarm) -> None:
        """A rule of `logging.warnings` speaks for the first time, after the row of its step."""
        self.note(f"warning: {alarm.text}")

    def told(self, event: str, step: int, text: str) -> None:
        """A finding about the row of a step that is not a warning, after that row."""
        self.note(text)

    def activity(self, name: str, waits_for: str, step: int) -> None:
        """Record the run's activity and the object of its wait from now on, after `step` steps."""

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        """Every rollout actor as it is now, by "name" and the keys of `Fleet.states`."""

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        """The work and the waits of every process before this step's row."""

    def resume_at(self, step: int) -> None:
        """The run continues after `step`: forget what was logged beyond it."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run succeeded; `close` follows."""

    def failed(self, error: Exception) -> None:
        """The run was ended by an error; `close` follows."""

    def close(self) -> None:
        """Release everything. May be called twice, and without `finish` when a run fails."""


def unguarded() -> None:
    """No guard: the folder has no owner."""


class JsonlSink(Sink):
    """metrics.jsonl of a run directory, and details.jsonl with the columns that explain it."""

    title = "metrics.jsonl"
    required = True

    def __init__(
        self,
        run_dir: Path,
        guard: Callable[[], None],
        note: Callable[[str], None],
        *,
        full: bool = True,
    ) -> None:
        """`guard`: raises OwnershipLost once the directory is another command's. `full`: write
        details.jsonl."""
        self.rows = RowFile(run_dir / METRICS)
        self._details = RowFile(run_dir / DETAILS) if full else None
        self._run_dir = run_dir
        self._guard = guard
        self._note = note

    def log(self, row: Row) -> None:
        self._guard()
        brief, details = split_row(row)
        # first, and once where the row is logged again after a full disk: no row lacks its details
        if self._details is not None and self._details.last_step != row["step"]:
            self._details.log(details)
        self.rows.log(brief)

    def resume_at(self, step: int) -> None:
        self._guard()
        checkpoint = self._run_dir / "checkpoints" / f"step_{step:06d}"
        if missing := self.rows.truncate_after(step, checkpoint / METRICS):
            self._note(missing)
        if self._details is not None:
            self._details.truncate_after(step)

    def close(self) -> None:
        self.rows.close()
        if self._details is not None:
            self._details.close()


class SamplesSink(Sink):
    """samples/NAME.jsonl, one decoded trajectory a line; a name written again replaces its file."""

    title = "samples/ (logging.samples_per_step)"

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "samples"

    def samples(self, name: str, decoded: Sequence[Decoded]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(dict(d), ensure_ascii=False, default=str) + "\n" for d in decoded)
        replace_file(self.folder / f"{name}.jsonl", text)

    def resume_at(self, step: int) -> None:
        # Samples of evaluations stay: they are of versions that the run did have.
        for file in self.folder.glob("step_*.jsonl"):
            found = re.fullmatch(r"step_(\d+)", file.stem)
            if found and int(found[1]) > step:
                file.unlink()


NO_WANDB = "off: the package wandb is not installed (pip install 'rlcore[wandb]')"


def wandb_mode(spec: LoggingSpec) -> Literal["offline", "online", "disabled"]:
    """The mode of W&B. Raises UserError for one that needs the package where it is missing."""
    if spec.wandb == "disabled":
        return "disabled"
    try:
        # not find_spec: a run folder has a folder wandb, too
        importlib.metadata.version("wandb")
    except importlib.metadata.PackageNotFoundError as error:
        if spec.wandb is None:
            return "disabled"
        raise UserError(
            f"logging.wandb={spec.wandb} needs the package wandb, which is not installed: "
            "pip install 'rlcore[wandb]', or logging.wandb=disabled."
        ) from error
    return spec.wandb or "offline"


class CallbackSink(Sink):
    """Calls a user's callbacks. Not in_folder: it writes nothing."""

    title = "callbacks"
    required = True
    in_folder = False

    def __init__(
        self, run_dir: Path, callbacks: Sequence[Callback], stop: Callable[[], None]
    ) -> None:
        """`stop`: ends the run after the present step."""
        self._checkpoints = run_dir / "checkpoints"
        self._callbacks = callbacks
        self._stop = stop
        self._seen = self._written()
        self._ended = False

    def _written(self) -> set[str]:
        return {folder.name for folder in self._checkpoints.glob("step_" + "[0-9]" * 6)}

    def log(self, row: Row) -> None:
        step = int(row["step"] or 0)
        self._told([c.on_step(step, row) for c in self._callbacks])
        results = {name: value for name, value in row.items() if name.startswith("eval/")}
        if results:
            self._told([c.on_evaluation(step, results) for c in self._callbacks])
        self._look()

    def _look(self) -> None:
        """Report the checkpoints that have been written since: a folder gets its name last."""
        for name in sorted(self._written() - self._seen):
            self._seen.add(name)
            folder = str(self._checkpoints / name)
            step = int(name.removeprefix("step_"))
            self._told([c.on_checkpoint(step, folder) for c in self._callbacks])

    def _told(self, answers: Sequence[bool | None]) -> None:
        if any(answer is False for answer in answers):
            self._stop()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._look()
        self._end(summary)

    def failed(self, error: Exception) -> None:
        self._end({"error": str(error)})

    def _end(self, summary: Mapping[str, Any]) -> None:
        if not self._ended:
            self._ended = True
            for callback in self._callbacks:
                callback.on_end(summary)


FINAL = ("ended", "failed")  # phases after which nothing more comes


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """Return the contents of status.json, or None before it is written."""
    try:
        return json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def age_s(status: Mapping[str, Any]) -> float:
    """Seconds since the run began its present activity, by this machine's clock."""
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
