"""Sets of real numbers as ordered intervals, from intervals, unions and inequalities."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from typing import Any

from rlcore.tasks.math_numbers import (
    CONSTANTS,
    INFINITY,
    Evaluation,
    Number,
    close,
    inexact,
    symbols,
)
from rlcore.tasks.math_parser import Node
from rlcore.tasks.math_quantities import Quantity
from rlcore.tasks.math_tokens import Unreadable

Interval = tuple[Number, bool, Number, bool]  # from, whether it belongs, to, whether it belongs


def intervals(node: Node) -> list[Interval]:
    """The set of real numbers that a tree describes, as ordered intervals. Raises Unreadable."""
    kind, args = node.kind, node.args
    if kind == "reals":
        return [(-INFINITY, False, INFINITY, False)]
    if kind == "tuple":
        return _interval(*args)
    if kind == "set":
        points = [_real_value(item) for part in args for item in alternatives(part)]
        return _joined([(point, True, point, True) for point in points])
    if kind == "union":
        return _joined([part for side in args for part in intervals(side)])
    if kind == "cap":
        return _intersection(intervals(args[0]), intervals(args[1]))
    if kind == "minus":
        return _intersection(intervals(args[0]), _complement(intervals(args[1])))
    if kind == "builder":
        return _built(*args)
    if kind == "list":
        return _conditions(*args)
    if kind == "rel":
        return _solved(*args)
    if kind == "sym" and args[0] == "bb:R":
        return [(-INFINITY, False, INFINITY, False)]
    raise Unreadable("no set of real numbers")


def _real_value(node: Node) -> Number:
    if symbols(node) - {"pi", "e", "infty"}:
        raise Unreadable("an end of an interval is not a number")
    return inexact(Evaluation({}, complex_=False)(Quantity(node).node))


def _interval(opened: str, items: tuple[Node, ...], closed: str) -> list[Interval]:
    if len(items) != 2:
        raise Unreadable("an interval has two ends")
    low, high = (_real_value(item) for item in items)
    if not low < high:
        raise Unreadable("an interval's ends are not in order")
    return [(low, opened == "[" and low != -INFINITY, high, closed == "]" and high != INFINITY)]


def _joined(parts: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for low, has_low, high, has_high in sorted(parts, key=lambda p: (p[0], not p[1])):
        if joined:
            start, has_start, end, has_end = joined[-1]
            if low < end or (close(low, end) and (has_low or has_end)):
                if close(high, end):
                    joined[-1] = (start, has_start, end, has_end or has_high)
                elif high > end:
                    joined[-1] = (start, has_start, high, has_high)
                continue
        joined.append((low, has_low, high, has_high))
    return joined


def _intersection(one: list[Interval], two: list[Interval]) -> list[Interval]:
    parts = []
    for a, has_a, b, has_b in one:
        for c, has_c, d, has_d in two:
            low, has_low = max((a, not has_a), (c, not has_c))
            high, has_high = min((b, has_b), (d, has_d))
            if low < high or (low == high and not has_low and has_high):
                parts.append((low, not has_low, high, has_high))
    return _joined(parts)


def _complement(parts: list[Interval]) -> list[Interval]:
    found: list[Interval] = []
    start, has_start = -INFINITY, False
    for low, has_low, high, has_high in parts:
        if start < low or (start == low and has_start and not has_low):
            found.append((start, has_start, low, not has_low and low != -INFINITY))
        start, has_start = high, not has_high
    if start < INFINITY:
        found.append((start, has_start, INFINITY, False))
    return found


def _built(variable: Node, conditions: Node) -> list[Interval]:
    inside = intervals(conditions)
    if variable.kind == "rel" and variable.args[0] == ("\\in",):
        return _intersection(intervals(variable.args[1][1]), inside)
    if variable.kind != "sym":
        raise Unreadable("a set of terms")
    return inside


def _conditions(items: tuple[Node, ...], joints: frozenset[str]) -> list[Interval]:
    """Inequalities joined by "or" or "and"; by commas: all of them, or where they exclude one
    another, any of them."""
    if any(item.kind not in ("rel", "tuple", "union", "reals") for item in items):
        raise Unreadable("no conditions")
    parts = [intervals(item) for item in items]
    if "or" in joints:
        return _joined([part for found in parts for part in found])
    both = reduce(_intersection, parts)
    return both if both or "and" in joints else _joined([p for found in parts for p in found])


LESS = {"<": False, "\\le": True}
GREATER = {">": False, "\\ge": True}
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\neq": "\\neq", "=": "="}


def _solved(operators: tuple[str, ...], sides: tuple[Node, ...]) -> list[Interval]:
    if operators == ("\\in",):
        return intervals(sides[1])
    parts = [_half_line(op, *sides[i : i + 2]) for i, op in enumerate(operators)]
    return reduce(_intersection, parts)


def _half_line(operator: str, left: Node, right: Node) -> list[Interval]:
    """The set where a relation that is linear in its one variable holds."""
    if operator not in FLIPPED or operator == "=":
        raise Unreadable("no inequality")
    infinite = [side for side in (left, right) if "infty" in symbols(side)]
    if infinite:
        return [(-INFINITY, False, INFINITY, False)]
    names = (symbols(left) | symbols(right)) - CONSTANTS
    if len(names) != 1:
        raise Unreadable("an inequality of one variable is needed")
    if left.kind == "fn" and left.args[0] == "abs" and not symbols(right) - CONSTANTS:
        inner, minus = left.args[1], Node("neg", (right,))
        if operator in LESS:
            above = _half_line(FLIPPED[operator], inner, minus)
            return _intersection(above, _half_line(operator, inner, right))
        below = _half_line(FLIPPED[operator], inner, minus)
        return _joined([*_half_line(operator, inner, right), *below])
    (name,) = names
    difference = Node("add", (left, Node("neg", (right,))))
    points = (Fraction(2), Fraction(3), Fraction(4), Fraction(9, 2))
    at = [inexact(Evaluation({name: x}, complex_=False)(difference)) for x in points]
    slope = at[1] - at[0]
    if not (close(at[2] - at[1], slope) and close((at[3] - at[2]) * 2, slope)) or slope == 0:
        raise Unreadable("the inequality is not linear")
    root = 2 - inexact(at[0]) / inexact(slope)
    if slope < 0:
        operator = FLIPPED[operator]
    if operator == "\\neq":
        return [(-INFINITY, False, root, False), (root, False, INFINITY, False)]
    if operator in LESS:
        return [(-INFINITY, False, root, LESS[operator])]
    return [(root, GREATER[operator], INFINITY, False)]


def same_intervals(one: list[Interval], two: list[Interval]) -> bool:
    return len(one) == len(two) and all(
        x[1] == y[1] and x[3] == y[3] and close(x[0], y[0]) and close(x[2], y[2])
        for x, y in zip(one, two, strict=True)
    )


def is_interval(node: Node) -> bool:
    """Return whether a tree can only be a set of real numbers."""
    if node.kind in ("union", "cap", "minus", "builder", "reals"):
        return True
    if node.kind == "tuple":
        opened, items, closed = node.args
        infinite = any(Node("sym", ("infty",)) in (item, *item.args) for item in items if item.args)
        return len(items) == 2 and ((opened == "[") != (closed == "]") or infinite)
    return is_inequality(node)


def is_inequality(node: Node) -> bool:
    if node.kind == "list":
        return all(map(is_inequality, node.args[0]))
    return node.kind == "rel" and all(op in FLIPPED and op != "=" for op in node.args[0])


def alternatives(node: Node) -> list[Node]:
    """The two values of an expression with plus or minus; the expression alone without."""
    if not has_sign(node):
        return [node]
    return [_signed(node, sign) for sign in (1, -1)]


def has_sign(node: Any) -> bool:
    if isinstance(node, Node):
        return node.kind == "pm" or has_sign(node.args)
    return isinstance(node, tuple) and any(map(has_sign, node))


def _signed(node: Any, sign: int) -> Any:
    if isinstance(node, Node):
        if node.kind == "pm":
            left, right, own = node.args
            term = _signed(right, sign)
            term = term if own == sign else Node("neg", (term,))
            return term if left is None else Node("add", (_signed(left, sign), term))
        return Node(node.kind, _signed(node.args, sign))
    return tuple(_signed(part, sign) for part in node) if isinstance(node, tuple) else node
