"""All sinks of a run directory as one, the timeline's file, and the reporter that a run calls."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlcore.errors import OwnershipLost
from rlcore.files import replace_file
from rlcore.interfaces import Reporter, Span
from rlcore.metrics.console import ConsoleSink
from rlcore.metrics.health import ALARM, Alarm, Health, add_warned
from rlcore.metrics.log import LogSink
from rlcore.metrics.names import split_row
from rlcore.metrics.rows import Row, run_rows, sanitize
from rlcore.metrics.sinks import (
    NO_WANDB,
    Decoded,
    JsonlSink,
    SamplesSink,
    Sink,
    StatusSink,
    unguarded,
    wandb_mode,
)
from rlcore.metrics.specs import LoggingSpec
from rlcore.metrics.step_lengths import ShortSteps
from rlcore.registry import resolve

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


class RunHealth(Sink):
    """Judges the rows of the run in a directory (`metrics/health.py`) before they are written."""

    title = "the run's warnings (logging.warnings)"

    def __init__(self, run_dir: Path, health: Health) -> None:
        self.health = health
        self._run_dir = run_dir
        self._new: list[Alarm] = []
        self._short = ShortSteps(health.course)
        self.short: str | None = None  # what the newest row says of the step bound

    def log(self, row: Row) -> None:
        self._new, self.short = [], None
        self._new = self.health.add(row)
        self.short = self._short.add(row)
        row[ALARM] = float(len(self.health.speaking))

    def take(self) -> list[Alarm]:
        """The alarms that the newest row gave."""
        found, self._new = self._new, []
        return found

    def alarm(self, alarm: Alarm) -> None:
        add_warned(self._run_dir, alarm.step)

    def resume_at(self, step: int) -> None:
        # after JsonlSink, whose rows these are: their alarms have been given
        rows = run_rows(self._run_dir)
        self.health.resume(rows)
        self._short.resume(rows)


REFERENCE = 4000  # characters of a reference answer that samples are shown with
RETRY_S = 60.0  # between two tries of a sink that has failed


class MetricsLogger:
    """Sends rows, samples and notes to every sink. A context manager: leaving it closes them, also
    on an error.

    A run needs only its rows: any other sink that fails is noted once, left alone for a
    minute and tried again, unless it says that it cannot come back.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        clock: Callable[[], float] = time.monotonic,
        health: RunHealth | None = None,
        *,
        full: bool = True,
    ) -> None:
        """`health`: judges each row; None: nobody does. `full`: False keeps the columns of
        details.jsonl from every sink."""
        # the reference answer of a prompt id, "" where there is none; samples are shown with it
        self.reference: Callable[[str], str] = lambda prompt_id: ""
        self._full = full
        self.sinks = list(sinks)
        self._health = health
        self._clock = clock
        self._off: dict[Sink, float] = {}  # failed sink -> when it is tried again

    def log(self, row: Mapping[str, Any]) -> None:
        """One learner step; values are numbers or None. Raises ValueError for a repeated or skipped
        step, NoSpace or StageError if metrics.jsonl cannot be written."""
        clean = sanitize(row)  # once, so that all sinks agree on what was not finite
        judge = self._health
        if judge is not None:  # before the others, to whom the row says how it was judged
            self._do(judge, lambda sink: sink.log(clean))
        if not self._full:
            clean, _ = split_row(clean)
        try:
            self._each(lambda sink: sink.log(clean))
        except OwnershipLost:
            # the run folder is another command's from now on
            self.sinks = [sink for sink in self.sinks if not sink.in_folder]
            raise
        if judge is None:
            return
        for alarm in judge.take():
            self._tell(alarm)
        step, said, judge.short = int(clean["step"] or 0), judge.short, None
        if said is not None:
            self._each(lambda sink: sink.told("step_bound", step, said))

    def _tell(self, alarm: Alarm) -> None:
        for sink in [*self.sinks, *filter(None, [self._health])]:
            self._do(sink, lambda sink: sink.alarm(alarm))

    @property
    def speaking(self) -> frozenset[str]:
        """The rules of `logging.warnings` that speak of the newest row."""
        return frozenset() if self._health is None else self._health.health.speaking

    def samples(self, name: str, decoded: Sequence[Decoded]) -> None:
        """Decoded trajectories (prompt, response, reward, status, versions, ...) under
        samples/NAME.jsonl, each with its "reference" answer, if there is one."""
        found = [(one, self.reference(str(one.get("prompt_id", "")))) for one in decoded]
        shown = [{**one, "reference": text[:REFERENCE]} if text else one for one, text in found]
        self._each(lambda sink: sink.samples(name, shown))

    def note(self, text: str) -> None:
        """One line about what is happening."""
        self._each(lambda sink: sink.note(text))

    def activity(self, name: str, waits_for: str, step: int) -> None:
        """Record the run's activity and the object of its wait from now on, after `step` steps."""
        self._each(lambda sink: sink.activity(name, waits_for, step))

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        """Every rollout actor as it is now."""
        self._each(lambda sink: sink.fleet(actors))

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        """The work and the waits of every process before this step's row."""
        self._each(lambda sink: sink.timeline(step, spans))

    def stderr(self, role: str, text: str) -> None:
        """Log text that a process of the run wrote to its standard error; safe from any thread."""
        for sink in self.sinks:
            if isinstance(sink, LogSink):
                sink.stderr(role, text)

    def resume_at(self, step: int) -> None:
        """Continue after `step`: rows and samples beyond it are dropped, since they come again."""
        self._each(lambda sink: sink.resume_at(step))
        if self._health is not None:
            self._do(self._health, lambda sink: sink.resume_at(step))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run succeeded: write summaries, with its verdict, then close."""
        if self._health is not None:
            summary = {**summary, "verdict": self._health.health.verdict().line}
        self._each(lambda sink: sink.finish(summary))
        self.close()

    def close(self) -> None:
        """Close every sink, in reverse, so that earlier sinks receive the notes of later ones."""
        for sink in reversed(self.sinks):
            # also one that is off: it may have processes that must be ended
            was_off = self._off.pop(sink, None) is not None
            self._do(sink, lambda sink: sink.close(), quiet=was_off)

    def _each(self, do: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            self._do(sink, do)

    def _do(self, sink: Sink, do: Callable[[Sink], None], *, quiet: bool = False) -> None:
        if sink.required:
            do(sink)
            return
        if self._clock() < self._off.get(sink, 0.0):
            return
        was_off = sink in self._off
        self._off[sink] = self._clock() + (RETRY_S if sink.retried else math.inf)
        try:
            do(sink)
        except Exception as e:  # any error: a failing sink does not end a healthy run
            if not was_off and not quiet:  # a sink that is off is sent nothing about itself
                why = " ".join(f"{type(e).__name__}: {e}".split())
                again = f", and tries again every {RETRY_S:.0f} s" if sink.retried else ""
                self.note(f"{sink.title} could not be written ({why}): the run continues without"
                          f"{again}")  # fmt: skip
            return
        del self._off[sink]
        if was_off:
            self.note(f"{sink.title} is written again; what came in between is missing there")

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._each(lambda sink: sink.failed(error))
        self.close()


def open_logger(
    run_dir: str | Path,
    spec: LoggingSpec,
    *,
    config: Mapping[str, Any],
    total_steps: int,
    health: Health | None = None,
    guard: Callable[[], None] = unguarded,
) -> MetricsLogger:
    """The sinks of a run directory, which is created if it does not exist.

    `config`: the resolved configuration, for W&B. `total_steps`: optimizer steps of the whole run.
    `health`: judges the rows; None: the run does not warn. `guard`: raises OwnershipLost once the
    directory is another command's. A live console falls back to plain where the output is not a
    terminal. Raises UserError when W&B refuses to start or is wanted and not installed, the
    Prometheus port is taken, or metrics.jsonl is damaged.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    status = StatusSink(run_dir, total_steps)
    log = LogSink(run_dir, total_steps)
    full = spec.detail == "full"
    rows = JsonlSink(run_dir, guard, lambda text: logger.note(text), full=full)
    sinks: list[Sink] = [rows, log, SamplesSink(run_dir), TimelineSink(run_dir), status]
    if spec.console != "off":
        live = spec.console == "live"
        sinks.append(ConsoleSink(run_dir=run_dir, total_steps=total_steps, live=live))
    # Sinks that may be refused come last: earlier ones must not stay open then.
    try:
        sinks += [own_sink(name)(run_dir, config) for name in spec.sinks]
        if spec.webhook:
            sinks.append(_webhook(run_dir, spec.webhook))
        if spec.prometheus_port:
            sinks.append(_endpoint(run_dir, spec, total_steps))
        if wandb_mode(spec) != "disabled":
            sinks.append(_wandb(run_dir, spec, config))
    except BaseException:
        MetricsLogger(sinks).close()
        raise
    judge = None if health is None else RunHealth(run_dir, health)
    logger = MetricsLogger(sinks, health=judge, full=full)
    if spec.wandb is None and wandb_mode(spec) == "disabled":
        logger.note(f"W&B is {NO_WANDB}")
    return logger


SINKS = {
    "mlflow": "rlcore.metrics.trackers:MlflowSink",
    "tensorboard": "rlcore.metrics.trackers:TensorboardSink",
    "trackio": "rlcore.metrics.trackers:TrackioSink",
}


def own_sink(name: str) -> Callable[[Path, Mapping[str, Any]], Sink]:
    """The class of an entry of logging.sinks: one of `SINKS`, or a user's own by path. Raises
    UserError for a class that is not a sink."""
    cls: Callable[[Path, Mapping[str, Any]], Sink] = resolve(
        SINKS, name, key="logging.sinks", like=Sink
    )
    return cls


def require_free_endpoint(spec: LoggingSpec) -> None:
    """Raise UserError for an address of the endpoint that cannot be listened on."""
    if spec.prometheus_port:
        from rlcore.metrics.prometheus import require_free

        require_free(spec.prometheus_host, spec.prometheus_port)


def _endpoint(run_dir: Path, spec: LoggingSpec, total_steps: int) -> Sink:
    from rlcore.metrics.prometheus import PrometheusSink

    host, port = spec.prometheus_host, spec.prometheus_port
    return PrometheusSink(run_dir, total_steps, host=host, port=port)


def _wandb(run_dir: Path, spec: LoggingSpec, config: Mapping[str, Any]) -> Sink:
    from rlcore.metrics.trackers import WandbSink

    return WandbSink(run_dir, spec, config)


def _webhook(run_dir: Path, url: str) -> Sink:
    from rlcore.metrics.webhook import WebhookSink

    return WebhookSink(run_dir, url)


class RunReporter(Reporter):
    """Rows, samples and notes of a run, through the metric sinks of its directory."""

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger

    def row(self, row: Mapping[str, float | int | None]) -> frozenset[str]:
        self._logger.log(dict(row))
        return self._logger.speaking

    def samples(self, step: int, decoded: Sequence[Mapping[str, Any]]) -> None:
        self._logger.samples(f"step_{step:06d}", [dict(d) for d in decoded])

    def evaluation_samples(
        self, version: int, label: str, verdicts: Sequence[Mapping[str, Any]]
    ) -> None:
        name = f"eval_{version:06d}_{label.replace('/', '_')}"
        self._logger.samples(name, [dict(v) for v in verdicts])

    def note(self, text: str) -> None:
        self._logger.note(text)

    def activity(self, name: str, waits_for: str, step: int) -> None:
        self._logger.activity(name, waits_for, step)

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        self._logger.timeline(step, spans)

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        self._logger.fleet(actors)
