"""Which groups a step trains on: FIFO by deadline, uniform with replay, or by task. Whole groups
only.

Uniform and by_task may leave a group unused until its deadline; there `max_staleness` is a hard
cap, and such groups are evicted with reason "stale". With eta = 0 they draw only from the complete
pool of a publish (nothing in flight, no room for more), so that the draw depends on the seed alone.
If `cluster.buffer_mib` limits admission, the pool depends on record sizes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from rlcore.buffer.admission import StalenessBound
from rlcore.buffer.specs import BatchingSpec, TaskShare
from rlcore.buffer.waiting import Candidate, Waiting
from rlcore.seeding import derive_seed

# A task without a weight is used only when no other task has groups waiting.
UNNAMED_WEIGHT = 1e-9


class Sampler:
    """Draws batches of G groups. `drawn` (groups per task so far) is its only state and part of a
    checkpoint.

    tasks: shares by task, the part of prompt_id before the first "/"; None: equal; a task that is
    not named, or has the weight 0, comes last. Raises ValueError for a negative weight.
    """

    def __init__(
        self,
        bound: StalenessBound,
        batching: BatchingSpec,
        run_seed: int,
        tasks: Mapping[str, TaskShare] | None,
    ) -> None:
        weights = None if tasks is None else {name: t.weight for name, t in tasks.items()}
        if weights is not None and any(w < 0 for w in weights.values()):
            raise ValueError(f"weights of tasks must not be negative: {weights}")
        self._bound = bound
        self._order = batching.sampling
        self._run_seed = run_seed
        self.weights = weights
        self.drawn: Counter[str] = Counter()
        # (what waited, which task had no finished group, how many it had): until one of these is
        # another, there is no batch
        self._lacked: tuple[int, str, int] | None = None

    @property
    def hard_cap(self) -> bool:
        """Whether groups may pass their deadline unused and must then be evicted."""
        return self._order != "fifo"

    def draw(self, waiting: Waiting, step: int, *, pool_complete: bool) -> list[int] | None:
        """Ids for `step`, ascending, or None. `pool_complete`: nothing in flight and no room for
        more groups."""
        if self._order == "fifo":
            return self._bound.release(waiting, step, strict=self._bound.synchronous)
        if self._bound.synchronous and not pool_complete:
            return None
        if waiting.finished < self._bound.groups_per_step:
            return None
        if self._order == "by_task":
            return self._by_task(waiting)
        return self._uniform([c for c in waiting.candidates() if c.finished], step)

    def confirm(self, tasks: Sequence[str], sign: int = 1) -> None:
        """Count a taken batch towards the shares of its tasks; sign -1 takes it back."""
        self._lacked = None
        for task in tasks:
            self.drawn[task] += sign

    def restore(self, drawn: Mapping[str, int], weights: Mapping[str, float] | None) -> None:
        """Continue from a checkpoint. Under other weights than before (`weights`), shares are
        counted anew: else a task would first make up for what it had not been due."""
        self._lacked = None
        self.drawn = Counter(drawn if weights == self.weights else {})

    def _uniform(self, pool: Sequence[Candidate], step: int) -> list[int]:
        generator = np.random.default_rng(derive_seed(self._run_seed, "buffer_draw", step))
        picked = generator.choice(len(pool), self._bound.groups_per_step, replace=False)
        return sorted(pool[i].group_id for i in picked.tolist())

    def _by_task(self, waiting: Waiting) -> list[int] | None:
        """Each place goes to the task furthest behind its share; a task without waiting groups is
        skipped."""
        if self._lacked is not None:
            changes, task, finished = self._lacked
            if (waiting.changes, waiting.finished_of[task]) == (changes, finished):
                return None
        left: Counter[str] = Counter()
        queues: dict[str, deque[int]] = {}
        for c in sorted(waiting.candidates(), key=lambda c: (c.deadline, c.group_id)):
            left[c.task] += 1
            if c.finished:
                queues.setdefault(c.task, deque()).append(c.group_id)
        drawn = Counter(self.drawn)
        batch: list[int] = []
        while len(batch) < self._bound.groups_per_step:
            tasks = [t for t, count in left.items() if count]
            if not tasks:
                return None
            task = min(tasks, key=lambda t: ((drawn[t] + 1) / self._weight(t), t))
            if not queues.get(task):  # its groups are in flight
                self._lacked = waiting.changes, task, waiting.finished_of[task]
                return None
            batch.append(queues[task].popleft())
            left[task] -= 1
            drawn[task] += 1
        return sorted(batch)

    def _weight(self, task: str) -> float:
        return 1.0 if self.weights is None else self.weights.get(task) or UNNAMED_WEIGHT
