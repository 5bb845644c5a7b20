"""Problems of games over several turns: names to be sorted, and a hidden number."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from math import perm

from rlcore.interfaces import Split, Task
from rlcore.seeding import derive_seed
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import ArgumentError, integer, one_of
from rlcore.tasks.procedural import Permutation, ProceduralTask
from rlcore.types import Grade, Item

_NAMES = """
Aaron Amara Anton Beatriz Boris Carmen Chen Dalia Dmitri Elena Emeka Farid Freya Gita Goran Hana
Hugo Imani Ivan Jorge Julia Kaito Kira Lars Leila Maria Mateo Nadia Nils Olga Omar Paula Pedro Quinn
Rania Ravi Sofia Sven Tariq Tomoko Uma Viktor Wanda Xavier Yara Yusuf Zainab Zoe
"""
NAMES = tuple(_NAMES.split())
MOST = 2**62  # problems, of a space that has more
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


class AlphabetSort(ProceduralTask):
    """`turns` lists of `per_turn` distinct names in random order; every turn adds one of them.

    style `names`: instructions and one name a line, for pretrained models. `letters`: `kb=` is
    answered by `bk`, and the next turn's `+fa=` by `abfk`, for fresh models. With several turns,
    both splits have problems with equal first turns.
    """

    name = "alphabet_sort"

    def __init__(
        self, *, turns: int = 3, per_turn: int = 3, style: str = "names", seed: int = 0
    ) -> None:
        self._words = one_of("style", style, ("names", "letters")) == "names"
        self._pool = NAMES if self._words else LETTERS
        self.turns = integer("turns", turns, 1, len(self._pool))
        self._per_turn = integer("per_turn", per_turn, 1, len(self._pool))
        if turns * per_turn > len(self._pool):
            raise ArgumentError(
                "per_turn", per_turn, f"is too many for {turns} turns: {len(self._pool)} exist."
            )
        chosen = perm(len(self._pool), turns * per_turn)
        super().__init__({f"{style} {turns}x{per_turn}": min(chosen, MOST)}, seed)

    def problem(self, stratum: int, rank: int) -> Item:
        left, names = list(self._pool), []
        for _ in range(self.turns * self._per_turn):
            rank, place = divmod(rank, len(left))
            names.append(left.pop(place))
        n = self._per_turn
        lists = [names[i : i + n] for i in range(0, len(names), n)]
        return Item("", self.asked(lists[0], 0), self.written(lists[0]), {"lists": lists})

    def asked(self, names: Sequence[str], turn: int) -> str:
        """Return the question of a turn."""
        if not self._words:
            return f"{'+' if turn else ''}{''.join(names)}="
        if turn:
            intro = "Sort these names into your list, and answer with the whole list:"
        else:
            intro = "Sort these names alphabetically. Answer with the names alone, one a line:"
        return "\n".join([intro, *names])

    def written(self, names: Sequence[str]) -> str:
        """The right answer to all names so far."""
        return ("\n" if self._words else "").join(sorted(names))

    def likeness(self, answer: str, names: Sequence[str]) -> float:
        """Likeness of an answer's list to the right one, from 0 to 1 (`difflib`'s ratio)."""
        found = answer.split() if self._words else list(answer.strip())
        return SequenceMatcher(None, found, sorted(names), autojunk=False).ratio()

    def grade(self, item: Item, response: str) -> Grade:
        likeness = self.likeness(response, item.meta["lists"][0])
        correct = float(likeness == 1.0)
        return Grade(correct, {"correct": correct, "likeness": likeness})

    def alphabet(self) -> str | None:
        return None if self._words else f"{''.join(LETTERS)}+="


class HigherLowerTask(Task):
    """Numbers of `digits` digits, leading zeros included; the question says how many.

    The question does not depend on the number, so both splits draw from all of them. One kept for
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
