"""The base of tasks whose problems are computed from an index, without stored or downloaded
data."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache

from rlcore.interfaces import Split, Task
from rlcore.seeding import derive_seed, golden_point
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import integer
from rlcore.types import Grade, Item

HELDOUT_ONE_IN = 10
ROUNDS = 4  # of the Feistel network: enough for an order without visible structure


# Finite spaces of generated problems, cut into train and heldout by a bijection.
#
# A space is a union of strata (for example: numbers of 4, of 5, ... digits), each a range of ranks.
# A keyed permutation that depends on the stratum alone orders its ranks; the last tenth of that
# order is heldout. So a problem is on the same side for every seed and for every range of
# difficulty, no problem is on both, and distinct indices give distinct problems until a side is
# used up. The task's seed permutes within a side.
#
# Indices go over the strata in rounds, each stratum once. The order of a round spreads every
# stretch of it over all strata: a batch is a mixture of what the task asks, and not a slice.


class Permutation:
    """A keyed bijection of [0, size): a four-round Feistel network, walked until it lands inside
    the range."""

    def __init__(self, size: int, *key: int | str) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._key = derive_seed(0, "permutation", *key).to_bytes(8, "big")

    def __call__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is outside [0, {self._size})")
        while True:
            index = self._encipher(index)
            if index < self._size:
                return index

    def _encipher(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for turn in range(ROUNDS):
            text = bytes([turn]) + right.to_bytes(16, "big")
            digest = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & self._mask)
        return left << self._half | right


class ProblemSpace:
    """`strata` maps a stratum's name to its number of problems; the name must mean the same
    problems everywhere."""

    def __init__(self, task: str, strata: Mapping[str, int], seed: int) -> None:
        names = list(strata)
        sizes = list(strata.values())
        held = [
            size // HELDOUT_ONE_IN if size >= HELDOUT_ONE_IN else int(size > 1) for size in sizes
        ]
        self._train = [size - h for size, h in zip(sizes, held, strict=True)]
        self._sides: dict[Split, _Side] = {
            "train": _Side(self._train, derive_seed(seed, "strata", task, "train")),
            "heldout": _Side(held, derive_seed(seed, "strata", task, "heldout")),
        }
        self._order = [
            Permutation(size, "split", task, name) for name, size in zip(names, sizes, strict=True)
        ]
        self._shuffle = {
            (split, i): Permutation(count, "order", task, names[i], split, seed)
            for split, side in self._sides.items()
            for i, count in enumerate(side.counts)
        }

    def size(self, split: Split) -> int:
        """Distinct problems of a split."""
        return self._sides[split].total

    def locate(self, split: Split, index: int) -> tuple[int, int]:
        """(stratum, rank within it) of problem `index`; indices past the end of the split start
        again."""
        if index < 0:
            raise IndexError(f"problem index {index} is negative")
        stratum, place = self._sides[split].place(index)
        place = self._shuffle[split, stratum](place)
        return stratum, self._order[stratum](
            place + (self._train[stratum] if split == "heldout" else 0)
        )


class _Side:
    """Assigns indices to strata, each once a round; a stratum that is used up is skipped."""

    def __init__(self, counts: list[int], seed: int) -> None:
        self.counts = counts
        self._seed = seed
        self.total = sum(counts)
        self._starts: list[int] = []
        self._rounds: list[tuple[int, list[int]]] = []
        start = done = 0
        for level in sorted({count for count in counts if count}):
            active = [i for i, count in enumerate(counts) if count >= level]
            self._starts.append(start)
            self._rounds.append((done, active))
            start += (level - done) * len(active)
            done = level

    def place(self, index: int) -> tuple[int, int]:
        index %= self.total
        segment = bisect_right(self._starts, index) - 1
        done, active = self._rounds[segment]
        turn, which = divmod(index - self._starts[segment], len(active))
        return active[mixed(len(active), self._seed, done + turn)[which]], done + turn


@lru_cache(maxsize=64)
def mixed(count: int, seed: int, number: int) -> tuple[int, ...]:
    """The order of `count` strata in round `number`: ranks of golden points, so that every stretch
    of it has low, middle and high strata equally."""
    start = derive_seed(seed, "round", number)
    points = [golden_point(start, i) for i in range(count)]
    ranks = {point: rank for rank, point in enumerate(sorted(points))}
    return tuple(ranks[point] for point in points)


class ProceduralTask(Task, ABC):
    """Problems generated from (split, index). The train split is unlimited: after its last problem
    it starts again. The heldout split has every problem of its side once."""

    name: str

    def __init__(self, strata: Mapping[str, int], seed: int) -> None:
        """strata: problems of each kind, see `ProblemSpace`. seed: order of the problems."""
        self._space = ProblemSpace(self.name, strata, integer("seed", seed, 0, 2**63 - 1))

    @abstractmethod
    def problem(self, stratum: int, rank: int) -> Item:
        """Problem `rank` of a stratum, its prompt_id left empty. Distinct (stratum, rank) give
        distinct questions."""

    @abstractmethod
    def grade(self, item: Item, response: str) -> Grade:
        """See `rlcore.interfaces.Task`."""

    def size(self, split: Split) -> int | None:
        return None if split == "train" else self._space.size(split)

    def item(self, split: Split, index: int) -> Item:
        problem = self.problem(*self._space.locate(split, index))
        return Item(
            format_prompt_id(self.name, split, index),
            problem.question,
            problem.answer,
            problem.meta,
        )

    def worked_answer(self, item: Item) -> str | None:
        return item.answer
