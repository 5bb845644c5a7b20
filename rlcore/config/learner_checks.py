"""Rules of what a learner has beside the plain policy: a critic, a teacher, weights rounded as an
actor's, log-probs equal to the actors' to the bit."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.kinds import dvp_of, shown
from rlcore.config.places import tied_by
from rlcore.config.schema import RunConfig
from rlcore.corrections.dvp import DvpSpec
from rlcore.learner.specs import PARTS
from rlcore.objectives.specs import advantage_class
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse


def _unusual(c: RunConfig) -> Iterator[tuple[str, bool]]:
    """(settings, True if they are used) of learners that divide, hold or train a model in another
    way than most."""
    learner = c.learner
    for name in PARTS:
        yield f"learner.{name}={getattr(learner, name)}", getattr(learner, name) > 1
    place = learner.offload.optimizer
    yield f"learner.offload.optimizer={place}", place != "none"
    for name in ("distill", "draft"):
        yield f"learner.{name}", getattr(learner, name) is not None
    for name in ("train_sparse", "router_replay"):
        yield f"learner.{name}=true", getattr(learner, name)
    yield "model.diffusion", c.model.diffusion is not None


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
        _traces(c, kind)
        for other, used in _beside_critic(c):
            refuse(used, f"{kind} is not proven with {other}: leave that out, or use critic=none.")


def _bootstrap(c: RunConfig) -> None:
    """Refuse answers whose only state would have no target."""
    single = [n for n in c.tasks if n not in c.played or c.played[n].max_turns == 1]
    refuse(
        c.critic.bootstrap and c.algorithm.credit == "turn" and bool(single),
        "critic.bootstrap=true leaves the last state of an answer that was cut off without a "
        "target, which with algorithm.credit=turn is the whole answer of a single turn (task "
        f"{', '.join(single)}): use algorithm.credit=token, or critic.bootstrap=false.",
    )


def _traces(c: RunConfig, kind: str) -> None:
    """Refuse to correct the tokens after a token twice: by traces and by weights of sequences."""
    a = c.algorithm
    refuse(
        a.turn_share > 0,
        f"algorithm.turn_share={a.turn_share:g} mixes rewards to go into advantages of groups, and "
        f"{kind} has values in their place: leave it 0 (algorithm.credit says what a value is of).",
    )
    vtrace = c.critic.traces == "vtrace"
    refuse(
        vtrace and a.ratio_to == "p_inf",
        "critic.traces=vtrace is by p_ref/p_inf, and algorithm.ratio_to=p_inf holds no p_ref: use "
        "ratio_to=p_ref, or critic.traces=gae.",
    )
    for key, corrections in c.correction_lists.items():
        for label, spec in corrections.chosen().items():
            refuse(
                vtrace and spec.weighs and spec.corrects == "sequence",
                f"{shown(key, corrections)} weighs whole sequences by {label}, and "
                "critic.traces=vtrace corrects what follows a token by the same ratios: use a "
                "token-level correction (tis is usual), or critic.traces=gae.",
            )


def _beside_critic(c: RunConfig) -> Iterator[tuple[str, bool]]:
    """(settings, True if they are used) with which training of a critic is unproven."""
    learner, head = c.learner, c.critic.kind == "value_head"
    yield from _unusual(c)
    # its trunk is the policy's tensors, whole and without adapters
    yield "learner.zero_stage=3", head and learner.zero_stage == 3
    yield "learner.lora", head and learner.lora is not None


# ----- a teacher -----


def check_teacher(c: RunConfig) -> None:
    """A teacher whose scores are those of the policy's tokens, and a run that learns something."""
    kind = f"teacher.kind={c.teacher.kind}"
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
    refuse(
        c.algorithm.kl_in_loss and c.algorithm.kl_estimator == "full",
        f"algorithm.kl_estimator=full and {kind} both take another policy whole in the pass that "
        "is differentiated: use kl_estimator=k1, k2 or k3, or algorithm.kl_coef=0.",
    )
    for other, used in _beside_teacher(c):
        refuse(used, f"{kind} is not proven with {other}: leave that out, or use teacher=none.")


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


def _beside_teacher(c: RunConfig) -> Iterator[tuple[str, bool]]:
    """(settings, they are used) that a teacher has not been shown to teach under."""
    learner = c.learner
    yield from _unusual(c)
    yield f"learner.round_as={learner.round_as}", learner.round_as is not None
    yield "bitwise=true", c.bitwise
    yield f"critic.kind={c.critic.kind}", c.critic.trained
    # its weights are written whole, by one rank
    yield "learner.zero_stage=3", c.teacher.kind == "previous" and learner.zero_stage == 3


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
    for other, used in _not_rounded(c):
        refuse(used, f"{key} is not proven with {other}: leave that out, or use round_as=null.")


def _not_rounded(c: RunConfig) -> Iterator[tuple[str, bool]]:
    """(settings, True if they are used) with which the learner's rounding as an actor is
    unproven."""
    learner = c.learner
    yield f"learner.num_gpus={learner.num_gpus:g}", learner.num_gpus > 0
    yield from _unusual(c)
    place = learner.offload.parameters
    yield f"learner.offload.parameters={place}", place != "none"
    # actors round the sum of weights and adapter, which the learner never forms
    yield "learner.lora", learner.lora is not None
    yield "critic.kind=value_head", c.critic.kind == "value_head"


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
    learner, r = c.learner, c.rollout
    eta = c.schedule.max_staleness
    stale = "under which samples are of older weights than the learner's: use schedule=on_policy"
    yield f"schedule.max_staleness={eta}", not c.schedule.synchronous, stale
    scaled = "by which engine and learner scale logits in other operations: use 1"
    for name, task in c.tasks.items():
        own = getattr(task, "temperature", None) is not None
        key, value = c.task_key(name) if own else "rollout", c.rollout_of(name).temperature
        yield f"{key}.temperature={value:g}", value != 1, scaled
    for name, on in (("top_p", r.top_p < 1), ("top_k", r.top_k > 0), ("min_p", r.min_p > 0)):
        cut = "whose kept sets engine and learner sum in other orders: leave it off"
        yield f"rollout.{name}={getattr(r, name)}", on, cut
    dvp = dvp_of(c) is not None
    yield "correction=dvp", dvp, "which truncates: leave it out"
    unproven = "which is not proven so: leave it out"
    yield "environments", bool(c.played), unproven
    yield "model.diffusion", c.model.diffusion is not None, unproven
    one = "which divides sums by size: use 1"
    yield f"learner.num_cpus={learner.num_cpus:g}", learner.threads > 1, one
    yield f"learner.num_gpus={learner.num_gpus:g}", learner.num_gpus > 0, unproven
    yield f"learner.dtype={learner.dtype}", learner.compute_dtype != "float32", unproven
    yield f"learner.ranks={learner.ranks}", learner.ranks > 1, unproven
    yield f"learner.zero_stage={learner.zero_stage}", learner.zero_stage == 3, unproven
    yield f"learner.layout={learner.layout}", learner.layout == "packed", unproven
    for name in ("lora", "distill", "draft"):
        sums = "whose sums the learner forms in another order than its actors: leave it out"
        yield f"learner.{name}", getattr(learner, name) is not None, sums
    for name in ("train_sparse", "router_replay"):
        yield f"learner.{name}=true", getattr(learner, name), unproven
    threads = learner.max_threads
    yield f"learner.max_threads={threads}", isinstance(threads, int), one
    yield f"critic.kind={c.critic.kind}", c.critic.trained, unproven


def _actor(c: RunConfig, label: str, actor: ActorSpec) -> Iterator[tuple[str, bool, str]]:
    unproven = "which is not proven so: leave it out"
    yield f"engine={actor.engine}", actor.engine != "vllm", unproven
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
    """Liger's kernels need a GPU; they and compiled layers are refused where no run has shown
    them."""
    learner = c.learner
    layers = f"learner.layers={learner.layers}"
    if learner.layers == "torch":
        return
    refuse(
        learner.layers == "liger" and learner.num_gpus == 0,
        f"{layers} is of GPU kernels, and learner.num_gpus=0: use learner.layers=torch.",
    )
    others = list(_unusual(c))
    if learner.layers == "compiled":
        others += [("learner.zero_stage=3", learner.zero_stage == 3), *_rounded_or_beside(c)]
    for other, used in others:
        refuse(used, f"{layers} is not proven with {other}: leave that out, or use layers=torch.")


def check_fp8(c: RunConfig) -> None:
    """Products of FP8 numbers are refused where no run has shown them."""
    learner, fp8 = c.learner, f"learner.fp8={c.learner.fp8}"
    if learner.fp8 == "none":
        return
    refuse(
        learner.num_gpus > 0 and learner.compute_dtype == "float32",
        f"{fp8} gives products in the model's dtype, and learner.dtype={learner.dtype} is float32, "
        "which GPUs' FP8 products lack: use learner.dtype=bfloat16, or fp8=none.",
    )
    refuse(
        learner.zero_stage == 3,
        f"{fp8} keeps the weights that learner.zero_stage=3 gathers until the backward pass, so "
        "that a rank would hold the whole model: choose learner.zero_stage=0, 1 or 2.",
    )
    others = [
        ("learner.lora", learner.lora is not None),
        ("learner.layers=liger", learner.layers == "liger"),
        *_rounded_or_beside(c),
    ]
    for other, used in (*_unusual(c), *others):
        refuse(used, f"{fp8} is not proven with {other}: leave that out, or use fp8=none.")


def _rounded_or_beside(c: RunConfig) -> Iterator[tuple[str, bool]]:
    """(settings, True if they are used) that compute the policy's products in another way, or
    train or ask a further model."""
    yield f"learner.round_as={c.learner.round_as}", c.learner.round_as is not None
    yield "bitwise=true", c.bitwise
    yield f"critic.kind={c.critic.kind}", c.critic.trained
    yield f"teacher.kind={c.teacher.kind}", c.teacher.used
