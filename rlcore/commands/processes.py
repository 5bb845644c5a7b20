"""The processes of a run: buffer, graders, rollout actors, learner ranks; started together and
ended together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from rlcore.cluster.clients import RayLearner, RayRolloutActor, RayScorer
from rlcore.cluster.clients.scorer import RayNodeScorers
from rlcore.cluster.clients.shards import RayShards
from rlcore.cluster.heartbeats import RayRoleWatch
from rlcore.cluster.placement import SharedPlaces
from rlcore.cluster.ray_cluster import cluster
from rlcore.cluster.start import (
    rollout_spawner,
    start_buffer,
    start_learners,
    start_scorer,
    wait_started,
)
from rlcore.commands import jobs as roles
from rlcore.config.schema import RunConfig
from rlcore.loop.fleet import Fleet
from rlcore.loop.members import ActorPool, Purpose
from rlcore.loop.role_protocols import Clients
from rlcore.rollout.specs import ActorSpec


def connected(
    config: RunConfig,
    *,
    actors: bool = True,
    learner: bool = True,
    store_bytes: int = 0,
    patience_s: float = 0.0,
    stderr: Callable[[str, str], None] | None = None,
) -> AbstractContextManager[None]:
    """The cluster of a run, for the duration of a block: joined, or started and stopped.

    `actors`, `learner`: which roles it must hold. `store_bytes`: of one publication of weights.
    `stderr` is given what its processes write there, as `cluster` says.
    Raises UserError if it cannot hold them.
    """
    cpus, gpus = roles.needed(config, actors=actors, learner=learner)
    return cluster(
        config.cluster,
        needed_cpus=cpus,
        needed_gpus=gpus,
        store_bytes=store_bytes,
        patience_s=patience_s,
        stderr=stderr,
    )


def shared_places(config: RunConfig) -> SharedPlaces | None:
    """Of engines and the learner ranks that have their GPUs in turns with them, where a run has
    such; there may be more engines than ranks."""
    if not config.schedule.colocated:
        return None
    bundles: list[dict[str, float]] = []
    for actor in (a for a in config.actor.values() for _ in range(a.count)):
        rank = config.learner.num_cpus if len(bundles) < config.learner.ranks else 0.0
        gpu = {"GPU": 1.0} if actor.num_gpus else {}
        bundles.append({"CPU": actor.num_cpus + rank, **gpu})
    return SharedPlaces(bundles, start_timeout_s=config.cluster.start_timeout_s)


class Session:
    """Clients of the roles. Construction returns when every role answers, or raises within
    `cluster.start_timeout_s`; the end of the cluster takes down what has started by then."""

    def __init__(
        self,
        config: RunConfig,
        model_path: str,
        *,
        pad_id: int,
        note: Callable[[str], None],
        with_learner: bool = True,
        with_actors: bool = True,
    ) -> None:
        """`model_path`: the starting policy. `pad_id`: fills unused positions of micro-batches."""
        self._config = config
        self._note = note
        self._hosting = roles.hosting(config)
        self.buffer = start_buffer(self._hosting, roles.buffer_job(config))
        # Graders and actors come together: an actor sends its answers to the graders.
        self.scorer: RayScorer | None = None
        self.fleet: Fleet | None = None
        self.learner: RayLearner | None = None
        self.beside: RayNodeScorers | None = None  # graders on other nodes
        # Only what is trained on is kept.
        self.shards = RayShards(self.buffer, self._hosting) if with_learner else None
        self._places = shared_places(config) if with_learner and with_actors else None
        if with_actors:
            job = roles.scorer_job(config, model_path)
            self.scorer = start_scorer(self._hosting, self.buffer, job)
            if with_learner:  # else nothing watches them
                self.beside = RayNodeScorers(self.buffer, self._hosting, job, note)
            self.fleet = self._start_fleet(self.scorer, model_path)
        if self._places is not None:  # ranks have memory once the engines on their GPUs sleep
            wait_started(self._hosting, self._actors())
        if with_learner:
            jobs = roles.learner_jobs(config, model_path, pad_id)
            dtype, places = roles.wire_dtype(config), self._places
            self.learner = start_learners(
                self._hosting, self.buffer, jobs, wire_dtype=dtype, places=places
            )
        # Engines and ranks load their models at the same time: only now is anything waited for.
        started = [self.buffer, self.scorer, *self._actors(), self.learner]
        wait_started(self._hosting, [client for client in started if client is not None])

    def _start_fleet(self, scorer: RayScorer, model_path: str) -> Fleet:
        """The actors of the configuration, and a dense one for evaluation where the run has one."""
        config = self._config
        dense = roles.evaluation_actor(config)
        purpose: Purpose = "training" if dense else "all"
        kinds: dict[str, tuple[ActorSpec, Purpose]] = {
            label: (actor, purpose) for label, actor in config.actor.items()
        }
        if dense is not None:
            kinds["evaluation"] = (dense, "evaluation")
        pools = []
        for label, (actor, given) in kinds.items():
            places, sleeps = self._places, self._places is not None
            job = roles.rollout_job(config, label, actor, model_path, sleeps=sleeps)
            spawn = rollout_spawner(self._hosting, job, self.buffer, scorer, places)
            weights = roles.actor_weights(config, actor)
            pools.append(ActorPool(label, spawn, actor.count, given, weights))
        joined = config.cluster.joined
        return Fleet(pools, config.schedule, config.cluster, joined=joined, note=self._note)

    def _actors(self) -> list[RayRolloutActor]:
        """The fleet's processes as they are now; this session's spawners made all of them."""
        clients = [] if self.fleet is None else self.fleet.clients()
        return cast(list[RayRolloutActor], clients)

    def clients(self) -> Clients:
        """Return the clients that the loop calls. Only for a session with actors and a learner."""
        scorer, learner = self.scorer, self.learner
        assert scorer is not None and learner is not None
        supervision, note = self._config.cluster, self._note
        shards, beside = self.shards, self.beside
        assert shards is not None and beside is not None
        watch = RayRoleWatch(self.buffer, learner, scorer, supervision, note, shards, beside)
        return Clients(self.buffer, learner, scorer, watch)

    def restore(self, checkpoint: Path) -> None:
        """Load the learner's and the buffer's parts of a checkpoint."""
        assert self.learner is not None and self.shards is not None
        self.learner.load(str(checkpoint / "learner"))
        self.buffer.load(str(checkpoint / "buffer"), self.shards.names)

    def close(self) -> None:
        """End every process of the run; those that do not end by themselves are killed."""
        closing: list[RayScorer | RayNodeScorers | None] = [self.scorer, self.beside]
        for graders in closing:
            try:
                if graders is not None:
                    graders.close()
            except Exception as e:  # whatever it is, the rest must be taken down as well
                self._note(f"the graders did not close by themselves: {e}")
        # The buffer last: what dies before it may still be writing to it.
        clients: list[Any] = [*self._actors(), self.learner, *closing, self.shards, self.buffer]
        for client in clients:
            if client is not None:
                client.kill()
