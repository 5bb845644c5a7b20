"""Facts that follow from a configuration: resources, ranks, the weights that an actor loads, the
tokens that a prompt may have."""

from __future__ import annotations

from itertools import chain
from typing import Any

from rlcore.attention.specs import SparseSpec
from rlcore.buffer.admission import StalenessBound
from rlcore.cluster.specs import joined_address
from rlcore.config.kinds import dvp_of
from rlcore.config.parts import PARTS
from rlcore.config.places import tied_by
from rlcore.config.schema import RunConfig
from rlcore.cores import asked_cores
from rlcore.errors import UserError
from rlcore.loop.run_plan import Plan
from rlcore.loop.targets import PageRange
from rlcore.metrics.health import Health
from rlcore.metrics.rules.base import Course
from rlcore.objectives.specs import advantage_class, loss_class
from rlcore.rollout.specs import ActorSpec
from rlcore.rollout.text import StopStrings
from rlcore.tasks.graders import GraderPool
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.types import POLICY, PageRule
from rlcore.weights.specs import BLOCK_FORMATS, RoundingSpec


def needed(config: RunConfig, *, actors: bool = True, learner: bool = True) -> tuple[float, float]:
    """(CPUs, GPUs) that the roles ask for together; `actors`, `learner`: whether these roles
    exist."""
    engines = [*config.actor.values(), *filter(None, [evaluation_actor(config)])] if actors else []
    if actors and learner:
        engines += [own.spec for part in PARTS for own in part.engines(config)]
    count, spec = ranks(config) if learner else 0, config.learner
    # The buffer and the graders ask for no CPU: they would otherwise not fit a machine of two.
    cpus = sum(a.count * a.num_cpus for a in engines) + count * spec.num_cpus
    gpus = sum(a.count * a.num_gpus * a.tensor_parallel for a in engines)
    if not (actors and tied_by(config)):
        gpus += count * spec.num_gpus
    elif learner:  # an engine and a rank have a GPU together
        gpus = sum(a.count for a in engines if a.num_gpus)
    return cpus, gpus


def ranks(config: RunConfig) -> int:
    """Learner ranks, parts' ranks included."""
    return config.learner.ranks + sum(part.ranks(config) for part in PARTS)


def follows_load(config: RunConfig) -> bool:
    """True if the policy's ranks use more threads while cores idle (`learner.max_threads`), as only
    a run may whose results depend on timing anyway.

    Ranks that hold parts of something compute the rest equally, and have to round equally.
    """
    spec, schedule = config.learner, config.schedule
    return (
        isinstance(spec.max_threads, int)
        and config.cluster.cpu_fast_paths
        and spec.device == "cpu"
        and not spec.divisions
        and not schedule.synchronous
        and not config.bitwise
    )


def with_stated_threads(config: RunConfig) -> RunConfig:
    """The configuration with a number in place of `learner.max_threads=auto`: this machine's cores,
    divided among the ranks, in a synchronous run.

    Its actors idle while it learns. OMP_NUM_THREADS of the environment bounds them. It is null
    where they are other machines' cores, and where equality to the bit needs one thread. So it is
    in an asynchronous run, whose steps more threads did not make faster (benchmarks/results/
    profile_cpu.md).
    """
    learner, most = config.learner, None
    if learner.max_threads != "auto":
        return config
    here = learner.device == "cpu" and joined_address(config.cluster.address) is None
    if config.schedule.synchronous and here and not config.bitwise:
        most = asked_cores() // ranks(config)
    if most is not None and most <= learner.threads:
        most = None
    stated = learner.model_copy(update={"max_threads": most})
    return config.model_copy(update={"learner": stated})


def stated_threads(config: RunConfig) -> int | None:
    """Compute threads of a rank where they are always `learner.max_threads`."""
    most = config.learner.max_threads
    return most if config.schedule.synchronous and isinstance(most, int) else None


def describe_threads(config: RunConfig) -> str:
    """One line on a rank's compute threads, of a configuration `with_stated_threads`."""
    learner = config.learner
    if not follows_load(config):
        return f"compute threads: {stated_threads(config) or learner.threads} a rank, always"
    most = learner.max_threads
    return f"compute threads: {learner.threads} a rank, up to {most} while cores idle"


def plan(config: RunConfig) -> Plan:
    """Return the plan of the loop."""
    return Plan(
        schedule=config.schedule,
        supervision=config.cluster,
        checkpoint=config.checkpoint,
        request_timeout_s=config.rollout.request_timeout_s,
        samples_per_step=config.logging.samples_per_step,
        verify_full=config.cluster.verify_weights == "full",
        shares={label: a.share for label, a in config.actor.items() if a.share is not None},
        targets={label: a.target for label, a in config.actor.items() if a.target is not None},
        prices={label: a.price for label, a in config.actor.items() if a.price is not None},
        mixed_groups=config.rollout.group_kinds == "mixed",
        pages=page_ranges(config),
        layers={label: a.precise_layers for label, a in config.actor.items()},
    )


def page_ranges(config: RunConfig) -> dict[str, PageRange]:
    """The pages by position of sparse actors, by label, and how many there are at most."""
    found = {}
    for label, actor in config.actor.items():
        sparse = actor.sparse
        if sparse is None or sparse.blocks_by_length is None:
            continue
        n, step = len(sparse.blocks_by_length), sparse.length_step
        ends = [min((i + 1) * step, config.model.max_len) for i in range(n - 1)]
        most = tuple(-(-end // sparse.block_size) for end in [*ends, config.model.max_len])
        rule = PageRule(0, step, sparse.blocks_by_length)
        found[label] = PageRange(rule, tuple(max(2, pages) for pages in most))
    return found


def idle_clip(config: RunConfig) -> str | None:
    """A sentence on a loss whose clip can never bind under the run's schedule, or None.

    The default clip is not mentioned, since no user relies on it.
    """
    loss, declared = config.algorithm.loss, type(config.algorithm).model_fields
    default = all(
        getattr(config.algorithm, key) == declared[key].default
        for key in ("eps_low", "eps_high", "dual_clip")
    )
    off = any(spec.inner_clip_off for spec in config.correction.chosen().values())
    held = config.algorithm.ratio_to == "p_ref" and config.schedule.phases.steps == 1
    if default or not held or off or not loss_class(loss).clips:
        return None
    return (
        f"the clip of algorithm.loss={loss} never binds, since every update phase is one optimizer "
        "step, in which p_new is p_ref: schedule.steps_per_phase or schedule.epochs above 1 make "
        "it longer"
    )


def cautions(config: RunConfig) -> list[str]:
    """Sentences on corrections that are accepted and may not do what is hoped for."""
    floor = max(actor.probability_floor for actor in config.actor.values())
    said = (
        spec.cautions(critic=config.critic.trained, stored=config.rollout.logprobs_k, floor=floor)
        for own in config.correction_lists.values()
        for spec in own.chosen().values()
    )
    return list(dict.fromkeys(chain.from_iterable(said)))


def grader_pools(config: RunConfig) -> tuple[GraderPool, ...]:
    """Return the pools of grading processes, each with the tasks that share it."""
    first, *rest = config.tasks
    trained = {label: config.task_key(label) for label in config.tasks}
    keys = trained | {label: f"evaluation.tasks.{label}" for label in config.evaluation.tasks}
    evaluated = {first: config.tasks[first], **config.evaluation.tasks}
    own = [GraderPool({label: config.tasks[label]}, config.tasks[label], keys) for label in rest]
    return (GraderPool(evaluated, config.grading, keys), *own)


def most_prompt_tokens(config: RunConfig, label: str, spec: EvalTaskSpec) -> int:
    """Tokens that a prompt of a task may have, such that a response always fits behind it."""
    if label in config.tasks:
        answer = config.rollout_of(label).max_new_tokens
    else:
        answer = config.evaluation.of(label).max_new_tokens or config.rollout.max_new_tokens
    room = config.model.max_len - answer
    return min(room, spec.max_prompt_tokens or room)


def stop_strings(config: RunConfig) -> StopStrings:
    """Return the strings that end a response of each task."""
    own = {label: config.rollout_of(label).stop for label in config.tasks}
    return StopStrings(config.rollout.stop, own)


# of an actor that samples from the policy itself
_PLAIN: dict[str, Any] = {
    "kind": "bf16",
    "rounding": "none",
    "activations": "none",
    "fp8_kv_cache": False,
    "sparse": None,
    "draft_path": None,
    "draft_fresh": None,
    "logit_noise": 0.0,
    "probability_floor": 0.0,
    "temperature_scale": 1.0,
}
_ALONE = {"count": 1, "speculate": None}
#: rho of DVP over an actor's floor: at 1.5 times half of what the floor draws is not pruned
FAR = 10.0


def evaluation_actor(config: RunConfig) -> ActorSpec | None:
    """The engine that evaluates the policy itself, where actors sample from another one: the first
    actor's settings, without rounding, sparsity or draft."""
    asked = config.evaluation.dense_actor
    if asked is None:
        # A draft's answers say nothing of the policy; other actors' are close to it.
        asked = any(a.own_model for a in config.actor.values())
    if not asked:
        return None
    # Its resources and engine settings stay, so that it fits wherever the actor fits.
    return next(iter(config.actor.values())).model_copy(update={**_PLAIN, **_ALONE})


def mixed_answers(config: RunConfig) -> str:
    """A line where actors of several policies share the held-out prompts; else ""."""
    others = [
        f"actor.{label}"
        for label, actor in config.actor.items()
        if any(getattr(actor, name) != value for name, value in _PLAIN.items())
    ]
    if len(config.actor) == 1 or not others or evaluation_actor(config) is not None:
        return ""
    return (
        f"all actors answer held-out prompts, and actors of {', '.join(others)} sample from "
        "another policy: eval/* mixes them (evaluation.dense_actor=true evaluates the policy "
        "itself, evaluation.actors=[LABEL] one kind)"
    )


def near_floors(config: RunConfig) -> str:
    """A line where DVP's safe set begins too near the probability floor of an actor; else ""."""
    dvp = dvp_of(config)
    floors = {label: actor.probability_floor for label, actor in config.actor.items()}
    label, floor = max(floors.items(), key=lambda item: item[1])
    if dvp is None or floor * FAR <= dvp.rho:
        return ""
    return (
        f"actor.{label}.probability_floor={floor:g} is above a tenth of correction.dvp.rho="
        f"{dvp.rho:g}: tokens that the policy itself holds near rho rise above it by the floor and "
        f"stay in the actors' safe set (correction.dvp.rho={floor * FAR:g} keeps them out)"
    )


def actor_weights(config: RunConfig, actor: ActorSpec) -> str | None:
    """The name of the published weights that an actor loads; None: a frozen draft's own."""
    used = (part.weights for part in PARTS if part.kind == actor.kind and part.setting(config))
    return next(used, None if actor.own_model else POLICY)


def served_rounding(config: RunConfig, wanted: str) -> RoundingSpec:
    """How the run's actors round, in which it is served: as the learner does, or else as the only
    actor that rounds. Raises UserError, with what was `wanted`, where that is not one."""
    found = {label for label, actor in config.actor.items() if actor.rounding != "none"}
    label = config.learner.round_as or (found.pop() if len(found) == 1 else None)
    if label is None:
        these = f"actor=[{','.join(config.actor)}]"
        raise UserError(
            f"{wanted} writes weights as the run's actor rounds them, and {these} has "
            f"{'several that round' if found else 'none that rounds'}: use format=trained, or a "
            "run with learner.round_as."
        )
    return config.actor[label].alone


def wire_dtype(config: RunConfig) -> str:
    """Published weights have the actors' dtype where all agree, so that what arrives is what is
    served."""
    dtypes = {a.compute_dtype for a in config.actor.values()}
    return str(dtypes.pop()) if len(dtypes) == 1 else "float32"


def describe_actor(label: str, actor: ActorSpec, max_len: int) -> str:
    """One line on the actors of this label."""
    what = _described(actor)
    if actor.fp8_kv_cache:
        what += ", FP8 KV cache"
    if actor.activations != "none":
        what += f"; inputs of linear maps rounded to {actor.activations}, each token by itself"
    if actor.sparse is not None and actor.sparse.dense_positions >= max_len:
        what += f"; the budget covers model.max_len={max_len}: NOTHING IS SPARSE"
    return f"actor.{label}: {what}"


def _budget(sparse: SparseSpec) -> str:
    if sparse.blocks_by_length is not None:
        first, last = sparse.blocks_by_length[0], sparse.blocks_by_length[-1]
        return f"{first} pages" if first == last else f"{first} to {last} pages by position"
    return f"{sparse.blocks} pages" if sparse.blocks else f"{sparse.share:g} of the pages"


def _described(actor: ActorSpec) -> str:
    dtype, rounding, sparse = actor.compute_dtype, actor.rounding, actor.sparse
    if rounding != "none":
        columns = BLOCK_FORMATS.get(rounding)
        scale = f"{columns} entries" if columns else f"a {actor.scales}"
        return (
            f"{rounding} emulated: weights rounded to {rounding} and back before loading, one "
            f"scale {scale}, arithmetic in {dtype}"
        )
    if actor.kind == "fp8":
        return f"vLLM's FP8 (W8A8, dynamic, one weight scale a {actor.scales})"
    if sparse is not None:
        prompts = {
            "sparse": "",
            "block": f", prompts by blocks of {sparse.prompt_block}",
            "dense": ", prompts dense",
        }[sparse.prompt]
        size = sparse.block_size
        return f"block top-k attention, {_budget(sparse)} of {size} tokens{prompts}, {dtype}"
    if actor.own_model:
        return f"a draft model, {dtype}"
    return f"the policy in {dtype}"


def steps_in_flight(config: RunConfig) -> str:
    """A sentence on what bounds the steps in flight; "" where there are none."""
    bound, late = config.learner.step_bound, StalenessBound.of(config.schedule)
    age = late.cap
    # p_ref follows the steps of a phase that began with fresh samples
    if not (age if config.algorithm.ratio_to == "p_inf" else late.behind):
        return ""
    old = f"samples are up to {age} step{'s' if age > 1 else ''} old"
    if bound is None:
        return f"{old}, and nothing bounds the steps meanwhile (learner.step_bound=null)"
    return (
        f"{old}; steps are shortened or held where these would lead answers further than "
        f"{bound:g} nats from the policy (learner.step_bound)"
    )


def course_of(config: RunConfig) -> Course:
    """Return the part of the run's schedule that warnings depend on."""
    bound = StalenessBound.of(config.schedule)
    return Course(
        staleness_bound=bound.cap,
        takes_turns=bound.synchronous,
        compares_groups=advantage_class(config.algorithm.advantage).compares_group,
        lr=config.learner.lr,
        waits=config.critic.warmup_steps if config.critic.trained else 0,
    )


def health_of(config: RunConfig) -> Health:
    """The judge of a run's rows, by its own bounds."""
    return Health(config.logging.warnings, course_of(config))
