"""Settings of admission, sampling and selection. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from rlcore.spec import Spec, Unread, refuse, setting


@dataclass(frozen=True, slots=True)
class Phases:
    """The update phases of a run, on the clock of optimizer steps. All code counts phases by this
    class.

    Phase k has M*E steps, k*M*E and those after it. It takes M batches, one p_ref is computed for
    all of them before its first step, and step k*M*E + e*M + j trains on batch j in epoch e. The
    batches and their order are the same in every epoch, so that M steps lie between two uses of a
    batch, and nothing is drawn at random.

    Example: Phases(batches=2, epochs=2) trains on the batches a b a b | c d c d | ...
    """

    batches: int  # M
    epochs: int  # E

    @property
    def steps(self) -> int:
        """Optimizer steps of a phase."""
        return self.batches * self.epochs

    def start(self, step: int) -> int:
        """The first step of the phase that `step` is in."""
        return step - step % self.steps

    def end(self, step: int) -> int:
        """The first step after that phase."""
        return self.start(step) + self.steps

    def first(self, step: int) -> int:
        """The step of the phase that trains on the batch of `step` first."""
        return self.start(step) + step % self.steps % self.batches

    def again(self, step: int) -> range:
        """The later steps of the phase that train on the batch of `step` again."""
        return range(step + self.batches, self.end(step), self.batches)

    @property
    def repeats(self) -> int:
        """Steps between the first and the last use of a batch."""
        return self.steps - self.batches

    def batches_before(self, step: int) -> int:
        """Batches whose first use comes before `step`."""
        phases, within = divmod(max(0, step), self.steps)
        return phases * self.batches + min(within, self.batches)

    def first_use(self, batch: int) -> int:
        """The step that trains on the run's batch of this number, from 0, for the first time."""
        phase, within = divmod(batch, self.batches)
        return phase * self.steps + within


class BatchingSpec(Spec):
    """The choice of the groups that a step trains on, and their maximum age
    (`buffer/admission.py`)."""

    groups_per_step: int = setting(64, "prompts trained on in one optimizer step", gt=0)
    steps_per_publish: int = setting(
        1, "H: optimizer steps between publishes; with max_staleness=0 never within a phase", gt=0
    )
    steps_per_phase: int | None = setting(
        None,
        "M: batches that share one p_ref; a phase is M*epochs optimizer steps over "
        "M*groups_per_step groups; null: steps_per_publish with max_staleness=0, else 1",
        gt=0,
    )
    epochs: int = setting(
        1, "E: times that a phase trains on each of its groups, in the same order", gt=0
    )
    max_staleness: int = setting(
        0,
        "eta: staleness allowed beyond max(H, M*E) - 1, which publishes and phases bring",
        unit="optimizer steps",
        ge=0,
    )
    lag: int | None = setting(
        None,
        "every batch is exactly so old, from this step on: weights are loaded only when all that "
        "was admitted under those before is sampled; max_staleness follows it; null: off",
        unit="optimizer steps",
        gt=0,
    )
    sampling: Literal["fifo", "uniform", "by_task"] = setting(
        "fifo", "order in which groups are trained on"
    )
    max_uses: int = setting(1, "uniform: times a group may be trained on", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _follows_lag(cls, data: Any) -> Any:
        lag = data.get("lag") if isinstance(data, Mapping) else None
        return data if lag is None else {"max_staleness": lag, **data}

    @property
    def synchronous(self) -> bool:
        """True if generation and learning take turns (eta = 0)."""
        return self.max_staleness == 0

    @property
    def phases(self) -> Phases:
        """The update phases, each with one p_ref."""
        batches = self.steps_per_phase
        if batches is None:
            batches = self.steps_per_publish if self.synchronous else 1
        return Phases(batches, self.epochs)

    @property
    def publish_period(self) -> int:
        """Optimizer steps between publishes. With eta = 0 nothing is drawn within a phase, so that
        no weights are published there either."""
        if self.synchronous:
            return max(self.steps_per_publish, self.phases.steps)
        return self.steps_per_publish

    def check(self, key: str) -> None:
        steps, period = self.phases.steps, self.steps_per_publish
        refuse(
            bool(steps % period and period % steps),
            f"{key}.steps_per_publish={period} and a phase of {steps} steps "
            f"({key}.steps_per_phase={self.phases.batches} x {key}.epochs={self.epochs}) do not "
            "divide one another, so that publishes would fall at changing places of a phase: make "
            "one of them a multiple of the other.",
        )
        refuse(
            self.epochs > 1 and self.max_uses > 1,
            f"{key}.epochs={self.epochs} with {key}.max_uses={self.max_uses} would repeat groups "
            "in two ways: keep one of them at 1.",
        )
        refuse(
            self.max_uses > 1 and self.sampling != "uniform",
            f"{key}.max_uses={self.max_uses} needs {key}.sampling=uniform: {self.sampling} takes "
            "every group once.",
        )
        if self.lag is not None:
            self._check_lag(key)

    def _check_lag(self, key: str) -> None:
        """A batch has one age only if each is sampled under one version, and trained on once."""
        needed = {
            "max_staleness": self.lag,
            "steps_per_publish": 1,
            "steps_per_phase": 1,
            "epochs": 1,
            "sampling": "fifo",
        }
        found = {name: getattr(self, name) for name in needed}
        found["steps_per_phase"] = self.phases.batches
        for name, value in needed.items():
            refuse(
                found[name] != value,
                f"{key}.{name}={found[name]} cannot be combined with {key}.lag={self.lag}, which "
                f"has every batch exactly {self.lag} steps old: use {name}={value}, or lag=null.",
            )


@dataclass(frozen=True, slots=True)
class TaskShare:
    """The buffer's settings of one training task, in a run that distinguishes tasks. Example:
    TaskShare(8, 2.0)"""

    samples: int  # of a group
    weight: float = 1.0  # of sampling=by_task; 0: only when no other task has groups waiting
    remember: bool = False  # note the pass rate of every group that arrives


class SelectionSpec(Spec):
    """The selection of the samples of a finished group that are trained on."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("filter_limit",),
            lambda spec: not spec.dynamic_sampling,
            "dynamic_sampling=false filters nothing",
        ),
    )

    dynamic_sampling: bool = setting(
        False, "groups with all-equal rewards are filtered and replaced"
    )
    filter_limit: int = setting(
        1000,
        "dynamic_sampling: a task of which so many groups in a row are filtered ends the run",
        unit="groups",
        gt=0,
    )
    train_on_best: int | None = setting(
        None, "oversampling: train on the n best samples of each group", gt=0
    )
    train_on_best_by: Literal["reward", "acceptance"] = setting(
        "reward", "what makes them the best; acceptance: of their tokens by the learner's policy"
    )

    @property
    def kept_by_learner(self) -> int | None:
        """Samples of a group that the learner chooses by its own log-probs; None: the buffer
        does."""
        return self.train_on_best if self.train_on_best_by == "acceptance" else None

    def check(self, key: str) -> None:
        refuse(
            self.train_on_best_by == "acceptance" and self.train_on_best is None,
            f"{key}.train_on_best_by=acceptance has nothing to choose: set {key}.train_on_best, or "
            "leave it reward.",
        )
        refuse(
            self.train_on_best_by == "acceptance" and self.dynamic_sampling,
            f"{key}.dynamic_sampling=true filters by the rewards that would be trained on, which "
            f"{key}.train_on_best_by=acceptance decides only later, in the learner: use one or the "
            "other.",
        )
        refuse(
            self.dynamic_sampling and self.train_on_best == 1,
            f"{key}.train_on_best=1 with {key}.dynamic_sampling=true would filter every group, "
            "since the rewards of one sample are all equal: keep 2 or more.",
        )
