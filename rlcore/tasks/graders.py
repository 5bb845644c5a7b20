"""The graders of a run: each training task has its own processes, deadline and memory limit,
so that a slow grader does not hold up the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcore.tasks import parse_prompt_id
from rlcore.tasks.scoring import Scored, Scorer
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.types import Answer

if TYPE_CHECKING:
    from rlcore.tasks.rewards.weighted import WeightedScorer


@dataclass(frozen=True, slots=True)
class GraderPool:
    """Tasks that the same processes grade, by label.

    Example: GraderPool({"digits": EvalTaskSpec(name="digits")}, GradingSpec())
    """

    tasks: Mapping[str, EvalTaskSpec]
    grading: GradingSpec
    # config keys of tasks by label, for the sentences of their rewards
    keys: Mapping[str, str] = field(default_factory=dict)


def make_scorer(
    tasks: Mapping[str, EvalTaskSpec],
    grading: GradingSpec,
    *,
    on_scored: Callable[[Scored], None],
    note: Callable[[str], None],
    keys: Mapping[str, str] | None = None,
) -> Scorer | WeightedScorer:
    """The scorer that the tasks need."""
    if any(task.weighed for task in tasks.values()):
        from rlcore.tasks.rewards.weighted import WeightedScorer

        return WeightedScorer(tasks, grading, on_scored=on_scored, note=note, keys=keys)
    return Scorer(tasks, grading, on_scored=on_scored)


class Graders:
    """A `Scorer` for each pool; answers go to the one that knows their task."""

    def __init__(
        self,
        pools: Sequence[GraderPool],
        *,
        on_scored: Callable[[Scored], None],
        note: Callable[[str], None],
    ) -> None:
        """`on_scored`, `note`: see `WeightedScorer`; calls of different pools may overlap."""
        self._scorers: list[Scorer | WeightedScorer] = []
        self._by_label: dict[str, Scorer | WeightedScorer] = {}
        try:
            for pool in pools:
                scorer = make_scorer(
                    pool.tasks, pool.grading, on_scored=on_scored, note=note, keys=pool.keys
                )
                self._scorers.append(scorer)
                self._by_label |= dict.fromkeys(pool.tasks, scorer)
        except BaseException:
            self.close()
            raise

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queue answers; returns at once. Raises ValueError for a prompt id of no known task."""
        by_scorer: dict[int, list[Answer]] = {}
        for answer in answers:
            label, _, _ = parse_prompt_id(answer.prompt_id)
            if label not in self._by_label:
                known = ", ".join(self._by_label)
                raise ValueError(f"{answer.prompt_id}: no task is labelled {label!r}, only {known}")
            by_scorer.setdefault(self._scorers.index(self._by_label[label]), []).append(answer)
        for place, its in by_scorer.items():
            self._scorers[place].submit(its)

    def check(self) -> None:
        """Raise StageError if one of the scorers has failed for good."""
        for scorer in self._scorers:
            scorer.check()

    def close(self) -> None:
        """Stop all at once; raises the first error when all are stopped."""
        errors = []
        for scorer in self._scorers:
            try:
                scorer.close()
            except Exception as error:  # of any kind: the others must be closed as well
                errors.append(error)
        if errors:
            raise errors[0]
