"""Log-probs of learner and actors that are equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.config.parts.part_facts import PartFacts
from rlcore.config.schema import RunConfig
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse


class BitwisePart(PartFacts):
    """`bitwise`: every setting under which the same weights would give other bits is refused."""

    name, without = "bitwise", "bitwise=false"

    def setting(self, c: RunConfig) -> str:
        return "bitwise=true" if c.bitwise else ""

    def check_used(self, c: RunConfig) -> None:
        for other, used, why in _run(c):
            refuse(used, f"bitwise=true cannot be combined with {other}, {why}.")
        for label, actor in c.actor.items():
            for other, used, why in _actor(c, label, actor):
                key = f"actor.{label}.{other}"
                refuse(used, f"bitwise=true cannot be combined with {key}, {why}.")

    def job(self, c: RunConfig) -> Mapping[str, Any]:
        return {"bitwise_positions": c.model.max_len}

    def unplanned(self, c: RunConfig, *, by_gpu: bool) -> str:
        if not (by_gpu and c.bitwise):
            return ""
        return (
            "bitwise=true cannot be planned by gpu=, which knows no time of its operations: give "
            "rates=FILE, of such a run, or plan with bitwise=false."
        )

    def plain(self, c: RunConfig) -> RunConfig:
        return c.model_copy(update={"bitwise": False})  # a kept model is that of any run


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
    slow = "which leaves steps to vLLM's own kernels: use true"
    yield "cluster.cpu_fast_paths=false", not c.cluster.cpu_fast_paths, slow
    threads = learner.max_threads
    yield f"learner.max_threads={threads}", isinstance(threads, int), one


def _actor(c: RunConfig, label: str, actor: ActorSpec) -> Iterator[tuple[str, bool, str]]:
    unproven = "which is not proven so: leave it out"
    yield f"engine={actor.engine}", "bits" not in actor.facts(f"actor.{label}").provides, unproven
    yield f"num_gpus={actor.num_gpus:g}", not actor.on_cpu, unproven
    yield f"kind={actor.kind}", actor.kind not in ("bf16", "fp8"), "another policy: use bf16"
    rounds = actor.rounding != "none" and c.learner.round_as != label
    yield f"rounding={actor.rounding}", rounds, f"another policy: use learner.round_as={label}"
    another = "another policy than the learner's: leave it out"
    yield f"activations={actor.activations}", actor.activations != "none", another
    plain = c.learner.round_as not in (None, label)
    yield f"rounding={actor.rounding}", plain, "another policy than learner.round_as: leave it out"
    yield f"dtype={actor.dtype}", actor.compute_dtype != "float32", unproven
    one = "which divides sums by size: use 1"
    yield f"num_cpus={actor.num_cpus:g}", actor.num_cpus >= 2, one
    yield f"tensor_parallel={actor.tensor_parallel}", actor.tensor_parallel > 1, unproven
    wrong = actor.wrong_logits or "temperature_scale"
    off = bool(actor.wrong_logits) or actor.temperature_scale != 1
    yield f"{wrong}={getattr(actor, wrong):g}", off, "which is an error on purpose: leave it out"
