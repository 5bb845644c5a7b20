"""The arguments that the roles of a run are started with, made from its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rlcore.buffer.specs import TaskShare
from rlcore.cluster.jobs import BufferJob, Hosting, RolloutJob, ScorerJob
from rlcore.config.schema import RunConfig
from rlcore.config.task_checks import mixed
from rlcore.corrections.tis import TisSpec
from rlcore.environments.specs import EnvironmentJob
from rlcore.learner.specs import PARTS, SPARSE_COPY, LearnerJob
from rlcore.loop.plan import Plan
from rlcore.objectives.specs import loss_class
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.rollout.text import PromptJob, StopStrings
from rlcore.tasks import tasks_with_tokens
from rlcore.tasks.graders import GraderPool
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.types import POLICY, SamplingSpec
from rlcore.weights.adapters import AdapterShape

DRAFT = "draft"  # a co-trained draft's weights, among the sets that are published
MIN_KEPT_SAMPLES = 8  # of a batch, for display: what an evaluation shows too


def needed(config: RunConfig, *, actors: bool = True, learner: bool = True) -> tuple[float, float]:
    """(CPUs, GPUs) that the roles ask for together; `actors`, `learner`: which of them there
    are."""
    engines = [*config.actor.values(), *filter(None, [evaluation_actor(config)])] if actors else []
    count, spec = ranks(config) if learner else 0, config.learner
    # The buffer and the graders ask for no CPU: they would otherwise not fit a machine of two.
    cpus = sum(a.count * a.num_cpus for a in engines) + count * spec.num_cpus
    gpus = sum(a.count * a.num_gpus * a.tensor_parallel for a in engines)
    if not (actors and config.schedule.colocated):  # there engines and ranks are on the same ones
        gpus += count * spec.num_gpus
    return cpus, gpus


def ranks(config: RunConfig) -> int:
    """Learner ranks, those of a co-trained draft included."""
    draft = config.learner.draft
    return config.learner.ranks + (draft.ranks if draft else 0)


def hosting(config: RunConfig) -> Hosting:
    """Where and how the run's processes are started."""
    return Hosting(
        ray=config.cluster,
        schedule=config.schedule,
        supervision=config.cluster,
        transport=config.cluster,
        weights_folder=str(Path(config.run_dir) / "weights"),
        own_nodes=config.cluster.launch.learner_nodes > 0,
    )


def plan(config: RunConfig) -> Plan:
    """Return the plan of the loop."""
    return Plan(
        schedule=config.schedule,
        supervision=config.cluster,
        checkpoint=config.checkpoint,
        request_timeout_s=config.rollout.request_timeout_s,
        samples_per_step=config.logging.samples_per_step,
        verify_full=config.cluster.verify_weights == "full",
    )


def idle_clip(config: RunConfig) -> str | None:
    """A sentence on a loss whose clip can never bind under the run's schedule, or None.

    Nothing is said of the clip that every run has by default: nobody relies on it.
    """
    loss, declared = config.algorithm.loss, type(config.algorithm).model_fields
    default = all(
        getattr(config.algorithm, key) == declared[key].default
        for key in ("eps_low", "eps_high", "dual_clip")
    )
    off = any(spec.inner_clip_off for spec in config.correction.chosen().values())
    if default or config.schedule.phases.steps > 1 or off or not loss_class(loss).clips:
        return None
    return (
        f"the clip of algorithm.loss={loss} never binds, since every update phase is one optimizer "
        "step, in which p_new is p_ref: schedule.steps_per_phase or schedule.epochs above 1 make "
        "it longer"
    )


def buffer_job(config: RunConfig) -> BufferJob:
    return BufferJob(
        batching=config.schedule,
        selection=config.algorithm,
        samples_per_group=config.rollout.samples_per_prompt,
        max_bytes=config.cluster.buffer_mib << 20,
        run_seed=config.seed,
        keep_samples=max(MIN_KEPT_SAMPLES, config.logging.samples_per_step),
        tasks=_shares(config),
        kinds=tuple(config.actor) if len(config.actor) > 1 else (),
    )


def _shares(config: RunConfig) -> dict[str, TaskShare] | None:
    """Return the buffer's settings of several tasks, or of a single one whose pass rates are
    remembered."""
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


def scorer_job(config: RunConfig, model_path: str) -> ScorerJob:
    return ScorerJob(
        pools=grader_pools(config),
        evaluation=config.evaluation,
        tokenizer_path=model_path,
    )


def grader_pools(config: RunConfig) -> tuple[GraderPool, ...]:
    """Return the pools of grading processes, each with the tasks that share it."""
    first, *rest = config.tasks
    trained = {label: config.task_key(label) for label in config.tasks}
    keys = trained | {label: f"evaluation.tasks.{label}" for label in config.evaluation.tasks}
    evaluated = {first: config.tasks[first], **config.evaluation.tasks}
    own = [GraderPool({label: config.tasks[label]}, config.tasks[label], keys) for label in rest]
    return (GraderPool(evaluated, config.grading, keys), *own)


def rollout_job(
    config: RunConfig, label: str, actor: ActorSpec, model_path: str, *, sleeps: bool = False
) -> RolloutJob:
    """`sleeps`: its engine has its GPU in turns with a learner rank."""
    # A draft samples with its own model; the policy's folder then says what its tokens must mean.
    engine = EngineJob(
        actor=actor,
        actor_id=label,
        model_path=actor.draft_path or model_path,
        max_len=config.model.max_len,
        logprobs_k=config.rollout.logprobs_k,
        policy_path=model_path if actor.draft_path else None,
        transfer=_engine_transfer(config),
        adapter=_adapter(config, actor),
        diffusion=config.model.diffusion,
        routes=config.learner.router_replay,
        sleeps=sleeps,
    )
    stop, environments = stop_strings(config), tuple(environment_jobs(config).values())
    tasks = {**config.tasks, **config.evaluation.tasks}
    return RolloutJob(
        engine,
        tokenizer_path=model_path,
        stop=stop,
        in_pieces=tasks_with_tokens(tasks),
        raw=frozenset(label for label, task in tasks.items() if task.grader_text == "raw"),
        environments=environments,
        prompts=_prompt_job(config),
    )


def _prompt_job(config: RunConfig) -> PromptJob:
    specs = {**config.evaluation.tasks, **config.tasks}
    return PromptJob(
        {label: most_prompt_tokens(config, label, spec) for label, spec in specs.items()},
        cut=frozenset(n for n, spec in specs.items() if spec.overlong_rows == "truncate_left"),
        chat_template=config.model.chat_template,
        system_prompt=config.model.system_prompt,
        control_tokens=config.model.control_tokens,
    )


def most_prompt_tokens(config: RunConfig, label: str, spec: EvalTaskSpec) -> int:
    """Tokens that a prompt of a task may have: a response must always fit behind it."""
    if label in config.tasks:
        answer = config.rollout_of(label).max_new_tokens
    else:
        answer = config.evaluation.of(label).max_new_tokens or config.rollout.max_new_tokens
    room = config.model.max_len - answer
    return min(room, spec.max_prompt_tokens or room)


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
            chat_template=config.model.chat_template,
            system_prompt=config.model.system_prompt,
            control_tokens=config.model.control_tokens,
        )
        for label, environment in config.played.items()
    }


def stop_strings(config: RunConfig) -> StopStrings:
    """Return the strings that end a response of each task."""
    own = {label: config.rollout_of(label).stop for label in config.tasks}
    return StopStrings(config.rollout.stop, own)


def _adapter(config: RunConfig, actor: ActorSpec) -> AdapterShape | None:
    """The adapter that an actor is sent by itself, if it is."""
    learner, weights = config.learner, actor_weights(config, actor)
    loras = {POLICY: learner.lora, SPARSE_COPY: learner.distill.lora if learner.distill else None}
    lora = None if weights is None else loras.get(weights)
    if lora is None or lora.publish == "merged":
        return None
    return AdapterShape(lora.rank, lora.targets)


def _engine_transfer(config: RunConfig) -> Literal["nccl", "ipc"] | None:
    """How engines receive weights by themselves, if they do."""
    named: dict[str, Literal["nccl", "ipc"]] = {"nccl": "nccl", "ipc": "ipc"}
    return named.get(config.cluster.transport)


def learner_jobs(config: RunConfig, model_path: str, pad_id: int) -> dict[str, LearnerJob]:
    """The policy's learner, and that of a draft that is trained beside it."""
    jobs = {POLICY: policy_job(config, model_path, pad_id)}
    if config.learner.draft is not None:
        jobs[DRAFT] = _draft_job(config, model_path, pad_id)
    return jobs


def policy_job(config: RunConfig, model_path: str, pad_id: int) -> LearnerJob:
    # Every actor has the same rule then, which config/checks.py has seen to.
    follows_actors = config.learner.distill is not None or config.learner.train_sparse
    return LearnerJob(
        model_path=model_path,
        learner=config.learner,
        objective=config.algorithm,
        corrections=config.correction.chosen(),
        sampling=_longest_sampling(config),
        task_advantages=_advantages(config),
        task_temperatures=_temperatures(config),
        total_steps=config.schedule.steps,
        run_seed=config.seed,
        pad_id=pad_id,
        sparse=next(iter(config.actor.values())).sparse if follows_actors else None,
        keep_by_acceptance=config.algorithm.kept_by_learner,
        diffusion=config.model.diffusion,
        strata=config.strata,
    )


def _advantages(config: RunConfig) -> dict[str, str]:
    """Of each of several tasks."""
    return {label: config.advantage_of(label)[1] for label in mixed(config)}


def _temperatures(config: RunConfig) -> dict[str, float]:
    """Of each of several tasks."""
    return {label: config.rollout_of(label).temperature for label in mixed(config)}


def _longest_sampling(config: RunConfig) -> SamplingSpec:
    """`rollout` with the longest response of any task, which the learner divides by."""
    longest = max(config.rollout_of(label).max_new_tokens for label in config.tasks)
    return replace(config.rollout.sampling(), max_new_tokens=longest)


def _draft_job(config: RunConfig, model_path: str, pad_id: int) -> LearnerJob:
    """The policy's own settings on the draft's model, with a KL to the policy."""
    draft = config.learner.draft
    path = next(iter(config.actor.values())).draft_path
    assert draft is not None and path is not None
    # Adapters would be the policy's: a draft is small enough to be trained whole.
    own = {
        "ranks": draft.ranks,
        "lr": draft.lr,
        "lora": None,
        "draft": None,
        "router_replay": False,
    }
    own |= dict.fromkeys(PARTS, 1)
    kl = {"kl_coef": draft.kl_coef, "kl_estimator": draft.kl_estimator}
    return LearnerJob(
        model_path=path,
        learner=config.learner.model_copy(update=own),
        objective=config.algorithm.model_copy(update=kl),
        # The actors are the draft itself, so that only its age is to be corrected.
        corrections={"tis": TisSpec()},
        sampling=_longest_sampling(config),
        task_advantages=_advantages(config),
        task_temperatures=_temperatures(config),
        total_steps=config.schedule.steps,
        run_seed=config.seed,
        pad_id=pad_id,
        frozen_path=model_path,
    )


def evaluation_actor(config: RunConfig) -> ActorSpec | None:
    """The engine that evaluates the policy itself, where actors are something else: the first
    actor's, made plain."""
    asked = config.evaluation.dense_actor
    if asked is None:
        # A draft's answers say nothing of the policy; other actors' are close to it.
        asked = any(a.kind == "draft" for a in config.actor.values())
    if not asked:
        return None
    # Its resources and engine settings stay, so that it fits wherever the actor fits.
    plain: dict[str, Any] = {
        "kind": "bf16",
        "count": 1,
        "rounding": "none",
        "fp8_kv_cache": False,
        "sparse": None,
        "draft_path": None,
        "draft_fresh": None,
        "logit_noise": 0.0,
        "temperature_scale": 1.0,
    }
    return next(iter(config.actor.values())).model_copy(update=plain)


def actor_weights(config: RunConfig, actor: ActorSpec) -> str | None:
    """Return the name of the published weights that an actor loads; None: a frozen draft's own
    weights."""
    if actor.kind == "draft":
        return DRAFT if config.learner.draft else None
    return SPARSE_COPY if actor.kind == "sparse" and config.learner.distill else POLICY


def wire_dtype(config: RunConfig) -> str:
    """Published weights have the actors' dtype where all agree, so that what arrives is what is
    served."""
    dtypes = {a.compute_dtype for a in config.actor.values()}
    return str(dtypes.pop()) if len(dtypes) == 1 else "float32"


def describe_actor(label: str, actor: ActorSpec, max_len: int) -> str:
    """One line on what samples under this label."""
    what = _described(actor)
    if actor.fp8_kv_cache:
        what += ", FP8 KV cache"
    if actor.sparse is not None and actor.sparse.dense_positions >= max_len:
        what += f"; the budget covers model.max_len={max_len}: NOTHING IS SPARSE"
    return f"actor.{label}: {what}"


def _described(actor: ActorSpec) -> str:
    dtype, rounding, sparse = actor.compute_dtype, actor.rounding, actor.sparse
    if rounding != "none":
        return (
            f"{rounding} emulated: weights rounded to {rounding} and back before loading, one "
            f"scale a {actor.scales}, arithmetic in {dtype}"
        )
    if actor.kind == "fp8":
        return f"vLLM's FP8 (W8A8, dynamic, one weight scale a {actor.scales})"
    if sparse is not None:
        budget = f"{sparse.blocks} pages" if sparse.blocks else f"{sparse.share:g} of the pages"
        prompts = "" if sparse.sparse_prompt else ", prompts dense"
        size = sparse.block_size
        return f"block top-k attention, {budget} of {size} tokens{prompts}, {dtype}"
    if actor.kind == "draft":
        return f"a draft model, {dtype}"
    return f"the policy in {dtype}"
