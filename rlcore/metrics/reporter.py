"""What the loop reports, passed on to the sinks of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.interfaces import Reporter, Span
from rlcore.metrics.logger import MetricsLogger


class RunReporter(Reporter):
    """Rows, samples and notes of a run, through the metric sinks of its directory."""

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger

    def row(self, row: Mapping[str, float | int | None]) -> None:
        self._logger.log(dict(row))

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
