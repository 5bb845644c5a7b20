"""What a summary of a run needs of its rows: the first and the newest, the last steps, and the
evaluations. The console, `rlcore watch` and `rlcore compare` share it."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.metrics.cells import evaluations, number, partial_rewards
from rlcore.metrics.names import combine, declared
from rlcore.metrics.rows import Row

Evaluation = dict[str, float | int | None]  # by task/metric

RECENT = 20  # steps that the pace, and so the remaining time, is averaged over
COMPARED = (
    "reward/mean",
    "response_length/mean",
    "mismatch/kl_k3",
    "mismatch/ess",
    "staleness/mean",
)
RATES = ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a summary: a metric's newest value, and its first as text (empty: none).

    `recent`: over how many last steps the value is a mean; 0: it is the newest row's.
    Example: Figure("reward/mean", 0.82, "0.28")
    """

    name: str
    last: float | int | None
    first: str = ""
    percent: bool = False
    recent: int = 0

    @property
    def label(self) -> str:
        """The name, and what the value is a mean over."""
        return f"{self.name}, last {self.recent} steps" if self.recent else self.name

    @property
    def shown(self) -> str:
        """The newest value as text."""
        if self.percent and self.last is not None:
            return f"{self.last:.0%}"
        return number(self.last)


class Digest:
    """Rows come in one by one, in the order of their steps."""

    def __init__(self) -> None:
        self.first: Row | None = None
        self.row: Row | None = None
        self.recent: list[Row] = []
        # (version, results), oldest first
        self.evals: list[tuple[int, Evaluation]] = []
        self._partial: set[str] = set()

    def add(self, row: Row) -> None:
        """Take in the row of the next step."""
        self.first = self.first or row
        self.row = row
        self.recent = [*self.recent, row][-RECENT:]
        found = evaluations(row)
        if found:
            at = row.get("eval/policy_version")
            version = row["step"] if at is None else at
            self.evals.append((int(version), found))  # type: ignore[arg-type]
            self._partial |= partial_rewards(found)

    def shown(self, found: Evaluation) -> Evaluation:
        """An evaluation without mean rewards that always were the accuracy."""
        return {n: v for n, v in found.items() if not n.endswith("_reward") or n in self._partial}

    def pace_s(self) -> float:
        """Mean seconds of a step over the last steps; 0 before the first."""
        seconds = [s for r in self.recent if (s := r.get("time/step_s")) is not None]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def figures(self) -> list[Figure]:
        """First against last, and the means of the last steps."""
        found: list[Figure] = []
        if self.evals:
            first, last = self.evals[0][1], self.evals[-1][1]
            found += [Figure(f"eval {n}", last[n], number(first.get(n))) for n in self.shown(last)]
        if self.first is None or self.row is None:
            return found
        for name in (n for n in COMPARED if n in self.row):
            found.append(Figure(name, self.row[name], number(self.first.get(name))))
        return found + self._recent_means()

    def _recent_means(self) -> list[Figure]:
        """Rates and the learner's waiting over the last steps."""
        means = combine([{k: v for k, v in r.items() if declared(k)} for r in self.recent])
        size = len(self.recent)
        found = [Figure(name, means[name], recent=size) for name in RATES if name in means]
        if means.get("time/step_s") and "time/wait_data_s" in means:
            share = means["time/wait_data_s"] / means["time/step_s"]
            found.append(Figure("learner waits", share, percent=True, recent=size))
        return found
