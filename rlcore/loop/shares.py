"""The kind of actors that samples each training group: shares that change over a run, and groups
whose samples are drawn by several kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

from rlcore.loop.specs import ShareSpec


class KindShares:
    """Decides at admission which kind samples a group, and remembers it until the group has landed.

    A share says which part of the groups that are admitted at a step a kind samples, with mixed
    groups which part of the samples. A kind's shortfall is carried over to the next choice. So
    where there are two kinds, the number of groups of a kind never differs from the sum of its
    shares by one or more, whatever the schedule. Kinds without a share divide the rest by load,
    with mixed groups in proportion to their engines. Nothing is drawn at random.
    """

    def __init__(
        self,
        engines: Mapping[str, int],
        shares: Mapping[str, ShareSpec],
        *,
        mixed: bool,
        state: Mapping[str, Any],
    ) -> None:
        """`engines`: of each kind at the start; `state`: of a checkpoint, or empty."""
        self._engines = {label: max(count, 1) for label, count in engines.items()}
        self._shares = dict(shares)
        self._others = tuple(label for label in engines if label not in shares)
        self._mixed = mixed and len(engines) > 1
        self._on = self._mixed or bool(self._shares)
        self._limits: dict[str, float] = {}  # parts of their shares that kinds may have
        self._now: dict[str, float] = {}
        self._owed: dict[str, float] = dict(state.get("owed", {}))
        self._admitted: dict[str, int] = dict(state.get("admitted", {}))
        self._kinds = {int(group): list(kinds) for group, kinds in state.get("groups", {}).items()}

    def admit(self, group_id: int, samples: int, step: int) -> None:
        """Decide for a group that was admitted after `step` optimizer steps."""
        if not self._on:
            return
        self._now = self._at(step)
        drawn = [self._next() for _ in range(samples if self._mixed else 1)]
        self._kinds[group_id] = drawn
        for label in drawn:
            self._admitted[label] = self._admitted.get(label, 0) + 1

    def limit(self, parts: Mapping[str, float]) -> None:
        """Set the parts of their shares that kinds have from now on."""
        self._limits = dict(parts)

    def _at(self, step: int) -> dict[str, float]:
        """The share of each kind; under "" the rest, for all kinds without a share."""
        found = {
            label: spec.at(step) * self._limits.get(label, 1.0)
            for label, spec in self._shares.items()
        }
        rest = max(0.0, 1.0 - sum(found.values()))
        if not self._mixed:
            return found | ({"": rest} if self._others else {})
        engines = sum(self._engines[label] for label in self._others)
        return found | {label: rest * self._engines[label] / engines for label in self._others}

    def _next(self) -> str:
        for label, share in self._now.items():
            self._owed[label] = self._owed.get(label, 0.0) + share
        label = max(self._now, key=lambda name: (self._now[name] > 0, self._owed[name]))
        self._owed[label] -= 1.0
        return label

    def of(self, group_id: int, sample_index: int) -> tuple[str, ...]:
        """Labels of the actors that may draw a sample; (): all."""
        kinds = self._kinds.get(group_id)
        if not kinds:
            return ()
        label = kinds[sample_index % len(kinds)]
        return (label,) if label else self._others

    def forget(self, group_ids: Iterable[int]) -> None:
        """Forget groups that are not in flight any more."""
        for group_id in group_ids:
            self._kinds.pop(group_id, None)

    def metrics(self) -> dict[str, float]:
        """Groups (mixed: samples) admitted so far and the present share, of kinds with a share."""
        found = {}
        for label in (name for name in self._now if name):
            found[f"engine/{label}/admitted"] = float(self._admitted.get(label, 0))
            found[f"engine/{label}/share"] = self._now[label]
        return found

    def state(self) -> dict[str, Any]:
        """As JSON."""
        groups = {str(group): kinds for group, kinds in self._kinds.items()}
        return {"owed": dict(self._owed), "admitted": dict(self._admitted), "groups": groups}


def most_shares(shares: Sequence[ShareSpec]) -> tuple[float, float]:
    """(largest, smallest) sum of shares over a run, and so over all of its steps."""
    last = max((spec.steps for spec in shares), default=0)
    sums = [sum(spec.at(step) for spec in shares) for step in range(last + 1)]
    return max(sums), min(sums)


def worth(
    metrics: Mapping[str, float], busy_s: Mapping[str, float], cost: Mapping[str, float]
) -> dict[str, float]:
    """`worth/*` of each kind of actors of a run with several: effective tokens of a step for each
    second in its engines' steps, and for each unit of money. Effective tokens are the trained
    tokens, times their effective sample size and the share that corrections keep.

    `busy_s`: seconds by label; `cost`: money by label, of kinds with a price. Where samples wait,
    tokens of one step were drawn during others: means over steps say what a kind is worth.
    """
    found = {}
    for label, seconds in busy_s.items():
        names = ("mismatch/tokens", "mismatch/ess", "correction/kept_share")
        values = [metrics.get(f"{name}@{label}") for name in names]
        if None in values:
            continue
        effective = prod(value for value in values if value is not None)
        if seconds > 0:
            found[f"worth/tokens_per_actor_s@{label}"] = effective / seconds
        if cost.get(label, 0.0) > 0:
            found[f"worth/tokens_per_price@{label}"] = effective / cost[label]
    return found


class KindRate(NamedTuple):
    """The worth of a kind of actors, for each actor-second or unit of money.

    Example: KindRate(900.0, 0.8, 0.12, 40.0)
    """

    tokens: float
    effective: float  # share of a token that training has: effective sample size times kept share
    below: float  # share of its tokens whose agreement is below the tolerated one
    length: float  # mean tokens of an answer


class Mix(NamedTuple):
    """A division of the work among kinds of actors."""

    groups: dict[str, float]  # share of new groups by label, of kinds that have some
    effective: float  # tokens for each actor-second or unit of money


def best_mix(kinds: Mapping[str, KindRate], most_below: float) -> Mix | None:
    """The mix of most effective tokens whose share of tokens below the tolerated agreement is at
    most `most_below`; None where no kind meets that bound.

    With shares x of the tokens, which add up to 1, it maximises sum x e / sum x/r under sum x b <=
    most_below. This is a ratio of linear functions over a polytope with one such bound. So one
    kind, or two with the bound tight, are best. The 5th percentile of all tokens is the tolerated
    agreement exactly where a twentieth of them is below it.
    """
    candidates = [{label: 1.0} for label, k in kinds.items() if k.below <= most_below]
    for (one, a), (other, b) in permutations(kinds.items(), 2):
        if a.below < most_below < b.below:
            share = (most_below - a.below) / (b.below - a.below)
            candidates.append({one: 1.0 - share, other: share})
    if not candidates:
        return None
    best = max(candidates, key=lambda tokens: _effective(kinds, tokens))
    answers = {label: x / kinds[label].length for label, x in best.items() if x > 0}
    whole = sum(answers.values())
    return Mix({label: n / whole for label, n in answers.items()}, _effective(kinds, best))


def worth_of(kinds: Mapping[str, KindRate], groups: Mapping[str, float]) -> float:
    """Effective tokens for each actor-second or unit of money of a fleet whose kinds have these
    shares of new groups."""
    return _effective(kinds, {label: x * kinds[label].length for label, x in groups.items()})


def _effective(kinds: Mapping[str, KindRate], tokens: Mapping[str, float]) -> float:
    """`tokens`: of each kind, in any unit."""
    seconds = sum(x / kinds[label].tokens for label, x in tokens.items())
    return sum(x * kinds[label].effective for label, x in tokens.items()) / seconds
