"""Sums, differences and products of two whole numbers: `17+5=` is answered by `22`."""

from __future__ import annotations

from itertools import product

from rlcore.tasks.arguments import ArgumentError, integer
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item


class Arithmetic(ProceduralTask):
    """`ops` is any of the characters + - *; operands have min_digits to max_digits digits each."""

    name = "arithmetic"

    def __init__(
        self, *, ops: str = "+", min_digits: int = 1, max_digits: int = 2, seed: int = 0
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
        self._ops = ops
        lengths = range(min_digits, max_digits + 1)
        self._kinds = list(product(ops, lengths, lengths))
        super().__init__({f"{op}{a},{b}": _count(a) * _count(b) for op, a, b in self._kinds}, seed)

    def problem(self, stratum: int, rank: int) -> Item:
        op, length_a, length_b = self._kinds[stratum]
        offset_a, offset_b = divmod(rank, _count(length_b))
        a, b = _lowest(length_a) + offset_a, _lowest(length_b) + offset_b
        value = a + b if op == "+" else a - b if op == "-" else a * b
        return Item("", f"{a}{op}{b}=", str(value))

    def grade(self, item: Item, response: str) -> Grade:
        correct = float(response.strip() == item.answer)
        return Grade(correct, {"correct": correct})

    def alphabet(self) -> str | None:
        return "".join(sorted({*"0123456789=", *self._ops}))


def _lowest(length: int) -> int:
    return 0 if length == 1 else 10 ** (length - 1)


def _count(length: int) -> int:
    return 10**length - _lowest(length)
