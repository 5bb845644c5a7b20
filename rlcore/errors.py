"""Errors: those that a user can fix, and those that end or interrupt a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UserError(Exception):
    """One sentence naming the config key, the value and what would be accepted. Exit code 2."""

    def __init__(self, message: str, faults: Sequence[UserError] = ()) -> None:
        """`faults`: the errors of a message that lists several."""
        super().__init__(message)
        self._faults = tuple(faults)

    @property
    def faults(self) -> tuple[UserError, ...]:
        """The errors that it lists, or itself."""
        return self._faults or (self,)

    @classmethod
    def choice(cls, key: str, value: object, choices: Iterable[object], why: str = "") -> UserError:
        """The standard sentence for a value outside its choices."""
        listed = ", ".join(str(c) for c in choices)
        return cls(
            f"{key}={value!s} is not accepted{': ' + why if why else ''}; choose one of: {listed}."
        )


class Faults:
    """User errors of checks that do not need each other, so that a user sees all at once."""

    def __init__(self) -> None:
        self._found: dict[str, UserError] = {}

    def of(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of a check, or None after its UserError, which is kept."""
        try:
            return check(*args, **kwargs)
        except UserError as error:
            self.add(error)
            return None

    def add(self, error: UserError) -> None:
        """Keep an error, or those that it lists."""
        for fault in error.faults:
            # of one key and value the first fault counts: others follow from it
            first = str(fault).split(" ")[0]
            self._found.setdefault(first if "=" in first else str(fault), fault)

    def end(self) -> None:
        """Raise UserError with all that were found, if there are any."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> UserError | None:
        """All that were found as one, if there are any."""
        found = list(self._found.values())
        if len(found) < 2:
            return found[0] if found else None
        listed = "".join(f"\n  {i}. {fault}" for i, fault in enumerate(found, 1))
        message = f"{len(found)} faults, each to be mended:{listed}"
        return UserError(message, found)


class DeadlineExceeded(RuntimeError):
    """A wait ran out: the message says of what, for how long, and which key limits it."""


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
