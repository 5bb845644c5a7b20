"""The one door to all sinks of a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rlcore.metrics.console import ConsoleSink
from rlcore.metrics.rows import sanitize
from rlcore.metrics.sinks import JsonlSink, Sample, SamplesSink, Sink, WandbSink


class MetricsLogger:
    """Fans rows, samples and notes out to sinks. A context manager: leaving it closes every sink, also on an error."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def log(self, row: Mapping[str, Any]) -> None:
        """One learner step; values are numbers or None. Raises ValueError for a doubled or skipped step."""
        clean = sanitize(row)
        for sink in self.sinks:
            sink.log(clean)

    def samples(self, name: str, decoded: Sequence[Sample]) -> None:
        """Decoded trajectories (prompt, response, reward, status, versions, ...) under samples/NAME.jsonl."""
        for sink in self.sinks:
            sink.samples(name, decoded)

    def note(self, text: str) -> None:
        """One line for whoever watches."""
        for sink in self.sinks:
            sink.note(text)

    def resume_at(self, step: int) -> None:
        """Continue after `step`: rows and samples beyond it are dropped, to be made again."""
        for sink in self.sinks:
            sink.resume_at(step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run ended well: summaries, then close."""
        for sink in self.sinks:
            sink.finish(summary)
        self.close()

    def close(self) -> None:
        """Close every sink, whatever the others do; the first error is raised at the end."""
        errors: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as e:  # a failing sink must not keep another's process alive; raised below
                errors.append(e)
        if errors:
            raise errors[0]

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_logger(
    run_dir: str | Path,
    *,
    console: Literal["live", "plain", "off"],
    wandb: Literal["offline", "online", "disabled"],
    project: str,
    config: Mapping[str, Any],
    total_steps: int,
) -> MetricsLogger:
    """The sinks of a run directory, which is made if need be.

    Args: what the console shows (live falls back to plain where the output is no terminal); the W&B mode and project;
    the resolved configuration; optimizer steps of the whole run.
    Raises UserError when W&B refuses to start or metrics.jsonl is damaged.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(run_dir), SamplesSink(run_dir)]
    if console != "off":
        sinks.append(ConsoleSink(run_dir=run_dir, total_steps=total_steps, live=console == "live"))
    if wandb != "disabled":
        try:
            sinks.append(WandbSink(run_dir, mode=wandb, project=project, config=config))
        except BaseException:
            MetricsLogger(sinks).close()
            raise
    return MetricsLogger(sinks)
