"""Models that are trained with the policy so that actors sample with them: a sparse copy and a
draft. Here too: the policy that attends as its sparse actors do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.config.parts.part_facts import PartFacts, Sent
from rlcore.config.schema import RunConfig
from rlcore.corrections.tis import TisSpec
from rlcore.learner.specs import DRAFT, SPARSE_COPY, LearnerJob, LoraSpec
from rlcore.models.sizes import folder_parameters, fresh_parameters
from rlcore.spec import Spec, refuse


def _of_one_rule(c: RunConfig, key: str) -> None:
    """Require actors that all attend by the rule that the learner follows."""
    actors = list(c.actor.items())
    rules = [actor.sparse for _, actor in actors]
    kinds = ", ".join(f"actor.{label}.kind={actor.kind}" for label, actor in actors)
    refuse(
        rules[0] is None or any(rule != rules[0] for rule in rules),
        f"{key} needs every actor to be sparse with one and the same actor.*.sparse section: "
        f"it has {kinds}.",
    )


def _rule(c: RunConfig) -> Mapping[str, Any]:
    return {"sparse": next(iter(c.actor.values())).sparse}


def _unplanned(setting: str) -> str:
    if not setting:
        return ""
    return (
        f"{setting} cannot be planned: the time of a companion is not simulated. Plan the run "
        "without it."
    )


class SparseTrainingPart(PartFacts):
    """`learner.train_sparse`: the policy attends by the actors' rule."""

    name, without = "sparse training", "train_sparse=false"
    with_experts = True

    def setting(self, c: RunConfig) -> str:
        return "learner.train_sparse=true" if c.learner.train_sparse else ""

    def check_used(self, c: RunConfig) -> None:
        _of_one_rule(c, "learner.train_sparse")

    def job(self, c: RunConfig) -> Mapping[str, Any]:
        return _rule(c)

    def plain(self, c: RunConfig) -> RunConfig:
        learner = c.learner.model_copy(update={"train_sparse": False})
        return c.model_copy(update={"learner": learner})


class SparseCopyPart(PartFacts):
    """`learner.distill`: adapters that make sparse actors follow the dense policy."""

    name, without = "sparse copy", "learner.distill=null"
    kind, weights = "sparse", SPARSE_COPY
    with_experts = True  # with adapters, which a mixture refuses itself

    def setting(self, c: RunConfig) -> str:
        return "learner.distill" if c.learner.distill is not None else ""

    def check_used(self, c: RunConfig) -> None:
        _of_one_rule(c, "learner.distill")
        assert c.learner.distill is not None
        # the learner's own top k is not what the sparse actors drew from
        refuse(
            c.learner.distill.kl == "topk" and c.rollout.logprobs_k < 1,
            "learner.distill.kl=topk needs the actors' top log-probs, and "
            f"rollout.logprobs_k={c.rollout.logprobs_k}: use at least 1.",
        )

    def described(self, c: RunConfig) -> Mapping[str, Spec]:
        assert c.learner.distill is not None
        return {"distill": c.learner.distill}

    def adapters(self, c: RunConfig) -> LoraSpec | None:
        return c.learner.distill.lora if c.learner.distill is not None else None

    def published(self, c: RunConfig, sent: Sent, alphabet: int) -> int:
        return sent(self.adapters(c))

    def job(self, c: RunConfig) -> Mapping[str, Any]:
        return _rule(c)

    def unplanned(self, c: RunConfig, *, by_gpu: bool) -> str:
        return _unplanned(self.setting(c))

    def plain(self, c: RunConfig) -> RunConfig:
        return c.model_copy(update={"learner": c.learner.model_copy(update={"distill": None})})


# fields of the policy's job that a draft's ranks have, too
_SHARED = (
    *("sampling", "task_advantages", "task_temperatures", "total_steps", "run_seed", "pad_id"),
    *("in_flight", "threads", "cpu_fast_paths"),
)


class DraftPart(PartFacts):
    """`learner.draft`: a second learner, of the draft that every actor samples with."""

    name, without = "trained draft", "learner.draft=null"
    kind, weights = "draft", DRAFT
    with_experts = True

    def setting(self, c: RunConfig) -> str:
        return "learner.draft" if c.learner.draft is not None else ""

    def check_used(self, c: RunConfig) -> None:
        phase, period = c.schedule.phases.steps, c.schedule.steps_per_publish
        # Resumed between two publishes, the draft would follow a newer policy than uninterrupted.
        refuse(
            c.schedule.synchronous and phase < period,
            f"schedule.steps_per_publish={period} with phases of {phase} steps and "
            "schedule.max_staleness=0 cannot be combined with learner.draft, which follows the "
            f"policy as it was published: use steps_per_publish={phase}.",
        )
        refuse(
            len(c.actor) > 1 or any(not a.own_model for a in c.actor.values()),
            "learner.draft trains the draft on its own rollouts: every actor must be of one and "
            "the same kind=draft (actor=draft).",
        )

    def described(self, c: RunConfig) -> Mapping[str, Spec]:
        assert c.learner.draft is not None
        return {"draft": c.learner.draft}

    def unplanned(self, c: RunConfig, *, by_gpu: bool) -> str:
        return _unplanned(self.setting(c))

    def published(self, c: RunConfig, sent: Sent, alphabet: int) -> int:
        draft = next(iter(c.actor.values()))
        if draft.draft_path is not None:
            return folder_parameters(draft.draft_path)
        return fresh_parameters(draft.draft_fresh, alphabet) if draft.draft_fresh else 0

    def own_job(self, c: RunConfig, policy: LearnerJob) -> LearnerJob | None:
        """The policy's own settings on the draft's model, with a KL to the policy."""
        draft, path = c.learner.draft, next(iter(c.actor.values())).draft_path
        assert draft is not None and path is not None
        # Adapters would be the policy's: a draft is small enough to be trained whole.
        without = {"lora": None, "draft": None, "round_as": None, "router_replay": False}
        own = {"ranks": draft.ranks, "lr": draft.lr}
        kl = {"kl_coef": draft.kl_coef, "kl_estimator": draft.kl_estimator, "kl_in": "loss"}
        return LearnerJob(
            model_path=path,
            learner=policy.learner.model_copy(update=own | without),
            objective=policy.objective.model_copy(update=kl | {"ratio_to": "p_ref"}),  # tis weighs
            # The actors are the draft itself, so that only its age is to be corrected.
            corrections={"tis": TisSpec()},
            frozen_path=policy.model_path,
            **{name: getattr(policy, name) for name in _SHARED},
        )

    def ranks(self, c: RunConfig) -> int:
        return c.learner.draft.ranks if c.learner.draft is not None else 0
