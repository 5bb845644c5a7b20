"""All sinks of a run directory as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlcore.interfaces import Span
from rlcore.metrics.console import ConsoleSink
from rlcore.metrics.health import Course, Health
from rlcore.metrics.rows import sanitize
from rlcore.metrics.sinks import Decoded, HealthSink, JsonlSink, SamplesSink, Sink, WandbSink
from rlcore.metrics.specs import LoggingSpec
from rlcore.metrics.status import StatusSink
from rlcore.metrics.timeline import TimelineSink
from rlcore.registry import resolve


class MetricsLogger:
    """Sends rows, samples and notes to every sink. A context manager: leaving it closes them, also
    on an error."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def log(self, row: Mapping[str, Any]) -> None:
        """One learner step; values are numbers or None. Raises ValueError for a repeated or skipped
        step."""
        clean = sanitize(row)  # once, so that all sinks agree on what was not finite
        for sink in self.sinks:
            sink.log(clean)

    def samples(self, name: str, decoded: Sequence[Decoded]) -> None:
        """Decoded trajectories (prompt, response, reward, status, versions, ...) under
        samples/NAME.jsonl."""
        for sink in self.sinks:
            sink.samples(name, decoded)

    def note(self, text: str) -> None:
        """One line about what is happening."""
        for sink in self.sinks:
            sink.note(text)

    def activity(self, name: str, waits_for: str, step: int) -> None:
        """What the run does and waits for from now on, after `step` steps."""
        for sink in self.sinks:
            sink.activity(name, waits_for, step)

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        """Every rollout actor as it is now."""
        for sink in self.sinks:
            sink.fleet(actors)

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Who worked and who waited before this step's row."""
        for sink in self.sinks:
            sink.timeline(step, spans)

    def resume_at(self, step: int) -> None:
        """Continue after `step`: rows and samples beyond it are dropped, since they come again."""
        for sink in self.sinks:
            sink.resume_at(step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run ended well: summaries, then close."""
        for sink in self.sinks:
            sink.finish(summary)
        self.close()

    def close(self) -> None:
        """Close every sink even if one fails; the first error is raised at the end."""
        errors: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as e:  # any error: the other sinks have processes that must be ended
                errors.append(e)
        if errors:
            raise errors[0]

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_logger(
    run_dir: str | Path,
    spec: LoggingSpec,
    *,
    config: Mapping[str, Any],
    total_steps: int,
    course: Course | None = None,
) -> MetricsLogger:
    """The sinks of a run directory, which is created if it does not exist.

    `config`: the resolved configuration, for W&B. `total_steps`: optimizer steps of the whole run.
    `course`: what warnings know of the schedule; None: the run does not warn.
    A live console falls back to plain where the output is no terminal. Raises UserError when W&B
    refuses to start, the Prometheus port is taken, or metrics.jsonl is damaged.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    status = StatusSink(run_dir, total_steps)
    sinks: list[Sink] = [JsonlSink(run_dir), SamplesSink(run_dir), TimelineSink(run_dir), status]
    if spec.console != "off":
        live = spec.console == "live"
        sinks.append(ConsoleSink(run_dir=run_dir, total_steps=total_steps, live=live))
    # What may be refused comes last: the sinks before it must not stay open when it is.
    try:
        sinks += [own_sink(name)(run_dir, config) for name in spec.sinks]
        if spec.prometheus_port:
            sinks.append(_endpoint(run_dir, spec, total_steps))
        if spec.wandb != "disabled":
            wandb = WandbSink(run_dir, mode=spec.wandb, project=spec.project, config=config)
            sinks.append(wandb)
    except BaseException:
        MetricsLogger(sinks).close()
        raise
    logger = MetricsLogger(sinks)
    if course is not None:
        health = Health(spec.warnings, course)
        logger.sinks.append(HealthSink(run_dir, health, logger.note))
    return logger


def own_sink(name: str) -> Callable[[Path, Mapping[str, Any]], Sink]:
    """The class of a user's own sink, by path. Raises UserError for what is no sink."""
    cls: Callable[[Path, Mapping[str, Any]], Sink] = resolve(
        {}, name, key="logging.sinks", like=Sink
    )
    return cls


def _endpoint(run_dir: Path, spec: LoggingSpec, total_steps: int) -> Sink:
    from rlcore.metrics.prometheus import PrometheusSink

    host, port = spec.prometheus_host, spec.prometheus_port
    return PrometheusSink(run_dir, total_steps, host=host, port=port)
