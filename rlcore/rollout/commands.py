"""Commands to the thread that owns an engine, and the queue they wait in."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import UserError
from rlcore.interfaces import WeightStream
from rlcore.types import OnPublish, WeightManifest

# Errors that only the caller gets; the engine continues.
_REFUSED = (ValueError, KeyError, UserError)


@dataclass(slots=True)
class Call:
    """A function to run between two steps."""

    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Update:
    """A set of weights to load. Its result is {"stop_s", "drain_s"}."""

    version: int
    weights: WeightStream
    on_publish: OnPublish
    manifest: WeightManifest | None
    timeout_s: float  # of the publication: bounds the drain of on_publish=finish
    future: Future[dict[str, float]] = field(default_factory=Future)
    begun: float = 0.0  # monotonic seconds


class CommandQueue:
    """Commands in order. Any thread puts, one takes; after `end` nothing is accepted."""

    def __init__(self) -> None:
        self._commands: deque[Call | Update] = deque()
        self._changed = threading.Condition()
        self._ended: BaseException | None = None
        self.closing = False  # the owner takes no further commands

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: Call | Update) -> Future[Any]:
        """Queue a command. Raises RuntimeError if the queue has ended or is closing."""
        with self._changed:
            if self._ended is not None:
                raise RuntimeError(
                    f"the rollout engine has failed: {describe(self._ended)}"
                ) from self._ended
            if self.closing:
                raise RuntimeError("the rollout worker is closed")
            self._commands.append(command)
            self._changed.notify()
        return command.future

    def take(self, *, updates: bool) -> Call | Update | None:
        """The next command, None if there is none or if it is an update and those must wait."""
        if not self._commands or (isinstance(self._commands[0], Update) and not updates):
            return None
        return self._commands.popleft()

    def wait(self, timeout_s: float) -> None:
        """Return when a command waits, when the queue closes, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._commands and not self.closing:
                if not self._changed.wait(deadline - time.monotonic()):
                    return

    def close(self) -> None:
        """Accept no further commands."""
        with self._changed:
            self.closing = True
            self._changed.notify()

    def end(self, error: BaseException | None) -> None:
        """Fail what is queued; `error`, if any, is raised by every later `put`."""
        with self._changed:
            self._ended = error
            pending = list(self._commands)
            self._commands.clear()
        for command in pending:
            fail(command.future, error or RuntimeError("the rollout worker is closed"))


def settle(future: Future[Any], run: Callable[[], Any]) -> None:
    """Run a command and settle its future. Errors other than refusals are raised here too."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(run())
    except _REFUSED as e:
        future.set_exception(e)
    except BaseException as e:
        future.set_exception(e)
        raise


def fail(future: Future[Any], error: BaseException) -> None:
    """Fail the future of a command that will not run."""
    if not future.done():
        future.set_exception(RuntimeError(f"the rollout engine has stopped: {describe(error)}"))


def describe(error: BaseException) -> str:
    """One line. Example: OSError: no space left"""
    return f"{type(error).__name__}: {error}"
