"""Training prompts of several tasks: which task comes next, and which of its problems.

The task of draw n is a function of (run seed, n, weights): the point `frac(u + n * phi)`, phi the
golden ratio, falls into one of intervals whose lengths are the tasks' shares. Points of that
sequence are spread so evenly (Kronecker; discrepancy O(log n / n)) that every stretch of draws, the
batches of single steps among them, has nearly the shares of the whole. The point is kept in
integers modulo 2^64, so that it is exact for every n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rlcore.errors import UserError
from rlcore.loop.prompts import Outcome, PromptSource
from rlcore.seeding import derive_seed
from rlcore.types import Item

CIRCLE = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # CIRCLE / phi, odd: n * GOLDEN has no short period


class TaskOrder:
    """Labels in the order in which prompts are drawn: random access by number."""

    def __init__(self, weights: Mapping[str, float], run_seed: int) -> None:
        """Raises ValueError unless some weight is positive and none is negative."""
        total = sum(weights.values())
        if min(weights.values(), default=0.0) < 0 or not total > 0:
            raise ValueError(f"weights of tasks must not be negative, nor all 0: {dict(weights)}")
        drawn = {label: weight for label, weight in weights.items() if weight > 0}
        self._labels = list(drawn)
        # the last bound is the whole circle, whatever rounding did
        ends = [int(end / total * CIRCLE) for end in accumulate(drawn.values())]
        self._ends = [*ends[:-1], CIRCLE]
        self._start = derive_seed(run_seed, "mixture") << 1

    def label(self, number: int) -> str:
        """The task of draw `number`, from 0."""
        point = (self._start + number * GOLDEN) % CIRCLE
        return next(label for label, end in zip(self._labels, self._ends) if point < end)


class Mixture:
    """Walks several tasks, each by a cursor of its own."""

    def __init__(
        self, sources: Mapping[str, PromptSource], weights: Mapping[str, float], *, run_seed: int
    ) -> None:
        """`sources` and `weights` by label; a task of weight 0 is never drawn."""
        self.sources = dict(sources)
        self.drawn = 0  # prompts so far
        self._weights = dict(weights)
        self._order = TaskOrder(weights, run_seed)

    def source(self, prompt_id: str) -> PromptSource:
        """The source of the task that a prompt is of."""
        return self.sources[prompt_id.partition("/")[0]]

    def peek(self, count: int) -> list[Item]:
        """The next `count` items; nothing moves."""
        labels = self._labels(count)
        ahead = {label: iter(self.sources[label].peek(labels.count(label))) for label in {*labels}}
        return [next(ahead[label]) for label in labels]

    def advance(self, count: int) -> None:
        """Move on over `count` items."""
        labels = self._labels(count)
        for label in dict.fromkeys(labels):
            self.sources[label].advance(labels.count(label))
        self.drawn += count

    def next(self) -> Item:
        """The next item; moves on."""
        item = self.peek(1)[0]
        self.advance(1)
        return item

    def _labels(self, count: int) -> list[str]:
        return [self._order.label(self.drawn + i) for i in range(count)]

    def another_walk(self, *, run_seed: int, max_prompt_tokens: int) -> Mixture:
        """The same tasks, from the beginning."""
        sources = {
            label: source.another_walk(
                run_seed=task_seed(run_seed, label), max_prompt_tokens=max_prompt_tokens
            )
            for label, source in self.sources.items()
        }
        return Mixture(sources, self._weights, run_seed=run_seed)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "drawn": self.drawn,
            "tasks": {label: source.state() for label, source in self.sources.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. With other weights, the next draws follow them; a task that is
        new begins with its first prompt. Raises UserError where a task is missing: groups of it
        may be in flight, and a run that says what it was trained on must go on saying so."""
        now = ",".join(self.sources)
        if "tasks" not in state:
            raise UserError(
                f"task=[{now}] cannot continue a run with a single task: resume with that one, or "
                "start another run_dir, with model.path=FOLDER of an export of this run."
            )
        missing = [label for label in state["tasks"] if label not in self.sources]
        if missing:
            raise UserError(
                f"task=[{now}] lacks {' and '.join(missing)}, which this run has trained on: keep "
                f"it and set task.{missing[0]}.weight=0 to draw no more prompts of it, or start "
                "another run_dir."
            )
        self.drawn = int(state["drawn"])
        for label, saved in state["tasks"].items():
            self.sources[label].restore(saved)

    def begin_anew(self) -> None:
        """Return to the first prompt, and remember nothing."""
        self.drawn = 0
        for source in self.sources.values():
            source.begin_anew()

    @property
    def remembers(self) -> bool:
        """Whether pass rates of some task are wanted."""
        return any(source.remembers for source in self.sources.values())

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Remember the pass rates of groups that have arrived."""
        for prompt_id, rate in outcomes:
            self.source(prompt_id).observe([(prompt_id, rate)])

    def metrics(self) -> dict[str, float]:
        """`task/<task>/<count>` of what is remembered."""
        return {n: v for source in self.sources.values() for n, v in source.metrics().items()}


def task_seed(run_seed: int, label: str) -> int:
    """Seed of one task's walk: two labels of the same data must not walk it in step."""
    return derive_seed(run_seed, "task", label)
