"""The digest of a run's rows for summaries: the first and the newest row, the last steps, and the
evaluations with the answers that changed. Console, report, `rlcore watch` and `rlcore compare`
share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.metrics.intervals import Interval, wilson
from rlcore.metrics.names import combine, declared, is_accuracy, size_of, split_kind
from rlcore.metrics.rows import Row


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the live table, made from the latest row; None shows nothing."""

    label: str
    show: Callable[[Row], str | None]


def number(value: float | int | None, digits: int = 3) -> str:
    """A short readable number; "n/a" for a value that was not finite."""
    if value is None:
        return "n/a"
    if abs(value) >= 1e15:  # of a diverging run, whose digits mean nothing
        return f"{value:.{digits}g}"
    # Counts arrive as floats too, and "12,345" reads better than "1.23e+04".
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def evaluations(row: Row) -> dict[str, float | int | None]:
    """Held-out accuracies and mean rewards of a row, by task/metric, and the share of samples that
    an accuracy leaves out where there are any."""
    shown = (n for n in row if is_accuracy(n) or _is_held_out_reward(n) or _leaves_out(n, row))
    return {n.removeprefix("eval/"): row[n] for n in shown}


def _leaves_out(name: str, row: Row) -> bool:
    return name.startswith("eval/") and name.endswith("_failed_share") and bool(row[name])


# Compared between the kinds of actors of a run.
KINDS_COMPARED = (
    "reward/mean",
    "response_length/mean",
    "staleness/mean",
    "mismatch/kl_k3",
    "mismatch/ess",
    "correction/kept_share",
    "mismatch/agreement_p5",
    "worth/tokens_per_actor_s",
    "worth/tokens_per_price",
)


def by_kind(row: Row) -> dict[str, dict[str, float | int | None]]:
    """The compared metrics of each kind of actors, by kind and name; empty for one kind."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name, value in row.items():
        pooled, kind = split_kind(name)
        if kind and pooled in KINDS_COMPARED:
            found.setdefault(kind, {})[pooled] = value
    return found


def partial_rewards(found: Mapping[str, float | int | None]) -> set[str]:
    """An evaluation's mean rewards that differ from the accuracy of the same answers: the
    task gives partial rewards to wrong answers."""
    differing = set()
    for name, reward in found.items():
        task, _, metric = name.rpartition("/")
        if not metric.endswith("_reward"):
            continue
        # mean@4 and greedy are the accuracies beside sampled_reward and greedy_reward
        mate = f"{task}/{'greedy' if metric == 'greedy_reward' else 'mean'}"
        accuracies = [found[n] for n in found if n.partition("@")[0] == mate]
        if any(not _close(reward, accuracy) for accuracy in accuracies):
            differing.add(name)
    return differing


def _is_held_out_reward(name: str) -> bool:
    metric = declared(name)
    return metric is not None and metric.name.startswith("eval/") and metric.unit == "reward"


def _close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)


def _pair(first: str, second: str, text: str) -> Callable[[Row], str | None]:
    def show(row: Row) -> str | None:
        if first not in row and second not in row:
            return None
        return text.format(number(row.get(first)), number(row.get(second)))

    return show


def _lengths(row: Row) -> str | None:
    mean, cut = row.get("response_length/mean"), row.get("response_length/truncated_share")
    return None if mean is None else f"{number(mean)} tokens, {cut or 0:.0%} cut off"


def _wait_share(row: Row) -> str | None:
    wait, step = row.get("time/wait_data_s"), row.get("time/step_s")
    return f"{wait / step:.0%} of {number(step)} s" if wait is not None and step else None


def _failed_scores(row: Row) -> str | None:
    errors, timeouts = row.get("ledger/score_errors"), row.get("ledger/score_timeouts")
    if not errors and not timeouts:
        return None
    return f"{number(errors or 0)} errors, {number(timeouts or 0)} timeouts"


def tasks(row: Row) -> dict[str, dict[str, float | int | None]]:
    """Figures of the training tasks of a row, by task; nothing for a run with one."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name, value in row.items():
        if name.startswith("task/"):
            _, task, figure = name.split("/", 2)
            found.setdefault(task, {})[figure] = value
    return found


def _rewards_by_task(row: Row) -> str | None:
    means = {task: its["reward_mean"] for task, its in tasks(row).items() if "reward_mean" in its}
    return ", ".join(f"{task} {number(mean)}" for task, mean in means.items()) or None


_RATES = ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s")
CELLS = (
    Cell("reward", _pair("reward/mean", "reward/std", "{} ± {}")),
    Cell("reward by task", _rewards_by_task),
    Cell("response length", _lengths),
    Cell("staleness", _pair("staleness/mean", "staleness/max", "mean {}, max {} steps")),
    Cell("mismatch", _pair("mismatch/kl_k3", "mismatch/ess", "KL {} nats, ESS {}")),
    Cell("entropy, gradient", _pair("entropy", "grad_norm", "{} nats, norm {}")),
    Cell("tokens per second", _pair(*_RATES, "{} sampled, {} trained")),
    Cell("learner waits", _wait_share),
    Cell("buffer", _pair("buffer/groups", "ledger/consumed", "{} groups ready, {} consumed")),
    Cell("failed scores", _failed_scores),
)


def _brief(name: str, text: str) -> Callable[[Row], str | None]:
    return lambda row: text.format(number(row[name])) if name in row else None


# Parts of the line of a step, the most important first; parts that do not fit are left out.
BRIEF = (
    _brief("reward/mean", "reward {}"),
    _brief("staleness/mean", "stale {}"),
    _brief("mismatch/kl_k3", "KL {}"),
    _brief("mismatch/ess", "ESS {}"),
    _brief("response_length/mean", "length {}"),
    lambda row: f"waits {share}" if (share := _wait_share(row)) is not None else None,
    lambda row: f"failed: {failed}" if (failed := _failed_scores(row)) is not None else None,
    _brief("throughput/train_tokens_per_s", "{} tokens/s"),
    _brief("entropy", "entropy {}"),
    _brief("grad_norm", "norm {}"),
)
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
    share: bool = False  # of answers; with the number of independent ones, if it is known
    size: float | None = None

    def interval(self, ci: float = 95) -> Interval | None:
        """Wilson's, of a share of answers; None where it is not known."""
        known = self.share and self.size and self.last is not None
        return wilson(float(self.last), self.size, ci) if known else None  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """The name, and the steps that the value is a mean over."""
        return f"{self.name}, last {self.recent} steps" if self.recent else self.name

    @property
    def shown(self) -> str:
        """The newest value as text."""
        if self.percent and self.last is not None:
            return f"{self.last:.0%}"
        return number(self.last)

    @property
    def with_interval(self) -> str:
        """The newest value as text, with its interval if it has one."""
        found = self.interval()
        ends = "" if found is None else f" ({number(found.low)} to {number(found.high)})"
        return self.shown + ends


class Digest:
    """Takes rows one by one, in the order of their steps."""

    def __init__(self) -> None:
        self.first: Row | None = None
        self.row: Row | None = None
        self.recent: list[Row] = []
        # (version, results), oldest first
        self.evals: list[tuple[int, Evaluation]] = []
        self._partial: set[str] = set()
        self._sizes: dict[str, float | int | None] = {}  # of the newest evaluation

    def add(self, row: Row) -> None:
        """Add the row of the next step."""
        self.first = self.first or row
        self.row = row
        self.recent = [*self.recent, row][-RECENT:]
        found = evaluations(row)
        if found:
            at = row.get("eval/policy_version")
            version = row["step"] if at is None else at
            self.evals.append((int(version), found))  # type: ignore[arg-type]
            self._partial |= partial_rewards(found)
            shares = [n for n in found if is_accuracy(f"eval/{n}")]
            self._sizes = {n: row.get(size_of(f"eval/{n}")) for n in shares}

    def shown(self, found: Evaluation) -> Evaluation:
        """An evaluation without the mean rewards that were always equal to the accuracy."""
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
            sizes = self._sizes
            found += [
                Figure(
                    f"eval {n}", last[n], number(first.get(n)), share=n in sizes, size=sizes.get(n)
                )
                for n in self.shown(last)
            ]
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


Record = Mapping[str, Any]  # one line of samples/

# Kinds of changes of an answer, in the order in which they are shown.
RIGHT, WRONG, OTHER, SAME = CHANGES = ("turned right", "turned wrong", "other answer", "same")


def changed_first(before: Sequence[Record], after: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The answers of two evaluations to the problems that both have, changed ones first."""
    earlier = {_key(record): record for record in before}
    pairs = [(earlier[_key(r)], r) for r in after if _key(r) in earlier]
    return sorted(pairs, key=lambda pair: CHANGES.index(change(*pair)))


def _key(record: Record) -> tuple[Any, Any]:
    return record.get("prompt_id"), record.get("sample", 0)


def _right(record: Record) -> bool | None:
    """Return whether an answer is right, as an accuracy counts it; None: it has no verdict."""
    value = record.get("correct", record.get("reward"))
    return None if value is None else value >= 1 - 1e-6


def change(before: Record, after: Record) -> str:
    """The change, one of `CHANGES`: by the verdict where both answers have one, else by the text
    alone. A part of the reward makes no answer right."""
    was, now = _right(before), _right(after)
    if was is not None and now is not None and was != now:
        return RIGHT if now else WRONG
    return SAME if before.get("response") == after.get("response") else OTHER
