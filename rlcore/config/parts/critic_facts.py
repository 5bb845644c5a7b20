"""A model of values that is trained with the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.config.kinds import shown
from rlcore.config.parts.part_facts import NO_WORK, Adapted, PartFacts, Work
from rlcore.config.schema import RunConfig
from rlcore.engine_facts import RankLoad
from rlcore.learner.specs import CriticSpec
from rlcore.models.sizes import ModelSizes, Parts, total
from rlcore.objectives.specs import advantage_class
from rlcore.spec import Spec, refuse


class CriticPart(PartFacts):
    """`critic`."""

    name, without = "critic", "critic=none"
    in_rates = True
    methods = ("outputs",)

    def setting(self, c: RunConfig) -> str:
        return f"critic.kind={c.critic.kind}" if c.critic.trained else ""

    def check(self, c: RunConfig) -> None:
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
        super().check(c)

    def check_used(self, c: RunConfig) -> None:
        _bootstrap(c)
        _traces(c)

    def job(self, c: RunConfig) -> Mapping[str, Any]:
        return {"critic": c.critic}

    def described(self, c: RunConfig) -> Mapping[str, Spec]:
        return {"critic": c.critic}

    def memory(self, c: RunConfig, sizes: ModelSizes, adapted: Adapted) -> Parts:
        """A critic's own model and optimizer: its passes follow the policy's and need no more, and
        a head on the policy's states hardly any."""
        if c.critic.kind != "model":
            return {}
        load = RankLoad(trained=adapted(c.critic.lora))
        held = c.learner.facts.rank_memory(sizes, c.learner, load)
        return {"critic": total(held.waiting)} if held is not None else {}

    def work(self, c: RunConfig, parameters: float) -> Work:
        """Values are taken before a phase; a head's step makes a pass over the policy's layers,
        which it does not train."""
        if not c.critic.trained:
            return NO_WORK
        whole = c.critic.kind == "model"
        return Work(parameters if whole else 0.0, (6 if whole else 2) * parameters, 2 * parameters)

    def plain(self, c: RunConfig) -> RunConfig:
        return c.model_copy(update={"critic": CriticSpec()})


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
