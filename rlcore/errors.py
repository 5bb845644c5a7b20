"""Errors: those that a user can fix, and those that end or interrupt a run."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """One sentence naming the config key, the value and what would be accepted. The exit code is
    2."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @classmethod
    def choice(cls, key: str, value: object, choices: Iterable[object], why: str = "") -> UserError:
        """The standard sentence for a value outside its choices."""
        listed = ", ".join(str(c) for c in choices)
        return cls(
            f"{key}={value!s} is not accepted{': ' + why if why else ''}; choose one of: {listed}."
        )


class DeadlineExceeded(RuntimeError):
    """A wait ran out. The message says what was waited for, for how long, and which key sets the
    limit."""


class StageError(RuntimeError):
    """A stage of the loop failed for good (an actor died too often, a loss was NaN): ends the run,
    exit code 1."""


class RoleLost(StageError):
    """A process of the run died or hangs; the run can continue from a checkpoint."""


class Collapsed(StageError):
    """The policy was lost at a step, and `schedule.on_collapse` ends the attempt. `alarm`: the step
    of the first alarm; checkpoints of before it are of the policy as it was."""

    def __init__(self, step: int, alarm: int, message: str = "") -> None:
        said = f"the policy fell by step {step}, after its first alarm at step {alarm}"
        super().__init__(message or said)
        self.step = step
        self.alarm = alarm


class OwnershipLost(StageError):
    """Another command has taken the run folder over: nothing more may be written to it."""


class NoSpace(StageError):
    """A disk is full (or a quota used up): what was to be written can be tried again."""
