"""Rules of runs whose actors and learner agree to the bit."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.schema import RunConfig
from rlcore.corrections.dvp import DvpSpec
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse


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
    heat = {f"{c.task_key(n)}": c.rollout_of(n).temperature for n in c.tasks}
    for key, value in heat.items():
        scaled = "by which engine and learner scale logits in other operations: use 1"
        yield f"a temperature of {value:g} of {key}", value != 1, scaled
    for name, on in (("top_p", r.top_p < 1), ("top_k", r.top_k > 0), ("min_p", r.min_p > 0)):
        cut = "whose kept sets engine and learner sum in other orders: leave it off"
        yield f"rollout.{name}={getattr(r, name)}", on, cut
    dvp = any(isinstance(spec, DvpSpec) for spec in c.correction.chosen().values())
    yield "correction=dvp", dvp, "which truncates: leave it out"
    unproven = "which is not proven so: leave it out"
    yield "environments", bool(c.played), unproven
    yield "model.diffusion", c.model.diffusion is not None, unproven
    one = "which divides sums by size: use one core"
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
    one = "which divides sums by size: use one core"
    yield f"num_cpus={actor.num_cpus:g}", actor.num_cpus >= 2, one
    yield f"tensor_parallel={actor.tensor_parallel}", actor.tensor_parallel > 1, unproven
    yield "cpu_fast_path=false", not actor.cpu_fast_path, "vLLM's own kernels: leave it true"
    wrong = actor.wrong_logits or "temperature_scale"
    off = bool(actor.wrong_logits) or actor.temperature_scale != 1
    yield f"{wrong}={getattr(actor, wrong):g}", off, "which is an error on purpose: leave it out"
