"""The processes of a run: buffer, graders, rollout actors, learner ranks; started together and
ended together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rlcore.buffer import ReplayBuffer
from rlcore.buffer.admission import MIB, ByteLimit, StalenessBound
from rlcore.buffer.specs import TaskShare
from rlcore.cluster.clients import RayLearner, RayRolloutActor, RayScorer
from rlcore.cluster.clients.scorer import RayNodeScorers
from rlcore.cluster.clients.shards import RayShards
from rlcore.cluster.heartbeats import RayRoleWatch
from rlcore.cluster.placement import SharedPlaces
from rlcore.cluster.ray_cluster import cluster, joined_head_lost
from rlcore.cluster.specs import Hosting
from rlcore.cluster.start import (
    rollout_spawner,
    start_buffer,
    start_learners,
    start_scorer,
    wait_started,
)
from rlcore.commands import derived
from rlcore.commands.about import run_kernels
from rlcore.commands.model_checks import longest_record
from rlcore.config.parts import PARTS
from rlcore.config.places import tied_by
from rlcore.config.schema import RunConfig
from rlcore.config.task_checks import mixed
from rlcore.environments.specs import EnvironmentJob
from rlcore.learner.specs import LearnerJob
from rlcore.loop.fleet import Fleet
from rlcore.loop.members import ActorPool, Purpose
from rlcore.loop.role_protocols import Clients
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.rollout.text import TextSettings
from rlcore.tasks import tasks_with_tokens
from rlcore.types import POLICY, SamplingSpec
from rlcore.weights.adapters import AdapterShape

if TYPE_CHECKING:
    from rlcore.cluster.teacher_engines import RayTeacher, TeacherOutlet

MIN_KEPT_SAMPLES = 8  # of a batch, for display: what an evaluation shows too
# Transports by which engines receive weights by themselves
ENGINE_TRANSFERS: dict[str, Literal["nccl", "ipc"]] = {"nccl": "nccl", "ipc": "ipc"}


@contextmanager
def connected(
    config: RunConfig,
    *,
    actors: bool = True,
    learner: bool = True,
    store_bytes: int = 0,
    patience_s: float = 0.0,
    stderr: Callable[[str, str], None] | None = None,
) -> Iterator[None]:
    """The cluster of a run, for the duration of a block: joined, or started and stopped.

    `actors`, `learner`: which roles it must hold. `store_bytes`: of one publication of weights.
    `stderr` receives the standard error of its processes, as in `cluster`.
    Raises UserError if it cannot hold them.
    """
    cpus, gpus = derived.needed(config, actors=actors, learner=learner)
    kernels = run_kernels(config)
    joined = cluster(
        config.cluster,
        needed_cpus=cpus,
        needed_gpus=gpus,
        store_bytes=store_bytes,
        patience_s=patience_s,
        stderr=stderr,
    )
    # Ray's processes inherit the variable
    with nullcontext() if kernels is None else kernels.set_here(), joined:
        yield


def shared_places(config: RunConfig) -> SharedPlaces | None:
    """Places of engines and learner ranks that share GPUs, where a run has such; None otherwise.
    With turns there may be more engines than ranks."""
    if tied_by(config) is None:
        return None
    bundles: list[dict[str, float]] = []
    for actor in (a for a in config.actor.values() for _ in range(a.count)):
        rank = config.learner.num_cpus if len(bundles) < config.learner.ranks else 0.0
        gpu = {"GPU": 1.0} if actor.num_gpus else {}
        bundles.append({"CPU": actor.num_cpus + rank, **gpu})
    return SharedPlaces(bundles, start_timeout_s=config.cluster.start_timeout_s)


class Session:
    """Clients of the roles. Construction returns when every role answers, or raises within
    `cluster.start_timeout_s`; processes that have started by then end with the cluster."""

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
        self._hosting = hosting(config)
        self.buffer = start_buffer(self._hosting, replay_buffer(config))
        # Graders and actors come together: an actor sends its answers to the graders.
        self.scorer: RayScorer | None = None
        self.fleet: Fleet | None = None
        self.learner: RayLearner | None = None
        self.beside: RayNodeScorers | None = None  # graders on other nodes
        self.teacher: RayTeacher | None = None
        # Only what is trained on is kept.
        self.shards = RayShards(self.buffer, self._hosting) if with_learner else None
        self._places = shared_places(config) if with_learner and with_actors else None
        if with_actors:
            graders = self.buffer, derived.grader_pools(config), model_path
            self.scorer = start_scorer(self._hosting, *graders)
            if with_learner:  # else nothing watches them
                self.beside = RayNodeScorers(self._hosting, *graders, note)
            if with_learner and config.teacher.kind == "engine":
                from rlcore.cluster.teacher_engines import start_engines

                self.teacher = start_engines(self._hosting, teacher_job(config), note)
            self.fleet = self._start_fleet(self.scorer, model_path)
        if self._places is not None and config.schedule.colocated:
            # ranks have memory once the engines on their GPUs sleep
            wait_started(self._hosting, self._actors())
        if with_learner:
            jobs = learner_jobs(config, model_path, pad_id)
            if with_actors and derived.follows_load(config):
                jobs[POLICY] = replace(jobs[POLICY], follows_load=True)
            dtype, places = derived.wire_dtype(config), self._places
            self.learner = start_learners(
                self._hosting, self.buffer, jobs, wire_dtype=dtype, places=places
            )
        # Engines and ranks load their models at the same time: only now is anything waited for.
        started = [self.buffer, self.scorer, self.teacher, *self._actors(), self.learner]
        wait_started(self._hosting, [client for client in started if client is not None])

    def _start_fleet(self, scorer: RayScorer, model_path: str) -> Fleet:
        """The actors of the configuration, and a dense one for evaluation where the run has one."""
        config = self._config
        dense = derived.evaluation_actor(config)
        purpose: Purpose = "training" if dense else "all"
        kinds: dict[str, tuple[ActorSpec, Purpose]] = {
            label: (actor, purpose) for label, actor in config.actor.items()
        }
        if dense is not None:
            kinds["evaluation"] = (dense, "evaluation")
        text, environments = text_settings(config, model_path), environment_jobs(config)
        pools = []
        for label, (actor, given) in kinds.items():
            sleeps = self._places is not None and config.schedule.colocated
            spawn = rollout_spawner(
                self._hosting,
                self.buffer,
                scorer,
                engine_job(config, label, actor, model_path, sleeps=sleeps),
                text,
                environments=tuple(environments.values()),
                places=self._places,
                teacher=self._teacher_outlet(),
            )
            weights = derived.actor_weights(config, actor)
            pools.append(ActorPool(label, spawn, actor.count, given, weights))
        joined = config.cluster.joined
        return Fleet(
            pools,
            config.schedule,
            config.cluster,
            joined=joined,
            tied=tied_by(config),
            note=self._note,
        )

    def _teacher_outlet(self) -> TeacherOutlet | None:
        if self.teacher is None:
            return None
        from rlcore.cluster.teacher_engines import TeacherOutlet

        return TeacherOutlet(self.teacher.handles, self._config.teacher.engine.timeout_s)

    def _actors(self) -> list[RayRolloutActor]:
        """The fleet's present processes, all made by this session's spawners."""
        clients = [] if self.fleet is None else self.fleet.clients()
        return cast(list[RayRolloutActor], clients)

    def clients(self) -> Clients:
        """Return the clients that the loop calls. Only for a session with actors and a learner."""
        scorer, learner = self.scorer, self.learner
        assert scorer is not None and learner is not None
        supervision, note = self._config.cluster, self._note
        shards, beside = self.shards, self.beside
        assert shards is not None and beside is not None
        watch = RayRoleWatch(
            self.buffer, learner, scorer, supervision, note, shards, beside, self.teacher
        )
        return Clients(self.buffer, learner, scorer, watch)

    def restore(self, checkpoint: Path) -> None:
        """Load the learner's and the buffer's parts of a checkpoint."""
        assert self.learner is not None and self.shards is not None
        self.learner.load(str(checkpoint / "learner"))
        self.buffer.load(str(checkpoint / "buffer"), self.shards.names)

    def close(self) -> None:
        """End every process of the run; those that do not end by themselves are killed. On a
        cluster without a head none can be, and they end with their nodes."""
        if joined_head_lost(self._config.cluster.address):
            return  # at once: Ray ends a driver that is connected for a minute without a head
        closing: list[RayScorer | RayNodeScorers | None] = [self.scorer, self.beside]
        for graders in closing:
            try:
                if graders is not None:
                    graders.close()
            except Exception as e:  # whatever it is, the rest must be taken down as well
                self._note(f"the graders did not close by themselves: {e}")
        # The buffer last: processes that end before it may still be writing to it.
        roles = [self.teacher, self.learner, *closing, self.shards, self.buffer]
        clients: list[Any] = [*self._actors(), *roles]
        for client in clients:
            if client is not None:
                client.kill()


def hosting(config: RunConfig) -> Hosting:
    """Where and how the run's processes are started."""
    return Hosting(
        ray=config.cluster,
        schedule=config.schedule,
        supervision=config.cluster,
        transport=config.cluster,
        evaluation=config.evaluation,
        run_dir=config.run_dir,
        own_nodes=config.cluster.launch.learner_nodes > 0,
        recorder=config.logging.recorder,
    )


def task_shares(config: RunConfig) -> dict[str, TaskShare] | None:
    """The buffer's settings of several tasks, or of one whose pass rates are remembered."""
    if not config.mixed and all(spec.difficulty is None for spec in config.tasks.values()):
        return None
    return {
        label: TaskShare(
            config.rollout_of(label).samples_per_prompt,
            getattr(spec, "weight", 1.0),
            remember=spec.difficulty is not None,
        )
        for label, spec in config.tasks.items()
    }


def replay_buffer(config: RunConfig) -> ReplayBuffer:
    """The run's buffer, empty."""
    return ReplayBuffer(
        config.schedule,
        config.algorithm,
        samples_per_group=config.rollout.samples_per_prompt,
        limit=_byte_limit(config),
        run_seed=config.seed,
        keep_samples=max(MIN_KEPT_SAMPLES, config.logging.samples_per_step),
        tasks=task_shares(config),
        kinds=tuple(config.actor) if len(config.actor) > 1 else (),
    )


def _byte_limit(config: RunConfig) -> ByteLimit:
    """A sample is first expected to take what it can take by its limits on tokens."""
    longest = max(longest_record(config, label) for label in config.tasks)
    return ByteLimit(config.cluster.buffer_mib * MIB, max(MIB, longest))


def engine_job(
    config: RunConfig, label: str, actor: ActorSpec, model_path: str, *, sleeps: bool = False
) -> EngineJob:
    """The job of one engine. `sleeps`: it shares its GPU in turns with a learner rank."""
    # A draft samples with its own model; the policy's folder then says what its tokens must mean.
    return EngineJob(
        actor=actor,
        actor_id=label,
        model_path=actor.draft_path or model_path,
        max_len=config.model.max_len,
        logprobs_k=config.rollout.logprobs_k,
        policy_path=model_path if actor.draft_path else None,
        transfer=ENGINE_TRANSFERS.get(config.cluster.transport),
        adapter=_adapter(config, actor),
        diffusion=config.model.diffusion,
        routes=config.learner.router_replay,
        sleeps=sleeps,
        bitwise=config.bitwise,
        cpu_fast_paths=config.cluster.cpu_fast_paths,
    )


def teacher_job(config: RunConfig) -> EngineJob:
    """The engine of a teacher that is not a model of the learner's."""
    spec, folder = config.teacher, config.teacher_folder
    assert folder is not None and spec.top_k is not None
    return EngineJob(
        spec.engine.actor,
        "teacher",
        folder,
        config.model.max_len,
        spec.top_k,
        cpu_fast_paths=False,  # it only reads prompts, each a record of its own
    )


def _adapter(config: RunConfig, actor: ActorSpec) -> AdapterShape | None:
    """The adapter that an actor is sent without the policy's weights, or None."""
    weights = derived.actor_weights(config, actor)
    loras = {part.weights: part.adapters(config) for part in PARTS}
    lora = (loras | {POLICY: config.learner.lora}).get(weights or "")
    if lora is None or lora.publish == "merged":
        return None
    return AdapterShape(lora.rank, lora.targets)


def text_settings(config: RunConfig, tokenizer_path: str) -> TextSettings:
    """Rules of the text of every task, trained on or evaluated."""
    tasks = {**config.evaluation.tasks, **config.tasks}
    return TextSettings(
        tokenizer_path,
        {label: derived.most_prompt_tokens(config, label, spec) for label, spec in tasks.items()},
        cut=frozenset(n for n, spec in tasks.items() if spec.overlong_rows == "truncate_left"),
        template=config.model,
        stop=derived.stop_strings(config),
        in_pieces=tasks_with_tokens(tasks),
        raw=frozenset(label for label, task in tasks.items() if task.grader_text == "raw"),
    )


def environment_jobs(config: RunConfig) -> dict[str, EnvironmentJob]:
    """Return the environment of each training task, by label; without one an answer is one turn."""
    return {
        label: EnvironmentJob(
            environment=environment,
            task=config.tasks[label],
            label=label,
            max_len=config.model.max_len,
            run_seed=config.seed,
            stop=config.rollout_of(label).stop,
            template=config.model,
        )
        for label, environment in config.played.items()
    }


def learner_jobs(config: RunConfig, model_path: str, pad_id: int) -> dict[str, LearnerJob]:
    """Jobs of the policy's learner, and of parts that have ranks, by the names of weights."""
    policy = policy_job(config, model_path, pad_id)
    used = (part for part in PARTS if part.setting(config))
    own = {part.weights: part.own_job(config, policy) for part in used}
    return {POLICY: policy} | {name: job for name, job in own.items() if job is not None}


def policy_job(config: RunConfig, model_path: str, pad_id: int) -> LearnerJob:
    used = (part.job(config) for part in PARTS if part.setting(config))
    of_parts = {name: value for fields in used for name, value in fields.items()}
    several = mixed(config)
    return LearnerJob(
        model_path=model_path,
        learner=config.learner,
        objective=config.algorithm,
        corrections=config.correction.chosen(),
        sampling=_longest_sampling(config),
        task_advantages={label: config.advantage_of(label)[1] for label in several},
        task_temperatures={label: config.rollout_of(label).temperature for label in several},
        total_steps=config.schedule.steps,
        run_seed=config.seed,
        pad_id=pad_id,
        in_flight=StalenessBound.of(config.schedule).behind,
        threads=derived.stated_threads(config),
        keep_by_acceptance=config.algorithm.kept_by_learner,
        diffusion=config.model.diffusion,
        strata=config.strata,
        by_position=bool(derived.page_ranges(config)),
        shadow=config.correction.shadows,
        cpu_fast_paths=config.cluster.cpu_fast_paths,
        **of_parts,
    )


def _longest_sampling(config: RunConfig) -> SamplingSpec:
    """`rollout` with the longest response of any task, which the learner divides by."""
    longest = max(config.rollout_of(label).max_new_tokens for label in config.tasks)
    return replace(config.rollout.sampling(), max_new_tokens=longest)
