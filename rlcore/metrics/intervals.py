"""Confidence intervals of means over seeds: Student's t for one mean, Welch's for a difference."""

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
    """The mean of `second` less that of `first`, with Welch's interval for unequal variances; n is
    the smaller number of values."""
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


def normal_half(stderr: float, ci: float = 95) -> float:
    """Half the width of an interval of `ci` percent, of a mean with this standard error."""
    return NormalDist().inv_cdf(_upper(ci)) * stderr


@lru_cache
def t_quantile(probability: float, freedom: float) -> float:
    """The quantile, above 0.5, of Student's t with `freedom` > 0 degrees: by bisection of P(|T| >
    t) = I_x(freedom/2, 1/2), x = freedom/(freedom + t^2) (Abramowitz and Stegun 26.7.1, 26.5.2)."""
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
