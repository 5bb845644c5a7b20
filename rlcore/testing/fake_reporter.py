"""What a simulated run reports, kept for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.interfaces import Reporter, Span


class FakeReporter(Reporter):
    """Keeps everything, and passes it on to the reporter `beside` it."""

    def __init__(self, beside: Reporter | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.shown: dict[int, list[Mapping[str, Any]]] = {}
        self.evaluations: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
        self.timelines: dict[int, list[Span]] = {}
        self._beside = beside

    def row(self, row: Mapping[str, float | int | None]) -> None:
        self.rows.append(dict(row))
        if self._beside is not None:
            self._beside.row(row)

    def samples(self, step: int, decoded: Sequence[Mapping[str, Any]]) -> None:
        self.shown[step] = list(decoded)

    def evaluation_samples(
        self, version: int, label: str, verdicts: Sequence[Mapping[str, Any]]
    ) -> None:
        self.evaluations[version, label] = list(verdicts)

    def note(self, text: str) -> None:
        self.notes.append(text)
        if self._beside is not None:
            self._beside.note(text)

    def activity(self, name: str, waits_for: str, step: int) -> None:
        if self._beside is not None:
            self._beside.activity(name, waits_for, step)

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        self.timelines[step] = list(spans)

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        if self._beside is not None:
            self._beside.fleet(actors)
