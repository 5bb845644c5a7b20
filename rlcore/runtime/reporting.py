"""What a run leaves behind and shows: rows, samples and notes, handed to the metric sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.metrics.logger import MetricsLogger


class RunReporter:
    """`interfaces.Reporter` over the metric sinks of a run directory."""

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger

    def row(self, row: Mapping[str, float | int | None]) -> None:
        self._logger.log(dict(row))

    def samples(self, step: int, decoded: Sequence[Mapping[str, Any]]) -> None:
        self._logger.samples(f"step_{step:06d}", [dict(d) for d in decoded])

    def evaluation_samples(self, version: int, label: str, verdicts: Sequence[Mapping[str, Any]]) -> None:
        self._logger.samples(f"eval_{version:06d}_{label.replace('/', '_')}", [dict(v) for v in verdicts])

    def note(self, text: str) -> None:
        self._logger.note(text)
