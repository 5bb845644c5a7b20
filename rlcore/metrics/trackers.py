"""Sinks of trackers that are separate packages, none of which rlcore needs: W&B (`logging.wandb`),
and TensorBoard, MLflow and Trackio, entries of `logging.sinks`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from rlcore.errors import DeadlineExceeded, UserError
from rlcore.metrics.rows import METRICS, Row, read_rows, run_rows
from rlcore.metrics.sinks import Decoded, Sink, wandb_mode
from rlcore.metrics.specs import LoggingSpec

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
                self._run.log(_without_nulls(row), step=row["step"])

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
        values = _without_nulls(row)
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


def _without_nulls(row: Row) -> dict[str, Any]:
    """A row without what W&B takes for no number."""
    return {name: value for name, value in row.items() if value is not None}


def _last_step(metrics: Path) -> int:
    rows = read_rows(metrics) if metrics.is_file() else []
    return int(rows[-1]["step"] or 0) if rows else 0


# ----- entries of logging.sinks -----


def _package(module: str, name: str) -> Any:
    """Import a tracker. Raises UserError, with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(name) from error


def _installed(name: str) -> None:
    """Raise UserError for a tracker that is not installed, without importing it."""
    try:
        importlib.metadata.version(name)  # not find_spec: a run folder has such folders, too
    except importlib.metadata.PackageNotFoundError as error:
        raise _missing(name) from error


def _missing(name: str) -> UserError:
    return UserError(
        f"logging.sinks={name} needs the package {name}, which is not installed: "
        f"pip install {name}, or leave it out."
    )


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value is not None}


class TensorboardSink(Sink):
    """Scalars into RUN_DIR/tensorboard; `tensorboard --logdir runs` shows them."""

    title = "TensorBoard (logging.sinks)"

    @classmethod
    def _require(cls) -> None:
        _installed("tensorboard")

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        _package("tensorboard", "tensorboard")
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(run_dir / "tensorboard"))

    def log(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, int(row["step"] or 0))

    def close(self) -> None:
        self._writer.close()


class MlflowSink(Sink):
    """A run of the experiment `logging.project`, at MLFLOW_TRACKING_URI. MLflow's names have no @:
    eval/digits/mean@4 is eval/digits/mean_at_4 there."""

    title = "MLflow (logging.sinks)"
    in_folder = False

    @classmethod
    def _require(cls) -> None:
        _installed("mlflow")

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._mlflow = _package("mlflow", "mlflow")
        self._mlflow.set_experiment(config["logging"]["project"])
        self._mlflow.start_run(run_name=run_dir.name)
        self._mlflow.log_dict(dict(config), "config.json")
        self._status: str | None = "FAILED"

    def log(self, row: Row) -> None:
        values = {name.replace("@", "_at_"): value for name, value in _numbers(row).items()}
        self._mlflow.log_metrics(values, step=int(row["step"] or 0))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._status = "FINISHED"

    def close(self) -> None:
        if self._status is not None:
            self._mlflow.end_run(self._status)
            self._status = None


class TrackioSink(Sink):
    """A run of the project `logging.project`; `trackio show` shows it, without an account."""

    title = "Trackio (logging.sinks)"
    in_folder = False

    @classmethod
    def _require(cls) -> None:
        _installed("trackio")

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._trackio = _package("trackio", "trackio")
        project = config["logging"]["project"]
        self._trackio.init(project=project, name=run_dir.name, config=dict(config))
        self._open = True

    def log(self, row: Row) -> None:
        self._trackio.log(_numbers(row), step=int(row["step"] or 0))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._trackio.finish()
