"""Comparison of what a program prints or returns with what a row expects. Runs in the judge."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

# As a program prints a number that is meant as one: no leading zeros, which a text of digits may
# have. With a fraction it may have an exponent.
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
FRACTION = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+(?:e[+-][0-9]{2,3})?")
TOKEN = re.compile(r"[^ \t\n\r\f\v]+")
PRINTED = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,4})?")


class Failed(Exception):
    """A run of the program that has no output to compare; the message says why."""


def same_token(expected: str, found: str, tolerance: float) -> bool:
    """Equal texts, or equal numbers where `expected` is a number in its usual form: exactly for
    an integer, within `tolerance`, relative or absolute, for a number with a point."""
    if expected == found:
        return True
    if PRINTED.fullmatch(found) is None:
        return False
    if INTEGER.fullmatch(expected):
        return Decimal(expected) == Decimal(found)
    if FRACTION.fullmatch(expected):
        return _close(float(expected), float(found), tolerance)
    return False


def _close(expected: float, found: float, tolerance: float) -> bool:
    finite = math.isfinite(expected) and math.isfinite(found)
    return finite and math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)


def same_output(expected: str, found: Any, tolerance: float) -> bool:
    """Token by token: spaces and line ends do not count. Spaces outside ASCII are text."""
    if type(found) is not str:
        return False
    wanted, given = TOKEN.findall(expected), TOKEN.findall(found)
    return len(wanted) == len(given) and all(
        same_token(*pair, tolerance) for pair in zip(wanted, given)
    )


def same_value(expected: Any, found: Any, tolerance: float) -> bool:
    """Equal values of a call: a list is equal to a tuple; a number with a point, which is a float,
    has a tolerance; True is not a number."""
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(
            same_value(*pair, tolerance) for pair in zip(expected, found)
        )
    numbers = all(type(v) in (int, float) for v in (expected, found))
    if numbers and type(expected) is float:
        return expected == found or _close(expected, found, tolerance)
    return (numbers or type(expected) is type(found)) and bool(expected == found)


def judge(
    answer: Callable[[Any], Any],
    cases: Sequence[tuple[Any, Sequence[Any]]],
    same: Callable[[Any, Any, float], bool],
    tolerance: float,
) -> None:
    """Raise AssertionError with the number of tests passed, and why the first other one failed,
    unless all of them pass. cases: (what is given to `answer`, results that are accepted)."""
    passed, first = 0, ""
    for number, (given, accepted) in enumerate(cases, 1):
        try:
            found = answer(given)
            if any(same(one, found, tolerance) for one in accepted):
                passed += 1
                continue
            why = "another result"
        except Failed as error:
            why = str(error)
        except Exception as error:  # the program's, of a call
            why = type(error).__name__
        first = first or f"test {number}: {why}"
    assert passed == len(cases), f"passed {passed} of {len(cases)} tests; {first}"
