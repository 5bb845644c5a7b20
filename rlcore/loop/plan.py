"""The plan of a run and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore.loop.specs import CheckpointSpec, ScheduleSpec, SupervisionSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """A run as the loop sees it: specifications, and the few single settings it needs of others.

    Example: Plan(ScheduleSpec(steps=20), SupervisionSpec(), CheckpointSpec(),
    request_timeout_s=600, samples_per_step=4, verify_full=False)
    """

    schedule: ScheduleSpec
    supervision: SupervisionSpec
    checkpoint: CheckpointSpec
    request_timeout_s: float  # rollout.request_timeout_s
    samples_per_step: int  # logging.samples_per_step
    verify_full: bool  # cluster.verify_weights is "full"

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.schedule.steps

    @property
    def synchronous(self) -> bool:
        """Whether generation and learning take turns."""
        return self.schedule.synchronous

    @property
    def phase_steps(self) -> int:
        """Steps of one update phase: p_ref is fixed at its start. One rollout phase per publish
        when synchronous."""
        return self.schedule.steps_per_publish if self.synchronous else 1

    @property
    def total_groups(self) -> int:
        """Groups to admit over the whole plan: whole phases, so that extending the run later
        continues exactly."""
        phases = -(-self.steps // self.phase_steps)
        return phases * self.phase_steps * self.schedule.groups_per_step

    def phase_end(self, step: int) -> int:
        """The first step after the phase that `step` is in."""
        return min((step // self.phase_steps + 1) * self.phase_steps, self.steps)

    def publishes_after(self, step: int) -> bool:
        """Whether the weights after `step` optimizer steps are published."""
        return step % self.schedule.steps_per_publish == 0 or step == self.steps


@dataclass(slots=True)
class Progress:
    """Progress of the run: the loop's part of a checkpoint."""

    step: int = 0  # optimizer steps done = learner version
    published: int = -1  # version proven on every healthy actor
    phase_version: int = 0  # version at the start of the update phase: p_ref of a longer phase
    evaluated: int = -1  # last step whose evaluation was started
    seconds: float = 0.0  # of training, over all sessions
    # checkpoint.keep_best's metric, by the version that was evaluated
    scores: dict[str, float] = field(default_factory=dict)
