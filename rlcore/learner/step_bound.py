"""The step bound in a rank: measures each batch, and shortens or holds its step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from rlcore.corrections.step_bound import StepBound, drift_accumulate, drift_values
from rlcore.files import replace_file
from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch
from rlcore.learner.parts.part import LearnerPart
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.state_files import Schedule

FILE = "step_bound.json"  # of a saved state
OTHER = "other"  # kind of records of actors that the run no longer has


class Bounded(NamedTuple):
    """A step as the bound allows it. Example: Bounded(0.2, False, {"step_bound/scale": 0.2})"""

    scale: float
    held: bool  # it is not taken
    metrics: dict[str, float]


class BoundedSteps(LearnerPart):
    """`StepBound` over the batches of a run. Collective: every rank has the same state."""

    def __init__(
        self,
        bound: float | None,
        kinds: Sequence[str],
        *,
        follows: bool,
        first: float | None = None,
    ) -> None:
        """`bound`: learner.step_bound. `kinds`: labels of the run's actors, where they are of
        several kinds. `follows`: p_ref is the policy as each step begins, not as its phase does.
        `first`: the largest rate before a batch can show what a step did; None: any."""
        self._labels = (*kinds, OTHER) if kinds else ("",)
        self._rule = StepBound(bound, self._labels, first=first)
        self._follows = follows
        self._since = 0  # version of p_ref
        self._last = 0.0  # learning rate of the last step

    def scale(
        self,
        batch: StepBatch,
        step: int,
        engine: TrainEngine,
        reduce: Reduce,
        *,
        first: bool,
        wanted: float = 1.0,
    ) -> Bounded:
        """The factor of step `step`, whose batch has been scored. `first` of its update phase;
        `wanted`: the factor that corrections ask for."""
        if first or self._follows:
            self._since = step
        sent, ref = batch.sent, batch.ref
        if ref is None:
            raise RuntimeError("a step is bounded before its batch has been scored")
        age = torch.where(sent.mask, self._since - sent.token_version.long(), 0)
        count = len(self._labels)
        statistics = drift_accumulate(
            ref.logp,
            sent.logp_inf,
            sent.mask,
            age,
            inside=ref.inside,
            kinds=sent.kinds,
            groups=sent.group_ids,
            count=count,
        )
        drift = drift_values(reduce(statistics), count)
        rate = self._last if self._rule.bound is None else engine.rate() * wanted
        found, metrics = self._rule.scale(step, rate, drift, since=self._since)
        named = {f"step_bound/{name}": value for name, value in metrics.items()}
        return Bounded(found, found == 0.0, named)

    def took(self, step: int, rate: float) -> None:
        """Note the learning rate that a step has had."""
        self._rule.took(step, rate)
        self._last = rate

    def save(self, folder: Path, schedule: Schedule) -> None:
        """Write the state; by one rank."""
        state = {**self._rule.state(), "since": self._since, "last": self._last}
        schedule(partial(folder.mkdir, parents=True, exist_ok=True))
        schedule(partial(replace_file, folder / FILE, json.dumps(state)))

    def load(self, folder: Path) -> None:
        """Continue from `save`. A state that an earlier version has written says nothing: steps
        before it count with the rate of the next one."""
        file = folder / FILE
        if file.is_file():
            state = json.loads(file.read_text())
            self._since, self._last = int(state.pop("since")), float(state.pop("last"))
            self._rule.load(state)
