"""Ray: joining or starting a cluster, calls with deadlines, and taking everything down again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlcore.errors import DeadlineExceeded, StageError, UserError

ActorDied = RayActorError  # what a call raises when its actor's process is gone


@contextlib.contextmanager
def cluster(
    *, address: str | None, num_cpus: int | None, needed_cpus: float, needed_gpus: float, object_store_mib: int
) -> Iterator[None]:
    """A connected Ray driver for the duration of the block; a cluster started here is stopped at the end.

    Raises UserError when the machine or the cluster cannot hold the roles.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        cpus = num_cpus if num_cpus is not None else (os.cpu_count() or 1)
        if needed_cpus > cpus:
            raise UserError(
                f"cluster.num_cpus={cpus} is too few: actors and learner ask for {needed_cpus:g} "
                "(lower actor.*.num_cpus, actor.*.count, learner.num_cpus or learner.ranks)."
            )
    # A leftover of this machine's last run must not be joined by accident: the address is always explicit.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {"log_to_driver": bool(os.environ.get("RLCORE_RAY_LOGS")), "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=object_store_mib << 20,
                _node_ip_address="127.0.0.1",  # every port of a local cluster stays on loopback
                **common,
            )
        else:
            ray.init(address=address, namespace=f"rlcore-{os.getpid()}", **common)
    except (ConnectionError, TimeoutError) as e:
        raise UserError(f"cluster.address={address} does not answer: {str(e).splitlines()[0]}.") from e
    try:
        if address is not None:
            _check_capacity(needed_cpus, needed_gpus)
        yield
    finally:
        ray.shutdown()


def _check_capacity(cpus: float, gpus: float) -> None:
    have = ray.cluster_resources()
    for name, need in (("CPU", cpus), ("GPU", gpus)):
        if need > have.get(name, 0.0):
            raise UserError(f"cluster.address: the cluster has {have.get(name, 0):g} {name}s, the roles ask for {need:g}.")


async def call(ref: Any, *, timeout_s: float, what: str, key: str) -> Any:
    """Await a Ray reference under a deadline.

    Raises DeadlineExceeded (naming `what` and the config key `key`), ActorDied when the process is gone, and the
    remote exception itself, not a stack of remote tracebacks, when the call failed.
    """
    try:
        return await asyncio.wait_for(_awaitable(ref), timeout_s)
    except TimeoutError as e:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {what} ({key}={timeout_s:g}).") from e
    except RayTaskError as e:
        raise _cause(e, what) from e


async def _awaitable(ref: Any) -> Any:
    return await ref


def get(refs: Any, *, timeout_s: float, what: str, key: str) -> Any:
    """The blocking twin of `call`, for start-up."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as e:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {what} ({key}={timeout_s:g}).") from e
    except RayTaskError as e:
        raise _cause(e, what) from e
    except RayActorError as e:
        inner = getattr(e, "cause", None)
        raise StageError(f"{what}: the process died: {_last_line(str(inner or e))}") from e


def _cause(e: RayTaskError, what: str) -> Exception:
    cause = e.cause if isinstance(getattr(e, "cause", None), Exception) else None
    if isinstance(cause, UserError | StageError | DeadlineExceeded):
        return type(cause)(*cause.args)
    return StageError(f"{what} failed: {type(cause or e).__name__}: {_last_line(str(cause or e))}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "(no message)"


def free_port(wanted: int = 0, host: str = "127.0.0.1") -> int:
    """A port of `host` that is free now, outside the range that outgoing connections draw theirs from.

    Raises UserError if `wanted` is given and taken, or if none is free.
    """
    for candidate in [wanted] if wanted else random.SystemRandom().sample(range(20000, 32768), 64):
        with socket.socket() as s:
            try:
                s.bind((host, candidate))
            except OSError:
                continue
            return candidate
    raise UserError(f"learner.port={wanted} is not free: choose another, or 0 for any free port.")
