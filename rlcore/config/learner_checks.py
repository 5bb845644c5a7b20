"""Rules of what a learner has beside the plain policy: a critic, a teacher, weights rounded as an
actor's, log-probs equal to the actors' to the bit."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.kinds import shown
from rlcore.config.places import tied_by
from rlcore.config.schema import RunConfig
from rlcore.corrections.dvp import DvpSpec
from rlcore.objectives.specs import advantage_class
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse

# ----- a critic -----


def check_critic(c: RunConfig) -> None:
    """Require a critic where an advantage needs one, and refuse it elsewhere."""
    kind = f"critic.kind={c.critic.kind}"
    for key, name in map(c.advantage_of, c.tasks):
        needs = advantage_class(name).needs_values
        refuse(
            needs and not c.critic.trained,
            f"{key}={name} is of a critic's values, and {kind}: use critic=value_head or "
            "critic=model.",
        )
        refuse(
            c.critic.trained and not needs,
            f"{kind} trains values that {key}={name} does not read: use algorithm=ppo "
            "(advantage=gae), or critic=none.",
        )
    if c.critic.trained:
        _bootstrap(c)
        _traces(c)


def _bootstrap(c: RunConfig) -> None:
    """Refuse answers whose only state would have no target."""
    single = [n for n in c.tasks if n not in c.played or c.played[n].max_turns == 1]
    refuse(
        c.critic.bootstrap and c.algorithm.credit == "turn" and bool(single),
        "critic.bootstrap=true leaves the last state of an answer that was cut off without a "
        "target, which with algorithm.credit=turn is the whole answer of a single turn (task "
        f"{', '.join(single)}): use algorithm.credit=token, or critic.bootstrap=false.",
    )


def _traces(c: RunConfig) -> None:
    """Refuse to correct the tokens after a token twice: by traces and by weights of sequences."""
    vtrace = c.critic.traces == "vtrace"
    for key, corrections in c.correction_lists.items():
        for label, spec in corrections.chosen().items():
            refuse(
                vtrace and spec.weighs and spec.corrects == "sequence",
                f"{shown(key, corrections)} weighs whole sequences by {label}, and "
                "critic.traces=vtrace corrects what follows a token by the same ratios: use a "
                "token-level correction (tis is usual), or critic.traces=gae.",
            )


# ----- a teacher -----


def check_teacher(c: RunConfig) -> None:
    """A teacher whose scores are those of the policy's tokens, and a run that learns something."""
    refuse(
        c.algorithm.reward_weight == 0 and not c.teacher.used,
        "algorithm.reward_weight=0 leaves nothing to learn from without a teacher: use "
        "teacher=frozen, previous, policy or engine, or a weight above 0.",
    )
    if not c.teacher.used:
        return
    unknown = sorted(set(c.teacher.paths) - set(c.tasks))
    refuse(
        bool(unknown),
        f"teacher.paths has {', '.join(unknown)}, which is no task of the run: it has "
        f"{', '.join(c.tasks)}.",
    )
    _context(c)
    _sampled(c)
    if c.teacher.kind == "engine":
        _engine(c)


def _context(c: RunConfig) -> None:
    """A context that at least some episodes can have."""
    context = c.teacher.context
    alone = [n for n in c.tasks if c.rollout_of(n).samples_per_prompt < 2]
    refuse(
        context == "best" and bool(alone),
        "teacher.context=best needs several answers to a prompt, and "
        f"{c.task_key(alone[0]) if c.mixed and alone else 'rollout'}.samples_per_prompt=1: use 2 "
        "or more, or another context.",
    )
    plain = [n for n in c.tasks if n not in c.played]
    refuse(
        context == "feedback" and bool(plain),
        f"teacher.context=feedback reads what an environment has answered, and task "
        f"{plain[0] if plain else ''} has answers of one turn: use an environment (attempts), or "
        "context=best.",
    )


def _sampled(c: RunConfig) -> None:
    """An estimate by the sampled token has the ratio of whole distributions."""
    if c.teacher.top_k is None or c.teacher.tail != "sampled":
        return
    dvp = any(
        isinstance(spec, DvpSpec)
        for corrections in c.correction_lists.values()
        for spec in corrections.chosen().values()
    )
    truncated = c.rollout.sampling().truncates
    refuse(
        dvp or truncated,
        f"teacher.tail=sampled takes log-probs over the whole vocabulary, and "
        f"{'correction=dvp' if dvp else 'rollout.top_p, top_k or min_p'} conditions them on a "
        "part: use teacher.tail=bucket or drop.",
    )


def _engine(c: RunConfig) -> None:
    """An engine has a model that stays as it is, scores at temperature 1, has resources of its own,
    and is asked before a sample counts as lost."""
    label = c.teacher.actor
    own = [name for name, actor in c.actor.items() if actor.kind == "draft"]
    refuse(
        label is not None and label not in own,
        f"teacher.actor={label} is no draft actor of the run, which has "
        f"{', '.join(own) or 'none'}: only a draft has a model of its own; the policy teaches "
        "itself with teacher=policy or previous.",
    )
    for name in c.tasks:
        key = c.task_key(name) if c.mixed else "rollout"
        temperature = c.rollout_of(name).temperature
        refuse(
            temperature != 1.0,
            f"{key}.temperature={temperature:g} is not what teacher.kind=engine scores at: use 1, "
            "or teacher=frozen.",
        )
    tied = tied_by(c)
    refuse(
        tied is not None,
        f"{tied} ties every engine to the GPU of a learner rank, and teacher.kind=engine has none: "
        "use whole GPUs and schedule.colocated=false, or teacher=frozen.",
    )
    late, lost = c.teacher.engine.timeout_s, c.rollout.request_timeout_s
    refuse(
        late >= lost,
        f"teacher.engine.timeout_s={late:g} holds a record back for as long as after which it "
        f"counts as lost, rollout.request_timeout_s={lost:g}: give less.",
    )


# ----- weights rounded as an actor's -----


def check_round_as(c: RunConfig) -> None:
    """Check that the learner can round exactly as the actor that it names."""
    label = c.learner.round_as
    if label is None:
        return
    key = f"learner.round_as={label}"
    rounding = [name for name, actor in c.actor.items() if actor.rounding != "none"]
    actor = c.actor.get(label)
    refuse(
        actor is None or actor.rounding == "none",
        f"{key} is no actor of this run with emulated rounding: set actor.{label}.rounding, or "
        f"choose one of {', '.join(rounding) or 'none'} (of vLLM's own FP8 the learner would have "
        "to repeat the kernels).",
    )
    assert actor is not None
    for whose, spec in (("learner", c.learner), (f"actor.{label}", actor)):
        refuse(
            spec.compute_dtype != "float32",
            f"{key} is exact in float32, and {whose} computes in {spec.compute_dtype}: use "
            f"{whose}.dtype=float32, or round_as=null.",
        )
    refuse(
        actor.target is not None and actor.target.moves == "layers",
        f"{key} rounds the same layers throughout, and actor.{label}.target.moves=layers changes "
        "them: move something else, or use round_as=null.",
    )


# ----- equal to the bit -----


def check_bitwise(c: RunConfig) -> None:
    """Every setting under which the same weights would give other bits is refused."""
    if not c.bitwise:
        return
    for other, used, why in _run(c):
        refuse(used, f"bitwise=true cannot be combined with {other}, {why}.")
    for label, actor in c.actor.items():
        for other, used, why in _actor(c, label, actor):
            key = f"actor.{label}.{other}"
            refuse(used, f"bitwise=true cannot be combined with {key}, {why}.")


def _run(c: RunConfig) -> Iterator[tuple[str, bool, str]]:
    """(settings, they are used, why not)."""
    learner = c.learner
    eta = c.schedule.max_staleness
    stale = "under which samples are of older weights than the learner's: use schedule=on_policy"
    yield f"schedule.max_staleness={eta}", not c.schedule.synchronous, stale
    scaled = "by which engine and learner scale logits in other operations: use 1"
    for name, task in c.tasks.items():
        own = getattr(task, "temperature", None) is not None
        key, value = c.task_key(name) if own else "rollout", c.rollout_of(name).temperature
        yield f"{key}.temperature={value:g}", value != 1, scaled
    one = "which divides sums by size: use 1"
    yield f"learner.num_cpus={learner.num_cpus:g}", learner.threads > 1, one
    unproven = "which is not proven so: leave it out"
    yield f"learner.dtype={learner.dtype}", learner.compute_dtype != "float32", unproven
    threads = learner.max_threads
    yield f"learner.max_threads={threads}", isinstance(threads, int), one


def _actor(c: RunConfig, label: str, actor: ActorSpec) -> Iterator[tuple[str, bool, str]]:
    unproven = "which is not proven so: leave it out"
    yield f"engine={actor.engine}", "bits" not in actor.facts(f"actor.{label}").provides, unproven
    yield f"num_gpus={actor.num_gpus:g}", not actor.on_cpu, unproven
    yield f"kind={actor.kind}", actor.kind not in ("bf16", "fp8"), "another policy: use bf16"
    rounds = actor.rounding != "none" and c.learner.round_as != label
    yield f"rounding={actor.rounding}", rounds, f"another policy: use learner.round_as={label}"
    plain = c.learner.round_as not in (None, label)
    yield f"rounding={actor.rounding}", plain, "another policy than learner.round_as: leave it out"
    yield f"dtype={actor.dtype}", actor.compute_dtype != "float32", unproven
    one = "which divides sums by size: use 1"
    yield f"num_cpus={actor.num_cpus:g}", actor.num_cpus >= 2, one
    yield f"tensor_parallel={actor.tensor_parallel}", actor.tensor_parallel > 1, unproven
    slow = "vLLM's own kernels: use cpu_fast_path=true"
    yield "cpu_fast_path=false", not actor.cpu_fast_path, slow
    wrong = actor.wrong_logits or "temperature_scale"
    off = bool(actor.wrong_logits) or actor.temperature_scale != 1
    yield f"{wrong}={getattr(actor, wrong):g}", off, "which is an error on purpose: leave it out"


# ----- layers by kernels of other libraries -----


def check_layers(c: RunConfig) -> None:
    """Liger's kernels need a GPU."""
    refuse(
        c.learner.layers == "liger" and c.learner.num_gpus == 0,
        "learner.layers=liger is of GPU kernels, and learner.num_gpus=0: use learner.layers=torch.",
    )


def check_fp8(c: RunConfig) -> None:
    """Products of FP8 numbers need a dtype that has them."""
    learner, fp8 = c.learner, f"learner.fp8={c.learner.fp8}"
    if learner.fp8 == "none":
        return
    refuse(
        learner.num_gpus > 0 and learner.compute_dtype == "float32",
        f"{fp8} gives products in the model's dtype, and learner.dtype={learner.dtype} is float32, "
        "which GPUs' FP8 products lack: use learner.dtype=bfloat16, or fp8=none.",
    )
