"""Expressions with units, percent and degrees, and when two of them are the same."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from rlcore.graders.mathematics.math_numbers import Evaluation, equal_expressions, symbols
from rlcore.graders.mathematics.math_parser import Node
from rlcore.graders.mathematics.math_tokens import Unreadable
from rlcore.graders.mathematics.math_words import RATES, unit


class Quantity:
    """An expression without its units, and these as powers of dimensions with a factor."""

    def __init__(self, node: Node) -> None:
        self.powers: dict[str, Fraction] = {}
        self.factor = Fraction(1)
        self.percent = self.degrees = self.worded = False
        self.node = self._strip(node, Fraction(1)) or Node("num", (Fraction(1), "1"))

    def _strip(self, node: Node, power: Fraction) -> Node | None:
        """The node without units; None where nothing else is in it."""
        if node.kind == "unit":
            self._found(node.args[0], power)
            return None
        if node.kind == "mul":
            left, right = (self._strip(part, power) for part in node.args)
            if left is None or right is None:
                return left or right
            return Node("mul", (left, right))
        if node.kind == "div":
            top, bottom = self._strip(node.args[0], power), self._strip(node.args[1], -power)
            if bottom is None:
                return top
            return Node("div", (top or Node("num", (Fraction(1), "1")), bottom))
        if node.kind == "pow" and has_units(node.args[0]) and not symbols(node.args[1]):
            inner = self._strip(node.args[0], power * rational(node.args[1]))
            return None if inner is None else Node("pow", (inner, node.args[1]))
        if node.kind == "neg":
            inner = self._strip(node.args[0], power)
            return Node("neg", (inner or Node("num", (Fraction(1), "1")),))
        return node

    def _found(self, word: str, power: Fraction) -> None:
        self.worded = True
        self.percent |= word == "%"
        self.degrees |= word.lower().startswith("degree")
        if word.lower() in RATES:
            length, time = RATES[word.lower()]
            self._found(length, power)
            self._found(time, -power)
        known = unit(word)
        if known is None or word == "%":
            return
        dimension, factor = known
        if abs(power) > 12 or power.denominator != 1:
            raise Unreadable("a power of a unit")
        self.powers[dimension] = self.powers.get(dimension, Fraction(0)) + power
        self.factor *= factor**power.numerator

    @property
    def scaled(self) -> Node:
        return Node("mul", (Node("num", (self.factor, "")), self.node))


def has_units(node: Any) -> bool:
    """Return whether a word stands in a tree as a unit."""
    if isinstance(node, Node):
        return node.kind == "unit" or has_units(node.args)
    return isinstance(node, tuple) and any(has_units(part) for part in node)


def same_quantity(a: Node, b: Node) -> bool:
    x, y = Quantity(a), Quantity(b)
    if (x.percent, y.percent) != (False, False):
        return _same_percentage(x, y)
    if {"celsius", "fahrenheit"} & {*x.powers, *y.powers} and (x.degrees or y.degrees):
        return equal_expressions(x.node, y.node)
    if "angle" in x.powers or "angle" in y.powers:
        return _same_angle(x, y)
    if x.powers and y.powers:
        return x.powers == y.powers and equal_expressions(x.scaled, y.scaled)
    return equal_expressions(x.node, y.node)


def _same_percentage(x: Quantity, y: Quantity) -> bool:
    """Return whether a percentage equals a number: 28% is 0.28, and also 28, where the number is
    above 1 and the sign was left out."""
    if (x.worded and not x.percent) or (y.worded and not y.percent) or x.powers or y.powers:
        return False
    if x.percent and y.percent:
        return equal_expressions(x.node, y.node)
    if equal_expressions(_hundredth(x), _hundredth(y)):
        return True
    above = Evaluation({}, complex_=False)
    return (
        not symbols(x.node) | symbols(y.node)
        and equal_expressions(x.node, y.node)
        and abs(above(x.node)) > 1
    )


def _hundredth(x: Quantity) -> Node:
    return Node("div", (x.node, Node("num", (Fraction(100), "100")))) if x.percent else x.node


def _same_angle(x: Quantity, y: Quantity) -> bool:
    """Return whether an angle in degrees equals a number: of degrees, since a reference may leave
    their sign out, or of radians."""
    if x.degrees == y.degrees:
        return equal_expressions(x.node, y.node)
    degrees, other = (x, y) if x.degrees else (y, x)
    if set(other.powers) - {"angle"}:
        return False
    stated = "angle" in other.powers or "pi" in symbols(other.node)
    in_radians = Node("mul", (degrees.node, Node("unit", ("degree",))))
    if stated and equal_expressions(in_radians, other.node):
        return True
    return "angle" not in other.powers and equal_expressions(degrees.node, other.node)


def rational(node: Node) -> Fraction:
    """The exact value of a number, without its unit. Raises Unreadable for anything else."""
    if symbols(node):
        raise Unreadable("no number")
    value = Evaluation({}, complex_=False)(Quantity(node).node)
    if not isinstance(value, Fraction):
        raise Unreadable("no rational number")
    return value
