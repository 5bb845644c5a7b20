"""Settings of the Ray cluster, and of the processes in it. No Ray."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlcore.loop.specs import EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.metrics.specs import RecorderSpec
from rlcore.spec import Spec, Unread, setting
from rlcore.weights.specs import TransportSpec

LOCAL = "local"  # cluster.address of a run that joins none
WARM = "RLCORE_WARM"  # variable: the socket of a server of forks (warm.py)


class RaySpec(Spec):
    """The cluster that a run joins or starts."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("num_cpus", "object_store_mib"),
            lambda spec: spec.address not in (None, LOCAL),
            "address joins a cluster that has its own",
        ),
    )

    address: str | None = setting(
        None, "Ray address; null: that in RAY_ADDRESS, if any; local: a cluster of this run's own"
    )
    num_cpus: int | None = setting(
        None, "local cluster; null: all, at least what the roles ask for", gt=0
    )
    object_store_mib: int = setting(
        512, "Ray's shared memory on a local cluster", unit="MiB", gt=75
    )
    cpu_fast_paths: bool = setting(
        True,
        "CPU: rlcore's decoder and norms, matrix kernels that were tried, and idle cores; false: "
        "vLLM's and torch's own, slower and equal up to rounding",
    )


def joined_address(address: str | None) -> str | None:
    """The cluster that is joined (`cluster.address`, else RAY_ADDRESS); None: this process starts
    its own.

    An HTTP address in RAY_ADDRESS names a job server, which `ray job submit` reads, and not a
    cluster that a driver could join.
    """
    found = address or os.environ.get("RAY_ADDRESS") or LOCAL
    server = not address and found.startswith(("http://", "https://"))
    return None if server or found == LOCAL else found


def named_address(address: str | None) -> str:
    """The setting that names the joined cluster, as a sentence shows it."""
    found = joined_address(address)
    return f"cluster.address={found}" if address else f"cluster.address=null (RAY_ADDRESS={found})"


def python_words() -> list[str]:
    """The beginning of a command in place of python's: a fork does the rest, where there is a
    server."""
    server = os.environ.get(WARM)
    script = str(Path(__file__).with_name("warm.py"))
    return [sys.executable] if server is None else [sys.executable, "-I", "-S", script, server]


@dataclass(frozen=True, slots=True)
class Hosting:
    """Where and how the processes of a run are started, and the deadlines of calls to them."""

    ray: RaySpec
    schedule: ScheduleSpec
    supervision: SupervisionSpec
    transport: TransportSpec
    evaluation: EvaluationSpec
    run_dir: str  # that transport=disk writes weights to, and the recorder batches
    own_nodes: bool  # the learner has nodes of its own: cluster.launch.learner_nodes
    recorder: RecorderSpec | None = None
