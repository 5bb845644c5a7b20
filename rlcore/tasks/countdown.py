"""Countdown: reach a target from some numbers with + - * /, each number used at most once."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import comb

from rlcore.graders.fences import tagged_answer
from rlcore.seeding import derive_seed
from rlcore.tasks.arguments import ArgumentError, integer, one_of, share
from rlcore.tasks.grades import weighted
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "": 3}
AST_OPS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
MAX_EXPRESSION = 200  # characters; bounds the parser's recursion
ATTEMPTS = 50
TEXT = (
    "Using the numbers {numbers}, write an expression that equals {target}. You may use + - * / "
    "and parentheses, and each number {rule}. Put the final expression between <answer> and "
    "</answer>."
)
Term = tuple[int, str, str]  # value, text, outermost operator ("" for a number)


class Countdown(ProceduralTask):
    """min_numbers to max_numbers numbers out of 1..max_number; the target is at most max_target.

    style "short" asks `4,25,3=63:` and expects the bare expression (for models with a small
    alphabet), "text" asks in English and expects it inside <answer> tags. Train and heldout share
    no multiset of numbers. reward = (1 - format_reward) * correct + format_reward * well-formed.
    """

    name = "countdown"

    def __init__(
        self,
        *,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 50,
        max_target: int = 999,
        ops: str = "+-*/",
        use_all: bool = False,
        style: str = "text",
        format_reward: float = 0.1,
        seed: int = 0,
    ) -> None:
        integer("min_numbers", min_numbers, 2, 8)
        if integer("max_numbers", max_numbers, 2, 8) < min_numbers:
            raise ArgumentError(
                "max_numbers", max_numbers, f"is below task.args.min_numbers={min_numbers}."
            )
        self._max_number = integer("max_number", max_number, 2, 1000)
        self._max_target = integer("max_target", max_target, max_numbers * max_number, 10**6)
        if not isinstance(ops, str) or set(ops) - set("+-*/") or "+" not in ops:
            raise ArgumentError(
                "ops", ops, "is not accepted: give characters out of + - * / that include +."
            )
        self._ops, self._use_all = ops, bool(use_all)
        self._short = one_of("style", style, ("short", "text")) == "short"
        self._format_reward = share("format_reward", format_reward)
        self._counts = range(min_numbers, max_numbers + 1)
        super().__init__(
            {f"{n} of {max_number}": comb(max_number + n - 1, n) for n in self._counts}, seed
        )

    def problem(self, stratum: int, rank: int) -> Item:
        count = self._counts[stratum]
        rng = random.Random(derive_seed(0, "countdown", count, self._max_number, rank))
        numbers = _multiset(rank, count)
        target, expression = self._reachable(numbers, rng)
        numbers = _shuffled(numbers, rng)
        meta = {"numbers": numbers, "target": target}
        if self._short:
            return Item("", f"{','.join(map(str, numbers))}={target}:", expression, meta)
        rule = "must be used exactly once" if self._use_all else "may be used at most once"
        question = TEXT.format(numbers=", ".join(map(str, numbers)), target=target, rule=rule)
        return Item("", question, expression, meta)

    def _reachable(self, numbers: list[int], rng: random.Random) -> tuple[int, str]:
        """A target and an expression of all the numbers that equals it."""
        for _ in range(ATTEMPTS):
            terms: list[Term] = [(n, str(n), "") for n in _shuffled(numbers, rng)]
            while len(terms) > 1:
                left = terms.pop(int(rng.random() * len(terms)))
                right = terms.pop(int(rng.random() * len(terms)))
                terms.append(self._combine(left, right, rng))
            value, text, _ = terms[0]
            if 0 < value <= self._max_target and value not in numbers:
                return value, text
        return sum(numbers), "+".join(map(str, numbers))

    def _combine(self, left: Term, right: Term, rng: random.Random) -> Term:
        allowed = [op for op in self._ops if op in "+*" or (op == "-" and left[0] > right[0])]
        if "/" in self._ops and right[0] > 1 and left[0] % right[0] == 0:
            allowed.append("/")
        op = allowed[int(rng.random() * len(allowed))]
        a, b = left[0], right[0]
        value = a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a // b
        level = PRECEDENCE[op]
        text_a = f"({left[1]})" if PRECEDENCE[left[2]] < level else left[1]
        tight = PRECEDENCE[right[2]] < level or (PRECEDENCE[right[2]] == level and op in "-/")
        return value, f"{text_a}{op}{f'({right[1]})' if tight else right[1]}", op

    def grade(self, item: Item, response: str) -> Grade:
        text = response.strip() if self._short else tagged_answer(response)
        value = (
            None if text is None else self._value(text, item.meta["numbers"], item.meta["target"])
        )
        return weighted(value == item.meta["target"], value is not None, self._format_reward)

    def _value(self, text: str, numbers: Sequence[int], target: int) -> Fraction | None:
        """The value of the expression; None if it is not one, or uses numbers that are not
        given."""
        expression, equals, right = text.partition("=")
        if equals and right.strip() != str(target):
            return None
        parsed = evaluate(expression.replace("×", "*").replace("÷", "/"))
        if parsed is None:
            return None
        value, used = parsed
        if used - Counter(numbers) or (self._use_all and used != Counter(numbers)):
            return None
        return value

    def worked_answer(self, item: Item) -> str | None:
        return item.answer if self._short else f"<answer>{item.answer}</answer>"

    def alphabet(self) -> str | None:
        return "0123456789,=:()" + "".join(sorted(self._ops)) if self._short else None


def evaluate(text: str) -> tuple[Fraction, Counter[int]] | None:
    """(value, numbers used) of an arithmetic expression of whole numbers, + - * / and parentheses;
    None otherwise."""
    if len(text) > MAX_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return None
    try:
        used: Counter[int] = Counter()
        return _walk(ast.parse(text.strip(), mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _walk(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in AST_OPS:
        raise ValueError("not plain arithmetic")
    left, right = _walk(node.left, used), _walk(node.right, used)
    op = AST_OPS[type(node.op)]
    return (
        left + right
        if op == "+"
        else left - right
        if op == "-"
        else left * right
        if op == "*"
        else left / right
    )


def _multiset(rank: int, count: int) -> list[int]:
    """The rank-th multiset of `count` positive integers, sorted (combinatorial number system, then
    1-based)."""
    chosen = []
    for k in range(count, 0, -1):
        c = k - 1
        while comb(c + 1, k) <= rank:
            c += 1
        rank -= comb(c, k)
        chosen.append(c - (k - 1) + 1)
    return chosen[::-1]


def _shuffled(numbers: Sequence[int], rng: random.Random) -> list[int]:
    # By `random()` alone: the one draw whose sequence Python promises to keep between versions.
    return [n for _, n in sorted((rng.random(), n) for n in numbers)]
