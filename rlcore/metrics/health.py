"""Warnings about a run, from its rows alone: rows in, sentences out, each warning once a run.

A rule looks at the rows of the last `logging.warnings.window` steps, so that one odd step does not
warn. Its sentence names the metric, its value, the steps, the bound and what to change.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rlcore.files import replace_file
from rlcore.metrics.digest import number
from rlcore.metrics.rows import Row
from rlcore.metrics.specs import WarningsSpec

KEY = "logging.warnings"


@dataclass(frozen=True, slots=True)
class Course:
    """The part of a run's schedule that a judgement depends on. Example:
    Course(staleness_bound=4)"""

    staleness_bound: int = 0  # the largest age of a trained token, in optimizer steps
    takes_turns: bool = False  # generation and learning wait for each other by design


@dataclass(frozen=True, slots=True)
class Window:
    """The rows that a rule judges, oldest first."""

    rows: Sequence[Row]
    course: Course

    @property
    def steps(self) -> str:
        return f"steps {self.rows[0]['step']} to {self.rows[-1]['step']}"

    def values(self, name: str) -> list[float]:
        """The finite values of a metric."""
        return [v for row in self.rows if (v := row.get(name)) is not None]

    def mean(self, name: str) -> float | None:
        """The mean of the finite values; None without any."""
        values = self.values(name)
        return math.fsum(values) / len(values) if values else None

    def share(self, part: str) -> float | None:
        """The sum of a time over the sum of the steps' times; None where either is not known."""
        parts, whole = self.values(part), math.fsum(self.values("time/step_s"))
        return math.fsum(parts) / whole if parts and whole > 0 else None

    def gained(self, name: str) -> float:
        """How much a count has grown within the window."""
        values = self.values(name)
        return values[-1] - values[0] if values else 0.0


# A warning's sentence, or None.
Rule = Callable[[Window, WarningsSpec], str | None]


class Health:
    """Takes the rows of a run in order and gives the new warnings."""

    def __init__(self, spec: WarningsSpec, course: Course) -> None:
        self._spec = spec
        self._course = course
        self._said: set[str] = set()
        self._rows: deque[Row] = deque(maxlen=max(spec.window, spec.flat_steps))

    def add(self, row: Row) -> list[str]:
        """Warnings that this row is the first to cause."""
        self._rows.append(row)
        if len(self._rows) < self._spec.window:
            return []
        recent = list(islice(self._rows, len(self._rows) - self._spec.window, None))
        found = {
            name: rule(Window(recent, self._course), self._spec)
            for name, rule in RULES.items()
            if name not in self._said
        }
        if "flat_steps" not in self._said and 0 < self._spec.flat_steps <= len(self._rows):
            history = list(islice(self._rows, len(self._rows) - self._spec.flat_steps, None))
            found["flat_steps"] = _flat(Window(history, self._course))
        new = {name: text for name, text in found.items() if text is not None}
        self._said |= set(new)
        return list(new.values())

    def resume(self, rows: Iterable[Row]) -> None:
        """Continue after these rows of the same run, whose warnings have been given."""
        self._rows.clear()
        for row in rows:
            self.add(row)


def warnings(rows: Iterable[Row], spec: WarningsSpec, course: Course) -> list[str]:
    """Every warning of a run so far, in the order in which they arose."""
    health = Health(spec, course)
    return [text for row in rows for text in health.add(row)]


# ----- the steps that the recorder keeps for it -----

RECORDER = "recorder"  # of a run directory: batches that were trained on
WARNED = "warned.json"  # of that folder: steps, as metrics.jsonl numbers them, that gave a warning


def warned_steps(run_dir: Path) -> list[int]:
    """The steps of a run that caused a warning; none where batches are not recorded, or where the
    file is incomplete."""
    try:
        return [int(step) for step in json.loads((run_dir / RECORDER / WARNED).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def add_warned(run_dir: Path, step: int) -> None:
    """Record a step that caused a warning, in a run that records its batches. Raises OSError."""
    if (run_dir / RECORDER).is_dir():
        steps = sorted({*warned_steps(run_dir), step})
        replace_file(run_dir / RECORDER / WARNED, json.dumps(steps))


def _sentence(what: str, window: Window, bound: str, advice: str) -> str:
    return f"{what} ({window.steps}; {KEY}.{bound}): {advice}"


def _below(metric: str, bound: str, advice: str) -> Rule:
    """Warns where the window's mean of a metric is below a bound."""

    def rule(window: Window, spec: WarningsSpec) -> str | None:
        mean, least = window.mean(metric), getattr(spec, bound)
        if mean is None or mean >= least:
            return None
        return _sentence(f"{metric} is {number(mean)}", window, f"{bound}={least}", advice)

    return rule


def _clip_share(window: Window, spec: WarningsSpec) -> str | None:
    low, high = window.mean("policy/clip_low_share"), window.mean("policy/clip_high_share")
    share = (low or 0.0) + (high or 0.0)
    if share <= spec.clip_share:
        return None
    return _sentence(
        f"the policy loss clips {share:.0%} of the tokens",
        window,
        f"clip_share={spec.clip_share}",
        "they give no gradient; lower learner.lr, schedule.epochs or schedule.steps_per_phase",
    )


def _staleness(window: Window, spec: WarningsSpec) -> str | None:
    mean, bound = window.mean("staleness/mean"), window.course.staleness_bound
    # Where no token can be older than one step, an age of one is usual.
    if mean is None or bound < 2 or mean <= spec.staleness_share * bound:
        return None
    return _sentence(
        f"trained tokens are {number(mean)} steps old on average, of at most {bound}",
        window,
        f"staleness_share={spec.staleness_share}",
        "the bound decides how old samples are; lower schedule.max_staleness for fresher ones, "
        "or raise it if the engines wait",
    )


def _learner_idle(window: Window, spec: WarningsSpec) -> str | None:
    share = window.share("time/wait_data_s")
    if window.course.takes_turns or share is None or share <= spec.learner_idle:
        return None
    return _sentence(
        f"the learner waits for data {share:.0%} of the time",
        window,
        f"learner_idle={spec.learner_idle}",
        f"{_places(window)}raise actor.LABEL.count (rlcore scale does so while the run goes on) or "
        "actor.LABEL.max_num_seqs",
    )


def _places(window: Window) -> str:
    """Advice that comes first where episodes wait for a place."""
    waiting = window.mean("environment/waiting")
    if not waiting:
        return ""
    return f"{number(waiting)} episodes wait for a place: raise environment.concurrency; else "


def _engine_idle(window: Window, spec: WarningsSpec) -> str | None:
    busy = window.share("time/rollout_s")
    if window.course.takes_turns or busy is None or 1 - busy <= spec.engine_idle:
        return None
    return _sentence(
        f"engines do not decode {1 - busy:.0%} of the time",
        window,
        f"engine_idle={spec.engine_idle}",
        f"{_places(window)}lower actor.LABEL.count, give the learner more (learner.ranks), or "
        "raise schedule.max_staleness",
    )


def _failed_scores(window: Window, spec: WarningsSpec) -> str | None:
    failed = window.gained("ledger/score_errors") + window.gained("ledger/score_timeouts")
    samples = window.gained("buffer/arrived_samples")
    if not samples or failed / samples <= spec.failed_scores:
        return None
    return _sentence(
        f"{failed / samples:.1%} of the scores failed or timed out",
        window,
        f"failed_scores={spec.failed_scores}",
        "the log has the last reason; mend the grader, or raise task.grade_timeout_s or "
        "task.grader_memory_mib",
    )


def _flat(window: Window) -> str | None:
    """Return whether the mean of the second half is not above that of the first by two standard
    errors."""
    values = window.values("reward/mean")
    half = len(values) // 2
    if half < 2:
        return None
    before, after = values[:half], values[half:]
    parts = (statistics.variance(part) / len(part) for part in (before, after))
    rise = statistics.fmean(after) - statistics.fmean(before)
    if rise > 2 * math.sqrt(math.fsum(parts)):
        return None
    return _sentence(
        f"reward/mean has not risen: {number(statistics.fmean(before))} in the first half, "
        f"{number(statistics.fmean(after))} in the second",
        window,
        f"flat_steps={len(window.rows)}",
        "unless the task is solved, look at samples/, raise learner.lr, or choose problems that "
        "are sometimes solved (task.difficulty)",
    )


# Rules by the setting that bounds each.
RULES: dict[str, Rule] = {
    "ess": _below(
        "mismatch/ess",
        "ess",
        "the samples hardly speak for the learner's policy; lower schedule.max_staleness, or "
        "choose more precise actors or another correction",
    ),
    "acceptance": _below(
        "mismatch/acceptance",
        "acceptance",
        "the actors' policy has moved away from the learner's; lower schedule.max_staleness, or "
        "choose actors nearer to the learner",
    ),
    "clip_share": _clip_share,
    "staleness_share": _staleness,
    "learner_idle": _learner_idle,
    "engine_idle": _engine_idle,
    "entropy": _below(
        "entropy",
        "entropy",
        "the policy hardly explores any more; lower learner.lr, or raise algorithm.eps_high "
        "or algorithm.entropy_coef",
    ),
    "failed_scores": _failed_scores,
}

# The bounds that a run without warnings has kept, in words.
HELD = {
    "ess": "samples spoke for the learner's policy (mismatch/ess {} or more)",
    "acceptance": "actors stayed close to the learner (mismatch/acceptance {} or more)",
    "clip_share": "the loss clipped at most {} of the tokens",
    "staleness_share": "samples stayed fresher than {} of what the schedule allows",
    "learner_idle": "the learner waited for data at most {} of the time",
    "engine_idle": "engines did not decode at most {} of the time",
    "flat_steps": "rewards rose within {} steps",
    "entropy": "the policy kept exploring (entropy {} nats or more)",
    "failed_scores": "at most {} of the scores failed",
}
OFF = {"ess": 0, "acceptance": 0, "flat_steps": 0, "entropy": 0}  # the others: 1


def held(bounds: Mapping[str, float], steps: int) -> list[str]:
    """The bounds that a run of so many steps has kept without a warning, in words. `bounds`: of
    logging.warnings; bounds that are off, or need more steps, are left out."""
    if steps < bounds.get("window", 0):
        return []
    return [
        words.format(number(bounds[name]))
        for name, words in HELD.items()
        if name in bounds
        and bounds[name] != OFF.get(name, 1)
        and (name != "flat_steps" or bounds[name] <= steps)
    ]
