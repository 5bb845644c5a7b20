"""Continue an arithmetic progression modulo 10: `7+3=` is answered by `0369258147...`."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.tasks.arguments import integer
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item

LONGEST = 500


class Progression(ProceduralTask):
    """Every pair of a start and a step, answered by the next `length` digits.

    Each token is rewarded by itself: 1/length for a digit that continues the digit before it, the
    model's own. Digits after a wrong one can be right again, so the reward of an answer says little
    about a single digit.
    """

    name = "progression"

    def __init__(self, *, length: int = 24, seed: int = 0) -> None:
        self._length = integer("length", length, 1, LONGEST)
        super().__init__({"pairs": 100}, seed)

    def problem(self, stratum: int, rank: int) -> Item:
        start, step = divmod(rank, 10)
        digits = [(start + step * (i + 1)) % 10 for i in range(self._length)]
        return Item("", f"{start}+{step}=", "".join(map(str, digits)))

    def grade(self, item: Item, response: str, tokens: Sequence[str] = ()) -> Grade:
        start, step = int(item.question[0]), int(item.question[2])
        before, place = start, 0
        counts = []
        for token in tokens or response:  # without tokens the characters are rewarded together
            right = 0
            for character in token:
                digit = int(character) if character in "0123456789" else None
                right += place < self._length and digit == (before + step) % 10
                before, place = before if digit is None else digit, place + 1
            counts.append(right)
        correct = float(response.strip() == item.answer)
        share = sum(counts) / self._length
        rewards = tuple(count / self._length for count in counts)
        parts = {"correct": correct, "share": share}
        return Grade(0.0, parts, token_rewards=rewards) if tokens else Grade(share, parts)

    def alphabet(self) -> str | None:
        return "0123456789+="
