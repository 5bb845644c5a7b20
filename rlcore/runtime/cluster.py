"""Ray: joining or starting a cluster, calls with deadlines, and taking everything down again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import ray
from ray._private import ray_constants, ray_logging
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlcore.errors import DeadlineExceeded, StageError, UserError

POLL_S = 2.0  # between two looks at a cluster that is waited for
SHUTDOWN_TIMEOUT_S = 20.0  # what a local cluster's processes get to end by themselves once Ray has shut down
LOST_RANK_GRACE_S = 5.0  # how long a failed process's peers are listened to before the failure is believed


class RoleLost(StageError):
    """A process of the run is gone or hung. Nothing is wrong with the run itself: it can go on from a checkpoint."""


def actor_class(shell: type, **settings: Any) -> Any:
    """A class as a Ray actor's. Ray's head keeps no record of each call: those would grow by 200 MiB an hour."""
    remote: Any = ray.remote
    return remote(enable_task_events=False, **settings)(shell)


def beside_driver() -> NodeAffinitySchedulingStrategy:
    """The driver's node, whose loss ends the attempt anyway: a role without resources would be put on any node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


@contextlib.contextmanager
def cluster(
    *,
    address: str | None,
    num_cpus: int | None,
    needed_cpus: float,
    needed_gpus: float,
    object_store_mib: int,
    patience_s: float = 0.0,
) -> Iterator[None]:
    """A connected Ray driver for the duration of the block; a cluster started here is stopped at the end.

    Raises UserError when the machine or the cluster cannot hold the roles. With `patience_s` (a run that has been there
    before) a joined cluster has that long to answer and to have room again; DeadlineExceeded then.
    """
    address = joined_address(address)
    if address is None:
        cpus = num_cpus if num_cpus is not None else max(os.cpu_count() or 1, math.ceil(needed_cpus))
        if needed_cpus > cpus:
            raise UserError(
                f"cluster.num_cpus={cpus} is too few: actors and learner ask for {needed_cpus:g} "
                "(lower actor.*.num_cpus, actor.*.count, learner.num_cpus or learner.ranks)."
            )
        if needed_gpus > (gpus := _local_gpus()):
            raise UserError(
                f"actor.*.num_gpus and learner.num_gpus ask for {needed_gpus:g} GPUs where this machine shows {gpus}: "
                "choose actor.*.num_gpus=0 and learner.num_gpus=0, or a machine that has them."
            )
    # A leftover of this machine's last run must not be joined by accident: the address is always explicit.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {"log_to_driver": bool(os.environ.get("RLCORE_RAY_LOGS")), "logging_level": "ERROR"}
    before = set(psutil.Process().children())
    try:
        if address is None:
            _start_local(num_cpus=cpus, object_store_memory=object_store_mib << 20, **common)
        else:
            deadline = time.monotonic() + patience_s
            _poll(lambda: _check_reachable(address), deadline, patience_s)
            ray.init(address=address, namespace=f"rlcore-{os.getpid()}", **common)
    except (ConnectionError, TimeoutError) as e:
        raise UserError(f"cluster.address={address} does not answer: {str(e).splitlines()[0]}.") from e
    except SystemExit as e:  # a SIGTERM while Ray started: its handler, in place by then, exits with a code of its own
        _shut_down(before, ours=address is None)
        raise KeyboardInterrupt from e
    try:
        if address is not None:
            _poll(lambda: _check_capacity(needed_cpus, needed_gpus), deadline, patience_s)
        yield
    finally:
        _shut_down(before, ours=address is None)


def _shut_down(before: set[psutil.Process], *, ours: bool) -> None:
    """Disconnect, and end what is left of a cluster of `ours`: every child that was not there `before`."""
    started = [p for child in set(psutil.Process().children()) - before for p in _family(child)]
    ray.shutdown()
    if ours:
        _end(started)


def _local_gpus() -> int:
    """The GPUs that Ray will find on this machine: those that CUDA_VISIBLE_DEVICES leaves visible."""
    count = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def joined_address(address: str | None) -> str | None:
    """The cluster that is joined (`cluster.address`, else RAY_ADDRESS); None: this process starts its own."""
    return address or os.environ.get("RAY_ADDRESS")


def _poll(check: Callable[[], None], deadline: float, patience_s: float) -> None:
    """Repeat a check that raises UserError until it passes. Without patience its first word counts."""
    while True:
        try:
            return check()
        except UserError as e:
            if not patience_s:
                raise
            if time.monotonic() > deadline:
                why = str(e).rstrip(".")
                raise DeadlineExceeded(f"{why}, after {patience_s:g} s (cluster.start_timeout_s).") from e
        time.sleep(min(POLL_S, patience_s))


def _check_reachable(address: str) -> None:
    """Ray itself tries a head that is gone for many minutes, with a deadline of nobody's."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # "auto" and the like: Ray knows where to look
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as e:
        raise UserError(f"cluster.address={address} does not answer: {e.strerror or e}.") from e


def _start_local(**settings: Any) -> None:
    """Start a cluster of this process. Ray gives its node half a minute, which a busy machine may exceed once."""
    _stay_on_loopback()
    # the run says itself, in a sentence, whose process died; Ray's paragraph about it stays in its logs
    ray_logging.stdout_deduplicator.skip_re = re.compile("A worker died or was killed")
    for last in (False, True):
        try:
            ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **settings)
            return
        except Exception as e:  # Ray raises a bare one here
            ray.shutdown()
            if last or "timed out during startup" not in str(e):
                raise StageError(f"Ray did not start on this machine: {_last_line(str(e))}") from e


def _stay_on_loopback() -> None:
    """Have every port of a local cluster bound to loopback.

    Ray turns 127.0.0.1 into the machine's outside address and then listens on all interfaces, unless clusters of
    several machines are switched off; the variable says so to the processes it starts, the constant to this one.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(processes: list[psutil.Process]) -> None:
    """Kill what Ray's own shutdown left of a local cluster (agents outlive a head that died)."""
    _, alive = psutil.wait_procs(processes, timeout=2.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_TIMEOUT_S)


async def head_answers(timeout_s: float = 5.0) -> bool:
    """Whether the port of Ray's head can be reached."""
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), timeout_s)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _check_capacity(cpus: float, gpus: float) -> None:
    have = ray.cluster_resources()
    for name, need in (("CPU", cpus), ("GPU", gpus)):
        if need > have.get(name, 0.0):
            held = have.get(name, 0)
            raise UserError(f"cluster.address: the cluster has {held:g} {name}s, the roles ask for {need:g}.")


async def call(ref: Any, *, timeout_s: float, what: str, key: str, who: str = "a process of the run") -> Any:
    """Await a Ray reference under a deadline.

    Raises DeadlineExceeded (naming `what` and the config key `key`), RoleLost when `who` is gone, and the remote
    exception itself, not a stack of remote tracebacks, when the call failed.
    """
    try:
        return await asyncio.wait_for(_awaitable(ref), timeout_s)
    except TimeoutError as e:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {what} ({key}={timeout_s:g}).") from e
    except RayTaskError as e:
        raise _cause(e, what) from e
    except RayActorError as e:
        raise RoleLost(f"{who} died while the run waited for {what}") from e


async def _awaitable(ref: Any) -> Any:
    return await ref


def get(refs: Any, *, timeout_s: float, what: str, key: str) -> Any:
    """The blocking twin of `call`, for start-up; `refs` is one reference or a list whose answers depend on each other.

    Of several failures the loss of a process is the one raised, as RoleLost.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as e:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {what} ({key}={timeout_s:g}).") from e
    except RayTaskError as e:
        for ref in refs if isinstance(refs, list) else []:  # a rank fails within moments of another's death
            with contextlib.suppress(RayTaskError, GetTimeoutError):
                _alive(ref, what)
        raise _cause(e, what) from e
    except RayActorError as e:
        raise _lost(e, what) from e


def _alive(ref: Any, what: str) -> None:
    try:
        ray.get(ref, timeout=LOST_RANK_GRACE_S)
    except RayActorError as e:
        raise _lost(e, what) from e


def _lost(e: RayActorError, what: str) -> RoleLost:
    return RoleLost(f"{what}: the process died: {_last_line(str(getattr(e, 'cause', None) or e))}")


def _cause(e: RayTaskError, what: str) -> Exception:
    cause = e.cause if isinstance(getattr(e, "cause", None), Exception) else None
    if isinstance(cause, UserError | StageError | DeadlineExceeded):
        return type(cause)(*cause.args)
    if isinstance(cause, RayActorError):
        return RoleLost(f"a process that {what} depended on died")
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
