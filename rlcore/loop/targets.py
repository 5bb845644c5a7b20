"""Set-points of the mismatch: slow controllers move the bounds on the deviation of a kind of
actors, so that a statistic of its tokens stays at its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2
from typing import Any

from rlcore.loop.specs import TargetSpec
from rlcore.types import PageRule

STATISTICS = {"p05": "agreement_p5"}
_MOVED = 0.6  # of a step between the place of a controller and the value in force, to change it
_LEAST_SHARE = 0.05  # of a kind's share: one that samples nothing is never measured again


@dataclass(frozen=True, slots=True)
class PageRange:
    """The pages of sparse actors that a set-point moves.

    Example, of contexts of 64 tokens in pages of 16: PageRange(PageRule(0, 32, (2, 2)), (2, 4))
    """

    rule: PageRule  # at the start
    most: tuple[int, ...]  # pages that there are at the end of each stretch of positions


@dataclass(frozen=True, slots=True)
class Ranges:
    """The bounds of set-points, besides what each target says."""

    max_staleness: int  # schedule.max_staleness
    own_age: int = 0  # steps of staleness that publishes and phases bring, whatever is admitted
    pages: Mapping[str, PageRange] = field(default_factory=dict)  # by label of sparse actors
    layers: Mapping[str, int] = field(default_factory=dict)  # precise at the start, by label


class _Integral:
    """One moved value between two bounds.

    Its place u is an integral: at a step whose statistic s, with the value in force, is further
    than `band` from the target value,

        u <- clip(u +- rate (most - least) clip((s - value)/(1 - value), -1, 1), least, most)

    with s as it would be at u, and + where a larger value means less agreement. Pages and staleness
    are moved by factors: u, least and most are then logarithms. The value in force follows u once
    they differ by more than a threshold, so that a statistic near its target does not make it
    swing.
    """

    def __init__(self, least: float, most: float, start: float, *, helps: bool) -> None:
        """`helps`: a larger value means more agreement."""
        self._least, self._most = min(least, most), most
        self._sign = -1.0 if helps else 1.0
        self.value = float(min(max(start, self._least), most))
        self.place = self._code(self.value)

    def _code(self, value: float) -> float:
        return value

    @property
    def wanted(self) -> float:
        """The value that the place stands for, not rounded."""
        return self.place

    def _in_force(self) -> float:
        whole = round(self.place)
        return whole if abs(self.place - self.value) > _MOVED else self.value

    def restore(self, place: float, value: float) -> None:
        """Go on from a checkpoint, within the present bounds. A place that stands for another value
        than the one in force, as of a checkpoint that has it in other units, begins at the latter.
        """
        least, most = self._code(self._least), self._code(self._most)
        self.place = min(max(float(place), least), most)
        self.value = min(max(float(value), self._least), self._most)
        if self._in_force() != self.value:
            self.place = self._code(self.value)

    def move(self, target: TargetSpec, statistic: Callable[[float], float]) -> None:
        """Move the value. `statistic`: of a step, as it would be with a given value."""
        if abs(statistic(self.value) - target.value) > target.band:
            error = (statistic(self.wanted) - target.value) / (1.0 - target.value)
            least, most = self._code(self._least), self._code(self._most)
            step = target.rate * (most - least) * min(max(error, -1.0), 1.0)
            self.place = min(max(self.place + self._sign * step, least), most)
        self.value = self._in_force()


class _Factors(_Integral):
    """A whole number that is moved by factors: pages. A change of less than a twentieth is not
    worth a new rule."""

    _added = 0.0

    def _code(self, value: float) -> float:
        return log2(value + self._added)

    @property
    def wanted(self) -> float:
        return 2.0**self.place - self._added

    def _in_force(self) -> float:
        wanted = self.wanted
        far = abs(wanted - self.value) > max(_MOVED, 0.05 * self.value)
        # the bounds are reached, though the threshold is wide near the upper one
        at_bound = round(wanted) in (round(self._least), round(self._most))
        return round(wanted) if far or at_bound else self.value


class _Staleness(_Factors):
    """Steps of staleness, which may be 0."""

    _added = 1.0


class _Share(_Integral):
    """A part of a kind's share of new groups."""

    def _in_force(self) -> float:
        return self.place if abs(self.place - self.value) > 0.02 else self.value


class SetPoints:
    """The targets of a run's kinds, and the values that they have moved: admitted staleness, pages
    by position, layers that stay precise, and shares of new groups.

    A share follows the statistic of all tokens, the other values their own kind's. A
    step without a token of a kind moves nothing. Lowering the staleness discards nothing: groups
    that were admitted keep their deadlines; among several targets the least value is in force.
    Requests keep the pages that they were sent with, layers change with a publication, and shares
    are of groups that are admitted later.
    """

    def __init__(
        self,
        targets: Mapping[str, TargetSpec],
        ranges: Ranges,
        *,
        several: bool,
        state: Mapping[str, Any],
    ) -> None:
        """`targets`: by label of actors; `several`: the run has further labels; `state`: of a
        checkpoint, or empty."""
        self._targets = dict(targets)
        self._several = several
        self._own_age = ranges.own_age
        self._seen: dict[str, float] = {}
        self._moved: dict[str, dict[str, _Integral]] = {}  # by label and statistic
        self._rules = {label: pages.rule for label, pages in ranges.pages.items()}
        for label, target in targets.items():
            self._moved[label] = _integrals(label, target, ranges)
            kept = state.get(label, {}).get("moved", [])
            for integral, pair in zip(self._moved[label].values(), kept):
                integral.restore(*pair)
            if label in self._rules:
                version = state.get(label, {}).get("version", 0)
                self._rules[label] = self._rule(label)._replace(version=version)

    @property
    def bound(self) -> int | None:
        """The staleness in force; None without a target that moves it."""
        return min((round(v) for v in self._values("staleness").values()), default=None)

    @property
    def shares(self) -> dict[str, float]:
        """The part of its share that each kind may have, of those whose target moves it."""
        return self._values("share")

    @property
    def precise_layers(self) -> dict[str, int]:
        """The decoder layers that each kind keeps precise, of those whose target moves it."""
        return {label: round(value) for label, value in self._values("layers").items()}

    @property
    def page_rules(self) -> dict[str, PageRule]:
        """The pages that new requests of each kind of sparse actors are sent with."""
        return dict(self._rules)

    def _values(self, moves: str) -> dict[str, float]:
        return {
            label: next(iter(self._moved[label].values())).value
            for label, target in self._targets.items()
            if target.moves == moves
        }

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step."""
        for label, target in self._targets.items():
            own = self._several and target.moves != "share"
            at = f"@{label}" if own else ""
            whole = metrics.get(f"mismatch/{STATISTICS[target.statistic]}{at}")
            self._seen |= {} if whole is None else {label: whole}
            for name, integral in self._moved[label].items():
                found = metrics.get(f"mismatch/{name}{at}")
                if found is not None:
                    oldest = metrics.get(f"staleness/max{at}", 0.0)
                    integral.move(target, self._statistic(target, found, oldest))
            if target.moves == "pages" and self._rule(label).blocks != self._rules[label].blocks:
                rule = self._rule(label)
                self._rules[label] = rule._replace(version=rule.version + 1)

    def _statistic(
        self, target: TargetSpec, found: float, oldest: float
    ) -> Callable[[float], float]:
        """The agreement of a step as it would be with a given value of what the target moves.

        A bound of the staleness shows in the tokens that are trained on only as many steps later as
        it allows. A controller that compared the measured agreement with its target would have
        moved on by then, and swing from bound to bound. So |log r| counts as proportional to the
        age, which was `oldest` at most. All else acts at once.
        """
        if target.moves != "staleness":
            return lambda _: found
        age = max(oldest, 1.0)
        return lambda staleness: float(found ** ((self._own_age + staleness) / age))

    def _rule(self, label: str) -> PageRule:
        """The rule in force with the pages as they stand: a stretch never has fewer than one
        before."""
        rule = self._rules[label]
        if self._targets[label].moves != "pages":
            return rule
        values = (round(i.value) for i in self._moved[label].values())
        return rule._replace(blocks=tuple(accumulate(values, max)))

    def metrics(self) -> dict[str, float]:
        """`control/<label>/...`: the statistic, and what its target has moved."""
        found = {f"control/{label}/statistic": value for label, value in self._seen.items()}
        for label, target in self._targets.items():
            if target.moves == "pages":
                rule = self._rules[label]
                found[f"control/{label}/rule_version"] = float(rule.version)
                for n, pages in enumerate(rule.blocks, start=1):
                    found[f"control/{label}/pages_{n}"] = float(pages)
            else:
                for integral in self._moved[label].values():
                    found[f"control/{label}/{target.moves}"] = float(integral.value)
        return found

    def state(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = {}
        for label, moved in self._moved.items():
            found[label] = {"moved": [[i.place, i.value] for i in moved.values()]}
            if self._targets[label].moves == "pages":
                found[label]["version"] = self._rules[label].version
        return found


def _integrals(label: str, target: TargetSpec, ranges: Ranges) -> dict[str, _Integral]:
    """The values that a target moves, by the statistic that it follows."""
    statistic = STATISTICS[target.statistic]
    if target.moves == "pages":
        pages = ranges.pages[label]
        least = 2.0 if target.least is None else target.least
        return {
            f"stretch_{n}/{statistic}": _Factors(least, most, start, helps=True)
            for n, (start, most) in enumerate(zip(pages.rule.blocks, pages.most), start=1)
        }
    if target.moves == "layers":
        least = 0.0 if target.least is None else target.least
        start = float(ranges.layers.get(label, 0))
        return {statistic: _Integral(least, target.most or start, start, helps=True)}
    if target.moves == "share":
        least = _LEAST_SHARE if target.least is None else target.least
        return {statistic: _Share(least, 1.0, 1.0, helps=False)}
    least = 1.0 if target.least is None else target.least
    most = float(ranges.max_staleness)
    return {statistic: _Staleness(least, most, least, helps=False)}
