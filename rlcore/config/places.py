"""Rules on engines and learner ranks that share a GPU: in turns (schedule.colocated), or each with
a part of it (num_gpus below 1)."""

from __future__ import annotations

import math

from rlcore.config.schema import RunConfig
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse

KEY = "schedule.colocated=true"
ENGINES = 0.7  # of a GPU's memory, that engines beside a learner may plan with


def check_colocated(c: RunConfig) -> None:
    """Check which roles may take turns on a GPU, and how many of each."""
    if not c.schedule.colocated:
        return
    for label, actor in c.actor.items():
        _engine(label, actor)
    _no_further_engine(c)
    _places(c)


def _engine(label: str, actor: ActorSpec) -> None:
    key = f"actor.{label}"
    refuse(
        "sleep" not in actor.facts(key).provides,
        f"{KEY} needs an engine that frees its memory, which {key}.engine={actor.engine} does not: "
        "use engine=vllm.",
    )
    refuse(
        actor.tensor_parallel > 1,
        f"{KEY} pairs an engine with the learner rank of one GPU, and {key}.tensor_parallel="
        f"{actor.tensor_parallel} spans several: use 1, or its own GPUs.",
    )


def _no_further_engine(c: RunConfig) -> None:
    drafts = [label for label, actor in c.actor.items() if actor.own_model]
    refuse(
        bool(drafts),
        f"{KEY} cannot be combined with actor.{''.join(drafts[:1])}.kind=draft, whose run has a "
        "further engine for evaluations (and learner.draft further ranks) without a GPU to take "
        "turns on: use schedule.colocated=false; each process can then have a share of the GPU.",
    )
    refuse(
        bool(c.evaluation.dense_actor),
        f"{KEY} cannot be combined with evaluation.dense_actor=true, an engine without a GPU to "
        "take turns on: leave it null.",
    )


def _places(c: RunConfig) -> None:
    gpus = _gpus(c)
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
        f"{KEY} cannot be combined with cluster.launch.learner_nodes={nodes}, which gives the "
        "learner its own nodes: leave it 0.",
    )


def check_gpu_shares(c: RunConfig) -> None:
    """Check that shares of GPUs come in pairs: Ray alone would put two ranks on one GPU and the
    engines that read their memory on another. Where a run has a further engine, nothing is paired,
    and all processes have shares of one GPU."""
    gpus = _gpus(c)
    share = next((f"{role}.num_gpus={n:g}" for role, n in gpus.items() if 0 < n < 1), None)
    if share is None or c.schedule.colocated:
        return
    nodes = c.cluster.launch.learner_nodes
    refuse(
        nodes > 0,
        f"{share} cannot be combined with cluster.launch.learner_nodes={nodes}, which gives the "
        "learner its own nodes: leave it 0.",
    )
    if further := _further_engine(c):
        return _of_one_gpu(c, f"{share} and {further}")
    for label, actor in c.actor.items():
        together = actor.num_gpus + c.learner.num_gpus
        refuse(
            not (0 < actor.num_gpus < 1 and 0 < c.learner.num_gpus < 1 and together <= 1),
            f"{share} is a share of a GPU, which one engine and one learner rank have together: "
            f"learner.num_gpus={c.learner.num_gpus:g} and actor.{label}.num_gpus="
            f"{actor.num_gpus:g} must be such shares too, of 1 at most, as 0.5 each is.",
        )
    engines, ranks = sum(a.count for a in c.actor.values()), c.learner.ranks
    refuse(
        engines != ranks,
        f"{share} pairs every engine with a learner rank on one GPU, and actor.*.count={engines} "
        f"in all is not learner.ranks={ranks}: give both the same number, or whole GPUs.",
    )


def _further_engine(c: RunConfig) -> str:
    """The setting that brings an engine for evaluations alone; "" if none does."""
    drafts = [label for label, actor in c.actor.items() if actor.own_model]
    if drafts:
        return f"actor.{drafts[0]}.kind=draft"
    return "evaluation.dense_actor=true" if c.evaluation.dense_actor else ""


def _of_one_gpu(c: RunConfig, why: str) -> None:
    """Check that all processes fit on one GPU, a further engine of the first actor's settings and a
    trained draft's rank among them."""
    why = f"{why} have all processes on one GPU"
    actors, learner = [*c.actor.values()], c.learner
    ranks = [learner.ranks, *([] if learner.draft is None else [learner.draft.ranks])]
    several = [key for key, n in zip(("learner", "learner.draft"), ranks) if n > 1]
    engines = [*(a for a in actors for _ in range(a.count)), actors[0]]
    shares = [*(a.num_gpus for a in engines), *[learner.num_gpus] * sum(ranks)]
    refuse(
        c.cluster.transport not in ("object_store", "disk"),
        f"{why}, where cluster.transport={c.cluster.transport} does not reach the further engine: "
        "use cluster.transport=object_store.",
    )
    refuse(
        bool(several),
        f"{why}, where a learner has one rank: use "
        f"{' and '.join(f'{key}.ranks=1' for key in several)}, or whole GPUs.",
    )
    each = math.floor(100 / len(shares)) / 100
    keys = ["learner", *(f"actor.{label}" for label in c.actor)]
    refuse(
        min(shares) == 0 or max(shares) == 1 or sum(shares) > 1 + 1e-9,
        f"{why}, and the shares of {len(shares)} must be above 0 and 1 at most in all, where they "
        f"are {sum(shares):g}: use {' and '.join(f'{key}.num_gpus={each:g}' for key in keys)}.",
    )
    memory = sum(a.gpu_memory_utilization for a in engines)
    most = math.floor(100 * ENGINES / len(engines)) / 100
    refuse(
        memory > ENGINES + 1e-9,
        f"{why}, of whose memory {len(engines)} engines take {memory:g}: use "
        f"{' and '.join(f'{key}.gpu_memory_utilization={most:g}' for key in keys[1:])}.",
    )


def tied_by(c: RunConfig) -> str | None:
    """The setting that ties every engine to the GPU of a learner rank, or None."""
    if c.schedule.colocated:
        return KEY
    if _further_engine(c):  # its processes lie on one GPU in any order
        return None
    shares = (f"{role}.num_gpus={n:g}" for role, n in _gpus(c).items() if 0 < n < 1)
    return next(shares, None)


def _gpus(c: RunConfig) -> dict[str, float]:
    actors = {f"actor.{label}": actor.num_gpus for label, actor in c.actor.items()}
    return {"learner": c.learner.num_gpus} | actors
