"""The plan of a run and its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import UserError
from rlcore.loop.specs import (
    CheckpointSpec,
    Phases,
    ScheduleSpec,
    ShareSpec,
    SupervisionSpec,
    TargetSpec,
)
from rlcore.loop.targets import PageRange


@dataclass(frozen=True, slots=True)
class Plan:
    """A run as the loop sees it: specifications, and single settings of others.

    Example: Plan(ScheduleSpec(steps=20), SupervisionSpec(), CheckpointSpec(),
    request_timeout_s=600, samples_per_step=4, verify_full=False)
    """

    schedule: ScheduleSpec
    supervision: SupervisionSpec
    checkpoint: CheckpointSpec
    request_timeout_s: float  # rollout.request_timeout_s
    samples_per_step: int  # logging.samples_per_step
    verify_full: bool  # cluster.verify_weights is "full"
    shares: Mapping[str, ShareSpec] = field(default_factory=dict)  # actor.LABEL.share by label
    mixed_groups: bool = False  # rollout.group_kinds is "mixed"
    targets: Mapping[str, TargetSpec] = field(default_factory=dict)  # actor.LABEL.target by label
    # of sparse actors whose budget goes by position, by label
    pages: Mapping[str, PageRange] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)  # actor.LABEL.precise_layers by label
    prices: Mapping[str, float] = field(default_factory=dict)  # actor.LABEL.price by label

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.schedule.steps

    @property
    def synchronous(self) -> bool:
        """True if generation and learning take turns."""
        return self.schedule.synchronous

    @property
    def own_age(self) -> int:
        """Steps of staleness that publishes and phases bring, besides schedule.max_staleness."""
        return max(self.schedule.publish_period, self.phases.steps) - 1

    @property
    def phases(self) -> Phases:
        """The update phases; p_ref is fixed at the start of each."""
        return self.schedule.phases

    @property
    def total_groups(self) -> int:
        """Groups to admit over the whole plan: whole phases, so that extending the run later
        continues exactly."""
        phases = -(-self.steps // self.phases.steps)
        return phases * self.phases.batches * self.schedule.groups_per_step

    def phase_end(self, step: int) -> int:
        """The first step after the phase that `step` is in, or the end of the run within it."""
        return min(self.phases.end(step), self.steps)

    def publishes_after(self, step: int) -> bool:
        """Return whether the weights after `step` optimizer steps are published."""
        return step % self.schedule.publish_period == 0 or step == self.steps

    def check_resume(self, progress: Progress) -> None:
        """Raises UserError for a schedule that a checkpoint's run cannot go on with.

        Its batches and the groups that it has admitted are counted by its epochs. The rest of a
        phase trains on groups that the earlier staleness bound has chosen. A synchronous run
        publishes the phase's first weights again, which groups in flight may be newer than.
        """
        before, now = Phases(progress.phase_batches, progress.phase_epochs), self.phases
        if progress.step and before != now and max(before.epochs, now.epochs) > 1:
            raise UserError(
                f"schedule.epochs={now.epochs} with {now.batches} batches a phase "
                "(schedule.steps_per_phase) is not what the run has had up to step "
                f"{progress.step}: resume with epochs={before.epochs} and "
                f"steps_per_phase={before.batches}, or start another run_dir."
            )

        eta = self.schedule.max_staleness
        if eta < progress.max_staleness and self.within_phase(progress):
            raise UserError(
                f"schedule.max_staleness={eta} cannot begin at step {progress.step}, within an "
                f"update phase that was begun with {progress.max_staleness}: resume with at least "
                f"{progress.max_staleness} up to step {before.end(progress.step)}."
            )

    def within_phase(self, progress: Progress) -> bool:
        """Return whether the next step is not the first of its phase, so that its p_ref is
        older."""
        if progress.in_phase is None:
            return bool(progress.step % self.phases.steps)
        return progress.in_phase


SETTLED = 1000  # steps before a run's first: nothing was held yet


@dataclass(slots=True)
class Progress:
    """Progress of the run: the loop's part of a checkpoint."""

    step: int = 0  # optimizer steps done = learner version
    published: int = -1  # version proven on every healthy actor
    phase_version: int = 0  # version at the start of the update phase: p_ref of a longer phase
    phase_batches: int = 1  # M and E of these phases
    phase_epochs: int = 1
    max_staleness: int = 0  # eta of these phases
    in_phase: bool | None = None  # the next step is within a phase; None: as the plan's phases say
    evaluated: int = -1  # last step whose evaluation was started
    seconds: float = 0.0  # of training, over all sessions
    # values of checkpoint.keep_best's metric, by its name and the version that was evaluated: a run
    # may be resumed with another one
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    kinds: dict[str, Any] = field(default_factory=dict)  # `KindShares.state`
    targets: dict[str, Any] = field(default_factory=dict)  # `SetPoints.state`
    alarm: int | None = None  # step of the first alarm about the policy, until it is over
    held: int = -SETTLED  # step at which samples were last given up (`loop/collapse.py`)
