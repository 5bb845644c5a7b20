"""From the typed configuration to the plain arguments of each stage. The only reader of config below the commands."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from rlcore.config.schema import ActorConfig, RunConfig
from rlcore.runtime.evaluation import EvalPlan
from rlcore.runtime.fleet import POLICY
from rlcore.runtime.plan import Plan
from rlcore.types import ActorKind, SamplingSpec

if TYPE_CHECKING:
    from rlcore.attention.block_topk import BlockTopK


def sampling(config: RunConfig) -> SamplingSpec:
    """What actors are asked to sample from, before corrections constrain it."""
    r = config.rollout
    return SamplingSpec(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        max_new_tokens=r.max_new_tokens,
        stop=tuple(r.stop),
        logprobs_k=r.logprobs_k,
    )


def needed(config: RunConfig, *, actors: bool = True, learner: bool = True) -> tuple[float, float]:
    """(CPUs, GPUs) that the roles ask for together; `actors`, `learner`: which of them there are."""
    le = config.learner
    engines = [*config.actor.values(), *filter(None, [evaluation_actor(config)])] if actors else []
    ranks = (le.ranks + (le.draft.ranks if le.draft else 0)) if learner else 0
    cpus = sum(a.count * a.num_cpus for a in engines) + ranks * le.num_cpus
    gpus = sum(a.count * a.num_gpus * a.tensor_parallel for a in engines) + ranks * le.num_gpus
    return cpus, gpus


def evaluation_actor(config: RunConfig) -> ActorConfig | None:
    """The engine that evaluates the policy itself, where actors are something else: the first actor's, made plain."""
    wanted = config.evaluation.dense_actor
    if wanted is None:
        wanted = any(a.kind == "draft" for a in config.actor.values())
    if not wanted:
        return None
    plain: dict[str, Any] = {"kind": "bf16", "count": 1, "rounding": "none", "fp8_kv_cache": False, "sparse": None}
    plain |= {"draft_path": None, "draft_fresh": None, "logit_noise": 0.0, "temperature_scale": 1.0}
    return next(iter(config.actor.values())).model_copy(update=plain)


def actor_weights(config: RunConfig, actor: ActorConfig) -> str | None:
    """Which published weights an actor loads; None: a frozen draft's own."""
    if actor.kind == "draft":
        return "draft" if config.learner.draft else None
    return "sparse" if actor.kind == "sparse" and config.learner.distill else POLICY


def plan(config: RunConfig) -> Plan:
    s = config.schedule
    return Plan(
        steps=s.steps,
        groups_per_step=s.groups_per_step,
        steps_per_publish=s.steps_per_publish,
        max_staleness=s.max_staleness,
        eval_every=config.evaluation.every,
        checkpoint_every=config.checkpoint.every,
        checkpoint_at_end=config.checkpoint.at_end,
        wait_data_timeout_s=s.wait_data_timeout_s,
        publish_timeout_s=s.publish_timeout_s,
        step_timeout_s=s.step_timeout_s,
        heartbeat_s=config.cluster.heartbeat_s,
        hang_timeout_s=config.cluster.hang_timeout_s,
        request_timeout_s=config.rollout.request_timeout_s,
        samples_per_step=config.logging.samples_per_step,
        wire_dtype=wire_dtype(config),
        verify_full=config.cluster.verify_weights == "full",
        run_seed=config.seed,
        sparse_copy=config.learner.distill is not None,
    )


def evaluation(config: RunConfig) -> EvalPlan:
    e = config.evaluation
    return EvalPlan(e.every, e.at_start, e.prompts, e.samples, e.greedy, e.temperature, e.timeout_s)


def learner_device(config: RunConfig) -> str:
    return "cuda" if config.learner.num_gpus else "cpu"


def learner_dtype(config: RunConfig) -> str:
    if config.learner.dtype != "auto":
        return config.learner.dtype
    return "bfloat16" if config.learner.num_gpus else "float32"


def actor_dtype(actor: ActorConfig) -> str:
    if actor.dtype != "auto":
        return actor.dtype
    return "bfloat16" if actor.num_gpus else "float32"


def actor_kind(actor: ActorConfig) -> ActorKind:
    """The kind on every trajectory: an emulated precision is never called by the name of the real one."""
    if actor.rounding == "none":
        return actor.kind
    emulated: dict[str, ActorKind] = {"fp8": "fp8_emulated", "int8": "int8_emulated", "int4": "int4_emulated"}
    return emulated[actor.rounding]


def describe_actor(label: str, actor: ActorConfig, max_len: int) -> str:
    """One line on what samples under this label."""
    if actor.rounding != "none":
        what = (
            f"{actor.rounding} emulated: weights rounded to {actor.rounding} and back before loading, one scale a "
            f"{actor.scales}, arithmetic in {actor_dtype(actor)}"
        )
    elif actor.kind == "fp8":
        what = f"vLLM's FP8 (W8A8, dynamic, one weight scale a {actor.scales})"
    elif actor.sparse is not None:
        budget = f"{actor.sparse.blocks} pages" if actor.sparse.blocks else f"{actor.sparse.share:g} of the pages"
        prompts = "" if actor.sparse.sparse_prompt else ", prompts dense"
        what = f"block top-k attention, {budget} of {actor.sparse.block_size} tokens{prompts}, {actor_dtype(actor)}"
    elif actor.kind == "draft":
        what = f"a draft model, {actor_dtype(actor)}"
    else:
        what = f"the policy in {actor_dtype(actor)}"
    if actor.fp8_kv_cache:
        what += ", FP8 KV cache"
    if (rule := sparse_rule(actor)) is not None and rule.dense_positions >= max_len:
        what += f"; the budget covers model.max_len={max_len}: NOTHING IS SPARSE"
    return f"actor.{label}: {what}"


def sparse_rule(actor: ActorConfig) -> BlockTopK | None:
    """The attention rule of a sparse actor."""
    from rlcore.attention.block_topk import BlockTopK

    s = actor.sparse
    return None if s is None else BlockTopK(s.block_size, s.blocks, s.share, s.sparse_prompt)


def wire_dtype(config: RunConfig) -> str:
    """Published weights have the actors' dtype where all agree, so that what arrives is what is served."""
    dtypes = {actor_dtype(a) for a in config.actor.values()}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def buffer(config: RunConfig) -> dict[str, Any]:
    """Arguments of the `ReplayBuffer`."""
    s, a = config.schedule, config.algorithm
    return {
        "groups_per_step": s.groups_per_step,
        "samples_per_group": config.rollout.samples_per_prompt,
        "steps_per_publish": s.steps_per_publish,
        "max_staleness": s.max_staleness,
        "sampling": s.sampling,
        "max_uses": s.max_uses,
        "filter_equal": a.dynamic_sampling,
        "keep_best": a.keep_best,
        "max_bytes": config.cluster.buffer_mib << 20,
        "run_seed": config.seed,
        "keep_samples": max(8, config.logging.samples_per_step),
    }


def learner(config: RunConfig, model_path: str, rank: int, master: tuple[str, int], pad_id: int) -> dict[str, Any]:
    """Arguments of one `LearnerRank`."""
    le, al = config.learner, config.algorithm
    return {
        "model_path": model_path,
        "rank": rank,
        "world_size": le.ranks,
        "master_addr": master[0],
        "master_port": master[1],
        "collective_timeout_s": config.schedule.step_timeout_s,
        "device": learner_device(config),
        "dtype": learner_dtype(config),
        "zero_stage": le.zero_stage,
        "lr": le.lr,
        "lr_warmup_steps": le.lr_warmup_steps,
        "lr_schedule": le.lr_schedule,
        "total_steps": le.lr_decay_steps or config.schedule.steps,
        "lr_final": le.lr_final,
        "betas": le.betas,
        "weight_decay": le.weight_decay,
        "grad_clip": le.grad_clip,
        "micro_batch_tokens": le.micro_batch_tokens,
        "layout": le.layout,
        "attention": le.attention,
        "gradient_checkpointing": le.gradient_checkpointing,
        "head_chunk_tokens": le.head_chunk_tokens,
        "ref_pass": le.ref_pass,
        "temperature": config.rollout.temperature,
        "corrections": config.correction.chosen(),
        "advantage": al.advantage,
        "loss": al.loss,
        "eps_low": al.eps_low,
        "eps_high": al.eps_high,
        "aggregation": al.aggregation,
        "kl_coef": al.kl_coef,
        "kl_estimator": al.kl_estimator,
        "entropy_coef": al.entropy_coef,
        "max_response_len": config.rollout.max_new_tokens,
        "overlong_buffer": ceil(al.overlong_share * config.rollout.max_new_tokens),
        "overlong_penalty": al.overlong_penalty,
        "logprobs_k": config.rollout.logprobs_k,
        "run_seed": config.seed,
        "threads": max(1, int(le.num_cpus)),
        "pad_id": pad_id,
        "lora": None if le.lora is None else le.lora.model_dump(),
        "sparse": actor_rule(config) if le.distill or le.train_sparse else None,
        "distill": None if le.distill is None else le.distill.model_dump(),
    }


def draft_learner(
    config: RunConfig, model_path: str, draft_path: str, rank: int, master: tuple[str, int], pad_id: int
) -> dict[str, Any]:
    """Arguments of one rank of a co-trained draft: the policy's own settings, and KL to the policy."""
    draft = config.learner.draft
    assert draft is not None
    return learner(config, draft_path, rank, master, pad_id) | {
        "world_size": draft.ranks,
        "lr": draft.lr,
        "kl_coef": draft.kl_coef,
        "kl_estimator": draft.kl_estimator,
        "frozen_path": model_path,
        "corrections": {"tis": {}},
        "lora": None,
    }


def actor_rule(config: RunConfig) -> dict[str, Any]:
    """The sparse attention of the actors, which all have one and the same."""
    rule = next(iter(config.actor.values())).sparse
    assert rule is not None
    return rule.model_dump()


def engine(config: RunConfig, label: str, actor: ActorConfig, model_path: str, name: str) -> dict[str, Any]:
    """Arguments of one `VllmEngine`."""
    return {
        "model_path": actor.draft_path or model_path,
        "actor_id": name,
        "actor_kind": actor_kind(actor),
        "dtype": actor_dtype(actor),
        "max_len": config.model.max_len,
        "max_num_seqs": actor.max_num_seqs,
        "max_batched_tokens": actor.max_batched_tokens,
        "kv_cache_gib": actor.kv_cache_gib,
        "gpu_memory_utilization": actor.gpu_memory_utilization,
        "enforce_eager": actor.enforce_eager,
        "prefix_caching": actor.prefix_caching,
        "tensor_parallel": actor.tensor_parallel,
        "logprobs_k": config.rollout.logprobs_k,
        "kv_on_update": actor.kv_on_update,
        "quantization": "fp8" if actor.kind == "fp8" and actor.num_gpus else None,
        "kv_cache_dtype": "fp8" if actor.fp8_kv_cache else "auto",
        "sparse": sparse_rule(actor),
        "rounding": actor.rounding,
        "scales": actor.scales,
        "keep_high_precision": tuple(actor.keep_high_precision),
        "logit_noise": actor.logit_noise,
        "temperature_scale": actor.temperature_scale,
        "policy_path": model_path if actor.draft_path else None,
    }


def task_label(config: RunConfig) -> str:
    """First part of the training task's prompt ids."""
    return config.task.label


def scorer(config: RunConfig) -> dict[str, Any]:
    """Arguments of the `Scorer`: the training task and every evaluation task, by label."""
    tasks = {task_label(config): config.task, **config.evaluation.tasks}
    return {
        "tasks": {label: (task.name, dict(task.args)) for label, task in tasks.items()},
        "processes": config.task.grader_processes,
        "timeout_s": config.task.grade_timeout_s,
        "memory_mib": config.task.grader_memory_mib,
        "stop": tuple(config.rollout.stop),
    }
