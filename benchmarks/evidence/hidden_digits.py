"""Sort the digits hidden in a text of letters: a long prompt with a short answer, for the study of
sparse actors (`evidence.py distillsparse`): what an actor does not attend to, it cannot sort.

    rlcore train task=benchmarks/evidence/hidden_digits.py:HiddenDigits task.args.letters=300 ...
"""

from __future__ import annotations

import random

from rlcore.seeding import derive_seed
from rlcore.tasks.arguments import integer
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item

LETTERS = "abcdefghijklmnop"


class HiddenDigits(ProceduralTask):
    """`min_digits` to `max_digits` digits (the difficulty) at random places of `letters` letters.

    Example, of 3 digits and 8 letters: `ac7bdp0ef2a=` is answered by `027`."""

    name = "hidden_digits"

    def __init__(
        self, *, letters: int, min_digits: int = 4, max_digits: int = 8, seed: int = 0
    ) -> None:
        integer("max_digits", max_digits, integer("min_digits", min_digits, 1, 18), 18)
        self._lengths = range(min_digits, max_digits + 1)
        self._letters = integer("letters", letters, 0, 100_000)
        super().__init__({f"{n} in {letters}": 10**n for n in self._lengths}, seed)

    def problem(self, stratum: int, rank: int) -> Item:
        digits = f"{rank:0{self._lengths[stratum]}d}"
        draw = random.Random(derive_seed(0, "hidden digits", self._letters, digits))
        text = draw.choices(LETTERS, k=self._letters + len(digits))
        for place, digit in zip(sorted(draw.sample(range(len(text)), len(digits))), digits):
            text[place] = digit
        return Item("", "".join(text) + "=", "".join(sorted(digits)))

    def grade(self, item: Item, response: str) -> Grade:
        correct = float(response.strip() == item.answer)
        return Grade(correct, {"correct": correct})

    def alphabet(self) -> str:
        return "0123456789=" + LETTERS
