"""Confidence intervals: of means over seeds Student's t, of their difference Welch's; of a share
of answers Wilson's, by the number of independent answers that would be as uncertain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, variance


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over n values; `low` and `high` are None where n is too small for an interval.

    Example: Interval(0.82, 0.78, 0.86, 5)
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def half(self) -> float | None:
        """Half the width of the interval."""
        return None if self.high is None else self.high - self.mean


def t_interval(values: Sequence[float], ci: float) -> Interval:
    """The mean of at least one value, with Student's t interval of `ci` percent."""
    n, mean = len(values), fmean(values)
    if n < 2:
        return Interval(mean, None, None, n)
    half = t_quantile(_upper(ci), n - 1) * math.sqrt(variance(values) / n)
    return Interval(mean, mean - half, mean + half, n)


def welch(first: Sequence[float], second: Sequence[float], ci: float) -> Interval:
    """The mean of `second` less the mean of `first`, with Welch's interval for unequal variances; n
    is the smaller number of values."""
    difference, n = fmean(second) - fmean(first), min(len(first), len(second))
    if n < 2:
        return Interval(difference, None, None, n)
    parts = [variance(values) / len(values) for values in (first, second)]
    if not sum(parts):
        return Interval(difference, difference, difference, n)
    shares = [part / max(parts) for part in parts]  # squares of tiny ones would be 0
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (first, second))
    )
    half = t_quantile(_upper(ci), freedom) * math.sqrt(sum(parts))
    return Interval(difference, difference - half, difference + half, n)


def wilson(share: float, size: float, ci: float = 95) -> Interval:
    """A share of `size` independent answers, with Wilson's interval (1927) of `ci` percent: at 0
    and 1, where the standard error is 0, too. For answers that are not independent `size` is the
    effective number, `eval/<task>/effective_<statistic>` (Korn and Graubard 1998)."""
    z = NormalDist().inv_cdf(_upper(ci))
    share = min(max(share, 0.0), 1.0)
    middle = share + z * z / (2 * size)
    half = z * math.sqrt(share * (1 - share) / size + (z / (2 * size)) ** 2)
    low, high = ((middle + sign * half) / (1 + z * z / size) for sign in (-1, 1))
    return Interval(share, min(max(low, 0.0), share), max(min(high, 1.0), share), 1)


def share_interval(values: Sequence[float], sizes: Sequence[float | None], ci: float) -> Interval:
    """The mean of shares, one a run: Student's t interval over the runs within 0 and 1, and at
    least Wilson's of all their answers, `sizes` in effect. Without sizes, equal shares have no
    interval: their answers were uncertain all the same."""
    over = t_interval(values, ci)
    known = [size for size in sizes if size]
    if len(known) < len(values):
        return over if over.half else Interval(over.mean, None, None, over.n)
    pooled = wilson(over.mean, math.fsum(known), ci)
    if over.low is None or over.high is None:
        return pooled
    return _around(over.mean, [over, pooled], (0.0, 1.0))


def share_difference(
    first: tuple[Sequence[float], Sequence[float | None]],
    second: tuple[Sequence[float], Sequence[float | None]],
    ci: float,
) -> Interval:
    """The mean of the second shares less the first's: Welch's interval over runs, and at
    least Newcombe's (1998, method 10) of the answers. Each is (a share of each run, its sizes)."""
    over = welch(first[0], second[0], ci)
    if not all(size for _, sizes in (first, second) for size in sizes):
        return over if over.half else Interval(over.mean, None, None, over.n)
    a, b = (wilson(fmean(v), math.fsum(s or 0.0 for s in n), ci) for v, n in (first, second))
    assert a.low is not None and a.high is not None and b.low is not None and b.high is not None
    low = over.mean - math.hypot(b.mean - b.low, a.high - a.mean)
    high = over.mean + math.hypot(b.high - b.mean, a.mean - a.low)
    return _around(over.mean, [over, Interval(over.mean, low, high, over.n)], (-1.0, 1.0))


def _around(mean: float, found: Sequence[Interval], bounds: tuple[float, float]) -> Interval:
    """The smallest interval within bounds that holds the known ones of `found`."""
    lows = [i.low for i in found if i.low is not None]
    highs = [i.high for i in found if i.high is not None]
    low, high = max(min(lows), bounds[0]), min(max(highs), bounds[1])
    return Interval(mean, min(low, mean), max(high, mean), found[0].n)


@lru_cache
def t_quantile(probability: float, freedom: float) -> float:
    """The quantile, above 0.5, of Student's t with `freedom` > 0 degrees. It is found by bisection
    of P(|T| > t) = I_x(freedom/2, 1/2), x = freedom/(freedom + t^2) (Abramowitz and Stegun 26.7.1,
    26.5.2)."""
    from mpmath import betainc

    def beyond(t: float) -> float:
        x = freedom / (freedom + t * t)
        return float(betainc(freedom / 2, 0.5, 0, x, regularized=True)) / 2

    high = 1.0
    while beyond(high) > 1 - probability:
        high *= 2
    low = 0.0
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > 1 - probability else (low, middle)
    return high


def _upper(ci: float) -> float:
    return 0.5 + ci / 200
