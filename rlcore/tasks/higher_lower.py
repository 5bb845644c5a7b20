"""A hidden number to be guessed: the problems of the environment `higher_lower`, and a game of one
guess without it."""

from __future__ import annotations

from rlcore.interfaces import Split, Task
from rlcore.seeding import derive_seed
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import integer
from rlcore.tasks.problem_space import Permutation
from rlcore.types import Grade, Item


class HigherLowerTask(Task):
    """Numbers of `digits` digits, leading zeros included; the question says how many.

    The question does not depend on the number, so both splits draw from all of them: one kept for
    the heldout split alone would teach the policy never to guess it. The heldout split walks
    through all numbers, so that 10**digits prompts, or a multiple, weigh them equally.
    """

    name = "higher_lower"

    def __init__(self, *, digits: int = 1, seed: int = 0) -> None:
        self._digits = integer("digits", digits, 1, 9)
        self._seed = integer("seed", seed, 0, 2**63 - 1)
        self._order = Permutation(10**digits, "higher_lower", seed)

    def size(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> Item:
        if split == "heldout":
            number = self._order(index % 10**self._digits)
        else:
            number = derive_seed(self._seed, "higher_lower", index) % 10**self._digits
        answer = str(number).zfill(self._digits)
        return Item(format_prompt_id(self.name, split, index), "?" * self._digits, answer)

    def grade(self, item: Item, response: str) -> Grade:
        correct = float(response.strip() == item.answer)
        return Grade(correct, {"correct": correct})

    def worked_answer(self, item: Item) -> str | None:
        return item.answer

    def alphabet(self) -> str | None:
        return "0123456789?<>"
