"""Where metrics go: the protocol, and the sinks that are files or W&B. The console has its own
module."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import queue
import re
import secrets
import threading
import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from rlcore.errors import DeadlineExceeded, UserError
from rlcore.files import replace_file
from rlcore.interfaces import Callback, Span
from rlcore.metrics.health import Alarm
from rlcore.metrics.names import split_row
from rlcore.metrics.rows import DETAILS, METRICS, Row, RowFile, read_rows, run_rows
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


ANSWER_S = 120.0  # for one call of W&B


class Calls:
    """Calls that a thread makes one after the other, so that one that hangs blocks no other thread.
    After an error no further call is made, and the next `put` or `end` raises it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._began: float | None = None  # the call that is being made
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Have a call made. Raises DeadlineExceeded if an earlier one does not return."""
        began = self._began
        self._check(late=began is not None and time.monotonic() - began > ANSWER_S)
        self._queue.put(call)

    def end(self) -> None:
        """Return when all calls are made. Raises as `put` does."""
        self._queue.put(None)
        self._thread.join(ANSWER_S)
        self._check(late=self._thread.is_alive())

    def _check(self, *, late: bool) -> None:
        if self._error is not None:
            raise self._error
        if late:
            raise DeadlineExceeded(f"{self._what} has not answered for {ANSWER_S:g} s")

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self._began = time.monotonic()
            try:
                call()
            except Exception as e:  # the next caller receives it
                self._error = e
                return
            self._began = None


# Of the tables of samples in W&B.
TABLE_COLUMNS = (
    "source",
    "prompt",
    "response",
    "reference",
    "reward",
    "finish_reason",
    "actor",
    "score_status",
)
TABLE_ROWS = 64
TABLE_CHARS = 4000  # of a text


def table_rows(name: str, decoded: Sequence[Decoded]) -> list[list[str | float | None]]:
    """Samples as rows of TABLE_COLUMNS; texts are cut, and missing entries are None."""
    return [
        [name, *(_cell(sample.get(column)) for column in TABLE_COLUMNS[1:])]
        for sample in decoded[:TABLE_ROWS]
    ]


def _cell(value: Any) -> str | float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    return str(value)[:TABLE_CHARS]


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


class WandbSink(Sink):
    """W&B into RUN_DIR/wandb, silently. Offline needs no account. A resumed run keeps its id, so
    that a later sync joins its parts. If rows were cut from metrics.jsonl, it gets another id and
    its rows from the first on. Samples are tables, `samples/training` and `samples/<evaluation>`;
    W&B adds metrics of the machine.

    Its service is its own process, which may die or hang as any other. Offline it starts while
    the caller goes on: its package takes more than a second. Raises UserError when W&B refuses mode
    online (without an account or a network), or is missing.
    """

    title = "W&B (logging.wandb)"
    in_folder = False  # each start has a folder of its own
    retried = False  # W&B goes on with no run whose service was lost

    def __init__(self, run_dir: Path, spec: LoggingSpec, config: Mapping[str, Any]) -> None:
        mode = wandb_mode(spec)
        folder = run_dir / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # Outside W&B's own folders, whose names change with every start.
        id_file = folder / "run_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        self._failed, self._closed = True, False
        # W&B's steps must rise, and an evaluation's version may be an earlier one: tables go with
        # the next row
        self._tables: dict[str, list[list[str | float | None]]] = {}
        self._wandb: Any = None  # the package, once it is there
        self._run: Any = None
        self._id_file, self._metrics = id_file, run_dir / METRICS
        self._begin = partial(self._start, run_dir, spec, mode, dict(config))
        self._logged = _last_step(self._metrics)  # by this W&B run, which an id names
        start = partial(self._begin, id_file.read_text().strip())
        if mode == "online":
            start()
        self._calls = Calls("W&B's service")
        if mode == "offline":
            self._calls.put(start)

    def resume_at(self, step: int) -> None:
        """W&B's steps only rise: rows that come again would be dropped there, and the lost steps'
        rows stay. So they begin another run of W&B, with the rows of metrics.jsonl up to here."""
        if self._logged <= step:
            return
        self._id_file.write_text(secrets.token_hex(4))
        begin = partial(self._begin, self._id_file.read_text())
        kept = [row for row in run_rows(self._metrics.parent) if (row["step"] or 0) <= step]

        def call() -> None:
            self._run.finish(exit_code=1)
            begin()
            for row in kept:
                self._run.log(_numbers(row), step=row["step"])

        self._calls.put(call)
        self._logged = step

    def _start(
        self,
        run_dir: Path,
        spec: LoggingSpec,
        mode: Literal["offline", "online", "disabled"],
        config: Mapping[str, Any],
        run_id: str,
    ) -> None:
        import wandb  # not at the top: a run without W&B must not load it

        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=spec.project,
                entity=spec.entity,
                group=spec.group,
                tags=spec.tags or None,
                name=run_dir.name,
                id=run_id,
                dir=str(run_dir),
                mode=mode,
                resume="allow" if mode == "online" else None,
                config=dict(config),
                settings=self._settings(),
            )
        except (wandb.Error, OSError) as e:
            wandb.teardown()  # its service process has started by then
            reason = " ".join(str(e).split()).rstrip(".")
            raise UserError(
                f"logging.wandb={mode} failed ({reason}): choose one of offline, online, disabled."
            ) from e

    def _settings(self) -> Any:
        # Silent: the console belongs to the run's own table.
        return self._wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, init_timeout=60
        )

    def samples(self, name: str, decoded: Sequence[Decoded]) -> None:
        kind = "training" if name.startswith("step_") else name.split("_", 2)[-1]
        self._tables[f"samples/{kind}"] = table_rows(name, decoded)

    def log(self, row: Row) -> None:
        values = _numbers(row)
        self._logged = max(self._logged, int(row["step"] or 0))
        tables, self._tables = self._tables, {}

        def call() -> None:
            shown = {
                name: self._wandb.Table(columns=list(TABLE_COLUMNS), data=rows)
                for name, rows in tables.items()
            }
            self._run.log(values | shown, step=row["step"])

        self._calls.put(call)

    def finish(self, summary: Mapping[str, Any]) -> None:
        last = {f"summary/{k}": v for k, v in summary.items() if isinstance(v, int | float | str)}
        self._calls.put(lambda: self._run.summary.update(last))
        self._failed = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._calls.put(lambda: self._run.finish(exit_code=1 if self._failed else 0))
            # Ends its service process, which would outlive a failed run.
            self._calls.put(lambda: self._wandb.teardown())
            self._calls.end()
        except Exception:
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() == "wandb-core":  # its service, which may hang as it starts
                        process.kill()
            # else W&B does it as this process ends, which would take the service's exit code
            with contextlib.suppress(Exception, SystemExit):
                if self._wandb is not None:
                    self._wandb.teardown()
            raise


def _numbers(row: Row) -> dict[str, Any]:
    """A row without nulls, which W&B takes for no number."""
    return {name: value for name, value in row.items() if value is not None}


def _last_step(metrics: Path) -> int:
    rows = read_rows(metrics) if metrics.is_file() else []
    return int(rows[-1]["step"] or 0) if rows else 0


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
