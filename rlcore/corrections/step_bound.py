"""A bound on how far the optimizer steps in flight may move the policy together.

A batch was sampled before the last steps were taken, and says what they did. D, in nats an answer,
is its tokens' KL from the policy that sampled them to the policy now. What fresh tokens of their
kind of actors have (rounding, sparse attention) is taken off. To second order D = kappa l^2, l
being the summed learning rates of these steps. The rule keeps the D that the next batches will have
below a bound, by the length of steps, before it is seen.

`StepBound` is plain Python; `drift_accumulate` makes its input of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING, Any

from rlcore.corrections.numerics import log_difference, require, same_shape
from rlcore.lazy import torch
from rlcore.objectives.kl import CLAMP

if TYPE_CHECKING:
    from torch import Tensor

AGES = 256  # ages that are told apart; older tokens count as of the last
LONGEST = 128  # tokens of an answer that count: the evidence for a bound an answer ends there
KEEP = 0.8  # of kappa from one step to the next, where no larger one is measured
KEEP_FLOOR = 0.1  # of the evidence for a floor, from one measurement to the next
LEAST = 0.02  # share of a step below which it is not taken, while others are in flight
# Largest log ratio that counts, so that one wild token of a batch cannot stop a run: e^3 - 1 - 3 is
# 16 nats. In a policy that moved, tokens beyond it carry nothing of the KL.
_LARGEST = 3.0
ERRORS = 2.0  # standard errors above a floor within which nothing is movement
_UNIT = 2.0**-30  # of summed KL: integers add up to the bit in any order
_SQUARE, _MOST = 2.0**-16, 2.0**14  # unit of squared KL of groups, and a group's most


@dataclass(frozen=True, slots=True)
class Drift:
    """Sums over a batch, of tokens with a ratio, by kind of actors and age in optimizer steps.

    Example, one kind, 90 fresh tokens and 10 of age 1 with a KL of 0.02 each, in answers of 5:
    Drift(((90.0, 10.0),), ((0.0, 0.2),), (100.0,), (20.0,))
    """

    tokens: Sequence[Sequence[float]]  # [kinds][ages]
    kl: Sequence[Sequence[float]]  # nats, summed
    sampled: Sequence[float]  # [kinds]: all tokens, also those without a ratio
    answers: Sequence[float]  # [kinds]
    groups: Sequence[float] = ()  # [kinds]: of answers, whose KL is independent; (): not known
    squares: Sequence[float] = ()  # [kinds]: squared KL of the groups, summed

    @property
    def count(self) -> float:
        """Tokens with a ratio."""
        return sum(map(sum, self.tokens))

    def length(self, kind: int | None = None) -> float:
        """Mean sampled tokens of an answer, at most LONGEST; of one kind or of all."""
        part = slice(None) if kind is None else slice(kind, kind + 1)
        return min(sum(self.sampled[part]) / max(sum(self.answers[part]), 1.0), float(LONGEST))

    def error(self, kind: int) -> float:
        """Standard error of a kind's KL of a token, as a share of it; 1 for one group, 0 where it
        is not known."""
        kl, groups = sum(self.kl[kind]), self.groups[kind] if self.groups else 0.0
        if not groups or not kl:
            return 0.0
        spread = max(0.0, self.squares[kind] - kl**2 / groups)
        return sqrt(spread * groups / (groups - 1.0)) / kl if groups > 1 else 1.0

    def mean(self, values: Sequence[float]) -> float:
        """Mean over the tokens of a value by age; 0 without any."""
        summed = sum(n * v for tokens in self.tokens for n, v in zip(tokens, values))
        return summed / self.count if self.count else 0.0


def drift_accumulate(
    logp_ref: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    age: Tensor,
    *,
    inside: Tensor | None = None,
    kinds: Tensor | None = None,
    groups: Tensor | None = None,
    count: int = 1,
) -> Tensor:
    """Statistics [count * (2 * AGES + 4)] float64 of some of a batch's sequences, to be summed with
    others'; `drift_values` reads them. Equal to the bit however a batch is divided by groups.

    Log-probs, mask and `age` [B, T] int: steps since the policy that sampled the token, up to the
    one of `logp_ref`. `inside` [B, T] bool: tokens in the learner's safe set, None for all. `kinds`
    [B] int in [0, count): kind of the actor of each sequence, None for one. `groups` [B] int: equal
    for answers to one prompt, which have errors in common; None: each is one.
    """
    same_shape(logp_ref=logp_ref, logp_inf=logp_inf, mask=mask, age=age)
    wanted = mask != 0
    difference, on = log_difference(logp_ref, logp_inf, wanted if inside is None else mask * inside)
    d = difference.double().clamp(-CLAMP, _LARGEST)
    kl = ((torch.expm1(d) - d) / _UNIT).round().long()
    kind = torch.zeros_like(age).sum(-1) if kinds is None else kinds
    cell = (kind.long()[:, None] * AGES + age.long().clamp(0, AGES - 1))[on]
    sums = torch.zeros(2, count * AGES, dtype=torch.long, device=mask.device)
    sums[0].index_add_(0, cell, torch.ones_like(cell))
    sums[1].index_add_(0, cell, kl[on])
    owner, some, squares = _of_groups(kind.long(), groups, wanted.any(-1), torch.where(on, kl, 0))
    sizes = torch.zeros(4, count, dtype=torch.long, device=mask.device)
    for row, values in zip(sizes[:2], (wanted.sum(-1), wanted.any(-1))):
        row.index_add_(0, kind.long(), values.long())
    for row, values in zip(sizes[2:], (some, squares)):
        row.index_add_(0, owner, values)
    return torch.cat([sums.flatten(), sizes.flatten()]).double()


def _of_groups(
    kind: Tensor, groups: Tensor | None, some: Tensor, kl: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each group of a kind: the kind, 1 if it has tokens, and its squared KL. All int64."""
    own = torch.arange(len(kind), device=kind.device) if groups is None else groups.long()
    keys, place = torch.unique(torch.stack([kind, own]), dim=1, return_inverse=True)
    found = torch.zeros(2, keys.shape[1], dtype=torch.long, device=kind.device)
    for row, values in zip(found, (some.long(), kl.sum(-1))):
        row.index_add_(0, place, values)
    squares = (found[1].double() * _UNIT).clamp(max=_MOST).square() / _SQUARE
    return keys[0], (found[0] > 0).long(), squares.round().long()


def drift_values(statistics: Tensor, count: int = 1) -> Drift:
    """The drift of a batch from summed `drift_accumulate`. Waits for the device."""
    length = count * (2 * AGES + 4)
    require(
        statistics.shape == (length,),
        f"statistics has shape {list(statistics.shape)}, not [{length}].",
    )
    cells, sizes = statistics.split([length - 4 * count, 4 * count])
    tokens, kl = cells.view(2, count, AGES)
    sampled, answers, groups, squares = sizes.view(4, count)
    rows = tokens, kl * _UNIT, sampled, answers, groups, squares * _SQUARE
    return Drift(*(row.tolist() for row in rows))


class StepBound:
    """The rule, and its state: lengths of past steps, kappa, and floors by kind.

    Each step calls `scale`, then `took`. Every rank computes the same from the same sums.
    """

    def __init__(
        self, bound: float | None = 0.5, kinds: Sequence[str] = ("",), *, first: float | None = None
    ) -> None:
        """`bound`: D in nats an answer; None: D is measured, and no step is shortened. `kinds`:
        labels of `Drift`'s kinds; "" for actors that are not told apart. `first`: the largest rate
        of steps of whose like no batch can show anything yet, None: any; where `steps` may be in
        flight, a rate over `steps + 1`. Raises InvalidArgument."""
        require(bound is None or 0 < bound < inf, f"bound={bound} is not above 0 and finite.")
        require(first is None or 0 <= first < inf, f"first={first} is negative or not finite.")
        self.bound, self.kinds = bound, tuple(kinds)
        self._first = first
        self.kappa = 0.0  # nats per squared summed learning rate
        self._lengths: dict[int, float] = {}  # by the version that a step began from
        self._floors: dict[str, tuple[float, float]] = {}  # KL and tokens of a kind's fresh ones

    def scale(
        self, version: int, rate: float, drift: Drift, *, since: int | None = None
    ) -> tuple[float, dict[str, float]]:
        """The factor in [0, 1] of the step that begins from `version`, and metrics without their
        group. 0: the step is not to be taken; 1.0 to the bit where no step was ever in flight.

        `rate`: that the step would have. `since`: the version that the drift is measured to, where
        that is an earlier one, as in a later step of an update phase. Raises InvalidArgument for a
        rate below 0 and for a drift of other kinds.
        """
        require(0 <= rate < inf, f"rate={rate} is negative or not finite.")
        require(
            len(drift.tokens) == len(self.kinds),
            f"drift has {len(drift.tokens)} kinds of actors, and the bound {len(self.kinds)}.",
        )
        later = 0 if since is None else version - since
        metrics = self._measure(drift, self._way(version - later, rate, AGES))
        way = self._way(version, rate, AGES + later)[later:]
        moved = sqrt(drift.mean([length**2 for length in way]))
        metrics |= {"kappa": self.kappa, "moved": moved}
        if self.bound is None:
            return 1.0, metrics
        found = 1.0
        if self._first is not None and rate > self._first and not self._stepped(version - later):
            found = self._first / rate
        elif self.kappa > 0.0 and rate > 0.0:
            whole = sqrt(self.bound / self.kappa)
            steps = sqrt(drift.mean([(age + later + 1.0) ** 2 for age in range(AGES)])) or 1.0
            found = min(1.0, max(0.0, min(whole / steps, whole - moved)) / rate)
            found = 0.0 if found < LEAST and moved > 0.0 else found
        return found, metrics | {"scale": found, "bound": self.bound}

    def _measure(self, drift: Drift, way: Sequence[float]) -> dict[str, float]:
        """Update floors and kappa; metrics. `way` [AGES]: summed lengths since a token of each
        age was sampled."""
        metrics: dict[str, float] = {}
        excess, floors = 0.0, 0.0
        for number, (tokens, kl) in enumerate(zip(drift.tokens, drift.kl, strict=True)):
            if not (count := sum(tokens)):
                continue
            kind = self.kinds[number]
            floor, seen = self._update_floor(kind, tokens, kl, way)
            stale = sum(n for n, moved in zip(tokens, way) if moved) or 1.0
            nats = sum(k for k, moved in zip(kl, way) if moved)
            error = drift.error(number) * sqrt(count / stale + count / max(seen, 1.0))
            # of a scale between both batches': a floor of few groups may have been drawn low
            own = max(0.0, nats - floor * stale - ERRORS * error * sqrt(floor * stale * nats))
            excess, floors = excess + own, floors + floor * count
            if kind:
                metrics[f"answer_kl@{kind}"] = own / count * drift.length(number)
                metrics[f"floor@{kind}"] = floor
        count = max(drift.count, 1.0)
        nats, squared = excess / count * drift.length(), drift.mean([length**2 for length in way])
        self.kappa = max(nats / squared if squared else 0.0, KEEP * self.kappa)
        return metrics | {"answer_kl": nats, "floor": floors / count}

    def _update_floor(
        self, kind: str, tokens: Sequence[float], kl: Sequence[float], way: Sequence[float]
    ) -> tuple[float, float]:
        """KL of a fresh token of a kind, nats, and the tokens that say so; 0 before one was seen. A
        token is fresh while no step has moved the policy since, however old it is."""
        fresh = [age for age, (n, moved) in enumerate(zip(tokens, way)) if n and not moved]
        old_kl, old = self._floors.get(kind, (0.0, 0.0))
        if fresh:
            own, count = (sum(values[age] for age in fresh) for values in (kl, tokens))
            old_kl, old = own + KEEP_FLOOR * old_kl, count + KEEP_FLOOR * old
            self._floors[kind] = old_kl, old
        return (old_kl / old if old else 0.0), old

    def _way(self, version: int, rate: float, ages: int) -> list[float]:
        """Summed lengths of the last 0, 1, ... steps before `version`; a step whose length is not
        known counts as one of `rate`."""
        way = [0.0]
        for v in range(version - 1, version - ages, -1):
            way.append(way[-1] + (self._lengths.get(v, rate) if v >= 0 else 0.0))
        return way

    def _stepped(self, version: int) -> bool:
        """True if a step before `version` has moved the policy."""
        return any(length and v < version for v, length in self._lengths.items())

    def took(self, version: int, length: float) -> None:
        """Note the learning rate that the step from `version` really had; 0: it was not taken."""
        self._lengths[version] = length
        self._lengths = {v: own for v, own in self._lengths.items() if v > version - AGES}

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, for `load`; JSON keeps it to the bit."""
        lengths = {str(version): own for version, own in self._lengths.items()}
        return {"lengths": lengths, "kappa": self.kappa, "floors": self._floors}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._lengths = {int(version): float(own) for version, own in state["lengths"].items()}
        self.kappa = float(state["kappa"])
        self._floors = {kind: (kl, tokens) for kind, (kl, tokens) in state["floors"].items()}
