"""The form of a rule that judges a run by its rows, and what rules are given. `health.py` has the
table of them and applies it.

Rules of the last RECENT rows see a run that loses its policy within six steps; rules of
`logging.warnings.window` rows judge what one odd step must not decide. A rule is one class in this
folder, its line in the table, and its bound in `specs.py: WarningsSpec`.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlcore.metrics.names import declared
from rlcore.metrics.rows import Row
from rlcore.metrics.specs import WarningsSpec

KEY = "logging.warnings"
RECENT = 3  # rows that a fast rule judges
BEST = 10  # successive steps whose mean is a run's best
SOLVED = 0.95  # share of right answers from which nothing is left to explore or to tell apart


@dataclass(frozen=True, slots=True)
class Course:
    """The part of a run's configuration that a judgement depends on. Example:
    Course(staleness_bound=4)"""

    staleness_bound: int = 0  # the largest age of a trained token, in optimizer steps
    takes_turns: bool = False  # generation and learning wait for each other by design
    compares_groups: bool = True  # advantages compare the samples of a group
    lr: float = 0.0  # learner.lr; 0: not known
    waits: int = 0  # first steps in which a critic learns alone


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out result with its standard error. Example: HeldOut(0, 0.42, 0.02)"""

    version: int
    value: float
    error: float


@dataclass(slots=True)
class Past:
    """Facts of rows that may have left the window; `add` takes every row in order."""

    steps: int = 0
    floor: float = 0.0  # k3 of fresh tokens: what rounding and sparse attention bring
    best: tuple[float, float, int] | None = None  # mean, variance and number of the best steps
    first: dict[str, HeldOut] = field(default_factory=dict)  # by name
    last: dict[str, HeldOut] = field(default_factory=dict)
    taught: bool = False  # whether a step had a gradient
    _start: dict[str, list[float]] = field(default_factory=dict)  # of the first RECENT rows
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=BEST + RECENT))

    def add(self, row: Row) -> None:
        """Take the next row."""
        self.steps += 1
        self.taught = self.taught or bool(row.get("grad_norm", True))
        if row.get("staleness/max") == 0 and (k3 := row.get("mismatch/kl_k3")) is not None:
            self.floor = k3
        if self.steps <= RECENT:
            for name in ("entropy", "response_length/mean", "reward/mean"):
                if (value := row.get(name)) is not None:
                    self._start.setdefault(name, []).append(value)
        if (reward := row.get("reward/mean")) is not None:
            self._rewards.append(reward)
            self._compare()
        for name, found in held_out(row).items():
            self.first.setdefault(name, found)
            self.last[name] = found

    def start(self, name: str) -> float | None:
        """The mean of entropy, length or reward in the first RECENT rows."""
        values = self._start.get(name)
        return statistics.fmean(values) if values else None

    def _compare(self) -> None:
        """The best steps are those before the last RECENT, so that nothing is its own bound."""
        before = list(self._rewards)[:-RECENT]
        if len(before) < RECENT:
            return
        mean, among = statistics.fmean(before), min(len(before), BEST)
        # fewer than BEST steps are all of the run's, and give way to the next
        if self.best is None or self.best[2] < BEST or mean > self.best[0]:
            self.best = mean, statistics.variance(before), among


# What an evaluation says of a task as a whole; pass@k falls in runs that learn, too.
SAMPLED = ("eval/<task>/sampled_reward", "eval/<task>/mean@<k>")
GREEDY = ("eval/<task>/greedy_reward", "eval/<task>/greedy")


def held_out(row: Row) -> dict[str, HeldOut]:
    """The held-out results of a row that have a standard error, by name: of sampled answers, of
    greedy ones where nothing was sampled. Those of single actors are left out."""
    found: dict[str, HeldOut] = {}
    results = {n: m.name for n in row if n.startswith("eval/") and (m := declared(n)) is not None}
    for wanted in (SAMPLED, GREEDY):
        for name in (name for name, kind in results.items() if kind in wanted):
            task, _, what = name.rpartition("/")
            value, error = row[name], row.get(f"{task}/stderr_{what}")
            if value is not None and error is not None and "@" not in task:
                found[name] = HeldOut(int(row.get("eval/policy_version") or 0), value, error)
        if found:
            break
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """The rows that a rule judges, oldest first, and the run before them."""

    rows: Sequence[Row]
    course: Course
    past: Past = field(default_factory=Past)

    @property
    def steps(self) -> str:
        first, last = self.rows[0]["step"], self.rows[-1]["step"]
        return f"step {last}" if first == last else f"steps {first} to {last}"

    def newest(self, count: int) -> Window:
        """The last `count` rows."""
        return Window(self.rows[-count:], self.course, self.past)

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

    @property
    def solved(self) -> bool:
        """True if nearly all answers are right."""
        right = self.mean("reward_parts/correct")
        right = self.mean("reward/mean") if right is None else right
        return right is not None and right >= SOLVED

    @property
    def gains(self) -> bool:
        """True if rewards are above the first steps'."""
        now, start = self.mean("reward/mean"), self.past.start("reward/mean")
        return now is not None and start is not None and now > start


class Rule(ABC):
    """Judges a window, of as many rows as it says, by one bound of `logging.warnings`."""

    bound: ClassVar[str]  # the name of the rule, and of its bound
    needs: ClassVar[tuple[str, ...]] = ()  # metrics: without any value of one it cannot judge
    optional: ClassVar[bool] = False  # a run without its metrics is none of its concern
    off: ClassVar[float] = 0  # the bound with which it never speaks
    kept: ClassVar[str] = ""  # what a run without its warning has kept, {}: the bound
    of_speed: ClassVar[bool] = False  # it judges how fast the machine is, and not what it trains

    def rows(self, spec: WarningsSpec) -> int:
        """The rows that it judges."""
        return spec.window

    def due(self, spec: WarningsSpec) -> int:
        """The steps without which a run is not judged by it."""
        return self.rows(spec)

    def concerns(self, course: Course) -> bool:
        """Return whether runs of this course are judged: by speed where nobody waits by design."""
        return not (self.of_speed and course.takes_turns)

    def lacks(self, window: Window) -> str:
        """The facts it lacks to have judged a run of enough steps, in words; "" none."""
        missing = [name for name in self.needs if not window.values(name)]
        absent = all(name not in row for row in window.rows for name in missing)
        return "" if not missing or (self.optional and absent) else f"no {' or '.join(missing)}"

    @abstractmethod
    def __call__(self, window: Window, spec: WarningsSpec) -> str | None:
        """The warning, a sentence with the metric, its value, the steps, the bound and what to
        change; None where nothing is wrong."""

    def sentence(self, what: str, window: Window, spec: WarningsSpec, advice: str) -> str:
        """The form of all warnings."""
        bound = f"{KEY}.{self.bound}={getattr(spec, self.bound)}"
        return f"{what} ({window.steps}; {bound}): {advice}"


class Fast(Rule):
    """A rule of the last RECENT rows."""

    def rows(self, spec: WarningsSpec) -> int:
        return RECENT
