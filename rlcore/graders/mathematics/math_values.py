"""Equality of answers in meaning: `same`, for numbers, lists, relations and sets."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

from mpmath import mpc

from rlcore.graders.mathematics.math_numbers import (
    CONSTANTS,
    INFINITY,
    Evaluation,
    Number,
    Undefined,
    close,
    equal_expressions,
    inexact,
    points,
    symbols,
)
from rlcore.graders.mathematics.math_parser import Node
from rlcore.graders.mathematics.math_quantities import Quantity, has_units, same_quantity
from rlcore.graders.mathematics.math_tokens import Unreadable
from rlcore.graders.mathematics.math_words import words

MAX_ITEMS = 64  # of a list whose items are matched


def same(reference: Node, answer: Node) -> bool:
    """Return whether two answers are equal in meaning. Raises Unreadable where that cannot be
    computed."""
    if reference == answer:
        return True
    if "\\approx" in (_last_operator(reference), _last_operator(answer)):
        return any(same(x, y) for x in _approximate(reference) for y in _approximate(answer))
    reference, answer = _unwrapped(reference, answer), _unwrapped(answer, reference)
    reference, answer = (_as_matrix(folded(node)) for node in (reference, answer))
    kinds = {reference.kind, answer.kind}
    if kinds & {"based", "ratio"}:
        return reference.kind == answer.kind and SPECIAL[reference.kind](reference, answer)
    inequalities = is_inequality(reference) and is_inequality(answer)
    if inequalities and symbols(reference) - CONSTANTS != symbols(answer) - CONSTANTS:
        return False
    if (is_interval(reference) or is_interval(answer)) and not kinds & {"set", "num"}:
        return _same_sets(reference, answer)
    if kinds == {"rel"}:
        return _same_relations(reference, answer)
    if "matrix" in kinds:
        return _same_matrices(reference, answer)
    if kinds & {"tuple"} and kinds <= {"tuple", "list"}:
        return _same_tuples(reference, answer)
    one, two = _items(reference), _items(answer)
    if one is None and two is None:
        return _same_values(reference, answer)
    dedupe = "set" in kinds
    return _same_items(one or [reference], two or [answer], dedupe=dedupe)


def _same_values(a: Node, b: Node) -> bool:
    if a.kind in STRUCTURES or b.kind in STRUCTURES:
        return False
    return same_quantity(a, b)


STRUCTURES = frozenset(words("list set tuple matrix rel ratio based union cap minus builder reals"))


def _last_operator(node: Node) -> str:
    return node.args[0][-1] if node.kind == "rel" else ""


def _approximate(node: Node) -> list[Node]:
    """An exact value and the decimals that stand for it, as two answers."""
    if _last_operator(node) != "\\approx":
        return [node]
    operators, sides = node.args
    exact = Node("rel", (operators[:-1], sides[:-1])) if len(sides) > 2 else sides[0]
    return [exact, sides[-1]]


def _unwrapped(node: Node, other: Node) -> Node:
    """The value of "x = 5" or "x \\in S", where the other answer is not an equation."""
    if node.kind == "list" and other.kind != "rel":
        return _values_of(node, other)
    if node.kind != "rel":
        return node
    operators, sides = node.args
    if operators == ("\\in",) and sides[0].kind in ("sym", "tuple"):
        return sides[1]
    if set(operators) == {"="} and other.kind != "rel" and _is_name(sides[0]):
        reverse = sides[-1].kind == "sym" and not symbols(sides[0]) - CONSTANTS
        return sides[0] if reverse else sides[-1]
    return node


def _values_of(node: Node, other: Node) -> Node:
    """`x = 1, y = 2` as (1, 2) and `x = 1, x = 2` as a list, unless the other one has names too."""
    items, joints = node.args
    others = other.args[0] if other.kind == "list" else (other,)
    plain = Node("num", (Fraction(0), "0"))
    if any(item.kind == "rel" for item in others):
        return node
    values = tuple(_unwrapped(item, plain) for item in items)
    if values == items or any(value.kind == "rel" for value in values):
        return node
    names = [item.args[1][0] for item in items if item.kind == "rel"]
    if len(set(names)) == len(items) and other.kind == "tuple":
        return Node("tuple", ("(", values, ")"))
    return Node("list", (values, joints))


def _is_name(node: Node) -> bool:
    """Return whether an equation's left side only names its right side, or is a number itself."""
    if node.kind == "sym" or not symbols(node) - CONSTANTS:
        return True
    if node.kind == "tuple":
        return all(item.kind == "sym" for item in node.args[1])
    if node.kind == "mul":  # f(x), P(A), AB
        first = node
        while first.kind == "mul":
            first = first.args[0]
        return first.kind == "sym" and (
            first.args[0].rstrip("'")[:1] in "fghpPQSV"
            or all(n.isupper() for n in symbols(node))
            or first.args[0] in ("angle", "triangle")
        )
    if node.kind == "add":  # m + n, but not the equation of a line
        return all(map(_is_letter, node.args))
    return (
        node.kind == "fn" and not has_units(node) and node.args[0] in ("abs", "sin", "cos", "tan")
    )


def _is_letter(node: Node) -> bool:
    if node.kind == "add":
        return all(map(_is_letter, node.args))
    return node.kind == "sym" and node.args[0] not in CONSTANTS | {"x", "y", "z"}


def _as_matrix(node: Node) -> Node:
    """[[1, 2], [3, 4]] as a matrix."""
    if node.kind != "tuple" or node.args[0] != "[" or not node.args[1]:
        return node
    rows = node.args[1]
    if any(row.kind != "tuple" or row.args[0] != "[" or row.args[2] != "]" for row in rows):
        return node
    cells = tuple(row.args[1] for row in rows)
    return Node("matrix", (cells, "")) if len({len(row) for row in cells}) == 1 else node


def folded(node: Node) -> Node:
    """A matrix that is multiplied by numbers, or added to others, as one matrix."""
    if node.kind == "neg":
        inner = folded(node.args[0])
        return _each(inner, lambda cell: Node("neg", (cell,))) if _is_matrix(inner) else node
    if node.kind not in ("mul", "div", "add"):
        return node
    left, right = map(folded, node.args)
    if node.kind == "add" and _is_matrix(left) and _shape(left) == _shape(right):
        rows = zip(left.args[0], right.args[0], strict=True)
        cells = tuple(tuple(Node("add", pair) for pair in zip(*row, strict=True)) for row in rows)
        return Node("matrix", (cells, ""))
    if node.kind == "add" or _is_matrix(left) == _is_matrix(right):
        return node
    if _is_matrix(left) and right.kind not in STRUCTURES:
        return _each(left, lambda cell: Node(node.kind, (cell, right)))
    if node.kind == "mul" and left.kind not in STRUCTURES:
        return _each(right, lambda cell: Node("mul", (left, cell)))
    return node


def _is_matrix(node: Node) -> bool:
    return node.kind == "matrix" and not node.args[1]


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(map(len, node.args[0])) if _is_matrix(node) else ()


def _each(matrix: Node, of: Callable[[Node], Node]) -> Node:
    return Node("matrix", (tuple(tuple(map(of, row)) for row in matrix.args[0]), ""))


def _same_sets(a: Node, b: Node) -> bool:
    if a.kind == b.kind == "tuple":
        return _same_tuples(a, b)
    try:
        return same_intervals(intervals(a), intervals(b))
    except (Unreadable, Undefined):
        return a.kind == b.kind and _same_parts(a, b)


def _same_parts(a: Node, b: Node) -> bool:
    if a.kind == "rel":
        return _same_relations(a, b)
    flat = [part for part in (*a.args, *b.args) if not isinstance(part, Node)]
    return not flat and len(a.args) == len(b.args) and all(map(same, a.args, b.args))


def _same_tuples(a: Node, b: Node) -> bool:
    if a.kind != b.kind:
        return False
    (opened, ones, closed), (opened_b, others, closed_b) = a.args, b.args
    if len(ones) != len(others):
        return False
    if len(ones) == 2 and (opened, closed) != (opened_b, closed_b):
        return False
    return all(map(same, ones, others))


def _same_matrices(a: Node, b: Node) -> bool:
    if a.kind == b.kind:
        rows, others = a.args[0], b.args[0]
        return (
            a.args[1] == b.args[1]
            and [len(r) for r in rows] == [len(r) for r in others]
            and all(all(map(same, row, other)) for row, other in zip(rows, others, strict=True))
        )
    matrix, other = (a, b) if a.kind == "matrix" else (b, a)
    cells = [cell for row in matrix.args[0] for cell in row]
    vector = 1 in (len(matrix.args[0]), len(matrix.args[0][0])) and not matrix.args[1]
    if other.kind != "tuple" or not vector or len(cells) != len(other.args[1]):
        return False
    return all(map(same, cells, other.args[1]))


def _same_ratios(a: Node, b: Node) -> bool:
    if len(a.args) != len(b.args):
        return False
    if all(map(same, a.args, b.args)):
        return True
    times = any(_is_time(node) for node in (a, b))
    if times or has_units(a) or has_units(b):
        return False
    return all(
        equal_expressions(Node("mul", (a.args[0], y)), Node("mul", (b.args[0], x)))
        for x, y in zip(a.args[1:], b.args[1:], strict=True)
    )


def _is_time(node: Node) -> bool:
    """Return whether a ratio is a time such as 10:30: two digits after a colon are minutes."""
    numbers = [Quantity(part).node for part in node.args[1:]]
    return any(part.kind == "num" and len(part.args[1]) == 2 for part in numbers)


def _same_based(a: Node, b: Node) -> bool:
    return a.args == b.args


SPECIAL: dict[str, Callable[[Node, Node], bool]] = {"based": _same_based, "ratio": _same_ratios}


def _items(node: Node) -> list[Node] | None:
    """The answers that a list, a set or a plus-minus stands for; None for a single one."""
    if node.kind == "list":
        return [one for item in node.args[0] for one in alternatives(item)]
    if node.kind == "set":
        return [one for item in node.args for one in alternatives(item)]
    if node.kind != "rel" and has_sign(node):
        return alternatives(node)
    return None


def _same_items(ones: list[Node], others: list[Node], *, dedupe: bool) -> bool:
    """Return whether the items match one to one, in any order; in a set, each counts once."""
    if max(len(ones), len(others)) > MAX_ITEMS:
        raise Unreadable("too many items")
    if dedupe:
        ones, others = _distinct(ones), _distinct(others)
    if len(ones) != len(others):
        return False
    left = list(others)
    for one in ones:
        match = next((other for other in left if same(one, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _distinct(items: list[Node]) -> list[Node]:
    found: list[Node] = []
    for item in items:
        if not any(same(item, other) for other in found):
            found.append(item)
    return found


def _same_relations(a: Node, b: Node) -> bool:
    """Equations and inequalities: the sides agree, or their differences are in a constant ratio."""
    (operators, sides), (operators_b, sides_b) = a.args, b.args
    if operators == operators_b and all(map(same, sides, sides_b)):
        return True
    if len(operators) != 1 or len(operators_b) != 1:
        chained = set(operators) | set(operators_b) == {"="}
        return chained and same(sides[0], sides_b[0]) and same(sides[-1], sides_b[-1])
    one = Node("add", (sides[0], Node("neg", (sides[1],))))
    two = Node("add", (sides_b[0], Node("neg", (sides_b[1],))))
    if has_units(one) or has_units(two) or {s.kind for s in (*sides, *sides_b)} & STRUCTURES:
        return False
    ratio = _constant_ratio(one, two)
    if ratio == 0 or isinstance(ratio, mpc):
        return False
    expected = operators[0] if ratio > 0 else FLIPPED.get(operators[0])
    return expected == operators_b[0]


def _constant_ratio(one: Node, two: Node) -> Number:
    """The constant factor from `one` to `two` wherever both are real; 0 if it varies."""
    names = sorted((symbols(one) | symbols(two)) - CONSTANTS)
    ratios = []
    for point in points(names):
        try:
            evaluation = Evaluation(point, complex_=False)
            x, y = evaluation(one), evaluation(two)
        except (Undefined, KeyError):
            continue
        if x == 0 or y == 0:
            return 0
        ratios.append(inexact(y) / inexact(x))
    if len(ratios) < 3 or not all(close(r, ratios[0]) for r in ratios):
        return 0
    return ratios[0]


# Sets of real numbers as ordered intervals, from intervals, unions and inequalities.


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
