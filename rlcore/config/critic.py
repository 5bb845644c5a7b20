"""Rules of runs with a critic: the advantages that read its values, and the settings that it cannot
be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.kinds import shown
from rlcore.config.schema import RunConfig
from rlcore.objectives.specs import advantage_class
from rlcore.spec import refuse


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
        _traces(c, kind)
        for other, used in _unproven(c):
            refuse(used, f"{kind} is not proven with {other}: leave that out, or use critic=none.")


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


def _unproven(c: RunConfig) -> Iterator[tuple[str, bool]]:
    """(settings, True if they are used) with which training of a critic is unproven."""
    learner, head = c.learner, c.critic.kind == "value_head"
    for name in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        yield f"learner.{name}={getattr(learner, name)}", getattr(learner, name) > 1
    place = learner.offload.optimizer
    yield f"learner.offload.optimizer={place}", place != "none"
    for name in ("distill", "draft"):
        yield f"learner.{name}", getattr(learner, name) is not None
    for name in ("train_sparse", "router_replay"):
        yield f"learner.{name}=true", getattr(learner, name)
    yield "model.diffusion", c.model.diffusion is not None
    # its trunk is the policy's tensors, whole and without adapters
    yield "learner.zero_stage=3", head and learner.zero_stage == 3
    yield "learner.lora", head and learner.lora is not None
