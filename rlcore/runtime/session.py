"""The processes of a run: buffer, scorer, rollout actors, learner ranks; started and taken down together."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from rlcore.config.schema import ActorConfig, RunConfig
from rlcore.errors import DeadlineExceeded
from rlcore.launch.settings import ACTOR_RESOURCE
from rlcore.runtime import options, shells
from rlcore.runtime.cluster import RoleLost, actor_class, beside_driver, get
from rlcore.runtime.evaluation import Evaluator, OnSamples
from rlcore.runtime.fleet import Fleet, Member, Purpose, Spawned
from rlcore.runtime.placing import meeting, on_nodes, spawn_ranks
from rlcore.runtime.preflight import Prepared
from rlcore.runtime.weights import GROUPS


class Session:
    """Handles of the roles. Construction returns when every role answers, or raises within `start_timeout_s`."""

    def __init__(
        self,
        config: RunConfig,
        model_path: str,
        *,
        pad_id: int,
        run_dir: Path,
        note: Callable[[str], None],
        with_learner: bool = True,
        with_actors: bool = True,
    ) -> None:
        self.config, self.model_path, self.run_dir, self._note = config, model_path, run_dir, note
        self.timeout_s = config.cluster.start_timeout_s
        self.transport = (config.cluster.transport, str(run_dir / "weights"))
        self._starting: list[tuple[Any, str]] = []  # answers to wait for, and of whom
        buffer_name = f"buffer-{secrets.token_hex(8)}"  # by name, it outlives the arguments of whoever is restarted
        self.buffer = actor_class(
            shells.BufferShell, num_cpus=0, name=buffer_name, scheduling_strategy=beside_driver()
        ).remote()
        self._starting.append((self.buffer.start.remote(options.buffer(config)), "the replay buffer to start"))
        self.scorer = self._start_scorer(buffer_name) if with_actors else None
        members = self._start_actors() if with_actors else []
        self.learners: list[Any] = []
        self.draft_learners: list[Any] = []
        if with_learner:
            self._start_learners(pad_id)
        for ref, what in self._starting:  # the cluster's end takes down what has started, should one of them fail
            get(ref, timeout_s=self.timeout_s, what=what, key="cluster.start_timeout_s")
        if config.cluster.transport in GROUPS and self.learners and members:
            self._join_transport(members)
        self.fleet = Fleet(
            members,
            on_publish=config.schedule.on_publish,
            publish_timeout_s=config.schedule.publish_timeout_s,
            hang_timeout_s=config.cluster.hang_timeout_s,
            start_timeout_s=config.cluster.start_timeout_s,
            max_restarts=config.cluster.max_restarts,
            joined=config.cluster.transport in GROUPS,
            log=note,
        )

    def _start_scorer(self, buffer_name: str) -> Any:
        """Ray restarts the graders' process under the same handle and repeats calls that it did not answer."""
        shell = actor_class(
            shells.ScorerShell,
            num_cpus=0,
            scheduling_strategy=beside_driver(),
            max_concurrency=8,
            max_restarts=self.config.cluster.max_restarts,
            max_task_retries=-1,
        )
        scorer = shell.remote(buffer_name, options.scorer(self.config), self.model_path)
        self._starting.append((scorer.start.remote(), "the graders to start"))
        return scorer

    def _start_actors(self) -> list[Member]:
        """The fleet of the configuration, and a dense actor for evaluation where the run has one."""
        config = self.config
        dense = options.evaluation_actor(config)
        kinds: dict[str, tuple[ActorConfig, Purpose]] = {
            label: (actor, "training" if dense else "all") for label, actor in config.actor.items()
        }
        if dense is not None:
            kinds["evaluation"] = (dense, "evaluation")
        members = []
        for label, (actor, purpose) in kinds.items():
            spawn, weights = self._spawner(label, actor), options.actor_weights(config, actor)
            for name in (f"{label}-{i}" for i in range(actor.count)):
                spawned = spawn(name)
                members.append(Member(name, label, spawn, spawned.handle, purpose=purpose, weights=weights))
                self._starting.append((spawned.started, f"rollout actor {name} to start"))
        return members

    def _start_learners(self, pad_id: int) -> None:
        """The policy's ranks, and those of a draft that is trained beside it."""
        config, model_path = self.config, self.model_path
        self.learners = spawn_ranks(config, config.learner.ranks, self.buffer, *self.transport)
        place = meeting(config, self.learners, config.learner.port)
        for rank, learner in enumerate(self.learners):
            arguments = options.learner(config, model_path, rank, place, pad_id)
            self._starting.append((learner.start.remote(arguments), f"learner rank {rank} to start"))
        if config.learner.draft is None:
            return
        draft_path = next(iter(config.actor.values())).draft_path
        assert draft_path is not None
        self.draft_learners = spawn_ranks(config, config.learner.draft.ranks, self.buffer, *self.transport)
        place = meeting(config, self.draft_learners)
        for rank, learner in enumerate(self.draft_learners):
            arguments = options.draft_learner(config, model_path, draft_path, rank, place, pad_id)
            self._starting.append((learner.start.remote(arguments), f"the draft's learner rank {rank} to start"))

    def evaluator(self, prepared: Prepared, on_samples: OnSamples) -> Evaluator:
        """Evaluations of the run's held-out prompts on this fleet."""
        return Evaluator(
            options.evaluation(self.config),
            tasks=prepared.eval_prompts,
            sampling=prepared.requests.sampling,
            fleet=self.fleet,
            scorer=self.scorer,
            run_seed=self.config.seed,
            on_samples=on_samples,
        )

    def _spawner(self, label: str, actor: ActorConfig) -> Callable[[str], Spawned]:
        """A function that starts one actor process of this kind under a name."""

        def spawn(name: str) -> Spawned:
            shell = actor_class(
                shells.RolloutShell,
                num_cpus=actor.num_cpus,
                num_gpus=actor.num_gpus * actor.tensor_parallel,
                resources=on_nodes(self.config, ACTOR_RESOURCE),
                max_concurrency=8,
            )
            handle = shell.remote(self.scorer, *self.transport)
            started = handle.start.remote(options.engine(self.config, label, actor, self.model_path, name))
            return Spawned(handle, handle.__ray_ready__.remote(), started)

        return spawn

    def _join_transport(self, members: list[Member]) -> None:
        """Learner rank 0 and every actor meet in the group that broadcasts weights."""
        host, port = get(self.learners[0].address.remote(), timeout_s=60, what="the learner's address", key="cluster")
        parties = [self.learners[0], *(m.handle for m in members)]
        joins = [p.join.remote(host, port, i, len(parties), self.timeout_s) for i, p in enumerate(parties)]
        get(joins, timeout_s=self.timeout_s, what="the weight transport to join", key="cluster.start_timeout_s")

    def each_learner(self, method: str, *args: Any, what: str, draft: bool = False) -> list[Any]:
        """The same call on every rank (of the draft's learner if asked). Raises RoleLost for a rank that hangs."""
        refs = [getattr(learner, method).remote(*args) for learner in (self.draft_learners if draft else self.learners)]
        limit = self.config.schedule.step_timeout_s
        try:
            return list(get(refs, timeout_s=limit, what=what, key="schedule.step_timeout_s"))
        except DeadlineExceeded as e:
            raise RoleLost(f"the learner hangs: {str(e).rstrip('.')}") from e

    def close(self) -> None:
        """End every process of the run; those that do not end by themselves are killed."""
        if self.scorer is not None:
            try:
                get(self.scorer.close.remote(), timeout_s=15, what="the graders to close", key="task.grade_timeout_s")
            except Exception as e:  # the run is ending: say it and go on taking the rest down
                self._note(f"graders did not close by themselves: {e}")
        members = self.fleet.members if hasattr(self, "fleet") else []
        for handle in [*(m.handle for m in members), *self.learners, *self.draft_learners, self.scorer, self.buffer]:
            if handle is not None:
                ray.kill(handle)
