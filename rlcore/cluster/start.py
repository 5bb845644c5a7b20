"""Starting the processes of a run. Each function returns at once, with a client; `wait_started`
waits until all of them answer.

If one fails to start, the others are ended with the cluster.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.buffer import ReplayBuffer
from rlcore.buffer.journal import ShardFiles
from rlcore.cluster.actors.buffer import BufferActor
from rlcore.cluster.actors.learner import LEARNER_THREADS, LearnerActor
from rlcore.cluster.actors.rollout import RolloutActor
from rlcore.cluster.actors.scorer import ScorerActor
from rlcore.cluster.calls import get
from rlcore.cluster.clients import RayBuffer, RayLearner, RayRolloutActor, RayScorer
from rlcore.cluster.clients.learner import RankGroup
from rlcore.cluster.clients.rollout import PendingReply
from rlcore.cluster.clients.scorer import scorer_name
from rlcore.cluster.clients.shards import read_shards, write_shards
from rlcore.cluster.placement import (
    CALL_THREADS,
    SharedPlaces,
    actor_class,
    beside_driver,
    bound_to,
    rendezvous,
)
from rlcore.cluster.process_tuning import keep_passes_short
from rlcore.cluster.specs import Hosting, joined_address
from rlcore.environments.specs import EnvironmentJob
from rlcore.launch.specs import ACTOR_RESOURCE, LEARNER_RESOURCE
from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
from rlcore.loop.role_protocols import Spawn, Spawned
from rlcore.rollout.specs import EngineJob
from rlcore.rollout.text import TextSettings
from rlcore.tasks.graders import GraderPool
from rlcore.types import POLICY

if TYPE_CHECKING:
    from rlcore.cluster.teacher_engines import TeacherOutlet

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's variables, the newer first


class Starting(Protocol):
    """A client of a process that is starting: references to wait for, and of what."""

    starting: list[tuple[Any, str]]


def wait_started(hosting: Hosting, clients: Iterable[Starting]) -> None:
    """Block until every process answers. Raises the error of a process that did not start, or
    DeadlineExceeded after cluster.start_timeout_s."""
    limit = hosting.supervision.start_timeout_s
    for client in clients:
        for ref, what in client.starting:
            get(ref, timeout_s=limit, what=what, key="cluster.start_timeout_s")


def start_buffer(hosting: Hosting, buffer: ReplayBuffer) -> RayBuffer:
    """The replay buffer, empty as it was built, in a process on the driver's node."""
    # Found by name, so that a graders' process that Ray restarts finds it too
    name = f"buffer-{secrets.token_hex(8)}"
    actor = actor_class(BufferActor, num_cpus=0, name=name, scheduling_strategy=beside_driver())
    handle = actor.remote(ShardFiles(write_shards, read_shards), keep_passes_short)
    started = handle.start.remote(buffer)
    return RayBuffer(handle, name, started, hosting)  # type: ignore[abstract]  # they are derived


def start_scorer(
    hosting: Hosting, buffer: RayBuffer, pools: tuple[GraderPool, ...], tokenizer_path: str
) -> RayScorer:
    """The graders' process, on the driver's node. Ray restarts it under the same handle and repeats
    calls that it did not answer."""
    actor = actor_class(
        ScorerActor,
        num_cpus=0,
        name=scorer_name(buffer.name),  # those of other nodes find it by this
        scheduling_strategy=beside_driver(),
        max_concurrency=CALL_THREADS,
        max_restarts=hosting.supervision.max_restarts,
        max_task_retries=-1,
    )
    handle = actor.remote(buffer.name, pools, tokenizer_path)
    return RayScorer(handle, handle.start.remote(), hosting)


def start_learners(
    hosting: Hosting,
    buffer: RayBuffer | None,
    jobs: Mapping[str, LearnerJob],
    *,
    wire_dtype: str,
    places: SharedPlaces | None = None,
) -> RayLearner:
    """The policy's ranks, and the ranks of each companion that has some.

    `jobs`: POLICY first, then companions by name; the number of ranks is `job.learner.ranks`.
    `buffer` None: supervised training and export alone. `places`: for ranks that share GPUs with
    engines. Blocks, in a cluster that was joined, until rank 0 has a place.
    """
    groups, started = [], []
    for name, job in jobs.items():
        handles = _spawn_ranks(hosting, buffer, job, name, places)
        timeout_s, shares = hosting.schedule.step_timeout_s, job.learner.shares
        group = RankGroup(name, handles, timeout_s=timeout_s, shares=shares)
        place = rendezvous(
            group.handles,
            port=job.learner.port if name == POLICY else 0,
            joined=joined_address(hosting.ray.address) is not None,
            start_timeout_s=hosting.supervision.start_timeout_s,
        )
        for rank, (handle, called) in enumerate(group.roles()):
            own = RankPlace(rank, job.learner.ranks, *place, timeout_s)
            started.append((handle.start.remote(job, own), f"{called} to start"))
        groups.append(group)
    return RayLearner(groups, started, hosting, wire_dtype=wire_dtype)


def _allocator(learner: LearnerSpec, transport: str) -> dict[str, Any]:
    """Options of ranks on GPUs: torch's memory then grows in place, so that micro-batches of
    changing sizes leave no unusable pieces. With ipc the default allocator is kept: engines open
    that memory by handles of whole allocations. UNPROVEN on GPUs."""
    named = any(os.environ.get(name) for name in ALLOCATOR)  # the user's own choice stays
    if learner.device == "cpu" or transport == "ipc" or named:
        return {}
    return {"runtime_env": {"env_vars": {ALLOCATOR[0]: "expandable_segments:True"}}}


def _spawn_ranks(
    hosting: Hosting,
    buffer: RayBuffer | None,
    job: LearnerJob,
    name: str,
    places: SharedPlaces | None,
) -> list[Any]:
    actor = actor_class(
        LearnerActor,
        num_cpus=job.learner.num_cpus,
        num_gpus=job.learner.num_gpus,
        resources=bound_to(LEARNER_RESOURCE, own_nodes=hosting.own_nodes),
        concurrency_groups=LEARNER_THREADS,
        **_allocator(job.learner, hosting.transport.transport),
    )
    handle = None if buffer is None else buffer.handle
    options = [{} if places is None else places.of_rank(i) for i in range(job.learner.ranks)]
    return [actor.options(**placed).remote(handle, hosting, name) for placed in options]


def rollout_spawner(
    hosting: Hosting,
    buffer: RayBuffer,
    scorer: RayScorer,
    engine: EngineJob,
    text: TextSettings,
    *,
    environments: Sequence[EnvironmentJob] = (),
    places: SharedPlaces | None = None,
    teacher: TeacherOutlet | None = None,
) -> Spawn:
    """A function that starts one rollout actor of this kind under a name, which `engine.actor_id`
    becomes. `places`: for engines that share GPUs with learner ranks. `teacher`: scores records on
    their way to the buffer."""
    spec = engine.actor
    actor = actor_class(
        RolloutActor,
        num_cpus=spec.num_cpus,
        num_gpus=spec.num_gpus * spec.tensor_parallel,
        resources=bound_to(ACTOR_RESOURCE, own_nodes=hosting.own_nodes),
        max_concurrency=CALL_THREADS,
    )

    def spawn(name: str) -> Spawned:
        placed = {} if places is None else places.of_next_engine()
        handle = actor.options(**placed).remote(
            (buffer.handle, buffer.name), scorer.handle, hosting
        )
        started = handle.start.remote(replace(engine, actor_id=name), text, environments, teacher)
        return Spawned(
            RayRolloutActor(handle, name, started, hosting, ranks=spec.tensor_parallel),
            placed=PendingReply(handle.__ray_ready__.remote(), "its process"),
            started=PendingReply(started, "its start"),
        )

    return spawn
