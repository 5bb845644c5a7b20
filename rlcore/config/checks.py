"""Settings that do not go together, refused before anything starts. Pure functions of a `RunConfig`."""

from __future__ import annotations

from math import isclose

from rlcore.config.schema import ActorConfig, RunConfig
from rlcore.errors import UserError

RATIO_WEIGHTS = ("tis", "mis", "icepop", "jackpot", "ais", "rapid")  # each turns p_inf into p_ref or p_new by itself
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "group_mean")  # compare a sample with the others of its group


def check(config: RunConfig) -> RunConfig:
    """The same configuration, or UserError for the first combination that makes no sense."""
    for rule in RULES:
        rule(config)
    return config


def _refuse(when: bool, sentence: str) -> None:
    if when:
        raise UserError(sentence)


def _model(c: RunConfig) -> None:
    m = c.model
    _refuse(
        m.path is None and m.fresh is None,
        "model.path=null needs model.fresh: choose model=tiny or give model.path=FOLDER.",
    )
    if m.fresh is not None:
        f = m.fresh
        _refuse(
            f.heads % f.kv_heads != 0,
            f"model.fresh.heads={f.heads} must be a multiple of model.fresh.kv_heads={f.kv_heads}.",
        )
        _refuse(f.head_dim % 2 != 0, f"model.fresh.head_dim={f.head_dim} must be even: rotary positions turn pairs.")
    _refuse(
        c.rollout.max_new_tokens >= m.max_len,
        f"rollout.max_new_tokens={c.rollout.max_new_tokens} leaves no room for a prompt: it must stay below "
        f"model.max_len={m.max_len}.",
    )


def _rollout(c: RunConfig) -> None:
    r, dvp = c.rollout, c.correction.dvp
    cut = {"top_p": r.top_p < 1, "top_k": r.top_k > 0, "min_p": r.min_p > 0}
    if dvp is not None:
        _refuse(
            cut["min_p"] and not isclose(r.min_p, dvp.rho),
            f"rollout.min_p={r.min_p} contradicts correction.dvp.rho={dvp.rho}: DVP sets min-p itself, so leave "
            "rollout.min_p=0.",
        )
        cut["min_p"] = False
    instead = "" if dvp else ", or prune on both sides with correction=[dvp,...]"
    for name, on in cut.items():
        _refuse(
            on,
            f"rollout.{name}={getattr(r, name)} cuts tokens off for the actor and not for the learner, so every ratio "
            f"would be biased by the kept mass: leave rollout.{name} off{instead}.",
        )


def _corrections(c: RunConfig) -> None:
    names = c.correction.names
    shown = f"correction=[{','.join(names)}]"
    _refuse("none" in names and len(names) > 1, f"{shown} contradicts itself: none stands alone.")
    weights = [n for n in names if n in RATIO_WEIGHTS]
    _refuse(
        len(weights) > 1,
        f"{shown} would correct the same ratio {len(weights)} times ({' and '.join(weights)} each weigh by it): "
        f"keep one of {', '.join(weights)}.",
    )
    jackpot, tis = c.correction.jackpot, c.correction.tis
    _refuse(
        jackpot is not None and jackpot.mode != "mask" and c.rollout.logprobs_k < 1,
        f"rollout.logprobs_k={c.rollout.logprobs_k} gives correction=jackpot nothing to estimate Z from: it needs at "
        "least 1 (the paper has 20).",
    )
    _refuse(
        jackpot is not None and jackpot.short_circuit and jackpot.target != "new",
        "correction.jackpot.short_circuit=true with correction.jackpot.target=ref leaves nothing that leads to p_new: "
        "use correction.jackpot.target=new.",
    )
    for key, on in {
        "correction.tis.adjusted": tis is not None and tis.adjusted,
        "correction.jackpot.short_circuit": jackpot is not None and jackpot.short_circuit,
    }.items():
        _refuse(
            on and c.algorithm.loss != "ppo",
            f"{key}=true switches PPO's inner clip off, which algorithm.loss={c.algorithm.loss} does not have: use "
            "algorithm.loss=ppo.",
        )


def _rapid(c: RunConfig) -> None:
    if c.correction.rapid is None:
        return
    a = c.algorithm
    _refuse(
        a.loss != "reinforce",
        f"algorithm.loss={a.loss} clips or weighs by a ratio that correction=rapid already carries in its sequence "
        "weight: use algorithm=rapid (loss=reinforce).",
    )
    _refuse(
        a.advantage != "group_mean",
        f"algorithm.advantage={a.advantage} would be replaced by correction=rapid's own importance-weighted advantage: "
        "use algorithm=rapid (advantage=group_mean).",
    )
    _refuse(
        a.keep_best is not None,
        f"algorithm.keep_best={a.keep_best} contradicts correction=rapid, whose baseline is a mean over all samples of "
        "a prompt: leave one of the two out.",
    )


def _algorithm(c: RunConfig) -> None:
    a, n = c.algorithm, c.rollout.samples_per_prompt
    kept = n
    if a.keep_best is not None:
        kept = a.keep_best
        _refuse(
            kept >= n,
            f"algorithm.keep_best={kept} keeps everything: it must be below rollout.samples_per_prompt={n}.",
        )
    _refuse(
        a.advantage in GROUP_ADVANTAGES and kept < 2,
        f"algorithm.advantage={a.advantage} compares the samples of a group, and "
        f"{'algorithm.keep_best' if a.keep_best else 'rollout.samples_per_prompt'}={kept} leaves one: use 2 or more, "
        "or algorithm.advantage=reinforce.",
    )


def _schedule(c: RunConfig) -> None:
    s = c.schedule
    _refuse(
        s.on_publish == "in_flight" and s.max_staleness == 0,
        "schedule.on_publish=in_flight is pointless with schedule.max_staleness=0, since nothing is in flight when "
        "weights are published: use on_publish=finish, or max_staleness=1 or more.",
    )
    _refuse(
        s.max_uses > 1 and s.sampling != "uniform",
        f"schedule.max_uses={s.max_uses} needs schedule.sampling=uniform: {s.sampling} takes every group once.",
    )


def _actors(c: RunConfig) -> None:
    for label, actor in c.actor.items():
        key = f"actor.{label}"
        _sparse_section(key, actor)
        _quantisation(key, actor)
        _draft_actor(c, key, actor)
        _refuse(
            actor.tensor_parallel != 1 and actor.kind == "sparse",
            f"{key}.tensor_parallel={actor.tensor_parallel} does not go with {key}.kind=sparse, whose attention lives "
            f"in one process: use 1 and raise {key}.count.",
        )
        _refuse(
            actor.num_gpus > 1 or (actor.tensor_parallel > 1 and actor.num_gpus not in (0, 1)),
            f"{key}.num_gpus={actor.num_gpus:g} is counted for each of the engine's {key}.tensor_parallel="
            f"{actor.tensor_parallel} ranks: use 1 and raise {key}.tensor_parallel or {key}.count.",
        )
        _refuse(
            actor.max_batched_tokens is not None and actor.max_batched_tokens < c.model.max_len,
            f"{key}.max_batched_tokens={actor.max_batched_tokens} does not hold one sequence: it must be at least "
            f"model.max_len={c.model.max_len}.",
        )


def _draft_actor(c: RunConfig, key: str, actor: ActorConfig) -> None:
    _refuse(
        actor.kind != "draft" and (actor.draft_path is not None or actor.draft_fresh is not None),
        f"{key}.draft_path={actor.draft_path} and {key}.draft_fresh do not go with {key}.kind={actor.kind}: only a "
        "draft actor has a model of its own.",
    )
    if actor.kind != "draft":
        return
    _refuse(
        (actor.draft_path is None) == (actor.draft_fresh is None),
        f"{key}.draft_path={actor.draft_path}: a draft actor needs exactly one of draft_path, a model folder, and "
        "draft_fresh, a small model made and warmed up as the policy is.",
    )
    _refuse(
        actor.draft_fresh is not None and c.model.path is not None,
        f"{key}.draft_fresh makes a model with the task's alphabet, which is not the vocabulary of "
        f"model.path={c.model.path}: give {key}.draft_path.",
    )
    _refuse(
        c.evaluation.dense_actor is False,
        f"evaluation.dense_actor=false would evaluate the draft of {key} instead of the policy: leave it null or true.",
    )


def _companions(c: RunConfig) -> None:
    """What is trained beside the policy, or through the actors' attention."""
    learner, actors = c.learner, list(c.actor.items())
    same_rule = all(a.sparse is not None and a.sparse == actors[0][1].sparse for _, a in actors)
    sparse_only = {"learner.distill": learner.distill is not None, "learner.train_sparse": learner.train_sparse}
    for key, on in sparse_only.items():
        _refuse(
            on and not same_rule,
            f"{key} needs every actor to be sparse with one and the same actor.*.sparse section: it has "
            f"{', '.join(f'actor.{label}.kind={a.kind}' for label, a in actors)}.",
        )
    if learner.distill is not None:
        _refuse(learner.train_sparse, "learner.distill and learner.train_sparse=true are two methods: choose one.")
        _refuse(
            learner.lora is not None,
            "learner.distill puts its own adapters on a policy that is trained whole: leave learner.lora=null.",
        )
        _refuse(
            learner.zero_stage == 3,
            "learner.zero_stage=3 splits the weights that learner.distill's sparse copy shares: choose 0, 1 or 2.",
        )
        _refuse(
            learner.distill.kl == "topk" and c.rollout.logprobs_k < 1,
            f"learner.distill.kl=topk needs the actors' top log-probs, and rollout.logprobs_k={c.rollout.logprobs_k}.",
        )
        _refuse(
            c.correction.dvp is not None,
            f"correction=[{','.join(c.correction.names)}] cannot go with learner.distill: to dvp a token outside the "
            "policy's safe set has no log-prob for the sparse copy to follow; leave one of the two out.",
        )
    kinds = {a.kind for _, a in actors}
    _refuse(
        learner.draft is not None and (kinds != {"draft"} or len(actors) > 1),
        "learner.draft trains the draft on its own rollouts: every actor must be of one and the same kind=draft "
        "(actor=draft).",
    )
    _refuse(
        learner.draft is not None and c.correction.dvp is not None,
        f"correction=[{','.join(c.correction.names)}] cannot go with learner.draft: its learner takes log-probs over "
        "the whole vocabulary, and dvp's actors sample from the safe set; leave one of the two out.",
    )
    several = learner.distill is not None or "draft" in kinds
    _refuse(
        several and c.cluster.transport in ("nccl", "gloo"),
        f"cluster.transport={c.cluster.transport} sends one set of weights to all, and this run has actors with "
        "weights of their own: choose object_store or disk.",
    )


def _sparse_section(key: str, actor: ActorConfig) -> None:
    _refuse(
        (actor.kind == "sparse") != (actor.sparse is not None),
        f"{key}.kind={actor.kind} {'needs' if actor.kind == 'sparse' else 'takes no'} {key}.sparse section: choose "
        "actor=sparse for both.",
    )
    if actor.sparse is not None:
        _refuse(
            (actor.sparse.blocks is None) == (actor.sparse.share is None),
            f"{key}.sparse.blocks={actor.sparse.blocks} and {key}.sparse.share={actor.sparse.share}: give exactly "
            "one of the two, the budget in pages or as a share of the context.",
        )


def _quantisation(key: str, actor: ActorConfig) -> None:
    on_cpu = actor.num_gpus == 0
    _refuse(
        actor.fp8_kv_cache and on_cpu,
        f"{key}.fp8_kv_cache=true needs a GPU: CPUs have no FP8 kernels (set {key}.num_gpus=1).",
    )
    _refuse(
        actor.fp8_kv_cache and actor.kind not in ("bf16", "fp8"),
        f"{key}.fp8_kv_cache=true does not go with {key}.kind={actor.kind}: choose kind=bf16 or fp8.",
    )
    _refuse(
        actor.rounding != "none" and actor.kind not in ("bf16", "fp8"),
        f"{key}.rounding={actor.rounding} would hide {key}.kind={actor.kind} in what trajectories say of their actor: "
        "use rounding=none, or kind=bf16 or fp8.",
    )
    _refuse(
        actor.rounding != "none" and not on_cpu,
        f"{key}.rounding={actor.rounding} emulates low precision on CPU, and {key}.num_gpus={actor.num_gpus:g} has the "
        "real thing: use rounding=none with kind=fp8.",
    )
    _refuse(
        actor.scales != "tensor" and actor.rounding == "none" and actor.kind != "fp8",
        f"{key}.scales={actor.scales} is about quantised weights, and {key}.kind={actor.kind} has none: leave it "
        "tensor.",
    )
    _refuse(
        actor.kind == "fp8" and on_cpu and actor.rounding == "none",
        f"{key}.kind=fp8 on CPU has to be emulated: set {key}.rounding to one of fp8, int8, int4, or {key}.num_gpus=1.",
    )


def _learner(c: RunConfig) -> None:
    learner = c.learner
    _refuse(
        learner.attention == "flash_attention_2" and learner.num_gpus == 0,
        "learner.attention=flash_attention_2 needs a GPU: set learner.num_gpus=1 or learner.attention=sdpa.",
    )
    _refuse(
        learner.num_gpus > 1,
        f"learner.num_gpus={learner.num_gpus:g} is per rank, and a rank drives one GPU: raise learner.ranks instead.",
    )
    _refuse(
        learner.ranks > c.schedule.groups_per_step,
        f"learner.ranks={learner.ranks} leaves ranks without data: a group is never split, so schedule.groups_per_step="
        f"{c.schedule.groups_per_step} must be at least as large.",
    )
    _refuse(
        learner.zero_stage == 0 and (learner.dtype == "bfloat16" or (learner.dtype == "auto" and learner.num_gpus > 0)),
        f"learner.zero_stage=0 would accumulate gradients in bfloat16, which learner.dtype={learner.dtype} with "
        f"learner.num_gpus={learner.num_gpus:g} means: choose 1, 2 or 3, or learner.dtype=float32.",
    )


def _transport(c: RunConfig) -> None:
    without = [f"actor.{label}" for label, actor in c.actor.items() if actor.num_gpus == 0]
    if c.learner.num_gpus == 0:
        without.insert(0, "learner")
    _refuse(
        c.cluster.transport == "nccl" and bool(without),
        f"cluster.transport=nccl joins GPUs, and {' and '.join(without)} has num_gpus=0: use object_store or disk.",
    )


def _evaluation(c: RunConfig) -> None:
    _refuse(
        c.task.name in c.evaluation.tasks,
        f"evaluation.tasks.{c.task.name} repeats the training task, which is evaluated anyway: give it another label.",
    )


def _checkpoint(c: RunConfig) -> None:
    best = c.checkpoint.keep_best
    starts = [f"eval/{label}/" for label in (c.task.label, *c.evaluation.tasks)]
    _refuse(
        best is not None and not best.startswith(tuple(starts)),
        f"checkpoint.keep_best={best} is no held-out result of this run: it must begin with {' or '.join(starts)}.",
    )


RULES = (
    _model,
    _rollout,
    _corrections,
    _rapid,
    _algorithm,
    _schedule,
    _actors,
    _companions,
    _learner,
    _transport,
    _evaluation,
    _checkpoint,
)
