"""Which groups a step trains on: FIFO by deadline, uniform with replay, or by task. Whole groups only.

Uniform and by_task may leave a group lying past its deadline; there `max_staleness` is a hard cap, and the store
evicts such groups with reason "stale". With eta = 0 they draw only from the complete pool of a publish (nothing in
flight, no room for more), so that the draw depends on the seed alone. If `cluster.buffer_mib` is what closes the room,
the pool itself depends on sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from rlcore.buffer.admission import Candidate, StalenessBound
from rlcore.errors import UserError
from rlcore.seeding import derive_seed

Policy = Literal["fifo", "uniform", "by_task"]


class Sampler:
    """Draws batches of G groups. `drawn` (groups per task so far) is its only state and part of a checkpoint.

    `max_uses`: steps that may train on one group (uniform only). `task_weights`: shares by task, the part of prompt_id
    before the first "/"; None: equal; a task not named comes last. Raises UserError for a policy or max_uses that
    makes no sense, ValueError for a weight that is not positive.
    """

    def __init__(
        self,
        bound: StalenessBound,
        policy: Policy,
        run_seed: int,
        max_uses: int = 1,
        task_weights: Mapping[str, float] | None = None,
    ) -> None:
        if policy not in get_args(Policy):
            raise UserError.choice("schedule.sampling", policy, get_args(Policy))
        if max_uses != 1 and policy != "uniform":
            why = f"schedule.sampling={policy} trains on a group once"
            raise UserError.choice("schedule.max_uses", max_uses, ["1", "schedule.sampling=uniform"], why)
        if task_weights is not None and not all(w > 0 for w in task_weights.values()):
            raise ValueError(f"task weights must be positive: {dict(task_weights)}")
        self.bound = bound
        self.policy = policy
        self.run_seed = run_seed
        self.max_uses = max_uses
        self.task_weights = dict(task_weights) if task_weights is not None else None
        self.drawn: Counter[str] = Counter()

    @property
    def hard_cap(self) -> bool:
        """Whether groups may pass their deadline unused and must then be evicted."""
        return self.policy != "fifo"

    def draw(self, waiting: Sequence[Candidate], step: int, *, pool_complete: bool) -> list[int] | None:
        """Ids for `step`, ascending, or None. `pool_complete`: nothing in flight and no room for more groups."""
        if self.policy == "fifo":
            return self.bound.release(waiting, step, strict=self.bound.synchronous)
        if self.bound.synchronous and not pool_complete:
            return None
        pool = sorted((c for c in waiting if c.finished), key=lambda c: c.group_id)
        if len(pool) < self.bound.groups_per_step:
            return None
        return self._uniform(pool, step) if self.policy == "uniform" else self._by_task(waiting)

    def confirm(self, tasks: Sequence[str], sign: int = 1) -> None:
        """Count a taken batch towards the shares of its tasks; sign -1 takes it back."""
        for task in tasks:
            self.drawn[task] += sign

    def _uniform(self, pool: Sequence[Candidate], step: int) -> list[int]:
        generator = np.random.default_rng(derive_seed(self.run_seed, "buffer_draw", step))
        picked = generator.choice(len(pool), self.bound.groups_per_step, replace=False)
        return sorted(pool[i].group_id for i in picked.tolist())

    def _by_task(self, waiting: Sequence[Candidate]) -> list[int] | None:
        """Each place goes to the task furthest behind its share; a task with nothing waiting passes its turn on."""
        queues: dict[str, list[Candidate]] = {}
        for c in sorted(waiting, key=lambda c: (c.deadline, c.group_id)):
            queues.setdefault(c.task, []).append(c)
        drawn = Counter(self.drawn)
        batch: list[int] = []
        while len(batch) < self.bound.groups_per_step:
            tasks = [t for t, queue in queues.items() if queue]
            if not tasks:
                return None
            task = min(tasks, key=lambda t: ((drawn[t] + 1) / self._weight(t), t))
            ready = next((c for c in queues[task] if c.finished), None)
            if ready is None:  # its groups are on their way
                return None
            queues[task].remove(ready)
            drawn[task] += 1
            batch.append(ready.group_id)
        return sorted(batch)

    def _weight(self, task: str) -> float:
        return 1.0 if self.task_weights is None else self.task_weights.get(task, 1e-9)
