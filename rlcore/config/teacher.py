"""Rules of runs with a teacher: what it needs, and what it is combined with."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.schema import RunConfig
from rlcore.corrections.dvp import DvpSpec
from rlcore.spec import refuse


def check_teacher(c: RunConfig) -> None:
    """A teacher whose scores are those of the policy's tokens, and a run that learns something."""
    kind = f"teacher.kind={c.teacher.kind}"
    refuse(
        c.algorithm.reward_weight == 0 and not c.teacher.used,
        "algorithm.reward_weight=0 leaves nothing to learn from without a teacher: use "
        "teacher=frozen, previous or policy, or a weight above 0.",
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
    refuse(
        c.algorithm.kl_in_loss and c.algorithm.kl_estimator == "full",
        f"algorithm.kl_estimator=full and {kind} both take another policy whole in the pass that "
        "is differentiated: use kl_estimator=k1, k2 or k3, or algorithm.kl_coef=0.",
    )
    for other, used in _unproven(c):
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


def _unproven(c: RunConfig) -> Iterator[tuple[str, bool]]:
    """(settings, they are used) that a teacher has not been shown to teach under."""
    learner = c.learner
    for name in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        yield f"learner.{name}={getattr(learner, name)}", getattr(learner, name) > 1
    place = learner.offload.optimizer
    yield f"learner.offload.optimizer={place}", place != "none"
    for name in ("distill", "draft"):
        yield f"learner.{name}", getattr(learner, name) is not None
    for name in ("train_sparse", "router_replay"):
        yield f"learner.{name}=true", getattr(learner, name)
    yield f"learner.round_as={learner.round_as}", learner.round_as is not None
    yield "bitwise=true", c.bitwise
    yield "model.diffusion", c.model.diffusion is not None
    yield f"critic.kind={c.critic.kind}", c.critic.trained
    # its weights are written whole, by one rank
    yield "learner.zero_stage=3", c.teacher.kind == "previous" and learner.zero_stage == 3
