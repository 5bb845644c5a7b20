"""Rules on engines and learner that have the same GPUs in turn: pure functions of a `RunConfig`.
What concerns the schedule alone is in `ScheduleSpec.check`."""

from __future__ import annotations

from rlcore.config.schema import RunConfig
from rlcore.learner.part_rules import PARTS
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse

KEY = "schedule.colocated=true"


def check_colocated(c: RunConfig) -> None:
    """What may take turns, and how many of each."""
    if not c.schedule.colocated:
        refuse(
            c.learner.offload_while_sampling,
            "learner.offload_while_sampling=true makes room for engines on the learner's own GPUs, "
            "which schedule.colocated=false gives it alone: leave it false.",
        )
        return
    for label, actor in c.actor.items():
        _engine(label, actor)
    for name in PARTS:
        refuse(
            getattr(c.learner, name) > 1,
            f"{KEY} is not proven with learner.{name}={getattr(c.learner, name)}: use 1, or GPUs "
            "of the learner's own.",
        )
    _no_further_engine(c)
    _places(c)


def _engine(label: str, actor: ActorSpec) -> None:
    key = f"actor.{label}"
    refuse(
        actor.engine != "vllm",
        f"{KEY} needs an engine that frees its memory, which {key}.engine={actor.engine} does not: "
        "use engine=vllm.",
    )
    refuse(
        actor.tensor_parallel > 1,
        f"{KEY} pairs an engine with the learner rank of one GPU, and {key}.tensor_parallel="
        f"{actor.tensor_parallel} spans several: use 1, or GPUs of its own.",
    )


def _no_further_engine(c: RunConfig) -> None:
    drafts = [label for label, actor in c.actor.items() if actor.kind == "draft"]
    refuse(
        bool(drafts),
        f"{KEY} does not go with actor.{''.join(drafts[:1])}.kind=draft, whose run has a further "
        "engine for evaluations (and learner.draft further ranks) without a GPU to take turns on.",
    )
    refuse(
        bool(c.evaluation.dense_actor),
        f"{KEY} does not go with evaluation.dense_actor=true, an engine without a GPU to take "
        "turns on: leave it null.",
    )


def _places(c: RunConfig) -> None:
    gpus = {"learner": c.learner.num_gpus} | {f"actor.{n}": a.num_gpus for n, a in c.actor.items()}
    refuse(
        set(gpus.values()) not in ({0}, {1}),
        f"{KEY} gives every role the whole of its GPU in turn, so each num_gpus must be 1, or each "
        f"0 on a CPU: it has {', '.join(f'{role}.num_gpus={n:g}' for role, n in gpus.items())}.",
    )
    engines, ranks = sum(a.count for a in c.actor.values()), c.learner.ranks
    refuse(
        engines < ranks,
        f"{KEY} pairs every learner rank with an engine, and learner.ranks={ranks} is more than "
        f"actor.*.count={engines} in all: give both the same number.",
    )
    refuse(
        c.cluster.transport == "ipc" and engines > ranks,
        f"cluster.transport=ipc reads a learner rank's memory on each engine's GPU, and actor.*."
        f"count={engines} in all is more than learner.ranks={ranks}: use object_store, or as many.",
    )
    nodes = c.cluster.launch.learner_nodes
    refuse(
        nodes > 0,
        f"{KEY} does not go with cluster.launch.learner_nodes={nodes}, which gives the learner "
        "nodes of its own: leave it 0.",
    )
