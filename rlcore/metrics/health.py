"""The health of a run, from its rows alone: rows in, alarms and a verdict out. Each rule warns once
a run.

A run is healthy if no rule has spoken and each had enough to judge, rules of the machine's speed
apart; with less, the verdict says what was seen.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from rlcore.files import replace_file
from rlcore.metrics.digest import number
from rlcore.metrics.rows import Row
from rlcore.metrics.rules.base import Course, Past, Rule, Window
from rlcore.metrics.rules.machine import (
    Acceptance,
    ClipShare,
    EngineIdle,
    FailedScores,
    Flat,
    LearnerIdle,
    StalenessShare,
)
from rlcore.metrics.rules.policy import (
    AnswerKl,
    CutOff,
    EffectiveSamples,
    EntropyGone,
    EntropyRise,
    Fallen,
    HeldOutFallen,
    LengthGone,
    NoSignal,
)
from rlcore.metrics.specs import WarningsSpec

# In the order in which a step's alarms are given.
RULES: dict[str, Rule] = {
    rule.bound: rule
    for rule in (
        AnswerKl(),
        EffectiveSamples(),
        Fallen(),
        HeldOutFallen(),
        CutOff(),
        NoSignal(),
        EntropyGone(),
        EntropyRise(),
        LengthGone(),
        Acceptance(),
        ClipShare(),
        StalenessShare(),
        LearnerIdle(),
        EngineIdle(),
        FailedScores(),
        Flat(),
    )
}
MISSING = 0.1  # share of steps that may lack a metric that a rule needs
ALARM = "health/alarm"  # the metric: rules that speak at a step


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule's first warning in a run. Example: Alarm("ess", 4, "mismatch/ess is 0.34 (...)")"""

    rule: str
    step: int
    text: str


class Health:
    """Takes the rows of a run in order and gives the new alarms."""

    def __init__(self, spec: WarningsSpec, course: Course) -> None:
        self._spec = spec
        self.course = course
        self._rules = {
            name: rule
            for name, rule in RULES.items()
            if getattr(spec, name) != rule.off and rule.concerns(course)
        }
        self._most = max(rule.rows(spec) for rule in self._rules.values()) if self._rules else 1
        self._needed = {n for r in self._rules.values() if not r.optional for n in r.needs}
        self.speaking: frozenset[str] = frozenset()  # rules that warn of the newest row
        self._begin()

    def _begin(self) -> None:
        self.alarms: list[Alarm] = []
        self._past = Past()
        self._rows: deque[Row] = deque(maxlen=max(self._most, self._spec.window))
        self._seen: set[str] = set()  # rules that have had what they need
        self._missing: Counter[str] = Counter()  # steps without a metric that a rule needs

    def add(self, row: Row) -> list[Alarm]:
        """Alarms that this row is the first to cause. A row of the same step as the newest one is
        that row again."""
        step = int(row["step"] or 0)
        if self._rows and self._rows[-1]["step"] == step:
            return [alarm for alarm in self.alarms if alarm.step == step]
        self._rows.append(row)
        self._past.add(row)
        self._missing.update(name for name in self._needed if row.get(name) is None)
        said = {}
        for name, rule in self._rules.items():
            if self._past.steps < rule.due(self._spec):
                continue
            window = self._window(rule)
            if not rule.lacks(window):
                self._seen.add(name)
            if (text := rule(window, self._spec)) is not None:
                said[name] = text
        self.speaking = frozenset(said)
        before = {alarm.rule for alarm in self.alarms}
        new = [Alarm(name, step, text) for name, text in said.items() if name not in before]
        self.alarms += new
        return new

    def _window(self, rule: Rule) -> Window:
        count = min(len(self._rows), rule.rows(self._spec))
        rows = list(islice(self._rows, len(self._rows) - count, None))
        return Window(rows, self.course, self._past)

    def resume(self, rows: Iterable[Row]) -> None:
        """Continue after these rows of the same run, whose alarms have been given."""
        self._begin()
        self.speaking = frozenset()
        for row in rows:
            self.add(row)

    @property
    def warnings(self) -> list[str]:
        """Every warning so far, in the order in which they arose."""
        return [alarm.text for alarm in self.alarms]

    def lacking(self) -> list[str]:
        """The reasons why rules have not judged the run so far, in words."""
        steps, found = self._past.steps, []
        due = {n: r.due(self._spec) for n, r in self._rules.items() if n != Flat.bound}
        if steps < (most := max(due.values(), default=0)):
            found.append(f"{most} steps are needed")
        for name, rule in self._rules.items():
            if steps >= due.get(name, 0):
                found.append(rule.lacks(self._window(rule)))
        for name, count in self._missing.items():
            if MISSING * steps < count < steps and f"no {name}" not in found:
                found.append(f"no {name} in {count} of {steps} steps")
        return list(dict.fromkeys(text for text in found if text))

    def verdict(self) -> RunVerdict:
        """The verdict on the run so far. Warnings of the machine's speed are listed last, and make
        no run ill: a loaded machine says nothing about the policy."""
        steps = self._past.steps
        if not steps:
            return RunVerdict("unsure", "No learner step is finished yet.")
        slow = [alarm.text for alarm in self.alarms if RULES[alarm.rule].of_speed]
        told = [alarm.text for alarm in self.alarms if not RULES[alarm.rule].of_speed]
        beside = f"{_counted(slow)} of the machine's speed:" if slow else ""
        if told:
            said = f"{_counted(told)} in {steps} steps"
            said += f", and {beside}" if slow else ":"
            return RunVerdict("ill", said, [*told, *slow])
        end = f"; {beside}" if slow else "."
        if lacking := self.lacking():
            seen = f"{self._shown()}; {', '.join(lacking)}{end}"
            few = "Too few steps to judge" if "steps are needed" in lacking[0] else "Not judged"
            said = f"{few}: nothing to warn of in {steps} steps, {seen}"
            return RunVerdict("unsure", said, slow)
        said = f"Healthy: nothing to warn of in {steps} steps{end}"
        return RunVerdict("well", said, slow, kept=self._kept(steps))

    def _shown(self) -> str:
        """The rewards and held-out results so far, in words."""
        rewards = [v for row in self._rows if (v := row.get("reward/mean")) is not None]
        start = self._past.start("reward/mean")
        seen = []
        if rewards and start is not None:
            seen.append(f"reward/mean {number(start)} to {number(rewards[-1])}")
        for name, first in list(self._past.first.items())[:1]:
            last = self._past.last[name]
            if last.version != first.version:
                seen.append(f"{name} {number(first.value)} to {number(last.value)}")
        return ", ".join(seen) or "no rewards were seen"

    def _kept(self, steps: int) -> list[str]:
        spoken = {alarm.rule for alarm in self.alarms}
        return [
            rule.kept.format(number(getattr(self._spec, name)))
            for name, rule in self._rules.items()
            if name in self._seen - spoken and rule.due(self._spec) <= steps and self._applies(rule)
        ]

    def _applies(self, rule: Rule) -> bool:
        return not rule.needs or any(self._window(rule).values(name) for name in rule.needs)


def _counted(warnings: Sequence[str]) -> str:
    return f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}"


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """A run's verdict: its sentence, all warnings, and what a healthy run has kept. Example:
    RunVerdict("ill", "1 warning in 40 steps:", ["mismatch/ess is 0.34 (...)"])"""

    kind: Literal["well", "ill", "unsure"]
    said: str
    warnings: Sequence[str] = ()
    kept: Sequence[str] = ()

    @property
    def line(self) -> str:
        """The verdict in one line, with the first warning."""
        more = " (and the other warnings above)" if len(self.warnings) > 1 else ""
        return f"{self.said} {self.warnings[0]}{more}" if self.warnings else self.said


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
