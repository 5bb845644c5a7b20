"""Errors: those that a user can fix, and those that end or interrupt a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class UserError(Exception):
    """One sentence naming the config key, the value and what would be accepted. Exit code 2."""

    def __init__(self, message: str, parts: tuple[str, ...] = ()) -> None:
        """`parts`: the sentences of a message that holds several."""
        super().__init__(message)
        self.parts = parts or (message,)

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
        self._found: list[str] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """The result of a check, or None after its UserError, which is kept."""
        try:
            return check()
        except UserError as error:
            # of one key and value the first fault counts: others follow from it
            known = {text.split(" ")[0] for text in self._found}
            self._found += [part for part in error.parts if part.split(" ")[0] not in known]
            return None

    def end(self) -> None:
        """Raise UserError with all that were found, if there are any."""
        if len(self._found) == 1:
            raise UserError(self._found[0])
        if self._found:
            listed = "".join(f"\n  {i}. {text}" for i, text in enumerate(self._found, 1))
            message = f"{len(self._found)} faults, each to be mended:{listed}"
            raise UserError(message, tuple(self._found))


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
