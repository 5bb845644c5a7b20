"""The schedule as plain numbers, and how far a run has come in it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule, as plain numbers."""

    steps: int
    groups_per_step: int
    steps_per_publish: int  # H
    max_staleness: int  # eta
    eval_every: int
    checkpoint_every: int
    checkpoint_at_end: bool
    wait_data_timeout_s: float
    publish_timeout_s: float
    step_timeout_s: float
    heartbeat_s: float
    hang_timeout_s: float
    request_timeout_s: float
    samples_per_step: int
    wire_dtype: str
    verify_full: bool
    run_seed: int
    sparse_copy: bool = False  # DistillSparse: theta + phi is published beside theta

    @property
    def total_groups(self) -> int:
        """Groups to admit over the whole plan: whole phases, so that a plan made longer later continues exactly."""
        return -(-self.steps // self.phase_steps) * self.phase_steps * self.groups_per_step

    @property
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    @property
    def phase_steps(self) -> int:
        """Steps of one update phase: p_ref is fixed at its start. One rollout phase per publish when synchronous."""
        return self.steps_per_publish if self.synchronous else 1

    def phase_end(self, step: int) -> int:
        """The first step after the phase that `step` is in."""
        return min((step // self.phase_steps + 1) * self.phase_steps, self.steps)


@dataclass(slots=True)
class Progress:
    """What the loop has done: the controller's part of a run checkpoint."""

    step: int = 0  # optimizer steps done = learner version
    published: int = -1  # version proven on every healthy actor
    phase_version: int = 0  # version at the start of the update phase: p_ref of a phase of several steps
    evaluated: int = -1  # last step whose evaluation was started
    seconds: float = 0.0  # of training, over all sessions
    scores: dict[str, float] = field(default_factory=dict)  # checkpoint.keep_best's metric by version evaluated
