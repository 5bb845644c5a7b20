"""Where a rollout actor sends what it has finished: to a process of its own node, or to the one
beside the driver."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import ray
from ray.exceptions import RayError

from rlcore.cluster.calls import DEAD

MAX_UNDELIVERED = 64  # messages in transit above which delivery waits
RECHECK_S = 1.0
LOOK_S = 5.0  # between two looks for a process of the own node


class NodeOutlet:
    """Calls one method of the actor of a name, or of another one where there is none of that name.

    Waits while too much of what it sent has not arrived: a slow receiver must not fill this
    process's memory. What a process of the own node did not take before it died goes to the other
    one, and so does all else until there is a process of that name again. What a receiver raises is
    its own to report.
    """

    def __init__(self, method: str, near: str, far: Any) -> None:
        """`near`: name of the process on this node; "": there is none. `far`: handle of the one
        beside the driver."""
        self._method = method
        self._name = near
        self._near: Any = None
        self._far = far
        self._look_at = -math.inf if near else math.inf  # when to look for one of that name
        self._sent: dict[Any, list[Any]] = {}  # by reference of the call; empty: not sent again

    def __call__(self, message: list[Any]) -> None:
        self._send(message)
        while len(self._sent) > MAX_UNDELIVERED:
            self._settle(RECHECK_S)
        self._settle(0.0)

    def _send(self, message: list[Any]) -> None:
        target = self._target()
        ref = getattr(target, self._method).remote(message)
        self._sent[ref] = message if target is self._near else []

    def _target(self) -> Any:
        if self._near is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            with contextlib.suppress(ValueError):  # there is none, or not yet
                self._near = ray.get_actor(self._name)
        return self._far if self._near is None else self._near

    def _settle(self, timeout_s: float) -> None:
        """Look at what has arrived since."""
        waiting = list(self._sent)
        done, _ = ray.wait(
            waiting, num_returns=len(waiting) if not timeout_s else 1, timeout=timeout_s
        )
        for ref in done:
            message = self._sent.pop(ref)
            if message and _died(ref):
                self._near = None
                self._look_at = time.monotonic() + LOOK_S  # its name may outlive it for a moment
                self._send(message)


def _died(ref: Any) -> bool:
    """Whether the process died before it answered."""
    try:
        ray.get(ref)
    except DEAD:
        return True
    except RayError:
        return False
    return False
