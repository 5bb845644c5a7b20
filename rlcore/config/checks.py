"""Rules that join several packages, checked before a run starts. Pure functions of a `RunConfig`.

Rules on one specification alone are in its own `check`; ranges are on the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isclose
from typing import Literal

from rlcore.config.combinations import check_combinations, sent_adapters
from rlcore.config.engines import check_engines, check_engines_in_run
from rlcore.config.kinds import (
    check_kinds,
    check_shares,
    check_targets,
    dvp_of,
    shown,
)
from rlcore.config.names import check_names, load_objectives
from rlcore.config.parts import PARTS
from rlcore.config.places import check_colocated, check_gpu_shares
from rlcore.config.schema import AlgorithmSection, CorrectionList, RunConfig
from rlcore.config.sentences import written
from rlcore.config.task_checks import TASK_RULES, check_environment, check_rewards
from rlcore.corrections.tis import TisSpec
from rlcore.objectives.protocols import Advantage, PolicyLoss
from rlcore.objectives.specs import ADVANTAGES, LOSSES, advantage_class, loss_class
from rlcore.registry import load_object
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse

# rules of runs with a masked-diffusion model or engine
DIFFUSION = "rlcore.extras.diffusion.checks:check_diffusion"


def check_adapters(c: RunConfig) -> None:
    """Adapters that are published by themselves (publish=adapter)."""
    for key in sent_adapters(c):
        for label, actor in c.actor.items():
            _adapter_over(key, label, actor)


def _adapter_over(key: str, label: str, actor: ActorSpec) -> None:
    """Return whether an actor may have an adapter in addition to its weights. A draft has its own
    weights."""
    precision = actor.kind if actor.emulated == "none" else actor.emulated
    # Quantised actors serve the quantised sum here; quantised weights with a separate adapter would
    # be another policy.
    refuse(
        actor.kind == "fp8" or actor.emulated != "none",
        f"{key} cannot be combined with actor.{label}, which quantises the sum of weights and "
        f"adapter to {precision}: use publish=merged, or kind=bf16 with rounding=none and "
        "activations=none.",
    )
    refuse(
        not actor.own_model and "adapters" not in actor.facts(f"actor.{label}").provides,
        f"{key} needs engines that compute an adapter, and actor.{label}.engine={actor.engine} "
        "does not: use publish=merged.",
    )


def check_transport(c: RunConfig) -> None:
    """Check that the transport can carry the published weights."""
    transport = c.cluster.transport
    # A broadcast reaches every member of the group with the same tensors.
    own = _publishes_more(c) or any(actor.own_model for actor in c.actor.values())
    refuse(
        own and c.cluster.joined,
        f"cluster.transport={transport} sends one set of weights to all, and this run has actors "
        "with their own weights: choose object_store or disk.",
    )
    if c.cluster.full_weights_every > 1:
        _deltas(c)
    if transport in ("nccl", "ipc"):
        _engine_transfer(c, transport)


def _publishes_more(c: RunConfig) -> bool:
    """Return whether weights are published besides the policy's."""
    return any(part.weights and part.setting(c) for part in PARTS)


def _deltas(c: RunConfig) -> None:
    """Publications that send what changed."""
    key = f"cluster.full_weights_every={c.cluster.full_weights_every}"
    refuse(
        c.cluster.transport not in ("object_store", "nccl"),
        f"{key} sends patches, which cannot travel by cluster.transport={c.cluster.transport}: use "
        "object_store or nccl, or full_weights_every=1.",
    )
    for label, actor in c.actor.items():
        refuse(
            c.cluster.transport == "nccl" and actor.quantised_by_engine,
            f"{key} with cluster.transport=nccl writes what changed into weights as they were "
            f"published, and actor.{label}.kind={actor.kind} holds them quantised: use "
            "cluster.transport=object_store, or full_weights_every=1.",
        )
    refuse(
        _publishes_more(c),
        f"{key} is for runs that publish the policy alone, and learner.distill and learner.draft "
        "publish further weights: use full_weights_every=1.",
    )
    refuse(
        c.learner.lora is not None and c.learner.lora.publish == "adapter",
        f"{key} saves nothing with learner.lora.publish=adapter, of which every entry changes: use "
        "full_weights_every=1.",
    )


def _engine_transfer(c: RunConfig, transport: str) -> None:
    """Engines that receive weights by themselves, from GPU to GPU."""
    gpus = {"learner": c.learner.num_gpus} | {
        f"actor.{label}": actor.num_gpus for label, actor in c.actor.items()
    }
    without = [role for role, count in gpus.items() if count == 0]
    refuse(
        bool(without),
        f"cluster.transport={transport} joins GPUs, and {' and '.join(without)} "
        f"{'has' if len(without) == 1 else 'have'} num_gpus=0: use object_store or disk.",
    )
    colocated = c.schedule.colocated
    refuse(
        transport == "nccl" and colocated,
        "cluster.transport=nccl cannot join two processes on one GPU, and schedule.colocated=true "
        "gives engines and learner the same ones: use ipc.",
    )
    shared = [role for role, count in gpus.items() if count < 1]
    refuse(
        transport == "nccl" and bool(shared),
        f"cluster.transport=nccl cannot join two processes on one GPU, and {' and '.join(shared)} "
        "asks for a share of one (num_gpus below 1): use ipc, or num_gpus=1.",
    )
    refuse(
        transport == "ipc" and len(shared) < len(gpus) and not colocated,
        "cluster.transport=ipc reads the learner's memory on the same GPU, so learner.num_gpus and "
        "actor.*.num_gpus must be shares of one, such as 0.5 each: use nccl for separate GPUs, or "
        "schedule.colocated=true.",
    )
    without = [
        label
        for label, actor in c.actor.items()
        if "group transports" not in actor.facts(f"actor.{label}").provides
    ]
    refuse(
        bool(without),
        f"cluster.transport={transport} needs engines that join its group, and actor."
        f"{''.join(without[:1])}.engine does not: use object_store or disk.",
    )
    dtypes = sorted({actor.compute_dtype for actor in c.actor.values()})
    refuse(
        len(dtypes) > 1,
        f"cluster.transport={transport} sends one set of weights in one dtype, and actors have "
        f"{' and '.join(dtypes)}: give every actor.*.dtype the same, or use object_store.",
    )


def check(config: RunConfig) -> RunConfig:
    """Return the configuration, or raise UserError for the first impossible combination."""
    for rule in RULES:
        rule(config)
    return config


def _decay(c: RunConfig) -> None:
    c.learner.check_decay("learner", c.schedule.steps)


def _step_sizes(c: RunConfig) -> None:
    max_len = c.model.max_len
    for label, actor in c.actor.items():
        tokens = actor.max_batched_tokens
        refuse(
            tokens is not None and tokens < max_len,
            f"actor.{label}.max_batched_tokens={tokens} does not hold one sequence: it must be at "
            f"least model.max_len={max_len}.",
        )


def _truncation(c: RunConfig) -> None:
    """The learner must see the distribution that was sampled from: DVP truncates on both sides,
    and otherwise the learner conditions on the sets that sampling kept, which records hold."""
    r, dvp = c.rollout, dvp_of(c)
    cut = {"top_p": r.top_p < 1, "top_k": r.top_k > 0, "min_p": r.min_p > 0}
    if dvp is not None:
        # A resumed configuration may hold the value that DVP itself would set.
        refuse(
            cut["min_p"] and not isclose(r.min_p, dvp.rho),
            f"rollout.min_p={r.min_p} contradicts correction.dvp.rho={dvp.rho}: DVP sets min-p "
            "itself, so leave rollout.min_p=0.",
        )
        cut["min_p"] = False
    for name in [name for name, on in cut.items() if on]:
        key = f"rollout.{name}={getattr(r, name)}"
        refuse(
            dvp is not None,
            f"{key} removes tokens for the actor, and correction=dvp conditions the learner on "
            "another set, so every ratio would be biased by the kept mass: leave "
            f"rollout.{name} off, or leave dvp out.",
        )
        refuse(
            r.logprobs_k < max(r.top_k, 1),
            f"{key} needs the set that sampling kept with every token, so that the learner can "
            f"condition on it: raise rollout.logprobs_k={r.logprobs_k} to "
            f"{'rollout.top_k' if r.top_k else '20 or more'}.",
        )


def _corrections(c: RunConfig) -> None:
    for key, corrections in (c.correction_lists | c.shadow_lists).items():
        _one_list(c, key, corrections)


def _one_list(c: RunConfig, key: str, corrections: CorrectionList) -> None:
    chosen = corrections.chosen()
    # Each weighs by a ratio to p_inf: two would correct the same mismatch twice.
    weights = [label for label, spec in chosen.items() if spec.weighs]
    refuse(
        len(weights) > 1,
        f"{shown(key, corrections)} would correct the same ratio {len(weights)} times "
        f"({' and '.join(weights)} each weigh by it): keep one of {', '.join(weights)}.",
    )
    loss = loss_class(c.algorithm.loss)
    for label, spec in chosen.items():
        spec.beside(key, chosen, c.algorithm)
        refuse(
            spec.needs_topk and c.rollout.logprobs_k < 1,
            f"rollout.logprobs_k={c.rollout.logprobs_k} leaves {key}={label} without the "
            "actors' top log-probs, which it estimates from: use at least 1 (20 is usual).",
        )
        refuse(
            c.algorithm.ratio_to == "p_inf" and spec.weighs,
            f"algorithm.ratio_to=p_inf has the ratio to p_inf in the loss, and {key}={label} would "
            "weigh by it again: leave the correction out, or use ratio_to=p_ref.",
        )
        refuse(
            c.algorithm.ratio_to == "p_inf" and spec.around_ref,
            f"algorithm.ratio_to=p_inf holds no p_ref, around which {key}={label} penalises: leave "
            "the correction out, or use ratio_to=p_ref.",
        )
        refuse(
            isinstance(spec, TisSpec) and spec.widen_clip and not loss.inner_clip,
            f"{key}.{label}.widen_clip=true widens a clip of each token's ratio, which "
            f"algorithm.loss={c.algorithm.loss} does not have: use algorithm.loss=ppo.",
        )
        refuse(
            bool(spec.inner_clip_off) and not loss.inner_clip,
            f"{key}.{label}.{spec.inner_clip_off}=true switches off an inner clip that "
            f"algorithm.loss={c.algorithm.loss} does not have: use algorithm.loss=ppo.",
        )


def _epochs(c: RunConfig) -> None:
    epochs, loss = c.schedule.epochs, c.algorithm.loss
    for key, corrections in c.correction_lists.items():
        weighs = any(spec.weighs for spec in corrections.chosen().values())
        refuse(
            epochs > 1 and not loss_class(loss).carries_ratio and not weighs,
            f"schedule.epochs={epochs} trains on samples again after the policy has moved away "
            f"from them, which neither algorithm.loss={loss} nor {shown(key, corrections)} "
            "weighs: add a correction that weighs (tis is usual), or use algorithm.loss=ppo.",
        )


def _losses(c: RunConfig) -> None:
    """Settings that the chosen loss or advantage does not read, and a clip that a correction
    switches off."""
    a = c.algorithm
    advantages = [c.advantage_of(label)[1] for label in c.tasks]
    _own_settings(a, "loss", [a.loss], LOSSES, loss_class)
    _own_settings(a, "advantage", advantages, ADVANTAGES, advantage_class)
    refuse(
        a.ratio_to == "p_inf" and not loss_class(a.loss).carries_ratio,
        f"algorithm.ratio_to=p_inf is of losses with a ratio, and algorithm.loss={a.loss} has "
        "none: leave it p_ref, or use algorithm.loss=ppo.",
    )
    for label, spec in c.correction.chosen().items():
        refuse(
            a.kl_in_reward and bool(spec.replaces_advantage),
            f"algorithm.kl_in=reward changes an advantage that correction={label} replaces: use "
            "kl_in=loss.",
        )
        refuse(
            a.dual_clip is not None and bool(spec.inner_clip_off),
            f"algorithm.dual_clip={a.dual_clip} can never bind with "
            f"correction.{label}.{spec.inner_clip_off}=true, under which PPO's ratio is always 1: "
            "leave one of them off.",
        )


def _own_settings(
    a: AlgorithmSection,
    kind: Literal["loss", "advantage"],
    used: Sequence[str],
    names: Iterable[str],
    class_of: Callable[[str], type[PolicyLoss] | type[Advantage]],
) -> None:
    chosen = " and ".join(dict.fromkeys(used))
    read = {key for name in used for key in class_of(name).own_settings}
    for key, name in [(key, its) for its in names for key in class_of(its).own_settings]:
        value, default = getattr(a, key), type(a).model_fields[key].default
        refuse(
            value != default and key not in read,
            f"algorithm.{key}={value} is of algorithm.{kind}={name}, and algorithm.{kind}={chosen} "
            f"would ignore it: leave it at {written(default)}, or use algorithm.{kind}={name}.",
        )


def _whole_corrections(c: RunConfig) -> None:
    """Corrections that are their own policy gradient (RAPID, DPPO)."""
    a = c.algorithm
    for label, spec in c.correction.chosen().items():
        refuse(
            spec.leads_to_new and loss_class(a.loss).carries_ratio,
            f"algorithm.loss={a.loss} clips or weighs by a ratio that correction={label} already "
            f"carries in its weight: use algorithm={label} (loss=reinforce).",
        )
        usual = spec.replaces_advantage
        if not usual:
            continue
        for key, name in map(c.advantage_of, c.tasks):
            refuse(
                name != usual,
                f"{key}={name} would be replaced by correction={label}'s own importance-weighted "
                f"advantage: use algorithm={label} (advantage={usual}).",
            )
        refuse(
            a.train_on_best is not None,
            f"algorithm.train_on_best={a.train_on_best} contradicts correction={label}, whose "
            "baseline is a mean over all samples of a prompt: use one or the other.",
        )


def _ranks(c: RunConfig) -> None:
    refuse(
        c.learner.shares > c.schedule.groups_per_step,
        f"learner.ranks={c.learner.ranks} leaves ranks without data: a group is never split, so "
        f"schedule.groups_per_step={c.schedule.groups_per_step} must be at least "
        f"{c.learner.shares}.",
    )


def _threads(c: RunConfig) -> None:
    spec, asked = c.learner, f"learner.max_threads={c.learner.max_threads}"
    if not isinstance(spec.max_threads, int):
        return
    refuse(
        spec.max_threads <= spec.threads,
        f"{asked} is not above the {spec.threads} that learner.num_cpus={spec.num_cpus:g} gives "
        "a rank: raise it, or leave it auto or null.",
    )
    refuse(
        spec.device == "cuda",
        f"{asked} is about threads that compute on CPU, and learner.num_gpus={spec.num_gpus:g}: "
        "leave it auto or null.",
    )
    for division in spec.divisions:
        refuse(
            not c.schedule.synchronous,
            f"{asked} would have ranks that compute the same round it differently with "
            f"learner.{division.name}={division.ranks}, as the number of threads follows the load "
            "of each: leave it auto or null.",
        )


def _drafts(c: RunConfig) -> None:
    for label, actor in c.actor.items():
        key = f"actor.{label}"
        refuse(
            actor.draft_fresh is not None and c.model.path is not None,
            f"{key}.draft_fresh makes a model with the task's alphabet, which is not the "
            f"vocabulary of model.path={c.model.path}: give {key}.draft_path.",
        )
        refuse(
            actor.own_model and c.evaluation.dense_actor is False,
            f"evaluation.dense_actor=false would evaluate the draft of {key} instead of the "
            "policy: leave it null or true.",
        )


def _heads(c: RunConfig) -> None:
    for label, actor in c.actor.items():
        heads = actor.facts(f"actor.{label}").cpu_heads
        if not heads or not actor.on_cpu:
            continue
        policy = c.model.fresh if c.model.path is None else None
        made = {"model.fresh": policy, f"actor.{label}.draft_fresh": actor.draft_fresh}
        for key, fresh in made.items():
            refuse(
                fresh is not None and fresh.head_dim not in heads,
                f"{key}.head_dim={fresh and fresh.head_dim} is none of the widths that the "
                f"attention of {actor.engine} has on CPU, where actor.{label} runs: use one of "
                f"{', '.join(map(str, heads))}.",
            )


def _diffusion(c: RunConfig) -> None:
    if c.model.diffusion is not None or any(a.engine == "diffusion" for a in c.actor.values()):
        load_object(DIFFUSION)(c)


RULES = (
    check_names,
    load_objectives,
    check_engines,
    *TASK_RULES,
    _diffusion,
    check_combinations,
    _decay,
    _step_sizes,
    _truncation,
    _corrections,
    check_kinds,
    check_shares,
    check_targets,
    *(part.check for part in PARTS),
    _epochs,
    _losses,
    _whole_corrections,
    _ranks,
    _threads,
    _drafts,
    _heads,
    check_adapters,
    check_engines_in_run,
    check_colocated,
    check_transport,
    check_gpu_shares,
    check_rewards,
    check_environment,
)
