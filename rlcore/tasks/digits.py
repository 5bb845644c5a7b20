"""Sort, reverse or copy the digits of a number: `7302=` is answered by `0237`."""

from __future__ import annotations

from rlcore.tasks.arguments import ArgumentError, integer, one_of
from rlcore.tasks.made_up import MadeUpTask
from rlcore.types import Grade, Item

OPERATIONS = {
    "sort": lambda digits: "".join(sorted(digits)),
    "reverse": lambda digits: digits[::-1],
    "copy": lambda digits: digits,
}


class Digits(MadeUpTask):
    """Numbers of min_digits to max_digits digits (the difficulty), as many of each length as there are."""

    name = "digits"

    def __init__(self, *, min_digits: int = 4, max_digits: int = 8, op: str = "sort", seed: int = 0) -> None:
        integer("min_digits", min_digits, 1, 30)
        if integer("max_digits", max_digits, 1, 30) < min_digits:
            raise ArgumentError("max_digits", max_digits, f"is below task.args.min_digits={min_digits}.")
        self._lengths = range(min_digits, max_digits + 1)
        self._op = OPERATIONS[one_of("op", op, OPERATIONS)]
        super().__init__({str(length): 9 * 10 ** (length - 1) for length in self._lengths}, seed)

    def problem(self, stratum: int, rank: int) -> Item:
        digits = str(10 ** (self._lengths[stratum] - 1) + rank)
        return Item("", f"{digits}=", self._op(digits))

    def grade(self, item: Item, response: str) -> Grade:
        correct = float(response.strip() == item.answer)
        return Grade(correct, {"correct": correct})

    def alphabet(self) -> str | None:
        return "0123456789="
