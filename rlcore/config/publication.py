"""Rules on what is published and how it travels: pure functions of a `RunConfig`."""

from __future__ import annotations

from rlcore.config.schema import RunConfig
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse


def check_adapters(c: RunConfig) -> None:
    """Adapters that are published by themselves (publish=adapter)."""
    learner = c.learner
    copy = learner.distill.lora if learner.distill is not None else None
    for name, lora in {"lora": learner.lora, "distill.lora": copy}.items():
        if lora is None or lora.publish == "merged":
            continue
        key = f"learner.{name}.publish=adapter"
        refuse(
            c.cluster.transport in ("nccl", "ipc"),
            f"{key} does not go with cluster.transport={c.cluster.transport}, whose receivers load "
            "whole weights: use object_store or disk, or publish=merged.",
        )
        refuse(
            learner.draft is not None,
            f"{key} does not go with learner.draft, whose KL is to the whole policy: use "
            "publish=merged.",
        )
        for label, actor in c.actor.items():
            _adapter_over(key, label, actor)


def _adapter_over(key: str, label: str, actor: ActorSpec) -> None:
    """Whether an actor may have an adapter beside its weights. A draft has weights of its own."""
    precision = actor.kind if actor.rounding == "none" else actor.rounding
    # Quantised actors here serve the quantised sum; quantised weights with an adapter beside them
    # are another policy.
    refuse(
        actor.kind == "fp8" or actor.rounding != "none",
        f"{key} does not go with actor.{label}, which quantises the sum of weights and adapter to "
        f"{precision}: use publish=merged, or kind=bf16 with rounding=none.",
    )
    refuse(
        actor.kind != "draft" and actor.engine != "vllm",
        f"{key} is computed by vLLM, and actor.{label}.engine={actor.engine} is another: use "
        "publish=merged.",
    )


def check_transport(c: RunConfig) -> None:
    """Whether what is published can travel as asked."""
    transport = c.cluster.transport
    # A broadcast reaches every member of the group with the same tensors.
    several = c.learner.distill is not None or any(a.kind == "draft" for a in c.actor.values())
    refuse(
        several and c.cluster.joined,
        f"cluster.transport={transport} sends one set of weights to all, and this run has actors "
        "with weights of their own: choose object_store or disk.",
    )
    if c.cluster.whole_every > 1:
        _deltas(c)
    if transport in ("nccl", "ipc"):
        _engine_transfer(c, transport)


def _deltas(c: RunConfig) -> None:
    """Publications that send what changed."""
    key = f"cluster.whole_every={c.cluster.whole_every}"
    refuse(
        c.cluster.transport not in ("object_store", "nccl"),
        f"{key} sends patches, which cannot travel by cluster.transport={c.cluster.transport}: use "
        "object_store or nccl, or whole_every=1.",
    )
    for label, actor in c.actor.items():
        refuse(
            c.cluster.transport == "nccl" and actor.quantised_by_engine,
            f"{key} with cluster.transport=nccl writes what changed into weights as they were "
            f"published, and actor.{label}.kind={actor.kind} holds them quantised: use "
            "cluster.transport=object_store, or whole_every=1.",
        )
    refuse(
        c.learner.distill is not None or c.learner.draft is not None,
        f"{key} is for runs that publish the policy alone, and learner.distill and learner.draft "
        "publish further weights: use whole_every=1.",
    )
    refuse(
        c.learner.lora is not None and c.learner.lora.publish == "adapter",
        f"{key} saves nothing with learner.lora.publish=adapter, of which every entry changes: use "
        "whole_every=1.",
    )


def _engine_transfer(c: RunConfig, transport: str) -> None:
    """Engines that receive weights by themselves, from GPU to GPU."""
    gpus = {"learner": c.learner.num_gpus} | {
        f"actor.{label}": actor.num_gpus for label, actor in c.actor.items()
    }
    without = [role for role, count in gpus.items() if count == 0]
    refuse(
        bool(without),
        f"cluster.transport={transport} joins GPUs, and {' and '.join(without)} "
        f"{'has' if len(without) == 1 else 'have'} num_gpus=0: use object_store or disk.",
    )
    colocated = c.schedule.colocated
    refuse(
        transport == "nccl" and colocated,
        "cluster.transport=nccl cannot join two processes on one GPU, and schedule.colocated=true "
        "gives engines and learner the same ones: use ipc.",
    )
    shared = [role for role, count in gpus.items() if count < 1]
    refuse(
        transport == "nccl" and bool(shared),
        f"cluster.transport=nccl cannot join two processes on one GPU, and {' and '.join(shared)} "
        "asks for a share of one (num_gpus below 1): use ipc, or num_gpus=1.",
    )
    refuse(
        transport == "ipc" and len(shared) < len(gpus) and not colocated,
        "cluster.transport=ipc reads the learner's memory on the same GPU, so learner.num_gpus and "
        "actor.*.num_gpus must be shares of one, such as 0.5 each, or schedule.colocated=true has "
        "them take turns: use nccl for GPUs of their own.",
    )
    foreign = [label for label, actor in c.actor.items() if actor.engine != "vllm"]
    refuse(
        bool(foreign),
        f"cluster.transport={transport} is vLLM's, and actor.{''.join(foreign[:1])}.engine is "
        "another: use object_store or disk.",
    )
    dtypes = sorted({actor.compute_dtype for actor in c.actor.values()})
    refuse(
        len(dtypes) > 1,
        f"cluster.transport={transport} sends one set of weights in one dtype, and actors have "
        f"{' and '.join(dtypes)}: give every actor.*.dtype the same, or use object_store.",
    )
