"""Values of expressions, and when two of them are equal: `equal_expressions`.

Rational arithmetic is exact; the rest is computed to 60 digits and compared relative to its size,
so that 2^-99 and 2^-98 differ. Expressions with variables are compared at fixed points. Values that
are too large to compute raise `Unreadable`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from math import comb, gcd, lcm
from typing import Any

import mpmath
from mpmath import mp, mpc, mpf

from rlcore.graders.mathematics.math_parser import Node
from rlcore.graders.mathematics.math_tokens import Unreadable
from rlcore.graders.mathematics.math_words import words

mp.dps = 60
TOLERANCE = mpf(10) ** -40  # relative
EXACT_BITS = 1 << 17  # longer integers are computed to 60 digits
MAX_POWER_BITS = 1e7
MAX_FACTORIAL = 20_000
MIN_DECIMALS = 6  # of a decimal number that stands for the value it is rounded from
POINTS = 5

Number = Any  # Fraction, mpf or mpc
INFINITY = mpf("inf")


class Undefined(ArithmeticError):
    """No real value at this point."""


def symbols(node: Any) -> frozenset[str]:
    """Names of the symbols in a tree."""
    if isinstance(node, Node):
        if node.kind == "sym":
            return frozenset(node.args)
        node = node.args
    if isinstance(node, tuple):
        return frozenset().union(*(symbols(part) for part in node))
    return frozenset()


CONSTANTS = frozenset(("pi", "e", "i", "infty"))


class Evaluation:
    """Values of expressions at one point. `scale` is the largest inexact term that was added: what
    is smaller than its last digits is zero."""

    def __init__(self, point: dict[str, Fraction], *, complex_: bool) -> None:
        self._point = point
        self._complex = complex_
        self.scale: Number = mpf(0)

    def __call__(self, node: Node) -> Number:
        method: Callable[..., Number] | None = getattr(self, f"_{node.kind}", None)
        if method is None:
            raise Unreadable(f"{node.kind} has no value")
        return method(*node.args)

    def _num(self, value: Fraction, text: str) -> Number:
        return value

    def _sym(self, name: str) -> Number:
        if name == "pi":
            return +mp.pi
        if name == "e":
            return +mp.e
        if name == "i" and self._complex:
            return mpc(0, 1)
        if name == "infty":
            return INFINITY
        if name not in self._point:
            raise Undefined
        return self._point[name]

    def _unit(self, word: str) -> Number:
        if word == "%":
            return Fraction(1, 100)
        if word == "degree":
            return mp.pi / 180
        raise Unreadable(f"{word} within an expression")

    def _add(self, left: Node, right: Node) -> Number:
        a, b = self(left), self(right)
        if _exact(a, b):
            return a + b
        a, b = inexact(a), inexact(b)
        self.scale = max(self.scale, abs(a), abs(b))
        return a + b

    def _neg(self, inner: Node) -> Number:
        return -self(inner)

    def _mul(self, left: Node, right: Node) -> Number:
        a, b = self(left), self(right)
        if _exact(a, b):
            return a * b
        return inexact(a) * inexact(b)

    def _div(self, left: Node, right: Node) -> Number:
        a, b = self(left), self(right)
        if b == 0:
            raise Undefined
        if _exact(a, b):
            return a / b
        return inexact(a) / inexact(b)

    def _pow(self, base: Node, exponent: Node) -> Number:
        b, e = self(base), self(exponent)
        if b == 0:
            if mpmath.re(inexact(e)) <= 0 and e != 0:
                raise Undefined
            return Fraction(int(e == 0))
        if isinstance(b, mpf) and not mpmath.isfinite(b):
            raise Unreadable("a power of infinity")
        _bounded(inexact(e) * mpmath.log(inexact(abs(b))) / mpmath.log(2), MAX_POWER_BITS)
        if isinstance(e, Fraction) and e.denominator == 1:
            if isinstance(b, Fraction) and _bits(b) * abs(e.numerator) < EXACT_BITS:
                return b**e.numerator
            return mpmath.power(inexact(b), e.numerator)
        if not self._complex and b < 0:
            if isinstance(e, Fraction) and e.denominator % 2:
                root = mpmath.power(-inexact(b), inexact(e))
                return -root if e.numerator % 2 else root
            raise Undefined
        if isinstance(b, Fraction) and isinstance(e, Fraction) and b > 0:
            exact = _exact_root(b, e.denominator)
            if exact is not None and _bits(exact) * abs(e.numerator) < EXACT_BITS:
                return exact**e.numerator
        return mpmath.power(inexact(b), inexact(e))

    def _fn(self, name: str, *arguments: Node) -> Number:
        values = [self(argument) for argument in arguments]
        if name in ("sqrt", "root"):
            degree = values[1] if len(values) > 1 else Fraction(2)
            if degree == 0:
                raise Undefined
            inverse = Node("num", (1 / degree, "")) if isinstance(degree, Fraction) else None
            if inverse is None:
                raise Unreadable("a root of no rational degree")
            return self._pow(Node("num", (values[0], "")), inverse)
        if name in EXACT:
            return EXACT[name](*values)
        value = inexact(values[0])
        if name in ("log", "ln", "lg"):
            if value == 0 or (not self._complex and value < 0):
                raise Undefined
            base = inexact(values[1]) if len(values) > 1 else mpf(10)
            if base in (0, 1):
                raise Undefined
            return mpmath.log(value) if name == "ln" else mpmath.log(value) / mpmath.log(base)
        if name == "exp":
            _bounded(value, MAX_POWER_BITS)
            return mpmath.exp(value)
        _bounded(value, 1e30)
        function = TRIGONOMETRY.get(name)
        if function is None or len(values) != 1:
            raise Unreadable(name)
        try:
            result = function(value)
        except ZeroDivisionError:
            raise Undefined from None
        if not self._complex and isinstance(result, mpc):
            raise Undefined
        return result


def _exact(a: Number, b: Number) -> bool:
    both = isinstance(a, Fraction) and isinstance(b, Fraction)
    return both and _bits(a) + _bits(b) < EXACT_BITS


def inexact(value: Number) -> Number:
    if isinstance(value, Fraction):
        return mpf(value.numerator) / mpf(value.denominator)
    return value


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _bounded(value: Number, bound: float) -> None:
    if not abs(inexact(value)) <= bound:
        raise Unreadable("a number is too large")


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root if it is rational."""
    if degree > 64 or _bits(value) > 4096:
        return None
    parts = []
    for part in (value.numerator, value.denominator):
        root = int(mpmath.nint(mpmath.root(mpf(part), degree)))
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(*parts)


def _whole(*values: Number) -> list[int]:
    if not all(isinstance(v, Fraction) and v.denominator == 1 for v in values):
        raise Undefined
    return [v.numerator for v in values]


def _factorial(value: Number) -> Number:
    _bounded(value, MAX_FACTORIAL)
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise Undefined
        return Fraction(reduce(lambda product, k: product * k, range(2, value.numerator + 1), 1))
    return mpmath.gamma(inexact(value) + 1)


def _binomial(n: Number, k: Number) -> Number:
    _bounded(n, MAX_FACTORIAL)
    _bounded(k, MAX_FACTORIAL)
    if all(isinstance(v, Fraction) and v.denominator == 1 and v >= 0 for v in (n, k)):
        return Fraction(comb(n.numerator, k.numerator))
    return mpmath.binomial(inexact(n), inexact(k))


def _rounded(
    value: Number, exactly: Callable[[Fraction], int], nearly: Callable[[Number], Number]
) -> Fraction:
    """An integer. A value that 60 digits do not tell from an integer is that integer."""
    if isinstance(value, mpc):
        raise Undefined
    _bounded(value, 1e50)
    if isinstance(value, Fraction):
        return Fraction(exactly(value))
    nearest = mpmath.nint(value)
    if value != nearest and abs(value - nearest) <= TOLERANCE * max(1, abs(value)):
        value = nearest  # such as of the square root of 2, squared
    return Fraction(int(nearly(value)))


EXACT: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "floor": lambda v: _rounded(v, math.floor, mpmath.floor),
    "ceil": lambda v: _rounded(v, math.ceil, mpmath.ceil),
    "factorial": _factorial,
    "binom": _binomial,
    "gcd": lambda *v: Fraction(gcd(*_whole(*v))),
    "lcm": lambda *v: Fraction(lcm(*_whole(*v))),
    "min": lambda *v: min(v, key=inexact),
    "max": lambda *v: max(v, key=inexact),
}
ANGLES = words("sin cos tan cot sec csc sinh cosh tanh")
TRIGONOMETRY: dict[str, Callable[[Number], Number]] = {
    name: getattr(mpmath, name) for name in ANGLES
} | {f"{prefix}{name}": getattr(mpmath, f"a{name}") for prefix in ("arc", "a") for name in ANGLES}


def points(names: Sequence[str]) -> list[dict[str, Fraction]]:
    """Fixed values of symbols: positive fractions, fractions of both signs, whole numbers."""
    points = []
    for index in range(POINTS):
        point = {}
        for position, name in enumerate(names):
            digest = hashlib.sha256(f"{index} {name}".encode()).digest()
            value = Fraction(int.from_bytes(digest[:2], "big") % 997 + 101, 331)
            if index == 1 or (index == 2 and position % 2):
                value = -value
            if index >= 3:
                value = Fraction(digest[0] % 5 + 2 + index)
            point[name] = value
        points.append(point)
    return points


def equal_expressions(a: Node, b: Node) -> bool:
    """Return whether two expressions have the same value wherever both have one. Raises
    Unreadable."""
    if a == b:
        return True
    used = symbols(a) | symbols(b)
    names = sorted(used - CONSTANTS)
    compared = 0
    for point in points(names) if names else [{}]:
        try:
            evaluation = Evaluation(point, complex_="i" in used)
            x, y = evaluation(a), evaluation(b)
        except Undefined:
            continue
        if not close(x, y, evaluation.scale):
            return not names and (_rounds_to(a, y) or _rounds_to(b, x))
        compared += 1
    return compared >= (2 if names else 1)


def close(x: Number, y: Number, scale: Number = Fraction(0)) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    x, y = inexact(x), inexact(y)
    if x == y or not (mpmath.isfinite(x) and mpmath.isfinite(y)):
        return bool(x == y)
    return bool(abs(x - y) <= TOLERANCE * max(abs(x), abs(y), inexact(scale)))


def _rounds_to(node: Node, value: Number) -> bool:
    """Return whether a decimal number with enough decimals is this value, rounded."""
    negative = node.kind == "neg"
    literal = node.args[0] if negative else node
    if literal.kind != "num" or "e" in literal.args[1].lower() or isinstance(value, mpc):
        return False
    whole, _, decimals = literal.args[1].partition(".")
    if len(decimals) < MIN_DECIMALS or len((whole + decimals).lstrip("0")) < MIN_DECIMALS:
        return False
    stated = -literal.args[0] if negative else literal.args[0]
    half = mpf("0.5000001") * mpf(10) ** -len(decimals)
    return bool(abs(inexact(value) - inexact(stated)) <= half)
