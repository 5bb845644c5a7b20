"""The console's view of a row: short numbers, and the lines of the live table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlcore.metrics.names import declared, is_accuracy
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
    if abs(value) >= 1e15:  # of a run that diverges: its digits say nothing
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


def partial_rewards(found: Mapping[str, float | int | None]) -> set[str]:
    """Of an evaluation, the mean rewards that differ from the accuracy of the same answers: the
    task gives part of a reward to answers that are not right."""
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


_LENGTHS = ("response_length/mean", "response_length/truncated_share")
_RATES = ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s")

CELLS = (
    Cell("reward", _pair("reward/mean", "reward/std", "{} ± {}")),
    Cell("reward by task", _rewards_by_task),
    Cell("response length", _pair(*_LENGTHS, "{} tokens, {} cut off")),
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


# Parts of the line of a step, the most important first: those that do not fit are left out.
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
