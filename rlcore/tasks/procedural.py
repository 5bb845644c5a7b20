"""The base of tasks whose problems are computed from an index, so that nothing has to be stored or
downloaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from rlcore.interfaces import Split, Task
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import integer
from rlcore.tasks.problem_space import ProblemSpace
from rlcore.types import Grade, Item


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
