"""Sort, reverse or copy the digits of a number: `7302=` is answered by `0237`."""

from __future__ import annotations

import hashlib

from rlcore.tasks.arguments import ArgumentError, integer, one_of
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item

OPERATIONS = {
    "sort": lambda digits: "".join(sorted(digits)),
    "reverse": lambda digits: digits[::-1],
    "copy": lambda digits: digits,
}
COUNTED = 30  # up to this length every number is a problem; of longer ones 2**62 each
LONGEST = 500


class Digits(ProceduralTask):
    """Numbers of min_digits to max_digits digits (the difficulty), each length equally often until
    all its numbers are used.

    `credit`: reward of a wrong answer. none: 0; digits: the share of digits in their place (the
    part "correct" stays 0 or 1), so that long answers give a signal to learn from. `free`: tokens
    that may follow the answer and that are not judged; in worked answers they are random digits.
    """

    name = "digits"

    def __init__(
        self,
        *,
        min_digits: int = 4,
        max_digits: int = 8,
        op: str = "sort",
        credit: str = "none",
        free: int = 0,
        seed: int = 0,
    ) -> None:
        integer("min_digits", min_digits, 1, LONGEST)
        if integer("max_digits", max_digits, 1, LONGEST) < min_digits:
            raise ArgumentError(
                "max_digits", max_digits, f"is below task.args.min_digits={min_digits}."
            )
        self._lengths = range(min_digits, max_digits + 1)
        self._op = OPERATIONS[one_of("op", op, OPERATIONS)]
        self._credit = one_of("credit", credit, ("none", "digits"))
        self._free = integer("free", free, 0, LONGEST)
        super().__init__({str(length): _count(length) for length in self._lengths}, seed)

    def problem(self, stratum: int, rank: int) -> Item:
        digits = _number(self._lengths[stratum], rank)
        return Item("", f"{digits}=", self._op(digits))

    def grade(self, item: Item, response: str) -> Grade:
        answer = response.strip()
        if self._free:
            answer = answer[: len(item.answer)]
        correct = float(answer == item.answer)
        if self._credit == "none":
            return Grade(correct, {"correct": correct}, answer=answer)
        places = max(len(answer), len(item.answer))
        share = sum(a == b for a, b in zip(answer, item.answer)) / places
        return Grade(share, {"correct": correct}, answer=answer)

    def worked_answer(self, item: Item) -> str:
        if not self._free:
            return item.answer
        drawn = hashlib.shake_256(f"free/{item.question}".encode()).digest(self._free)
        return item.answer + "".join(str(byte % 10) for byte in drawn)

    def alphabet(self) -> str | None:
        return "0123456789="


def _count(length: int) -> int:
    return 9 * 10 ** (length - 1) if length <= COUNTED else 2**62


def _number(length: int, rank: int) -> str:
    """Number `rank` among the numbers of a length; for the long ones a rank seeds the digits."""
    if length <= COUNTED:
        return str(10 ** (length - 1) + rank)
    drawn = int.from_bytes(
        hashlib.shake_256(f"digits/{length}/{rank}".encode()).digest(length), "big"
    )
    return str(10 ** (length - 1) + drawn % (9 * 10 ** (length - 1)))
