"""How long the steps of a run may be, from its rows alone: kappa and the largest learning rate at
each staleness. The sentences of a run whose steps the bound shortens are here, too."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlcore.metrics.digest import number
from rlcore.metrics.rows import Row
from rlcore.metrics.rules.base import Course, Past
from rlcore.metrics.rules.policy import HOLDS, answer_kl, rounded_down

BEYOND = 2.0  # nats an answer from which D no longer grows with the square of the rate
SHORT = 0.5  # share of a rate below which a step is called short
EVERY = 100  # steps between two shares of short steps


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Example: StepLengths(kappa=1e9, bound=0.5, step=2)"""

    kappa: float  # nats an answer per squared summed learning rate
    bound: float  # nats an answer that the steps in flight may lead to
    step: int = 0  # whose row shows kappa

    @property
    def whole(self) -> float:
        """Summed learning rates that the steps in flight may have."""
        return math.sqrt(self.bound / self.kappa)

    def rate(self, staleness: float) -> float:
        """The largest learning rate for samples so many steps old, rounded down to two digits."""
        return rounded_down(self.whole / (staleness + 1), 2)

    def staleness(self, lr: float) -> int:
        """The largest age in steps of samples at a learning rate; 0: none may be in flight."""
        return max(0, math.floor(self.whole / lr + 1e-9) - 1)


def step_lengths(
    rows: Iterable[Row], bound: float = HOLDS, *, newest: int | None = None
) -> StepLengths | None:
    """By the largest kappa of the rows, or of the `newest` of them; None where none has a measure:
    all samples were fresh, or no rate is known."""
    found = list(kappas(rows).items())
    found = found if newest is None else found[-newest:]
    step, kappa = max(found, key=lambda each: each[1], default=(0, 0.0))
    return StepLengths(kappa, bound, step) if kappa > 0 else None


def kappas(rows: Iterable[Row]) -> dict[int, float]:
    """kappa by step: the rule's own where a row has it, else by the rates of the steps since its
    samples. Without a bound, rows end where answers lie further than BEYOND from the policy: what
    comes then is another policy's."""
    past, rates = Past(), deque[float](maxlen=1000)
    found: dict[int, float] = {}
    for row in rows:
        past.add(row)
        nats, own = answer_kl(row, past.floor) or 0.0, row.get("step_bound/kappa")
        if found and nats > BEYOND and "step_bound/scale" not in row:
            break
        squared = _squared(rates, row.get("staleness/mean") or 0.0)
        if own is None and squared > 0:
            own = nats / squared
        if own:
            found[int(row["step"] or 0)] = own
        rates.append(row.get("lr") or 0.0)
    return found


def _squared(rates: Sequence[float], age: float) -> float:
    """Mean square of the summed rates since tokens of this mean age, of the two ages next to it."""
    below, part = math.floor(age), age - math.floor(age)
    short, long = (math.fsum(list(rates)[max(0, len(rates) - a) :]) for a in (below, below + 1))
    return (1 - part) * short**2 + part * long**2


class ShortSteps:
    """Says once when the step bound takes more than half of a step, and every EVERY steps from then
    on how many it did."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._first: int | None = None  # step at which it was said
        self._rows: deque[Row] = deque(maxlen=EVERY)

    def resume(self, rows: Iterable[Row]) -> None:
        """Continue after these rows, of which all has been said."""
        self._first = None
        self._rows.clear()
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> str | None:
        """A sentence about the next row, or None."""
        scale, step = row.get("step_bound/scale"), int(row["step"] or 0)
        if scale is None:
            return None
        self._rows.append(row)
        if self._first is None:
            if scale >= SHORT or not row.get("step_bound/kappa"):  # a first step shows nothing yet
                return None
            self._first = step
            return self._begins(row, scale)
        if step == self._first or (step - self._first) % EVERY:
            return None
        return self._share()

    def _begins(self, row: Row, scale: float) -> str:
        facts = {
            "mismatch/kl_k3": "k3 {} a token",
            "staleness/mean": "{} steps old",
            "mismatch/ess": "ESS {}",
        }
        shown = ", ".join(_shown(row, facts))
        taken = f"takes {number(scale)} of its rate" if scale else "is held"
        return (
            f"step {row['step']}: the samples are {number(row.get('step_bound/answer_kl') or 0.0)} "
            f"nats an answer from the policy ({shown}), so this step {taken}.{self._setting(row)}"
        )

    def _setting(self, row: Row) -> str:
        """A sentence on the setting that would not need it, or ""."""
        kappa, bound = row.get("step_bound/kappa"), row.get("step_bound/bound")
        if not kappa or not bound:
            return ""
        lengths = StepLengths(kappa, bound)
        age = max(self._course.staleness_bound, row.get("staleness/mean") or 0.0)
        said = f" As a setting: learner.lr={lengths.rate(age):g}"
        fresher = lengths.staleness(self._course.lr) if self._course.lr else 0
        if 0 < fresher < age and not self._course.takes_turns:
            said += f", or samples at most {fresher} steps old (schedule.max_staleness)"
        return f"{said} (learner.step_bound={bound:g})."

    def _share(self) -> str | None:
        scales = [row["step_bound/scale"] or 0.0 for row in self._rows]
        short = sum(scale < SHORT for scale in scales)
        if not short:
            return None
        mean = statistics.fmean(row.get("lr") or 0.0 for row in self._rows)
        first, last = self._rows[0]["step"], self._rows[-1]["step"]
        return (
            f"steps {first} to {last}: learner.step_bound took more than half of {short} of "
            f"{len(scales)} steps, and held {scales.count(0.0)}; their mean rate was {mean:.1g}"
        )


def _shown(row: Row, facts: Mapping[str, str]) -> list[str]:
    return [t.format(number(v)) for n, t in facts.items() if (v := row.get(n)) is not None]
