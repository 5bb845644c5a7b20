"""The learning rate as a function of the optimizer step: it has no state to save."""

from __future__ import annotations

from math import cos, pi

from rlcore.learner.specs import OptimizerSpec


class RateSchedule:
    """Linear warm-up, then constant, or down to `lr_final` * lr at the end.

    The end is `lr_decay_steps`, or `total_steps` (of the run) where that is not given.
    """

    def __init__(self, spec: OptimizerSpec, total_steps: int) -> None:
        self._spec = spec
        self._end = spec.lr_decay_steps or total_steps

    def __call__(self, step: int) -> float:
        """Rate of optimizer step `step`, from 0."""
        lr, warmup = self._spec.lr, self._spec.lr_warmup_steps
        if step < warmup:
            return lr * (step + 1) / warmup
        if self._spec.lr_schedule == "constant":
            return lr
        done = min(1.0, (step - warmup) / max(1, self._end - warmup))
        linear = self._spec.lr_schedule == "linear"
        remaining = 1.0 - done if linear else 0.5 * (1.0 + cos(pi * done))
        return lr * (self._spec.lr_final + (1.0 - self._spec.lr_final) * remaining)
