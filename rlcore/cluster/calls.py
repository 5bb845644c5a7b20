"""Calls of Ray actors under deadlines, and what their failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rlcore.errors import DeadlineExceeded, RoleLost, StageError, UserError
from rlcore.loop.specs import SILENT_S
from rlcore.reasons import message_of, reason

# errors of calls to a dead process; the second if it was bound to a node which is gone
DEAD = (RayActorError, ActorUnschedulableError)
# Peers of a dead process may fail before its death is reported: wait this long for the report
LOST_RANK_GRACE_S = 5.0
PARTS = 8  # of a deadline
PART_S = 15.0  # the longest of them


async def call(
    ref: Any,
    *,
    timeout_s: float,
    what: str,
    key: str,
    who: str = "a process of the run",
    note: Callable[[str], None] | None = None,
) -> Any:
    """Await a Ray reference under a deadline. A time in which this process itself stood still, as
    on a machine that swaps, counts as an eighth of it at most. So answers which came meanwhile are
    still read. `note` is told of a process that is silent, before a minute has passed.

    Raises DeadlineExceeded (naming `what` and the config key `key`), RoleLost when `who` has died,
    and the remote exception itself, not a stack of remote tracebacks, when the call failed.
    """
    asked = asyncio.ensure_future(answer(ref, what, who))
    parts, told = max(PARTS, math.ceil(timeout_s / PART_S)), False
    try:
        for part in range(1, parts + 1):
            done, _ = await asyncio.wait([asked], timeout=timeout_s / parts)
            if done:
                found = asked.result()
                if note is not None and told:
                    note(f"{who} answers again")
                return found
            silent_s = timeout_s * part / parts
            if note is not None and not told and SILENT_S <= silent_s < timeout_s:
                limit = f"it counts as lost after {key}={timeout_s:g} s"
                note(f"{who} has not answered for {silent_s:.0f} s: {limit}")
                told = True
    finally:
        asked.cancel()
    raise DeadlineExceeded(f"waited {timeout_s:g} s for {what} ({key}={timeout_s:g}).")


async def answer(ref: Any, what: str, who: str) -> Any:
    """Await a Ray reference as `call` does, without a deadline: the caller sets one."""
    try:
        return await ref
    except RayTaskError as e:
        raise _cause(e, what) from e
    except DEAD as e:
        raise RoleLost(f"{who} died while the run waited for {what}") from e


def get(refs: Any, *, timeout_s: float, what: str, key: str) -> Any:
    """The blocking version of `call`, for commands outside an event loop; `refs` is one reference
    or a list whose answers depend on each other.

    Where several calls fail, the loss of a process is raised, as RoleLost.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as e:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {what} ({key}={timeout_s:g}).") from e
    except RayTaskError as e:
        # a rank fails within moments of another rank's death, which is the reason to report
        for ref in refs if isinstance(refs, list) else []:
            with contextlib.suppress(RayTaskError, GetTimeoutError):
                _alive(ref, what)
        raise _cause(e, what) from e
    except DEAD as e:
        raise _lost(e, what) from e


def _alive(ref: Any, what: str) -> None:
    try:
        ray.get(ref, timeout=LOST_RANK_GRACE_S)
    except DEAD as e:
        raise _lost(e, what) from e


def _lost(e: Exception, what: str) -> RoleLost:
    return RoleLost(f"{what}: the process died: {message_of(str(getattr(e, 'cause', None) or e))}")


def _cause(e: RayTaskError, what: str) -> Exception:
    cause = e.cause if isinstance(getattr(e, "cause", None), Exception) else None
    if isinstance(cause, UserError | StageError | DeadlineExceeded):
        return type(cause)(*cause.args)
    if isinstance(cause, DEAD):
        return RoleLost(f"a process that {what} depended on died")
    return StageError(f"{what} failed: {reason(cause or e)}")


def kill(handle: Any, *, no_restart: bool = True) -> None:
    """End an actor's process at once. A cluster whose head is lost, or is another one by now,
    refuses to; its actors end by themselves."""
    with contextlib.suppress(RayError):
        ray.kill(handle, no_restart=no_restart)
