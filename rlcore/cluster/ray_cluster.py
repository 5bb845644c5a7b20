"""Ray: joining or starting a cluster, and taking everything down again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import ray
from ray._private import ray_constants, ray_logging, services
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from rlcore.cluster.specs import RaySpec, joined_address, named_address, python_words
from rlcore.errors import DeadlineExceeded, Faults, StageError, UserError
from rlcore.lazy import torch
from rlcore.patching import Patch
from rlcore.reasons import message_of, reason

MIB = 2**20
AUTO = "auto"
GCS_WORD = "--gcs-address="  # of a raylet's command line
STDERR = "rlcore"  # the handler of what processes write
POLL_S = 2.0  # poll interval while waiting for a cluster
# time for a local cluster's processes to exit by themselves once Ray has shut down
SHUTDOWN_TIMEOUT_S = 20.0

# every attribute of Ray that rlcore replaces: there are no settings for them
_RAY = ("2.60.",)
# A signal to the driver's process group (coreutils' timeout, a terminal) asks the run to stop,
# which it cannot do with a checkpoint once the cluster is gone. If the driver dies, Ray still ends.
CONSOLE_POPEN = Patch(
    "ray._private.services",
    "ConsolePopen",
    "to start its processes outside the driver's process group",
    _RAY,
)
ONLY_LOOPBACK = Patch(
    "ray._private.ray_constants",
    "ENABLE_RAY_CLUSTER",
    "to bind the ports of a local cluster to loopback",
    _RAY,
)
SKIPPED_OUTPUT = Patch(
    "ray._private.ray_logging:stdout_deduplicator",
    "skip_re",
    "to leave its paragraph on a dead worker to its logs",
    _RAY,
)
_UNUSED = "to start no process that a local cluster has no use for"
# Its server starts even with include_dashboard=False, and ray.init waits for it.
DASHBOARD = Patch("ray._private.node:Node", "start_api_server", _UNUSED, _RAY)
AUTOSCALER = Patch("ray._private.node:Node", "start_monitor", _UNUSED, _RAY)
WORKER_THREADS = Patch(
    "ray._private.utils",
    "set_omp_num_threads_if_unset",
    "since a fork's torch has read OMP_NUM_THREADS before Ray sets it",
    _RAY,
)
# A command says what a signal does. Ray's handlers would take its place: Python's, which exit, and
# one of C++, which prints a stack and ends the process at once.
SIGTERM_HANDLER = Patch(
    "ray._private.utils", "set_sigterm_handler", "to leave SIGTERM to the command", _RAY
)
NO_STACK = Patch(
    "ray._private.ray_constants",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER",
    "so that SIGTERM prints no stack of C++",
    _RAY,
)
PATCHES = (
    CONSOLE_POPEN,
    ONLY_LOOPBACK,
    SKIPPED_OUTPUT,
    DASHBOARD,
    AUTOSCALER,
    WORKER_THREADS,
    SIGTERM_HANDLER,
    NO_STACK,
)


@contextlib.contextmanager
def cluster(
    spec: RaySpec,
    *,
    needed_cpus: float,
    needed_gpus: float,
    store_bytes: int = 0,
    patience_s: float = 0.0,
    stderr: Callable[[str, str], None] | None = None,
) -> Iterator[None]:
    """A connected Ray driver for the duration of the block; a cluster started here is stopped at
    the end.

    `store_bytes`: of one publication in the object store. Raises UserError when the machine or the
    cluster cannot hold the roles. With `patience_s` (for a run that continues) a joined cluster has
    that long to answer and to have enough resources again; DeadlineExceeded after that. `stderr` is
    given what processes of the cluster that this driver started write to their standard error:
    (name and process id, text), from a thread.
    """
    address, named = joined_address(spec.address), named_address(spec.address)
    if address == AUTO:
        address = _of_this_machine()
        named = f"{named} ({address})"
    cpus = 0
    if address is None:
        _check_temporary()
        cpus = _local_cpus(spec, needed_cpus, needed_gpus)
        _check_store(spec, store_bytes)
    # A leftover of this machine's last run must not be joined by accident: the address is always
    # explicit.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray has its processes at nice 15, where anything else on the machine takes a role's CPU until
    # its heartbeats are late.
    os.environ.setdefault("RAY_worker_niceness", "0")
    logs = bool(os.environ.get("RLCORE_RAY_LOGS"))
    quiet: dict[str, Any] = {"log_to_driver": logs or bool(stderr), "logging_level": "ERROR"}
    own: list[int] = []  # ids of the processes that Ray starts here
    deadline = time.monotonic() + patience_s
    settings = quiet | ({} if address is None else {"namespace": f"rlcore-{os.getpid()}"})
    if address is None:
        settings |= {"num_cpus": cpus, "object_store_memory": spec.object_store_mib << 20}
    with _ended_by_sigterm(), SIGTERM_HANDLER.replaced(_keep), NO_STACK.replaced(True):
        try:
            if address is not None:
                _poll(lambda: _check_reachable(address, named), deadline, patience_s)
            _connect(address, named, own, settings)
            if stderr is not None:
                _hand_over(stderr, printed=logs)
            if address is not None:
                _poll(lambda: _check_capacity(needed_cpus, needed_gpus), deadline, patience_s)
                _check_joined_store(store_bytes)
            yield
        finally:
            ray_logging.global_worker_stdstream_dispatcher.remove_handler(STDERR)
            _shut_down(own)


def _keep(_: object) -> None:
    """Leave SIGTERM's handler as it is."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A context that a first SIGTERM ends by KeyboardInterrupt, so that everything is taken down,
    where the command has not said otherwise; it ignores a second one."""

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    told = threading.current_thread() is threading.main_thread()  # others get no signals
    if not told or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _connect(address: str | None, named: str, own: list[int], settings: dict[str, Any]) -> None:
    """Become the driver of the cluster at `address`, or of our own. Raises UserError."""
    try:
        if address is None:
            _start_local(own, **settings)
        else:
            ray.init(address=address, **settings)
    except ValueError as e:  # of Ray, for what it does not read as an address
        if address is None:
            raise
        raise UserError(
            f"{named} is not accepted ({message_of(str(e))}): give cluster.address=HOST:PORT of a "
            "cluster, auto, or local for one of this run's own."
        ) from e
    except (ConnectionError, TimeoutError) as e:
        raise UserError(_unreachable(named, message_of(str(e)))) from e


def _hand_over(stderr: Callable[[str, str], None], *, printed: bool) -> None:
    """Have Ray give `stderr` what it would print; it prints it as well only if asked to."""

    def handle(data: dict[str, Any]) -> None:
        text = "\n".join(str(line) for line in data["lines"]).strip()
        if data.get("is_err") and text:
            name = data.get("actor_name") or data.get("task_name") or "process"
            stderr(f"{name} {data['pid']}", text)

    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    if not printed:
        dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler(STDERR, handle)


def check_cluster(
    spec: RaySpec, *, needed_cpus: float, needed_gpus: float, store_bytes: int
) -> None:
    """Run the checks of `cluster` for one of our own, without starting it. One that exists is not
    joined, since it may hang: only its port is tried. Raises UserError."""
    address = joined_address(spec.address)
    if address is None:
        faults = Faults()
        faults.of(_check_temporary)
        faults.of(_local_cpus, spec, needed_cpus, needed_gpus)
        faults.of(_check_store, spec, store_bytes)
        faults.end()
    else:
        named = named_address(spec.address)
        if address == AUTO:
            address = _of_this_machine()
            named = f"{named} ({address})"
        _check_reachable(address, named)


# behind the folder that Ray is given, of the longest path of a socket, which Linux holds to 107
# characters: /ray/session_2026-11-28_00-56-08_123456_4194304/sockets/plasma_store
_SOCKET = 68
_MOST = 107 - _SOCKET


def _check_temporary() -> None:
    """Raise UserError for a folder of temporary files in which a local Ray cannot start."""
    name = next((n for n in ("RAY_TMPDIR", "TMPDIR") if n in os.environ), None)
    if name is None:
        return
    folder = os.environ[name]
    said, instead = f"the environment has {name}={folder}", "set RAY_TMPDIR=/tmp"
    if len(os.fsencode(folder)) > _MOST:
        raise UserError(
            f"{said}, under which the paths of Ray's sockets are longer than Linux allows: use at "
            f"most {_MOST} characters, or {instead}."
        )
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{said}, which is not a folder that can be written to: {instead}.")


def _check_store(spec: RaySpec, store_bytes: int) -> None:
    mib = math.ceil(store_bytes / MIB)
    if mib > spec.object_store_mib:
        raise UserError(
            f"cluster.object_store_mib={spec.object_store_mib} is smaller than one publication, "
            f"{mib} MiB of weights: use {2 * mib} or more (actors keep a version until they have "
            "the next), or cluster.transport=disk."
        )


def _check_joined_store(store_bytes: int) -> None:
    """Check by the largest of the present nodes, since it is not known on which nodes Ray will
    place the roles."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    largest = max((node["Resources"].get("object_store_memory", 0.0) for node in nodes), default=0)
    if store_bytes > largest:
        raise UserError(
            "cluster.address: the largest object store of the cluster's nodes holds "
            f"{largest / MIB:.0f} MiB, and one publication is {store_bytes / MIB:.0f} MiB of "
            "weights: start the nodes with a larger --object-store-memory, or use "
            "cluster.transport=disk."
        )


def _local_cpus(spec: RaySpec, needed_cpus: float, needed_gpus: float) -> int:
    """CPUs of a cluster of our own. Raises UserError if they or this machine's GPUs are too few."""
    cpus = spec.num_cpus
    if cpus is None:
        cpus = max(os.cpu_count() or 1, math.ceil(needed_cpus))
    if needed_cpus > cpus:
        raise UserError(
            f"cluster.num_cpus={cpus} is too few: actors and learner ask for {needed_cpus:g} "
            "(lower actor.*.num_cpus, actor.*.count, learner.num_cpus or learner.ranks)."
        )
    if needed_gpus > (gpus := local_gpus()):
        raise UserError(
            f"actor.*.num_gpus and learner.num_gpus ask for {needed_gpus:g} GPUs where this "
            f"machine shows {gpus}: choose actor.*.num_gpus=0 and learner.num_gpus=0, or a machine "
            "that has them."
        )
    return cpus


def _shut_down(own: Sequence[int]) -> None:
    """Disconnect, and end the remaining processes of our own cluster: these ids, and what they
    started."""
    children = [child for child in psutil.Process().children() if child.pid in own]
    started = [p for child in children for p in _family(child)]
    ray.shutdown()
    _end(started)


def local_gpus() -> int:
    """The GPUs that Ray will find on this machine, as CUDA_VISIBLE_DEVICES limits them."""
    count = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def _poll(check: Callable[[], None], deadline: float, patience_s: float) -> None:
    """Repeat a check that raises UserError until it passes. Without patience its first answer
    counts."""
    while True:
        try:
            return check()
        except UserError as e:
            if not patience_s:
                raise
            if time.monotonic() > deadline:
                why = str(e).rstrip(".")
                raise DeadlineExceeded(
                    f"{why}, after {patience_s:g} s (cluster.start_timeout_s)."
                ) from e
        time.sleep(min(POLL_S, patience_s))


def _of_this_machine() -> str:
    """The address of the cluster that this machine is a node of, for cluster.address=auto:
    RAY_ADDRESS, else the address of the raylet that runs here. Raises UserError if there is none or
    several, or if it is another user's, who may not know of this run."""
    named = joined_address(None)
    if named is not None and named != AUTO:
        return named
    found: dict[str, str] = {}
    for process in psutil.process_iter(["name", "cmdline", "username"]):
        if process.info["name"] == "raylet":
            words = [w for w in process.info["cmdline"] or () if w.startswith(GCS_WORD)]
            found |= {w.removeprefix(GCS_WORD): str(process.info["username"]) for w in words}
    me = psutil.Process().username()
    own = [address for address, user in found.items() if user == me]
    if len(own) == 1:
        return own[0]
    if own:
        why = f"finds {len(own)} clusters on this machine ({', '.join(sorted(own))})"
    elif found:
        address, user = next(iter(found.items()))
        why = f"finds no cluster but one of user {user}, at {address}"
    else:
        why = "finds no cluster on this machine"
    raise UserError(
        f"cluster.address=auto {why}: give cluster.address=HOST:PORT, or local for a cluster of "
        "the run's own."
    )


def _unreachable(named: str, why: str) -> str:
    return (
        f"{named} does not answer ({why}): start that cluster, or set cluster.address=local for "
        "one of this run's own."
    )


def _check_reachable(address: str, named: str) -> None:
    """Raise UserError if the head cannot be reached: Ray itself would try for many minutes, without
    a timeout that we can set."""
    host, _, port = address.rpartition(":")
    if "/" in host or address == "local":
        return  # ray://HOST:PORT: Ray knows where to look
    if not host or not port.isdigit():
        raise UserError(
            f"{named} is not accepted (it names no port): give cluster.address=HOST:PORT of a "
            "cluster, auto, or local for one of this run's own."
        )
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as e:
        raise UserError(_unreachable(named, str(e.strerror or e))) from e


def _start_local(own: list[int], **settings: Any) -> None:
    """Start a cluster of this process, and note the ids of its processes in `own`. Ray gives its
    node half a minute, which a busy machine may exceed once."""
    # Have every port of a local cluster bound to loopback. Ray turns 127.0.0.1 into the machine's
    # outside address and then listens on all interfaces, unless clusters of several machines are
    # switched off; the variable says so to the processes it starts, the constant to this one.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ONLY_LOOPBACK.replace(False)
    # the run itself reports, in one sentence, which process died; Ray's paragraph stays in its logs
    SKIPPED_OUTPUT.replace(re.compile("A worker died or was killed"))
    settings |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    for last in (False, True):
        try:
            with _own_processes(own):
                ray.init(**settings)
            return
        except Exception as e:  # Ray raises a bare one here
            ray.shutdown()
            if last or "timed out during startup" not in str(e):
                raise StageError(f"Ray did not start on this machine: {reason(e)}") from e


@contextlib.contextmanager
def _own_processes(own: list[int]) -> Iterator[None]:
    """A context in which Ray starts the processes of a local cluster: noted, in their own process
    groups, and without the ones that nothing here uses."""
    popen = services.ConsolePopen

    def noted(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        process = popen(_warm(command), *args, process_group=0, **kwargs)
        own.append(process.pid)
        return process

    def skip(*_: Any, **__: Any) -> None:
        pass

    with CONSOLE_POPEN.replaced(noted), DASHBOARD.replaced(skip), AUTOSCALER.replaced(skip):
        yield


def _warm(command: Sequence[str]) -> list[str]:
    """The command of the raylet, whose workers are forks where a sweep has a server of them."""
    start = "--python_worker_command="
    before, after = f"{start}{sys.executable} ", f"{start}{shlex.join(python_words())} "
    return [word.replace(before, after) if word.startswith(before) else word for word in command]


def follow_threads() -> None:
    """In a worker that has torch before Ray gives it CPUs: take the threads that Ray sets then."""

    def follow() -> bool:
        was_set = bool(before())
        if was_set:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return was_set

    before = WORKER_THREADS.replace(follow)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(processes: list[psutil.Process]) -> None:
    """Kill the processes that Ray's own shutdown left of a local cluster (agents outlive a head
    that died)."""
    _, alive = psutil.wait_procs(processes, timeout=2.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_TIMEOUT_S)


async def head_answers(timeout_s: float = 5.0) -> bool:
    """Return whether the port of Ray's head can be reached."""
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    try:
        # not wait_for: up to Python 3.11 it loses a cancellation that comes with the answer
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def joined_head_lost(address: str | None) -> bool:
    """Return whether this process has joined a cluster (`cluster.address`) whose head cannot be
    reached. Blocks for 5 s at most."""
    if joined_address(address) is None:
        return False
    try:
        _check_reachable(ray.get_runtime_context().gcs_address, named_address(address))
    except UserError:
        return True
    return False


def _check_capacity(cpus: float, gpus: float) -> None:
    have = ray.cluster_resources()
    for name, need in (("CPU", cpus), ("GPU", gpus)):
        if need > have.get(name, 0.0):
            held = have.get(name, 0)
            raise UserError(
                f"cluster.address: the cluster has {held:g} {name}s, the roles ask for {need:g}: "
                "add nodes, or lower actor.*.count and learner.ranks."
            )


def idle_gpus(needed: float) -> list[str]:
    """A line where the connected cluster has more GPUs than the roles ask for; else none."""
    have = ray.cluster_resources().get("GPU", 0.0)
    if have <= needed:
        return []
    return [
        f"{have - needed:g} of the cluster's {have:g} GPUs are used by no role: raise "
        "actor.*.count or learner.ranks, or give the run fewer"
    ]
