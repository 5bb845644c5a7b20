"""Sums, differences and products of two whole numbers: `17+5=` is answered by `22`."""

from __future__ import annotations

import re
from itertools import product

from rlcore.tasks.arguments import ArgumentError, integer, one_of
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item

SHORT = "{a}{op}{b}="
NUMBER = re.compile(r"-?[0-9]{1,40}")


class Arithmetic(ProceduralTask):
    """`ops` is any of the characters + - *; operands have min_digits to max_digits digits each.

    `question` is what is asked, with {a}, {op} and {b} in it: words for a pretrained model.
    `credit` is the reward of a wrong answer. none: 0; digits: a number and nothing else has 0.1,
    and up to 0.4 for the share of its digits that are right, counted from the last. The part
    "correct" stays 0 or 1. So a model that seldom answers right has a reward to learn from.
    """

    name = "arithmetic"

    def __init__(
        self,
        *,
        ops: str = "+",
        min_digits: int = 1,
        max_digits: int = 2,
        question: str = SHORT,
        credit: str = "none",
        seed: int = 0,
    ) -> None:
        if not isinstance(ops, str) or not ops or set(ops) - set("+-*") or len(set(ops)) < len(ops):
            raise ArgumentError(
                "ops", ops, "is not accepted: give a text of distinct characters out of + - *."
            )
        integer("min_digits", min_digits, 1, 15)
        if integer("max_digits", max_digits, 1, 15) < min_digits:
            raise ArgumentError(
                "max_digits", max_digits, f"is below task.args.min_digits={min_digits}."
            )
        if not isinstance(question, str) or any(n not in question for n in ("{a}", "{op}", "{b}")):
            raise ArgumentError(
                "question", question, "needs {a}, {op} and {b}, once at least each."
            )
        self._ops = ops
        self._credit = one_of("credit", credit, ("none", "digits"))
        self._question = question
        lengths = range(min_digits, max_digits + 1)
        self._kinds = list(product(ops, lengths, lengths))
        super().__init__({f"{op}{a},{b}": _count(a) * _count(b) for op, a, b in self._kinds}, seed)

    def problem(self, stratum: int, rank: int) -> Item:
        op, length_a, length_b = self._kinds[stratum]
        offset_a, offset_b = divmod(rank, _count(length_b))
        a, b = _lowest(length_a) + offset_a, _lowest(length_b) + offset_b
        value = a + b if op == "+" else a - b if op == "-" else a * b
        asked = self._question.replace("{a}", str(a)).replace("{b}", str(b)).replace("{op}", op)
        return Item("", asked, str(value))

    def grade(self, item: Item, response: str) -> Grade:
        answer = response.strip()
        correct = float(answer == item.answer)
        if correct or self._credit == "none" or not NUMBER.fullmatch(answer):
            return Grade(correct, {"correct": correct}, answer=answer)
        places = max(len(answer), len(item.answer))
        right = sum(a == b for a, b in zip(reversed(answer), reversed(item.answer)))
        return Grade(0.1 + 0.4 * right / places, {"correct": correct}, answer=answer)

    def alphabet(self) -> str | None:
        words = self._question.replace("{a}", "").replace("{b}", "").replace("{op}", "")
        return "".join(sorted({*"0123456789", *words, *self._ops}))


def _lowest(length: int) -> int:
    return 0 if length == 1 else 10 ** (length - 1)


def _count(length: int) -> int:
    return 10**length - _lowest(length)
